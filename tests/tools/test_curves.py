"""A run's picture: its lines are the run's numbers, and what is no number is a gap."""

from pathlib import Path

import numpy as np
import pytest
from common.distributed import BadInput
from common.plumbing.curves import draw_curves
from matplotlib.figure import Figure

from tests.tools.made import a_run, metrics_of

WORDS = {"clip_share": "tokens clipped"}


def test_the_lines_are_the_runs_numbers(tmp_path, monkeypatch):
    """A smooth line over the raw one; held-out accuracy where it was measured; null is a gap, a
    missing number is none."""
    lines = metrics_of(40)
    lines[20]["entropy"] = None
    del lines[21]["entropy"]
    figures, save = [], Figure.savefig

    def keep(figure: Figure, *given: object, **more: object) -> None:
        figures.append(figure)
        save(figure, *given, **more)

    monkeypatch.setattr(Figure, "savefig", keep)
    draw_curves(a_run(tmp_path / "run", lines, acted=WORDS))
    axes = {axis.get_title().replace("\n", " "): axis for axis in figures[0].axes}
    raw, line = axes["reward (training samples)"].lines
    assert [*raw.get_ydata()] == [row["reward"] for row in lines[1:]]
    assert np.ptp(line.get_ydata()) < np.ptp(raw.get_ydata())
    for name, line in zip(("greedy", "sampled"), axes["held-out accuracy"].lines):
        assert [*line.get_xdata()] == [0, 10, 20, 30, 40]
        assert [*line.get_ydata()] == [row[name] for row in lines[::10]]
    steps, values = axes["entropy (nats per token)"].lines[0].get_data()
    assert len(steps) == 39 and [*np.flatnonzero(np.isnan(values))] == [19]
    assert [title for title, axis in axes.items() if axis.get_yscale() == "log"] == [
        "gradient norm (before clipping)"
    ]
    assert axes["tokens clipped"].lines[0].get_ydata()[0] == lines[1]["clip_share"]


@pytest.mark.slow
def test_a_picture_is_whole_or_not_there(tmp_path, monkeypatch):
    """A name with dollars is no formula; a full disk leaves the old picture; one step is enough,
    none is a line."""
    run = a_run(tmp_path / "run", metrics_of(9), model="a$\\frac{$b", acted={"clip_share": "$\\x$"})
    draw_curves(run)
    before = (run / "curves.png").read_bytes()

    def full(figure: Figure, path: Path, **_: object) -> None:
        path.write_bytes(before[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", full)
        with pytest.raises(OSError):
            draw_curves(run)
    assert (run / "curves.png").read_bytes() == before and len([*run.iterdir()]) == 3
    draw_curves(a_run(tmp_path / "one", [{"step": 0, "greedy": 0.5, "sampled": 0.4}]))
    for lines in ([], [{"step": 1, "reward": None}]):
        with pytest.raises(BadInput, match="nothing to draw yet"):
            draw_curves(a_run(tmp_path / "run", lines))
