"""What losses and advantages must be: outside numbers, closed forms, exact enumerations; and
mutants.

Each `check_*` takes an algorithm module, so that the mutant test can turn it on a damaged copy of
the file.
"""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import adapters
import grpo
import pytest
import torch

FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "losses.json").read_text())


def loss_of(module: ModuleType, args: object, **tensors: torch.Tensor) -> tuple[torch.Tensor, dict]:
    tensors = {
        "rollout_logp": tensors["old_logp"],
        "entropy": torch.zeros_like(tensors["logp"]),
    } | tensors
    total, count, stats = module.policy_loss(args, **tensors)
    return total / count, stats


def no_kl(module: ModuleType) -> object:
    return replace(module.Args(), **({"beta": 0.0} if hasattr(module.Args(), "beta") else {}))


def toy_batch() -> dict[str, torch.Tensor]:
    inputs = FIXTURE["inputs"]
    batch = {
        name: torch.tensor(inputs[name], dtype=torch.float64)
        for name in ("mask", "old_logp", "advantages")
    }
    batch["logp"] = batch["old_logp"] + torch.tensor(inputs["logratio"], dtype=torch.float64)
    return batch


def check_fixture(module: ModuleType) -> None:
    """Value and gradient agree with TRL, OpenRLHF and others on the toy batch."""
    case, batch = FIXTURE["cases"]["grpo_eps0.2_seqmean"], toy_batch()
    batch["logp"].requires_grad_()
    loss, _ = loss_of(module, no_kl(module), **batch)
    loss.backward()
    assert abs(loss.item() - case["loss"]) < 1e-8
    assert torch.allclose(
        batch["logp"].grad, torch.tensor(case["grad"], dtype=torch.float64), rtol=0, atol=1e-8
    )


def check_coefficients(module: ModuleType) -> None:
    """The gradient weight c(r, Â) on ∇ log π, and the share of clipped tokens, for one-token
    responses."""
    table = {
        (0.5, 1): 0.5,
        (0.75, 1): 0.75,
        (0.9, 1): 0.9,
        (1.0, 1): 1.0,
        (1.1, 1): 1.1,
        (1.25, 1): 0,
        (1.3, 1): 0,
    }
    table |= {
        (1.5, 1): 0,
        (2.0, 1): 0,
        (4.0, 1): 0,
        (0.5, -1): 0,
        (0.75, -1): 0,
        (0.9, -1): -0.9,
        (1.0, -1): -1.0,
    }
    table |= {(1.1, -1): -1.1, (1.3, -1): -1.3, (2.0, -1): -2.0, (4.0, -1): -4.0}
    for (ratio, advantage), weight in table.items():
        logp = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
        one = torch.ones(1, 1, dtype=torch.float64)
        loss, stats = loss_of(
            module,
            no_kl(module),
            logp=logp,
            old_logp=0 * one,
            advantages=advantage * one[0],
            mask=one,
        )
        loss.backward()
        assert abs(-logp.grad.item() - weight) < 1e-12, (ratio, advantage)
        cut, tokens = stats["clip_share"]
        assert (cut / tokens).item() == (weight == 0)


def check_asymmetric_clip(module: ModuleType) -> None:
    """clip_low bounds ratios below 1 and clip_high those above: 0.75 and 1.25 are cut by one of
    them only."""
    for low, high, ratio, advantage, weight in (
        (0.2, 0.3, 1.25, 1, 1.25),
        (0.3, 0.2, 0.75, -1, -0.75),
    ):
        logp = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
        one = torch.ones(1, 1, dtype=torch.float64)
        args = replace(no_kl(module), clip_low=low, clip_high=high)
        loss_of(module, args, logp=logp, old_logp=0 * one, advantages=advantage * one[0], mask=one)[
            0
        ].backward()
        assert abs(-logp.grad.item() - weight) < 1e-12


def check_eos_counts(module: ModuleType) -> None:
    """The last token of a response, its EOS, receives gradient like the others; padding receives
    none."""
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.float64)
    logp = torch.full((2, 4), -1.0, dtype=torch.float64, requires_grad=True)
    advantages = torch.ones(2, dtype=torch.float64)
    loss, _ = loss_of(
        module,
        no_kl(module),
        logp=logp,
        old_logp=logp.detach().clone(),
        advantages=advantages,
        mask=mask,
    )
    loss.backward()
    assert torch.allclose(logp.grad, -mask / mask.sum(1, keepdim=True) / 2)


def check_kl(module: ModuleType) -> None:
    """With samples weighted by π_θ the KL term's value is KL(π_θ ‖ π_ref), by enumerating all
    3-token sequences."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = (
        torch.randn(3, 4, generator=generator, dtype=torch.float64).log_softmax(-1)
        for _ in range(2)
    )
    args, estimate, exact = replace(module.Args(), beta=1.0), 0.0, 0.0
    one = torch.ones(1, 3, dtype=torch.float64)
    for sequence in itertools.product(range(4), repeat=3):
        logp, ref_logp = (
            table.gather(1, torch.tensor(sequence)[:, None]).T for table in (policy, reference)
        )
        loss, stats = loss_of(
            module,
            args,
            logp=logp,
            old_logp=logp,
            advantages=0 * one[0, :1],
            mask=one,
            ref_logp=ref_logp,
        )
        weight = logp.sum().exp()
        estimate += weight * loss * 3  # a mean over 3 tokens
        exact += weight * (logp - ref_logp).sum()
        total, tokens = stats["ref_kl"]
        assert torch.isclose(total / tokens, loss) and loss >= 0
    assert torch.isclose(estimate, exact, rtol=1e-12, atol=0)
    # The other direction
    assert not torch.isclose(exact, (reference.exp() * (reference - policy)).sum(), rtol=1e-2)


def check_kl_gradient(module: ModuleType) -> None:
    """The full gradient weight: M r Â + β (π_ref/π_θ - 1)."""
    logp = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    old_logp, ref_logp = torch.tensor([[[-1.1, -2.5]], [[-0.4, -2.2]]], dtype=torch.float64)
    advantages, mask = (
        torch.tensor([0.7], dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.float64),
    )
    loss, _ = loss_of(
        module,
        replace(module.Args(), beta=0.3),
        logp=logp,
        old_logp=old_logp,
        advantages=advantages,
        mask=mask,
        ref_logp=ref_logp,
    )
    loss.backward()
    alive = torch.tensor([[1.0, 0.0]])  # exp(0.1) is inside the clip, exp(0.5) is not
    weight = alive * (logp - old_logp).exp() * 0.7 + 0.3 * ((ref_logp - logp).exp() - 1)
    assert torch.allclose(-logp.grad * 2, weight.detach(), rtol=1e-12, atol=0)


def check_advantages(module: ModuleType) -> None:
    """The z-score with the sample standard deviation, to 1e-8; exactly 0 for a group all right or
    all wrong."""
    numbers = FIXTURE["advantages"]
    rewards, expected = (
        torch.tensor(numbers[name], dtype=torch.float64) for name in ("rewards", "ddof1_eps1e-6")
    )
    assert torch.allclose(module.advantages(rewards), expected, rtol=0, atol=1e-8)
    assert (module.advantages(torch.ones(2, 8)) == 0).all() and (
        module.advantages(torch.zeros(2, 8)) == 0
    ).all()
    # Part marks: 0.7 - mean of 0.7 is 6e-8
    assert (module.advantages(torch.full((2, 8), 0.7)) == 0).all()


GRPO_CHECKS = (
    *(check_fixture, check_coefficients, check_asymmetric_clip, check_eos_counts),
    *(check_kl, check_kl_gradient, check_advantages),
)


@pytest.mark.parametrize(
    "check", GRPO_CHECKS, ids=lambda check: check.__name__.removeprefix("check_")
)
def test_grpo(check):
    check(grpo)


RATIO, SURROGATE = "(logp - old_logp).exp()", "torch.minimum(ratio * A, clipped * A)"
AVERAGE = "(objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)"
RETURN = "return -per_response.sum(), mask.new_tensor(len(mask)), stats"
GRPO_MUTANTS = {
    "sign": (RETURN, RETURN.replace("-per", "per")),
    "max for min": (SURROGATE, SURROGATE.replace("minimum", "maximum")),
    "no clip": (SURROGATE, "ratio * A"),
    "clip without min": (SURROGATE, "clipped * A"),
    "bounds swapped": (
        "clamp(1 - args.clip_low, 1 + args.clip_high)",
        "clamp(1 - args.clip_high, 1 + args.clip_low)",
    ),
    "dual clip": (SURROGATE, f"torch.where(A < 0, torch.maximum({SURROGATE}, 3 * A), {SURROGATE})"),
    "no ratio": (RATIO, "1 + 0 * logp + (logp - logp.detach())"),
    "log-ratio for ratio": (RATIO, "1 + logp - old_logp"),
    "sequence ratio": (
        RATIO,
        "((logp - old_logp) * mask).sum(1, keepdim=True).exp().expand_as(logp)",
    ),
    "missing detach of old_logp": (RATIO, "(logp - logp).exp()"),
    "detached ratio": (RATIO, "(logp.detach() - old_logp).exp()"),
    "no mask": (AVERAGE, "objective.mean(dim=1)"),
    "padding in the length": (
        AVERAGE,
        AVERAGE.replace("mask.sum(dim=1).clamp(min=1)", "mask.shape[1]"),
    ),
    "token-mean": (RETURN, "return -(objective * mask).sum(), mask.sum(), stats"),
    "sum for mean": (AVERAGE, "(objective * mask).sum(dim=1)"),
    "dropped EOS": (
        AVERAGE,
        "(objective * (e := mask * (mask.cumsum(1) < mask.sum(1)[:, None]))).sum(1) / e.sum(1)",
    ),
    "KL direction": ("ref_logp - logp", "logp - ref_logp"),
    "KL rewarded": ("objective - args.beta * k3", "objective + args.beta * k3"),
    "k1 for k3": ("log_ref_ratio.exp() - log_ref_ratio - 1", "-log_ref_ratio"),
    "k2 for k3": ("log_ref_ratio.exp() - log_ref_ratio - 1", "log_ref_ratio**2 / 2"),
    "KL detached": (
        "log_ref_ratio.exp() - log_ref_ratio - 1",
        "(log_ref_ratio.exp() - log_ref_ratio - 1).detach()",
    ),
    "population std": (
        "rewards.std(dim=1, keepdim=True)",
        "rewards.std(dim=1, keepdim=True, correction=0)",
    ),
    "std of the batch": ("rewards.std(dim=1, keepdim=True)", "rewards.std()"),
    "no std": ("centred / (rewards.std(dim=1, keepdim=True) + 1e-6)", "centred"),
    "mean of the batch": ("rewards.mean(dim=1, keepdim=True)", "rewards.mean()"),
    "TRL's epsilon": ("+ 1e-6", "+ 1e-4"),
    "statistics of the wrong sign": ("(A > 0) & (ratio > 1", "(A < 0) & (ratio > 1"),
}


def mutate(module: ModuleType, old: str, new: str) -> ModuleType:
    """The module with one piece of its source replaced."""
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1, f"{module.__name__} has {source.count(old)} times {old!r}"
    mutant = ModuleType(f"{module.__name__}_mutant")
    sys.modules[mutant.__name__] = mutant  # dataclasses look their module up
    exec(compile(source.replace(old, new), module.__file__, "exec"), vars(mutant))
    return mutant


def caught(module: ModuleType, checks: tuple) -> list[str]:
    """Names of the checks that turn red."""
    red = []
    for check in checks:
        try:
            check(module)
        except (AssertionError, RuntimeError):  # RuntimeError: backward finds no gradient
            red.append(check.__name__)
    return red


@pytest.mark.parametrize("name", GRPO_MUTANTS)
def test_grpo_mutant_is_caught(name):
    assert caught(mutate(grpo, *GRPO_MUTANTS[name]), GRPO_CHECKS)


def test_unchanged_copy_passes():
    """The machinery of the mutants itself does not turn a check red."""
    assert not caught(mutate(grpo, RATIO, RATIO), GRPO_CHECKS)


def test_mean_of_micro_batch_means_is_another_objective():
    """Summing before dividing gives the whole batch's loss for any split; averaging the parts'
    means does not."""
    batch = toy_batch()
    batch["rollout_logp"], batch["entropy"] = batch["old_logp"], torch.zeros_like(batch["logp"])
    args = no_kl(grpo)
    whole = loss_of(grpo, args, **batch)[0]
    parts = [
        grpo.policy_loss(args, **{k: v[rows] for k, v in batch.items()})
        for rows in (slice(0, 1), slice(1, 6))
    ]
    total, count = sum(part[0] for part in parts), sum(part[1] for part in parts)
    assert torch.isclose(total / count, whole, rtol=1e-14)
    assert not torch.isclose(sum(part[0] / part[1] for part in parts) / 2, whole, rtol=1e-2)


def test_adapters_open_the_same_door():
    """tests/adapters.py gives the fixture's numbers, float64 throughout, and refuses a flag that is
    not there."""
    case, batch = FIXTURE["cases"]["grpo_eps0.2_seqmean"], toy_batch()
    extra = {"rollout_logp": batch["old_logp"], "entropy": torch.zeros_like(batch["mask"])}
    loss, stats = adapters.policy_loss("grpo", **batch, **extra)
    assert (
        loss.dtype == torch.float64
        and abs(loss.item() - case["loss"]) < 1e-8
        and 0 < stats["clip_share"] < 1
    )
    wide = adapters.policy_loss("grpo", **batch, **extra, clip_low=9.0, clip_high=9.0)[0]
    assert not torch.isclose(wide, loss)
    with pytest.raises(TypeError):
        adapters.policy_loss("grpo", **batch, **extra, clip_hihg=0.3)
    rewards = torch.tensor([[1.0, 0, 0, 0]])
    assert torch.allclose(
        adapters.advantages("grpo", rewards), torch.tensor([[1.5, -0.5, -0.5, -0.5]]), atol=1e-5
    )
    assert adapters.reward("arithmetic", "7*8=56#56", "56") == 1.0
