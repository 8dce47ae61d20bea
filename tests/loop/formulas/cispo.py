"""CISPO."""

from tests.loop.oracle import Batch, Tensor, share, token_mean, tokens

FLAGS = {"is_cap": 1.2, "grad_clip": 3.5}


def objective(b: Batch) -> tuple[Tensor, dict]:
    r, A, cap = (b.logp - b.old).exp().detach(), b.A[:, None], b.args["is_cap"]
    beyond = (A > 0) & (r > 1 + b.args["clip_high"]) | (A < 0) & (r < 1 - b.args["clip_low"])
    stats = {"kept_beyond_clip": share(beyond, b.mask), "capped_share": share(r > cap, b.mask)}
    stats["weight_max"] = (float((r * b.mask).max()), None)
    b.count = tokens(b.mask)
    return token_mean(r.clip(max=cap) * A * b.logp, b.mask), stats
