"""80/20."""

from tests.oracle import Batch, Tensor, clipped_surrogate, share, sides, token_mean, tokens

FLAGS = {"grad_clip": 8.0}
OFF = {"top_entropy": 1.0}


def objective(b: Batch) -> tuple[Tensor, dict]:
    surrogate, beyond = clipped_surrogate(b, b.args["clip_low"], b.args["clip_high"])
    H = b.entropy[b.mask > 0].sort().values
    place = (1 - b.args["top_entropy"]) * (len(H) - 1)  # between two of them
    low, part = int(place), place - int(place)
    tau = H[low] + part * (H[min(low + 1, len(H) - 1)] - H[low])
    forks = (b.entropy >= tau - 1e-5) & (b.mask > 0)
    b.count = tokens(forks)
    stats = sides("clip", beyond, b) | {"left_out": share(~forks, b.mask)}
    stats["fork_entropy"] = float(b.entropy[forks].sum()), tokens(forks)
    return token_mean(surrogate, forks.double()), stats
