"""DPPO."""

from tests.oracle import Batch, Tensor, centred, share, sides

FLAGS = {"trust_region": "kl", "delta": 0.03, "is_cap": 1.5, "grad_clip": 28.0}
advantages = centred


def objective(b: Batch) -> tuple[Tensor, dict]:
    p, mu, A = b.logp.exp().detach(), b.mu.exp(), b.A[:, None]
    kl = mu * (mu / p).log() + (1 - mu) * ((1 - mu) / (1 - p)).log()
    # The stored μ may be above 1, where the KL is NaN
    masked = ~(kl <= b.args["delta"]) & (A * (p - mu) > 0)
    weight = (p / mu).clip(max=b.args["is_cap"])
    stats = sides("masked", masked, b) | {"weight": share(weight, b.mask)}
    stats["weight_max"] = (float((p / mu * b.mask).max()), None)
    return (~masked * weight * A * b.logp * b.mask).sum(1).mean(), stats
