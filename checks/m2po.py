"""M2PO: which tokens the budget drops, that there is one budget for the mini-batch, and the
remaining weights."""

from types import ModuleType

import torch
from torch import Tensor

from . import TOKEN_MEAN, ZSCORE, ZSCORES, add_up, busy_batch, counts, loss_of, near, no_kl
from . import mini_batch, response_tokens, written_here


def kept_by_hand(squares: list[float], budget: float) -> set[int]:
    """The largest set of the smallest squares whose mean is within the budget."""
    order = sorted(range(len(squares)), key=lambda i: squares[i])
    fits = [n for n in range(1, len(order) + 1) if sum(sorted(squares)[:n]) / n <= budget]
    return set(order[: max(fits, default=0)])


def check_the_fewest_and_worst_go(module: ModuleType) -> None:
    """Random squares: the kept ones are those of the definition, as many as the mean allows."""
    generator = torch.Generator().manual_seed(1)
    for budget in (0.001, 0.04, 0.3, 9.0):
        args = no_kl(module, budget=budget)
        for size in (1, 2, 7, 40):
            squares = torch.randn(size, generator=generator, dtype=torch.float64) ** 2 / 3
            bound = module.second_moment_bound(args, squares)
            expected = kept_by_hand(squares.tolist(), budget)
            found = {i for i, x in enumerate(squares.tolist()) if x <= bound}
            told = f"of {size} squares, τ = {budget}: {len(found)} are kept, not {len(expected)}"
            assert found == expected, told
    assert module.second_moment_bound(args, torch.zeros(0)) == 0
    assert module.second_moment_bound(no_kl(module, budget=0.1), torch.ones(3)) == 0, "none fits"


def rows(log_w: list[list[float]], mask: list[list[float]], A: list[float]) -> dict[str, Tensor]:
    """A batch with these log π_θ/μ; π_old does not matter."""
    tensors = (torch.tensor(x, dtype=torch.float64) for x in (log_w, mask, A))
    moved, mask, A = tensors
    mu = torch.full_like(moved, -2.0)
    batch = {"rollout_logp": mu, "logp": mu + moved, "old_logp": mu - 7}
    return batch | {"mask": mask, "advantages": A}


def by_hand() -> dict[str, Tensor]:
    """Trust-region tokens have the squares .01, .04, 6.25, .09, .36: at τ = .05 three are kept, of
    mean .0467. Two tokens moved against their advantage, one has Â = 0, the last is padding."""
    log_w = [[0.1, 0.2, 2.5, -3.0], [-0.3, -0.6, 2.0, -9.0], [0.9, 0.0, 0.0, 0.0]]
    return rows(log_w, [[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]], [1.0, -2.0, 0.0])


def check_by_hand(module: ModuleType) -> None:
    """Kept tokens have w Â / M, without a cap, where M is the number of all tokens. The worst
    trust-region tokens have weight 0."""
    batch, args = by_hand(), no_kl(module, budget=0.05)
    batch["logp"].requires_grad_()
    loss, stats = loss_of(module, args, **batch)
    loss.backward()
    w = (batch["logp"] - batch["rollout_logp"]).exp().detach()
    keeps = torch.tensor([[1.0, 1, 0, 1], [1, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.float64)
    near(batch["logp"].grad, -keeps * w * batch["advantages"][:, None] / 8, "∂ loss / ∂ log π")
    assert stats["masked_share"] == (2, 8)
    near(stats["weight_max"][0], torch.tensor(2.5).double().exp(), "the largest w, a masked one")


def check_is_exact_in_parts(module: ModuleType) -> None:
    """With the mini-batch's bound, sums over any parts give the loss of the whole. With the bounds
    of the parts they do not."""
    batch, args = by_hand(), no_kl(module, budget=0.2)
    _, _, whole = mini_batch(module, args, **batch)
    add_up(module, args, batch, [[0], [1], [2]], masked=whole.masked)


def check_statistics(module: ModuleType) -> None:
    """masked_share: the share of all response tokens with M = 0; second_moment: the mean of (log
    w)² over the trust-region tokens, masked ones included; weight_max: the largest w."""
    batch, args = busy_batch(), no_kl(module, budget=0.02)
    t = response_tokens(batch)
    squares = t.w.log()[t.A * (t.w - 1) > 0] ** 2
    dropped = len(squares) - len(kept_by_hand(squares.tolist(), 0.02))
    assert 0 < dropped < len(squares) < t.M
    expected = {"masked_share": (dropped, t.M), "second_moment": (squares.sum(), len(squares))}
    expected["weight_max"] = t.w.max(), None
    counts(loss_of(module, args, **batch)[1], expected)


READS = ("rollout_logp",)  # columns that the loss uses
CHECKS = [*written_here(globals()), *ZSCORES]
RETURN = "return -(objective * mask).sum(), mask.sum(), stats"
SQUARES, OUTWARD = (
    "log_weight.detach().square()",
    "trust_region_tokens(log_weight, A) & mask.bool()",
)
MUTANTS = {
    **ZSCORE,
    **TOKEN_MEAN,
    "μ is π_old": (
        "log_weight = logp - batch.rollout_logp  # [n, T]",
        "log_weight = logp - batch.old_logp  # [n, T]",
    ),
    "a KL for the second moment": (SQUARES, "log_weight.detach()"),
    "the largest are kept": (".sort().values", ".sort(descending=True).values"),
    "all tokens are trust-region tokens": (OUTWARD, "mask.bool()"),
    "padding in the budget": (OUTWARD, "trust_region_tokens(log_weight, A)"),
    "weight detached": ("weight = log_weight.exp()", "weight = log_weight.detach().exp()"),
    "masked tokens not counted": (RETURN, RETURN.replace("mask.sum()", "(mask * ~masked).sum()")),
}
