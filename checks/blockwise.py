"""Blockwise advantages: where the working ends, and the baseline of an answer."""

from types import ModuleType, SimpleNamespace

import torch
from common.distributed import ALONE
from torch import Tensor

from . import Run
from .formulas import Batch, clipped, cut_shares
from .harness import CENTRED, near, no_kl


def token_advantages(b: Batch) -> Tensor:
    """Return advantages `[n, T]`: the working's on its tokens, the answer's on the rest."""
    return b.working * b.working_advantages[:, None] + (1 - b.working) * b.A[:, None]


def objective(b: Batch) -> tuple[Tensor, int]:
    """J has a mean over the working plus a mean over the answer, which is 0 without an answer."""
    x, J = clipped(b.r, token_advantages(b), b.args), 0.0
    for block in (b.mask * b.working, b.mask * (1 - b.working)):
        J = J + (x * block).sum(1) / block.sum(1).clip(min=1)
    return J.mean(), len(b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """clip_share and its sides; advantages_apart is the mean distance of the two advantages."""
    apart = (b.working_advantages - b.A).abs()
    return cut_shares(b, token_advantages(b)) | {"advantages_apart": (apart.sum(), len(b.A))}


CASES = [{}, {"clip_low": 0.5, "clip_high": 0.05}]

WORKING = torch.tensor([[0.4, 0.4, 0.4, 0.0, 0.0, 0.2], [0.4] * 6])
ANSWER = torch.tensor([[1.0, 1.0, 0.0, 0.0, 1.0, 1.0], [0.0] * 6])
EXPECTED = {"none": ANSWER, "batch": ANSWER - 1 / 3, "group": ANSWER - ANSWER.mean(1)[:, None]}
EXPECTED["outcome"] = torch.tensor([[1 / 3, 1 / 3, -2 / 3, -1 / 2, 1 / 2, 0], [0.0] * 6])


def check_baselines(module: ModuleType) -> None:
    """The baseline is 0, the mean of the batch, of the group, or of the answers whose working has
    the same reward. (In the last case the last answer of the first group is alone.)"""
    for name, expected in EXPECTED.items():
        A = module.answer_advantages(no_kl(module, baseline=name), ANSWER, WORKING, ALONE)
        near(A, expected, name, 1e-6)


def check_working(module: ModuleType) -> None:
    """The working ends with the last marker (here 9). Without a marker all is working. Padding
    belongs to neither block. (tests/loop checks what the verifier sees of both.)"""
    tokens = torch.tensor([[5, 9, 5, 9, 4, 9], [5, 5, 5, 5, 9, 9]])
    mask = (torch.arange(6) < torch.tensor([[5], [4]])).float()
    working = module.working_mask(SimpleNamespace(tokens=tokens, mask=mask), 9)
    near(working, [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]], "the mask of the working")


SHARED = CENTRED


RUN = Run(
    stored={"grad_clip": 4.0},
    part_marks=True,
    of_words="--marker =",
    refuses=(("--task arithmetic --marker 12", "--marker 12: must be one token of this model"),),
)
