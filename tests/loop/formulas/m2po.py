"""M2PO."""

from tests.loop.oracle import Batch, Tensor, share, token_mean, tokens

FLAGS = {"grad_clip": 4.0}


def objective(b: Batch) -> tuple[Tensor, dict]:
    w, A = (b.logp - b.mu).exp(), b.A[:, None]
    squares = w.detach().log() ** 2
    outward = (A * (w.detach() - 1) > 0) & (b.mask > 0)
    left = squares[outward].sort().values.tolist()
    while left and sum(left) / len(left) > b.args["budget"]:
        left.pop()  # the largest
    masked = outward & (squares > (left[-1] if left else 0.0) + 1e-6)
    b.count = tokens(b.mask)
    stats = {"masked_share": share(masked, b.mask)}
    stats["second_moment"] = (float(squares[outward].sum()), float(outward.sum()))
    stats["weight_max"] = (float((w.detach() * b.mask).max()), None)
    return token_mean(~masked * w * A, b.mask), stats
