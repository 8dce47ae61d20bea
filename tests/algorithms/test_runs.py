"""What some files do in a run, besides what checks/ and the loop's second statement test."""

import os

import deep_grpo
import pytest
import torch
import vcpo
from common.tasks.reward import Verdict
from variants import ppo

from tests.helpers import SMALL, command, drive, forked, metrics, run_here

pytestmark = pytest.mark.slow


def test_vcpo_without_its_halves(tmp_path):
    """The step keeps its length, the baseline is the group's mean, and the warm-up counts batches.
    With two mini-batches per batch, a batch that waited for two others is four updates old."""
    flags = [*SMALL, "--steps", 6, "--lag", 2, "--warmup", 5, "--run_dir", tmp_path / "run"]
    assert run_here(vcpo.main, *flags, "--no_ess_scaling", "--no_optimal_baseline") == 0
    lines = metrics(tmp_path / "run")[3:]
    assert all("lr_damping" not in line and line["baseline_shift"] == 0 for line in lines)
    assert [line["lag"] for line in lines] == [0, 2, 4, 4]
    assert [line["lr"] for line in lines] == [3e-4 * batch / 5 for batch in (1, 2, 3, 4)]


def second_rank_succeeds(*flags: object) -> None:
    """Run a file with a verifier that passes everything on the second rank."""
    load = deep_grpo.load_task

    def lenient(*arguments: object) -> object:
        task = load(*arguments)
        if os.environ["RANK"] == "1":
            task.verifier = lambda completions, answers: [Verdict(1.0)] * len(answers)
        return task

    deep_grpo.load_task = lenient
    drive("deep_grpo", flags)


def test_a_rank_without_failures_waits_for_the_other(tmp_path):
    """Of two gloo ranks the second has no failed response. Their collectives still match, and both
    have the same fit."""
    flags = [*SMALL, "--steps", 2, "--run_dir", tmp_path / "run"]
    run = forked(second_rank_succeeds, *flags, ranks=2)
    assert run.returncode == 0, run.stderr[-3000:]
    saved = [tmp_path / f"run/checkpoints/step_000002/rank{rank}.pt" for rank in (0, 1)]
    first, second = (torch.load(path)["parts"]["branches"]["feedback"] for path in saved)
    assert first == second and len(first) > 0


def test_ppo_takes_groups_of_one(tmp_path):
    """ppo accepts what the other files refuse, because its critic compares."""
    flags = [*SMALL, "--group_size", 1, "--steps", 2, "--critic_warmup", 1]
    assert run_here(ppo.main, *flags, "--run_dir", tmp_path / "run") == 0
    first, second = metrics(tmp_path / "run")[1:]
    assert first["lr"] == 0 < second["lr"] and first["critic_norm"] > 0
    assert "grad_norm" not in first and second["grad_norm"] > 0


def test_jet_on_two_ranks_that_share_a_model(tmp_path):
    """Each rank rounds its own rows, and KL(μ ‖ π_old) stays at float32's rounding."""
    flags = [*SMALL, "--shard_ranks", 2, "--steps", 4, "--run_dir", tmp_path / "run"]
    assert command("jet", *flags, ranks=2).returncode == 0
    assert all(line["sampler_kl"] < 1e-11 for line in metrics(tmp_path / "run")[1:])
