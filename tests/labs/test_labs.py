"""The labs: each toy agrees with its page, each lab of training runs would start, and its runs are
kept and continued."""

import importlib
import importlib.machinery
import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from common.cli import BadInput, broken_rule
from common.launch import parse
from labs import lab
from labs.heat.mean import between, distance, mean

import checks
from tests.helpers import ROOT, module_of

pytestmark = pytest.mark.slow

NAMES = sorted(path.parent.name for path in ROOT.glob("labs/*/figure.png"))
LABS = {name: importlib.import_module(f"labs.{name}.__main__") for name in NAMES}
RUNS = [name for name in LABS if lab.is_training(LABS[name])]


def results(table: Path) -> dict:
    """Return the runs of a table."""
    return json.loads(table.read_text())["results"]


def start(patch: pytest.MonkeyPatch, module: str, *words: object) -> None:
    """Run `python -m MODULE WORDS` in this process."""
    patch.setattr(sys, "argv", ["lab", *map(str, words)])
    patch.delitem(sys.modules, module, raising=False)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


# Of each toy a number (of a series the last one), and arms in which it rises
CLAIMS = {
    "fork": ("rollouts", "MASPO", "clip-higher", "GRPO"),
    "flips": ("entropy", "GRPO, wrong π_old", "SAPO, wrong π_old"),
    "junk": ("end", "junk, STAPO", "junk, GRPO"),
    "lock": ("tries", "lr 0.3, 0.001, no branches, same tokens", "lr 0.3, 0.001, DEEP-GRPO"),
    "length": ("wrong end", "token mean (justrl)", "1/|y|, a budget (laconic)", "1/|y| (grpo)"),
}


def goes_its_way(name: str, runs_of: dict) -> None:
    """Check that the medians over seeds rise from arm to arm."""
    measured, *arms = CLAIMS[name]
    medians = [np.median([np.ravel(run[measured])[-1] for run in runs_of[arm]]) for arm in arms]
    for less, more in zip(medians, medians[1:]):
        assert less < more, (arms, medians)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RUNS])
def test_a_toy_goes_the_way_of_its_page(name, tmp_path, monkeypatch, capsys):
    """It does so in the shipped table, and in one seed at full length."""
    goes_its_way(name, results(ROOT / f"labs/{name}/table.json"))
    start(monkeypatch, f"labs.{name}.__main__", "--out", tmp_path, "--quick", "--seeds", 1)
    quick = results(tmp_path / f"{name}/table.quick.json")
    assert list(quick) == list(LABS[name].ARMS)
    goes_its_way(name, quick)
    assert lab.text(LABS[name].rows(quick)) in capsys.readouterr().out


# Labs of training runs


@pytest.mark.parametrize("name", RUNS)
def test_the_shipped_table_of_runs_becomes_a_figure(name, tmp_path, monkeypatch, capsys):
    """The table has every arm's command line, so nothing is run again. Damaged text occurs in its
    file."""
    module = LABS[name]
    shutil.copytree(ROOT / "labs" / name, tmp_path / name)
    monkeypatch.setattr(lab, "trained", None)
    start(monkeypatch, f"labs.{name}.__main__", "--out", tmp_path, "--seeds", 1)
    table = tmp_path / name / "table.json"
    assert lab.text(module.rows(results(table))) in capsys.readouterr().out
    for arm, damage in getattr(module, "DAMAGE", {}).items():
        assert checks.replaced(ROOT / module.ARMS[arm].split()[0], *damage)


@pytest.mark.parametrize("name", RUNS)
def test_the_runs_of_a_lab_would_start(name, monkeypatch):
    """Their flags exist, also in a quick run."""
    for command in LABS[name].ARMS.values():
        words = shlex.split(f"{command} {lab.SHORT} {getattr(LABS[name], 'SHORT', '')}")
        file = words[1] if words[0] == "-m" else words[0]
        if file == "labs.heat.mean":  # its flags are not a file's
            continue
        own = words[words.index(file) + 1 :]  # after a stress's name, if there is one
        begin = next(place for place, word in enumerate(own) if word.startswith("--"))
        monkeypatch.setattr(sys, "argv", [file, *own[begin:]])
        args = parse(module_of(re.split(r"[./]", file.removesuffix(".py"))[-1]).Args)
        assert not broken_rule(args), command


class Runs(ModuleType):
    """A lab of two arms that are command lines."""

    ARMS = {"one": "grpo.py --lr 1e-3", "two": "sapo.py"}
    COLUMNS = ("reward",)


def test_a_lab_of_runs_goes_on_where_its_table_ends(tmp_path, monkeypatch):
    """A run that the table has, with the same command line, is not run again."""
    made, table, module = [], tmp_path / "t.json", Runs("labs.runs.__main__")
    module.__spec__ = importlib.machinery.ModuleSpec("labs.runs.__main__", None)

    def trained(command: str, seed: int, *_: object) -> dict:
        made.append((command.strip(), seed))
        return {"reward@": [1], "reward": [seed]}

    monkeypatch.setattr(lab, "trained", trained)
    lab.run(module, table, 1, False)
    lab.run(module, table, 2, False)
    expected = [("grpo.py --lr 1e-3", 1), ("grpo.py --lr 1e-3", 2), ("sapo.py", 1), ("sapo.py", 2)]
    assert sorted(made) == expected
    monkeypatch.setattr(Runs, "ARMS", {"one": "grpo.py --lr 1e-4", "two": "sapo.py"})
    lab.write(table, json.loads(table.read_text()) | {"beside": {"a": 1}})
    lab.run(module, table, 1, False)
    assert json.loads(table.read_text())["beside"] == {"a": 1}
    assert made[4:] == [("grpo.py --lr 1e-4", 1)]
    assert [len(runs) for runs in results(table).values()] == [1, 2]


STOPPED = """
import os, sys
folder = sys.argv[sys.argv.index("--run_dir") + 1]
os.makedirs(folder)
open(folder + "/metrics.jsonl", "w").write('{"step": 0, "greedy": 0.25}\\n')
"""


def test_a_run_that_somebody_stopped_is_no_result(tmp_path):
    """A run that somebody stopped ends with exit code 0 and no summary; a run that broke ends with
    1 and a traceback. A run that stopped itself is a result."""
    file, greedy = tmp_path / "stopped.py", ("greedy",)
    file.write_text(STOPPED)
    with pytest.raises(BadInput, match="was stopped before its end"):
        lab.trained(str(file), 1, greedy)
    file.write_text(STOPPED + "raise KeyError('β')")
    with pytest.raises(BadInput, match="exit code 1: KeyError: 'β'"):
        lab.trained(str(file), 1, greedy)
    file.write_text(STOPPED + "sys.exit('stopped.py: error: sampler and trainer disagree')")
    run = lab.trained(str(file), 1, greedy)
    assert run["stopped"].endswith("disagree") and run["greedy"].tolist() == [0.25]


def test_means_and_moves_of_weights():
    start = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[0.0]])}
    end = {"a": torch.tensor([1.0, 4.0]), "b": torch.tensor([[2.0]])}
    middle = mean([end, start])
    assert middle["a"].tolist() == [1, 3] and middle["b"].tolist() == [[1]]
    assert distance(end, start) == pytest.approx(8**0.5)
    there = between(start, end, 0.25)
    assert there["a"].tolist() == [1, 2.5] and there["b"].tolist() == [[0.5]]


def test_tokens_are_counted_up_to_each_evaluation():
    """The run has two steps of 1,000 and two of 2,000 tokens, and is measured at steps 0, 2 and
    4."""
    run = {"tokens": [1e3, 1e3, 2e3, 2e3], "sampled@": [0, 2, 4], "sampled": [0.2, 0.4, 0.8]}
    assert lab.spent(run) == [0, 2, 6] and lab.at_tokens(run, 4) == pytest.approx(0.6)
