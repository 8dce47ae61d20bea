"""Whole runs: what they say."""

import grpo
import pytest
from common.records.summary import summary_of

from tests.helpers import SMALL, run_here


def test_a_skipped_sync_stops_the_run(tmp_path, monkeypatch, capsys):
    """The sampler check in the loop itself stops the run, with exit code 1 and one line with the
    usual causes."""
    monkeypatch.setattr("common.rollout.HFEngine.sync", lambda *arguments: None)
    flags = [*SMALL, "--steps", 20, "--lr", "3e-3", "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 1
    assert "weights not synced" in capsys.readouterr().err


@pytest.mark.parametrize("updates, warned", [(1, False), (2, True)])
def test_a_clip_that_never_acts_is_a_warning_where_it_could(tmp_path, capsys, updates, warned):
    """With one mini-batch no ratio leaves 1, so nothing is wrong."""
    flags = [*SMALL, "--steps", 1, "--minibatches", updates, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags, "--clip_low", 1, "--clip_high", 9) == 0
    said = capsys.readouterr().out
    assert "clip_share was 0 at every step" in said and ("WARNING" in said) == warned


@pytest.mark.parametrize("last, fell", [(0.63, True), (0.65, False)])
def test_a_run_that_ends_below_four_fifths_of_its_best_fell(last, fell):
    greedy = {0: 0.34, 5: 0.8, 10: last}
    lines = [{"step": n, "greedy": x, "sampled": x, "seconds": 1.0} for n, x in greedy.items()]
    summary = summary_of(lines)
    assert (summary["best"], summary["best_step"], summary["fell"]) == (0.8, 5, fell)
