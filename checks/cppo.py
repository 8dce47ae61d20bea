"""CPPO: the mask, token after token, and what T is in two implementations."""

from types import ModuleType

import torch
from torch import Tensor

from . import CENTRED, FIXTURE, Batch, loss_and_gradient, near, no_kl, share, toy_batch


def rows(b: Batch) -> tuple[Tensor, Tensor]:
    """Return the tokens that δ_t masks, and those that δ alone would not, by algorithm 1."""
    cut, by_budget = torch.zeros_like(b.mask), torch.zeros_like(b.mask)
    p, mu = b.logp.detach().exp(), b.mu.exp()
    for i, row in enumerate(b.mask):
        at = row.nonzero()[:, 0].tolist()
        D = [abs(float(p[i, t] - mu[i, t])) for t in at]
        T = len(at) if b.args.weight_span == "response" else b.args.max_new_tokens
        budget = torch.tensor(D, dtype=torch.float64).quantile(0.9).item()
        budget = min(max(budget, b.args.budget_low), b.args.budget_high)
        S = W = 0.0
        for number, t in enumerate(at):
            w = 1 - (1 - b.args.weight_min) * number / max(T - 1, 1)
            beyond_delta = w * D[number] > b.args.delta
            beyond_budget = S + w * D[number] > b.args.delta + budget * W
            away = b.A[i] * (p[i, t] - mu[i, t]) > 0
            cut[i, t] = away and (beyond_delta or beyond_budget)
            by_budget[i, t] = away and beyond_budget and not beyond_delta
            S, W = S + w * D[number], W + w
    return cut, by_budget


def objective(b: Batch) -> tuple[Tensor, int]:
    """J is the sum over tokens of M min(π_θ/μ, cap) Â log π_θ."""
    weight = (b.logp - b.mu).detach().exp().clip(max=b.args.is_cap)
    x = (1 - rows(b)[0]) * weight * b.A[:, None] * b.logp
    return (x * b.mask).sum(1).mean(), len(b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """Means are over all response tokens. budget_share counts masked tokens that δ alone would not
    mask, weight_max is the largest π_θ/μ before its cap."""
    w, (cut, by_budget) = (b.logp - b.mu).exp(), rows(b)
    return {
        "masked_share": share(cut, b.mask),
        "budget_share": share(by_budget, b.mask),
        "weight": share(w.clip(max=b.args.is_cap), b.mask),
        "weight_max": (w[b.mask > 0].max(), None),
    }


CASES = [
    {"is_cap": 1.3},
    {"delta": 0.08, "weight_min": 0.2},
    {"delta": 0.08, "weight_min": 0.2, "weight_span": "limit", "max_new_tokens": 90},
    {"weight_min": 1.0, "budget_low": 0.3, "budget_high": 0.5},
]


def check_published(module: ModuleType) -> None:
    """On rows of 1 to 6 tokens the gradients are UniRL's (T is the response's length) and verl's (T
    is the padded length, here 6). The value is verl's, too (losses.json)."""
    theirs, batch = FIXTURE["cppo"], toy_batch()
    scale = len(batch["mask"]) / batch["mask"].sum()  # their mean is one over all tokens
    for span, numbers in theirs["cases"].items():
        args = no_kl(module, weight_span=span, max_new_tokens=6, **theirs["flags"])
        loss, gradient = loss_and_gradient(module, args, **batch)
        near(scale * gradient, numbers["grad"], f"∂ loss / ∂ log π, --weight_span {span}", 1e-9)
        if "loss" in numbers:
            near(scale * loss, numbers["loss"], f"the loss, --weight_span {span}", 1e-9)


def check_long_rows(module: ModuleType) -> None:
    """On rows of 1 to 24 tokens, on which the budgets decide, the recurrence gives the same
    mask."""
    generator = torch.Generator().manual_seed(3)
    p, sign, size = torch.rand(3, 24, 24, generator=generator, dtype=torch.float64)
    gap = torch.where(sign > 0.5, 0.35, -0.35) * size**30  # few are large: b is below the mean
    mask = (torch.arange(24) < torch.arange(1, 25)[:, None]).double()
    mu, A = (0.4 + 0.2 * p).log(), torch.tensor([1.0, -1] * 12, dtype=torch.float64)
    logp = (mu.exp() + gap).log()
    batch = {"logp": logp, "old_logp": mu, "advantages": A, "mask": mask}
    for span in ("response", "limit"):
        flags = {"weight_span": span, "max_new_tokens": 400, "budget_low": 0.0}
        args = no_kl(module, delta=0.01, weight_min=0.3, **flags)
        cut, by_budget = rows(Batch(args=args, logp=logp, mu=mu, A=A, mask=mask))
        assert 5 < by_budget.sum() < cut.sum(), "the check's own rows"
        _, gradient = loss_and_gradient(module, args, **batch)
        near(gradient == 0, 1 - mask + cut, f"tokens without a gradient, --weight_span {span}")


SHARED = CENTRED
