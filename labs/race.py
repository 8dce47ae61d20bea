"""Every file under every stress (labs/stress.py), and a race that anybody can enter.

    python -m labs.race my_method.py      a file in the form of grpo.py: its row, and its place
    python -m labs.race --matrix          all rows of docs/stability.md: hours
    python -m labs.race --redraw          the pages and the picture, from the table that is there

A run that was finished is kept, and the same command goes on from there. Rules and scores:
docs/stability.md.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import date
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from common.plumbing.errors import BadInput, blame, first_line
from common.plumbing.folder import whole
from checks.files import ROOT, algorithms, base_of
from tools.maintain.marks import changes

from labs import lab, stress
from labs.stress import STRESSES, Stress

TABLE = ROOT / "labs/tables/stability.json"
PAGES = {"en": ROOT / "docs/stability.md", "zh": ROOT / "docs/zh/stability.md"}
PICTURES = {"root": ROOT / "docs/stability.png", "variants": ROOT / "docs/stability-variants.png"}
# Seeds of a cell, of one on which a sentence hangs; measurements in a score, the last
SEEDS, DECIDED, LAST = 3, 5, 3
RECORD = range(201, 211)  # seeds that decide a record: nobody has tuned on them
START, GOAL = 0.5, 0.8  # accuracy before training, and to be reached
DARK, LIGHT = 0.3, 0.9  # ends of the picture's shades
DEARER = 1.2  # a row of more tokens than this times grpo.py's is looked at again, at equal tokens
SHORT = 10  # steps of a smoke test, of one seed
SMOKE = "SMOKE TEST: ten steps of one seed, far too short to show anything"
# Seconds after which a run is killed: thirty times two minutes, which is long on a busy machine
LONGEST = 3600.0
LOADING = 60.0  # seconds in which a file is to be imported
REPAIRS = {  # what a sceptic tries first; and no KL term, since most files have none
    "grpo, lr/3": "--lr 1e-4",
    "grpo, 10 β": "--beta 0.1",
    "grpo, 1 update": "--minibatches 1",
    "grpo, clip 0.05": "--clip_low 0.05 --clip_high 0.05",
    "grpo, no KL": "--beta 0",
}
# Every row is compared with grpo.py, its cheapest repair, and grpo.py without what few files have
BASES = ("grpo", "grpo, lr/3", "grpo, no KL")
# What isolates a reason: no rows, but a row with one flag changed, under the stress it is asked of
ARMS = {
    "signs, all kept": ("signs", "--outliers 0", "coarse sampler"),
    "signs, λ = 1": ("signs", "--positive_weight 1", "coarse sampler"),
}
LAYERS = {  # of the survey: where a method acts
    "base": ("grpo", *REPAIRS),
    "tokens": "sapo stapo maspo cispo dppo entropy20 lp_reg pmd signs".split(),
    "sequences": "gspo gmpo vespo".split(),
    "gap": "minirl icepop jet".split(),
    "samples": "goldilocks dapo paced".split(),
    "exploration": "deep_grpo".split(),
    "system": "vcpo m2po".split(),
    "advantages": "baselines ppo dr_grpo justrl laconic".split(),
    "verifier": "blockwise opd".split(),
    "all": "recipe".split(),
}
# grpo.py alone, before any other file was run, on a seed that the matrix does not use
PILOT_SEEDS = (101,)
PILOT = {"old sampler, 8": Stress(every=8), "coarse sampler, 3": Stress(levels=3)} | STRESSES
TAIL = ("worst", "fall", "tokens", "most", "reached")  # columns behind the stresses
WORDS = {
    "en": {"method": "method", "not yet": "not yet", "refused": "refuses", "inf": "never"}
    | dict(
        zip(TAIL, ("worst cell", "largest fall", "thousand tokens", "most in a cell", "to 0.8"))
    ),
    "zh": {"method": "方法", "not yet": "还没跑", "refused": "拒绝运行", "inf": "没有到达"}
    | dict(zip(TAIL, ("最差的一格", "最大的回落", "千 token", "最多的一格", "到 0.8"))),
}


class UnderWay(NamedTuple):
    """A run that has begun."""

    process: BaseProcess
    job: tuple[int, str, str]  # seed, method, stress
    folder: tempfile.TemporaryDirectory
    until: float  # on the monotonic clock: then it is killed


class Method(NamedTuple):
    """A row: a file, and flags of its own."""

    file: Path
    flags: str = ""


def methods() -> dict[str, Method]:
    """All rows, by name: grpo.py and its cheap repairs, the root, the variants; each part
    in the order of the layers."""
    files = {path.stem: path for path in algorithms()}
    order = [name for names in LAYERS.values() for name in names]
    rows = {name: Method(files[name.split(",")[0]], REPAIRS.get(name, "")) for name in order}
    return dict(sorted(rows.items(), key=lambda row: row[1].file.parent != ROOT))


def arms() -> dict[str, Method]:
    """The arms as rows."""
    return {name: Method(methods()[row].file, flags) for name, (row, flags, _) in ARMS.items()}


def half(which: str) -> list[str]:
    """The rows of the root, or of the variants."""
    folder = {"root": ROOT, "variants": ROOT / "variants"}[which]
    return [name for name, one in methods().items() if one.file.parent == folder]


# The table: {"cells": [{"method", "stress", "runs": [{"seed", ...}, ...]}, ...], ...}


def stored(path: Path) -> dict:
    """The table that is there, or an empty one; BadInput if it is of other stresses."""
    head = {"budget": f"--steps {stress.STEPS} {stress.BUDGET}"}
    head |= {"stresses": {name: one.strength() for name, one in STRESSES.items()}}
    if not path.exists():
        return {"cells": []} | head
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        other = next((name for name in head if found[name] != head[name]), "")
        [run["seed"] for one in found["cells"] for run in one["runs"]]
    except (ValueError, LookupError, TypeError) as error:
        raise BadInput(f"{path}: damaged, no table of a race") from error
    if other:
        raise BadInput(f"{path}: has another {other}; give another --out")
    return found


def runs_of(table: dict, method: str, name: str, part: str = "cells") -> list[dict]:
    """The finished runs of a cell, by seed."""
    cells = table.get(part, [])
    return next((c["runs"] for c in cells if (c["method"], c["stress"]) == (method, name)), [])


def keep(path: Path, table: dict, job: tuple, found: dict, part: str = "cells") -> None:
    """Add one finished run; the table on the disk is always whole."""
    seed, method, name = job
    runs = runs_of(table, method, name, part)
    if not runs:
        table.setdefault(part, []).append({"method": method, "stress": name, "runs": runs})
    runs.append({"seed": seed} | found)
    runs.sort(key=lambda run: run["seed"])
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["transformers"] = transformers.__version__
    command = " ".join(["python -m labs.race", *sys.argv[1:]])
    commands = [one for one in table.get("commands", []) if one != command] + [command]
    table |= {"commands": commands, "date": str(date.today()), "versions": versions}
    lab.write(path, table)


# Scores


def score(run: dict) -> dict[str, float]:
    """Of a run, `end`: the mean accuracy of its last three measurements, those that it stopped
    before counting 0; `fall`: how far that is below the best three in a row; `reached`: thousands
    of tokens when it came to 0.8, on a line between two measurements, or inf."""
    lost = stress.COUNT - len(run["sampled"]) if "stopped" in run else 0
    values = np.array(run["sampled"] + [0.0] * lost)
    width = min(LAST, len(values))
    threes = np.convolve(values, np.full(width, 1 / width), "valid")
    reached = next((i for i, value in enumerate(run["sampled"]) if value >= GOAL), None)
    tokens = float("inf")
    if reached is not None:
        before = max(0, reached - 1)
        two = slice(before, reached + 1)
        tokens = float(np.interp(GOAL, run["sampled"][two], run["thousands"][two]))
    return {"end": float(threes[-1]), "fall": float(threes.max() - threes[-1]), "reached": tokens}


def ends(table: dict, method: str, name: str, key: str = "end") -> list[float]:
    """The scores of a cell's runs; those that the file refuses have none."""
    return [score(run)[key] for run in runs_of(table, method, name) if "refused" not in run]


def equal(table: dict, method: str, name: str) -> list[float]:
    """The scores of a cell's runs, had they been measured when they had spent the tokens that
    grpo.py had (the median run) at its last three measurements; on lines between their own."""
    spent = [run["thousands"] for run in runs_of(table, "grpo", name) if len(run.get("at", ())) > 1]
    at = np.median([one[-LAST:] for one in spent], axis=0) if spent else ()  # [3]
    return [
        0.0 if "stopped" in run else float(np.interp(at, run["thousands"], run["sampled"]).mean())
        for run in runs_of(table, method, name)
        if "at" in run and len(at)
    ]


def worst(table: dict, method: str) -> tuple[float, str] | None:
    """The row's lowest median and its stress; None while a cell has no run. What a file refuses
    to run counts 0: a place is not won by staying away."""
    found = []
    for name in STRESSES:
        if not runs_of(table, method, name):
            return None
        found.append((float(np.median(ends(table, method, name) or [0.0])), name))
    return min(found)


def idle(table: dict, method: str, name: str) -> bool:
    """Whether the file's own mechanism did nothing in any run of the cell."""
    runs = [run for run in runs_of(table, method, name) if "refused" not in run]
    return bool(runs) and not any(run["acted"] for run in runs)


def place(table: dict, method: str, others: dict) -> str:
    """Where the row stands by its worst cell, among the table's rows that have all cells."""
    own = worst(table, method)
    rest = [found[0] for name, of in others.items() if (found := worst(of, name))]
    if own is None:
        return "no place: cells are missing"
    return f"place {1 + sum(value > own[0] for value in rest)} of {1 + len(rest)}"


def kept_part(table: dict, method: str, name: str) -> list[float]:
    """Less what the stress took: of each seed the score here less its score in the control."""
    here, control = (
        {run["seed"]: score(run)["end"] for run in runs_of(table, method, at) if "at" in run}
        for at in (name, "none")
    )
    return [here[seed] - control[seed] for seed in here if seed in control]


def parted(
    table: dict,
    method: str,
    name: str,
    from_: str = "grpo",
    of: Callable = ends,
    seeds: int | None = None,
) -> str:
    """`+` or `-` where all seeds (the first, if a number is given) lie above or below all of
    another row under the same stress, with a `?` while one of the two has fewer than five; nothing
    within the spread, or with fewer than three. `of`: the scores, or what is kept of the
    control's."""
    one, other = (of(table, who, name)[:seeds] for who in (method, from_))
    few = min(len(one), len(other))
    if few < SEEDS or method == from_:
        return ""
    sign = "+" if min(one) > max(other) else "-" if max(one) < min(other) else ""
    return sign + "?" * (sign != "" and few < DECIDED)


def cell(table: dict, method: str, name: str, words: dict, ranges: bool = True) -> str:
    """A cell in words: median (lowest to highest), ○ where the file's mechanism never acted, and
    how many runs, where fewer than three."""
    runs, values = runs_of(table, method, name), ends(table, method, name)
    if not values:
        return words["refused"] if runs else words["not yet"]
    text = f"{np.median(values):.2f}"
    if ranges and len(values) > 1:
        text += f" ({min(values):.2f}–{max(values):.2f})"
    text += f" n={len(values)}" if ranges and len(values) < SEEDS else ""
    text += f" {parted(table, method, name)}" if parted(table, method, name) else ""
    return text + " ○" * idle(table, method, name)


def lines(table: dict, words: dict, ranges: bool = True, names: Iterable = ()) -> list[list[str]]:
    """The matrix as rows of cells, the head first."""
    told = [[words["method"], *STRESSES, *(words[name] for name in TAIL)]]
    for method in names or methods():
        cells = [cell(table, method, name, words, ranges) for name in STRESSES]
        low, none = worst(table, method), words["not yet"]
        falls = [
            np.median(fall) for name in STRESSES if (fall := ends(table, method, name, "fall"))
        ]
        cells += [f"{low[0]:.2f}", f"{max(falls):.2f}"] if low else [none, none]
        spent = {
            name: np.median([run["tokens"] for run in runs])
            for name in STRESSES
            if (runs := [run for run in runs_of(table, method, name) if "tokens" in run])
        }
        if "none" in spent:
            reached = f"{np.median(ends(table, method, 'none', 'reached')):.0f}"
            cells += [f"{spent['none']:.0f}", f"{max(spent.values()):.0f}"]
            told.append([method, *cells, reached.replace("inf", words["inf"])])
        else:
            told.append([method, *cells, none, none, none])
    return told


# Running


def every(rows: list[str], seeds: int, parted_in: dict | None = None) -> list[tuple]:
    """Jobs (seed, method, stress), a seed after the other; with a table only those of the bases,
    and of the cells that part from grpo.py on the first three seeds, with their controls."""
    jobs = [(seed, row, name) for seed in range(1, 1 + seeds) for row in rows for name in STRESSES]
    if parted_in is None:
        return jobs
    apart = {
        (row, name)
        for row in rows
        for name in STRESSES
        if row in BASES or parted(parted_in, row, name, seeds=SEEDS)
    }
    apart |= {(row, "none") for row, _ in apart}
    return [job for job in jobs if job[1:] in apart]


FORK = multiprocessing.get_context("fork")  # a run begins with torch loaded


def child(alone: int, *given: object) -> None:
    """A run, in a process group of its own, and without the descriptor that locks the folder: what
    outlives the race must not keep the next one out."""
    os.close(alone)
    os.setpgid(0, 0)
    stress.child(*given)


def stop(process: BaseProcess) -> None:
    """Kill a run, if it has not ended, and what it has started and left in its process group."""
    process.kill()
    process.join()
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)


def over(under_way: list[UnderWay]) -> list[UnderWay]:
    """Wait for runs that have ended, or that are killed because they are overdue.

    Every second we ask for the exit code: the sentinel alone would also wait for a process that the
    run has started, and that has left its group.
    """
    while True:
        wait([one.process.sentinel for one in under_way], timeout=1)
        now = time.monotonic()
        found = [one for one in under_way if one.process.exitcode is not None or now > one.until]
        if found:
            return found


def result(one: UnderWay, acted: str, steps: int) -> tuple[dict, str]:
    """What a run that is over came to, and the same in a word. BadInput if it broke."""
    overdue = one.process.exitcode is None
    stop(one.process)
    if overdue:
        raise BadInput(f"broke: killed, it was still at work after {LONGEST:g} seconds")
    with blame("broke: its metrics.jsonl cannot be scored"):
        found = stress.outcome(Path(one.folder.name), one.process.exitcode, acted, steps)
        if "refused" in found:
            return found, found["refused"]
        return found, found.get("stopped") or f"{score(found)['end']:.3f}"


def run(
    jobs: list[tuple],
    rows: dict[str, Method],
    path: Path,
    part: str = "cells",
    stresses: dict[str, Stress] = STRESSES,
    workers: int = 2,
    steps: int = stress.STEPS,
) -> int:
    """Run the jobs (seed, method, stress) that the table does not have, in their order; returns how
    many broke. Each is a fork of this process, and is in the table when it is over."""
    path.parent.mkdir(parents=True, exist_ok=True)
    alone = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(f"{path}: another race writes there; wait, or give another --out") from None
    under_way: list[UnderWay] = []
    broken, start = 0, time.time()

    def end_some() -> int:
        """Keep what the next runs to end came to; returns how many of them broke."""
        errors = 0
        for one in over(under_way):
            under_way.remove(one)
            seed, method, name = one.job
            acted = next(iter(stress.loaded(rows[method].file).ACTED))
            try:
                found, text = result(one, acted, steps)
                keep(path, table, one.job, found, part)
            except BadInput as error:
                errors, text = errors + 1, first_line(error)
            one.folder.cleanup()
            print(f"{time.time() - start:6.0f} s  {method}, {name}, seed {seed}: {text}")
            sys.stdout.flush()
        return errors

    try:
        table = stored(path)
        for method in dict.fromkeys(method for _, method, _ in jobs):
            stress.loaded(rows[method].file)  # now: what changes on the disk meanwhile is not mixed
        for job in jobs:
            seed, method, name = job
            if any(run["seed"] == seed for run in runs_of(table, method, name, part)):
                continue
            if len(under_way) == workers:
                broken += end_some()
            file, flags = rows[method]
            module, folder = stress.loaded(file), tempfile.TemporaryDirectory(prefix="race-")
            given = alone, module, flags, stresses[name], seed, Path(folder.name), steps
            process = FORK.Process(target=child, args=given, daemon=True)
            process.start()
            under_way.append(UnderWay(process, job, folder, time.monotonic() + LONGEST))
        while under_way:
            broken += end_some()
    finally:
        for one in under_way:
            stop(one.process)
            one.folder.cleanup()
        os.close(alone)
    return broken


# Pages and picture


def between(page: str, name: str, text: str) -> str:
    """What stands between `<!--name-->` and `<!--/name-->`, replaced."""
    marks = rf"(<!--{name}-->\n).*?(<!--/{name}-->)"
    return re.sub(marks, lambda found: f"{found[1]}{text}\n{found[2]}", page, flags=re.DOTALL)


def counts(table: dict) -> list[str]:
    """How far the matrix is: its runs, its cells with three seeds, all its cells."""
    done = sum(len(one["runs"]) for one in table["cells"] if one["method"] in methods())
    cells = [len(runs_of(table, row, name)) for row in methods() for name in STRESSES]
    return [str(done), str(sum(count >= SEEDS for count in cells)), str(len(cells))]


def pilot_lines(table: dict) -> list[list[str]]:
    """What the pilot found: score and fall of each run."""
    told = []
    for name in PILOT:
        if runs := [score(run) for run in runs_of(table, "grpo", name, "pilot")]:
            cells = (" / ".join(f"{run[key]:.2f}" for run in runs) for key in ("end", "fall"))
            told.append([f"`{name}`", *cells])
    return told


def late(table: dict, method: str, name: str) -> dict[str, float]:
    """What the cell's runs were like in their last steps: the median of each metric."""
    runs = [run["late"] for run in runs_of(table, method, name) if "late" in run]
    return {key: float(np.median([run[key] for run in runs])) for key in runs[0]} if runs else {}


def rank(table: dict, name: str, key: str) -> str:
    """Over the rows that have the cell: Spearman's correlation of a metric in the last steps and
    the score, both the medians of a row."""
    rows = [row for row in methods() if key in late(table, row, name)]
    two = [[late(table, row, name)[key] for row in rows]]
    two += [[float(np.median(ends(table, row, name))) for row in rows]]
    orders = np.argsort(np.argsort(two))  # [2, rows]: the place of each
    return f"{np.corrcoef(orders)[0, 1]:.2f}" if len(rows) > 2 else "–"


def late_lines(table: dict, method: str = "grpo") -> list[list[str]]:
    """The same of a row's cells."""
    rows = [(name, late(table, method, name)) for name in STRESSES]
    return [[f"`{name}`", *(f"{v:.2g}" for v in found.values())] for name, found in rows if found]


def apart(table: dict, row: str, sign: str, others: Iterable[str], of: Callable = ends) -> str:
    """The stresses under which a row has this sign against the first of the others; in bold where
    it has it against all of several."""
    names = []
    for name in STRESSES:
        signs = [parted(table, row, name, other, of) for other in others]
        bold = "**" * (len(signs) > 1 and all(one.startswith(sign) for one in signs))
        if signs[0].startswith(sign):
            names.append(f"{bold}`{name}`{bold}{signs[0][1:]}")
    return ", ".join(names) or "–"


def parted_lines(table: dict) -> list[list[str]]:
    """Layer by layer, for each row that was begun: where it lies above plain grpo.py, in bold where
    above all bases; where it loses less than grpo.py does; and both the other way round."""
    told, begun = [], {one["method"] for one in table["cells"]} - {"grpo"}
    for layer, row in ((layer, row) for layer, rows in LAYERS.items() for row in rows):
        if row in begun:
            bases = [base for base in BASES if base != row]
            lists = [apart(table, row, s, bases, of) for s in "+-" for of in (ends, kept_part)]
            told.append([layer, f"`{row}`", *lists])
    return told


def base_lines(table: dict) -> list[list[str]]:
    """The same of each file whose base file is not grpo.py, against that base file: the two
    differ in what the file's head lists, and in nothing else."""
    told = []
    for layer, row in ((layer, row) for layer, rows in LAYERS.items() for row in rows):
        base = base_of(methods()[row].file)
        if base and base.stem != "grpo":
            lists = [apart(table, row, sign, [base.stem]) for sign in "+-"]
            told.append([layer, f"`{row}`", f"`{base.stem}`", *lists])
    return told


def equal_lines(table: dict) -> list[list[str]]:
    """Of the rows that take a fifth more tokens than grpo.py: medians at grpo.py's tokens."""
    told, spent = [], {}
    for row in methods():
        runs = [run["tokens"] for run in runs_of(table, row, "none") if "tokens" in run]
        spent[row] = np.median(runs or [0.0])
        if spent[row] > DEARER * spent["grpo"]:
            cells = []
            for name in STRESSES:
                values = equal(table, row, name)
                sign = parted(table, row, name, of=equal)
                cells.append(f"{np.median(values):.2f} {sign}".strip() if values else "–")
            told.append([f"`{row}`", *cells])
    return told


def quotes(table: dict, told: list[list[str]]) -> dict[str, str]:
    """What a text may quote: `ROW/COLUMN` of the matrix (`told`, its lines); of a cell also
    `/METRIC` in the last steps and `/equal`, at equal tokens; `rank/STRESS/METRIC`; the counts."""
    quoted = {f"{row[0]}/{name}": text for row in told[1:] for name, text in zip(told[0], row)}
    for row, *cells in equal_lines(table):
        for name, text in zip(STRESSES, cells):
            quoted[f"{row.strip('`')}/{name}/equal"] = text
    for name in STRESSES:
        for key in stress.DIARY:
            quoted[f"rank/{name}/{key}"] = rank(table, name, key)
        for row in methods():
            for key, value in late(table, row, name).items():
                quoted[f"{row}/{name}/{key}"] = f"{value:.2g}"
    for arm, (*_, name) in ARMS.items():
        found = [score(run)["end"] for run in runs_of(table, arm, name, "arms")]
        quoted[f"{arm}/{name}"] = f"{np.median(found):.2f}" if found else "–"
    return quoted | dict(zip(("runs/done", "cells/done", "cells/all"), counts(table)))


def filled(page: str, table: dict, words: dict) -> str:
    """The page with the matrix (the rows that were begun), the pilot and every quoted cell as the
    table has them."""
    told, begun = lines(table, words), {one["method"] for one in table["cells"]}
    shown = [[f"`{row[0]}`", *row[1:]] for row in told[1:] if row[0] in begun]
    head = [f"`{text}`" if text in STRESSES else text for text in told[0]]
    page = between(page, "matrix", lab.markdown([head, *shown]))
    parts = {"pilot": pilot_lines, "parted": parted_lines, "bases": base_lines}
    parts |= {"equal": equal_lines, "late": late_lines}
    for name, rows in ((name, of(table)) for name, of in parts.items()):
        if found := re.search(rf"<!--{name}-->\n(.*)\n", page):  # its head stays as it is
            head = [part.strip() for part in found[1].strip("|").split("|")]
            page = between(page, name, lab.markdown([head, *rows]))
    quoted = quotes(table, told)
    return re.sub(
        r"-?\d[\d.e+-]*<!--([^/][^>]*?/[^>]+?)-->",  # the number alone: Chinese has no spaces
        lambda m: f"{quoted[m[1]].split(' ')[0]}<!--{m[1]}-->",
        page,
    )


def draw(table: dict, names: Iterable = ()) -> object:
    """The matrix as a heat map: dark is low, in grey as well; a number in every cell, and each
    row's layer beside it."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    names = list(names or methods())
    figure = Figure(figsize=(11.5, 1.6 + 0.27 * len(names)), layout="constrained")
    axis, colours = figure.subplots(), colormaps["cividis"]
    heads = [*STRESSES, "worst cell"]
    for y, method in enumerate(names):
        low = worst(table, method)
        for x, name in enumerate(heads):
            values = [low[0]] if x == len(STRESSES) and low else []
            if x < len(STRESSES):
                values = ends(table, method, name)
            few = x < len(STRESSES) and len(values) < SEEDS
            if not values:  # hatched: no shade of the scale
                look = {"fill": False, "hatch": "////", "edgecolor": "#cccccc", "linewidth": 0}
                axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **look))
                continue
            middle = float(np.median(values))
            shade = min(1.0, max(0.0, (middle - DARK) / (LIGHT - DARK)))
            look = {"facecolor": colours(shade), "edgecolor": "white"}
            axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **look))
            text = f"{middle:.2f}"
            if x < len(STRESSES):
                text += f" {parted(table, method, name)}".rstrip() + "○" * idle(table, method, name)
            colour = "black" if shade > 0.5 else "white"
            look = {"ha": "center", "va": "center", "fontsize": 7 if few else 8.5}
            axis.text(x, y, text, color=colour, style="italic" if few else "normal", **look)
    axis.axvline(len(STRESSES) - 0.5, color="black", linewidth=2)
    axis.set(xlim=(-0.5, len(heads) - 0.5), ylim=(len(names) - 0.5, -0.5))
    axis.set_xticks(range(len(heads)), [head.replace(" ", "\n", 1) for head in heads], fontsize=9)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    for layer, rows in LAYERS.items():
        if places := [names.index(row) for row in rows if row in names]:
            axis.axhline(max(places) + 0.5, color="white", linewidth=4)
            at, look = np.mean(places), {"ha": "left", "va": "center", "fontsize": 9}
            axis.text(len(heads) - 0.4, at, layer, color="#444444", style="italic", **look)
    axis.tick_params(length=0, labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)
    words = "medians of three seeds, or of five (small: of fewer); + or -: all seeds above, or all "
    words += "below, all of grpo's (?: not yet five)\n○: the file's own metric was 0 in all runs; "
    words += "hatched: not yet, or refused"
    axis.set_xlabel(words, fontsize=9, loc="left")
    lab.entitle(figure, "What is left of held-out accuracy under each stress")
    return figure


def redraw(table: dict) -> None:
    """The pictures, and the pages' tables and numbers."""
    for which, path in PICTURES.items():
        rows = half(which)
        if not any(one["method"] in rows for one in table["cells"]):
            continue
        rows = rows if "grpo" in rows else ["grpo", *rows]
        with whole(path) as partial:
            look = {"dpi": 130, "format": "png", "metadata": {"Software": None}}
            draw(table, rows).savefig(partial, **look)
    for language, path in PAGES.items():
        if path.exists():
            page = filled(path.read_text("utf-8"), table, WORDS[language])
            path.write_text(page, encoding="utf-8")


# The race


def difference(file: Path) -> str:
    """How a file differs from its base file, in a line."""
    base = base_of(file)
    if base is None:
        return f"{file.name} is the first base file"
    loose, changed = changes(file, base)
    marked = "all marked" if not loose else f"{len(loose)} lines without a mark"
    return f"{file.name}: {changed} code lines differ from {base.name}, {marked}"


def try_to_load(file: Path, said: Connection) -> None:
    """Load a file, and say that this process is still there."""
    with contextlib.suppress(BaseException):  # its words are for the process that loads it next
        stress.loaded(file)
    said.send(True)


def survives(file: Path) -> None:
    """BadInput if loading a file ends the process that does so, or never ends."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=try_to_load, args=(file, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(LOADING):
            raise BadInput(f"{file}: still loading after {LOADING:g} seconds")
        ours.recv()
    except EOFError:
        raise BadInput(f"{file}: ends the process that loads it") from None
    finally:
        stop(process)


def entered(words: argparse.Namespace) -> int:
    """Run a file's row, print it beside the others; returns how many of its runs broke."""
    file = Path(words.file).resolve()
    if not file.is_file():
        raise BadInput(f"{words.file}: no such file")
    survives(file)
    acted = stress.loaded(file).ACTED  # BadInput if it is none of ours
    with blame(f"{file}: its marks or its base file"):
        differs = difference(file)
    shipped = stored(TABLE)
    # Another text, other flags or another house are another method: their runs are not mixed.
    house = [*sorted((ROOT / "common").rglob("*.py")), Path(stress.__file__)]
    texts = b"".join(path.read_bytes() for path in [file, *house])
    key = hashlib.sha256(texts + words.flags.encode()).hexdigest()[:8]
    name = f"{file.stem} {words.flags}".strip()
    name = f"{name} (yours)" if name in methods() else name
    rows = {name: Method(file, words.flags)}
    kind = ".smoke" * words.smoke or ".record" * words.record
    path = words.out / f"{file.stem}-{key}{kind}.json"
    if words.smoke:
        path.unlink(missing_ok=True)
    seeds = RECORD if words.record else range(1, 1 + (1 if words.smoke else words.seeds))
    jobs = [(seed, name, one) for seed in seeds for one in STRESSES]
    steps = SHORT if words.smoke else stress.STEPS
    broken = run(jobs, rows, path, workers=words.workers, steps=steps)
    own = stored(path)
    refused = [run.get("refused") for one in own["cells"] for run in one["runs"]]
    if refused and all(refused):  # flags that nothing accepts are no row
        path.unlink()
        raise BadInput(refused[0])
    table = {"cells": own["cells"] + shipped["cells"]}
    order = sorted(methods(), key=lambda one: -(worst(shipped, one) or (-1, ""))[0])
    names = [name] if words.smoke else [name, *order]
    if words.smoke:
        print(SMOKE)
    print(lab.text(lines(table, WORDS["en"], ranges=False, names=names)))
    for one in STRESSES:
        if idle(own, name, one):
            print(f"under {one}: {next(iter(acted))} was 0 in all runs: the method never acted")
    low, all_ = worst(own, name), [end for one in STRESSES for end in ends(own, name, one)]
    if low and not words.smoke:
        held = "all hold" if min(all_) >= START else "not all hold"
        print(f"lowest of {len(all_)} runs: {min(all_):.2f}, {held} (begun at {START})")
        print(f"worst cell: {low[0]:.2f}, under {low[1]}")
        print(place(own, name, {other: shipped for other in methods()}), "by the worst cell")
        if words.record:
            print(f"a record is decided against {order[0]}, by the same command for its file")
    tokens = [run["tokens"] for one in own["cells"] for run in one["runs"] if "tokens" in run]
    print(f"{differs}; {np.mean(tokens or [0]):.0f} thousand tokens a run", path, sep="\n")
    return broken


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="labs.race",
        usage=argparse.SUPPRESS,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", help="a file in the form of grpo.py")
    parser.add_argument("--flags", default="", help='flags of its own: --flags="--lr 1e-4"')
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default: 1 to {SEEDS}")
    record = f"seeds {RECORD[0]} to {RECORD[-1]}, which decide a record"
    parser.add_argument("--record", action="store_true", help=record)
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    parser.add_argument("--matrix", action="store_true", help="all rows, into our table")
    parser.add_argument("--pilot", action="store_true", help="how strengths were chosen, too")
    parser.add_argument("--redraw", action="store_true", help="only pages and picture")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("runs/race"), help="default: runs/race")
    words = parser.parse_args()
    asked = [bool(words.file), words.matrix, words.pilot, words.redraw]
    if sum(asked) != 1 or min(words.seeds, words.workers) < 1:
        parser.error("give one of FILE, --matrix, --pilot, --redraw; --seeds, --workers 1 or more")
    return words


def main() -> None:
    lab.survive_the_terminal()
    words, broken = parsed(), 0
    workers = words.workers
    # The runs under way end with us: on SIGTERM, and where the terminal is closed (not under nohup)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        if words.file:
            broken = entered(words)
        if words.pilot:
            jobs = [(seed, "grpo", name) for seed in PILOT_SEEDS for name in PILOT]
            broken = run(jobs, methods(), TABLE, "pilot", PILOT, workers)
        if words.matrix:
            for which in PICTURES:  # the variants last: a table that is half there says something
                broken += run(every(half(which), words.seeds), methods(), TABLE, workers=workers)
            for which in PICTURES:
                jobs = every(half(which), DECIDED, stored(TABLE))
                broken += run(jobs, methods(), TABLE, workers=workers)
            seeds = range(1, 1 + DECIDED)
            jobs = [(seed, arm, under) for arm, (*_, under) in ARMS.items() for seed in seeds]
            broken += run(jobs, arms(), TABLE, "arms", workers=workers)
        if not words.file:
            redraw(stored(TABLE))
    except (BadInput, OSError) as error:
        print(f"labs.race: error: {first_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        kept = "runs that ended are kept, and the same command goes on from there"
        print(f"labs.race: interrupted; {kept}", file=sys.stderr)
        sys.exit(130)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
