"""Lp-Reg: the proxy, which tokens it protects, how strongly it pulls, and the tokens behind δ."""

import math
from types import ModuleType

import torch
from torch import Tensor

from . import SIDES, TOKEN_MEAN, ZSCORE, ZSCORES, add_up, check_clip_statistics, loss_of, matches
from . import mini_batch, no_kl, one, weight, written_here

OFF = {"clip_low": 0.2, "clip_high": 0.28, "proxy_weight": 0.0}


def check_without_the_spring(module: ModuleType) -> None:
    """With β = 0 and DAPO's ε: the base objective, with outside numbers."""
    matches(module, "dapo_eps0.2_0.28_tokenmean", **OFF)


def check_proxy(module: ModuleType) -> None:
    """κ = 0.02: of 0.6, 0.385, 0.013, 0.002 the last two are on both sides of 0.012. The rest is
    renormalised to 1, and filtered tokens have probability 0."""
    p = torch.tensor([[0.6, 0.385, 0.013, 0.002]] * 4, dtype=torch.float64)
    proxy = module.proxy_logprobs(p.log(), torch.arange(4), kappa=0.02).exp()
    assert torch.allclose(proxy, torch.tensor([0.6, 0.385, 0.013, 0.0]).double() / 0.998)
    assert proxy[3] == 0 and abs(proxy.sum() - 1) < 1e-12
    untouched = module.proxy_logprobs(p.log(), torch.arange(4), kappa=1e-9)
    assert torch.allclose(untouched, p[0].log())


def check_weights(module: ModuleType) -> None:
    """M r Â + β (π_proxy/π_θ - 1), the second part on protected tokens: Â < 0 and fallen. At Â =
    -1, π_proxy = π_old and β = 1 it is -r + 1/r - 1, which is 0 at r = 0.618."""
    for ratio in (0.1, 0.5, 0.9):
        assert abs(weight(module, ratio, -1.0) - (-ratio + 1 / ratio - 1)) < 1e-12
        assert (
            abs(weight(module, ratio, -2.0, proxy_weight=0.5) + 2 * ratio - 0.5 / ratio + 0.5)
            < 1e-9
        )
        assert abs(weight(module, ratio, 1.0) - ratio) < 1e-12
    assert abs(weight(module, (5**0.5 - 1) / 2, -1.0)) < 1e-12
    assert abs(weight(module, 1.5, -1.0) + 1.5) < 1e-12  # it has risen: nothing to protect


def check_clip(module: ModuleType) -> None:
    """r <= 10 where Â > 0, no bound where Â < 0."""
    for advantage, ratio, expected in ((1, 9.9, 9.9), (1, 10.1, 0), (-1, 50, -50)):
        assert abs(weight(module, ratio, advantage) - expected) < 1e-9
    assert abs(weight(module, 0.01, -1.0, proxy_weight=0.0) + 0.01) < 1e-12


def rare_batch() -> dict[str, Tensor]:
    """Rows: right, wrong, wrong; r = 0.5. π_proxy is a little above π_old, but 0 in (1, 1)."""
    probs = [[0.001, 0.9, 0.9, 0.9], [0.02, 0.01, 0.9, 0.8], [0.04, 0.7, 0.6, 0.5]]
    mask = [[1.0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]
    batch = {"logp": torch.tensor(probs, dtype=torch.float64).log()}
    batch |= {"mask": torch.tensor(mask).double(), "advantages": one(1.0, -1.0, -0.5)[0]}
    batch["old_logp"] = batch["logp"] + math.log(2)
    batch["proxy_logp"] = batch["old_logp"] - math.log(0.96)
    batch["proxy_logp"][1, 1] = -torch.inf
    return batch


def check_protects_the_rare(module: ModuleType) -> None:
    """With ρ = 0.4 of six negative-advantage tokens: (1,0), (1,1), (2,0). (1,1) is noise. The rare
    token of the right response is not protected, nor is padding."""
    batch, args = rare_batch(), no_kl(module, rare_share=0.4)
    batch["logp"].requires_grad_()
    loss, stats = loss_of(module, args, **batch)
    loss.backward()
    expected = 0.5 * batch["advantages"][:, None] * batch["mask"]
    expected[1, 0] += 2 / 0.96 - 1
    expected[2, 0] += 2 / 0.96 - 1
    assert torch.allclose(batch["logp"].grad, -expected / 10)
    assert stats["protected_share"] == (2, 6) and stats["noise_share"] == (1, 3)
    assert abs(stats["protected_pull"][0].item() - 2 * (2 / 0.96 - 1)) < 1e-12
    assert torch.isfinite(loss)


def check_is_exact_in_parts(module: ModuleType) -> None:
    """With δ of the whole mini-batch, sums over any parts give the loss of the whole. With δ of the
    parts they do not."""
    batch, args = rare_batch(), no_kl(module, rare_share=0.9)
    _, _, whole = mini_batch(module, args, **batch)
    add_up(module, args, batch, [[0], [1], [2]], rare=whole.rare)


CHECKS = [*written_here(globals()), *ZSCORES, check_clip_statistics]
RATIO = "(proxy_logp - logp).masked_fill"
BAD = "bad = (batch.advantages[:, None] < 0) & batch.mask.bool()"
MUTANTS = {
    **ZSCORE,
    **SIDES,
    **TOKEN_MEAN,
    "padding protected": (BAD, BAD.replace("batch.mask.bool()", "(batch.mask >= 0)")),
    "the likeliest protected": ("logp <= threshold + 1e-5", "logp >= threshold - 1e-5"),
    "risen tokens pulled down": ("rare & (now < proxy_logp - 1e-5)", "rare"),
    "by π_old": ("logp <= threshold", "batch.old_logp <= threshold"),
    "the spring pushes": ("objective - args.proxy_weight", "objective + args.proxy_weight"),
    "k3 without gradient": (RATIO, "(proxy_logp - now).masked_fill"),
    "not renormalised": ("left.log_softmax(-1)", "left"),
    "infinite where filtered out": (".masked_fill(~protected, 0.0)", " * protected"),
}
