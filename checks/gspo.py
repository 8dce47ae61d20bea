"""GSPO: outside numbers (verl writes the paper's token form), a sequence's ratio."""

from types import ModuleType

from torch import Tensor

from . import Run
from .formulas import Batch, clipped
from .harness import ZSCORES, near, as_row, terms


def sequence_ratio(b: Batch) -> Tensor:
    """Return s `[n]`, the likelihood ratio of a response to the power of 1/|y|."""
    return (((b.logp - b.old) * b.mask).sum(1) / b.mask.sum(1)).exp()


def objective(b: Batch) -> tuple[Tensor, int]:
    """PPO's clipped objective of whole responses."""
    return clipped(sequence_ratio(b), b.A, b.args).mean(), len(b.A)


def statistics(b: Batch) -> dict[str, tuple]:
    """Shares are of the responses with Â ≠ 0; clip_share_of_tokens and token_clip_share are of
    their tokens."""
    s, live, tokens = sequence_ratio(b), (b.A != 0).sum(), b.mask[b.A != 0].sum()
    above, below = (b.A > 0) & (s > 1 + b.args.clip_high), (b.A < 0) & (s < 1 - b.args.clip_low)
    far = b.A.sign()[:, None] * (b.r - 1) * b.mask > b.args.token_clip
    return {
        "clip_share": ((above | below).sum(), live),
        "clip_above": (above.sum(), live),
        "clip_below": (below.sum(), live),
        "clip_share_of_tokens": (b.mask[above | below].sum(), tokens),
        "token_clip_share": ((far & (b.A != 0)[:, None]).sum(), tokens),
    }


CASES = [
    {},
    {"clip_low": 0.02, "clip_high": 0.6, "token_clip": 0.24},
    {"clip_low": 0.3, "clip_high": 0.2},
]


def check_perplexities(module: ModuleType) -> None:
    """A sequence's ratio is the quotient of two perplexities of the response, π_old's over π_θ's:
    the loss of one response with Â = 1 is minus this number."""
    old, now = as_row(-0.9, -2.0, -0.4), as_row(-0.5, -1.5, -0.7)  # log-probs of three tokens
    perplexity_old, perplexity = (-old.mean()).exp(), (-now.mean()).exp()
    batch = {"logp": now, "old_logp": old, "mask": as_row(1, 1, 1), "advantages": as_row(1.0)[0]}
    loss = terms(module, module.Args(clip_high=0.5), **batch)[0]
    near(-loss, perplexity_old / perplexity, "s")


FIXTURES = {"gspo_3e-4_4e-4": {}, "gspo_0.2_0.2": {"clip_low": 0.2, "clip_high": 0.2}}
SHARED = ZSCORES
ROOT_MEAN = "(log_ratio.sum(dim=1) / batch.mask.sum(dim=1).clamp(min=1))"
MASKED = "(logp - batch.old_logp) * batch.mask"
CLAMP = "s.clamp(1 - args.clip_low, 1 + args.clip_high)"
MUTANTS = {
    "sum for mean in the ratio": (ROOT_MEAN, "log_ratio.sum(dim=1)"),
    "padding in the ratio": (MASKED, "logp - batch.old_logp"),
    "bounds swapped": (CLAMP, "s.clamp(1 - args.clip_high, 1 + args.clip_low)"),
    "μ for π_old": (MASKED, MASKED.replace("old_logp", "rollout_logp")),
}


RUN = Run(stored={"clip_low": 0.02, "clip_high": 0.03, "grad_clip": 4.0}, measured=("token_clip",))
