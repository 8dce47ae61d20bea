"""The race: what a stress does to a run, what is kept of it, and how runs become places."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common.distributed import BadInput
from common.tiny.arithmetic import KINDS
from labs import race, stress
from labs.stress import STRESSES, Stress

from tests.helpers import ROOT

# A file in the house's form, whose training is to write down what it was given
FAKE = '''
"""Trunk: grpo.py"""
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
    if (here / "odd").exists():
        exec((here / "odd").read_text())
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


def began(fake: Path) -> list[str]:
    return (fake.parent / "began").read_text().splitlines()


def made(**scores: dict[str, list[float]]) -> dict:
    """A table of runs that stay where they are: method -> stress -> a score for each seed."""
    cells = [
        {
            "method": method,
            "stress": name,
            "runs": [
                {"seed": seed, "acted": 0.1}
                | {"at": [0, 8, 16], "sampled": [value] * 3, "thousands": [0, 1, 2]}
                for seed, value in enumerate(values, 1)
            ],
        }
        for method, row in scores.items()
        for name, values in row.items()
    ]
    return {"cells": cells}


def everywhere(value: float, seeds: int = 3, **other: float) -> dict[str, list[float]]:
    row = {name: [value] * seeds for name in STRESSES}
    return row | {name: [low] * seeds for name, low in other.items()}


# The definitions


def test_the_ten_stresses_are_these():
    """Strengths stay: a row that somebody ran last year is compared with one of today."""
    assert {name: one.strength() for name, one in STRESSES.items()} == {
        "none": {},
        "lr x3": {"lr": 3.0},
        "16 updates": {"flags": "--minibatches 16"},
        "old sampler": {"every": 16},
        "coarse sampler": {"levels": 2},
        "cold sampler": {"cold": 0.5},
        "wrong judge": {"wrong": 0.1},
        "useless prompts": {"useless": True},
        "pairs": {"flags": "--prompts_per_step 64 --group_size 2"},
        "four at half": {"lr": 2.0, "every": 8, "cold": 0.75, "wrong": 0.05},
    }


def test_every_stress_has_the_same_rows():
    for one in STRESSES.values():
        words = f"{stress.BUDGET} {one.flags}".split()
        given = dict(zip(words[::2], words[1::2]))  # the last of a flag counts
        assert int(given["--prompts_per_step"]) * int(given["--group_size"]) == 128


def test_four_at_half_is_half_of_four():
    """Half of what each adds to nothing: of the factor's distance from 1, of the period, of the
    share."""
    four, none = STRESSES["four at half"], Stress()
    for name, of in (("lr", "lr x3"), ("cold", "cold sampler"), ("wrong", "wrong judge")):
        base, whole = getattr(none, name), getattr(STRESSES[of], name)
        assert getattr(four, name) == pytest.approx(base + (whole - base) / 2)
    assert four.every == STRESSES["old sampler"].every / 2


class Sampler:
    """An engine that counts."""

    def __init__(self):
        self.lm, self.taken, self.asked = torch.nn.Module(), [], []
        self.lm.layers = torch.nn.ModuleList([torch.nn.Linear(3, 2)])
        self.lm.requires_grad_(False)
        self.named = [("model.layers.0.weight", self.lm.layers[0].weight)]
        self.lm.named_parameters = lambda: self.named

    def sync(self, policy: object) -> None:
        self.taken.append(policy)

    def generate(self, prompts: list, n: int, limit: int, temperature: float) -> str:
        self.asked.append(temperature)
        return "rollout"


def test_an_old_sampler_takes_every_16th():
    engine = stress.strained(Sampler(), STRESSES["old sampler"])
    for policy in range(40):
        engine.sync(policy)
        assert engine.policy == policy
    assert engine.taken == [0, 16, 32]


def test_a_cold_sampler_keeps_its_caller_in_the_dark():
    engine = stress.strained(Sampler(), STRESSES["cold sampler"])
    assert engine.generate([], 8, 64, 1.0) == "rollout"
    assert engine.generate([], n=8, limit=64, temperature=0.5) == "rollout"  # as vcpo.py calls it
    assert engine.asked == pytest.approx([0.5, 0.25])


def test_a_coarse_sampler_has_five_values_a_row():
    engine = stress.strained(Sampler(), STRESSES["coarse sampler"])
    weight = engine.lm.layers[0].weight
    before = weight.clone()
    engine.sync("policy")
    scale = before.abs().amax(dim=1, keepdim=True) / 2
    assert torch.equal(weight, (before / scale).round() * scale) and not torch.equal(weight, before)


def test_the_control_changes_nothing():
    engine = stress.strained(Sampler(), STRESSES["none"])
    before = engine.lm.layers[0].weight.clone()
    for policy in range(3):
        engine.sync(policy)
    engine.generate([], 8, 64, 0.9)
    assert engine.taken == [0, 1, 2] and engine.asked == [0.9]
    assert torch.equal(before, engine.lm.layers[0].weight)


def test_a_judge_errs_by_rule():
    """A tenth, another tenth each time, the same for the same seed; part marks are turned."""
    right = lambda texts, answers: [1.0] * len(texts)  # noqa: E731
    one, again, other = (stress.erring(right, 0.1, seed) for seed in (1, 1, 2))
    texts = ["x"] * 2000
    first = one(texts, texts)
    assert 140 < first.count(0.0) < 260
    assert again(texts, texts) == first != one(texts, texts)
    assert other(texts, texts) != first
    marks = stress.erring(lambda *_: [0.25, 0.0, 0.5], 1.0, 1)
    assert marks("xyz", "xyz") == [0.25, 0.5, 0.0]
    assert stress.erring(lambda *_: [0.0], 1.0, 1)(["x"], ["x"]) == [1.0]


def module_with(**what: object) -> SimpleNamespace:
    names = dict.fromkeys(stress.FORM) | {"main": lambda args, world: what.update(lr=args.lr)}
    return SimpleNamespace(**names | what)


def test_the_exam_stays_strict_and_the_same():
    """Neither an erring judge nor useless prompts reach the held-out problems."""
    from common.data import load_task
    from common.plumbing.model import load_model

    _, tokenizer = load_model("tiny")
    given = {
        "task": "arithmetic",
        "seed": 1,
        "eval_problems": 16,
        "eval_task": "",
        "reward": "",
        "chat": (),
    }
    args = SimpleNamespace(**given, max_prompt_tokens=1024, max_new_tokens=64)
    tasks = {}
    for name in ("none", "wrong judge", "useless prompts"):
        module, kinds = module_with(load_task=load_task), dict(KINDS)
        stress.put_under(module, STRESSES[name])
        tasks[name] = module.load_task(args, tokenizer)
        assert KINDS == kinds  # the next run of this process finds them as they were
    held = [[p.prompt for p in task.held_out] for task in tasks.values()]
    assert held[0] == held[1] == held[2]
    answers = [p.answer for p in tasks["none"].held_out] * 20
    texts = [f"#{answer}" for answer in answers]
    for task in tasks.values():
        assert task.exam(texts, answers) == [1.0] * len(texts)
    assert 0 < tasks["wrong judge"].judge(texts, answers).count(0.0) < 80
    terms = [len(re.findall(r"\d", tasks["useless prompts"].train(i).prompt)) for i in range(200)]
    assert {2, 16} < set(terms) <= {2, 5, 6, 7, 16} and terms.count(2) > 100


def test_the_step_size_is_the_files_own_times_three():
    found = {}
    module = module_with(main=lambda args, world: found.update(lr=args.lr))
    stress.put_under(module, STRESSES["lr x3"])
    given = {"model": "tiny", "task": "arithmetic", "max_new_tokens": 64, "reward": ""}
    module.main(SimpleNamespace(lr=2e-4, **given), None)
    assert found["lr"] == pytest.approx(6e-4)
    with pytest.raises(BadInput, match="--max_new_tokens 128: the same for all who race"):
        module.main(SimpleNamespace(lr=2e-4, **given | {"max_new_tokens": 128}), None)


def test_a_file_of_another_form_is_refused(tmp_path):
    (tmp_path / "other.py").write_text("Args = main = None\n")
    with pytest.raises(
        BadInput, match="no file in the form of grpo.py: it has no ACTED, load_task"
    ):
        stress.loaded(tmp_path / "other.py")


# What is kept


def test_a_race_goes_on_where_it_was_stopped(fake):
    """A run that broke is none, the others are kept; the same command runs what is missing."""
    jobs = [(seed, "fake", name) for seed in (1, 2) for name in ("none", "lr x3")]
    rows, path = {"fake": race.Method(fake)}, fake.parent / "table.json"
    (fake.parent / "broken").touch()
    assert race.run(jobs, rows, path) == 2
    table = race.stored(path)
    assert [run["seed"] for run in race.runs_of(table, "fake", "none")] == [1]
    assert [run["sampled"] for run in race.runs_of(table, "fake", "lr x3")] == [[0.5, 0.6]]
    (fake.parent / "broken").unlink()
    (fake.parent / "began").unlink()
    assert race.run(jobs, rows, path) == 0
    assert sorted(began(fake)) == ["2 0.2 4 8", "2 0.6 4 8"]
    table = race.stored(path)
    assert [run["seed"] for run in race.runs_of(table, "fake", "none")] == [1, 2]
    assert table["date"] and table["versions"]["torch"] == torch.__version__
    assert race.run(jobs, rows, path) == 0 and len(began(fake)) == 2  # nothing is left to do


ORPHAN = """
import os, signal
if os.fork() == 0:
    os.setsid(), (here / "orphan").write_text(str(os.getpid()))
    signal.pause()
while not (here / "orphan").exists(): pass
"""
NOTHING = "Path(args.run_dir).mkdir(); (Path(args.run_dir) / 'metrics.jsonl').write_text("
ODD = {
    "endless": ("import signal; signal.pause()", "killed, it was still at work after"),
    "an orphan": (ORPHAN, "0.350"),
    "no scores": (NOTHING + """'{"step": 40}\\n'); os._exit(0)""", "logged no `sampled`"),
    "a text": (NOTHING + """'{"step": 40, "sampled": "1"}\\n'); os._exit(0)""", "be scored"),
}


@pytest.mark.parametrize("case", ODD)
def test_a_run_has_a_bound(case, fake, monkeypatch, capsys):
    """One that does not end is killed; what it leaves alive holds up no cell, and not the folder;
    one without scores is refused before its row is kept."""
    code, words = ODD[case]
    (fake.parent / "odd").write_text(f"import os\n{code}")
    monkeypatch.setattr(race, "LONGEST", 1.0 if case == "endless" else 60.0)
    rows, path = {"fake": race.Method(fake)}, fake.parent / "table.json"
    jobs = [(1, "fake", "none")]
    broken = race.run(jobs, rows, path)
    race.run([], rows, path)  # the lock is free
    if case == "an orphan":
        os.kill(int((fake.parent / "orphan").read_text()), signal.SIGKILL)
    said = capsys.readouterr().out
    assert words in said and said.count("\n") == 1
    assert broken == int(case != "an orphan") != len(race.stored(path)["cells"])


def test_a_file_that_ends_its_process_is_refused(fake, monkeypatch, capsys):
    fake.write_text("import os; os._exit(0)")
    assert enter(monkeypatch, fake) == 2
    assert "ends the process that loads it" in capsys.readouterr().err


def test_a_stress_has_the_last_word_and_the_budget_the_one_before(fake):
    flags = "--minibatches 2 --group_size 4"
    jobs = [(1, "mine", name) for name in ("none", "16 updates", "pairs")]
    race.run(jobs, {"mine": race.Method(fake, flags)}, fake.parent / "table.json", workers=1)
    assert began(fake) == ["1 0.2 2 8", "1 0.2 16 8", "1 0.2 2 2"]


def test_a_killed_write_leaves_the_table_whole(fake, monkeypatch):
    path, rows = fake.parent / "table.json", {"fake": race.Method(fake)}
    race.run([(1, "fake", "none")], rows, path)
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        race.run([(2, "fake", "none")], rows, path)
    assert path.read_bytes() == before and not list(fake.parent.glob("*.partial"))


def test_two_races_do_not_share_a_table(fake, tmp_path):
    import fcntl

    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(BadInput, match="another race writes there"):
        race.run([], {}, tmp_path / "table.json")
    os.close(other)


@pytest.mark.parametrize("text, why", [("[1", "damaged"), ("{}", "damaged"), (None, "another")])
def test_a_table_of_something_else_is_not_touched(tmp_path, text, why):
    path = tmp_path / "table.json"
    other = race.stored(tmp_path / "none.json") | {"budget": "--steps 4"}
    path.write_text(text or json.dumps(other))
    with pytest.raises(BadInput, match=why):
        race.stored(path)


def ended(folder: Path, steps: list[int], said: str = "") -> Path:
    (folder / "run").mkdir()
    rows = [{"step": s, "sampled": 0.5, "tokens": 1000, "x": None if s else 0.0} for s in steps]
    (folder / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "said").write_text(said)
    return folder


def test_a_run_that_stopped_itself_is_a_result(tmp_path):
    found = stress.outcome(ended(tmp_path, [0, 8], "bar\ngrpo.py: error: NaN"), 1, "x")
    assert found["stopped"] == "NaN" and found["at"] == [0, 8] and found["acted"] == 0.0
    assert found["late"] == dict.fromkeys(stress.DIARY, 0.0)
    assert race.score(found)["end"] == 0.0  # two of six measurements: the last three are lost


def test_a_file_may_refuse_a_stress(tmp_path):
    (tmp_path / "said").write_text("mine.py: error: --group_size 2: too small")
    assert stress.outcome(tmp_path, 2, "x") == {"refused": "--group_size 2: too small"}


BROKEN = [(-9, [0, 40], ""), (1, [0], "ValueError: x"), (1, [0], "x: error: cannot write y")]
BROKEN += [(2, [0], "x: error: the disk is full")]


@pytest.mark.parametrize("code, steps, said", BROKEN)
def test_a_run_that_somebody_ended_is_none(tmp_path, code, steps, said):
    with pytest.raises(BadInput, match="exit code"):
        stress.outcome(ended(tmp_path, steps, said), code, "x")


def test_a_run_that_ended_early_is_none(tmp_path):
    with pytest.raises(BadInput, match="exit code 0"):
        stress.outcome(ended(tmp_path, [0, 8, 16]), 0, "x")


def test_the_diary_is_of_the_last_steps():
    lines = [{"step": 0}] + [{"step": s, "entropy": 1.0 if s > 2 else 9.0} for s in range(1, 19)]
    assert stress.mean(lines[-stress.LATE :], "entropy") == 1.0
    assert stress.mean([{"x": None}, {"x": 1.0}, {}], "x") == 0.5 and stress.mean([], "x") == 0.0


# Scores and places


def test_the_score():
    run = {"sampled": [0.5, 0.7, 0.9, 0.9, 0.6, 0.3], "thousands": [0, 10, 20, 30, 40, 50]}
    found = race.score(run)
    assert found["end"] == pytest.approx(0.6) and found["fall"] == pytest.approx(2.5 / 3 - 0.6)
    assert found["reached"] == pytest.approx(15)
    rising = race.score(run | {"sampled": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]})
    assert rising["fall"] == 0 and rising["reached"] == float("inf")
    assert race.score(run | {"sampled": [0.8] * 6})["reached"] == 0


def test_places_go_by_the_worst_cell():
    table = made(
        a=everywhere(0.9, pairs=0.2),
        b=everywhere(0.6, pairs=0.5),
        c={"none": [0.99]},  # has not run everywhere: no place
    )
    assert race.worst(table, "a") == (0.2, "pairs") and race.worst(table, "c") is None
    mine = made(mine=everywhere(0.4))
    assert race.place(mine, "mine", dict.fromkeys("abc", table)) == "place 2 of 3"
    assert "cells are missing" in race.place(made(mine={}), "mine", {"a": table})


def test_the_worst_cell_is_a_median_over_seeds():
    row = everywhere(0.8) | {"pairs": [0.1, 0.7, 0.9]}
    assert race.worst(made(a=row), "a") == (0.7, "pairs")


def test_within_the_spread_is_no_difference():
    pairs = {"grpo": [0.5, 0.6, 0.7], "up": [0.71, 0.8, 0.9], "same": [0.7, 0.8, 0.9]}
    pairs |= {"down": [0.1, 0.2, 0.49], "few": [0.9, 0.9]}
    table = made(**{method: {"pairs": values} for method, values in pairs.items()})
    found = {method: race.parted(table, method, "pairs") for method in pairs}
    assert found == {"grpo": "", "up": "+?", "same": "", "down": "-?", "few": ""}
    five = {method: {"pairs": values + [values[0]] * 2} for method, values in pairs.items()}
    found = {method: race.parted(made(**five), method, "pairs") for method in pairs}
    assert found == {"grpo": "", "up": "+", "same": "", "down": "-", "few": "+?"}


def test_what_parts_gets_two_more_seeds():
    """The bases everywhere, and every cell that parts from the trunk, with its control."""
    half = {"none": [0.5] * 3, "lr x3": [0.5] * 3, "pairs": [0.5] * 3}
    table = made(grpo=half, gspo=half | {"pairs": [0.6, 0.7, 0.6, 0.4]}, minirl=half)
    table["cells"] += made(sapo=half | {"none": [0.6] * 3, "lr x3": [0.4] * 3})["cells"]
    jobs = race.every(["grpo", "gspo", "minirl", "sapo"], 5, table)
    assert {job[0] for job in jobs} == {1, 2, 3, 4, 5}
    apart = {("gspo", "pairs"), ("gspo", "none"), ("sapo", "none"), ("sapo", "lr x3")}
    assert {job[1:] for job in jobs if job[1] != "grpo"} == apart
    assert {job[2] for job in jobs if job[1] == "grpo"} == set(STRESSES)
    assert len(race.every(["gspo"], 3)) == 3 * len(STRESSES)


def test_every_row_has_one_layer():
    rows = [row for names in race.LAYERS.values() for row in names]
    assert len(rows) == len(set(rows)) == len(race.methods())
    assert race.half("root") + race.half("variants") == list(race.methods())


def test_a_method_that_never_acted_is_marked():
    table = made(grpo={"none": [0.5]})
    assert race.cell(table, "grpo", "none", race.WORDS["en"]) == "0.50 n=1"
    table["cells"][0]["runs"][0]["acted"] = 0.0
    assert race.cell(table, "grpo", "none", race.WORDS["en"]).endswith(" ○")
    assert race.cell(table, "grpo", "pairs", race.WORDS["en"]) == "not yet"


def test_no_place_is_won_by_staying_away():
    table = made(a=everywhere(0.6, pairs=0.1))
    runs = race.runs_of(table, "a", "pairs")
    runs[:] = [{"seed": 1, "refused": "too small"}]
    assert race.worst(table, "a") == (0.0, "pairs") and not race.idle(table, "a", "pairs")
    assert race.cell(table, "a", "pairs", race.WORDS["en"]) == "refuses"


# The rows, the pages, the command


def test_rows_are_all_files_and_the_cheap_repairs():
    names = list(race.methods())
    assert names[: 1 + len(race.REPAIRS)] == ["grpo", *race.REPAIRS]
    files = {p.stem for folder in (ROOT, ROOT / "variants") for p in folder.glob("[a-z]*.py")}
    assert set(names) - set(race.REPAIRS) == files


@pytest.mark.parametrize("language", race.PAGES)
def test_the_pages_are_the_tables(language):
    page = race.PAGES[language].read_text("utf-8")
    assert race.filled(page, race.stored(race.TABLE), race.WORDS[language]) == page
    assert all(f"`{name}`" in page for name in STRESSES)


def test_the_page_says_what_the_code_does():
    page = race.PAGES["en"].read_text("utf-8")
    for name, one in STRESSES.items():
        assert f"| `{name}` | {one.words} |" in page


def test_a_sentence_hangs_on_five_seeds():
    """Every cell that the text quotes, and no name that is none."""
    table, page = race.stored(race.TABLE), race.PAGES["en"].read_text("utf-8")
    said = page[page.index("## What it says") : page.index("## What it cannot say")]
    quoted = set(re.findall(r"<!--([^/][^>]*?/[^>]+?)-->", said))
    assert len(quoted) > 80
    short = []
    for mark in quoted:
        row, name, *_ = next(  # a row's own name has a slash, too: grpo, lr/3
            (mark.split(f"/{name}")[0], name) for name in [*STRESSES, "worst"] if f"/{name}" in mark
        )
        if row in race.methods() and name in STRESSES:
            short += [mark] * (len(race.runs_of(table, row, name)) < race.DECIDED)
        elif row in race.ARMS:
            short += [mark] * (len(race.runs_of(table, row, name, "arms")) < race.DECIDED)
        else:
            assert row == "rank" or name == "worst", mark
    assert not short


def test_quotes_follow_the_table():
    table = made(grpo={"pairs": [0.25]})
    page = "It ends at 0.99<!--grpo/pairs-->, one of 7<!--cells/all--> cells.\n"
    many = len(race.methods()) * len(STRESSES)
    filled = race.filled(page, table, race.WORDS["en"])
    assert filled == f"It ends at 0.25<!--grpo/pairs-->, one of {many}<!--cells/all--> cells.\n"
    chinese = "结束于0.1<!--grpo/pairs-->。"  # no space before the number: the words stay
    assert race.filled(chinese, table, race.WORDS["zh"]) == "结束于0.25<!--grpo/pairs-->。"


def test_dear_rows_are_compared_at_equal_tokens():
    """sapo takes three times the tokens: at grpo.py's it is where it was at a third of its run."""
    table = made(grpo={"none": [0.5] * 5}, sapo={"none": [0.9] * 5}, gspo={"none": [0.9] * 5})
    for one in table["cells"]:
        times = 3 if one["method"] == "sapo" else 1
        for run in one["runs"]:
            run |= {"at": [0, 1, 2, 3], "tokens": 3.0 * times}
            run["thousands"] = [count * times for count in range(4)]
            if one["method"] == "sapo":
                run["sampled"] = [0.3, 0.6, 0.9, 0.9]
            else:
                run["sampled"] += [run["sampled"][0]]
    assert race.equal(table, "grpo", "none") == race.ends(table, "grpo", "none") == [0.5] * 5
    # 1, 2 and 3 thousand tokens: a third, two thirds and the whole of the way to 0.6
    assert race.equal(table, "sapo", "none") == pytest.approx([0.5] * 5)
    assert race.equal_lines(table) == [["`sapo`", "0.50", *["–"] * 9]]
    assert race.parted(table, "sapo", "none") == "+"


def test_a_rank_correlation_is_quoted():
    """Four rows, the further the sampler the lower the score: -1; with two exchanged -0.8."""
    rows = ["grpo", "sapo", "gspo", "minirl"]
    table = made(**{row: {"pairs": [1.0 - i / 10] * 3} for i, row in enumerate(rows)})
    for i, one in enumerate(table["cells"]):
        for run in one["runs"]:
            run["late"] = {"sampler_gap": 10.0**i}
    page = "0<!--rank/pairs/sampler_gap-->"
    assert race.filled(page, table, race.WORDS["en"]) == "-1.00<!--rank/pairs/sampler_gap-->"
    for run in table["cells"][0]["runs"]:
        run["late"] = {"sampler_gap": 50.0}
    assert race.filled(page, table, race.WORDS["en"]) == "-0.80<!--rank/pairs/sampler_gap-->"


def test_what_lies_apart_is_told_layer_by_layer():
    """sapo is above grpo.py without a stress, and falls further under one; gspo is above all."""
    grpo, low = {"none": [0.5] * 5, "pairs": [0.4] * 5}, {"none": [0.3] * 5, "pairs": [0.2] * 5}
    sapo, gspo = {"none": [0.6] * 5, "pairs": [0.41] * 5}, {"none": [0.5] * 5, "pairs": [0.45] * 4}
    others = {"grpo, lr/3": {"none": [0.7] * 5, "pairs": [0.42] * 5}, "grpo, no KL": low}
    told = race.parted_lines(made(grpo=grpo, gspo=gspo, sapo=sapo, **others))
    rows = {row[1]: [row[0], *row[2:]] for row in told}
    assert list(rows) == ["`grpo, lr/3`", "`grpo, no KL`", "`sapo`", "`gspo`"]  # by layers
    assert rows["`sapo`"] == ["tokens", "`none`, `pairs`", "–", "–", "`pairs`"]
    assert rows["`gspo`"] == ["sequences", "**`pairs`**?", "**`pairs`**?", "–", "–"]
    assert rows["`grpo, no KL`"][3] == "**`none`**, **`pairs`**"


def test_a_reason_is_quoted_from_the_runs_last_steps():
    table = made(grpo={"pairs": [0.25]})
    table["cells"][0]["runs"][0]["late"] = {"entropy": 0.0123}
    page = "It was sure, 9<!--grpo/pairs/entropy-->.\n<!--late-->\n| a | b |\n<!--/late-->\n"
    filled = race.filled(page, table, race.WORDS["en"])
    assert "0.012<!--grpo/pairs/entropy-->" in filled and "| `pairs` | 0.012 |" in filled


def test_the_picture_shows_what_is_not_there():
    """Hatched, and in no shade of the scale; numbers in words, too."""
    figure = race.draw(made(grpo={"none": [0.83]}), names=["grpo", "gspo"])
    (axis,) = figure.axes
    hatched = [patch for patch in axis.patches if patch.get_hatch()]
    assert [text.get_text() for text in axis.texts] == ["0.83", "trunk", "sequences"]
    assert len(hatched) == 2 * (len(STRESSES) + 1) - 1


def enter(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["race", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        race.main()
    return left.value.code


def test_a_smoke_test_says_that_it_shows_nothing(fake, monkeypatch, capsys):
    out = fake.parent / "out"
    monkeypatch.setattr(race, "STRESSES", {name: STRESSES[name] for name in ("none", "lr x3")})
    monkeypatch.setattr(race, "TABLE", out / "no.json")
    assert enter(monkeypatch, fake, "--smoke", "--out", out) == 0
    said = capsys.readouterr().out
    assert race.SMOKE in said and "place" not in said
    assert "under none: clip_share was 0 in all runs" in said
    assert "code lines differ from grpo.py" in said
    assert [path.name for path in out.iterdir()][0].endswith(".smoke.json")


def test_a_race_ends_with_a_place(fake, monkeypatch, capsys):
    monkeypatch.setattr(race, "STRESSES", {"none": STRESSES["none"]})
    table = made(grpo=everywhere(0.1))
    shipped = fake.parent / "shipped.json"
    shipped.write_text(json.dumps(race.stored(fake.parent / "no.json") | table))
    monkeypatch.setattr(race, "TABLE", shipped)
    assert enter(monkeypatch, fake, "--seeds", 1, "--out", fake.parent / "out") == 0
    said = capsys.readouterr().out
    assert "worst cell: 0.35, under none" in said and "place 1 of 2" in said
    assert "lowest of 1 runs: 0.35, not all hold" in said


def test_a_row_of_refusals_is_an_error_in_a_line(fake, monkeypatch, capsys):
    monkeypatch.setattr(race, "STRESSES", {"none": STRESSES["none"]})
    out = fake.parent / "out"
    monkeypatch.setattr(race, "TABLE", out / "no.json")
    assert enter(monkeypatch, fake, "--flags=--max_new_tokens 9", "--seeds", 1, "--out", out) == 2
    assert "error: --max_new_tokens 9: the same for all who race" in capsys.readouterr().err
    assert not list(out.iterdir())


def test_a_record_has_seeds_of_its_own(fake, monkeypatch, capsys):
    """Nobody has tuned on them, and the holder's file is run on them as well."""
    monkeypatch.setattr(race, "STRESSES", {"none": STRESSES["none"]})
    out, shipped = fake.parent / "out", fake.parent / "shipped.json"
    shipped.write_text(json.dumps(race.stored(out) | made(gspo=everywhere(0.3))))
    monkeypatch.setattr(race, "TABLE", shipped)
    assert enter(monkeypatch, fake, "--record", "--out", out) == 0
    said = capsys.readouterr().out
    assert "place 1 of 2" in said and "decided against gspo" in said
    assert {int(line.split()[0]) for line in began(fake)} == set(range(201, 211))
    assert [path.name for path in out.iterdir()][0].endswith(".record.json")


@pytest.mark.parametrize("words", [[], ["grpo.py", "--matrix"], ["grpo.py", "--seeds", "0"]])
def test_what_cannot_be_raced_is_said_in_a_line(words, monkeypatch, capsys):
    assert enter(monkeypatch, *words) == 2
    assert capsys.readouterr().err.count("\n") == 1
