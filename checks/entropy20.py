"""80/20, KL-Cov and Clip-Cov: outside numbers, and the draw of Clip-Cov."""

from types import ModuleType

import torch
from common.batch import Rollout
from common.distributed import ALONE
from torch import Tensor

from . import ZSCORES, Batch, clip_statistics, no_kl, share, surrogate, token_mean


def top(b: Batch) -> Tensor:
    """The share of the response tokens with the largest entropy, or with the largest product of
    (log π - mean) and (Â - mean)."""
    on, score, top_share = b.mask > 0, b.entropy, b.args.top_entropy
    if b.args.tokens == "kl_cov":
        A = b.A[:, None].expand_as(b.mask)
        score = (b.logp.detach() - b.logp.detach()[on].mean()) * (A - A[on].mean())
        top_share = b.args.kl_cov_share
    return on & (score >= torch.quantile(score[on], 1 - top_share) - 1e-5)


def trained(b: Batch) -> Tensor:
    """80/20: the tokens of high entropy. Clip-Cov: all but the drawn ones (`check_the_draw`)."""
    return b.mask * ~b.chosen if b.args.tokens == "clip_cov" else top(b).double()


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """The mean over the trained tokens; Clip-Cov counts the drawn ones, too. KL-Cov: without a
    clip, minus κ |log r| on the tokens at the top."""
    if b.args.tokens == "entropy":
        return token_mean(surrogate(b), trained(b))
    if b.args.tokens == "clip_cov":
        return token_mean(surrogate(b) * trained(b), b.mask)
    pull = b.args.kl_cov_coef * (b.logp - b.old).abs() * top(b)
    return token_mean(b.r * b.A[:, None] - pull, b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """Of the response tokens; held_pull is the mean κ |log r| of those that are held."""
    if b.args.tokens == "kl_cov":
        pull, held = b.args.kl_cov_coef * (b.logp - b.old).abs(), top(b).double()
        cut = {"clip_share": (0, b.mask.sum())}
        return cut | {"held_share": share(held, b.mask), "held_pull": share(pull, held)}
    found = {"left_out": share(1 - trained(b), b.mask)}
    return found | {"fork_entropy": share(b.entropy, trained(b))} | clip_statistics(b)


CASES = [
    {},
    {"top_entropy": 0.6, "clip_high": 0.2},
    {"tokens": "kl_cov", "kl_cov_share": 0.25, "kl_cov_coef": 3.0},
    {"tokens": "kl_cov"},
    {"tokens": "clip_cov", "clip_cov_low": 0.1, "clip_cov_share": 0.1},
]


def check_the_draw(module: ModuleType) -> None:
    """Clip-Cov draws a share of all tokens from those between the bounds that the clip leaves a
    gradient: the same ones for rows in any order, others in another step."""
    generator = torch.Generator().manual_seed(3)
    logp = torch.randn(40, 5, generator=generator, dtype=torch.float64) - 3
    A = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(20)
    moved = 0.5 * (torch.rand(40, 5, generator=generator) < 0.2)  # r = 1.65 on a fifth
    batch = Rollout(logp=logp, old_logp=logp - moved, mask=torch.ones_like(logp), advantages=A)
    order = torch.randperm(40, generator=generator)
    batch.entropy = torch.zeros_like(logp)
    mixed, drawn = batch.rows(order), torch.zeros_like(logp)
    c = (logp - logp.mean()) * (A - A.mean())[:, None]
    band = (c > 0.1) & (c < 1.5) & ~((moved > 0) & (A > 0)[:, None])
    args = no_kl(module, tokens="clip_cov", clip_cov_low=0.1, clip_cov_high=1.5)
    for some, number in ((0.9, band.sum()), (1e-4, 1), (0.05, 10)):
        args.clip_cov_share = some
        for step in range(30):
            module.choose_tokens(args, batch, ALONE, step)
            module.choose_tokens(args, mixed, ALONE, step)
            assert torch.equal(mixed.chosen, batch.chosen[order])
            assert batch.chosen.sum() == number and not batch.chosen[~band].any()
            drawn += batch.chosen
    assert drawn[band].min() > 30


# Of 21 tokens five are at TRL's threshold or above. It loses the fifth, which is the threshold, by
# rounding to float32. A share of 0.19 keeps the same four.
FIXTURES = {"dapo_eps0.2_top20pct_entropy": {"clip_high": 0.2, "top_entropy": 0.19}}
PER_TOKEN = True  # TRL divides by all tokens, not by the kept ones
SHARED = ZSCORES
