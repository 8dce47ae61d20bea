"""Lp-Reg."""

import torch

from tests.loop.oracle import Batch, T, Tensor, clipped_surrogate, padded, share, sides, token_mean
from tests.loop.oracle import tokens

FLAGS = {"rare_share": 0.7, "kappa": 1e-4, "clip_low": 0.2, "clip_high": 0.28, "grad_clip": 8.0}
STORED = {"rare_share": 0.3}
OFF = {"proxy_weight": 0.0}


def proxy(b: Batch) -> Tensor:
    """π_proxy of every token: p / Σ p over what has at least κ of the likeliest's p under π_old."""
    found = []
    with torch.no_grad():
        p = (b.before(padded([row.ids for row in b.rows], 0)).logits / T).softmax(-1)
    for at, row in zip(p, b.rows):
        for place, token in enumerate(row.tokens, len(row.context) - 1):
            left = [x for x in at[place].tolist() if x >= b.args["kappa"] * float(at[place].max())]
            own = float(at[place, token])
            found.append(own / sum(left) if own in left else 0.0)
    return torch.zeros_like(b.mask).masked_scatter(b.mask > 0, torch.tensor(found).double())


def objective(b: Batch) -> tuple[Tensor, dict]:
    surrogate, beyond = clipped_surrogate(b, b.args["clip_low"], b.args["clip_high"])
    bad, pi, q = (b.A[:, None] < 0) & (b.mask > 0), b.logp.exp(), proxy(b)
    delta = torch.quantile(pi.detach()[bad].log(), b.args["rare_share"])
    rare = bad & (pi.detach().log() <= delta + 1e-5)
    held = rare & (q > pi.detach() * (1 + 1e-5))
    ratio = torch.where(held, q / pi, 1.0)
    beta, b.count = b.args["proxy_weight"], tokens(b.mask)
    stats = sides("clip", beyond, b)
    stats |= {"protected_share": share(held, bad), "noise_share": share(rare & (q == 0), rare)}
    stats["protected_pull"] = float(beta * (ratio - 1).detach().sum()), float(held.sum())
    return token_mean(surrogate - beta * (ratio - ratio.log() - 1), b.mask), stats
