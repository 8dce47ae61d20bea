"""Lp-Reg: a mini-batch's rare tokens of wrong responses are pulled to a filtered π_old."""

from tests.loop.oracle import Batch, T, Tensor, padded, surrogate, token_mean, tokens_of, torch

FLAGS = {"rare_share": 0.7, "kappa": 1e-4, "clip_low": 0.2, "clip_high": 0.28, "grad_clip": 8.0}
STORED = {"rare_share": 0.3}
OFF = {"proxy_weight": 0.0}


def proxy(b: Batch) -> Tensor:
    """π_proxy of every token: p / Σ p over what has at least κ of the likeliest's p under π_old."""
    found = torch.zeros_like(b.mask)
    with torch.no_grad():
        p = (b.before(padded([row.ids for row in b.rows], 0)).logits / T).softmax(-1)  # [n, S, V]
    for i, row in enumerate(b.rows):
        for t, token in enumerate(row.tokens):
            at = p[i, len(row.context) - 1 + t]  # [V]
            kept = at * (at >= b.args["kappa"] * at.max())
            found[i, t] = kept[token] / kept.sum()
    return found


def objective(b: Batch) -> Tensor:
    bad, pi, q = (b.A[:, None] < 0) & (b.mask > 0), b.logp.exp(), proxy(b)
    delta = torch.quantile(pi.detach()[bad].log(), b.args["rare_share"])
    rare = bad & (pi.detach().log() <= delta + 1e-5)
    ratio = torch.where(rare & (q > pi.detach() * (1 + 1e-5)), q / pi, 1.0)
    pull = b.args["proxy_weight"] * (ratio - ratio.log() - 1)
    return token_mean(surrogate(b) - pull, tokens_of(b, b.mask))
