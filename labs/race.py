"""Every file under every stress (labs/stress.py), and a race that anybody can enter.

    python -m labs.race my_method.py      a file in the form of grpo.py: its row, and its place
    python -m labs.race --matrix          all rows of docs/stability.md: hours
    python -m labs.race --redraw          the pages and the picture, from the table that is there

A run that was finished is kept, and the same command goes on from there. Rules and scores:
docs/stability.md.
"""

import argparse
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
from collections.abc import Iterable
from datetime import date
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from common.distributed import BadInput, first_line
from common.plumbing.folder import whole
from tools.marks import ROOT, algorithms, changes, trunk_of

from labs import lab, stress
from labs.stress import STRESSES, Stress

TABLE = ROOT / "labs/tables/stability.json"
PAGES = {"en": ROOT / "docs/stability.md", "zh": ROOT / "docs/zh/stability.md"}
PICTURE = ROOT / "docs/stability.png"
SEEDS, RECORD, LAST = 3, 10, 3  # seeds of a row, of a record; the last three measurements
START, GOAL = 0.5, 0.8  # accuracy before training, and to be reached
QUICK = 10  # steps, of one seed: shows nothing
SMOKE = "QUICK: ten steps of one seed, far too short to show anything"
REPAIRS = {  # what a sceptic tries first
    "grpo, lr/3": "--lr 1e-4",
    "grpo, 10 β": "--beta 0.1",
    "grpo, 1 update": "--minibatches 1",
    "grpo, clip 0.05": "--clip_low 0.05 --clip_high 0.05",
}
# grpo.py alone, before any other file was run, on a seed that the matrix does not use
PILOT_SEEDS = (101,)
PILOT = {"old sampler, 8": Stress(every=8), "coarse sampler, 3": Stress(levels=3)} | STRESSES
TAIL = ("worst", "fall", "tokens", "reached")  # columns behind the stresses
WORDS = {
    "en": {"method": "method", "not yet": "not yet", "refused": "refuses", "inf": "never"}
    | dict(zip(TAIL, ("worst cell", "largest fall", "thousand tokens", "of them to 0.8"))),
    "zh": {"method": "方法", "not yet": "还没跑", "refused": "拒绝运行", "inf": "没有到达"}
    | dict(zip(TAIL, ("最差的一格", "最大的回落", "千 token", "其中到 0.8"))),
}


class Method(NamedTuple):
    """A row: a file, and flags of its own."""

    file: Path
    flags: str = ""


def methods() -> dict[str, Method]:
    """All rows, by name: the first trunk and its cheap repairs, the root, the variants."""
    first, *others = algorithms()
    rows = {first.stem: Method(first)} | {n: Method(first, f) for n, f in REPAIRS.items()}
    return rows | {path.stem: Method(path) for path in others}


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


def worst(table: dict, method: str) -> tuple[float, str] | None:
    """The row's lowest median and its stress; None while a cell has no run. What a file refuses
    to run is no cell."""
    found = []
    for name in STRESSES:
        if not runs_of(table, method, name):
            return None
        if cell := ends(table, method, name):
            found.append((float(np.median(cell)), name))
    return min(found) if found else None


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


def parted(table: dict, method: str, name: str, from_: str = "grpo") -> str:
    """`+` or `-` where all seeds lie above or below all of plain grpo.py under the same stress;
    nothing within its spread, or with fewer than three seeds."""
    one, other = (ends(table, who, name) for who in (method, from_))
    if min(len(one), len(other)) < SEEDS or method == from_:
        return ""
    return "+" if min(one) > max(other) else "-" if max(one) < min(other) else ""


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
        control = [run for run in runs_of(table, method, "none") if "tokens" in run]
        tokens = f"{np.median([run['tokens'] for run in control]):.0f}" if control else none
        reached = f"{np.median([score(run)['reached'] for run in control] or [0]):.0f}"
        told.append(
            [method, *cells, tokens, reached.replace("inf", words["inf"]) if control else none]
        )
    return told


# Running


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
    fork, under_way, broken, start = multiprocessing.get_context("fork"), {}, 0, time.time()

    def end_one() -> int:
        errors = 0
        for sentinel in wait(list(under_way)):
            process, job, folder = under_way.pop(sentinel)
            process.join()
            acted = next(iter(stress.loaded(rows[job[1]].file).ACTED))
            try:
                found = stress.outcome(Path(folder.name), process.exitcode, acted, steps)
                keep(path, table, job, found, part)
                text = found.get("stopped") or found.get("refused") or f"{score(found)['end']:.3f}"
            except BadInput as error:
                errors, text = errors + 1, first_line(error)
            folder.cleanup()
            print(f"{time.time() - start:6.0f} s  {job[1]}, {job[2]}, seed {job[0]}: {text}")
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
                broken += end_one()
            file, flags = rows[method]
            module, folder = stress.loaded(file), tempfile.TemporaryDirectory(prefix="race-")
            given = module, flags, stresses[name], seed, Path(folder.name), steps
            process = fork.Process(target=stress.child, args=given, daemon=True)
            process.start()
            under_way[process.sentinel] = process, job, folder
        while under_way:
            broken += end_one()
    finally:
        for process, _, folder in under_way.values():
            process.kill()
            process.join()
            folder.cleanup()
        os.close(alone)
    return broken


# Pages and picture


def between(page: str, name: str, text: str) -> str:
    """What stands between `<!--name-->` and `<!--/name-->`, replaced."""
    marks = rf"(<!--{name}-->\n).*?(<!--/{name}-->)"
    return re.sub(marks, lambda found: f"{found[1]}{text}\n{found[2]}", page, flags=re.DOTALL)


def counts(table: dict) -> list[str]:
    """How far the matrix is: runs that are there, and that there will be."""
    done = sum(len(one["runs"]) for one in table["cells"] if one["method"] in methods())
    return [str(done), str(len(methods()) * len(STRESSES) * SEEDS)]


def pilot_lines(table: dict) -> list[list[str]]:
    """What the pilot found: score and fall of each run."""
    told = []
    for name in PILOT:
        if runs := [score(run) for run in runs_of(table, "grpo", name, "pilot")]:
            cells = (" / ".join(f"{run[key]:.2f}" for run in runs) for key in ("end", "fall"))
            told.append([f"`{name}`", *cells])
    return told


def parted_lines(table: dict, words: dict) -> list[list[str]]:
    """For each stress the rows that lie apart from plain grpo.py: all above, all below; and how
    many rows have the seeds to say so."""
    told = []
    for name in STRESSES:
        signs = {method: parted(table, method, name) for method in methods()}
        lists = [
            ", ".join(f"`{method}`" for method, sign in signs.items() if sign == which) or "–"
            for which in "+-"
        ]
        known = [method for method in signs if len(ends(table, method, name)) >= SEEDS]
        few = len(ends(table, "grpo", name)) < SEEDS or known == ["grpo"]
        told.append([f"`{name}`", *([words["not yet"]] * 2 if few else lists), str(len(known))])
    return told


def filled(page: str, table: dict, words: dict) -> str:
    """The page with the matrix, the pilot and every quoted cell as the table has them."""
    told = lines(table, words)
    shown = [[text if i else f"`{text}`" for i, text in enumerate(row)] for row in told[1:]]
    head = [f"`{text}`" if text in STRESSES else text for text in told[0]]
    page = between(page, "matrix", lab.markdown([head, *shown]))
    for name, rows in (("pilot", pilot_lines(table)), ("parted", parted_lines(table, words))):
        if found := re.search(rf"<!--{name}-->\n(.*)\n", page):  # its head stays as it is
            head = [part.strip() for part in found[1].strip("|").split("|")]
            page = between(page, name, lab.markdown([head, *rows]))
    quoted = {f"{row[0]}/{name}": text for row in told[1:] for name, text in zip(told[0], row)}
    quoted |= dict(zip(("runs/done", "runs/all"), counts(table)))
    return re.sub(
        r"[^\s(（，。]+<!--([^/][^>]*?/[^>]+?)-->",
        lambda m: f"{quoted[m[1]].split(' ')[0]}<!--{m[1]}-->",
        page,
    )


def draw(table: dict, names: Iterable = ()) -> object:
    """The matrix as a heat map: dark is low, in grey as well; a number in every cell."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    names = list(names or methods())
    figure = Figure(figsize=(11, 1.6 + 0.27 * len(names)), layout="constrained")
    axis, shades = figure.subplots(), colormaps["cividis"]
    heads = [*STRESSES, "worst cell"]
    for y, method in enumerate(names):
        low = worst(table, method)
        for x, name in enumerate(heads):
            values = [low[0]] if x == len(STRESSES) and low else []
            if x < len(STRESSES):
                values = ends(table, method, name)
            if not values:  # hatched: no shade of the scale
                look = {"fill": False, "hatch": "////", "edgecolor": "#cccccc", "linewidth": 0}
                axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **look))
                continue
            middle = float(np.median(values))
            look = {"facecolor": shades(middle), "edgecolor": "white"}
            axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **look))
            ring = "○" * (x < len(STRESSES) and idle(table, method, name))
            text = f"{middle:.2f}{ring}"
            colour = "black" if middle > 0.5 else "white"
            axis.text(x, y, text, ha="center", va="center", fontsize=8.5, color=colour)
    axis.axvline(len(STRESSES) - 0.5, color="black", linewidth=2)
    axis.set(xlim=(-0.5, len(heads) - 0.5), ylim=(len(names) - 0.5, -0.5))
    axis.set_xticks(range(len(heads)), [head.replace(" ", "\n", 1) for head in heads], fontsize=9)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.tick_params(length=0, labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)
    done, all_ = counts(table)
    words = f"median of the seeds' scores; {done} of {all_} runs; hatched: not yet, or refused"
    axis.set_xlabel(f"{words}; ○: the file's own mechanism never acted", fontsize=9, loc="left")
    lab.entitle(figure, "What is left of held-out accuracy under each stress")
    return figure


def redraw(table: dict) -> None:
    """The picture, and the pages' tables and numbers."""
    with whole(PICTURE) as partial:
        draw(table).savefig(partial, dpi=130, format="png", metadata={"Software": None})
    for language, path in PAGES.items():
        if path.exists():
            page = filled(path.read_text("utf-8"), table, WORDS[language])
            path.write_text(page, encoding="utf-8")


# The race


def difference(file: Path) -> str:
    """How a file differs from its trunk, in a line."""
    trunk = trunk_of(file)
    if trunk is None:
        return f"{file.name} is the first trunk"
    loose, changed = changes(file, trunk)
    marked = "all marked" if not loose else f"{len(loose)} lines without a mark"
    return f"{file.name}: {changed} code lines differ from {trunk.name}, {marked}"


def entered(words: argparse.Namespace) -> int:
    """Run a file's row, print it beside the others; returns how many of its runs broke."""
    file = Path(words.file).resolve()
    if not file.is_file():
        raise BadInput(f"{words.file}: no such file")
    acted = stress.loaded(file).ACTED  # BadInput if it is none of ours
    # Another text or other flags are another method: nothing of it is mixed with the old one's.
    key = hashlib.sha256(file.read_bytes() + words.flags.encode()).hexdigest()[:8]
    name = f"{file.stem} {words.flags}".strip()
    name = f"{name} (yours)" if name in methods() else name
    rows = {name: Method(file, words.flags)}
    path = words.out / f"{file.stem}-{key}{'.quick' * words.quick}.json"
    if words.quick:
        path.unlink(missing_ok=True)
    seeds = range(1, 1 + (1 if words.quick else words.seeds))
    jobs = [(seed, name, one) for seed in seeds for one in STRESSES]
    steps = QUICK if words.quick else stress.STEPS
    broken = run(jobs, rows, path, workers=words.workers, steps=steps)
    own, shipped = stored(path), stored(TABLE)
    table = {"cells": own["cells"] + shipped["cells"]}
    order = sorted(methods(), key=lambda one: -(worst(shipped, one) or (-1, ""))[0])
    names = [name] if words.quick else [name, *order]
    if words.quick:
        print(SMOKE)
    print(lab.text(lines(table, WORDS["en"], ranges=False, names=names)))
    for one in STRESSES:
        if idle(own, name, one):
            print(f"under {one}: {next(iter(acted))} was 0 in all runs: the method never acted")
    low, all_ = worst(own, name), [end for one in STRESSES for end in ends(own, name, one)]
    if low and not words.quick:
        held = "all hold" if min(all_) >= START else "not all hold"
        print(f"lowest of {len(all_)} runs: {min(all_):.2f}, {held} (begun at {START})")
        print(f"worst cell: {low[0]:.2f}, under {low[1]}")
        print(place(own, name, {other: shipped for other in methods()}), "by the worst cell")
    tokens = [run["tokens"] for one in own["cells"] for run in one["runs"] if "tokens" in run]
    print(f"{difference(file)}; {np.mean(tokens or [0]):.0f} thousand tokens a run", path, sep="\n")
    return broken


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="labs.race",
        usage=argparse.SUPPRESS,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", help="a file in the form of grpo.py")
    parser.add_argument("--flags", default="", help="flags of its own, in quotes")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default: 1 to {SEEDS}")
    record = f"seeds 1 to {RECORD}, which decide a record"
    parser.add_argument("--record", action="store_const", const=RECORD, dest="seeds", help=record)
    parser.add_argument("--quick", action="store_true", help=SMOKE)
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the runs under way end with us
    try:
        if words.file:
            broken = entered(words)
        if words.pilot:
            jobs = [(seed, "grpo", name) for seed in PILOT_SEEDS for name in PILOT]
            broken = run(jobs, methods(), TABLE, "pilot", PILOT, words.workers)
        if words.matrix:
            seeds = range(1, 1 + words.seeds)
            jobs = [
                (seed, method, name) for seed in seeds for method in methods() for name in STRESSES
            ]
            broken = run(jobs, methods(), TABLE, workers=words.workers)
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
