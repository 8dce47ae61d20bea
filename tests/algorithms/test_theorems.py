"""STAPO's Theorem 3.1, on random softmaxes and on what the embedded model samples."""

import itertools

import torch
from common.rollout import HFEngine
from torch import Tensor


def logit_gradient_norm(logits: Tensor, token: Tensor, factor: Tensor) -> Tensor:
    """|∇_a (factor log softmax(a)[token])|² by autograd, per row."""
    logits = logits.detach().requires_grad_()
    logp = logits.log_softmax(-1).gather(-1, token[:, None])[:, 0]
    return torch.autograd.grad((factor * logp).sum(), logits)[0].square().sum(-1)


def assert_theorem(logits: Tensor, token: Tensor, factor: Tensor) -> None:
    """STAPO's Theorem 3.1: the identity, and both bounds."""
    probs = logits.softmax(-1)
    p, V = probs.gather(-1, token[:, None])[:, 0], logits.shape[-1]
    H = -(probs * logits.log_softmax(-1)).sum(-1)
    norm = logit_gradient_norm(logits, token, factor)
    assert torch.allclose(
        norm, factor**2 * (1 - 2 * p + probs.square().sum(-1)), rtol=1e-9, atol=1e-14
    )
    C = (V - 1) / (V * torch.tensor(float(V)).log() ** 2)
    lower, upper = factor**2 * (1 - 2 * p + (-H).exp()), factor**2 * (2 - 2 * p - C * H**2)
    assert (norm >= lower - 1e-9).all() and (norm <= upper + 1e-9).all()


def test_stapo_theorem_on_random_softmaxes():
    generator = torch.Generator().manual_seed(0)
    for V, scale in itertools.product((2, 5, 50), (0.1, 1.0, 5.0, 20.0)):
        logits = scale * torch.randn(500, V, generator=generator, dtype=torch.float64)
        token = torch.randint(V, (500,), generator=generator)
        assert_theorem(logits, token, torch.randn(500, generator=generator, dtype=torch.float64))


def test_stapo_theorem_on_a_rollout(world, tiny):
    """The same on the tokens that the embedded model samples; and the largest norms are at low p
    and low H."""
    lm, tokenizer = tiny
    prompts = [tokenizer(prompt)["input_ids"] for prompt in ("7*8-9+6=", "3*3*3*3*3*3*3=")]
    rollout = HFEngine(lm, world, 0, "float32", 1024).generate(prompts, 64, 64, 1.0)
    with torch.no_grad():
        logits = lm(rollout.sequences).logits.double()
    where = [(i, int(rollout.prompt_len[i]) + t) for i, t in rollout.mask.nonzero().tolist()]
    picked = torch.stack([logits[i, position - 1] for i, position in where])
    token = torch.tensor([int(rollout.sequences[i, position]) for i, position in where])
    assert_theorem(picked, token, torch.ones(len(token), dtype=torch.float64))
    p = picked.softmax(-1).gather(-1, token[:, None])[:, 0]
    H = -(picked.softmax(-1) * picked.log_softmax(-1)).sum(-1)
    norm = logit_gradient_norm(picked, token, torch.ones_like(p))
    assert norm[(p < 0.05) & (H < 0.5)].mean() > 1.2 > 0.5 > norm[p > 0.5].mean()
