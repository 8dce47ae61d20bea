"""M2PO: of a mini-batch's tokens that lead outward the farthest are left out, to a budget."""

from tests.loop.oracle import Batch, Tensor, token_mean, tokens_of

FLAGS = {"grad_clip": 4.0}


def objective(b: Batch) -> Tensor:
    w, A = (b.logp - b.mu).exp(), b.A[:, None]
    squares = w.detach().log() ** 2
    outward = (A * (w.detach() - 1) > 0) & (b.mask > 0)
    left = squares[outward].sort().values.tolist()
    while left and sum(left) / len(left) > b.args["budget"]:
        left.pop()  # the largest
    masked = outward & (squares > (left[-1] if left else 0.0) + 1e-6)
    return token_mean(~masked * w * A, tokens_of(b, b.mask))
