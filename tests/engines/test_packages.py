"""The optional packages themselves, not stand-ins: wandb without a network, reasoning-gym, and
`datasets` on files."""

import datasets
import grpo
import pytest
from common.data import HUB, rows_of

from tests.helpers import SMALL, run_here
from tests.common.rows import ROWS, load
from tests.repository.test_yours import save_examples


def test_wandb_gets_the_flags_and_every_step(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    flags = [*SMALL, "--steps", 2, "--seed", 7, "--wandb", "project", "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 0
    wandb.teardown()  # its own process writes the file
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    written = path.read_bytes()
    assert b"prompts_per_step" in written and written.count(b"sampler_gap_max") >= 2


def test_reasoning_gym_itself(tmp_path, monkeypatch):
    """puzzles.py of docs/yours.md: a right answer scores 1, another one less; prompts and held-out
    problems are the same in every run, and apart."""
    gym = pytest.importorskip("reasoning_gym")
    save_examples(tmp_path)
    monkeypatch.chdir(tmp_path)
    task, again, other = (load("puzzles.py", seed=seed) for seed in (1, 1, 2))
    problem = task.train(3)
    assert problem == again.train(3) and problem.prompt != other.train(3).prompt
    assert task.held_out == other.held_out and len(task.held_out) == 2
    assert problem.answer < min(held_out.answer for held_out in task.held_out)
    row = gym.create_dataset("chain_sum", size=100_000, seed=0)[problem.answer]
    right = row["answer"]
    given = [f"It is <answer>{right}</answer>.", f"<answer>{right}1</answer>", "", "9**9**9**9"]
    scores = task.verifier(given, [problem.answer] * 4)
    assert scores[0] == 1.0 and max(scores[1:]) < 1.0
    assert problem.prompt.startswith(row["question"])


@pytest.mark.parametrize("name", HUB)
def test_hub_sets_through_datasets_itself(name, tmp_path, monkeypatch):
    """Path, split and columns of each set, read by `datasets` from files that stand in for the
    hub's."""
    row, answer = ROWS[name]
    columns, real = HUB[name], datasets.load_dataset
    files = {split: str(tmp_path / f"{split}.parquet") for split in ("train", "test")}
    for split, file in files.items():
        rows = [row | {columns.prompt: f"{split} {i}"} for i in range(5)]
        datasets.Dataset.from_list(rows).to_parquet(file)

    def from_files(path: str, config: str | None, split: str) -> datasets.Dataset:
        assert (path, config) == (columns.path, columns.config)
        return real("parquet", data_files=files, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", from_files)
    if columns.train:
        task = load(name)
        problems = [task.train(0), *task.held_out]
        assert {problem.answer for problem in problems} == {answer}
        assert problems[0].prompt.startswith("train ")
        asked = "test " if columns.test else "train "
        assert all(problem.prompt.startswith(asked) for problem in task.held_out)
    assert [found for _, found in rows_of(name, "test")] == [answer] * 5
