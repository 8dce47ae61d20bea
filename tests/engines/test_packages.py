"""Packages themselves: wandb without a network, reasoning-gym, and `datasets` on files."""

import datasets
import grpo
import pytest
from common.tasks.rows import HUB, rows_of

from tests.helpers import ROOT, SMALL, run_here, scored
from tests.common.rows import ROWS, load


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """Return the package, without a network and without the user's key."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()  # it has read the environment once
    return wandb


def test_wandb_gets_the_flags_and_every_step(tmp_path, wandb):
    """Each run has its own id, whatever its name, and a resumed run keeps it."""
    flags = [*SMALL, "--seed", 7, "--wandb", "project", "--run_dir"]
    for more in (["one/a#b"], ["two/a#b"], ["one/a#b", "--resume", "--steps", 3]):
        more[0] = tmp_path / more[0]
        assert run_here(grpo.main, "--steps", 2, *flags, *more) == 0
        wandb.finish()
    wandb.teardown()  # its own process writes the files
    paths = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    names = [path.stem for path in paths]
    assert len(names) == 3 and len(set(names)) == 2
    written = paths[0].read_bytes()
    assert b"prompts_per_step" in written and written.count(b"sampler_gap_max") >= 2
    assert all(b"a#b" in path.read_bytes() for path in paths)


@pytest.mark.parametrize(
    ("project", "mode", "message"),
    [("project", "online", "No API key configured"), ("a/b", "offline", "Invalid project name")],
)
def test_wandb_that_cannot_be_used(project, mode, message, tmp_path, monkeypatch, wandb, capsys):
    """The run ends before the model is loaded."""
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setattr(grpo, "load_model", None)
    monkeypatch.setattr("sys.stdin", None)  # nobody to ask
    flags = [*SMALL, "--wandb", project, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 2
    output = capsys.readouterr().err
    assert f"--wandb {project}: cannot be used ({message}" in output
    assert "Traceback" not in output and not (tmp_path / "run").exists()


def test_reasoning_gym_itself(monkeypatch):
    """In docs/tasks/puzzles.py a right answer scores 1, another one less. Prompts and held-out
    problems are the same in every run, and disjoint."""
    gym = pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(ROOT / "docs/tasks")
    task, again, other = (load("puzzles.py", seed=seed) for seed in (1, 1, 2))
    problem = task.train(3)
    assert problem == again.train(3) and problem.prompt != other.train(3).prompt
    assert task.held_out == other.held_out and len(task.held_out) == 2
    assert problem.answer < min(held_out.answer for held_out in task.held_out)
    row = gym.create_dataset("chain_sum", size=100_000, seed=0)[problem.answer]
    right = row["answer"]
    responses = [f"It is <answer>{right}</answer>.", f"<answer>{right}1</answer>", "", "9**9**9**9"]
    scores = scored(task.verifier(responses, [problem.answer] * 4))
    assert scores[0] == 1.0 and max(scores[1:]) < 1.0
    assert problem.prompt.startswith(row["question"])


@pytest.mark.parametrize("name", HUB)
def test_hub_sets_through_datasets_itself(name, tmp_path, monkeypatch):
    """It reads path, split and columns of each set, from files that stand in for the hub's."""
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
        task, held_out = load(name), "test " if columns.test else "train "
        assert task.train(0).prompt.startswith("train ")
        assert all(problem.prompt.startswith(held_out) for problem in task.held_out)
    assert [reference for _, reference in rows_of(name, "test")] == [answer] * 5
