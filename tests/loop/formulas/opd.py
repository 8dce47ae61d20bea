"""OPD."""

from tests.loop.oracle import (
    Batch,
    Oracle,
    Tensor,
    log_probs,
    share,
    token_mean,
    tokens,
    torch,
    untrained,
)

FLAGS = {"reward_weight": 0.3, "is_cap": 1.4, "beta": 0.6, "grad_clip": 28.0}
ALSO = [{"weights": "none"}]
OFF = {"beta": 0.0}


def prepare(o: Oracle, step: int, b: Batch) -> None:
    """What `ref` is here: the teacher's log-probs, of a model that no step changes."""
    with torch.no_grad():
        b.ref = log_probs(untrained("model-teacher"), b.rows)[0]


def objective(b: Batch) -> tuple[Tensor, dict]:
    pi, ours = b.logp.exp().detach(), b.logp.detach()
    w = pi / b.mu.exp()
    cut = w.clip(max=b.args["is_cap"]) if b.args["weights"] == "mu" else 1 + 0 * w
    A = b.args["reward_weight"] * b.A[:, None] + b.args["beta"] * (b.ref - ours)
    b.count = tokens(b.mask)
    stats = {"teacher_kl": share(ours - b.ref, b.mask)}
    strayed = torch.zeros_like(b.mask)
    for i, row in enumerate(b.ref):
        seen = [t for t in range(len(b.rows[i].tokens)) if row[t] < -4.6]
        strayed[i, min(seen, default=len(row)) + 1 :] = 1
    stats["strayed"] = share(strayed, b.mask)
    stats |= {"weight": share(cut, b.mask), "weight_max": (float((w * b.mask).max()), None)}
    return token_mean(cut * A * b.logp, b.mask), stats
