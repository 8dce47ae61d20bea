"""The labs: each runs, in the direction that its page says; the pages' numbers are the tables'."""

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from common.plumbing.flags import broken_rule
from common.plumbing.launch import parse
from labs import bug, lab

from tests import checks
from tests.adapters import PATHS
from tests.helpers import ROOT, module_of
from tests.test_docs import refused

NAMES = sorted(path.stem for path in (ROOT / "labs").glob("[a-z]*.md") if path.stem != "course")
LABS = {p.stem: p.read_text() for p in sorted((ROOT / "labs").glob("*.py")) if p.stem != "lab"}
LABS = {name: text for name, text in LABS.items() if "lab.main(" in text}
RUNS = [name for name, text in LABS.items() if "\nCOLUMNS = " in text]  # of whole training runs
TOYS = [name for name in LABS if name not in RUNS]


def load(name: str) -> ModuleType:
    return importlib.import_module(f"labs.{name}")


def results(name: str, folder: Path = ROOT / "labs") -> dict:
    """The runs of a table."""
    return json.loads((folder / "tables" / f"{name}.json").read_text())["results"]


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: object) -> dict:
    """`python -m labs.NAME` in this process -> what its table holds."""
    monkeypatch.setattr(sys, "argv", ["lab", "--out", str(folder), *map(str, flags)])
    monkeypatch.delitem(sys.modules, f"labs.{name}", raising=False)
    runpy.run_module(f"labs.{name}", run_name="__main__", alter_sys=True)
    return results(name, folder)


def middle(runs: list[dict], name: str) -> float:
    return float(lab.over(runs, name)[0])


def direction_of_fork(found: dict) -> None:
    need = {arm: middle(runs, "rollouts") for arm, runs in found.items()}
    assert max(need["MASPO"], need["SAPO"]) < 0.8 * need["clip-higher"] < need["GRPO"]


def direction_of_flips(found: dict) -> None:
    end = {
        arm: middle([{"e": run["entropy"][-1]} for run in runs], "e") for arm, runs in found.items()
    }
    assert end["GRPO, flips"] < end["SAPO, flips"] - 0.1 and end["GRPO, clean"] > end["GRPO, flips"]


def direction_of_junk(found: dict) -> None:
    assert middle(found["junk, STAPO"], "end") < 0.9 * middle(found["junk, GRPO"], "end")
    for name in ("junk", "fork"):  # what is sure is not trained
        assert len({value for run in found[f"{name}, top 20%"] for value in run["p"]}) == 1
    assert found["fork, Lp-Reg"] == found["fork, GRPO"]


def direction_of_lock(found: dict) -> None:
    """In ten steps nothing is found; only what they cost shows."""
    cost = {arm: middle(runs, "per step") for arm, runs in found.items()}
    assert 2 < cost["0.001, DEEP-GRPO"] / cost["0.001, no branches"] < 5


def direction_of_signs(found: dict) -> None:
    assert middle(found["easy, wrong only"], "left") > 3.99 > middle(found["easy, both"], "left")
    assert middle(found["easy, both"], "end") > middle(found["easy, wrong only"], "end")


def direction_of_length(found: dict) -> None:
    grpo, priced, *others = found.values()
    assert middle(grpo, "wrong end") > middle(priced, "wrong end") + 1
    for other in others:
        assert middle(grpo, "wrong end") > middle(other, "wrong end") + 1
        assert middle(grpo, "right end") < middle(other, "right end") - 1


def direction_of_bound(found: dict) -> None:
    noise = {arm: middle(runs, "noise") for arm, runs in found.items()}
    best = noise["on-policy: best constant"]
    assert noise["on-policy: best for each prefix"] < best < noise["on-policy: GRPO"]
    for runs in (found["on-policy: VCPO, no baseline"], found["stale: VCPO, no baseline"]):
        assert middle(runs, "angle") < 5
    plain, bare = (
        found["on-policy: GRPO, no baseline"],
        found[f"on-policy: {load('bound').BOUNDS[0]}"],
    )
    for one, other in zip(plain, bare):  # two ways to the same number
        assert abs(one["noise"] / other["noise"] - 1) < 2e-3 and one["angle"] < 0.01


def direction_of_precision(found: dict) -> None:
    moved = {arm: middle(runs, "moved") for arm, runs in found.items()}
    share = {arm: middle(runs, "changed") for arm, runs in found.items()}
    assert share["bfloat16, 1e-6"] < 0.01 < 0.98 < share["float32, 1e-6"]
    assert moved["bfloat16, 1e-6"] < 0.1 * moved["float32, 1e-6"]
    assert abs(moved["float32 master, 1e-6"] / moved["float32, 1e-6"] - 1) < 0.1
    assert abs(moved["bfloat16, 1e-3"] / moved["float32, 1e-3"] - 1) < 0.3


@pytest.mark.parametrize("name", TOYS)
def test_a_quick_run_goes_the_way_of_its_page(name, tmp_path, monkeypatch, capsys):
    found = run(name, tmp_path, monkeypatch, "--quick", "--seeds", 2)
    assert list(found) == list(load(name).ARMS) and all(len(runs) == 2 for runs in found.values())
    globals()[f"direction_of_{name}"](found)
    assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 10_000
    assert lab.text(load(name).rows(found)) in capsys.readouterr().out


@pytest.mark.parametrize("name", RUNS)
def test_what_a_lab_damages_stands_in_its_file(name):
    """Each of them once: the damaged copy is another file, and still one."""
    module = load(name)
    for arm, damage in getattr(module, "DAMAGE", {}).items():
        source = ROOT / module.ARMS[arm].split()[0]
        found = checks.replaced(source, *damage)
        assert found != source.read_text() and compile(found, source.name, "exec")


def of_a_lab(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The Args of each of a lab's quick command lines, and by whose file it is run."""
    found = {}
    for command in module.ARMS.values():
        words = f"{command} {lab.QUICKLY} {getattr(module, 'QUICKLY', '')}".split()
        module_too = words[0] == "-m"  # `-m variants.dapo`
        algorithm = words[module_too].removesuffix(".py").removeprefix("variants.")
        monkeypatch.setattr(sys, "argv", words[module_too:])
        args = parse(module_of(algorithm).Args)
        assert not broken_rule(args), (command, broken_rule(args))
        found[" ".join(words)] = args, PATHS[algorithm].read_text()
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_lab_of_runs_tells_and_draws_what_its_runs_may_leave(name, tmp_path, monkeypatch, capsys):
    """Without the runs: their flags exist, and numbers such as theirs become a table and a figure.

    A column that a file does not write is empty, as `trained` leaves it.
    """
    module = load(name)
    known, random = of_a_lab(module, monkeypatch), np.random.default_rng(0)
    common = "".join(path.read_text() for path in (ROOT / "common").rglob("*.py"))
    written = set()

    def trained(command: str, seed: int, columns: tuple, damage: tuple | None) -> dict:
        args, source = known[" ".join(command.split())]
        found = {}
        for column in columns:
            measured = column in ("greedy", "sampled")
            steps = np.arange(0, args.steps + 1, args.eval_every) if measured else None
            steps = steps if measured else np.arange(1, args.steps + 1)
            has = re.search(rf"\b{column}\b", source + common)
            written.update([column] if has else [])
            found[f"{column}@"] = steps[: None if has else 0]
            found[column] = random.uniform(0.2, 0.8, len(found[f"{column}@"]))
        return found

    monkeypatch.setattr(lab, "trained", trained)
    found = run(name, tmp_path, monkeypatch, "--quick", "--seeds", 2)
    assert list(found) == list(module.ARMS) and all(len(runs) == 2 for runs in found.values())
    assert written == set(module.COLUMNS)
    head, *rows = module.rows(found)
    assert len(rows) >= 2 and all(len(row) == len(head) for row in rows)
    assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 10_000
    assert lab.text(module.rows(found)) in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_numbers_of_its_table(name):
    """The table's cells, and every number of what came out; arms that are no more are no result."""
    page = (ROOT / "labs" / f"{name}.md").read_text()
    assert lab.filled(page, load(name).rows(results(name))) == page
    told = page.split("## What came out")[1].split("## Why")[0]
    told = re.sub(r"<!--table-->.*?<!--/table-->|!\[.*?\)", "", told, flags=re.DOTALL)
    assert not re.findall(r"\d", re.sub(r"[^\s(]+<!--.+?-->|`.*?`", "", told))
    assert "- [ ]" in page and page.count("<details>") >= 3
    assert f"python -m labs.{name} " in page and (ROOT / "labs/figures" / f"{name}.png").exists()


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_table_is_a_full_run(name):
    table = json.loads((ROOT / "labs/tables" / f"{name}.json").read_text())
    least = getattr(load(name), "SEEDS", lab.SEEDS)
    assert table["seeds"] >= least and not table["quick"]
    assert re.match(r"\d{4}-\d\d-\d\d", table["date"])
    assert table["command"] == f"python -m labs.{name} --seeds {table['seeds']}"
    assert all(len(runs) == table["seeds"] for runs in table["results"].values())
    assert set(table["results"]) <= set(load(name).ARMS)
    if name in RUNS:  # the command lines are those that were run
        assert table["arms"] == load(name).ARMS


def test_redraw_measures_nothing(tmp_path, monkeypatch):
    """The figure comes out of the table alone, and out of the shipped one the shipped figure."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/fork.json").write_bytes((ROOT / "labs/tables/fork.json").read_bytes())
    before = (tmp_path / "tables/fork.json").stat().st_mtime_ns
    monkeypatch.setattr("labs.toy.gradient", None)
    run("fork", tmp_path, monkeypatch, "--redraw")
    assert (tmp_path / "tables/fork.json").stat().st_mtime_ns == before
    assert (tmp_path / "figures/fork.png").exists()


def test_what_is_measured_again_is_the_same():
    """A seed is all that a toy depends on."""
    fork = load("fork")
    arm, runs = next(iter(results("fork").items()))
    again = fork.measure(arm, 1, False)
    assert {key: lab.plain(value) for key, value in again.items()} == runs[0]


def test_wrong_calls_are_one_line(tmp_path, monkeypatch, capsys):
    for words in (["--seeds", 0], ["--redraw", "--out", tmp_path], ["--nope"]):
        refused(monkeypatch, capsys, "labs.fork", *words)


def test_commands_and_links_of_the_pages_lead_somewhere(monkeypatch):
    """Of the labs and of docs/diagnose.md: files, flags, labs, bugs; labs/README.md has a row for
    each lab."""
    pages = [ROOT / "docs/diagnose.md", *(ROOT / "labs").glob("*.md")]
    found = 0
    for page in pages:
        text = page.read_text()
        for link in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert (page.parent / link).exists(), (page, link)
        for program, words in re.findall(r"`python (?:-m )?([\w.]+)([^`]*)`", text):
            words, found = words.split(), found + 1
            if program.endswith(".py") or program.startswith("variants."):
                monkeypatch.setattr(sys, "argv", [program, *words])
                parse(module_of(program.removesuffix(".py").removeprefix("variants.")).Args)
            else:
                assert importlib.util.find_spec(program), (page, program)
            if program == "labs.bug":
                bug.damaged(bug.BUGS[int(words[0]) - 1])
    assert found > 20
    index = (ROOT / "labs/README.md").read_text()
    assert sorted(re.findall(r"^\| \[\w+\]\((\w+)\.md\)", index, re.MULTILINE)) == NAMES


class Runs(ModuleType):
    """A lab of two arms that are command lines."""

    ARMS = {"one": "grpo.py --lr 1e-3", "two": "sapo.py"}
    COLUMNS = ("reward",)


def test_a_lab_of_runs_goes_on_where_its_table_ends(tmp_path, monkeypatch):
    """What is in the table of the same command line is not run again."""
    made, table = [], tmp_path / "t.json"

    def trained(command: str, seed: int, columns: tuple, damage: tuple | None) -> dict:
        made.append((command.strip(), seed))
        return {"reward@": [1], "reward": [seed]}

    monkeypatch.setattr(lab, "trained", trained)
    module = Runs("labs.runs")
    module.__spec__ = importlib.util.spec_from_loader("labs.runs", None)
    lab.run(module, table, 1, False)
    assert sorted(made) == [("grpo.py --lr 1e-3", 1), ("sapo.py", 1)]
    lab.run(module, table, 2, False)
    assert sorted(made[2:]) == [("grpo.py --lr 1e-3", 2), ("sapo.py", 2)]
    monkeypatch.setattr(Runs, "ARMS", {"one": "grpo.py --lr 1e-4", "two": "sapo.py"})
    lab.run(module, table, 2, False)
    assert sorted(made[4:]) == [("grpo.py --lr 1e-4", 1), ("grpo.py --lr 1e-4", 2)]
    assert [run["reward"] for run in json.loads(table.read_text())["results"]["two"]] == [[1], [2]]


@pytest.mark.runs
def test_a_run_as_a_process_gives_its_columns(tmp_path):
    """And one that stops itself is a result: the 8-bit sampler is far beyond such a tolerance."""
    words = "--prompts_per_step 4 --eval_samples 1 --max_new_tokens 16 --sampler_tolerance 1e-6"
    found = lab.trained(f"minirl.py {words} {lab.QUICKLY}", 1, ("greedy", "reward"))
    assert found["greedy@"].tolist() == [0] and found["reward"].size < 4
    assert "sampler and trainer disagree" in found["stopped"]


def test_tokens_are_counted_up_to_each_evaluation():
    """Two steps of 1,000 and two of 2,000 tokens, measured at steps 0, 2 and 4."""
    run = {"tokens": [1e3, 1e3, 2e3, 2e3], "sampled@": [0, 2, 4], "sampled": [0.2, 0.4, 0.8]}
    assert lab.spent(run) == [0, 2, 6] and lab.at_tokens(run, 4) == pytest.approx(0.6)


def test_a_row_of_the_stack_is_compared_seed_by_seed():
    stack = load("stack")
    others = {layers: stack.against(layers) for layers in stack.LAYERS}
    assert others["nothing"] is None and others["stale, curriculum"] == "stale alone"
    assert others["without clip"] == "all five" and others["clip alone"] == "nothing"
    one, two = ({"sampled": [0.0, *[end] * 3], "tokens": [], "ess_ratio": []} for end in (0.8, 0.5))
    for run in (one, two):
        run["sampled@"] = [0, 1, 2, 3]
    told = stack.ended(one, two, 0.0)
    assert told["gain"] == pytest.approx(0.3) and told["pace"] == pytest.approx(0.225)
