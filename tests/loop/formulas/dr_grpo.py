"""Dr. GRPO."""

from tests.loop.oracle import LIMIT, Batch, Tensor, centred, clipped_surrogate, sides

FLAGS = {"grad_clip": 1.4}
advantages = centred


def objective(b: Batch) -> tuple[Tensor, dict]:
    surrogate, beyond = clipped_surrogate(b, b.args["clip_low"], b.args["clip_high"])
    return ((surrogate * b.mask).sum(1) / LIMIT).mean(), sides("clip", beyond, b)
