"""IcePop and related corrections, and extreme weights."""

from types import ModuleType

import torch
from torch import Tensor

from . import Run
from .formulas import Batch, cut_shares, response_mean, share, surrogate
from .harness import CENTRED, FIXTURE, loss_and_gradient, near, no_kl, as_row, toy_batch


def correction(b: Batch) -> Tensor:
    """Return C `[n, T]`, a function of w = π_old/μ of a token, or of the whole response."""
    args, length = b.args, b.mask.sum(1, keepdim=True)
    log_w = b.old - b.mu
    whole = (log_w * b.mask).sum(1, keepdim=True)
    w = (whole.expand_as(log_w) if args.correction_level == "sequence" else log_w).exp()
    if args.correction == "tis":  # truncated
        return w.clip(max=args.w_high)
    if args.correction == "cis":  # truncated where log-odds moved by more than log β
        sure = b.old.exp().clip(max=0.995)
        return torch.minimum(w, sure + (1 - sure) * args.w_high)
    if args.correction in ("mis", "icepop"):  # masked
        return w * (w >= args.w_low) * (w <= args.w_high)
    if args.correction == "geometric":  # the mean over tokens decides
        mean = (whole / length).exp().expand_as(log_w)
        return ((mean >= args.w_low) & (mean <= args.w_high)).double()
    if args.correction == "opsm":  # drops bad responses that are far off-policy
        drift = ((b.mu - b.logp.detach()) * b.mask).sum(1, keepdim=True) / length
        dropped = (b.A[:, None] < 0) & (drift > args.opsm_delta)
        return (~dropped).double().expand_as(log_w)
    return torch.ones_like(log_w)


def objective(b: Batch) -> tuple[Tensor, int]:
    """C stands outside of PPO's min and clip."""
    x = correction(b) * surrogate(b)
    if b.args.length_norm:
        return response_mean(x, b.mask)
    return (x * b.mask).sum(1).mean(), len(b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """Means are over all response tokens. weight_max is the largest π_old/μ."""
    C = correction(b)
    return cut_shares(b, b.A[:, None], "masked") | {
        "corrected": share((C - 1).abs(), b.mask),
        "dropped_share": share(C == 0, b.mask),
        "weight": share(C, b.mask),
        "weight_max": ((b.old - b.mu).exp()[b.mask > 0].max(), "max"),
    }


BOUNDS = {"w_low": 0.8, "w_high": 1.2, "opsm_delta": 0.3}
CASES = [{"correction": "icepop", "length_norm": False} | BOUNDS, {"correction": "opsm"}]
for name in ("tis", "mis"):
    CASES += [{"correction": name} | BOUNDS]
    CASES += [{"correction": name, "correction_level": "sequence"} | BOUNDS]
for name in ("none", "geometric", "opsm", "cis"):
    CASES += [{"correction": name} | BOUNDS]


def check_extremes(module: ModuleType) -> None:
    """W of 900 tokens is infinite in float32. It must be cut to the cap, or masked."""
    mask = torch.ones(1, 900)
    batch = {"logp": -2 * mask, "old_logp": -2 * mask, "rollout_logp": -3 * mask, "mask": mask}
    for name, expected in (("tis", 2.0), ("mis", 0.0)):
        flags = {"correction": name, "correction_level": "sequence", "w_high": 2.0}
        args = no_kl(module, length_norm=False, **flags)
        _, gradient = loss_and_gradient(module, args, **batch, advantages=as_row(1.0)[0].float())
        near(-gradient, 0 * mask + expected, f"{name}: the weights of 900 tokens")


def check_published_cis(module: ModuleType) -> None:
    """cis has the value and the gradient of its authors' function (losses.json), which takes the
    mean over all tokens."""
    theirs, batch = FIXTURE["cis"], toy_batch()
    batch["old_logp"][0, 0] = batch["logp"][0, 0] = -0.001  # a sure token
    batch["rollout_logp"] = torch.tensor(theirs["rollout_logp"], dtype=torch.float64)
    args = no_kl(module, correction="cis", w_high=3.3, clip_high=0.28, length_norm=False)
    loss, gradient = loss_and_gradient(module, args, **batch)
    scale = len(batch["mask"]) / batch["mask"].sum()
    near(scale * loss, theirs["loss"], "the loss", 1e-9)
    near(scale * gradient, theirs["grad"], "∂ loss / ∂ log π", 1e-9)


SHARED = CENTRED


RUN = Run(
    needs={
        "correction": {"correction": "none", "w_low": 0.9, "w_high": 1.1, "opsm_delta": 0.1},
        "correction_level": {"correction": "tis"},
        "opsm_delta": {"correction": "opsm"},
    },
    refuses=(("--correction_level sequence", "--correction_level sequence: is for tis and mis"),),
)
