"""Whole runs: they learn, and what they say and keep."""

import json
import os
import subprocess
import sys

import grpo
import pytest
import torch
from checks import run_of
from checks.files import ALGORITHMS, FIRST
from common.batch import Rollout
from common.distributed import ALONE
from common.records.samples import Samples
from common.records.summary import summary_of

from tests.helpers import ROOT, PROCESS_SECONDS, SMALL, metrics, module_of, run_here

# 8 steps of grpo take greedy accuracy from 0.38 to 0.97 and more, with the sign flipped to 0.14 to
# 0.23 (three seeds). In some files less is learned in a step: see `learns_in` in checks/NAME.py.
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS if name != FIRST]


@pytest.mark.curves
@pytest.mark.parametrize("algorithm", [FIRST, *OTHERS])
def test_a_short_run_learns(algorithm, tmp_path):
    """Greedy accuracy rises from below 0.5 to above 0.8, and the run folder is complete."""
    folder, steps = tmp_path / "run", run_of(algorithm).learns_in
    flags = ["--steps", steps, "--eval_every", steps, "--eval_problems", 64, "--eval_samples", 1]
    assert run_here(module_of(algorithm).main, *flags, "--run_dir", folder) == 0
    result, lines = json.loads((folder / "summary.json").read_text()), metrics(folder)
    assert result["greedy_before"] < 0.5 and result["greedy_after"] > 0.8
    assert len(lines) == steps + 1
    if algorithm == FIRST:  # the warm-up ends
        assert lines[-1]["lr"] == lines[-2]["lr"] == 3e-4
    for name in ("config.json", "samples.jsonl", "curves.png", "checkpoints"):
        assert (folder / name).exists()


def test_a_skipped_sync_stops_the_run(tmp_path, monkeypatch, capsys):
    """The loop's own check of the sampler names the usual causes."""
    monkeypatch.setattr("common.rollout.HFEngine.sync", lambda *arguments: None)
    flags = [*SMALL, "--steps", 20, "--lr", "3e-3", "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 1
    assert "weights not synced" in capsys.readouterr().err


WIDE = "--clip_low 1 --clip_high 9"  # a clip that nothing reaches
IDLE = [  # a file, its flags, and whether it ends with a warning
    ("grpo", f"--minibatches 1 {WIDE}", False),  # no ratio leaves 1
    ("grpo", f"--minibatches 2 {WIDE}", True),
    ("vcpo", "--lag 0 --no_ess_scaling", False),
]


@pytest.mark.parametrize("algorithm, flags, warned", IDLE)
def test_a_mechanism_that_never_acts_is_a_warning_where_it_could(
    algorithm, flags, warned, tmp_path, capsys
):
    module = module_of(algorithm)
    words = [*SMALL, "--steps", 1, *flags.split(), "--run_dir", tmp_path / "run"]
    assert run_here(module.main, *words) == 0
    lines = capsys.readouterr().out.splitlines()
    (message,) = [line for line in lines if "every step" in line or "any step" in line]
    assert next(iter(module.ACTED)) in message and message.startswith("WARNING") == warned
    assert ("r stays 1" in message) == (algorithm == "grpo" and not warned)


HINTS = [(0, 64, "is an answer found"), (0, 1, "cut at --max_new"), (1, 64, "easy"), (0.3, 64, "")]


@pytest.mark.parametrize("points, length, hint", HINTS)
def test_equal_rewards_are_said_first(points, length, hint, tmp_path, capsys):
    """Once after three steps, and first at the end, where the idle clip is no other warning."""
    task = "train = lambda i: ('1+2=', '')\nheld_out = [train(0)]\nreward = lambda *both: "
    (tmp_path / "task.py").write_text(f"{task}{points}\n")
    flags = [*SMALL, "--steps", 4, "--task", tmp_path / "task.py", "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags, "--max_new_tokens", length) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    warned = [number for number, line in enumerate(lines) if line.startswith("WARNING")]
    assert warned == [3, 4] and all(f"{points} on average" in lines[n] for n in warned)
    assert "in 3 steps" in lines[3] and "in 4 steps" in lines[4] and hint in lines[4]


def test_curves_that_cannot_be_drawn_fail_no_run(tmp_path, monkeypatch, capsys):
    def fails(*arguments: object) -> None:
        raise ValueError("no such backend")

    monkeypatch.setattr("common.run.draw_run", fails)
    assert run_here(grpo.main, *SMALL, "--steps", 1, "--run_dir", tmp_path / "run") == 0
    assert capsys.readouterr().out.endswith("curves   cannot be drawn (no such backend)\n")
    assert (tmp_path / "run/summary.json").is_file()


@pytest.mark.slow
def test_a_screen_that_ends_and_a_backend_that_is_missing_fail_no_run(tmp_path):
    """As in `python grpo.py 2>&1 | head -1` in a notebook's environment."""
    words = [sys.executable, "grpo.py", *SMALL, "--steps", "1", "--run_dir", str(tmp_path / "run")]
    environment = os.environ | {"MPLBACKEND": "module://of_a_notebook"}
    how = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(words, env=environment, **how) as run:
        run.stdout.readline()
        run.stdout.close()
        assert run.wait(PROCESS_SECONDS) == 0
    assert {"summary.json", "curves.png"} <= {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize("best, last, fell", [(0.8, 0.63, 1), (0.8, 0.65, 0), (-0.1, -0.9, 0)])
def test_a_run_that_ends_below_four_fifths_of_its_positive_best_fell(best, last, fell):
    greedy = {0: best - 1, 5: best, 10: last}
    lines = [{"step": n, "greedy": x, "sampled": x, "seconds": 1.0} for n, x in greedy.items()]
    summary = summary_of(lines)
    assert (summary["best"], summary["best_step"], summary["fell"]) == (best, 5, fell)


def test_samples_keep_three_groups_of_a_mini_batch():
    """Of problems 4 to 8 these are the first with different rewards, the one with the largest
    |weight|, and the one with the lowest reward."""
    rewards = torch.tensor([1.0, 1, 0, 1, 0, 1, 0, 0, 1, 1])
    weight = torch.tensor([0.0, 0, 1, -1, 3, -3, 0, 0, 0, 0])[:, None].repeat(1, 2)  # [N, T]
    mask = torch.ones(10, 2)
    weight[8:, 1], mask[8:, 1] = 9.0, 0.0  # padding
    problem = torch.arange(4, 9).repeat_interleave(2)
    batch = Rollout(problem=problem, rewards=rewards, weight=weight, mask=mask)
    samples = Samples(task=None, args=None, world=ALONE)
    assert samples._chosen(batch) == [5, 6, 7]
    batch.rewards = torch.ones(10)
    assert samples._chosen(batch) == [4, 6]
