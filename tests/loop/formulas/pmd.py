"""PMD."""

from tests.loop.oracle import Batch, Tensor, centred

FLAGS = {"tau": 0.5, "grad_clip": 2.5}
advantages = centred


def objective(b: Batch) -> tuple[Tensor, dict]:
    """-τ/2 (Â/τ - log ratio)², less its value at π_θ = π_old, which is a constant."""
    tau, L = b.args["tau"], b.args["max_new_tokens"]
    log_ratio = ((b.logp - b.old) * b.mask).sum(1)
    square = tau / 2 * ((b.A / tau - log_ratio) ** 2 - (b.A / tau) ** 2)
    moved = log_ratio.detach()
    turned = (b.A > 0) & (tau * moved > b.A) | (b.A < 0) & (tau * moved < b.A)
    stats = {"pull": (float((tau * moved).abs().sum()), float(b.A.abs().sum()))}
    stats["turned"] = (int(turned.sum()), int((b.A != 0).sum()))
    return -(square / L).mean(), stats
