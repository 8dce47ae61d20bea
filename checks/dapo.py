"""DAPO: JustRL's loss, and the punishment of length. (tests/loop holds the rounds of sampling.)"""

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from . import Run
from .formulas import Batch, cut_shares, surrogate, token_mean
from .harness import ZSCORES, near


def trained(b: Batch) -> Tensor:
    """Return the mask of the loss. With `--mask_truncated` it is 0 on responses that were cut
    off."""
    return b.mask * (b.finished[:, None] | (not b.args.mask_truncated))


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """J is a mean over the tokens of all responses, or of those that were not cut off."""
    return token_mean(surrogate(b), trained(b))


def statistics(b: Batch) -> dict[str, tuple]:
    """clip_share, clip_above and clip_below are shares of the tokens that are trained."""
    return cut_shares(Batch(**vars(b) | {"mask": trained(b)}), b.A[:, None])


CASES = [{}, {"mask_truncated": True, "clip_high": 0.2}]


def check_overlong(module: ModuleType) -> None:
    """The punishment is half of the paper's, which is 0 up to 16384 tokens and then falls linearly
    to -1 at 20480."""
    args = replace(module.Args(), max_new_tokens=20480, overlong_buffer=4096)
    lengths = torch.tensor([0.0, 16384, 16385, 18432, 20480])
    expected = torch.tensor([0.0, 0, -1 / 4096, -0.5, -1.0])
    near(module.overlong(lengths, args), expected / 2, "half of it", 1e-6)
    near(module.overlong(lengths, replace(args, overlong_penalty=1.0)), expected, "all of it", 1e-6)
    near(module.overlong(lengths, replace(args, overlong_buffer=0)), 0 * lengths, "no buffer")


def check_idle_groups_stay_idle(module: ModuleType) -> None:
    """In zero-variance groups (here verdicts 1, 1 with 8 and 9 tokens) lengths alone give no
    advantage. In other groups (1, 0 with 9 and 5 tokens) they do."""
    batch = SimpleNamespace(mask=(torch.arange(9) < torch.tensor([8, 9, 9, 5])[:, None]).float())
    args = replace(module.Args(), max_new_tokens=9, overlong_buffer=4)
    made = module.punished(torch.tensor([[1.0, 1], [1, 0]]), batch, args)
    near(made, [[1, 1], [0.5, 0]], "verdicts and punishment")


SHARED = ZSCORES


RUN = Run(
    stored={"max_draws": 2, "overlong_buffer": 20, "overlong_penalty": 0.7, "grad_clip": 11.0},
    needs={"max_draws": {"max_draws": 1}},
    refuses=(("--overlong_buffer 65", "--overlong_buffer 65: is above --max_new_tokens 64"),),
)
