"""JustRL."""

from tests.loop.oracle import Batch, Tensor, clipped_surrogate, sides, token_mean, tokens

FLAGS = {"grad_clip": 6.0}


def objective(b: Batch) -> tuple[Tensor, dict]:
    surrogate, beyond = clipped_surrogate(b, b.args["clip_low"], b.args["clip_high"])
    b.count = tokens(b.mask)
    return token_mean(surrogate, b.mask), sides("clip", beyond, b)
