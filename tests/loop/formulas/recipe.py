"""The recipe: all its layers at once, with stapo's or maspo's tokens."""

from tests.loop.oracle import CHOICE, Batch, K, Tensor, age, as_recorded, both_streams
from tests.loop.oracle import gated, silent, surrogate, token_mean, tokens_of, torch

FLAGS = CHOICE | {"tau_p": 0.9, "lag": 1, "rho_on": 0.5, "branches": K, "branch_weight": 0.7}
FLAGS |= {"lr": 3e-4, "grad_clip": 12.0}
ALSO = [{"tokens": "maspo"}]
STORED = {"lag": 0, "candidates": 1, "branches": 4, "tau_p": 0.9, "entropy_quantile": 0.95}
SMALL = "--lag 1 --candidates 4 --teacher_batch 8 --window 20".split()
rounds = as_recorded  # prompts are chosen


def objective(b: Batch) -> Tensor:
    age(b)
    w = ((b.old - b.mu) * b.mask).sum(1).exp().clip(max=b.args["is_cap"])
    weight = (w * torch.where(b.branch, b.args["branch_weight"], 1.0))[:, None]
    maspo = b.args["tokens"] == "maspo"
    kept = b.mask if maspo else b.mask * ~silent(b)
    tokens_of(b, kept[~b.branch])
    return both_streams(b, weight * (gated(b) if maspo else surrogate(b)), kept, token_mean)
