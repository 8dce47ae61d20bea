"""STAPO's Theorem 3.1, on random softmaxes."""

import itertools

import torch
from torch import Tensor


def assert_theorem(logits: Tensor, token: Tensor, factor: Tensor) -> None:
    """|∇_logits (factor log π(token))|² by autograd: the identity, and both bounds."""
    moved = logits.detach().requires_grad_()
    logp = moved.log_softmax(-1).gather(-1, token[:, None])[:, 0]
    norm = torch.autograd.grad((factor * logp).sum(), moved)[0].square().sum(-1)
    probs = logits.softmax(-1)
    p, V = probs.gather(-1, token[:, None])[:, 0], logits.shape[-1]
    H = -(probs * logits.log_softmax(-1)).sum(-1)
    exact = factor**2 * (1 - 2 * p + probs.square().sum(-1))
    assert torch.allclose(norm, exact, rtol=1e-9, atol=1e-14)
    C = (V - 1) / (V * torch.tensor(float(V)).log() ** 2)
    lower, upper = factor**2 * (1 - 2 * p + (-H).exp()), factor**2 * (2 - 2 * p - C * H**2)
    assert (norm >= lower - 1e-9).all() and (norm <= upper + 1e-9).all()


def test_stapo_theorem_on_random_softmaxes():
    generator = torch.Generator().manual_seed(0)
    for V, scale in itertools.product((2, 5, 50), (0.1, 1.0, 5.0, 20.0)):
        logits = scale * torch.randn(500, V, generator=generator, dtype=torch.float64)
        token = torch.randint(V, (500,), generator=generator)
        assert_theorem(logits, token, torch.randn(500, generator=generator, dtype=torch.float64))
