"""The optional packages themselves, not stand-ins: wandb without a network, reasoning-gym, and
`datasets` on files."""

import json
import math

import datasets
import grpo
import pytest
from common.data import HUB, rows_of

from tests.helpers import SMALL, metrics, run_here
from tests.common.rows import ROWS, load
from tests.repository.test_yours import save_examples


def records(path) -> list:
    """The records of an offline run's file: LevelDB's log format, 32 KB blocks of chunks, after a
    header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            # No room for a chunk's header: the block's end is padding
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last chunk of one
            found.append(Record.FromString(whole))
            whole = b""
    return found


def test_wandb_offline_holds_the_config_and_every_step(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    flags = [*SMALL, "--steps", 2, "--seed", 7, "--wandb", "project", "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags) == 0
    import wandb

    wandb.teardown()  # its own process writes the file
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    found = records(path)
    config = {u.key: json.loads(u.value_json) for record in found for u in record.run.config.update}
    assert config["seed"] == 7 and config["algorithm"] == "grpo" and config["prompts_per_step"] == 4
    logged = {}
    for record in found:
        if record.HasField("history"):
            line = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            logged[line["step"]] = line
    written = {line["step"]: line for line in metrics(tmp_path / "run")}
    assert logged.keys() == written.keys() == {0, 1, 2}
    assert all(math.isclose(logged[step]["reward"], written[step]["reward"]) for step in (1, 2))


@pytest.mark.parametrize("name", ["chain_sum", "letter_counting", "spell_backward"])
def test_reasoning_gym_itself(name, tmp_path, monkeypatch):
    """puzzles.py of docs/yours.md: a right answer scores 1, another one less; prompts and held-out
    problems are the same in every run, and apart."""
    gym = pytest.importorskip("reasoning_gym")
    save_examples(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = (tmp_path / "puzzles.py").read_text()
    (tmp_path / "puzzles.py").write_text(text.replace("chain_sum", name))
    task, again, other = (load("puzzles.py", seed=seed) for seed in (1, 1, 2))
    problem = task.train(3)
    assert problem == again.train(3) and problem.prompt != other.train(3).prompt
    assert task.held_out == other.held_out and len(task.held_out) == 2
    assert problem.answer < min(held_out.answer for held_out in task.held_out)
    row = gym.create_dataset(name, size=100_000, seed=0)[problem.answer]
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
    columns, real, asked = HUB[name], datasets.load_dataset, []
    for split in ("train", "test"):
        rows = [
            row | {columns.prompt: f"{split} {row[columns.prompt]} {i}", "more": i}
            for i in range(5)
        ]
        found = datasets.Dataset.from_list(rows)
        found.to_parquet(str(tmp_path / f"{split}.parquet"))

    def from_files(path: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((path, config, split))
        files = {part: str(tmp_path / f"{part}.parquet") for part in ("train", "test")}
        return real("parquet", data_files=files, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", from_files)
    if columns.train:
        task = load(name)
        assert {task.train(i).answer for i in range(5)} == {answer}
        assert {p.answer for p in task.held_out} == {answer}
        assert task.train(0).prompt.startswith("train ")
        assert all(
            p.prompt.startswith("test " if columns.test else "train ") for p in task.held_out
        )
    measured = rows_of(name, "test")
    assert [found for _, found in measured] == [answer] * 5
    assert {entry[:2] for entry in asked} == {(columns.path, columns.config)}
    assert {entry[2] for entry in asked} == {columns.train, columns.test} - {""}
