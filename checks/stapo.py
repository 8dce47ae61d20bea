"""STAPO: its base objective, which tokens it silences, the entropy's quantile."""

from types import ModuleType

import torch
from torch import Tensor

from . import CLIP, SHARE, ZSCORE, ZSCORES, add_up, busy_batch, clipped
from . import counts, loss_of, matches, mini_batch, no_kl, response_tokens, written_here


def check_fixture(module: ModuleType) -> None:
    """With its threshold at 0 it is its base objective: DAPO's."""
    matches(module, "dapo_eps0.2_0.28_tokenmean", tau_p=0.0)


def spurious_batch() -> dict[str, Tensor]:
    """Rows: right, right, wrong. p and H of the tokens are chosen one by one."""
    probs = [[0.001, 0.001, 0.5, 0.003], [0.0019, 0.9, 0.9, 0.9], [0.001, 0.001, 0.9, 0.9]]
    entropy = [[0.1, 3.0, 0.2, 0.1], [0.3, 0.1, 0.1, 0.0], [0.1, 0.1, 2.8, 2.9]]
    mask = [[1.0, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]
    columns = {"logp": probs, "entropy": entropy, "mask": mask, "advantages": [1.0, 0.5, -1.0]}
    batch = {name: torch.tensor(x, dtype=torch.float64) for name, x in columns.items()}
    batch["logp"] = batch["logp"].log()
    return batch | {"old_logp": batch["logp"].clone()}


def check_silences_the_spurious(module: ModuleType) -> None:
    """Rewarded, improbable and sure: (0,0) and (1,0). Not (0,1): unsure; (0,3): p over τ_p; row 2:
    Â < 0. The mean is over the kept tokens."""
    batch = spurious_batch()
    batch["logp"].requires_grad_()
    loss_of(module, module.Args(), **batch)[0].backward()
    silent = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    kept = batch["mask"] * ~silent
    assert torch.allclose(batch["logp"].grad, -batch["advantages"][:, None] * kept / kept.sum())


def check_uses_the_current_policy(module: ModuleType) -> None:
    """p is π_θ's, not π_old's: a token that has become likely is no longer silenced."""
    batch = spurious_batch()
    batch["logp"][0, 0] = -1.0
    assert loss_of(module, module.Args(), **batch)[1]["silenced"][0] == 1


def check_quantile(module: ModuleType) -> None:
    """τ_h is the 80% quantile of the entropies of response tokens, padding excluded."""
    batch = spurious_batch()
    entropies = batch["entropy"][batch["mask"].bool()]  # [11]
    threshold = module.entropy_threshold(module.Args(), entropies)
    assert torch.isclose(threshold, torch.quantile(entropies, 0.8)) and threshold == 2.8
    batch["entropy"][1, 3] = 1000.0  # padding: with it the quantile would be above 2.85
    for height, silenced in ((2.75, 2), (2.85, 1)):  # token (0,0) below τ_h, or at it
        batch["entropy"][0, 0] = height
        assert loss_of(module, module.Args(), **batch)[1]["silenced"][0] == silenced


def check_quantile_of_candidates(module: ModuleType) -> None:
    """candidates: τ_h is the 75% quantile of the entropies of improbable tokens in right responses,
    and of no others. Of two, the lower one is silenced; one is never below its own quantile."""
    probs = [[0.001, 0.001, 0.001, 0.001, 0.001, 0.9, 0.001], [0.001] * 7]
    entropy = [[0.3, 0.1, 0.5, 0.2, 0.4, 3.0, 9.0], [3.0] * 7]
    mask = [[1.0, 1, 1, 1, 1, 1, 0], [1.0] * 7]  # the token of entropy 9 is padding
    columns = {"logp": probs, "entropy": entropy, "mask": mask, "advantages": [1.0, -1.0]}
    batch = {name: torch.tensor(x, dtype=torch.float64) for name, x in columns.items()}
    args = module.Args(entropy_rule="candidates")
    # The quantiles of the first 5, 2 and 1 entropies: 0.4, 0.25 and 0.3
    for candidates, silenced in ((5, [0, 1, 3]), (2, [1]), (1, []), (0, [])):
        p = batch["logp"].clone()
        p[0, candidates:5] = 0.9
        logp = p.log().requires_grad_()
        changed = {"logp": logp, "old_logp": p.log()}
        loss_of(module, args, **batch | changed)[0].backward()
        assert (logp.grad[0, :6] == 0).nonzero().flatten().tolist() == silenced
        assert (logp.grad[1] != 0).all()


def check_is_exact_in_parts(module: ModuleType) -> None:
    """With τ_h of the whole mini-batch, sums over any parts give the loss of the whole. With τ_h of
    the parts they do not."""
    batch, args = spurious_batch(), module.Args()
    _, _, whole = mini_batch(module, args, **batch)
    add_up(module, args, batch, [[0], [1], [2]], spurious=whole.spurious)


def check_statistics(module: ModuleType) -> None:
    """silenced is the number of silenced tokens, silenced_share that of all response tokens;
    silenced_prob and silenced_entropy are the means over them of π_θ and of the entropy. clip_share
    and its parts are of all response tokens, silenced or not."""
    batch, bounds = busy_batch(), {"clip_low": 0.2, "clip_high": 0.28}
    t, args = response_tokens(batch), no_kl(module, tau_p=0.95, entropy_quantile=0.9, **bounds)
    p = t.old * t.r
    silent = (t.A > 0) & (p < 0.95) & (t.H < torch.quantile(t.H, 0.9) - 1e-5)
    assert 0 < silent.sum() < t.M
    expected = {f"clip_{name}": pair for name, pair in clipped(t, 0.2, 0.28).items()}
    expected |= {"silenced": (silent.sum(), None), "silenced_share": (silent.sum(), t.M)}
    expected["silenced_prob"] = p[silent].sum(), silent.sum()
    expected["silenced_entropy"] = t.H[silent].sum(), silent.sum()
    counts(loss_of(module, args, **batch)[1], expected)


def check_quantile_of_many(module: ModuleType) -> None:
    """A mini-batch may have more tokens than torch.quantile takes."""
    many = torch.arange(2**24 + 2).flip(0) / 2**24
    assert abs(module.entropy_threshold(module.Args(), many) - 0.8) < 1e-4


READS = ("old_logp", "entropy")  # columns that the loss uses
CHECKS = [*written_here(globals()), *ZSCORES]
RARE = "(batch.advantages[:, None] > 0) & improbable"
IMPROBABLE = "logp.exp() < args.tau_p"
AMONG = 'among = mask if args.entropy_rule == "all" else candidates'
CLAMP = "ratio.clamp(1 - args.clip_low, 1 + args.clip_high)"
RETURN = "return -(objective * kept).sum(), kept.sum()"
MUTANTS = {
    **ZSCORE,
    **CLIP,
    "negative advantages silenced too": (RARE, RARE.replace(">", "!=")),
    "μ for π_old": (
        "ratio = (logp - batch.old_logp).exp()",
        "ratio = (logp - batch.rollout_logp).exp()",
    ),
    "clip_share of what is left": (SHARE, SHARE.replace("cut * mask", "cut * kept")),
    "silenced_prob of π_old": (
        "(logp.detach().exp() * spurious)",
        "(batch.old_logp.exp() * spurious)",
    ),
    "entropy ignored": ("candidates & sure", "candidates"),
    "padding in the quantile": (AMONG, AMONG.replace("= mask if", "= mask | True if")),
    "candidates: all tokens in the quantile": (
        AMONG,
        AMONG.replace("else candidates", "else mask"),
    ),
    "candidates: the other rule's quantile": ("else args.candidate", "else args.entropy"),
    "all tokens in the denominator": (RETURN, RETURN.replace("kept.sum()", "mask.sum()")),
    "π_old for π_θ": (IMPROBABLE, IMPROBABLE.replace("logp", "batch.old_logp")),
    "symmetric clip": (CLAMP, CLAMP.replace("clip_high", "clip_low")),
    "sign": ("return -(objective * kept)", "return (objective * kept)"),
}
