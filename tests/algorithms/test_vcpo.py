"""VCPO in a run: the queue's lag, and both halves off."""

import json

import pytest
import vcpo

from tests.helpers import SMALL, run_here


@pytest.mark.slow
def test_switches(tmp_path):
    """Both halves off: the step keeps its length and the baseline is the group's mean; warm-up
    counts batches. Two mini-batches a batch: one that waited for two others is four updates old."""
    flags = [*SMALL, "--steps", 6, "--lag", 2, "--run_dir", tmp_path / "run"]
    off = ["--warmup", 5, "--no_ess_scaling", "--no_optimal_baseline"]
    assert run_here(vcpo.main, *flags, *off) == 0
    text = (tmp_path / "run/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()][3:]
    assert all("lr_damping" not in line and line["baseline_shift"] == 0 for line in lines)
    assert [line["lag"] for line in lines] == [0, 2, 4, 4]
    assert [line["lr"] for line in lines] == [3e-4 * batch / 5 for batch in (1, 2, 3, 4)]
