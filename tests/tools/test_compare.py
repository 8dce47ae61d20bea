"""Several runs in one table: which runs are of a kind, and their numbers."""

from pathlib import Path

import numpy as np
import pytest
from tools import compare

from tests.helpers import refused
from tests.tools.made import a_run, metrics_of


def run_of(folder: Path, seed: int, steps: int = 30, **config: object) -> Path:
    return a_run(folder, metrics_of(steps, seed), seed=seed, **{"steps": 30} | config)


def load(*folders: Path) -> list[compare.Kind]:
    return compare.kinds([compare.load(folder) for folder in folders])


def test_which_runs_are_of_a_kind(tmp_path):
    """Seeds are of a kind, also if they were saved at other times. Other flags are not, and name
    the kind. A repeated seed is never averaged with the first."""
    first, second = run_of(tmp_path / "1", 1), run_of(tmp_path / "2", 2, save_every=7)
    (kind,) = load(first, second)
    assert kind.label == "grpo" and [run.folder for run in kind.runs] == [first, second]
    other = run_of(tmp_path / "clip", 1, clip_high=0.28)
    labels = [kind.label for kind in load(first, other)]
    assert labels == ["grpo, clip_high 0.2", "grpo, clip_high 0.28"]
    again = run_of(tmp_path / "new", 1)
    assert [len(kind.runs) for kind in load(first, second, again)] == [2, 1]


def test_a_row_has_mean_and_deviation_of_its_seeds(tmp_path):
    folders = [run_of(tmp_path / str(seed), seed) for seed in (1, 2)]
    (kind,) = load(*folders)
    ends = [run.lines[-1]["greedy"] for run in kind.runs]
    assert f"{np.mean(ends):.3f} ± {np.std(ends, ddof=1):.3f}" in compare.table([kind])


@pytest.mark.parametrize("text", ['{"step": 1, "reward": 0.5}\n', '{"step": 0\n{"step": 1}\n'])
def test_a_folder_without_a_measurement_is_one_line(text, tmp_path, monkeypatch, capsys):
    run = run_of(tmp_path / "1", 1)
    (run / "metrics.jsonl").write_text(text)
    assert str(run) in refused(monkeypatch, capsys, "tools.compare", run)
