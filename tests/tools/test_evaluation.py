"""tools.evaluate: estimators against brute force, models and runs measured, bad input refused."""

import itertools
import json
import random
import shutil
import sys
from pathlib import Path

import grpo
import pytest
import torch
from common.data import load_task
from common.distributed import World
from common.launch import launch, parse
from tools import evaluate
from tools.evaluate import Args, bootstrap, line_of, pass_at_k

from tests.helpers import SMALL, forked, metrics, run_here

MOVED = [*SMALL, "--lr", 0.01, "--max_new_tokens", 40, "--save_hf"]


def call(*words: object) -> None:
    """Run `python -m tools.evaluate WORDS`."""
    sys.argv = ["evaluate.py", *map(str, words)]
    launch(evaluate.main, Args, evaluate.prepare)


@pytest.fixture
def measured(monkeypatch, capsys):
    """Call it in this process, and return what it prints."""

    def measured(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", [])
        capsys.readouterr()
        call(*words)
        return capsys.readouterr().out

    return measured


def rows(folder: Path) -> list[dict]:
    """Return the rows of the one file of responses in a folder."""
    (path,) = folder.glob("evaluation-*")
    return [json.loads(line) for line in path.read_text().splitlines()]


def greedy(folder: Path) -> list[tuple]:
    """Return problem, greedy response and score of each row."""
    greedy_rows = [row for row in rows(folder) if not row["temperature"]]
    return [(row["problem"], row["responses"], row["scores"]) for row in greedy_rows]


def table(printed: str) -> list[list[str]]:
    """Return the cells of the printed table's lines, without its head."""
    lines = [line for line in printed.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# Estimators


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(n):
    """It is unbiased: over every choice of k of the n responses, how often one is right."""
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * right + [False] * (n - right), k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert abs(pass_at_k(torch.tensor([right]), n, k).item() - expected) < 1e-12


def test_bootstrap_interval_is_that_of_the_mean():
    """For 400 coin flips it is about ± 1.96 · sqrt(p (1-p) / 400), with the same numbers each
    time."""
    rng = random.Random(0)
    values = torch.tensor([float(rng.random() < 0.3) for _ in range(400)], dtype=torch.float64)
    low, high = bootstrap(values)
    p = values.mean().item()
    half = 1.96 * (p * (1 - p) / 400) ** 0.5
    assert abs(low - (p - half)) < 0.01 and abs(high - (p + half)) < 0.01
    assert bootstrap(values) == (low, high)


def test_a_line_of_the_table_by_hand():
    """Two problems have four responses each: avg is 3/8, pass@2 (1/2 + 5/6)/2, pass@4 1. Length and
    cut are over all responses."""
    row = {"set": "s", "temperature": 1.0, "top_p": 1.0, "lengths": [2, 4, 6, 8]}
    two_rows = [
        row | {"scores": [1, 0, 0, 0], "finished": [True] * 4},
        row | {"scores": [0, 1, 0, 1], "finished": [True, True, False, True]},
    ]
    (cells,) = table("| \n" + line_of(two_rows, 4))
    assert cells[:5] == ["s", "1.0", "1.0", "2", "4"] and cells[8:] == ["5", "0.125"]
    assert [cell.split()[0] for cell in cells[5:8]] == ["0.375", "0.667", "1.000"]


# A model


@pytest.mark.slow
def test_scores_are_of_the_responses_and_the_mean_of_the_scores(measured, tmp_path, tiny):
    flags = ["--eval_problems", 12, "--eval_samples", 2, "--run_dir", tmp_path]
    printed = measured("tiny", *flags)
    stored = rows(tmp_path)
    problems = load_task(grpo.Args(eval_problems=12), tiny[1]).held_out
    for row, problem in zip(stored, problems):
        (text,) = row["responses"]
        assert row["prompt"] == problem.prompt
        assert row["scores"] == [float("#" in text and text.split("#")[-1] == problem.answer)]
    mean = sum(row["scores"][0] for row in stored[:12]) / 12
    assert table(printed)[0][5].startswith(f"{mean:.3f} [")


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """Return a run whose weights have left the embedded model's, with the final model saved."""
    folder = tmp_path_factory.mktemp("moved") / "run"
    assert run_here(grpo.main, *MOVED, "--steps", 2, "--run_dir", folder) == 0
    return folder


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(measured, tmp_path, moved):
    """Greedy responses are the same, every problem is measured once, and there is one table."""
    flags = [moved, "--eval_problems", 7, "--run_dir"]
    done = forked(call, *flags, tmp_path / "both", ranks=2)
    assert done.codes == [0, 0] and len(table(done.stdout)) == 3, done.stderr
    measured(*flags, tmp_path / "alone")
    assert greedy(tmp_path / "both") == greedy(tmp_path / "alone")
    assert [row["problem"] for row in rows(tmp_path / "both")] == [*range(7)] * 3


@pytest.mark.slow
def test_a_run_is_its_newest_checkpoint(measured, tmp_path, moved):
    """Responses are those of the model that --save_hf wrote, not the start's. The accuracy is what
    the run measured itself."""
    run = Path(shutil.copytree(moved, tmp_path / "run"))
    printed = measured(run)
    assert table(printed)[0][5].startswith(f"{metrics(run)[-1]['greedy']:.3f} [")
    flags = ["--eval_problems", 8, "--eval_samples", 1, "--max_new_tokens", 40, "--run_dir"]
    for model in (run / "model", "tiny"):
        measured(model, *flags, tmp_path / Path(model).name)
    assert greedy(run) == greedy(tmp_path / "model") != greedy(tmp_path / "tiny")


@pytest.mark.slow
def test_flags_that_are_not_given_are_the_runs(moved, monkeypatch):
    """This holds even if a given value is the default of a flag."""
    for words, tokens, samples in (("", 40, 1), ("--max_new_tokens 64 --eval_samples 2", 64, 2)):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", str(moved), *words.split()])
        args = parse(Args)
        evaluate.prepare(args, World(0, 1, torch.device("cpu")))
        assert (args.max_new_tokens, args.eval_samples, args.eval_problems) == (tokens, samples, 8)


@pytest.mark.slow
def test_a_damaged_or_missing_checkpoint_is_one_line(measured, tmp_path, capsys, finished):
    """An older one can be measured."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    shards = next((run / "checkpoints/step_000004/shards").glob("*.distcp"))
    shards.write_bytes(shards.read_bytes()[:1000])
    for step, wrong in ((0, "step_000004 is damaged"), (3, "no checkpoint of step 3, has [2, 4]")):
        with pytest.raises(SystemExit) as stop:
            measured(run, "--step", step)
        message = capsys.readouterr().err
        assert stop.value.code == 2 and message.count("\n") == 1 and wrong in message
    assert "after step 2;" in measured(run, "--step", 2)
