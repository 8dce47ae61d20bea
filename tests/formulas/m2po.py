"""M2PO."""

from tests.oracle import Batch, Tensor, share, token_mean, tokens

FLAGS = {"grad_clip": 4.0}


def objective(b: Batch) -> tuple[Tensor, dict]:
    w, on = (b.logp - b.mu).exp(), b.mask > 0
    squares = w.detach().log() ** 2
    left = squares[on].sort().values.tolist()
    while len(left) > 1 and sum(left) / len(left) > b.args["budget"]:
        left.pop()  # the largest
    masked = (squares > left[-1] + 1e-6) & on
    b.count = tokens(b.mask)
    stats = {"masked_share": share(masked, b.mask), "second_moment": share(squares, b.mask)}
    stats["weight_max"] = (float((w.detach() * b.mask).max()), None)
    return token_mean(~masked * w * b.A[:, None], b.mask), stats
