"""DPPO."""

from tests.loop.oracle import Batch, Tensor, centred, share, sides

FLAGS = {"trust_region": "kl", "delta": 0.03, "is_cap": 1.5, "grad_clip": 28.0}
ALSO = [{"trust_region": "tv", "delta": 0.02}]
ALSO += [ALSO[0] | {"two_sided": True, "log_square": 0.2}]
advantages = centred


def objective(b: Batch) -> tuple[Tensor, dict]:
    p, mu, A = b.logp.exp().detach(), b.mu.exp(), b.A[:, None]
    D = mu * (mu / p).log() + (1 - mu) * ((1 - mu) / (1 - p)).log()
    if b.args["trust_region"] == "tv":
        D = ((p - mu).abs() + (1 - p - (1 - mu)).abs()) / 2
    # The stored μ may be above 1, where the KL is NaN
    masked = ~(D <= b.args["delta"]) & (b.args["two_sided"] | (A * (p - mu) > 0))
    weight = (p / mu).clip(max=b.args["is_cap"])
    stats = sides("masked", masked, b) | {"weight": share(weight, b.mask)}
    stats["weight_max"] = (float((p / mu * b.mask).max()), None)
    square = b.args["log_square"] * (b.logp - b.mu) ** 2
    return ((~masked * weight * A * b.logp - square) * b.mask).sum(1).mean(), stats
