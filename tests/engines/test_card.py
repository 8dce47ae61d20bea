"""What one card asks for: shards in CPU memory."""

import signal

import pytest

from tests.helpers import SMALL, assert_same_run, command, metrics

pytestmark = pytest.mark.slow


def test_offloading_changes_no_number(tmp_path):
    """On two ranks that share a model (on a CPU all but the copies is as on GPUs), killed in its
    fourth step and resumed: metrics, weights and moments of the run that offloads nothing."""
    flags = [*SMALL, "--steps", 4, "--shard_ranks", 2, "--run_dir"]
    assert command("grpo", *flags, tmp_path / "plain", ranks=2).returncode == 0
    parts = [*flags, tmp_path / "parts", "--offload"]
    assert command("grpo", *parts, at=(signal.SIGKILL, 3), ranks=2).returncode
    assert [line["step"] for line in metrics(tmp_path / "parts")][-1] < 4
    ended = command("grpo", *parts, "--resume", ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert_same_run(tmp_path / "plain", tmp_path / "parts", 4, tmp_path)
