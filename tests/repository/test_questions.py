"""The numbering of the questions, their code from memory, and identities that the questions and
docs/errors.md state and no check of an algorithm holds: over enumerated words."""

import re

import grpo
import pytest
import torch
from torch import Tensor
from variants import dr_grpo, ppo

from checks import no_kl, terms
from tests.helpers import ROOT

QUESTIONS = (ROOT / "docs/questions.md").read_text("utf-8")


def numbers(page: str) -> list[int]:
    """The numbers of a page's questions, in its order."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return [int(number) for number in re.findall(r"^### (\d+)\. ", text, re.MULTILINE)]


def test_every_question_has_one_number():
    """Over both pages; the Chinese page has the first one's questions."""
    first = numbers("questions.md")
    both = sorted(first + numbers("questions-more.md"))
    assert both == list(range(1, len(both) + 1))
    assert numbers("zh/questions.md") == first


def code(start: str) -> dict:
    """What the block of code that begins so defines."""
    defined: dict = {"torch": torch}
    exec(re.search(rf"```python\n({re.escape(start)}.+?)```", QUESTIONS, re.DOTALL)[1], defined)
    return defined


def test_grpo_from_memory():
    """Question 72's code is grpo.py's."""
    written = code("def advantages")
    draw = iter(torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(0)).double())
    rewards = torch.cat([(next(draw) > 0).double(), torch.full((1, 5), 0.7)])
    assert same(written["advantages"](rewards), grpo.advantages(rewards))
    assert written["advantages"](rewards)[-1].eq(0).all()
    mask = (torch.arange(5) < torch.tensor([5, 3, 1, 4, 5, 2, 1, 5])[:, None]).double()
    old_logp, A = next(draw), next(draw)[:, 0]
    logp, ref_logp = old_logp + 0.3 * next(draw), old_logp + 0.3 * next(draw)
    policies = {"logp": logp, "old_logp": old_logp, "ref_logp": ref_logp}
    loss, count = written["policy_loss"](*policies.values(), A, mask)
    real, real_count, _ = terms(grpo, grpo.Args(beta=0.01), **policies, advantages=A, mask=mask)
    assert same(loss, real) and count == real_count


def test_a_bonus_for_the_format():
    """Question 87: four of eight wrong answers get 0.1."""
    rewards = torch.tensor([[0.1, 0.0] * 4])
    assert grpo.advantages(rewards)[0, 0].item() == pytest.approx(0.94, abs=0.005)
    assert dr_grpo.advantages(rewards)[0, 0].item() == pytest.approx(0.05)


def distributions(count: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Logits θ with gradient, log π_ref, and log π_old near π_θ, all `[V]`."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(count, generator=generator, dtype=torch.float64) for _ in range(3)]
    theta = draw[0].requires_grad_()
    return theta, draw[1].log_softmax(0), (draw[0].detach() + 0.3 * draw[2]).log_softmax(0)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def test_kl_estimators():
    """Values and gradients of k1, k2, k3 and their like, all words enumerated."""
    theta, ref, old = distributions()
    logp = theta.log_softmax(0)  # [V]
    p, x = logp.exp().detach(), ref - logp  # [V], [V]

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, theta, retain_graph=True)[0]

    k1, k2, k3, reversed_k3 = -x, x**2 / 2, x.exp() - 1 - x, (-x).exp() - 1 + x
    to_ref, from_ref = (logp.exp() * -x).sum(), (ref.exp() * x).sum()
    chi2 = (logp.exp() ** 2 / ref.exp()).sum() - 1
    assert same((p * k1).sum(), to_ref) and same((p * k3).sum(), to_ref)
    assert not same((p * k2).sum(), to_ref) and same((p * reversed_k3).sum(), chi2 - to_ref)
    assert same(gradient((p * k1).sum()), torch.zeros_like(theta))
    assert same(gradient((p * k2).sum()), gradient(to_ref))
    assert same(gradient((p * k3).sum()), gradient(from_ref))
    assert same(gradient((p * k1.detach() * logp).sum()), gradient(to_ref))  # in the reward
    weighted = (old.exp() * (logp - old).exp() * k3).sum()  # r k3 on π_old's samples
    assert same(weighted, to_ref) and same(gradient(weighted), gradient(to_ref))
    assert not same(gradient((old.exp() * k3).sum()), gradient(to_ref))


def test_entropy_falls_with_the_covariance():
    """dH = -η Cov(log π, Â) where every logit moves by η Â, and with π Â in its place where they
    move by η times the gradient of E[Â]."""
    theta, A, _ = distributions()
    logp, step = theta.detach().log_softmax(0), 1e-6
    p = logp.exp()
    A = A - (p * A).sum()

    def entropy(logits: Tensor) -> Tensor:
        return torch.distributions.Categorical(logits=logits).entropy()

    for move in (A, p * A):
        change = (entropy(logp + step * move) - entropy(logp)) / step
        covariance = (p * logp * move).sum() - (p * logp).sum() * (p * move).sum()
        assert torch.isclose(change, -covariance, rtol=1e-4)


def test_what_a_negative_update_does():
    """Δ log π_v = η (π_v + π_y - Σπ²): where the policy is sure only its favourite gains; where it
    is flat all do."""
    step, rare = 1e-6, 4
    for p, gain in (([0.7, 0.1, 0.1, 0.07, 0.03], 1), ([0.2] * 5, 4)):
        logp = torch.tensor(p, dtype=torch.float64).log().requires_grad_()
        slope = torch.autograd.grad(logp.log_softmax(0)[rare], logp)[0]
        moved = ((logp - step * slope).log_softmax(0) - logp).detach() / step
        p = logp.exp().detach()
        others = torch.arange(5) != rare
        law = p + p[rare] - (p**2).sum()
        assert torch.allclose(moved[others], law[others], atol=1e-5)
        assert (moved[others] > 1e-4).sum() == gain and moved[rare] < 0


def test_ppo_from_memory():
    """Question 75's code is variants/ppo.py's."""
    written = code("def gae")
    draw = iter(torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(0)).double())
    mask = (torch.arange(5) < torch.tensor([[5], [3], [1]])).double()
    values, rewards = next(draw) * mask, next(draw) * mask
    A, target = written["gae"](rewards, values, mask, 0.9, 0.8)
    for found, real in zip((A, target), ppo.advantages(rewards, values, mask, 0.9, 0.8)):
        assert same(found, real)
    old_logp, V = next(draw), values + next(draw)
    logp = old_logp + 0.3 * next(draw)
    policy, value = written["ppo"](logp, old_logp, A, V, values, target, mask)
    rest = {"logp": logp, "old_logp": old_logp, "advantages": A, "mask": mask}
    loss, count, _ = terms(ppo, no_kl(ppo), **rest)
    assert same(policy, loss / count)
    assert same(value, ppo.value_loss(V, values, target, mask, 0.2)[0] / mask.sum())


def test_dpo():
    """Loss and gradient at π = π_ref and elsewhere; Z cancels. The same for a reward model's."""
    theta, ref, _ = distributions()
    beta, better, worse = 0.1, 1, 4
    for logits in (ref, theta.detach()):
        logits = logits.clone().requires_grad_()
        logp = logits.log_softmax(0)
        margin = beta * ((logp - ref)[better] - (logp - ref)[worse])
        loss = -torch.nn.functional.logsigmoid(margin)
        gradient = torch.autograd.grad(loss, logits, retain_graph=True)[0]
        apart = torch.autograd.grad(logp[better] - logp[worse], logits)[0]
        assert same(gradient, -beta * torch.sigmoid(-margin).detach() * apart)
        if logits.detach().equal(ref):
            assert loss.item() == pytest.approx(0.6931472)
    R = torch.linspace(-1, 1, 6, dtype=torch.float64)
    best = (ref + R / beta).log_softmax(0)  # π* ∝ π_ref e^(R/β)
    implied = beta * (best - ref)
    assert same(implied - implied[0], R - R[0])
