"""CISPO: outside numbers."""

from torch import Tensor

from . import Run
from .formulas import Batch, cut_shares, share, token_mean
from .harness import ZSCORES


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """Every token keeps its gradient; its weight min(r, cap) has no gradient."""
    weight = b.r.detach().clip(max=b.args.is_cap)
    return token_mean(weight * b.A[:, None] * b.logp, b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """Shares are of all response tokens: tokens that PPO's clip would cut, and tokens beyond the
    cap. weight_max is the largest r."""
    return {
        "kept_beyond_clip": cut_shares(b, b.A[:, None])["clip_share"],
        "capped_share": share(b.r > b.args.is_cap, b.mask),
        "weight_max": (b.r[b.mask > 0].max(), "max"),
    }


CASES = [{}, {"clip_low": 0.5, "clip_high": 0.28, "is_cap": 1.24}]


FIXTURES = {"cispo_cap1.28_tokenmean": {"is_cap": 1.28}}
SHARED = ZSCORES
MUTANTS = {"weight 1": ("ratio.clamp(max=args.is_cap)", "torch.ones_like(ratio)")}


RUN = Run(measured=("clip_low", "clip_high"))
