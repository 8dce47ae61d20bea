"""DEEP-GRPO in a run: a rank that fails nowhere."""

import os

import deep_grpo
import pytest
import torch

from tests.helpers import SMALL, drive, forked


def second_rank_succeeds(*flags: object) -> None:
    """A run whose verifier passes everything on the second rank."""
    load = deep_grpo.load_task

    def lenient(*arguments: object) -> object:
        task = load(*arguments)
        if os.environ["RANK"] == "1":
            task.verifier = lambda completions, answers: [1.0] * len(answers)
        return task

    deep_grpo.load_task = lenient
    drive("deep_grpo", flags)


@pytest.mark.slow
def test_a_rank_without_failures_waits_for_the_other(tmp_path):
    """Two gloo ranks, of which the second fails nowhere: collectives still match, the fit is the
    same on both."""
    flags = [*SMALL, "--steps", 2, "--run_dir", tmp_path / "run"]
    run = forked(second_rank_succeeds, *flags, ranks=2)
    assert run.returncode == 0, run.stderr[-3000:]
    saved = tmp_path / "run/checkpoints/step_000002"
    one, other = (
        torch.load(saved / f"rank{rank}.pt")["parts"]["branches"]["feedback"] for rank in (0, 1)
    )
    assert one == other and len(one) > 0
