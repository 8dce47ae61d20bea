"""The gradient applied is that of the written objective, whatever the micro-batches, ranks, padding
and row order; and π_old is evaluated as π_θ is."""

from pathlib import Path

import pytest
import torch
from common.batch import Rollout
from common.distributed import setup
from common.logprobs import micro_batches

from tests.loop import formulas
from checks.files import ALGORITHMS, NINE, VARIANTS
from tests.helpers import SMALL, forked, module_of, run_here
from tests.algorithms.stored import PROMPTS, G, gradients, stored_rollout

FAST = ("grpo", "stapo", "vcpo")  # a mean of means, a mini-batch's quantile, whole responses


# Flags without which the gradient must be another: `main` hands them on
OFF = {"stapo": {"tau_p": 0.0}, "blockwise": {"baseline": "none"}, "signs": {"outliers": 0.0}}


def slow_but(*fast: str) -> list:
    """All files as parameters; those that are not named are slow."""
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in ALGORITHMS]


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Equal but for float32 rounding, of which 1.05e-6 was seen where 32 single rows are added
    up."""
    assert one.shape == other.shape and (one.norm(dim=1) > 1e-3).all()
    assert ((one - other).norm(dim=1) / one.norm(dim=1)).max() < 2e-6


@pytest.fixture
def reference(world, tmp_path, monkeypatch):
    rollout = stored_rollout(world)
    return rollout, gradients(rollout, PROMPTS, world, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", slow_but(*FAST))
def test_micro_batch_size_changes_nothing(world, tmp_path, monkeypatch, name):
    rollout = stored_rollout(world)
    whole = gradients(rollout, PROMPTS, world, tmp_path, monkeypatch, name)
    for micro_tokens in (1, 150) if name == "grpo" else (150,):
        how = {"micro_tokens": micro_tokens}
        assert_same(gradients(rollout, PROMPTS, world, tmp_path, monkeypatch, name, **how), whole)
    if off := OFF.get(name) or formulas.of(name, "OFF", {}):
        # With the stored flags enough is silenced, protected, ... to see it
        without = gradients(rollout, PROMPTS, world, tmp_path, monkeypatch, name, **off)
        assert (whole - without).norm() > 1e-3 * whole.norm()


def test_padding_changes_nothing(reference, world, tmp_path, monkeypatch):
    """20 more columns of padding, filled with a real token id."""
    rollout, whole = reference
    wide = {name: column for name, column in vars(rollout).items() if column.dim() == 1}
    for name, column in vars(rollout).items():
        if column.dim() == 2:
            filler = 5 if name in ("sequences", "tokens") else 0
            wide[name] = torch.nn.functional.pad(column, (0, 20), value=filler)
    assert_same(gradients(Rollout(**wide), PROMPTS, world, tmp_path, monkeypatch), whole)


def test_row_order_changes_nothing(reference, world, tmp_path, monkeypatch):
    """Responses shuffled inside their groups, and groups inside their mini-batch."""
    rollout, whole = reference
    generator = torch.Generator().manual_seed(1)
    half = len(PROMPTS) // 2
    first, second = (torch.randperm(half, generator=generator) for _ in range(2))
    groups = torch.cat([first, half + second])
    order = torch.cat([group * G + torch.randperm(G, generator=generator) for group in groups])
    prompts = [PROMPTS[group] for group in groups]
    assert_same(gradients(rollout.rows(order), prompts, world, tmp_path, monkeypatch), whole)


def on_a_rank(folder: Path, jobs: list[tuple[str, int]]) -> None:
    """One of several ranks: the gradients of (file, --shard_ranks) pairs. All ranks but the first
    have their rows in one micro-batch, and no rows in the others."""
    world, stored = setup(), Rollout(**torch.load(folder / "rollout.pt"))
    patch, found = pytest.MonkeyPatch(), {}

    def uneven(*arguments: object) -> list[torch.Tensor]:
        micros = micro_batches(*arguments)
        if world.rank == 0:
            return micros
        return [torch.cat(micros)] + [rows[:0] for rows in micros[1:]]

    patch.setattr("common.logprobs.micro_batches", uneven)
    patch.setattr("common.norms.micro_batches", uneven)
    for name, shard_ranks in jobs:
        patch.setattr(module_of(name), "micro_batches", uneven)
        how = {"minibatches": 1, "micro_tokens": 300, "shard_ranks": shard_ranks}
        found[name, shard_ranks] = gradients(stored, PROMPTS, world, folder, patch, name, **how)
    if world.rank == 0:
        torch.save(found, folder / "gradients.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


TWO = [("grpo", 1), *((name, 2) for name in FAST)]
OTHERS = [("vcpo", 1), ("goldilocks", 1), *((name, 2) for name in NINE if name not in FAST)]
MORE = [(2, OTHERS), (4, [("grpo", 2), ("vcpo", 2)]), (2, [(name, 2) for name in VARIANTS])]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


@pytest.mark.parametrize(("ranks", "jobs"), [(2, TWO), *SLOW])
def test_ranks_change_nothing(world, tmp_path, monkeypatch, ranks, jobs):
    """Several gloo ranks, each with its share of the groups, against one: a model's weights shared
    by all, each with its own, and two pairs. Samples are on, and ranks meet micro-batches without
    rows.

    A rank's share is cut into mini-batches on its own, so one mini-batch is compared: all groups of
    all ranks.
    """
    rollout = stored_rollout(world)
    torch.save(vars(rollout), tmp_path / "rollout.pt")
    done = forked(on_a_rank, tmp_path, jobs, ranks=ranks)
    assert done.returncode == 0, done.stderr
    whole = {"minibatches": 1}
    for (name, _), found in torch.load(tmp_path / "gradients.pt").items():
        alone = gradients(rollout, PROMPTS, world, tmp_path, monkeypatch, name, **whole)
        assert_same(found, alone)


@pytest.mark.parametrize("name", slow_but("grpo", "deep_grpo"))
def test_the_first_ratios_are_exactly_one(tmp_path, monkeypatch, name):
    """log π_θ = log π_old to the bit in a rollout's first update. (No update changes a weight: lr
    is next to 0.) Other micro-batches would be other matrix shapes, whose sums round in another
    way: in bfloat16 that alone carries tokens over the edge of a clip."""
    module, equal = module_of(name), []
    loss = module.policy_loss

    def spy(args: object, logp: torch.Tensor, entropy: torch.Tensor, batch: Rollout) -> tuple:
        equal.append(torch.equal(logp, batch.old_logp))
        return loss(args, logp, entropy, batch)

    monkeypatch.setattr(module, "policy_loss", spy)
    flags = [*SMALL, "--steps", 1, "--micro_tokens", 60, "--lr", 1e-30]
    for waits in ("lag", "critic_warmup"):  # the policy of the first step, at once
        flags += [f"--{waits}", 0] if hasattr(module.Args, waits) else []
    assert run_here(module.main, *flags, "--run_dir", tmp_path / "run") == 0
    assert len(equal) > 4 and all(equal)
