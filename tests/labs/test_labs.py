"""The labs: each runs, in the direction that its page says; the pages' numbers are the tables'."""

import copy
import dataclasses
import importlib.util
import io
import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from common import rollout
from common.distributed import BadInput
from common.plumbing import evaluation
from common.plumbing.flags import broken_rule
from common.plumbing.launch import parse
from labs import bug, coarse, lab

import checks
from checks.files import PATHS
from tests.helpers import ROOT, module_of
from tests.repository.test_docs import refused

PAGES = sorted(path.stem for path in (ROOT / "labs").glob("[a-z]*.md"))
NAMES = [name for name in PAGES if name not in ("answers", "course", "course-answers")]
LABS = {p.stem: p.read_text() for p in sorted((ROOT / "labs").glob("*.py")) if p.stem != "lab"}
LABS = {name: text for name, text in LABS.items() if "lab.main(" in text}
RUNS = [name for name, text in LABS.items() if "\nCOLUMNS = " in text]  # of whole training runs
TOYS = [name for name in LABS if name not in RUNS]


def load(name: str) -> ModuleType:
    return importlib.import_module(f"labs.{name}")


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
    REINFORCE++, in every seed; alone none is a third later than another. Whitening over one-token
    answers is RLOO's direction."""
    until = load("baseline").until
    for one, two, three in zip(*(found[f"{n}, mixed"] for n in ("MaxRL", "RLOO", "REINFORCE++"))):
        assert until(one, "hard") < until(two, "hard") < until(three, "hard")
        assert np.mean(one["share hard"][:60]) > np.mean(two["share hard"][:60])
    for runs in zip(*(found[f"{name}, hard"] for name in load("baseline").HOW)):
        alone = [until(run, "hard") for run in runs]
        assert max(alone) < 4 / 3 * min(alone)
    for name in ("REINFORCE++-baseline", "ScaleRL's division"):
        for one, two in zip(found[f"{name}, mixed"], found["RLOO, mixed"]):
            assert np.allclose(one["right hard"], two["right hard"], atol=1e-6)


def direction_of_flips(found: dict) -> None:
    """Lost to the same loss's clean run: what is unbounded pays, what tells π_old from μ does not,
    unless both are wrong."""
    ends = {arm: np.mean([run["entropy"][-1] for run in runs]) for arm, runs in found.items()}
    lost = {arm: ends[f"{load('flips').ARMS[arm]}, clean"] - end for arm, end in ends.items()}
    assert min(lost["GRPO, wrong π_old"], lost["MASPO, wrong π_old"], lost["DPPO, wrong μ"]) > 0.15
    assert lost["DPPO, wrong π_old"] == 0 and lost["IcePop, both wrong"] > 0.4
    for arm in (
        "SAPO, wrong π_old",
        "MiniRL, wrong π_old",
        "IcePop, wrong π_old",
        "IcePop, wrong μ",
    ):
        assert abs(lost[arm]) < 0.15


def direction_of_junk(found: dict) -> None:
    """Slips and discoveries go with the mask; at the spark the spring is on."""
    assert middle(found["junk, STAPO"], "end") < 0.5 * middle(found["junk, GRPO"], "end")
    for name in ("STAPO", "top 20%", "GRPO"):
        finds = sum(np.isfinite(run["found"]) for run in found[f"fork, {name}"])
        assert bool(finds) == (name == "GRPO")
    spring, off = found["spark, Lp-Reg"], found["spark, Lp-Reg, spring off"]
    assert all(one["p"] != other["p"] for one, other in zip(spring, off))


def direction_of_lock(found: dict) -> None:
    """Branches try the lock more often for as many tokens, and with the short step climb slower."""
    for lr in ("0.05", "0.3"):
        same, deep = (
            found[f"lr {lr}, 0.001, {way}"] for way in ("no branches, same tokens", "DEEP-GRPO")
        )
        assert 0.8 < middle(deep, "per step") / middle(same, "per step") < 1.2
        assert middle(deep, "tries") > 2 * middle(same, "tries")
    same, deep = (
        found[f"lr 0.05, 0.001, {way}"] for way in ("no branches, same tokens", "DEEP-GRPO")
    )
    assert all(one["climb"] > two["climb"] for one, two in zip(deep, same))


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
    noise = {arm: middle(runs, "noise") for arm, runs in found.items()}
    assert noise["on-policy: R - best constant"] < noise["on-policy: GRPO"]
    for how in ("on-policy", "stale"):  # in every policy, by what each of them is the best of
        for one, other in (
            ("R - best constant", "R - p"),
            ("R - best b(s)", "R - best constant"),
            ("R - best b(s)", "R - V(s)"),
            ("Q(s, a) - best b(s)", "V(s') - V(s), λ = 0"),
            ("Q(s, a) - best b(s)", "R - best b(s)"),
        ):
            pairs = zip(found[f"{how}: {one}"], found[f"{how}: {other}"])
            assert all(two["noise"] > own["noise"] - 1e-3 for own, two in pairs), (how, one)
    for runs in (found["on-policy: VCPO, no baseline"], found["stale: VCPO, no baseline"]):
        assert middle(runs, "angle") < 5
    plain, bare = (
        found["on-policy: GRPO, no baseline"],
        found["on-policy: no baseline, full weight"],
    )
    for one, other in zip(plain, bare):  # two ways to the same number
        assert abs(one["noise"] / other["noise"] - 1) < 2e-3 and one["angle"] < 0.01


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
    noise = [middle(found["on-policy: right"], f"noise {lam}") for lam in module.LAMBDAS]
    assert noise == sorted(noise)
    for name, lam in (("R - V(s)", 1.0), ("V(s') - V(s), λ = 0", 0.0)):  # another way there
        for run, other in zip(found["on-policy: right"], found[f"exact, on-policy: {name}"]):
            assert abs(run[f"noise {lam}"] / other["noise"] - 1) < 2e-3


def direction_of_precision(found: dict) -> None:
    moved = {arm: middle(runs, "moved") for arm, runs in found.items()}
    share = {arm: middle(runs, "changed") for arm, runs in found.items()}
    assert share["bfloat16, 1e-6"] < 0.01 < 0.98 < share["float32, 1e-6"]
    assert moved["bfloat16, 1e-6"] < 0.1 * moved["float32, 1e-6"]
    assert abs(moved["float32 master, 1e-6"] / moved["float32, 1e-6"] - 1) < 0.1
    assert abs(moved["bfloat16, 1e-3"] / moved["float32, 1e-3"] - 1) < 0.3


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


def test_the_leash_labs_weights_are_grpos():
    """k3 and r·k3 as grpo.py has them, r against the sampler."""
    generator = torch.Generator().manual_seed(5)
    logp, ref, mu = torch.randn(3, 2, 6, generator=generator, dtype=torch.float64) - 3
    for term, weighed in (("k3", False), ("r·k3", True)):
        x = logp.clone().requires_grad_()
        batch = {"logp": x, "old_logp": mu, "ref_logp": ref, "mask": torch.ones_like(mu)}
        args = dataclasses.replace(module_of("grpo").Args(), beta=1.0, kl_ratio=weighed)
        loss, _ = checks.loss_of(module_of("grpo"), args, **batch, advantages=torch.zeros(2))
        (grad,) = torch.autograd.grad(loss, x)
        expected = load("leash").weights(term, *(t.numpy() for t in (logp, ref, mu))) / 12
        assert np.allclose(grad, expected, rtol=1e-12)


SLOW = ("lock", "precision", "signs", "teacher")  # five seconds each
BY_TIME = [pytest.param(n, marks=pytest.mark.variants) if n in SLOW else n for n in TOYS]


@pytest.mark.parametrize("name", BY_TIME)
def test_a_quick_toy_goes_the_way_of_its_page(name, tmp_path, monkeypatch, capsys):
    """At full length: what it draws is the finding. One seed here, because of the time."""
    call(name, tmp_path, monkeypatch, "--quick", "--seeds", 1)
    found = results(f"{name}.quick", tmp_path)
    assert list(found) == list(load(name).ARMS) and all(len(runs) == 1 for runs in found.values())
    globals()[f"direction_of_{name}"](found)
    globals()[f"direction_of_{name}"](results(name))
    assert (tmp_path / "figures" / f"{name}.quick.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert lab.text(load(name).rows(found)) in said and lab.SMOKE not in said
    assert not (tmp_path / "tables" / f"{name}.json").exists()


@pytest.mark.parametrize("name", RUNS)
def test_what_a_lab_damages_stands_in_its_file(name):
    """Each of them once: the damaged copy is another file, and still one."""
    module = load(name)
    for arm, damage in getattr(module, "DAMAGE", {}).items():
        source = ROOT / module.ARMS[arm].split()[0]
        found = checks.replaced(source, *damage)
        assert found != source.read_text() and compile(found, source.name, "exec")


def of_a_lab(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The Args of each of a lab's short command lines, and by whose file it is run."""
    found = {}
    for command in module.ARMS.values():
        words = f"{command} {lab.SHORT} {getattr(module, 'SHORT', '')}".split()
        module_too = words[0] == "-m"  # `-m variants.dapo`
        algorithm = words[module_too].removesuffix(".py").removeprefix("variants.")
        monkeypatch.setattr(sys, "argv", words[module_too:])
        args = parse(module_of(algorithm).Args)
        assert not broken_rule(args), (command, broken_rule(args))
        found[" ".join(words)] = args, PATHS[algorithm].read_text()
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_lab_of_runs_tells_and_draws_what_its_runs_may_leave(name, tmp_path, monkeypatch, capsys):
    """Without the runs: their flags exist, and numbers such as theirs become a table and a figure,
    which say that they show nothing.

    A column that a file does not write is empty, as `trained` leaves it.
    """
    module = load(name)
    known, random = of_a_lab(module, monkeypatch), np.random.default_rng(0)
    common = "".join(path.read_text() for path in (ROOT / "common").rglob("*.py"))
    written = set()

    def trained(command: str, seed: int, columns: tuple, damage: tuple | None) -> dict:
        args, source = known[" ".join(command.split())]
        for name in re.findall(r"from labs\.(\w+) import", damage[1] if damage else ""):
            source += (ROOT / "labs" / f"{name}.py").read_text()
        found = {}
        for column in columns:
            measured = column.removeprefix("policy_") in ("greedy", "sampled")
            steps = np.arange(0, args.steps + 1, args.eval_every) if measured else None
            steps = steps if measured else np.arange(1, args.steps + 1)
            has = re.search(rf"\b{column}\b", source + common)
            written.update([column] if has else [])
            found[f"{column}@"] = steps[: None if has else 0]
            found[column] = random.uniform(0.2, 0.8, len(found[f"{column}@"]))
        return found

    titles, entitle = [], lab.entitle
    monkeypatch.setattr(lab, "trained", trained)
    monkeypatch.setattr(
        lab, "entitle", lambda figure, words: titles.append(words) or entitle(figure, words)
    )
    call(name, tmp_path, monkeypatch, "--smoke")
    table = table_of(f"{name}.smoke", tmp_path)
    found = table["results"]
    assert list(found) == list(module.ARMS) and all(len(runs) == 1 for runs in found.values())
    assert written == set(module.COLUMNS)
    head, *rows = module.rows(found)
    assert len(rows) >= 2 and all(len(row) == len(head) for row in rows)
    assert (tmp_path / "figures" / f"{name}.smoke.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert said.startswith(lab.SMOKE) and lab.text(module.rows(found)) in said
    assert table["note"] == lab.SMOKE == titles[-1]


def test_a_sampler_of_three_bits_is_judged_beside_its_policy(monkeypatch):
    """Whole numbers from -3 to 3 times a row's scale, but for routers and embeddings; the policy
    is measured with its own weights, and sampling goes on with the rounded ones."""
    policy = torch.nn.ModuleDict(
        {"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"gate": torch.nn.Linear(8, 4)})])}
    )
    policy["layers"][0]["up"] = torch.nn.Linear(8, 4)
    lm = torch.nn.ModuleDict({"model": copy.deepcopy(policy)}).requires_grad_(False)

    def sync(source: torch.nn.Module) -> None:
        lm["model"].load_state_dict(source.state_dict())

    def rounded(engine: object) -> dict:
        rows = lm["model"]["layers"][0]["up"].weight
        levels = rows / rows.abs().amax(-1, keepdim=True) * 3
        return {"greedy": torch.allclose(levels, levels.round(), atol=1e-5)}

    engine = SimpleNamespace(lm=lm, sync=sync)
    monkeypatch.setattr(rollout, "make_engine", lambda: engine)
    monkeypatch.setattr(evaluation, "evaluate", rounded)
    coarse.make_engine().sync(policy)
    assert coarse.evaluate(engine) == {"greedy": True, "policy_greedy": False}
    assert rounded(engine)["greedy"]
    for name in ("gate.weight", "up.bias"):
        path = f"layers.0.{name}"
        assert torch.equal(lm["model"].get_parameter(path), policy.get_parameter(path))


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


def test_every_box_to_tick_has_its_line():
    """Two on a line are one box and text, as every renderer of Markdown has it."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "labs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        assert text.count("[ ] ") == len(re.findall(r"^- \[ \] \S", text, re.MULTILINE)), page


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_table_is_a_full_run(name):
    table = json.loads((ROOT / "labs/tables" / f"{name}.json").read_text())
    least = getattr(load(name), "SEEDS", lab.SEEDS)
    assert table["seeds"] >= least and not table["quick"]
    assert re.match(r"\d{4}-\d\d-\d\d", table["date"])
    assert table["command"] == f"python -m labs.{name} --seeds {table['seeds']}"
    counts = [len(runs) for runs in table["results"].values()]
    assert max(counts) == table["seeds"]
    if min(counts) < table["seeds"]:  # then each row says how many
        head, *rows = load(name).rows(table["results"])
        assert [row[head.index("runs")] for row in rows] == [*map(str, counts)]
    assert set(table["results"]) <= set(load(name).ARMS)
    if name in RUNS:  # the command lines are those that were run
        assert table["arms"] == load(name).ARMS


def test_redraw_measures_nothing(tmp_path, monkeypatch):
    """The figure comes out of the table alone, and out of the shipped one the shipped figure."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/fork.json").write_bytes((ROOT / "labs/tables/fork.json").read_bytes())
    before = (tmp_path / "tables/fork.json").stat().st_mtime_ns
    monkeypatch.setattr("labs.toy.gradient", None)
    call("fork", tmp_path, monkeypatch, "--redraw")
    assert (tmp_path / "tables/fork.json").stat().st_mtime_ns == before
    assert (tmp_path / "figures/fork.png").exists()


def test_what_is_measured_again_is_the_same():
    """A seed is all that a toy depends on."""
    fork = load("fork")
    arm, runs = next(iter(results("fork").items()))
    again = fork.measure(arm, 1, False)
    assert {key: lab.plain(value) for key, value in again.items()} == runs[0]


def test_wrong_calls_are_one_line(tmp_path, monkeypatch, capsys):
    for words in (["--seeds", 0], ["--first_seed", -1], ["--redraw", "--out", tmp_path], ["--no"]):
        refused(monkeypatch, capsys, "labs.fork", *words)


@pytest.mark.parametrize(
    "text", ["", '{"results":', "[]", "{}", '{"results": {}}', '{"results": {"a": [1]}}']
)
@pytest.mark.parametrize("flags", [["--redraw"], []])
def test_a_damaged_table_is_one_line(text, flags, tmp_path, monkeypatch, capsys):
    """And it stays as it is: it may be a night's work that lacks its last bracket."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/stale.json").write_text(text)
    said = refused(monkeypatch, capsys, "labs.stale", "--out", tmp_path, *flags)
    assert "stale.json: damaged" in said and (tmp_path / "tables/stale.json").read_text() == text


def test_another_labs_table_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/length.json").write_bytes((ROOT / "labs/tables/stale.json").read_bytes())
    said = refused(monkeypatch, capsys, "labs.length", "--out", tmp_path, "--redraw")
    assert "not what this lab draws" in said


def test_the_seeds_of_the_help_are_the_labs_own(monkeypatch, capsys):
    for name, number in (("stale", load("stale").SEEDS), ("length", lab.SEEDS)):
        monkeypatch.setattr(sys, "argv", ["lab", "--help"])
        with pytest.raises(SystemExit):
            lab.main(load(name))
        assert f"runs of each arm (default: {number})" in capsys.readouterr().out


def test_a_published_table_is_not_replaced_by_less(tmp_path, monkeypatch, capsys):
    """Not by a quick one, by other seeds, or by fewer."""
    (tmp_path / "tables").mkdir()
    shipped = (ROOT / "labs/tables/length.json").read_bytes()
    (tmp_path / "tables/length.json").write_bytes(shipped)
    call("length", tmp_path, monkeypatch, "--quick")
    call("length", tmp_path, monkeypatch, "--first_seed", 31, "--seeds", 2)
    capsys.readouterr()
    said = refused(monkeypatch, capsys, "labs.length", "--out", tmp_path, "--seeds", 2)
    assert "has 20 seeds" in said
    assert (tmp_path / "tables/length.json").read_bytes() == shipped
    quick, other = (table_of(f"length.{kind}", tmp_path) for kind in ("quick", "from31"))
    for arm, runs in quick["results"].items():  # three of the page's own seeds, whole
        assert runs == results("length")[arm][:3]
        assert not any(run in results("length")[arm] for run in other["results"][arm])
    assert other["first_seed"] == 31 and other["seeds"] == 2 and quick["seeds"] == 3
    assert other["command"] == "python -m labs.length --seeds 2 --first_seed 31"
    assert load("length").measure("1/|y| (grpo)", 32, False)["right end"] == pytest.approx(
        other["results"]["1/|y| (grpo)"][1]["right end"], rel=1e-3
    )
    assert not list((tmp_path / "figures").glob("length.png"))


def test_wins_are_counted_in_pairs():
    """A tie wins for nobody, nor does what was never reached; a seed of one alone has no pair."""
    one = [{"end": end} for end in (0.5, 0.5, 0.9, float("nan"))]
    other = [{"end": end} for end in (0.4, 0.5, 0.95, 0.1)]
    assert lab.wins(one, other, "end") == "1 of 4" == lab.wins(other, one, "end")
    assert lab.wins(one, other, lambda run: -run["end"]) == "1 of 4"
    assert lab.wins(other, one[:3], "end") == "1 of 3"


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


def lab_of_runs() -> Runs:
    module = Runs("labs.runs")
    module.__spec__ = importlib.util.spec_from_loader("labs.runs", None)
    return module


def test_a_lab_of_runs_goes_on_where_its_table_ends(tmp_path, monkeypatch):
    """What is in the table of the same command line is not run again."""
    made, table = [], tmp_path / "t.json"

    def trained(command: str, seed: int, columns: tuple, damage: tuple | None) -> dict:
        made.append((command.strip(), seed))
        return {"reward@": [1], "reward": [seed]}

    monkeypatch.setattr(lab, "trained", trained)
    module = lab_of_runs()
    lab.run(module, table, 1, None)
    assert sorted(made) == [("grpo.py --lr 1e-3", 1), ("sapo.py", 1)]
    lab.run(module, table, 2, None)
    assert sorted(made[2:]) == [("grpo.py --lr 1e-3", 2), ("sapo.py", 2)]
    monkeypatch.setattr(Runs, "ARMS", {"one": "grpo.py --lr 1e-4", "two": "sapo.py"})
    lab.run(module, table, 2, None)
    assert sorted(made[4:]) == [("grpo.py --lr 1e-4", 1), ("grpo.py --lr 1e-4", 2)]
    assert [run["reward"] for run in json.loads(table.read_text())["results"]["two"]] == [[1], [2]]
    kept = table.read_bytes()
    lab.run(module, table, 1, None)  # nothing to do, and nothing to lose
    assert table.read_bytes() == kept
    monkeypatch.setattr(Runs, "ARMS", {"one": "grpo.py --lr 1", "two": "sapo.py"})
    with pytest.raises(BadInput, match="has 2 seeds"):
        lab.run(module, table, 1, None)
    monkeypatch.setattr(Runs, "ARMS", {"one": "grpo.py --lr 1e-4", "two": "sapo.py"})
    with pytest.raises(BadInput, match="begins with seed 1, not 7"):
        lab.run(module, table, 2, None, 7)
    assert len(made) == 6
    lab.run(module, tmp_path / "seven.json", 2, None, 7)
    assert sorted({seed for _, seed in made[6:]}) == [7, 8]


def test_ctrl_c_is_one_line(tmp_path, monkeypatch, capsys):
    """And the runs that ended are kept."""
    module = lab_of_runs()

    def trained(command: str, seed: int, columns: tuple, damage: tuple | None) -> dict:
        if command.startswith("sapo.py"):
            raise KeyboardInterrupt
        return {"reward@": [1], "reward": [seed]}

    monkeypatch.setattr(lab, "trained", trained)
    monkeypatch.setattr(sys, "argv", ["lab", "--out", str(tmp_path), "--seeds", "1"])
    with pytest.raises(SystemExit) as stop:
        lab.main(module)
    said = capsys.readouterr()
    assert stop.value.code == 130 and "interrupted; runs that ended are kept" in said.err
    assert "Traceback" not in said.err and not said.out
    assert len(results("runs", tmp_path)["one"]) == 1 and not results("runs", tmp_path)["two"]


STOPPED = """
import os, sys
folder = sys.argv[sys.argv.index("--run_dir") + 1]
os.makedirs(folder)
open(folder + "/metrics.jsonl", "w").write('{"step": 0, "greedy": 0.25}\\n')
"""


def test_a_run_that_somebody_stopped_is_no_result(tmp_path, monkeypatch):
    """It saves and ends with exit code 0; one that broke ends with 1, and a traceback."""
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
    file.write_text(STOPPED + "open(folder + '/summary.json', 'w').close()")
    assert "stopped" not in lab.trained(str(file), 1, ("greedy",))


@pytest.mark.runs
def test_a_run_as_a_process_gives_its_columns(tmp_path):
    """And one that stops itself is a result: the 8-bit sampler is far beyond such a tolerance."""
    words = "--prompts_per_step 4 --eval_samples 1 --max_new_tokens 16 --sampler_tolerance 1e-6"
    found = lab.trained(f"minirl.py {words} {lab.SHORT}", 1, ("greedy", "reward"))
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


def run_folder(folder: Path, steps: int, ended: bool = True) -> None:
    """What a run of so many steps leaves; without its summary if it did not end."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict.fromkeys("algorithm model task".split(), "x") | {"ranks": 1, "lr": 1e-3}
    (folder / "config.json").write_text(json.dumps(config | {"seed": 1, "steps": 9, "acted": {}}))
    lines = [{"step": step, "greedy": 0.5, "sampled": 0.5} for step in range(steps + 1)]
    more = dict.fromkeys("reward response_len entropy grad_norm tokens seconds".split(), 1.0)
    rows = [json.dumps(line | (more if line["step"] else {})) for line in lines]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "summary.json").unlink(missing_ok=True)
    if ended:
        (folder / "summary.json").write_text("{}")


def test_the_bug_hunt_takes_whole_runs_and_names_its_command(tmp_path, monkeypatch, capsys):
    """What was interrupted is run again by the same command; a whole run is not."""
    made, steps = [], 1  # the first is stopped before its last step

    def process(words: list[str], **_: object) -> object:
        if words[0] != sys.executable:
            return original(words, **_)
        made.append(words[1])
        run_folder(Path(words[words.index("--run_dir") + 1]), steps)
        return bug.subprocess.CompletedProcess(words, 0)

    original = bug.subprocess.run
    monkeypatch.setattr(bug.subprocess, "run", process)
    with pytest.raises(BadInput, match="was stopped before its end"):
        bug.play(5, tmp_path, bug.SHORT)
    steps = 2
    for _ in range(2):
        bug.play(5, tmp_path, bug.SHORT)
        assert len(made) == 3 and len(list(tmp_path.glob("*/summary.json"))) == 2
    assert not any((tmp_path / f"bug_5{end}").exists() for end in (".png", ".md"))
    page = (tmp_path / "bug_5.smoke.md").read_text(encoding="utf-8")
    assert f"Made by `python -m labs.bug 5 --smoke --out {tmp_path}`" in page and lab.SMOKE in page
    assert (tmp_path / "bug_5.smoke.png").stat().st_size > 10_000
    assert lab.SMOKE in capsys.readouterr().out
    (true,) = tmp_path.glob("grpo*")
    for others in ((1, True), (2, False), (3, True)):  # fewer steps; no summary; another run
        run_folder(true, *others)
        with pytest.raises(BadInput, match="no finished run of 2 steps"):
            bug.play(5, tmp_path, bug.SHORT)


def test_somebodys_file_is_refused_before_the_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(bug, "train", None)
    (tmp_path / "bug_5.md").write_text("my notes")
    with pytest.raises(BadInput, match="not from here"):
        bug.play(5, tmp_path)
    assert (tmp_path / "bug_5.md").read_text() == "my notes"


def test_every_short_bug_has_whole_mini_batches():
    """Flags of a bug and those that make it short go together."""
    for one in bug.BUGS:
        words = f"{bug.RUN} {one.flags} {bug.SHORT}".split()
        args = dict(zip(words[::2], words[1::2]))
        prompts = int(args.get("--prompts_per_step", module_of(one.file).Args().prompts_per_step))
        assert prompts % int(args.get("--minibatches", 1)) == 0, one.named


def test_a_terminal_without_greek_gets_escapes(monkeypatch):
    """As PYTHONIOENCODING=ascii makes it; and a table is read in no other encoding than UTF-8."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii", write_through=True))
    lab.survive_the_terminal()
    print(lab.text(load("precision").rows(results("precision"))))
    assert b"mean |\\u0394 log \\u03c0| after four" in raw.getvalue()
    for name in ("lab", "bug", "notebook", "answers", "toy"):
        source = (ROOT / "labs" / f"{name}.py").read_text(encoding="utf-8")
        calls = re.findall(r"(?:read_text|write_text|open)\([^()]*(?:\([^()]*\)[^()]*)*\)", source)
        calls = [call for call in calls if not call.startswith("open(call")]  # Popen
        assert all("utf-8" in call for call in calls), (name, calls)
