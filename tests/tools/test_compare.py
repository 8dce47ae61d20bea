"""Several runs in one figure and one table: what is a kind, what its band and its numbers are."""

import json
import runpy
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
from common.distributed import BadInput
from matplotlib.figure import Figure
from tools import compare

from tests.helpers import ROOT

COMMON = {"model": "tiny", "task": "arithmetic", "lr": 3e-4, "steps": 30, "ranks": 1, "beta": 0.0}
WORDS = {"clip_share": "tokens clipped (share)"}


def a_run(folder: Path, seed: int, steps: int = 30, **config: object) -> Path:
    """A run folder with made-up metrics, other ones for each seed; measured at every tenth step."""
    folder.mkdir()
    told = COMMON | {"algorithm": "grpo", "acted": WORDS, "run_dir": str(folder), "seed": seed}
    (folder / "config.json").write_text(json.dumps(told | config))
    random = np.random.default_rng(seed)
    names = "reward response_len entropy grad_norm seconds".split()
    names += [*(told | config)["acted"]]
    lines = [{"step": 0, "seconds": 1.0}]
    lines += [
        {"step": step, "tokens": 1000 + step} | dict(zip(names, random.uniform(0.1, 2, len(names))))
        for step in range(1, steps + 1)
    ]
    for line in lines[::10]:
        line |= {"greedy": random.uniform(), "sampled": random.uniform()}
    write(folder, lines)
    return folder


def write(folder: Path, lines: list[dict]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def load(*folders: Path) -> list[compare.Kind]:
    return compare.kinds([compare.load(folder) for folder in folders])


def axes(kinds: list[compare.Kind]) -> dict:
    return {axis.get_title(): axis for axis in compare.draw(kinds).axes}


def rows(kinds: list[compare.Kind]) -> dict[str, list[str]]:
    """First cell -> the other cells, of both tables."""
    lines = [line.strip("| ").split(" | ") for line in compare.table(kinds).splitlines()]
    return {line[0]: line[1:] for line in lines if len(line) > 1}


# Which runs are of a kind


def test_seeds_are_of_a_kind(tmp_path):
    """And so are runs that were saved or measured at other times."""
    runs = [a_run(tmp_path / f"{seed}", seed, eval_every=seed, save_hf=seed > 1) for seed in (1, 2)]
    (kind,) = load(*runs)
    assert kind.label == "grpo" and [run.folder for run in kind.runs] == runs


def test_kinds_are_called_by_the_flags_in_which_they_differ(tmp_path):
    found = load(
        a_run(tmp_path / "a", 1, clip_high=0.2, vllm_sleep=False),
        a_run(tmp_path / "b", 1, clip_high=0.28, vllm_sleep=True),
        a_run(tmp_path / "c", 1, clip_high=0.2, vllm_sleep=False, model="Qwen/Qwen3-1.7B-Base"),
        a_run(tmp_path / "d", 2, clip_high=0.2, vllm_sleep=False),
    )
    assert [kind.label for kind in found] == [
        "grpo, model tiny, clip_high 0.2, no vllm_sleep",
        "grpo, model tiny, clip_high 0.28, vllm_sleep",
        "grpo, model Qwen/Qwen3-1.7B-Base, clip_high 0.2, no vllm_sleep",
    ]
    assert [len(kind.runs) for kind in found] == [2, 1, 1]


def test_defaults_of_another_algorithm_are_not_named(tmp_path):
    """minibatches 4 and 1 belong to grpo and vcpo; the learning rate is worth a word everywhere."""
    one = a_run(tmp_path / "a", 1, minibatches=4)
    other = a_run(tmp_path / "b", 1, minibatches=1, algorithm="vcpo", lag=8)
    assert [kind.label for kind in load(one, other)] == ["grpo", "vcpo"]
    more = a_run(tmp_path / "c", 1, minibatches=1, algorithm="vcpo", lag=8, lr=1e-3)
    assert [kind.label for kind in load(one, other, more)] == [
        "grpo, lr 0.0003",
        "vcpo, lr 0.0003",
        "vcpo, lr 0.001",
    ]


def test_a_seed_once_more_is_another_kind(tmp_path):
    """Before and after a change of the code, on two machines: never averaged as if two seeds."""
    folders = [a_run(tmp_path / f"{when}-{s}", s) for when in ("old", "new") for s in (1, 2)]
    found = load(*folders)
    assert [[run.folder.name for run in kind.runs] for kind in found] == [
        ["old-1", "old-2"],
        ["new-1", "new-2"],
    ]
    assert len({kind.label for kind in found}) == 2 and "old-1" in found[0].label


# The figure


def test_a_band_goes_from_the_lowest_to_the_highest_seed(tmp_path):
    runs = [a_run(tmp_path / f"{seed}", seed) for seed in (1, 2, 3)]
    seeds = np.array([[line["greedy"] for line in read(run)[::10]] for run in runs])
    (kind,) = load(*runs)
    steps, mean, low, high = compare.band(kind.runs, "greedy", 5)
    assert [*steps] == [0, 10, 20, 30]
    np.testing.assert_allclose(mean, seeds.mean(axis=0), rtol=1e-12)
    assert (low == seeds.min(axis=0)).all() and (high == seeds.max(axis=0)).all()


def test_a_band_is_made_of_smoothed_runs(tmp_path):
    runs = [a_run(tmp_path / f"{seed}", seed) for seed in (1, 2)]
    seeds = np.array([[line["reward"] for line in read(run)[1:]] for run in runs])
    around = (seeds[:, :-2] + seeds[:, 1:-1] + seeds[:, 2:]) / 3
    (kind,) = load(*runs)
    steps, mean, low, high = compare.band(kind.runs, "reward", 3)
    assert [*steps] == [*range(1, 31)]
    np.testing.assert_allclose(mean[1:-1], around.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(low[1:-1], around.min(axis=0), rtol=1e-12)
    np.testing.assert_allclose(high[1:-1], around.max(axis=0), rtol=1e-12)


def test_a_band_ends_with_the_shortest_run_and_skips_null(tmp_path):
    long, short = a_run(tmp_path / "1", 1), a_run(tmp_path / "2", 2, steps=20)
    first, second = read(long), read(short)
    first[7]["entropy"] = second[9]["entropy"] = first[9]["entropy"] = None
    write(long, first)
    write(short, second)
    (kind,) = load(long, short)
    steps, mean, low, high = compare.band(kind.runs, "entropy", 1)
    assert steps[-1] == 20
    assert mean[6] == low[6] == high[6] == second[7]["entropy"]
    assert [*np.flatnonzero(np.isnan(mean))] == [8] and np.isnan(low[8]) and np.isnan(high[8])


def test_every_kind_is_drawn_in_every_panel(tmp_path):
    """Seeds as line and band, a single run as a line; the gradient norm on a log axis."""
    seeds = [a_run(tmp_path / f"{seed}", seed) for seed in (1, 2)]
    kinds = load(*seeds, a_run(tmp_path / "gspo", 1, algorithm="gspo"))
    figure = compare.draw(kinds)
    assert {axis.get_title().split(" (")[0] for axis in figure.axes} == {
        "reward",
        "held-out accuracy, greedy",
        "held-out accuracy, sampled",
        "response length",
        "entropy",
        "gradient norm",
        "tokens clipped",
    }
    for axis in figure.axes:
        assert len(axis.lines) == 2 and len(axis.collections) == 1
        assert all(len(line.get_xdata()) for line in axis.lines)
        assert (axis.get_yscale() == "log") == axis.get_title().startswith("gradient norm")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["grpo (2 seeds)", "gspo"]
    assert "band: lowest to highest seed" in legend.get_title().get_text()


def test_no_two_kinds_look_alike(tmp_path):
    kinds = load(*(a_run(tmp_path / f"{i}", 1, lr=i * 1e-4) for i in range(1, 21)))
    for axis in compare.draw(kinds).axes:
        assert len({(line.get_color(), line.get_linestyle()) for line in axis.lines}) == 20


def test_telling_metrics_that_mean_the_same_everywhere_are_drawn(tmp_path):
    """gspo's clip_share is one of responses: not on one axis with a share of tokens."""
    both = WORDS | {"ref_kl": "KL to the start"}
    grpo = a_run(tmp_path / "grpo", 1, acted=both)
    gspo = {"clip_share": "responses clipped (share)"}
    assert compare.shared(load(grpo)) == both
    assert compare.shared(load(grpo, a_run(tmp_path / "stapo", 1, algorithm="stapo"))) == WORDS
    other = a_run(tmp_path / "gspo", 1, algorithm="gspo", acted=gspo)
    assert compare.shared(load(grpo, other)) == {}


def test_the_samplers_kl_is_drawn_above_rounding_only(tmp_path):
    run = a_run(tmp_path / "1", 1)
    lines, title = read(run), "KL of sampler and trainer"
    lines[3]["sampler_kl"] = 1e-13
    write(run, lines)
    assert title not in axes(load(run))
    lines[4]["sampler_kl"] = 1e-4
    write(run, lines)
    assert title in axes(load(run))


# The table


def test_a_row_of_a_run_has_its_metrics(tmp_path):
    run = a_run(tmp_path / "1", 5, steps=25)
    lines = read(run)
    measured = lines[::10]
    cells = rows(load(run))[str(run)]
    assert cells == [
        "5",
        "25 of 30",
        f"{measured[0]['greedy']:.3f} → {measured[-1]['greedy']:.3f}",
        f"{measured[0]['sampled']:.3f} → {measured[-1]['sampled']:.3f}",
        f"{max(line['greedy'] for line in measured):.3f}",
        f"{lines[1]['response_len']:.0f} → {lines[-1]['response_len']:.0f}",
        f"{sum(line.get('tokens', 0) for line in lines):,}",
        f"{sum(line['seconds'] for line in lines):.0f}",
    ]
    assert rows(load(run))["grpo"] == cells


def test_a_row_of_a_kind_has_mean_and_standard_deviation(tmp_path):
    runs = [a_run(tmp_path / f"{seed}", seed) for seed in (1, 2, 3)]
    cells = rows(load(*runs))["grpo"]
    assert cells[:2] == ["1, 2, 3", "30"]
    for cell, name in ((cells[2], "greedy"), (cells[3], "sampled")):
        first, last = ([read(run)[i][name] for run in runs] for i in (0, -1))
        told = [f"{statistics.mean(x):.3f} ± {statistics.stdev(x):.3f}" for x in (first, last)]
        assert cell == " → ".join(told)


def test_a_table_without_numbers(tmp_path):
    """A model that breaks: null is neither a nan in the table nor the end of it."""
    run = a_run(tmp_path / "a|b<i>", 1, steps=1)
    write(run, [{"step": 0, "greedy": None, "sampled": None}])
    told = compare.table(load(run))
    assert r"a\|b&lt;i> | 1 | 0 of 30 | – → – | – → – | – | – → – | 0 | 0 |" in told


# What is written


@pytest.fixture
def run_it(monkeypatch, capsys):
    """`python -m tools.compare`, or another tool, in this process; (exit code, stdout, stderr)."""

    def run(*words: object, tool: str = "compare") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"{tool}.py", *map(str, words)])
        code = 0
        try:
            runpy.run_path(str(ROOT / f"tools/{tool}.py"), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.mark.parametrize(
    "out, name", [([], "compare"), (["--out", "."], "compare"), (["--out", "lr1.5"], "lr1.5")]
)
def test_picture_and_table_are_written_where_wanted(out, name, tmp_path, monkeypatch, run_it):
    runs = [a_run(tmp_path / f"{seed}", seed) for seed in (1, 2)]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, said, errors = run_it(*runs, *out)
    assert code == 0 and not errors
    assert {path.name for path in Path().iterdir()} == {f"{name}.png", f"{name}.md"}
    text = Path(f"{name}.md").read_text()
    assert compare.table(load(*runs)) in text and compare.table(load(*runs)) in said
    assert f"]({name}.png)" in text and Path(f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert run_it(*runs[:1], *out)[0] == 0 and Path(f"{name}.md").read_text() != text  # its own


@pytest.mark.parametrize("theirs", ["notes.png", "notes.md"])
@pytest.mark.parametrize("out", ["notes", "notes.png"])
def test_what_others_wrote_is_left_alone(theirs, out, tmp_path, run_it):
    run = a_run(tmp_path / "1", 1)
    (tmp_path / theirs).write_text("mine")
    before = sorted(tmp_path.iterdir())
    code, said, errors = run_it(run, "--out", tmp_path / out)
    assert code == 2 and theirs in errors and errors.count("\n") == 1 and not said
    assert (tmp_path / theirs).read_text() == "mine" and sorted(tmp_path.iterdir()) == before


def test_a_folder_given_twice_is_one_run(tmp_path, monkeypatch, run_it):
    run = a_run(tmp_path / "1", 1)
    monkeypatch.chdir(tmp_path)
    code, said, _ = run_it(run, "1", "1/")
    assert code == 0 and said.count("| 1 | 30 |") == 2  # the kind's row and the run's


def broken(folder: Path, damage: str) -> Path:
    """A run folder with one thing wrong."""
    run = a_run(folder, 1)
    if damage == "no measurement":
        write(run, [{"step": 1, "reward": 0.5}])
    elif damage == "no metrics":
        (run / "metrics.jsonl").unlink()
    elif damage == "a damaged line":
        (run / "metrics.jsonl").write_text('{"step": 0\n{"step": 1}\n')
    elif damage == "a damaged config":
        (run / "config.json").write_text("{")
    elif damage in ODD_CONFIGS:
        config = json.loads((run / "config.json").read_text()) | ODD_CONFIGS[damage]
        config = {name: value for name, value in config.items() if value != "nothing"}
        (run / "config.json").write_text(json.dumps(config))
    elif damage in ODD_LINES:
        lines = read(run)
        lines[3] |= ODD_LINES[damage]
        write(run, lines)
    else:
        (run / "config.json").write_text('{"algorithm": "grpo"}')
    return run


ODD_CONFIGS = {
    "a seed that is none": {"seed": {}},
    "all null": dict.fromkeys([*COMMON, "algorithm", "acted", "seed"]),
    "a number for a model": {"model": 5},
    "an older run's": {"model": "nothing"},
    "a list of metrics": {"acted": ["clip_share"]},
    "a metric without words": {"acted": {"clip_share": None}},
    "half of a character": {"instruction": "\ud800"},
}
ODD_LINES = {
    "a step twice": {"step": 2},
    "a step before": {"step": -1},
    "a far step": {"step": 10**20},
    "text for a number": {"greedy": "0.5"},
    "true for a number": {"reward": True},
    "a list for a number": {"entropy": [1]},
    "a number beyond all": {"reward": 10**400},
}
DAMAGES = ("no measurement", "no metrics", "a damaged line", "a damaged config", "no run")
DAMAGES += (*ODD_CONFIGS, *ODD_LINES)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_without_a_run_is_one_line(damage, tmp_path, run_it):
    run = broken(tmp_path / "1", damage)
    code, said, errors = run_it(run, "--out", tmp_path)
    assert code == 2 and errors.count("\n") == 1 and str(run) in errors and not said
    if damage in ODD_CONFIGS:
        assert run_it(run, tool="curves") == (2, "", errors.replace("compare.py", "tools.curves"))
    assert damage not in ODD_LINES or "metrics.jsonl:4: " in errors
    assert not (tmp_path / "compare.md").exists()


@pytest.mark.parametrize("words", [[], ["--nope"], ["nope"], ["x", "--out"], ["x", "--out", "a/b"]])
def test_a_wrong_call_is_one_line(words, run_it):
    code, said, errors = run_it(*words)
    assert code == 2 and errors.count("\n") == 1 and not said


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path, monkeypatch):
    def full(figure: Figure, path: Path, **keywords: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError):
        compare.main([a_run(tmp_path / "1", 1)], str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"1", "compare.md"}
    assert compare.target(str(tmp_path))  # may be written over


def test_no_folder_to_write_to(tmp_path):
    with pytest.raises(BadInput, match="no folder"):
        compare.target(str(tmp_path / "none/name"))
