"""The labs: each toy goes the way of its page, each lab of training runs goes through its program,
and runs are kept, continued and never replaced by less."""

import importlib
import importlib.machinery
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from common.distributed import BadInput
from common.plumbing.flags import broken_rule
from common.plumbing.launch import parse
from labs import lab

import checks
from tests.helpers import ROOT, module_of

pytestmark = pytest.mark.slow

NAMES = [path.stem for path in sorted((ROOT / "labs/tables").glob("*.json"))]
NAMES.remove("stability")  # the race's


def load(name: str) -> ModuleType:
    return importlib.import_module(f"labs.{name}")


RUNS = [name for name in NAMES if hasattr(load(name), "COLUMNS")]  # of whole training runs
TOYS = [name for name in NAMES if name not in RUNS]


def table_of(name: str, folder: Path = ROOT / "labs") -> dict:
    return json.loads((folder / "tables" / f"{name}.json").read_text())


def results(name: str, folder: Path = ROOT / "labs") -> dict:
    """The runs of a table."""
    return table_of(name, folder)["results"]


def call(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: object) -> None:
    """`python -m labs.NAME --out FOLDER` in this process."""
    monkeypatch.setattr(sys, "argv", ["lab", "--out", str(folder), *map(str, flags)])
    monkeypatch.delitem(sys.modules, f"labs.{name}", raising=False)
    runpy.run_module(f"labs.{name}", run_name="__main__", alter_sys=True)


def middle(runs: list[dict], name: str) -> float:
    return float(lab.over(runs, name)[0])


# What each toy shows


def direction_of_fork(found: dict) -> None:
    need = {arm: middle(runs, "rollouts") for arm, runs in found.items()}
    assert max(need["MASPO"], need["SAPO"]) < 0.8 * need["clip-higher"] < need["GRPO"]
    starts = load("fork").STARTS
    rare, common = starts.index(0.01), starts.index(0.5)
    for one, other in zip(found["GRPO"], found["MASPO"]):  # a common one: at a small step alone
        assert one["added 1"][common] < 0.4 * other["added 1"][common]
        assert one["added 5"][common] > 0.8 * other["added 5"][common]
        assert one["added 5"][rare] < 0.1 * other["added 5"][rare]


def direction_of_baseline(found: dict) -> None:
    """In the mixed batch MaxRL brings hard prompts past 1/2 before RLOO, and RLOO before
    REINFORCE++, in every seed; alone none is a third later than another."""
    until = load("baseline").until
    for one, two, three in zip(*(found[f"{n}, mixed"] for n in ("MaxRL", "RLOO", "REINFORCE++"))):
        assert until(one, "hard") < until(two, "hard") < until(three, "hard")
    for runs in zip(*(found[f"{name}, hard"] for name in load("baseline").HOW)):
        alone = [until(run, "hard") for run in runs]
        assert max(alone) < 4 / 3 * min(alone)


def direction_of_flips(found: dict) -> None:
    """Lost to the same loss's clean run: what is unbounded pays, what tells π_old from μ does not,
    unless both are wrong."""
    ends = {arm: np.mean([run["entropy"][-1] for run in runs]) for arm, runs in found.items()}
    lost = {arm: ends[f"{load('flips').ARMS[arm]}, clean"] - end for arm, end in ends.items()}
    assert min(lost["GRPO, wrong π_old"], lost["MASPO, wrong π_old"], lost["DPPO, wrong μ"]) > 0.15
    assert lost["DPPO, wrong π_old"] == 0 and lost["IcePop, both wrong"] > 0.4
    assert abs(lost["SAPO, wrong π_old"]) < 0.15 and abs(lost["IcePop, wrong μ"]) < 0.15


def direction_of_junk(found: dict) -> None:
    """Slips and discoveries go with the mask; at the spark the spring is on."""
    assert middle(found["junk, STAPO"], "end") < 0.5 * middle(found["junk, GRPO"], "end")
    for name in ("STAPO", "top 20%", "GRPO"):
        finds = sum(np.isfinite(run["found"]) for run in found[f"fork, {name}"])
        assert bool(finds) == (name == "GRPO")
    spring, off = found["spark, Lp-Reg"], found["spark, Lp-Reg, spring off"]
    assert all(one["p"] != other["p"] for one, other in zip(spring, off))


def direction_of_lock(found: dict) -> None:
    """Branches try the lock more often for as many tokens."""
    for lr in ("0.05", "0.3"):
        same = found[f"lr {lr}, 0.001, no branches, same tokens"]
        deep = found[f"lr {lr}, 0.001, DEEP-GRPO"]
        assert 0.8 < middle(deep, "per step") / middle(same, "per step") < 1.2
        assert middle(deep, "tries") > 2 * middle(same, "tries")


def direction_of_blocks(found: dict) -> None:
    """Sooner in every seed, but where block 1 is sure: there is no noise to be rid of."""
    for setting in load("blocks").SETTINGS:
        for one, other in zip(found[f"{setting}: blockwise"], found[f"{setting}: GRPO, sum"]):
            if setting.endswith("sure"):
                assert abs(one["both"] - other["both"]) <= 2
            else:
                assert one["both"] < 0.95 * other["both"]


def direction_of_signs(found: dict) -> None:
    """The paper's negatives find what half of a z-score does not, and keep alike what was alike."""
    until = {arm: middle(runs, "until") for arm, runs in found.items()}
    assert until["rare, GRPO"] < 200 < until["rare, NSR"] < 400
    assert until["rare, wrong half of the z-score"] == np.inf
    alive = {arm: middle(runs, "left") for arm, runs in found.items()}
    assert alive["easy, NSR"] > 3.99 and alive["easy, PSR"] < 3 and alive["uneven, NSR"] < 1.1


def direction_of_teacher(found: dict) -> None:
    """A constant on the rarest does what greedy does, on all tokens nothing; a teacher is obeyed,
    right or wrong; one that is lost off its prefixes teaches less than where it is not asked."""
    ends = {arm: np.mean([run["success"][-1] for run in runs]) for arm, runs in found.items()}
    for start, first in (("greedy right", 0.57), ("greedy wrong", 0.32)):
        end = {how: ends[f"{start}: {how}"] for how in load("teacher").HOW}
        assert min(end[how] for how in ("true teacher", "true, 3 of 10 flipped", "GRPO")) > 0.93
        assert end["wrong teacher"] < 0.05 and abs(end["constant, all tokens"] - first) < 0.15
        assert end["lost off its prefixes"] < 0.75 < 0.85 < end["lost, not asked there"]
        assert (end["constant, rarest fifth"] > 0.8) == (start == "greedy right")
    assert ends["greedy wrong: constant, rarest fifth"] < 0.25


def direction_of_length(found: dict) -> None:
    grpo, priced, *others = found.values()
    assert middle(grpo, "wrong end") > middle(priced, "wrong end") + 1
    for other in others:
        assert middle(grpo, "wrong end") > middle(other, "wrong end") + 1
        assert middle(grpo, "right end") < middle(other, "right end") - 1


def direction_of_bound(found: dict) -> None:
    """In every policy, by what each of them is the best of."""
    for how in ("on-policy", "stale"):
        for one, other in (
            ("R - best constant", "R - p"),
            ("R - best b(s)", "R - best constant"),
            ("R - best b(s)", "R - V(s)"),
            ("Q(s, a) - best b(s)", "V(s') - V(s), λ = 0"),
            ("Q(s, a) - best b(s)", "R - best b(s)"),
        ):
            pairs = zip(found[f"{how}: {one}"], found[f"{how}: {other}"])
            assert all(two["noise"] > own["noise"] - 1e-3 for own, two in pairs), (how, one)


def direction_of_critic(found: dict) -> None:
    """At λ = 1 no critic turns the mean, unless a clip looks at Â; below, one that is not right
    does."""
    module = load("critic")
    for critic in module.CRITICS:
        free, stale, cut = (found[f"{how}: {critic}"] for how in module.HOW)
        for run, other, right in zip(free, stale, found["stale, no clip: right"]):
            assert run["angle 1.0"] == run["moved"] == other["moved"] == 0
            assert abs(other["angle 1.0"] - right["angle 1.0"]) < 0.1
            assert (run["angle 0.8"] > 0.01) == (critic != "right")
        if critic != "right":
            assert middle(free, "angle 0.0") > middle(free, "angle 0.8")
            assert len(cut) < 20 or middle(cut, "moved") > 1


def direction_of_precision(found: dict) -> None:
    moved = {arm: middle(runs, "moved") for arm, runs in found.items()}
    share = {arm: middle(runs, "changed") for arm, runs in found.items()}
    assert share["bfloat16, 1e-6"] < 0.01 < 0.98 < share["float32, 1e-6"]
    assert moved["bfloat16, 1e-6"] < 0.1 * moved["float32, 1e-6"]
    assert abs(moved["float32 master, 1e-6"] / moved["float32, 1e-6"] - 1) < 0.1


def direction_of_leash(found: dict) -> None:
    """k1 in the loss: uniform under a sharper sampler, up under Adam and a clip even on own
    samples. The others come back on own samples; k2, k3 and r·k3 under the sharper one, too."""
    for run in found["k1, sharper sampler"]:
        assert run["Adam, end"] > 3.85 and run["SGD, end"] > run["entropy before"] + 0.2
    for run in found["k1, own samples"]:
        assert run["Adam, clipped, end"] > run["entropy before"] + 0.1
        assert run["Adam, clipped, KL"] > 0.5
    for term in load("leash").TERMS[1:]:
        for run in found[f"{term}, own samples"]:
            assert run["Adam, clipped, KL"] < run["KL before"]
        if term != "k1 in the reward":
            assert middle(found[f"{term}, own samples"], "Adam, clipped, KL") < 0.1
            assert max(run["Adam, clipped, KL"] for run in found[f"{term}, sharper sampler"]) < 0.3


@pytest.mark.parametrize("name", TOYS)
def test_a_toy_goes_the_way_of_its_page(name, tmp_path, monkeypatch, capsys):
    """In the shipped table, and in one seed at full length."""
    direction = globals()[f"direction_of_{name}"]
    direction(results(name))
    call(name, tmp_path, monkeypatch, "--quick", "--seeds", 1)
    found = results(f"{name}.quick", tmp_path)
    assert list(found) == list(load(name).ARMS)
    direction(found)
    assert lab.text(load(name).rows(found)) in capsys.readouterr().out


# Labs of training runs


@pytest.mark.parametrize("name", RUNS)
def test_the_runs_of_a_lab_would_start(name, monkeypatch):
    """Their flags exist, also in a smoke test, and what is damaged stands in its file. (That a
    table becomes a figure: tests/repository/test_programs.py.)"""
    module = load(name)
    for arm, command in module.ARMS.items():
        words = f"{command} {lab.SHORT} {getattr(module, 'SHORT', '')}".split()
        file = words[1] if words[0] == "-m" else words[0]
        monkeypatch.setattr(sys, "argv", words[words.index(file) :])
        args = parse(module_of(file.removesuffix(".py").removeprefix("variants.")).Args)
        assert not broken_rule(args), command
        damage = getattr(module, "DAMAGE", {}).get(arm)
        assert not damage or checks.replaced(ROOT / file, *damage)


class Runs(ModuleType):
    """A lab of two arms that are command lines."""

    ARMS = {"one": "grpo.py --lr 1e-3", "two": "sapo.py"}
    COLUMNS = ("reward",)


def test_a_lab_of_runs_goes_on_where_its_table_ends(tmp_path, monkeypatch):
    """What is in the table of the same command line is not run again, nor replaced by fewer seeds
    or by others."""
    made, table, module = [], tmp_path / "t.json", Runs("labs.runs")
    module.__spec__ = importlib.machinery.ModuleSpec("labs.runs", None)

    def trained(command: str, seed: int, columns: tuple, damage: tuple | None) -> dict:
        made.append((command.strip(), seed))
        return {"reward@": [1], "reward": [seed]}

    monkeypatch.setattr(lab, "trained", trained)
    lab.run(module, table, 1, None)
    lab.run(module, table, 2, None)
    expected = [("grpo.py --lr 1e-3", 1), ("grpo.py --lr 1e-3", 2), ("sapo.py", 1), ("sapo.py", 2)]
    assert sorted(made) == expected
    monkeypatch.setattr(Runs, "ARMS", {"one": "grpo.py --lr 1e-4", "two": "sapo.py"})
    lab.run(module, table, 2, None)
    assert sorted(made[4:]) == [("grpo.py --lr 1e-4", 1), ("grpo.py --lr 1e-4", 2)]
    with pytest.raises(BadInput, match="begins with seed 1, not 7"):
        lab.run(module, table, 2, None, 7)
    monkeypatch.setattr(Runs, "ARMS", {"one": "grpo.py --lr 1", "two": "sapo.py"})
    with pytest.raises(BadInput, match="has 2 seeds"):
        lab.run(module, table, 1, None)
    assert len(made) == 6


STOPPED = """
import os, sys
folder = sys.argv[sys.argv.index("--run_dir") + 1]
os.makedirs(folder)
open(folder + "/metrics.jsonl", "w").write('{"step": 0, "greedy": 0.25}\\n')
"""


def test_a_run_that_somebody_stopped_is_no_result(tmp_path):
    """It ends with exit code 0 and no summary; one that broke ends with 1 and a traceback; one that
    stopped itself is a result."""
    file = tmp_path / "stopped.py"
    file.write_text(STOPPED)
    with pytest.raises(BadInput, match="was stopped before its end"):
        lab.trained(str(file), 1, ("greedy",))
    file.write_text(STOPPED + "raise KeyError('β')")
    with pytest.raises(BadInput, match="exit code 1: KeyError: 'β'"):
        lab.trained(str(file), 1, ("greedy",))
    file.write_text(STOPPED + "sys.exit('stopped.py: error: sampler and trainer disagree')")
    found = lab.trained(str(file), 1, ("greedy",))
    assert found["stopped"].endswith("disagree") and found["greedy"].tolist() == [0.25]


def test_wins_are_counted_in_pairs():
    """A tie wins for nobody, nor does what was never reached; a seed of one alone has no pair."""
    one = [{"end": end} for end in (0.5, 0.5, 0.9, float("nan"))]
    other = [{"end": end} for end in (0.4, 0.5, 0.95, 0.1)]
    assert lab.wins(one, other, "end") == "1 of 4" == lab.wins(other, one, "end")
    assert lab.wins(other, one[:3], "end") == "1 of 3"


def test_tokens_are_counted_up_to_each_evaluation():
    """Two steps of 1,000 and two of 2,000 tokens, measured at steps 0, 2 and 4."""
    run = {"tokens": [1e3, 1e3, 2e3, 2e3], "sampled@": [0, 2, 4], "sampled": [0.2, 0.4, 0.8]}
    assert lab.spent(run) == [0, 2, 6] and lab.at_tokens(run, 4) == pytest.approx(0.6)
