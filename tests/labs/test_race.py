"""The race: what a stress does to a run, what is kept of it, and how runs become places."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common.data import load_task
from common.plumbing.errors import BadInput
from common.plumbing.model import load_model
from common.tiny.arithmetic import KINDS
from labs import race, stress
from labs.stress import STRESSES, Stress

# A file in the house's form, whose training is to write down what it was given
FAKE = '''
"""Base file: grpo.py"""
from dataclasses import dataclass
from pathlib import Path
from common.plumbing.flags import Flags
from common.plumbing.folder import as_lines

@dataclass
class Args(Flags):
    steps: int = 150
    prompts_per_step: int = 16
    group_size: int = 8
    minibatches: int = 4
    eval_every: int = 25
    lr: float = 0.2
    model: str = "tiny"
    max_new_tokens: int = 64
    gradient_checkpointing: bool = False

ACTED = {"clip_share": "tokens clipped"}
load_task = make_engine = evaluate = save_checkpoint = None

def main(args, world):
    here = Path(__file__).parent
    with (here / "began").open("a") as log:
        log.write(f"{args.seed} {args.lr:.1f} {args.minibatches} {args.group_size}\\n")
    if (here / "broken").exists() and args.seed == 2:
        raise ZeroDivisionError("on purpose")
    Path(args.run_dir).mkdir()
    rows = [{"step": 0, "sampled": 0.5}]
    rows += [{"step": args.steps, "sampled": args.lr, "tokens": 2000, "clip_share": 0.0}]
    (Path(args.run_dir) / "metrics.jsonl").write_text(as_lines(rows))
'''


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    stress.loaded.cache_clear()
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return path


def cells(method: str, value: float, **other: float) -> list[dict]:
    """A row of a table: runs that stay at one accuracy, under some stresses at another."""
    found = []
    for name in STRESSES:
        run = {"at": [0, 8, 16], "sampled": [other.get(name, value)] * 3, "thousands": [0, 1, 2]}
        found.append({"method": method, "stress": name, "runs": [run | {"seed": 1, "acted": 0.1}]})
    return found


# What a stress does


class Sampler:
    """An engine that counts."""

    def __init__(self):
        self.lm, self.taken, self.asked = torch.nn.Module(), [], []
        self.lm.layers = torch.nn.ModuleList([torch.nn.Linear(3, 2)])
        self.lm.requires_grad_(False)
        self.lm.named_parameters = lambda: [("model.layers.0.weight", self.lm.layers[0].weight)]

    def sync(self, policy: object) -> None:
        self.taken.append(policy)

    def generate(self, prompts: list, n: int, limit: int, temperature: float) -> str:
        self.asked.append(temperature)
        return "rollout"


def test_a_strained_sampler():
    """An old one takes every 16th policy, a cold one keeps its caller in the dark, a coarse one has
    five values a row."""
    engine = stress.strained(Sampler(), Stress(every=16, levels=2, cold=0.5))
    weight = engine.lm.layers[0].weight
    scale = weight.abs().amax(dim=1, keepdim=True) / 2
    coarse = (weight / scale).round() * scale
    for policy in range(40):
        engine.sync(policy)
    assert engine.generate([], 8, 64, 1.0) == "rollout"
    assert engine.taken == [0, 16, 32] and engine.asked == [0.5]
    torch.testing.assert_close(weight, coarse)


def test_a_judge_errs_by_rule():
    """A tenth, another tenth each time, the same for the same seed."""

    def right(texts: list[str], answers: list[str]) -> list[float]:
        return [1.0] * len(texts)

    one, again, other = (stress.erring(right, 0.1, seed) for seed in (1, 1, 2))
    texts = ["x"] * 2000
    first = one(texts, texts)
    assert 140 < first.count(0.0) < 260
    assert again(texts, texts) == first != one(texts, texts)
    assert other(texts, texts) != first


def test_the_held_out_problems_stay_strict_and_the_same():
    """Neither an erring verifier nor useless prompts reach them."""
    _, tokenizer = load_model("tiny")
    args = SimpleNamespace(task="arithmetic", seed=1, eval_problems=16, eval_task="")
    vars(args).update(chat=(), max_prompt_tokens=1024, max_new_tokens=64)
    kinds, tasks = dict(KINDS), {}
    for name in ("none", "wrong verifier", "useless prompts"):
        module = SimpleNamespace(**dict.fromkeys(stress.FORM) | {"main": print})
        module.load_task = load_task
        stress.put_under(module, STRESSES[name])
        tasks[name] = module.load_task(args, tokenizer)
        assert KINDS == kinds  # the next run of this process finds them as they were
    held = [[problem.prompt for problem in task.held_out] for task in tasks.values()]
    assert held[0] == held[1] == held[2]
    answers = [problem.answer for problem in tasks["none"].held_out] * 20
    texts = [f"#{answer}" for answer in answers]
    for task in tasks.values():
        assert task.held_out_verifier(texts, answers) == [1.0] * len(texts)
    assert 0 < tasks["wrong verifier"].verifier(texts, answers).count(0.0) < 80


# What is kept


@pytest.mark.slow
def test_a_race_goes_on_where_it_was_stopped(fake):
    """A run that broke is none, the others are kept; the same command runs what is missing. A
    stress has the last word on the flags, and the budget the one before."""
    jobs = [(seed, "fake", name) for seed in (1, 2) for name in ("none", "lr x3", "pairs")]
    flags = "--minibatches 2 --group_size 4"
    rows, path = {"fake": race.Method(fake, flags)}, fake.parent / "table.json"
    began, broken = fake.parent / "began", fake.parent / "broken"
    broken.touch()
    assert race.run(jobs, rows, path) == 3
    assert sorted(began.read_text().splitlines())[:3] == ["1 0.2 2 2", "1 0.2 2 8", "1 0.6 2 8"]
    table = race.stored(path)
    assert [run["seed"] for run in race.runs_of(table, "fake", "none")] == [1]
    assert [run["sampled"] for run in race.runs_of(table, "fake", "lr x3")] == [[0.5, 0.6]]
    broken.unlink()
    began.unlink()
    assert race.run(jobs, rows, path) == 0 and race.run(jobs, rows, path) == 0
    assert sorted(began.read_text().splitlines()) == ["2 0.2 2 2", "2 0.2 2 8", "2 0.6 2 8"]


def ended(folder: Path, steps: list[int], said: str = "") -> Path:
    """What a run leaves."""
    (folder / "run").mkdir()
    rows = [{"step": step, "sampled": 0.5, "tokens": 1000, "x": None} for step in steps]
    rows[0]["x"] = 0.0
    (folder / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "said").write_text(said)
    return folder


def test_a_run_that_stopped_itself_is_a_result(tmp_path):
    found = stress.outcome(ended(tmp_path, [0, 8], "bar\ngrpo.py: error: NaN"), 1, "x")
    assert found["stopped"] == "NaN" and found["at"] == [0, 8] and found["acted"] == 0.0
    assert race.score(found)["end"] == 0.0  # two of six measurements: the last three are lost


def test_a_refusal_is_a_result(tmp_path):
    (tmp_path / "said").write_text("mine.py: error: --group_size 2: too small")
    assert stress.outcome(tmp_path, 2, "x") == {"refused": "--group_size 2: too small"}


BROKEN = [(-9, [0, 40], ""), (1, [0], "ValueError: x"), (2, [0], "x: error: the disk is full")]


@pytest.mark.parametrize("code, steps, said", [*BROKEN, (0, [0, 8, 16], "")])
def test_a_run_that_somebody_ended_is_none(tmp_path, code, steps, said):
    with pytest.raises(BadInput, match="exit code"):
        stress.outcome(ended(tmp_path, steps, said), code, "x")


# Scores and places


def test_the_score():
    run = {"sampled": [0.5, 0.7, 0.9, 0.9, 0.6, 0.3], "thousands": [0, 10, 20, 30, 40, 50]}
    found = race.score(run)
    assert found["end"] == pytest.approx(0.6) and found["fall"] == pytest.approx(2.5 / 3 - 0.6)
    assert found["reached"] == pytest.approx(15)


def test_places_go_by_the_worst_cell():
    table = {"cells": cells("a", 0.9, pairs=0.2) + cells("b", 0.8) + cells("c", 1.0)[:1]}
    assert race.worst(table, "a") == (0.2, "pairs") and race.worst(table, "b")[0] == 0.8
    assert race.worst(table, "c") is None  # has not run everywhere
    mine = {"cells": cells("mine", 0.4)}
    assert race.place(mine, "mine", dict.fromkeys("abc", table)) == "place 2 of 3"


@pytest.mark.slow
def test_a_race_ends_with_a_place(fake, monkeypatch, capsys):
    monkeypatch.setattr(race, "STRESSES", {"none": STRESSES["none"]})
    monkeypatch.setattr(race, "TABLE", fake.parent / "shipped.json")
    empty = race.stored(race.TABLE)
    race.TABLE.write_text(json.dumps(empty | {"cells": cells("grpo", 0.1)}))
    words = ["race", str(fake), "--seeds", "1", "--out", str(fake.parent / "out")]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as left:
        race.main()
    assert left.value.code == 0 and "place 1 of 2" in capsys.readouterr().out


def test_a_run_has_a_bound(fake, monkeypatch, capsys):
    """One that does not end is killed, its cell is not kept, and the table's lock is free."""
    endless = FAKE.replace("    here = ", "    import signal; signal.pause()\n    here = ")
    fake.write_text(endless)
    monkeypatch.setattr(race, "LONGEST", 1.0)
    rows, path = {"fake": race.Method(fake)}, fake.parent / "table.json"
    assert race.run([(1, "fake", "none")], rows, path) == 1
    race.run([], rows, path)
    assert "still at work" in capsys.readouterr().out and not race.stored(path)["cells"]
