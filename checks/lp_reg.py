"""Lp-Reg: the proxy, which tokens it protects, and how strongly it pulls."""

from types import ModuleType

import torch
from torch import Tensor

from . import Run
from .formulas import Batch, clip_statistics, surrogate, token_mean
from .harness import ZSCORES, near


def chosen(b: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of wrong responses; the rarest of them, by a quantile of log π_θ; and
    π_proxy/π_θ where these have fallen below π_proxy, 1 elsewhere."""
    now, bad = b.logp.detach(), (b.A[:, None] < 0) & (b.mask > 0)
    rare = bad & (now <= torch.quantile(now[bad], b.args.rare_share) + 1e-5)
    fallen = rare & (now < b.proxy_logp - 1e-5)
    return bad, rare, torch.where(fallen, b.proxy_logp - b.logp, 0.0).exp()


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """J is the mean over all tokens of min(r Â, clip(r) Â), minus β k3 of π_proxy and π_θ on the
    protected tokens."""
    pull = chosen(b)[2]
    return token_mean(surrogate(b) - b.args.proxy_weight * (pull - pull.log() - 1), b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """protected_share is of the tokens with Â < 0, protected_pull the mean β (π_proxy/π_θ - 1) of
    protected tokens, noise_share the share of rare tokens that the proxy has filtered out."""
    bad, rare, pull = chosen(b)
    return clip_statistics(b) | {
        "protected_share": ((pull > 1).sum(), bad.sum()),
        "protected_pull": (b.args.proxy_weight * (pull - 1).sum(), (pull > 1).sum()),
        "noise_share": ((rare & b.proxy_logp.isinf()).sum(), rare.sum()),
    }


def check_proxy(module: ModuleType) -> None:
    """κ = 0.02: of 0.6, 0.385, 0.013, 0.002 the last two are on both sides of 0.012. The rest is
    renormalised to 1, and filtered tokens have probability 0."""
    p = torch.tensor([[0.6, 0.385, 0.013, 0.002]] * 4, dtype=torch.float64)
    proxy = module.proxy_logprobs(p.log(), torch.arange(4), kappa=0.02).exp()
    near(proxy, [0.6 / 0.998, 0.385 / 0.998, 0.013 / 0.998, 0.0], "π_proxy")


SHARED = ZSCORES
CASES = [{"rare_share": 0.4, "clip_low": 0.2, "clip_high": 0.28}]
CASES += [{"rare_share": 0.9, "clip_high": 0.2, "proxy_weight": 0.3}]
RUN = Run(
    stored={"rare_share": 0.7, "kappa": 1e-4, "clip_low": 0.2, "clip_high": 0.28},
    small="--rare_share 0.7 --kappa 1e-4",
    needs={"kappa": {"kappa": 0.3}},
)
