"""Stack: its loss with and without layers. (Numbers of other people's code are in the checks of the
files that the layers come from; tests/loop holds the layers outside of the loss.)"""

from types import ModuleType

import torch
from maspo import Args as Gate
from stapo import Args as Mask
from torch import Tensor
from variants import justrl

from . import Run, maspo, stapo
from .formulas import Batch, clip_statistics, share, surrogate
from .harness import ZSCORES, busy_batch, loss_and_gradient, near


def under(args: object, b: Batch) -> Batch:
    """Return the batch with the flags of another file."""
    return Batch(**vars(b) | {"args": args})


def kept(b: Batch) -> Tensor:
    return b.mask * ~stapo.spurious(under(Mask(tau_p=b.args.tau_p), b))


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """J is a sum over the tokens that STAPO keeps, a branch's times N_main / N_branch, over the
    number of main rows' kept tokens. The gate replaces min and clip."""
    gated = maspo.gates(under(Gate(), b)) * b.r * b.A[:, None]
    x = gated if b.args.gate else surrogate(under(justrl.Args(), b))
    total, main = (x * kept(b)).sum(1), b.branch == 0
    balance, count = b.mask[main].sum() / b.mask[~main].sum(), kept(b)[main].sum()
    return (total[main].sum() + balance * total[~main].sum()) / count, count


def statistics(b: Batch) -> dict[str, tuple]:
    """Metrics are silenced_share, and gate_closed, the mean of 1 - F; or, without the gate,
    clip_share and its sides."""
    pairs = {"silenced_share": ((b.mask - kept(b)).sum(), b.mask.sum())}
    if b.args.gate:
        return pairs | {"gate_closed": share(1 - maspo.gates(under(Gate(), b)), b.mask)}
    return pairs | clip_statistics(under(justrl.Args(), b))


def check_layers_off(module: ModuleType) -> None:
    """Without mask, gate and branches, loss and gradient are justrl.py's."""
    batch = busy_batch() | {"branch": torch.zeros(9, dtype=torch.float64)}
    ours = loss_and_gradient(module, module.Args(tau_p=0.0, gate=False), **batch)
    for value, expected in zip(ours, loss_and_gradient(justrl, justrl.Args(), **batch)):
        near(value, expected, "the loss without layers, and its gradient")


CASES = [{"tau_p": 0.45}, {"tau_p": 0.45, "gate": False}, {"tau_p": 0.0}]
SHARED = ZSCORES
RUN = Run(
    stored={"tau_p": 0.9, "candidates": 5, "teacher_batch": 8, "branches": 2, "lr": 3e-4}
    | {"grad_clip": 12.0},
    small="--candidates 4 --teacher_batch 8 --branches 2 --tau_p 0.9",
    refuses=(("--branches 1", "--branches 1: must be 0"),),
)
