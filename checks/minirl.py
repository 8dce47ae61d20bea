"""MiniRL: the two roles of μ and π_old, and the paper's first-order claim."""

from types import ModuleType

import torch
from torch import Tensor

from . import Run
from .formulas import Batch, cut_shares, share
from .harness import CENTRED, near, no_kl, terms


def weights(b: Batch) -> Tensor:
    """Return π_θ/μ before its cap; in an ablation π_θ/π_old."""
    return (b.logp - (b.mu if b.args.correct_mismatch else b.old)).exp().detach()


def objective(b: Batch) -> tuple[Tensor, int]:
    """J is the sum over tokens of M w Â log π_θ, which has the surrogate's gradient. The mask M
    sees π_θ/π_old, the weight w sees π_θ/μ."""
    r, A = b.r.detach(), b.A[:, None]
    masked = ((A > 0) & (r > 1 + b.args.clip_high)) | ((A < 0) & (r < 1 - b.args.clip_low))
    x = (~masked * weights(b).clip(max=b.args.is_cap) * A * b.logp * b.mask).sum(1)
    return (x / b.mask.sum(1) if b.args.length_norm else x).mean(), len(b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """Means are over all response tokens. weight_max is the largest π_θ/μ before its cap."""
    return cut_shares(b, b.A[:, None], "masked") | {
        "weight": share(weights(b).clip(max=b.args.is_cap), b.mask),
        "weight_max": (weights(b)[b.mask > 0].max(), "max"),
    }


CASES = [
    {"clip_low": 0.24, "clip_high": 0.2, "is_cap": 1.3},
    {"length_norm": True},
    {"correct_mismatch": False},
]


def check_first_order(module: ModuleType) -> None:
    """The paper's claim holds, with every sequence enumerated. Under samples of μ, surrogate and
    expected reward have the same gradient if π_θ = μ. The gap grows with the distance. Dividing by
    the length breaks the equality at once."""
    generator = torch.Generator().manual_seed(3)
    every = torch.cartesian_prod(*3 * [torch.arange(3)])  # [27, 3]: tokens 0, 1, 2
    earlier = torch.nn.functional.pad(every[:, :-1], (1, 0), value=3)  # 3: the start
    inside = (earlier > 0).cumprod(1)  # up to the first 0, which ends an answer
    once = (every * (1 - inside) == 0).all(1)  # of those with the same answer one
    answers, before, mask = every[once], earlier[once], inside[once].double()  # [answers, 3]
    base, direction = torch.randn(2, 3, 4, 3, generator=generator, dtype=torch.float64)
    rewards = torch.randn(len(mask), generator=generator, dtype=torch.float64)

    def logps(theta: Tensor) -> Tensor:
        return theta.log_softmax(-1)[torch.arange(3), before, answers] * mask  # [answers, 3]

    mu = logps(base)
    near(mu.sum(1).exp().sum(), 1, "the sum of all answers' probabilities")

    def gap(distance: float, **flags: bool) -> float:
        theta = (base + distance * direction).requires_grad_()
        truth = torch.autograd.grad((logps(theta).sum(1).exp() * rewards).sum(), theta)[0]
        args = no_kl(module, clip_low=99.0, clip_high=99.0, is_cap=1e9, **flags)
        weighted = mu.sum(1).exp() * rewards  # E over μ: each sequence counts with its probability
        rest = {"old_logp": mu, "rollout_logp": mu, "advantages": weighted, "mask": mask}
        ours = torch.autograd.grad(-terms(module, args, logp=logps(theta), **rest)[0], theta)[0]
        return float((ours - truth).norm() / truth.norm())

    gaps = [gap(distance) for distance in (0.0, 0.05, 0.1, 0.2, 0.4)]
    near(gaps[0], 0, "at π_θ = μ the distance of the two gradients")
    assert gaps == sorted(gaps) and gaps[-1] > 0.05, f"farther away the gaps are {gaps[1:]}"
    assert gap(0.0, length_norm=True) > 0.1, "with length_norm the gradients are equal, too"


SHARED = CENTRED
BEHAVIOUR = "batch.rollout_logp if args.correct_mismatch else batch.old_logp"
RATIO = "ratio = (logp.detach() - batch.old_logp).exp()"
MUTANTS = {
    "std": ("return centred", "return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)"),
    "mask from π_θ/μ": (RATIO, RATIO.replace("old_logp", "rollout_logp")),
    "weight from π_old": (BEHAVIOUR, BEHAVIOUR.replace("rollout_logp", "old_logp")),
    "weight not detached": ("(logp.detach() - behaviour)", "(logp - behaviour)"),
}


RUN = Run(
    stored={"grad_clip": 60.0},
    needs={"routing_replay": {"model": "model-moe"}},
    refuses=(("--routing_replay r3", "tiny has no experts"),),
)
