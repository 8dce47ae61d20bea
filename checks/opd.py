"""OPD: its gradient is exactly that of the reverse KL; the effect of w and the reward; the
teacher."""

import contextlib
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import torch
from common.cli import BadInput
from common.distributed import ALONE
from torch import Tensor

from . import Run
from .formulas import Batch, share, token_mean
from .harness import POLICIES, RIGHT, ZSCORES, every_sample, loss_of, near


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """J is the token mean of w (α Â + β log π_T/π_θ) log π_θ. Only log π_θ has a gradient."""
    ours = b.logp.detach()
    w = (ours - b.mu).exp().clip(max=b.args.is_cap) if b.args.weights == "mu" else 1.0
    A = b.args.reward_weight * b.A[:, None] + b.args.beta * (b.teacher_logp - ours)
    return token_mean(w * A * b.logp, b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """Means are over all response tokens. strayed counts the tokens after one with log π_T < -4.6
    (a hundredth), but not that token itself."""
    w = (b.logp - b.mu).exp()
    foreign = (b.teacher_logp < -4.6) * b.mask
    weight = w.clip(max=b.args.is_cap) if b.args.weights == "mu" else 0 * w + 1
    pairs = {"weight": share(weight, b.mask), "weight_max": (w[b.mask > 0].max(), "max")}
    if b.args.beta > 0:
        pairs["teacher_kl"] = share(b.logp - b.teacher_logp, b.mask)
        pairs["strayed"] = share(foreign.cumsum(1) > foreign, b.mask)
    return pairs


CASES = [{}, {"is_cap": 1.3, "beta": 0.7, "reward_weight": 0.4}, {"weights": "none"}]
CASES += [{"beta": 0.0, "reward_weight": 1.0}]


def check_is_the_gradient_of_the_reverse_kl(module: ModuleType) -> None:
    """Over all samples of a policy the gradient equals that of KL(π_θ ‖ π_T), which autograd
    derives. With w this also holds over another sampler's samples; without w it does not. By
    default the reward has no effect."""
    own, other, third = POLICIES
    teacher = every_sample(third)[1]
    theta = every_sample(own)[1].requires_grad_()
    pi = theta.log_softmax(0)
    (truth,) = torch.autograd.grad((pi.exp() * (pi - teacher)).sum(), theta, retain_graph=True)

    def gradient(draws: list[int], weights: str) -> Tensor:
        rows, mu = every_sample(draws)
        batch = {"logp": pi, "old_logp": pi, "rollout_logp": mu, "ref_logp": teacher}
        batch = {name: x[rows][:, None] for name, x in batch.items()}  # [n, 1]
        batch |= {"advantages": RIGHT[rows], "mask": torch.ones(len(rows), 1)}
        loss = loss_of(module, replace(module.Args(), weights=weights, is_cap=99.0), **batch)
        return torch.autograd.grad(loss, theta, retain_graph=True)[0]

    near(gradient(own, "none"), truth, "over the policy's own samples, against the KL's gradient")
    near(gradient(other, "mu"), truth, "over another sampler's samples, with w = π_θ/μ")
    assert (gradient(other, "none") - truth).norm() > 1e-2


def check_teacher(module: ModuleType) -> None:
    """The teacher is the requested model, frozen. It is refused if it numbers the student's tokens
    differently or reads fewer tokens than prompt and response. With β = 0 none is loaded."""
    args, (lm, tokenizer) = module.Args(dtype="float32"), module.load_model("tiny-teacher")
    policy = module.frozen_teacher(args, tokenizer, ALONE)
    for ours, its in zip(policy.parameters(), lm.parameters(), strict=True):
        assert torch.equal(ours, its) and not ours.requires_grad
    assert module.frozen_teacher(replace(args, beta=0.0, teacher="none"), tokenizer, ALONE) is None
    shifted = {word: number + 1 for word, number in tokenizer.get_vocab().items()}
    for vocabulary, reads in ((shifted, 256), (tokenizer.get_vocab(), 300)):
        student = SimpleNamespace(get_vocab=vocabulary.copy, model_max_length=reads)
        with contextlib.suppress(BadInput):
            module.frozen_teacher(args, student, ALONE)
            raise AssertionError(f"a student that reads {reads} tokens is not refused")


SHARED = ZSCORES


RUN = Run(
    of_words="--teacher MODEL",
    stored={"reward_weight": 0.3, "is_cap": 1.4, "beta": 0.6, "grad_clip": 28.0},
    refuses=(("--teacher nowhere", "--teacher 'nowhere': no such folder"),),
)
