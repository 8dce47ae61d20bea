"""The race: what a stress does to a run, what is stored of the run, and how runs become places."""

import importlib
import json
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
FAKE = """
import json
from pathlib import Path
from grpo import Args, evaluate, load_task, make_engine

def main(args, world):
    here, folder = Path(__file__).parent, Path(args.run_dir)
    with (here / "began").open("a") as log:
        batch = f"{args.minibatches} {args.prompts_per_step} {args.group_size}"
        log.write(f"{args.seed} {args.lr:.4f} {batch}\\n")
    if (here / "broken").exists() and args.seed == 2:
        raise ZeroDivisionError("on purpose")
    folder.mkdir()
    line = {"step": args.steps, "sampled": 0.5, "tokens": 2000}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
    (folder / "summary.json").write_text("{}")
"""


# What a stress does


def test_a_stressed_sampler():
    """A stale sampler syncs at every 16th step, and a quantised one has five values per row.
    Another temperature reaches the sampler without its caller's knowledge."""
    weight, synced = torch.nn.Parameter(torch.randn(2, 3)), []
    scale = weight.detach().abs().amax(dim=1, keepdim=True) / 2
    quantised = (weight.detach() / scale).round() * scale
    named = [("model.layers.0.weight", weight)]
    engine = SimpleNamespace(lm=SimpleNamespace(named_parameters=lambda: named))
    engine.sync, engine.generate = synced.append, lambda prompts, n, limit, temperature: temperature
    stresses.stress_sampler(engine, Stress(sync_every=16, levels=2, temperature=0.5))
    for policy in range(40):
        engine.sync(policy)
    assert engine.generate([], 8, 64, 1.0) == 0.5
    assert synced == [0, 16, 32] and engine.policy == 39
    torch.testing.assert_close(weight.detach(), quantised)


def test_the_held_out_problems_stay_the_same():
    """Neither a noisy verifier nor uninformative prompts reach them."""
    _, tokenizer = load_model("tiny")
    args = SimpleNamespace(task="arithmetic", seed=1, eval_problems=16, eval_task="")
    vars(args).update(chat=(), instruction="", max_prompt_tokens=1024, max_new_tokens=64)
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
        assert all(verdict.score == 1 for verdict in task.exact_verifier(texts, answers))
    noisy = tasks["noisy verifier"].verifier(texts, answers)
    assert 0 < [verdict.score for verdict in noisy].count(0.0) < 80


# Run and store


@pytest.mark.slow
def test_a_race_continues_where_it_stopped(tmp_path, monkeypatch):
    """A run that broke is not stored, the others are, and the same command runs what is missing.
    Unknown flags reach every run, and the method's own flags come after them. A stress has the last
    word on the flags it sets."""
    names = ("none", "lr x3", "groups of two")
    monkeypatch.setattr(race, "STRESSES", {name: STRESSES[name] for name in names})
    path, began, broken = (tmp_path / name for name in ("table.json", "began", "broken"))
    (tmp_path / "fake.py").write_text(FAKE)
    words = ["race", f"{tmp_path}/fake.py", "--flags=--minibatches 2", "--seeds=2", f"--out={path}"]
    more = ["--prompts_per_step=32", "--steps", "16", "--minibatches", "8", "--instruction="]
    monkeypatch.setattr("sys.argv", [*words, *more])
    broken.touch()
    with pytest.raises(SystemExit) as left:
        race.main()
    assert left.value.code == 1
    both = ["0.0003 2 128 2", "0.0003 2 32 8", "0.0009 2 32 8"]
    assert sorted(began.read_text().splitlines()) == [f"{s} {b}" for s in (1, 2) for b in both]
    broken.unlink()
    began.unlink()
    race.main()
    assert sorted(began.read_text().splitlines()) == [f"2 {b}" for b in both]
    runs = race.read(path)["fake --minibatches 2", "lr x3"]
    assert [run["sampled"] for run in runs] == [[0.5], [0.5]]
    monkeypatch.setattr("sys.argv", [*words, "--steps", "8"])
    with pytest.raises(SystemExit) as left:  # another race needs a table of its own
        race.main()
    assert left.value.code == 2


def test_what_is_stored_of_a_run():
    lines = [{"step": step, "tokens": 1000, "entropy": None} for step in range(5)]
    for step in (0, 4):
        lines[step] |= {"sampled": 0.5, "entropy": 1.0}
    run = race.kept(lines)
    assert run["at"] == [0, 4] and run["sampled"] == [0.5, 0.5] and run["thousands"] == [1, 5]
    assert run["late"]["entropy"] == 0.4


# Rank


def row(method: str, seeds: int, accuracy: float) -> dict:
    """Return a row of a table, with runs that stay at one accuracy."""
    runs = [{"seed": seed, "sampled": [0] + 3 * [accuracy]} for seed in range(seeds)]
    return {(method, stress): runs for stress in STRESSES}


def test_scores_places_and_signs():
    assert race.score({"sampled": [0.5, 0.7, 0.9, 0.9, 0.6, 0.3]}) == pytest.approx(0.6)
    table = row("grpo", 5, 0.7) | row("a", 5, 0.9) | row("b", 3, 0.8)
    table["a", "groups of two"] = row("a", 5, 0.2)["a", "none"]
    table["c", "none"] = row("c", 3, 1.0)["c", "none"]
    places = {line[0]: line[-1] for line in race.ranking(table, "a")}
    assert places["none"] == "2 of 4" and places["lr x3"] == "1 of 3"
    assert places["groups of two"] == places["worst cell"] == "3 of 3"
    signs = [race.sign(table, *at) for at in (("a", "none"), ("a", "groups of two"), ("b", "none"))]
    assert signs == ["+", "-", "+?"]


def test_standings_are_sorted_and_know_equal_tokens():
    """A file that samples twice as many tokens is also compared half way."""
    table = {}
    for method, level, tokens in (("grpo", 0.6, 40), ("dear", 0.8, 80)):
        accuracies = [0.0, level / 4, level / 2, 3 * level / 4, level]
        thousands = [tokens * quarter / 4 for quarter in range(5)]
        table[method, "none"] = [{"sampled": accuracies, "thousands": thousands}]
    head, *rows = race.standings(table, "none")
    equal = head.index("at grpo's tokens")
    assert [(row[0], row[equal]) for row in rows] == [("dear", "0.30"), ("grpo", "0.45")]


def test_the_shipped_table_is_of_these_stresses():
    table = json.loads(race.TABLE.read_text("utf-8"))
    assert table["budget"] == race.BUDGET
    assert race.columns(race.read(race.TABLE)) == list(STRESSES) == list(table["stresses"])
    for name, settings in table["stresses"].items():
        assert STRESSES[name] == Stress(**settings)
