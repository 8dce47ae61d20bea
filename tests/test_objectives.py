"""The other objectives: outside numbers, gradient weights, limits, defining properties, theorems;
and mutants."""

import itertools
from dataclasses import replace
from types import ModuleType

import gspo
import maspo
import minirl
import pytest
import sapo
import stapo
import torch
from common.rollout import HFEngine
from test_losses import FIXTURE, caught, loss_of, mutate, toy_batch
from torch import Tensor

import grpo


def one(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def weight(
    module: ModuleType,
    ratio: float,
    advantage: float,
    old: float = 1.0,
    mu: float | None = None,
    **flags,
) -> float:
    """The gradient weight on ∇ log π of a one-token response whose ratio is `ratio` and whose π_old
    is `old`."""
    old_logp = one(old).log()
    logp = (old_logp + one(ratio).log()).requires_grad_()
    rollout_logp = old_logp if mu is None else one(mu).log()
    args = replace(module.Args(), **flags)
    entropy = torch.full_like(old_logp, 9.0)
    tensors = {
        "advantages": one(advantage)[0],
        "mask": one(1.0),
        "rollout_logp": rollout_logp,
        "entropy": entropy,
    }
    loss_of(module, args, logp=logp, old_logp=old_logp, **tensors)[0].backward()
    return -logp.grad.item()


def matches(module: ModuleType, case: str, tolerance: float = 1e-8, **flags: float) -> None:
    """Value and gradient agree with the named case of the fixture."""
    expected, batch = FIXTURE["cases"][case], toy_batch()
    batch["logp"].requires_grad_()
    loss, _ = loss_of(module, replace(module.Args(), **flags), **batch)
    loss.backward()
    assert abs(loss.item() - expected["loss"]) < tolerance
    assert torch.allclose(
        batch["logp"].grad,
        torch.tensor(expected["grad"], dtype=torch.float64),
        rtol=0,
        atol=tolerance,
    )


def gradient(module: ModuleType, **flags: float) -> Tensor:
    """The gradient on the toy batch, in which many tokens are beyond every clip."""
    batch = toy_batch()
    batch["logp"].requires_grad_()
    loss_of(module, replace(module.Args(), **flags), **batch)[0].backward()
    return batch["logp"].grad


def two_responses() -> dict[str, Tensor]:
    """The log-ratios of objectives that can be checked by hand: [.1, -.2, .3] with Â = 1, [-.05,
    .02] with Â = -1."""
    logp = torch.tensor([[0.1, -0.2, 0.3], [-0.05, 0.02, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]], dtype=torch.float64)
    return {
        "logp": logp,
        "old_logp": 0 * logp,
        "mask": mask,
        "advantages": torch.tensor([1.0, -1], dtype=torch.float64),
    }


# GSPO


def gspo_fixture(module: ModuleType) -> None:
    matches(module, "gspo_3e-4_4e-4")
    matches(module, "gspo_0.2_0.2", clip_low=0.2, clip_high=0.2)


def gspo_by_hand(module: ModuleType) -> None:
    loss, stats = loss_of(module, module.Args(), **two_responses())
    # s = 1.068939 and .985112, both clipped
    assert abs(loss.item() - (-1.0004 + 0.9997) / 2) < 1e-12
    assert [
        float(total / count)
        for total, count in (stats["clip_share"], stats["clip_share_of_tokens"])
    ] == [1, 1]


def gspo_clips_sequences_not_tokens(module: ModuleType) -> None:
    """Tokens far off-policy in opposite directions: GRPO would cut one, GSPO cuts nothing. And the
    reverse."""
    mask = torch.ones(1, 4, dtype=torch.float64)
    logp = torch.tensor([[0.5, -0.5, 0.25, -0.25]], dtype=torch.float64, requires_grad=True)
    rest = {"old_logp": 0 * mask, "mask": mask, "advantages": one(1.0)[0]}
    loss, stats = loss_of(module, module.Args(), logp=logp, **rest)
    loss.backward()
    assert (
        torch.allclose(logp.grad, -mask / 4)
        and stats["clip_share"][0] == 0
        and stats["token_clip_share"][0] == 2
    )
    logp = torch.full((1, 4), 0.01, dtype=torch.float64, requires_grad=True)
    loss, stats = loss_of(module, module.Args(), logp=logp, **rest)
    loss.backward()
    assert (
        (logp.grad == 0).all() and stats["clip_share"][0] == 1 and stats["token_clip_share"][0] == 0
    )


def gspo_ignores_padding(module: ModuleType) -> None:
    """Garbage on padding and more of it change neither value nor gradient."""
    batch = two_responses()
    narrow = loss_of(module, replace(module.Args(), clip_low=0.5, clip_high=0.5), **batch)[0]
    wide = {
        name: torch.nn.functional.pad(x, (0, 3)) if x.dim() == 2 else x for name, x in batch.items()
    }
    wide["logp"] = wide["logp"] + 7 * (1 - wide["mask"])
    assert torch.isclose(
        narrow, loss_of(module, replace(module.Args(), clip_low=0.5, clip_high=0.5), **wide)[0]
    )


def gspo_token_has_the_same_gradient(module: ModuleType) -> None:
    """The paper's GSPO-token form, written out here: s_t = sg[s] π/sg[π], seq-mean-token-mean."""
    for flags in ({}, {"clip_low": 0.2, "clip_high": 0.2}):
        args, batch = replace(module.Args(), **flags), toy_batch()
        logp, mask, A = batch["logp"].requires_grad_(), batch["mask"], batch["advantages"][:, None]
        s = (((logp - batch["old_logp"]) * mask).sum(1) / mask.sum(1)).exp().detach()[:, None]
        s_token = s * (logp - logp.detach()).exp()
        objective = torch.minimum(
            s_token * A, s_token.clamp(1 - args.clip_low, 1 + args.clip_high) * A
        )
        ((objective * mask).sum(1) / mask.sum(1)).mean().neg().backward()
        assert torch.allclose(logp.grad, gradient(module, **flags), rtol=1e-12, atol=1e-15)


def gspo_of_one_token_is_grpo(module: ModuleType) -> None:
    for ratio, advantage in itertools.product((0.5, 0.79, 0.9, 1.0, 1.1, 1.21, 2.0), (1.0, -1.0)):
        ours = weight(module, ratio, advantage, clip_low=0.2, clip_high=0.2)
        assert abs(ours - weight(grpo, ratio, advantage, beta=0.0)) < 1e-12


# SAPO


def sapo_fixture(module: ModuleType) -> None:
    matches(module, "sapo_tau1.0_1.05_seqmean")


def sapo_by_hand(module: ModuleType) -> None:
    assert abs(loss_of(module, module.Args(), **two_responses())[0].item() + 0.099864) < 1e-6


SAPO_TABLE = {0.5: (0.4700, 0.4671), 0.75: (0.7384, 0.7372), 0.9: (0.8978, 0.8975), 1.0: (1.0, 1.0)}
SAPO_TABLE |= {
    1.1: (1.0973, 1.0970),
    1.3: (1.2712, 1.2683),
    2.0: (1.5729, 1.5362),
    4.0: (0.7228, 0.6304),
}


def sapo_weights(module: ModuleType) -> None:
    """r Â sech²(τ (r - 1) / 2), and the published table."""
    for ratio, (up, down) in SAPO_TABLE.items():
        assert (
            abs(weight(module, ratio, 1.0) - up) < 6e-5
            and abs(weight(module, ratio, -1.0) + down) < 6e-5
        )
    exact = 1.7 * 0.6 / torch.cosh(one(2.5 * 0.7 / 2)).item() ** 2
    assert abs(weight(module, 1.7, 0.6, tau_pos=2.5) - exact) < 1e-12


def sapo_is_normalised_at_one(module: ModuleType) -> None:
    """At r = 1 the weight is Â for every τ."""
    for tau in (0.1, 1.0, 1.05, 5.0):
        assert abs(weight(module, 1.0, 0.7, tau_pos=tau) - 0.7) < 1e-12
        assert abs(weight(module, 1.0, -0.7, tau_neg=tau) + 0.7) < 1e-12


def sapo_without_temperature_is_unclipped(module: ModuleType) -> None:
    """τ -> 0 is the plain ratio objective, the same as GRPO with its clip wide open."""
    open_wide = gradient(grpo, beta=0.0, clip_low=1e9, clip_high=1e9)
    assert torch.allclose(gradient(module, tau_pos=1e-4, tau_neg=1e-4), open_wide, rtol=1e-6)
    assert not torch.allclose(gradient(module), open_wide, rtol=1e-3)


def sapo_statistics(module: ModuleType) -> None:
    logp = torch.tensor([[1.5, 0.0], [1.5, 0.0], [0.0, 0.0]], dtype=torch.float64)
    batch = {"logp": logp, "old_logp": 0 * logp, "mask": torch.ones_like(logp)}
    stats = loss_of(module, module.Args(), advantages=torch.tensor([1.0, -1, 0]), **batch)[1]
    mean = {name: float(total / count) for name, (total, count) in stats.items()}
    closed = [1 - 1 / torch.cosh(one(tau * (4.481689 - 1) / 2)).item() ** 2 for tau in (1.0, 1.05)]
    assert (
        abs(mean["gate_pos"] - (1 - closed[0] / 2)) < 1e-6
        and abs(mean["gate_neg"] - (1 - closed[1] / 2)) < 1e-6
    )


# STAPO


def stapo_fixture(module: ModuleType) -> None:
    """With its threshold at 0 it is its base objective: DAPO's."""
    matches(module, "dapo_eps0.2_0.28_tokenmean", tau_p=0.0)


def spurious_batch() -> dict[str, Tensor]:
    """Rows: right, right, wrong. p and H of the tokens are chosen one by one."""
    double = {"dtype": torch.float64}
    probs = torch.tensor(
        [[0.001, 0.001, 0.5, 0.003], [0.0019, 0.9, 0.9, 0.9], [0.001, 0.001, 0.9, 0.9]], **double
    )
    entropy = torch.tensor(
        [[0.1, 3.0, 0.2, 0.1], [0.3, 0.1, 0.1, 0.0], [0.1, 0.1, 2.8, 2.9]], **double
    )
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]], **double)
    logp = probs.log()
    return {
        **{"logp": logp, "old_logp": logp.clone(), "entropy": entropy, "mask": mask},
        "advantages": torch.tensor([1.0, 0.5, -1.0], **double),
    }


def stapo_silences_the_spurious(module: ModuleType) -> None:
    """Rewarded, improbable and sure: (0,0) and (1,0). Not (0,1): unsure; (0,3): p over τ_p; row 2:
    Â < 0."""
    batch = spurious_batch()
    batch["logp"].requires_grad_()
    loss, stats = loss_of(module, module.Args(), **batch)
    loss.backward()
    silent = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    kept = batch["mask"] * ~silent
    # Over the tokens left
    assert torch.allclose(batch["logp"].grad, -batch["advantages"][:, None] * kept / kept.sum())
    assert (
        stats["silenced"][0] == 2
        and abs(float(stats["silenced_share"][0] / stats["silenced_share"][1]) - 2 / 11) < 1e-9
    )
    assert abs(float(stats["silenced_prob"][0] / 2) - 0.00145) < 1e-9
    assert abs(float(stats["silenced_entropy"][0] / 2) - 0.2) < 1e-9


def stapo_uses_the_current_policy(module: ModuleType) -> None:
    """p is π_θ's, not π_old's: a token that has become likely is not silenced any more."""
    batch = spurious_batch()
    batch["old_logp"] = batch["logp"].clone()
    batch["logp"] = batch["logp"].clone()
    batch["logp"][0, 0] = -1.0
    assert loss_of(module, module.Args(), **batch)[1]["silenced"][0] == 1


def stapo_quantiles(module: ModuleType) -> None:
    """τ_h is the 80% quantile over response tokens, padding excluded; version 4's is over rare
    tokens of right ones."""
    batch = spurious_batch()
    parts = [batch[name] for name in ("logp", "entropy", "advantages", "mask")]
    everything = module.threshold_population(module.Args(), *parts)
    assert len(everything) == 11
    threshold = module.entropy_threshold(module.Args(), everything)
    assert torch.isclose(threshold, torch.quantile(batch["entropy"][batch["mask"].bool()], 0.8))
    many = torch.arange(2**24 + 2).flip(0) / 2**24  # more than torch.quantile takes
    assert abs(module.entropy_threshold(module.Args(), many) - 0.8) < 1e-4
    four = replace(module.Args(), entropy_over="rare", entropy_quantile=0.75)
    rare = module.threshold_population(four, *parts)
    assert sorted(rare.tolist()) == [0.1, 0.3, 3.0]  # (0,0), (1,0), (0,1)
    stats = loss_of(module, four, **batch)[1]
    assert stats["silenced"][0] == 2  # the 75% quantile of these three is 1.65
    none = replace(module.Args(), entropy_over="rare", tau_p=0.0)
    assert loss_of(module, none, **batch)[1]["silenced"][0] == 0


def stapo_is_exact_in_parts(module: ModuleType) -> None:
    """With τ_h of the whole mini-batch, sums over any parts give the whole's loss; a part's own τ_h
    would not."""
    batch = spurious_batch()
    batch["rollout_logp"] = batch["old_logp"]
    args = module.Args()
    parts = [batch[name] for name in ("logp", "entropy", "advantages", "mask")]
    threshold = module.entropy_threshold(args, module.threshold_population(args, *parts))
    whole = module.policy_loss(args, **batch)
    rows = [{name: x[i : i + 1] for name, x in batch.items()} for i in range(3)]
    split = [module.policy_loss(args, **row, threshold=threshold) for row in rows]
    assert (
        torch.isclose(sum(s[0] for s in split), whole[0]) and sum(s[1] for s in split) == whole[1]
    )
    assert sum(module.policy_loss(args, **row)[1] for row in rows) != whole[1]


# MASPO


MASPO_TABLE = {  # r: weights at π_old = .9 and .01, for Â = 1 and for Â = -1 (without the sign)
    **{
        0.5: (0.5, 0.5, 0.4415, 0.4958),
        0.75: (0.75, 0.75, 0.7270, 0.7484),
        0.9: (0.9, 0.9, 0.8955, 0.8997),
    },
    **{1.0: (1, 1, 1, 1), 1.1: (1.0951, 1.0997, 1.1, 1.1), 1.3: (1.2493, 1.2965, 1.3, 1.3)},
    **{2.0: (1.2850, 1.9414, 2, 2), 4.0: (0.0746, 3.0608, 4, 4)},
}


def maspo_fixture(module: ModuleType) -> None:
    """The authors' own function, at its defaults."""
    matches(module, "maspo_default_tokenmean")


def maspo_weights(module: ModuleType) -> None:
    for ratio, row in MASPO_TABLE.items():
        ours = [
            weight(module, ratio, advantage, old)
            for advantage in (1.0, -1.0)
            for old in (0.9, 0.01)
        ]
        for value, expected, sign in zip(ours, row, (1, 1, -1, -1)):
            assert abs(value - sign * expected) < 6e-5, (ratio, row)


def maspo_gates(module: ModuleType) -> None:
    """F alone, at five points, from the authors' code; the clamps on width and risk."""
    table = {(2, 0.9, 1): 0.642476, (2, 0.001, 1): 0.992558, (2, 0.9, 2): 0.658535}
    table |= {(0.5, 0.9, -1): 0.882948, (0.5, 0.01, -1): 0.991668}
    for (ratio, old, advantage), gate in table.items():
        assert abs(weight(module, ratio, advantage, old) / (ratio * advantage) - gate) < 1e-6
    # Width 501 without the cap, 10 with it
    capped = weight(module, 2.0, 1.0, 1e-9, beta_pos=0.0) / 2
    assert abs(capped - torch.tensor(-1 / 200.0).exp().item()) < 1e-6
    narrow = weight(module, 0.5, -1000.0, 1.0) / -500  # risk 1/31 without the floor, 0.1 with it
    assert abs(narrow - torch.tensor(-0.25 / 0.02).exp().item()) < 1e-6


def maspo_without_width_is_unclipped(module: ModuleType) -> None:
    """σ -> ∞ is the plain ratio objective, token-mean."""
    open_wide = gradient(stapo, tau_p=0.0, clip_low=1e9, clip_high=1e9)
    assert torch.allclose(gradient(module, sigma_base=1e9, sigma_high=1e9), open_wide, rtol=1e-9)
    assert not torch.allclose(gradient(module), open_wide, rtol=1e-3)


def maspo_statistics(module: ModuleType) -> None:
    """Where GRPO's gradient would be zero, part of it is kept; nothing is gated on the way back."""
    old = torch.tensor([[0.95, 0.05, 0.95], [0.95, 0.95, 0.95]], dtype=torch.float64).log()
    ratio = torch.tensor([[2.0, 2.0, 0.5], [1.0, 1.5, 0.9]], dtype=torch.float64)
    batch = {"logp": old + ratio.log(), "old_logp": old, "mask": torch.ones_like(old)}
    stats = loss_of(module, module.Args(), advantages=torch.tensor([1.0, -1.0]), **batch)[1]
    mean = {name: float(total / count) for name, (total, count) in stats.items()}
    assert abs(mean["grpo_cut_share"] - 2 / 6) < 1e-9  # the two at r = 2
    gates = [weight(module, 2.0, 1.0, old) / 2 for old in (0.95, 0.05)]
    assert abs(mean["kept_where_grpo_cuts"] - sum(gates) / 2) < 1e-6
    assert (
        abs(mean["gate_pos"] - (sum(gates) + 1) / 3) < 1e-6
        and mean["width_rare"] > 2 * mean["width_common"]
    )


# MiniRL


def minirl_weights(module: ModuleType) -> None:
    """M min(π_θ/μ, 5) Â: the mask sees π_θ/π_old, the weight π_θ/μ."""
    for old, mu, ratio, advantage in itertools.product(
        (0.2, 0.4), (0.01, 0.1, 0.3), (0.7, 0.9, 1.2, 1.3), (1.0, -1.0)
    ):
        masked = (advantage > 0 and ratio > 1.27) or (advantage < 0 and ratio < 0.8)
        expected = 0 if masked else min(old * ratio / mu, 5.0) * advantage
        assert abs(weight(module, ratio, advantage, old, mu) - expected) < 1e-12
        plain = 0 if masked else ratio * advantage
        assert (
            abs(weight(module, ratio, advantage, old, mu, correct_mismatch=False) - plain) < 1e-12
        )


def minirl_sums_tokens(module: ModuleType) -> None:
    """A sum over tokens, a mean over responses; with length_norm a mean over tokens; padding counts
    for nothing."""
    batch = two_responses()
    for flags, scale in (({}, 1.0), ({"length_norm": True}, batch["mask"].sum(1, keepdim=True))):
        logp = batch["logp"].detach().requires_grad_()
        args = replace(module.Args(), clip_high=9.0, **flags)
        loss_of(module, args, **(batch | {"logp": logp}))[0].backward()
        expected = -logp.detach().exp() * batch["advantages"][:, None] * batch["mask"] / scale / 2
        assert torch.allclose(logp.grad, expected)


def minirl_advantages(module: ModuleType) -> None:
    numbers = FIXTURE["advantages"]
    rewards, expected = (
        torch.tensor(numbers[name], dtype=torch.float64) for name in ("rewards", "mean_only")
    )
    assert torch.allclose(module.advantages(rewards), expected, rtol=0, atol=1e-12)


def minirl_is_the_first_order_of_the_reward(module: ModuleType) -> None:
    """The paper's claim, with every sequence enumerated: the surrogate's gradient under samples of
    μ equals that of the expected reward where π_θ = μ, the gap grows with the distance, and
    dividing by length breaks it at once."""
    generator = torch.Generator().manual_seed(3)
    V, T = 3, 3
    base, direction = (
        torch.randn(T, V + 1, V, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    sequences = [
        s for n in (1, 2, 3) for s in itertools.product(range(V), repeat=n) if 0 not in s[:-1]
    ]
    sequences = [s for s in sequences if s[-1] == 0 or len(s) == T]  # 0 is the EOS
    rewards = torch.randn(len(sequences), generator=generator, dtype=torch.float64)
    mask = torch.tensor(
        [[float(t < len(s)) for t in range(T)] for s in sequences], dtype=torch.float64
    )

    def logps(theta: Tensor) -> Tensor:
        table = theta.log_softmax(-1)
        rows = [
            [
                table[t, s[t - 1] if t else V, s[t]] if t < len(s) else 0 * table[0, 0, 0]
                for t in range(T)
            ]
            for s in sequences
        ]
        return torch.stack([torch.stack(row) for row in rows])  # [sequences, T]

    mu = logps(base)
    assert torch.isclose((mu.sum(1).exp()).sum(), torch.tensor(1.0, dtype=torch.float64))

    def gap(distance: float, **flags: bool) -> float:
        theta = (base + distance * direction).requires_grad_()
        truth = torch.autograd.grad((logps(theta).sum(1).exp() * rewards).sum(), theta)[0]
        args = replace(module.Args(), clip_low=99.0, clip_high=99.0, is_cap=1e9, **flags)
        logp = logps(theta)
        weighted = mu.sum(1).exp() * rewards  # E over μ: each sequence counts with its probability
        rest = {"old_logp": mu, "rollout_logp": mu, "advantages": weighted, "mask": mask}
        total, _, _ = module.policy_loss(args, logp=logp, entropy=0 * mask, **rest)
        ours = torch.autograd.grad(-total, theta)[0]
        return float((ours - truth).norm() / truth.norm())

    gaps = [gap(distance) for distance in (0.0, 0.05, 0.1, 0.2, 0.4)]
    assert (
        gaps[0] < 1e-12 and all(near < far for near, far in zip(gaps, gaps[1:])) and gaps[-1] > 0.05
    )
    assert gap(0.0, length_norm=True) > 0.1


CHECKS = {
    gspo: (
        *(gspo_fixture, gspo_by_hand, gspo_clips_sequences_not_tokens, gspo_ignores_padding),
        *(gspo_token_has_the_same_gradient, gspo_of_one_token_is_grpo),
    ),
    sapo: (
        *(sapo_fixture, sapo_by_hand, sapo_weights, sapo_is_normalised_at_one),
        *(sapo_without_temperature_is_unclipped, sapo_statistics),
    ),
    stapo: (
        *(
            stapo_fixture,
            stapo_silences_the_spurious,
            stapo_uses_the_current_policy,
            stapo_quantiles,
        ),
        stapo_is_exact_in_parts,
    ),
    maspo: (
        maspo_fixture,
        maspo_weights,
        maspo_gates,
        maspo_without_width_is_unclipped,
        maspo_statistics,
    ),
    minirl: (
        minirl_weights,
        minirl_sums_tokens,
        minirl_advantages,
        minirl_is_the_first_order_of_the_reward,
    ),
}
ROOT_MEAN = "log_ratio.sum(dim=1) / mask.sum(dim=1).clamp(min=1)"
PER_RESPONSE = "(objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)"
MUTANTS = {
    gspo: {
        "sum for mean in the ratio": (ROOT_MEAN, "log_ratio.sum(dim=1)"),
        "padding in the ratio": ("(logp - old_logp) * mask", "logp - old_logp"),
        "padding in the length": (ROOT_MEAN, "log_ratio.mean(dim=1)"),
        "sign": ("return -objective.sum()", "return objective.sum()"),
        "max for min": ("torch.minimum", "torch.maximum"),
        "no clip": ("s.clamp(1 - args.clip_low, 1 + args.clip_high) * advantages", "s * advantages"),
        "bounds swapped": (
            "s.clamp(1 - args.clip_low, 1 + args.clip_high)",
            "s.clamp(1 - args.clip_high, 1 + args.clip_low)",
        ),
        "arithmetic mean of ratios": (f"({ROOT_MEAN}).exp()", "(log_ratio.exp() * mask).sum(dim=1) / mask.sum(dim=1)"),
        "weighted by length": ("return -objective.sum()", "return -(objective * mask.sum(dim=1)).sum()"),
        "detached": ("(logp - old_logp) * mask", "(logp.detach() - old_logp) * mask + 0 * logp"),
    },
    sapo: {
        "ratio twice": ("(ratio - 1)) * A  # [n, T]: f(r)", "(ratio - 1)) * ratio * A  # [n, T]: f(r)"),
        "no 4/τ": ("4 / tau * torch.sigmoid", "torch.sigmoid"),
        "temperatures swapped": ("where(A > 0", "where(A < 0"),
        "one temperature": ("A.new_tensor(args.tau_neg)", "A.new_tensor(args.tau_pos)"),
        "detached": ("torch.sigmoid(tau * (ratio - 1))", "torch.sigmoid(tau * (ratio - 1)).detach() * (1 + 0 * logp)"),
        "log-ratio": ("torch.sigmoid(tau * (ratio - 1))", "torch.sigmoid(tau * (logp - old_logp))"),
        "sign": ("return -per_response.sum()", "return per_response.sum()"),
        "token-mean": (
            "return -per_response.sum(), mask.new_tensor(len(mask))",
            "return -(objective * mask).sum(), mask.sum()",
        ),
        "no mask": (PER_RESPONSE, "objective.mean(dim=1)"),
    },
    stapo: {
        "negative advantages silenced too": (
            "(advantages[:, None] > 0) & (logp.detach",
            "(advantages[:, None] != 0) & (logp.detach",
        ),
        "only negative ones": ("(advantages[:, None] > 0) & (logp.detach", "(advantages[:, None] < 0) & (logp.detach"),
        "entropy ignored": (" & sure & mask", " & mask"),
        "entropy the wrong way round": ("entropy < threshold -", "entropy > threshold -"),
        "probability the wrong way round": ("(logp.detach().exp() < args.tau_p)", "(logp.detach().exp() > args.tau_p)"),
        "the lowest 20%": (
            "population.cpu().numpy(), args.entropy_quantile",
            "population.cpu().numpy(), 1 - args.entropy_quantile",
        ),
        "version 4: likely tokens in the quantile": (" & (logp.exp() < args.tau_p)\n", "\n"),
        "version 4: wrong responses in the quantile": ("chosen & (advantages[:, None] > 0)", "chosen"),
        "version 4's rule is the other": ('args.entropy_over == "rare"', 'args.entropy_over == "all"'),
        "padding in the quantile": ("chosen = mask.bool()", "chosen = torch.ones_like(mask).bool()"),
        "all tokens in the denominator": (
            "return -(objective * kept).sum(), kept.sum()",
            "return -(objective * kept).sum(), mask.sum()",
        ),
        "π_old for π_θ": (
            "spurious_tokens(args, logp, entropy, advantages, mask, threshold)  # [n, T]",
            "spurious_tokens(args, old_logp, entropy, advantages, mask, threshold)",
        ),
        "own threshold in every part": ("if threshold is None:", "if True:"),
        "symmetric clip": (
            "ratio.clamp(1 - args.clip_low, 1 + args.clip_high)",
            "ratio.clamp(1 - args.clip_low, 1 + args.clip_low)",
        ),
        "max for min": ("torch.minimum", "torch.maximum"),
        "sign": ("return -(objective * kept)", "return (objective * kept)"),
    },
    maspo: {
        "gate differentiated": ("with torch.no_grad():\n        old_p", "with torch.enable_grad():\n        old_p"),
        "ratio detached": ("objective = gate * ratio * A", "objective = gate * ratio.detach() * A + 0 * logp"),
        "two-sided gate": (
            "torch.where(outward, (-((ratio - 1) ** 2) / (2 * sigma**2)).exp(), 1.0)",
            "(-((ratio - 1) ** 2) / (2 * sigma**2)).exp()",
        ),
        "gate the way back": ("outward = (A * (ratio - 1)) > 0", "outward = (A * (ratio - 1)) < 0"),
        "no factor 2": ("(2 * sigma**2)", "(sigma**2)"),
        "σ ∝ 1/π": ("old_p**args.alpha", "old_p"),
        "width of the current policy": ("args.sigma_base / old_p", "args.sigma_base / logp.exp()"),
        "no cap": (".clamp(args.sigma_base, args.sigma_high)", ""),
        "no floor": (".clamp(0.1, 10)", ""),
        "risk the wrong way round": ("1 / (1 - args.beta_neg * A)", "1 - args.beta_neg * A"),
        "mean of response means": (
            "return -(objective * mask).sum(), mask.sum()",
            f"return -({PER_RESPONSE}).sum(), mask.new_tensor(len(mask))",
        ),
        "sign": ("return -(objective * mask)", "return (objective * mask)"),
    },
    minirl: {
        "mask from π_θ/μ": ("ratio = (logp.detach() - old_logp).exp()", "ratio = (logp.detach() - rollout_logp).exp()"),
        "weight from π_old": (
            "rollout_logp if args.correct_mismatch else old_logp",
            "old_logp if args.correct_mismatch else old_logp",
        ),
        "no cap": (".clamp(max=args.is_cap)", ""),
        "weight not detached": ("uncapped = (logp.detach() - behaviour)", "uncapped = (logp - behaviour)"),
        "ratio in place of log π": ("~cut * weight * A * logp", "~cut * weight * A * logp.exp()"),
        "mask inverted": ("~cut * weight", "cut * weight"),
        "no mask": ("~cut * weight", "weight"),
        "length-normalised": ("if args.length_norm:", "if True:"),
        "never length-normalised": ("if args.length_norm:", "if False:"),
        "token-mean": (
            "return -per_response.sum(), mask.new_tensor(len(mask))",
            "return -per_response.sum(), mask.sum()",
        ),
        "std": ("return centred  #", "return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)  #"),
        "sign": ("return -per_response.sum()", "return per_response.sum()"),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "check", [c for checks in CHECKS.values() for c in checks], ids=lambda check: check.__name__
)
def test_objective(check):
    check(next(module for module, checks in CHECKS.items() if check in checks))


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, mutants in MUTANTS.items() for name in mutants],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_mutant_is_caught(module, name):
    assert caught(mutate(module, *MUTANTS[module][name]), CHECKS[module])


def logit_gradient_norm(logits: Tensor, token: Tensor, factor: Tensor) -> Tensor:
    """|∇_a (factor log softmax(a)[token])|² by autograd, per row."""
    logits = logits.detach().requires_grad_()
    logp = logits.log_softmax(-1).gather(-1, token[:, None])[:, 0]
    return torch.autograd.grad((factor * logp).sum(), logits)[0].square().sum(-1)


def assert_theorem(logits: Tensor, token: Tensor, factor: Tensor) -> None:
    """STAPO's Theorem 3.1: the identity, and both bounds."""
    probs = logits.softmax(-1)
    p, V = probs.gather(-1, token[:, None])[:, 0], logits.shape[-1]
    H = -(probs * logits.log_softmax(-1)).sum(-1)
    norm = logit_gradient_norm(logits, token, factor)
    assert torch.allclose(
        norm, factor**2 * (1 - 2 * p + probs.square().sum(-1)), rtol=1e-9, atol=1e-14
    )
    C = (V - 1) / (V * torch.tensor(float(V)).log() ** 2)
    lower, upper = factor**2 * (1 - 2 * p + (-H).exp()), factor**2 * (2 - 2 * p - C * H**2)
    assert (norm >= lower - 1e-9).all() and (norm <= upper + 1e-9).all()


def test_stapo_theorem_on_random_softmaxes():
    generator = torch.Generator().manual_seed(0)
    for V, scale in itertools.product((2, 5, 50), (0.1, 1.0, 5.0, 20.0)):
        logits = scale * torch.randn(500, V, generator=generator, dtype=torch.float64)
        token = torch.randint(V, (500,), generator=generator)
        assert_theorem(logits, token, torch.randn(500, generator=generator, dtype=torch.float64))


def test_stapo_theorem_on_a_rollout(world, tiny):
    """The same on the tokens that the embedded model samples; and the largest norms are at low p
    and low H."""
    lm, tokenizer = tiny
    prompts = [tokenizer(prompt)["input_ids"] for prompt in ("7*8-9+6=", "3*3*3*3*3*3*3=")]
    rollout = HFEngine(lm, world, 0, "float32", 1024).generate(prompts, 64, 64, 1.0)
    with torch.no_grad():
        logits = lm(rollout.sequences).logits.double()
    where = [(i, int(rollout.prompt_len[i]) + t) for i, t in rollout.mask.nonzero().tolist()]
    picked = torch.stack([logits[i, position - 1] for i, position in where])
    token = torch.tensor([int(rollout.sequences[i, position]) for i, position in where])
    assert_theorem(picked, token, torch.ones(len(token), dtype=torch.float64))
    p = picked.softmax(-1).gather(-1, token[:, None])[:, 0]
    H = -(picked.softmax(-1) * picked.log_softmax(-1)).sum(-1)
    norm = logit_gradient_norm(picked, token, torch.ones_like(p))
    assert norm[(p < 0.05) & (H < 0.5)].mean() > 1.2 > 0.5 > norm[p > 0.5].mean()


def test_minirl_claim_does_not_hold_for_a_wrong_weight():
    """The enumeration can fail: with the weight cut at 1 the gradient at π_θ != μ is further
    off."""
    with pytest.raises(AssertionError):
        minirl_is_the_first_order_of_the_reward(
            mutate(minirl, "~cut * weight * A * logp", "~cut * 0.5 * A * logp")
        )
