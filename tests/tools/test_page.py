"""A run's picture and page: their numbers are the stored ones, and text of models stays text."""

import json
import re

import numpy as np
import pytest
from common.cli import BadInput
from common.records.curves import draw_curves
from common.records.files import as_lines, saved_config
from tools import look, page

from tests.tools.made import HOSTILE, a_run, group_of, metrics_of, with_samples


def test_the_page_has_the_stored_groups_as_data_alone(tmp_path):
    """Nothing that a model, a prompt or a flag says can end a script element."""
    row = group_of(1)
    run = with_samples(tmp_path / "run", [row], task=HOSTILE[0], lr=0.5)
    page.main([run], tmp_path / "page.html")
    text, form = (tmp_path / "page.html").read_text("utf-8"), look.form(page.TEMPLATE)
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1]
    (data,) = json.loads(inside)["runs"]
    for response in row["responses"]:
        del response["ids"], response["text"]
    assert data["rows"] == [row]
    assert "--lr 0.5" in data["flags"] and "minibatches" not in data["flags"]
    assert text.count("</script") == form.count("</script") and "<!--" not in inside


def test_which_steps_are_shown(tmp_path):
    """The first and the last always are; of many steps some are left out."""
    run = with_samples(tmp_path, [group_of(step) for step in (1, 10, 20, 25, 30, 33)])
    data = page.run_data(run, every=10)
    assert [row["step"] for row in data["rows"]] == [1, 10, 20, 30, 33] and data["stored"] == 6
    run = with_samples(tmp_path, [group_of(step) for step in range(1, 3 * page.MOST)])
    steps = [row["step"] for row in page.run_data(run, every=1)["rows"]]
    assert page.MOST // 2 < len(steps) <= page.MOST + 1
    assert (steps[0], steps[-1]) == (1, 3 * page.MOST - 1)


@pytest.mark.parametrize("gap, drawn", [(1e-12, False), (1e-3, True)])
def test_a_curve_of_rounding_is_not_drawn(gap, drawn, tmp_path):
    """Its own scale would make it look like a climb, which troubleshooting teaches as a cause of
    collapse."""
    run = with_samples(tmp_path, [group_of(1)])
    lines = [line | {"sampler_kl": gap * line["step"] / 20} for line in metrics_of(20)]
    (run / "metrics.jsonl").write_text(as_lines(lines))
    assert ("sampler_kl" in page.run_data(run, every=1)["curves"]) == drawn


def test_a_run_without_samples_and_another_file_are_refused(tmp_path):
    run, notes = a_run(tmp_path / "run", metrics_of(9)), tmp_path / "notes.html"
    with pytest.raises(BadInput, match="has no samples.jsonl"):
        page.main([run], notes)
    (run / "samples.jsonl").write_text(as_lines([group_of(1)]))
    notes.write_text("mine")
    with pytest.raises(BadInput, match="another file"):
        page.main([run], notes)
    assert notes.read_text() == "mine"


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
