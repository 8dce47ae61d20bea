"""OPD: `ref` is here a teacher's log-probs, of a model that no step changes."""

from tests.loop.oracle import Batch, Oracle, Tensor, log_probs, token_mean, tokens_of, torch
from tests.loop.oracle import untrained

FLAGS = {"reward_weight": 0.3, "is_cap": 1.4, "beta": 0.6, "grad_clip": 28.0}
OFF = {"beta": 0.0}


def prepare(o: Oracle, step: int, b: Batch) -> None:
    with torch.no_grad():
        b.ref = log_probs(untrained("model-teacher"), b.rows)[0]


def objective(b: Batch) -> Tensor:
    ours = b.logp.detach()
    w = (ours - b.mu).exp().clip(max=b.args["is_cap"])
    A = b.args["reward_weight"] * b.A[:, None] + b.args["beta"] * (b.ref - ours)
    return token_mean(w * A * b.logp, tokens_of(b, b.mask))
