"""What some variants do in a run, beside what checks and the loop's oracle hold of them."""

import signal

import pytest
from variants import ppo

from tests.helpers import SMALL, assert_same_run, command, metrics, run_here


@pytest.mark.slow
def test_ppo_takes_groups_of_one(tmp_path):
    """What the others refuse; the critic compares."""
    flags = [*SMALL, "--group_size", 1, "--steps", 2, "--critic_warmup", 1]
    assert run_here(ppo.main, *flags, "--run_dir", tmp_path / "run") == 0
    first, second = metrics(tmp_path / "run")[1:]
    assert first["lr"] == 0 < second["lr"] and first["critic_norm"] > 0
    assert "grad_norm" not in first and second["grad_norm"] > 0


@pytest.mark.slow
def test_jet_on_two_ranks_that_share_a_model(tmp_path):
    """Each rounds its own rows: KL(μ ‖ π_old) stays float32's rounding, and a killed run goes on to
    the bit."""
    flags = [*SMALL, "--shard_ranks", 2, "--steps", 4]
    assert command("jet", *flags, "--run_dir", tmp_path / "whole", ranks=2).returncode == 0
    assert all(line["sampler_kl"] < 1e-11 for line in metrics(tmp_path / "whole")[1:])
    where = ["--run_dir", tmp_path / "parts"]
    killed = command("jet", *flags, *where, at=(signal.SIGKILL, 3), ranks=2)
    assert -signal.SIGKILL in killed.codes
    assert command("jet", *flags, *where, "--resume", ranks=2).returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 4, tmp_path)
