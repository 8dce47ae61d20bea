"""The race: what a stress does to a run, what is stored of it, and how runs become places."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common.data import load_task
from common.model import load_model
from common.tiny.arithmetic import KINDS
from labs import stresses
from labs.stresses import STRESSES, Stress

race = importlib.import_module("labs.race.__main__")

# A file in the form of grpo.py that writes down what it was given instead of training
FAKE = '''"""Base file: grpo.py"""
import json
from dataclasses import dataclass
from pathlib import Path
from common.cli import Flags

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

load_task = make_engine = evaluate = save_checkpoint = None

def main(args, world):
    here = Path(__file__).parent
    with (here / "began").open("a") as log:
        batch = f"{args.minibatches} {args.prompts_per_step} {args.group_size}"
        log.write(f"{args.seed} {args.lr:.1f} {batch}\\n")
    if (here / "broken").exists() and args.seed == 2:
        raise ZeroDivisionError("on purpose")
    folder = Path(args.run_dir)
    folder.mkdir()
    rows = [{"step": 0, "sampled": 0.5}]
    rows += [{"step": args.steps, "sampled": args.lr, "tokens": 2000, "clip_share": 0.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    (folder / "config.json").write_text('{"acted": {"clip_share": "tokens clipped"}}')
'''


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return path


# What a stress does


class Sampler:
    """An engine that counts."""

    def __init__(self):
        self.lm, self.synced, self.temperatures = torch.nn.Module(), [], []
        self.lm.layers = torch.nn.ModuleList([torch.nn.Linear(3, 2)])
        self.lm.named_parameters = lambda: [("model.layers.0.weight", self.lm.layers[0].weight)]

    def sync(self, policy: object) -> None:
        self.synced.append(policy)

    def generate(self, prompts: list, n: int, limit: int, temperature: float) -> str:
        self.temperatures.append(temperature)
        return "rollout"


def test_a_stressed_sampler():
    """A stale one syncs at every 16th step, a quantised one has five values a row, and another
    temperature reaches it without its caller's knowledge."""
    engine = Sampler()
    stresses.stress_sampler(engine, Stress(sync_every=16, levels=2, temperature=0.5))
    weight = engine.lm.layers[0].weight
    scale = weight.detach().abs().amax(dim=1, keepdim=True) / 2
    quantised = (weight.detach() / scale).round() * scale
    for policy in range(40):
        engine.sync(policy)
    assert engine.generate([], 8, 64, 1.0) == "rollout"
    assert engine.synced == [0, 16, 32] and engine.temperatures == [0.5]
    assert engine.policy == 39
    torch.testing.assert_close(weight.detach(), quantised)


def test_the_held_out_problems_stay_the_same():
    """Neither a noisy verifier nor uninformative prompts reach them."""
    _, tokenizer = load_model("tiny")
    args = SimpleNamespace(task="arithmetic", seed=1, eval_problems=16, eval_task="")
    vars(args).update(chat=(), max_prompt_tokens=1024, max_new_tokens=64)
    kinds, tasks = dict(KINDS), {}
    for name in ("none", "noisy verifier", "uninformative prompts"):
        names = ("main", "make_engine", "evaluate", "save_checkpoint")
        module = SimpleNamespace(**dict.fromkeys(names), load_task=load_task)
        stresses.put_under(module, STRESSES[name])
        tasks[name] = module.load_task(args, tokenizer)
        assert KINDS == kinds  # other tasks of this process find them as they were
    held = [[problem.prompt for problem in task.held_out] for task in tasks.values()]
    assert held[0] == held[1] == held[2]
    drawn = [tasks["uninformative prompts"].train(i).prompt for i in range(20)]
    terms = [len(prompt) // 2 for prompt in drawn]
    assert terms.count(2) > 10 and 16 in terms
    answers = [problem.answer for problem in tasks["none"].held_out] * 20
    texts = [f"#{answer}" for answer in answers]
    for task in tasks.values():
        assert task.held_out_verifier(texts, answers) == [1.0] * len(texts)
    assert 0 < tasks["noisy verifier"].verifier(texts, answers).count(0.0) < 80


# Run and store


@pytest.mark.slow
def test_a_race_continues_where_it_stopped(fake, monkeypatch):
    """A run that broke is not stored, the others are; the same command runs what is missing. Flags
    that we do not know reach every run, after them the method's own; a stress has the last word on
    the flags it sets."""
    names = ("none", "lr x3", "groups of two")
    monkeypatch.setattr(race, "STRESSES", {name: STRESSES[name] for name in names})
    path, began, broken = (fake.parent / name for name in ("table.json", "began", "broken"))
    words = ["race", str(fake), "--flags=--minibatches 2", "--seeds", "2", "--out", str(path)]
    more = ["--prompts_per_step=32", "--steps", "16", "--minibatches", "8", "--instruction="]
    monkeypatch.setattr("sys.argv", [*words, *more])
    broken.touch()
    with pytest.raises(SystemExit) as left:
        race.main()
    assert left.value.code == 1
    both = ["0.2 2 128 2", "0.2 2 32 8", "0.6 2 32 8"]
    assert sorted(began.read_text().splitlines()) == [f"{s} {b}" for s in (1, 2) for b in both]
    broken.unlink()
    began.unlink()
    race.main()
    assert sorted(began.read_text().splitlines()) == [f"2 {b}" for b in both]
    table = json.loads(path.read_text())
    assert path.with_suffix(".png").exists()
    runs = race.runs_of(table, "fake --minibatches 2", "lr x3")
    assert [run["sampled"] for run in runs] == [[0.5, 0.6], [0.5, 0.6]]
    monkeypatch.setattr("sys.argv", [*words, "--steps", "8"])
    with pytest.raises(SystemExit) as left:  # another race needs a table of its own
        race.main()
    assert left.value.code == 2


def ended(folder: Path, steps: list[int]) -> Path:
    """What a run leaves."""
    rows = [{"step": step, "sampled": 0.5, "tokens": 1000, "x": None} for step in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text('{"acted": {"x": "tokens clipped"}}')
    return folder


def test_what_is_stored_of_a_run(tmp_path):
    run = race.outcome(ended(tmp_path, [0, 8, 40]), 0, "", race.BUDGET)
    assert run["at"] == [0, 8, 40] and run["thousands"] == [1, 2, 3]
    assert run["sampled"] == [0.5] * 3 and run["acted"] == 0.0


@pytest.mark.parametrize("code, steps", [(-9, [0, 40]), (1, [0]), (0, [0, 8])])
def test_an_unfinished_run_is_not_stored(tmp_path, code, steps):
    assert "broke" in race.outcome(ended(tmp_path, steps), code, "why", race.BUDGET)


def test_a_file_of_another_form_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "other.py").write_text("x = 1\n")
    monkeypatch.setattr("sys.argv", ["race", str(tmp_path / "other.py")])
    with pytest.raises(SystemExit) as left:
        race.main()
    assert left.value.code == 2 and "not a file in the form" in capsys.readouterr().err


# Rank


def cells(method: str, seeds: int, value: float, **other: float) -> list[dict]:
    """A row of a table whose runs stay at one accuracy, under some stresses at another."""
    row = []
    for name in STRESSES:
        level = other.get(name.replace(" ", "_"), value)
        runs = [{"seed": seed, "sampled": [0, level, level, level]} for seed in range(seeds)]
        row.append({"method": method, "stress": name, "runs": runs})
    return row


def test_scores_places_and_signs():
    assert race.score({"sampled": [0.5, 0.7, 0.9, 0.9, 0.6, 0.3]}) == pytest.approx(0.6)
    table = {"cells": cells("grpo", 5, 0.7) + cells("a", 5, 0.9, groups_of_two=0.2)}
    table["cells"] += cells("b", 3, 0.8) + cells("c", 3, 1.0)[:1]
    places = {row[0]: row[-1] for row in race.ranking(table, "a")}
    assert places["none"] == "2 of 4" and places["lr x3"] == "1 of 3"
    assert places["groups of two"] == places["worst cell"] == "3 of 3"
    signs = [race.sign(table, *at) for at in (("a", "none"), ("a", "groups of two"), ("b", "none"))]
    assert signs == ["+", "-", "+?"]


def test_standings_are_sorted_and_know_equal_tokens():
    """A file that samples twice as many tokens is looked at half way."""
    table = {"cells": []}
    for method, level, tokens in (("grpo", 0.6, 40), ("dear", 0.8, 80)):
        accuracies = [0.0, level / 4, level / 2, 3 * level / 4, level]
        thousands = [tokens * quarter / 4 for quarter in range(5)]
        runs = [{"seed": 1, "sampled": accuracies, "thousands": thousands, "tokens": tokens}]
        table["cells"].append({"method": method, "stress": "none", "runs": runs})
    head, first, second = race.standings(table, "none")
    assert (first[0], second[0]) == ("dear", "grpo")
    equal = head.index("at grpo's tokens")
    assert (first[equal], second[equal]) == ("0.30", "0.45")


def test_the_shipped_table_is_of_these_stresses():
    table = race.stored(race.TABLE, race.BUDGET)
    assert race.columns(table) == list(STRESSES) == list(table["stresses"])
    for name, settings in table["stresses"].items():
        assert STRESSES[name] == Stress(**settings)
