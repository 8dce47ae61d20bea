"""GMPO."""

from tests.loop.oracle import Batch, Tensor, sides

FLAGS = {"clip_low": 0.05, "clip_high": 0.07, "grad_clip": 5.0}


def objective(b: Batch) -> tuple[Tensor, dict]:
    log_r, A = (b.logp - b.old) * b.mask, b.A[:, None]
    beyond = (A > 0) & (log_r > b.args["clip_high"]) | (A < 0) & (log_r < -b.args["clip_low"])
    edge = (A > 0) * b.args["clip_high"] - (A < 0) * b.args["clip_low"]
    s = ((log_r * ~beyond + edge * beyond).sum(1) / b.mask.sum(1)).exp()
    return (s * b.A).mean(), sides("clip", beyond, b)
