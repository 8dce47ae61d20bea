"""The recipe: each layer alone passes its own file's checks; and the combination of layers."""

from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace

import torch

from . import add_up, grpo, loss_of, maspo, mini_batch, one, stapo, toy_batch, weight, written_here

# The layers, and what turns each off
OFF = {
    "clip": {"clip_high": 0.2, "token_mean": False},
    "tokens": {"tokens": "none"},
    "curriculum": {"curriculum": False},
    "branches": {"branches": 0},
    "lag": {"lag": 0},
}


def off(*layers: str) -> dict:
    """The flags that leave only these layers."""
    flags = [OFF[name].items() for name in OFF if name not in layers]
    return {flag: value for pairs in flags for flag, value in pairs}


def passes(module: ModuleType, checks: list[Callable], *layers: str, **flags: object) -> None:
    """Another file's checks hold for the recipe with these layers alone."""
    alone = SimpleNamespace(**vars(module) | {"Args": partial(module.Args, **off(*layers) | flags)})
    for check in checks:
        check(alone)


def check_no_layer(module: ModuleType) -> None:
    """With all layers off it is GRPO without its KL term: outside numbers, coefficients, parts."""
    kl = (grpo.check_kl, grpo.check_kl_gradient, grpo.check_kl_ratio)
    passes(module, [check for check in grpo.CHECKS if check not in kl])


def check_stapos_mask(module: ModuleType) -> None:
    """Layer 2 with layer 1 is STAPO: with the probabilities of π_θ."""
    checks = [stapo.check_fixture, stapo.check_silences_the_spurious]
    both = ("clip", "tokens")
    passes(module, [*checks, stapo.check_uses_the_current_policy], *both)
    stats = loss_of(module, module.Args(**off(*both)), **stapo.spurious_batch())[1]
    share, tokens = stats["silenced_share"]
    assert stats["silenced"][0] == 2 and abs(float(share / tokens) - 2 / 11) < 1e-9


def check_maspos_gate(module: ModuleType) -> None:
    """Layer 2 with the gate instead of the clip: the authors' numbers."""
    passes(module, [maspo.check_fixture, maspo.check_weights], "clip", "tokens", tokens="maspo")


def check_age(module: ModuleType) -> None:
    """With a lag, min(π_old/μ, 8) of the whole response multiplies r and its clip; without a lag μ
    does not matter."""
    for mu, factor in ((0.5, 0.8), (0.2, 2.0), (0.01, 8.0)):
        for ratio, advantage in ((1.1, 1.0), (1.5, 1.0), (0.7, -1.0), (1.5, -1.0)):
            plain = weight(module, ratio, advantage, 0.4, mu, **off("clip"))
            aged = weight(module, ratio, advantage, 0.4, mu, **off("clip", "lag"))
            assert abs(aged - factor * plain) < 1e-9
            assert abs(plain - weight(module, ratio, advantage, 0.4, 0.4, **off("clip"))) < 1e-12
    old = one(-1.0, -2.0, -0.5)
    logp = old.clone().requires_grad_()
    batch = {"old_logp": old, "rollout_logp": old - one(0.3, -0.5, 0.4), "mask": one(1.0, 1, 1)}
    args = module.Args(**off("clip", "lag"))
    loss_of(module, args, logp=logp, advantages=one(1.0)[0], **batch)[0].backward()
    assert torch.allclose(-logp.grad * 3, one(0.2).exp().expand(1, 3))


IS_BRANCH = torch.tensor([False, True, False, False, True, False])  # of the toy batch


def streams(size: torch.Tensor) -> torch.Tensor:
    """The column `branch`, computed from each row's part of its stream's denominator `[6]`."""
    return torch.where(IS_BRANCH, size[~IS_BRANCH].sum() / size[IS_BRANCH].sum(), 0.0)


def check_streams(module: ModuleType) -> None:
    """Layer 4's rows are averaged over their own tokens, or responses, and weighed by λ."""
    for layers in (("clip", "branches"), ("branches",)):
        batch, args = toy_batch(), module.Args(**off(*layers), branch_weight=0.7)
        batch["logp"].requires_grad_()
        size = module.counted(args, batch["mask"])
        loss_of(module, args, **batch, branch=streams(size))[0].backward()
        found, expected = -batch["logp"].grad, torch.zeros_like(batch["mask"])
        for stream, factor in ((~IS_BRANCH, 1.0), (IS_BRANCH, 0.7)):
            part = {name: x.detach()[stream] for name, x in batch.items()}
            part["logp"].requires_grad_()
            loss_of(module, args, **part)[0].backward()
            expected[stream] = -factor * part["logp"].grad
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-15)


def check_parts_add_up(module: ModuleType) -> None:
    """All layers on, for both averages: with the mini-batch's tokens and balance, sums over any
    parts, one of them branches only, give the loss of the whole. With those of the parts they do
    not."""
    generator = torch.Generator().manual_seed(0)
    batch = toy_batch()
    batch["entropy"] = torch.rand(batch["mask"].shape, generator=generator, dtype=torch.float64)
    batch["rollout_logp"] = batch["old_logp"] - 0.3 * batch["entropy"]
    for token_mean in (True, False):
        args = module.Args(tau_p=0.9, entropy_quantile=0.7, token_mean=token_mean)
        kept = mini_batch(module, args, **batch)[2].kept
        assert 0 < kept.sum() < batch["mask"].sum()
        batch["branch"] = streams(kept.sum(1) if token_mean else torch.ones(6).double())
        add_up(module, args, batch, [[0], [1, 4], [2, 3, 5]], kept=kept)


READS = ("old_logp", "rollout_logp", "entropy")  # columns that the loss uses
CHECKS = written_here(globals())
RETURN = "return -(objective * kept * stream[:, None]).sum(), size[main].sum(), stats"
BY_AGE = "log_w = log_weight(batch.old_logp, batch.rollout_logp, mask)"
STREAM = "stream = torch.where(main, 1.0, args.branch_weight * branch)"
MUTANTS = {
    "sign": (RETURN, RETURN.replace("-(", "(")),
    "silenced all the same": (RETURN, RETURN.replace("kept", "mask")),
    "one stream": (STREAM, STREAM.replace("* branch", "")),
    "λ on main": (STREAM, STREAM.replace("main, 1.0", "main, args.branch_weight")),
    "silenced tokens counted": ("size = counted(args, kept)", "size = counted(args, mask)"),
    "age of π_θ": (BY_AGE, BY_AGE.replace("batch.old_logp", "logp")),
    "no age": ("objective * weight[:, None]", "objective"),
    "age by token": (
        "objective = objective * weight[:, None]",
        "objective = objective * (batch.old_logp - batch.rollout_logp).exp().clamp(max=8)",
    ),
    "the other mask": (
        '    if args.tokens == "stapo":\n        stapo.',
        '    if args.tokens != "stapo":\n        stapo.',
    ),
}
