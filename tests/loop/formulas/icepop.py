"""IcePop and its kin."""

from tests.loop.oracle import (
    Batch,
    Tensor,
    centred,
    clipped_surrogate,
    response_mean,
    share,
    sides,
    torch,
)

FLAGS = {"w_low": 0.8, "w_high": 1.4, "grad_clip": 1.45}
ALSO = [
    {"correction": "tis", "w_high": 1.2},
    {"correction": "tis", "correction_level": "sequence"},
    {"correction": "mis", "correction_level": "sequence", "length_norm": False, "grad_clip": 15.0},
    {"correction": "geometric", "w_low": 0.8, "w_high": 1.1},
    {"correction": "opsm", "opsm_delta": 0.1},
]
OFF = {"correction": "none"}
advantages = centred


def objective(b: Batch) -> tuple[Tensor, dict]:
    a, A = b.args, b.A[:, None]
    surrogate, beyond = clipped_surrogate(b, a["clip_low"], a["clip_high"])
    w, lengths = ((b.old - b.mu) * b.mask).exp(), b.mask.sum(1, keepdim=True)
    if a["correction_level"] == "sequence":
        w = w.prod(1, keepdim=True).expand_as(b.mask)
    mean = w.prod(1, keepdim=True) ** (1 / lengths)
    drift = ((b.mu - b.logp.detach()) * b.mask).sum(1, keepdim=True) / lengths
    C = {
        "tis": w.clip(max=a["w_high"]),
        "geometric": ((mean >= a["w_low"]) & (mean <= a["w_high"])) * torch.ones_like(w),
        "opsm": ~((A < 0) & (drift > a["opsm_delta"])) * torch.ones_like(w),
        "none": torch.ones_like(w),
    }.get(a["correction"], w * ((w >= a["w_low"]) & (w <= a["w_high"])))
    stats = sides("masked", beyond, b) | {"weight": share(C, b.mask)}
    stats |= {"corrected": share((C - 1).abs(), b.mask), "dropped_share": share(C == 0, b.mask)}
    stats["weight_max"] = (float(((b.old - b.mu).exp() * b.mask).max()), None)
    if not a["length_norm"]:
        return (C * surrogate * b.mask).sum(1).mean(), stats
    return response_mean(C * surrogate, b.mask), stats
