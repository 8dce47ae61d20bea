"""OPD: its gradient is exactly that of the reverse KL; the effect of w and the reward; the
teacher."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import torch
from common.cli import BadInput
from common.distributed import ALONE
from torch import Tensor

from . import ZSCORES, Batch, loss_of, near, one, share, token_mean, written_here


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """w (α Â + β log π_T/π_θ) log π_θ, where only log π_θ has a gradient."""
    ours = b.logp.detach()
    w = (ours - b.mu).exp().clip(max=b.args.is_cap) if b.args.weights == "mu" else 1.0
    A = b.args.reward_weight * b.A[:, None] + b.args.beta * (b.teacher - ours)
    return token_mean(w * A * b.logp, b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """Of all response tokens; strayed are those behind one with log π_T < -4.6 (a hundredth), not
    that token itself."""
    w = (b.logp - b.mu).exp()
    foreign = (b.teacher < -4.6) * b.mask
    weight = w.clip(max=b.args.is_cap) if b.args.weights == "mu" else 0 * w + 1
    return {
        "teacher_kl": share(b.logp - b.teacher, b.mask),
        "strayed": share(foreign.cumsum(1) > foreign, b.mask),
        "weight": share(weight, b.mask),
        "weight_max": (w[b.mask > 0].max(), None),
    }


CASES = [{}, {"is_cap": 1.3, "beta": 0.7, "reward_weight": 0.4}, {"weights": "none"}]


def distributions() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the student and log-probs of teacher and sampler: 5 tokens each."""
    generator = torch.Generator().manual_seed(3)
    theta, teacher, mu = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    return theta, teacher.log_softmax(0), (theta + 0.3 * mu).log_softmax(0)


def mean_gradient(module: ModuleType, draws: Tensor, mu: Tensor, **flags: object) -> Tensor:
    """The mean gradient over tokens drawn by `draws [V]`, computed over all tokens."""
    theta, teacher, _ = distributions()
    theta.requires_grad_()
    logp = theta.log_softmax(0)[:, None]  # [V, 1]: a response for each token
    args = replace(module.Args(), **flags)
    total = 0.0
    for token in range(len(theta)):
        rows = {"logp": logp, "old_logp": logp.detach(), "rollout_logp": mu[:, None]}
        rows |= {"ref_logp": teacher[:, None]}
        rows = {name: x[token : token + 1] for name, x in rows.items()}
        loss, _ = loss_of(module, args, **rows, advantages=one(token)[0], mask=one(1.0))
        total = total + draws[token] * loss
    return torch.autograd.grad(total, theta)[0]


def check_is_the_gradient_of_the_reverse_kl(module: ModuleType) -> None:
    """In the mean over the policy's own tokens the gradient is that of KL(π_θ ‖ π_T), derived by
    autograd. With w this also holds over another sampler's tokens; without w it does not. By
    default the reward has no effect."""
    theta, teacher, mu = distributions()
    theta.requires_grad_()
    pi = theta.log_softmax(0)
    (expected,) = torch.autograd.grad((pi.exp() * (pi - teacher)).sum(), theta)
    own = mean_gradient(module, pi.exp().detach(), pi.detach())
    near(own, expected, "over the policy's own tokens the gradient, against that of the KL")
    other = mean_gradient(module, mu.exp(), mu)
    near(other, expected, "over another sampler's tokens, with w = π_θ/μ")
    assert (mean_gradient(module, mu.exp(), mu, weights="none") - expected).norm() > 1e-2


def check_teacher(module: ModuleType) -> None:
    """The teacher is the requested model, frozen. It is refused if it numbers the student's tokens
    differently or reads fewer tokens than prompt and response. With β = 0 none is loaded."""
    args, (lm, tokenizer) = module.Args(dtype="float32"), module.load_model("tiny-teacher")
    policy = module.frozen_teacher(args, tokenizer, ALONE)
    for ours, its in zip(policy.parameters(), lm.parameters(), strict=True):
        assert torch.equal(ours, its) and not ours.requires_grad
    assert module.frozen_teacher(replace(args, beta=0.0, teacher="none"), tokenizer, ALONE) is None
    words = tokenizer.get_vocab()
    shifted = {word: number + 1 for word, number in words.items()}
    for vocabulary, reads in ((shifted, 256), (words | {"x": 99}, 256), (words, 300)):
        student = SimpleNamespace(get_vocab=vocabulary.copy, model_max_length=reads)
        try:
            module.frozen_teacher(args, student, ALONE)
        except BadInput:
            continue
        raise AssertionError(f"a student of {len(words)} tokens that reads {reads} is not refused")


READS = ("rollout_logp",)
CHECKS = [*written_here(globals()), *ZSCORES]
