"""A run's picture: its lines are the run's numbers, and what is null is a gap."""

import numpy as np
from common.records.curves import draw_curves
from common.records.files import saved_config

from tests.tools.made import a_run, metrics_of


def test_the_lines_are_the_runs_numbers(tmp_path):
    """A number that is missing (not null) makes no gap."""
    lines = metrics_of(40)
    lines[20]["entropy"] = None
    del lines[21]["entropy"]
    folder = a_run(tmp_path / "run", lines)
    figure = draw_curves(saved_config(folder), lines)
    axes = {axis.get_title().replace("\n", " "): axis for axis in figure.axes}
    raw, _ = axes["reward (training samples)"].lines
    assert [*raw.get_ydata()] == [row["reward"] for row in lines[1:]]
    steps, values = axes["entropy (nats per token)"].lines[0].get_data()
    assert len(steps) == 39 and [*np.flatnonzero(np.isnan(values))] == [19]
