"""Stack: its loss with all layers, and what is left without them. (Numbers of other people's code
are in the checks of the files that the layers come from.)"""

from types import ModuleType

import torch
from torch import Tensor
from variants import justrl

from . import Run, maspo, stapo
from .formulas import Batch, clip_statistics, share, surrogate
from .harness import ZSCORES, busy_batch, counts, loss_and_gradient, measured, near

OFF = {"tau_p": 0.0, "gate": False}  # the layers of the loss


def kept(b: Batch) -> Tensor:
    return b.mask * ~stapo.spurious(b)


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """J is a sum over the tokens that STAPO keeps, a branch's times N_main / N_branch, over the
    number of main rows' kept tokens. The gate replaces min and clip."""
    x = maspo.gates(b) * b.r * b.A[:, None] if b.args.gate else surrogate(b)
    main = b.branch == 0
    balance = b.mask[main].sum() / b.mask[~main].sum() if (~main).any() else 1.0
    total, count = (x * kept(b)).sum(1), kept(b)[main].sum()
    return (total[main].sum() + balance * total[~main].sum()) / count, count


def statistics(b: Batch) -> dict[str, tuple]:
    """Metrics are silenced_share, and gate_closed, the mean of 1 - F; or, without the gate,
    clip_share and its sides."""
    pairs = {"silenced_share": ((b.mask - kept(b)).sum(), b.mask.sum())}
    if b.args.gate:
        return pairs | {"gate_closed": share(1 - maspo.gates(b), b.mask)}
    return pairs | clip_statistics(b)


CASES = [{"tau_p": 0.45}, {"tau_p": 0.45, "gate": False}, {"tau_p": 0.0}]


def check_layers_off(module: ModuleType) -> None:
    """Without mask and gate, and without branches, loss, gradient and metrics are justrl.py's. The
    mask changes the spurious tokens' weights to 0. The gate changes weights where r has moved
    outward and nowhere else."""
    batch = busy_batch() | {"branch": torch.zeros(9, dtype=torch.float64)}
    args, base = module.Args(**OFF), justrl.Args()
    loss, gradient = loss_and_gradient(module, args, **batch)
    theirs, slope = loss_and_gradient(justrl, base, **batch)
    near(loss, theirs, "the loss without layers")
    near(gradient, slope, "its gradient")
    expected = measured(justrl, base, **batch) | {"silenced_share": (0, batch["mask"].sum())}
    counts(measured(module, args, **batch), expected)
    b = Batch(args=module.Args(**OFF | {"tau_p": 0.45}), **batch, A=batch["advantages"])
    silenced = loss_and_gradient(module, b.args, **batch)[1]
    spurious = stapo.spurious(b)
    scale = b.mask.sum() / kept(b).sum()
    near(silenced, (slope * scale).masked_fill(spurious, 0.0), "the gradient with the mask")
    moved = batch["logp"] - batch["old_logp"]
    inward = (batch["mask"] > 0) & (batch["advantages"][:, None] * moved <= 0)
    gated = loss_and_gradient(module, module.Args(**OFF | {"gate": True}), **batch)[1]
    near(gated[inward], slope[inward], "the gate where r moved inward")
    assert not torch.equal(gated, slope), "the gate changes no weight"


SHARED = ZSCORES


RUN = Run(
    stored={"tau_p": 0.9, "candidates": 5, "teacher_batch": 8, "branches": 2, "lr": 3e-4}
    | {"grad_clip": 12.0},
    first=2,  # the teacher chooses
    small="--candidates 4 --teacher_batch 8 --branches 2 --tau_p 0.9",
    refuses=(
        ("--branches 1", "--branches 1: must be 0"),
        ("--boundary z", "--boundary 'z': no token ends in it"),
    ),
)
