"""What a run's picture shows, and what it leaves out: properties of the figure, no pixels."""

import json
import math
import runpy
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from common.plumbing.curves import draw_curves, series, smooth
from common.distributed import BadInput
from matplotlib.figure import Figure

from checks.files import ALGORITHMS
from tests.helpers import module_of
from tests.helpers import ROOT

WORDS = {"ess_ratio": "effective sample size (share of the batch)", "weight_max": "largest weight"}


def a_run(folder: Path, lines: list[dict], **config: object) -> Path:
    """A run folder whose metrics.jsonl has these rows, numbered from 0."""
    folder.mkdir(exist_ok=True)
    told = dict.fromkeys("algorithm ranks model task".split(), "x") | {"acted": WORDS}
    told |= {"seed": 1, "lr": 1e-3}
    (folder / "config.json").write_text(json.dumps(told | config))
    rows = [json.dumps({"step": step} | line) + "\n" for step, line in enumerate(lines)]
    (folder / "metrics.jsonl").write_text("".join(rows))
    return folder


def some_lines(steps: int = 40) -> list[dict]:
    """Rows of a run that logs everything and measures at every tenth step."""
    names = "reward response_len ess_ratio weight_max entropy grad_norm zero_groups".split()
    random = np.random.default_rng(0)
    lines = [dict(zip(names, random.uniform(0.1, 1, len(names)))) for _ in range(steps + 1)]
    lines[0] = {}
    for step in range(0, steps + 1, 10):
        lines[step] |= {"greedy": random.uniform(), "sampled": random.uniform()}
    return lines


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw a run of these rows; returns the axes by title, and the figure under ""."""
    figures, save = [], Figure.savefig

    def keep(figure: Figure, *arguments: object, **keywords: object) -> None:
        save(figure, *arguments, **keywords)
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)

    def draw(lines: list[dict], **config: object) -> dict:
        draw_curves(a_run(tmp_path / "run", lines, **config))
        found = {axis.get_title().replace("\n", " "): axis for axis in figures[-1].axes}
        return found | {"": figures[-1]}

    return draw


def test_the_telling_metrics_stand_between_what_is_learned_and_the_health(drawn):
    titles = [*drawn(some_lines())][:-1]
    assert titles[:3] == ["reward (training samples)", "held-out accuracy", titles[2]]
    assert titles[3:5] == [*WORDS.values()]
    assert titles[5].startswith("entropy") and len(titles) == 8


def test_the_samplers_kl_is_drawn_above_rounding_only(drawn):
    def with_kl(*values: float | None) -> dict:
        lines = some_lines()
        for line, value in zip(lines[1:], values):
            line["sampler_kl"] = value
        return drawn(lines)

    title = "KL of sampler and trainer"
    assert title not in with_kl() and title not in with_kl(None)
    assert title not in with_kl(*[2e-13] * 40) and title in with_kl(*[2e-13] * 39, 2e-6)


def test_the_gradient_norm_alone_is_on_a_log_axis(drawn):
    lines = some_lines()
    lines[7]["grad_norm"], lines[9]["grad_norm"] = 1e6, 0.0
    axes = drawn(lines)
    axes.pop("")
    assert {title for title, axis in axes.items() if axis.get_yscale() == "log"} == {
        "gradient norm (before clipping)"
    }


def test_one_gradient_of_nothing_does_not_flatten_the_others(drawn):
    lines = some_lines()
    norms = [line["grad_norm"] for line in lines[1:]]  # 0.1 to 1
    for nothing in (1e-9, 0.0):
        lines[30]["grad_norm"] = nothing
        bottom, top = drawn(lines)["gradient norm (before clipping)"].get_ylim()
        assert 1e-3 < bottom <= min(norms) and top >= max(norms)
    assert len(drawn([{}] + [{"grad_norm": 0.0, "reward": 1.0}] * 3)) == 2  # the reward's, figure


@pytest.mark.parametrize("low, high", [(0.45, 0.8), (0.2, 3), (0.02, 500), (1e-7, 1e9)])
def test_a_log_axis_has_ticks_to_read_and_no_thicket(low, high, drawn):
    axes = drawn([{}] + [{"grad_norm": value} for value in (low, high)])
    axis = axes["gradient norm (before clipping)"]
    bottom, top = axis.get_ylim()
    labels = axis.get_yticklabels() + axis.get_yticklabels(minor=True)
    inside = {label.get_text() for label in labels if bottom <= label.get_position()[1] <= top}
    assert 2 <= len(inside - {""}) <= 10, inside


def test_a_smooth_line_over_faint_raw_ones(drawn):
    """The raw line has every value; the other wavers less, and lies above."""
    lines = some_lines()
    raw, line = drawn(lines)["reward (training samples)"].lines  # drawn in this order
    assert [*raw.get_ydata()] == [row["reward"] for row in lines[1:]]
    assert raw.get_alpha() < 0.5 and line.get_alpha() is None
    assert np.ptp(line.get_ydata()) < 0.7 * np.ptp(raw.get_ydata())


def test_held_out_accuracy_is_drawn_as_measured(drawn):
    lines = some_lines()
    axis = drawn(lines)["held-out accuracy"]
    assert len(axis.lines) == 2
    for name, line in zip(("greedy", "sampled"), axis.lines):
        assert [*line.get_xdata()] == [0, 10, 20, 30, 40] and line.get_marker() != "None"
        assert [*line.get_ydata()] == [row[name] for row in lines[::10]]
        assert line.get_label() == name


def test_null_is_a_gap_and_a_missing_metric_is_none(drawn):
    lines = some_lines()
    lines[20]["entropy"] = None
    del lines[21]["entropy"]
    for line in drawn(lines)["entropy (nats per token)"].lines:
        steps, values = line.get_data()
        assert 21 not in steps and len(steps) == 39
        assert [*np.flatnonzero(np.isnan(values))] == [19]


def test_what_happens_now_and_then_is_points(drawn):
    """A metric of few steps: a line between them would be made up."""
    lines = some_lines()
    for line in lines[:20] + lines[23:]:
        line.pop("weight_max", None)
    (points,) = drawn(lines)["largest weight"].lines
    assert [*points.get_xdata()] == [20, 21, 22]
    assert points.get_linestyle() == "None" and points.get_markersize() >= 4


def test_smoothing_is_the_mean_of_the_neighbours():
    values = np.array([1.0, 4.0, np.nan, 2.0, 0.5, 8.0, 9.0])
    found = smooth(values, 3)
    by_hand = [2.5, 2.5, np.nan, 1.25, 3.5, 17.5 / 3, 8.5]
    np.testing.assert_allclose(found, by_hand, rtol=1e-12)
    for size in range(1, 6):  # a window wider than the run
        assert smooth(values[:size], 5).shape == (size,)


def test_what_is_no_number_is_nan():
    values = [1.5, None, "a", [], True, math.inf, -math.inf, math.nan]
    _, found = series([{"step": i, "a": value} for i, value in enumerate(values)], "a")
    assert found[0] == 1.5 and found[4] == 1 and np.isnan(np.delete(found, [0, 4])).all()
    assert series([{"step": 1}], "a").shape == (2, 0)


def test_letters_can_be_read_in_a_readme(drawn):
    """10 pixels or more at a width of 850, and no title wider than its panel."""
    figure = drawn(some_lines(), model="a/folder" * 20, acted={"weight_max": "many words " * 9})[""]
    scale = 850 / figure.get_figwidth() / 72
    texts = [figure._suptitle, *figure.axes[1].get_legend().get_texts()]
    for axis in figure.axes:
        texts += [axis.title, axis.xaxis.label, *axis.get_xticklabels(), *axis.get_yticklabels()]
        assert axis.title.get_window_extent().width <= figure.bbox.width / 3
    assert min(text.get_fontsize() for text in texts) * scale >= 10
    assert figure._suptitle.get_window_extent().width <= figure.bbox.width


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_words_of_a_telling_metric_fit_its_panel(algorithm):
    """One to three panels, each with a title of two lines at most."""
    acted = module_of(algorithm).ACTED
    assert 1 <= len(acted) <= 3
    assert all(len(textwrap.wrap(words, 36)) <= 2 for words in acted.values())


def test_a_name_with_dollars_is_no_formula(drawn):
    drawn(some_lines(), model="a$\\frac{$b", task="$x_{$", acted={"weight_max": "$\\nope$"})


def test_one_step_can_be_seen(drawn):
    """And a run of which only the first measurement is there."""
    axes = drawn([{"greedy": 0.5, "sampled": 0.4}])
    assert [*axes] == ["held-out accuracy", ""]
    axes = drawn([{"greedy": 0.5, "sampled": 0.4}, {"reward": 0.5}])
    assert axes["reward (training samples)"].lines[0].get_marker() == "."


def test_a_full_disk_leaves_the_old_picture(tmp_path, monkeypatch):
    run = a_run(tmp_path / "run", some_lines())
    draw_curves(run)
    before = (run / "curves.png").read_bytes()

    def full(figure: Figure, path: Path, **keywords: object) -> None:
        path.write_bytes(before[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError):
        draw_curves(run)
    assert (run / "curves.png").read_bytes() == before and len([*run.iterdir()]) == 3


def test_nothing_to_draw(tmp_path):
    for lines in ([], [{"reward": None}], [{"sampler_kl": 1e-9}]):
        with pytest.raises(BadInput, match="nothing to draw yet"):
            draw_curves(a_run(tmp_path / "run", lines))


@pytest.mark.parametrize("words", [[], ["-h"], ["nope"], ["."]])
def test_a_wrong_call_is_one_line(words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["curves.py", *words])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path("tools/curves.py", run_name="__main__")
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.err.count("\n") == 1 and not said.out
    assert ("holds no run" if words and words != ["-h"] else "usage: ") in said.err


def test_a_run_is_drawn_again(tmp_path, monkeypatch, capsys):
    run = a_run(tmp_path / "run", some_lines())
    monkeypatch.setattr(sys, "argv", ["curves.py", str(run)])
    runpy.run_path(str(ROOT / "tools/curves.py"), run_name="__main__")
    assert capsys.readouterr().out == f"{run / 'curves.png'}\n" and (run / "curves.png").exists()
