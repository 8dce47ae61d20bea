"""Several runs in one figure and one table: which runs are of a kind, and their numbers."""

from pathlib import Path

import numpy as np
import pytest
from common.cli import BadInput
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
    one, two = run_of(tmp_path / "1", 1), run_of(tmp_path / "2", 2, save_every=7)
    (kind,) = load(one, two)
    assert kind.label == "grpo" and [run.folder for run in kind.runs] == [one, two]
    other = run_of(tmp_path / "clip", 1, clip_high=0.28)
    labels = [kind.label for kind in load(one, other)]
    assert labels == ["grpo, clip_high 0.2", "grpo, clip_high 0.28"]
    again = run_of(tmp_path / "new", 1)
    assert [len(kind.runs) for kind in load(one, two, again)] == [2, 1]


def test_a_band_goes_from_the_lowest_to_the_highest_seed(tmp_path):
    """It goes up to the end of the shortest run."""
    (kind,) = load(run_of(tmp_path / "1", 1), run_of(tmp_path / "2", 2, steps=20))
    values = np.array([[line["reward"] for line in run.lines[1:21]] for run in kind.runs])
    steps, *found = compare.band(kind.runs, "reward", 1)
    assert [*steps] == [*range(1, 21)]
    np.testing.assert_allclose(found, [values.mean(0), values.min(0), values.max(0)], rtol=1e-12)


def test_picture_and_table_are_written_and_never_over_anothers(tmp_path):
    run = run_of(tmp_path / "1", 1)
    compare.main([run], str(tmp_path / "mine"))
    assert compare.table(load(run)) in (tmp_path / "mine.md").read_text()
    assert (tmp_path / "mine.png").read_bytes()[:4] == b"\x89PNG"
    compare.main([run], str(tmp_path / "mine"))  # its own
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(BadInput, match="notes.md"):
        compare.main([run], str(tmp_path / "notes"))
    assert (tmp_path / "notes.md").read_text() == "mine" and not (tmp_path / "notes.png").exists()


@pytest.mark.parametrize("text", ['{"step": 1, "reward": 0.5}\n', '{"step": 0\n{"step": 1}\n'])
def test_a_folder_without_a_measurement_is_one_line(text, tmp_path, monkeypatch, capsys):
    run = run_of(tmp_path / "1", 1)
    (run / "metrics.jsonl").write_text(text)
    words = ["tools.compare", run, "--out", tmp_path / "c"]
    assert str(run) in refused(monkeypatch, capsys, *words)
    assert [*tmp_path.iterdir()] == [run]
