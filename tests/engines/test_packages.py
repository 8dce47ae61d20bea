"""The optional packages themselves, not stand-ins: wandb without a network, reasoning-gym, and
`datasets` on files."""

import datasets
import grpo
import pytest
from common.plumbing.sets import HUB, read_set

from tests.common.rows import ROWS, Letters, load


@pytest.mark.parametrize("name", ["chain_sum", "letter_counting", "spell_backward"])
def test_reasoning_gym_itself(name):
    """tools/gym.py: a right answer scores 1, another one less; prompts and held-out problems are
    the same in every run, and apart; a set that would run the model's words is refused."""
    pytest.importorskip("reasoning_gym")
    from tools import gym

    spec, rows = f"tools/gym.py:{name}", getattr(gym, name).rows
    task, again, other = (load(spec, Letters(), seed=seed) for seed in (1, 1, 2))
    problem = task.train(3)
    assert problem == again.train(3) and problem.prompt != other.train(3).prompt
    assert task.held_out == other.held_out and len(task.held_out) == 2
    assert int(problem.answer) < gym.SIZE // 2 < min(int(p.answer) for p in task.held_out)
    right = rows[int(problem.answer)]["answer"]
    given = [f"It is <answer>{right}</answer>.", f"<answer>{right}1</answer>", "", "9**9**9**9"]
    scores = task.judge(given, [problem.answer] * 4)
    assert scores[0] == 1.0 and max(scores[1:]) < 1.0
    assert problem.prompt.startswith(rows[int(problem.answer)]["question"])
    task.judge.close()
    for wrong, why in (("countdown", "would execute"), ("nothing", "not registered")):
        with pytest.raises(ValueError, match=f"--task tools/gym.py:{wrong}: .*{why}"):
            load(f"tools/gym.py:{wrong}")


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
    measured = read_set(name, grpo.Args(), "test", "--eval_task")
    assert [found for _, found in measured] == [answer] * 5
    assert {entry[:2] for entry in asked} == {(columns.path, columns.config)}
    assert {entry[2] for entry in asked} == {columns.train, columns.test} - {""}
