"""VESPO."""

from tests.loop.oracle import Batch, Tensor, token_mean, tokens, torch

FLAGS = {"grad_clip": 3.4}
OFF = {"k_pos": 0.0, "lambda_pos": 0.0, "k_neg": 0.0, "lambda_neg": 0.0}


def objective(b: Batch) -> tuple[Tensor, dict]:
    W, good = ((b.logp - b.old) * b.mask).sum(1).exp().detach(), b.A >= 0
    k = torch.where(good, b.args["k_pos"], b.args["k_neg"]).double()
    lam = torch.where(good, b.args["lambda_pos"], b.args["lambda_neg"]).double()
    phi = W**k * (lam * (1 - W)).exp()
    stats = {"reshaped": (float((phi - 1).abs().sum()), len(phi))}
    for name, some in (("gate_pos", b.A > 0), ("gate_neg", b.A < 0)):
        stats[name] = float(phi[some].sum()), int(some.sum())
    stats["weight_max"] = (float(W.max()), None)
    b.count = tokens(b.mask)
    return token_mean((phi * b.A)[:, None] * b.logp, b.mask), stats
