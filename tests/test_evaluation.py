"""The benchmark: estimators against brute force, sets from local files, the results' file and
table."""

import itertools
import json
import random

import grpo
import pytest
import torch
from common.evaluation import DECODING, bootstrap, pass_at_k, table

from tests.helpers import SMALL, command, run_here


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(n):
    """Unbiased: over every choice of k of the n responses, how often one of them is right. Not 1 -
    (1 - c/n)^k."""
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * right + [False] * (n - right), k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert abs(pass_at_k(torch.tensor([right]), n, k).item() - expected) < 1e-12


def test_bootstrap_interval_is_that_of_the_mean():
    """For 400 coin flips about ± 1.96 · sqrt(p (1-p) / 400); a constant has no interval; the same
    numbers each time."""
    rng = random.Random(0)
    values = torch.tensor([float(rng.random() < 0.3) for _ in range(400)], dtype=torch.float64)
    low, high = bootstrap(values)
    p = values.mean().item()
    half = 1.96 * (p * (1 - p) / 400) ** 0.5
    assert abs(low - (p - half)) < 0.01 and abs(high - (p + half)) < 0.01
    assert bootstrap(values) == (low, high) and bootstrap(torch.ones(5, dtype=torch.float64)) == (
        1.0,
        1.0,
    )


def test_table_by_hand():
    """Two problems, four responses: avg@4 3/8, pass@2 (1/2 + 5/6)/2, pass@4 1; cut and length over
    all responses."""
    common = {"set": "s", "temperature": 1.0, "top_p": 1.0, "lengths": [2, 4, 6, 8]}
    rows = [common | {"scores": [1, 0, 0, 0], "finished": [True] * 4}]
    rows += [common | {"scores": [0, 1, 0, 1], "finished": [True, True, False, True]}]
    head, _, line = table(rows, 4).splitlines()
    assert (
        head.count("|") == line.count("|") == 10
        and "avg@4" in head
        and "pass@2" in head
        and "pass@4" in head
    )
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["s", "1.0", "1.0", "2"] and cells[7:] == ["5", "0.125"]
    assert [cell.split()[0] for cell in cells[4:7]] == ["0.375", "0.667", "1.000"]


def test_part_marks_count_for_the_average_alone():
    row = {
        "set": "s",
        "temperature": 1.0,
        "top_p": 1.0,
        "lengths": [1, 1],
        "scores": [0.5, 0.5],
        "finished": [True] * 2,
    }
    cells = [cell.split()[0] for cell in table([row], 2).splitlines()[2].strip("|").split("|")]
    assert cells[4] == "0.500" and cells[5] == "0.000"


def test_eval_only_measures_the_held_out_problems(tmp_path, monkeypatch, capsys):
    """No training, no checkpoint; both settings, a row for each problem; the printed numbers are
    the file's."""
    flags = [
        "--eval_only",
        "--eval_problems",
        12,
        "--eval_samples",
        2,
        "--run_dir",
        tmp_path / "run",
    ]
    assert run_here(monkeypatch, grpo.main, *flags) == 0
    rows = [
        json.loads(line)
        for line in (tmp_path / "run/evaluation-step0.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 24 and {(row["temperature"], row["top_p"]) for row in rows} == set(DECODING)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["evaluation-step0.jsonl"]
    printed = capsys.readouterr().out
    first = [row for row in rows if row["temperature"] == 1.0]
    mean = sum(sum(row["scores"]) for row in first) / 24
    assert f"| {mean:.3f} [" in printed and printed.count("| arithmetic |") == 2
    assert all(len(row["responses"]) == 2 == len(row["lengths"]) for row in rows)


def test_eval_only_takes_a_checkpoint(tmp_path, monkeypatch, capsys):
    """With --resume the newest checkpoint is measured and the run's own files stay as they are."""
    flags = [*SMALL, "--run_dir", tmp_path / "run"]
    assert run_here(monkeypatch, grpo.main, *flags, "--steps", 2, "--lr", 0.05) == 0
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert (
        run_here(
            monkeypatch, grpo.main, *flags, "--steps", 2, "--lr", 0.05, "--eval_only", "--resume"
        )
        == 0
    )
    trained = capsys.readouterr().out
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    # And goes on
    assert run_here(monkeypatch, grpo.main, *flags, "--steps", 3, "--lr", 0.05, "--resume") == 0
    assert (tmp_path / "run/evaluation-step2.jsonl").read_text()
    capsys.readouterr()
    assert (
        run_here(monkeypatch, grpo.main, *SMALL, "--eval_only", "--run_dir", tmp_path / "other")
        == 0
    )
    assert capsys.readouterr().out != trained


def test_several_sets_from_local_files(tmp_path, monkeypatch, capsys, words):
    """`aime24:file,math500:file` with the hub sets' own columns, judged by math-verify."""
    (tmp_path / "aime.jsonl").write_text('{"problem": "One plus two?", "answer": "003"}\n')
    rows = [
        {"problem": f"{a} plus {b}?", "answer": str(a + b)} for a, b in ((1, 2), (2, 2), (3, 4))
    ]
    (tmp_path / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = f"aime24:{tmp_path}/aime.jsonl,math500:{tmp_path}/math.jsonl"
    flags = [
        "--model",
        words,
        "--eval_only",
        "--eval_task",
        sets,
        "--eval_samples",
        2,
        "--max_new_tokens",
        4,
    ]
    assert run_here(monkeypatch, grpo.main, *flags, "--run_dir", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert printed.count("| aime24:") == printed.count("| math500:") == 2
    rows = [
        json.loads(line)
        for line in (tmp_path / "run/evaluation-step0.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 8 and {row["answer"] for row in rows if "aime" in row["set"]} == {"3"}


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("math500,nosuchset", "--eval_task nosuchset: unknown"),
    ],
)
def test_bad_sets_are_refused(tmp_path, monkeypatch, capsys, words, sets, message):
    (tmp_path / "math.jsonl").write_text('{"problem": "One plus two?", "answer": "3"}\n')
    sets = sets.replace("math500", f"math500:{tmp_path}/math.jsonl")
    flags = ["--model", words, "--eval_only", "--eval_task", sets, "--run_dir", tmp_path / "run"]
    assert run_here(monkeypatch, grpo.main, *flags) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_two_ranks_share_the_problems(tmp_path):
    """Every problem once, whichever rank measured it; one table."""
    flags = ["--eval_only", "--eval_problems", 7, "--eval_samples", 1]
    run = command("grpo", *flags, "--run_dir", tmp_path / "run", ranks=2)
    assert run.returncode == 0 and run.stdout.count("| arithmetic |") == 2, run.stderr[-2000:]
    rows = [
        json.loads(line)
        for line in (tmp_path / "run/evaluation-step0.jsonl").read_text().splitlines()
    ]
    assert sorted(row["problem"] for row in rows if row["top_p"] == 1.0) == list(range(7))
