"""Trains a file in the form of grpo.py under the stresses of labs/stresses.py, and ranks it.

    python -m labs.race my_method.py               three seeds: about half an hour
    python -m labs.race my_method.py --seeds 1 --steps 8 --out try.json       does it run at all?
    python -m labs.race grpo.py --model FOLDER --task gsm8k --steps 30 --out table.json
    python -m labs.race --table "lr x3"       every method's score, the best one first
    python -m labs.race --redraw              only the picture of the shipped table

FILE comes first. Flags that are not listed below are handed to every run. They make another race,
which needs another table; a table may have the rows of several files. Finished runs are kept, and
the same command continues after an interruption. docs/stability.md explains the scores.
"""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from checks.files import ROOT
from common.cli import BadInput, in_one_line
from common.launch import parse
from common.run import read_lines
from tools import arguments

from labs import lab
from labs.stresses import STRESSES, stressed

TABLE = ROOT / "labs/race/table.json"
# No run ends because its sampler differs from the trainer (the last flag): that is measured here.
BUDGET = "--steps 40 --prompts_per_step 16 --group_size 8 --eval_every 8 --eval_problems 256"
BUDGET += " --eval_samples 2 --sampler_tolerance 1e6"
SEEDS, ENOUGH = 3, 5  # of a cell; from ENOUGH on a sign has no question mark
LAST = 3  # measurements in a score
MILD = "mildly quantised sampler"  # not every row has it, so it is never the worst cell
LATE = 16  # last steps, whose means are stored with a run
DIARY = ("entropy", "zero_groups", "sampler_gap", "response_len", "grad_norm")


def stored(path: Path, budget: str) -> dict:
    """The table at `path`, or an empty one; BadInput if it is of another race."""
    if not path.exists():
        return {"budget": budget, "cells": []}
    table = json.loads(path.read_text(encoding="utf-8"))
    if table["budget"] != budget:
        raise BadInput(f"{path}: measured with {table['budget']}; give another --out")
    return table


def runs_of(table: dict, method: str, stress: str) -> list[dict]:
    """The finished runs of a cell, by seed."""
    for cell in table["cells"]:
        if (cell["method"], cell["stress"]) == (method, stress):
            return cell["runs"]
    return []


def keep(path: Path, table: dict, method: str, stress: str, run: dict) -> None:
    """Add a finished run to the table and write it."""
    runs = runs_of(table, method, stress)
    if not runs:
        table["cells"].append({"method": method, "stress": stress, "runs": runs})
    runs.append(run)
    runs.sort(key=lambda one: one["seed"])
    lab.write(path, table)


def last_value(words: str, flag: str) -> int:
    """The number behind the last `flag`, which is the one that counts."""
    return int(words.rpartition(f"{flag} ")[2].split()[0])


def measured(file: Path, flags: str, stress: str, seed: int, budget: str) -> dict:
    """One run in a new process -> what is stored of it, or why it `broke`."""
    rows = last_value(budget, "--prompts_per_step") * last_value(budget, "--group_size")
    words = shlex.split(f"{budget} {flags} {STRESSES[stress].flags(rows)} --seed {seed}")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    if "--model" not in budget:  # the embedded model: one thread of the CPU, in float32
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        run = f"{folder}/run"
        command = [sys.executable, "-m", "labs.stresses", str(file), stress, *words]
        command += ["--run_dir", run]
        output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        ended = subprocess.run(command, env=environment, **output)
        said = (ended.stderr.splitlines() or ["it printed no error"])[-1]
        return {"seed": seed} | outcome(Path(run), ended.returncode, said, budget)


def outcome(run: Path, code: int, said: str, budget: str) -> dict:
    """What is stored of a run: `sampled`, the accuracies after the steps `at`, with `thousands` of
    tokens sampled until then; means of the file's first ACTED metric, and of the last steps; or why
    it `broke`."""
    path = run / "metrics.jsonl"
    lines = read_lines(path) if path.exists() else []
    if code or not lines or lines[-1]["step"] != last_value(budget, "--steps"):
        return {"broke": f"exit code {code}: {said[-200:]}"}
    thousands = np.cumsum([line.get("tokens", 0) / 1000 for line in lines])
    places = [place for place, line in enumerate(lines) if "sampled" in line]
    stored_run = {
        "at": [lines[place]["step"] for place in places],
        "sampled": [round(lines[place]["sampled"], 4) for place in places],
        "thousands": [round(float(thousands[place]), 3) for place in places],
        "tokens": round(float(thousands[-1]), 1),
    }
    acted = next(iter(json.loads((run / "config.json").read_text())["acted"]))
    late = {name: mean(lines[-LATE:], name) for name in DIARY}
    return stored_run | {"acted": mean(lines, acted), "late": late}


def mean(lines: list[dict], name: str) -> float:
    """Of a metric over steps, to three digits; a step without a value counts 0."""
    values = [line[name] or 0.0 for line in lines if name in line]
    return float(f"{sum(values) / max(1, len(values)):.3g}")


def run_row(name: str, file: Path, path: Path, budget: str, words: Namespace) -> int:
    """Run what the table lacks of a row, a seed after the other; returns how many runs broke."""
    table, broken = stored(path, budget), 0
    stresses = words.stresses or list(STRESSES)
    jobs = [(stress, seed) for seed in range(1, 1 + words.seeds) for stress in stresses]
    if "--task" in budget:  # which prompts are uninformative is known of arithmetic only
        jobs = [job for job in jobs if not STRESSES[job[0]].uninformative]
    jobs = [job for job in jobs if job[1] not in [r["seed"] for r in runs_of(table, name, job[0])]]
    with ThreadPoolExecutor(words.workers) as pool:
        runs = pool.map(lambda job: measured(file, words.flags, *job, budget), jobs)
        for (stress, seed), run in zip(jobs, runs):
            if "broke" in run:
                broken += 1
            else:
                keep(path, table, name, stress, run)
            verdict = run.get("broke") or f"{score(run):.3f}"
            print(f"{name}, {stress}, seed {seed}: {verdict}", flush=True)
    return broken


def score(run: dict) -> float:
    """The mean accuracy of the last three measurements."""
    return round(float(np.mean(run["sampled"][-LAST:])), 6)


def scores(table: dict, method: str, stress: str) -> list[float]:
    """Of a cell, by seed."""
    return [score(run) for run in runs_of(table, method, stress)]


def columns(table: dict) -> list[str]:
    """The stresses that the table has."""
    known = {one["stress"] for one in table["cells"]}
    return [stress for stress in STRESSES if stress in known]


def methods(table: dict) -> list[str]:
    """The methods that the table has."""
    return list(dict.fromkeys(one["method"] for one in table["cells"]))


def median(table: dict, method: str, stress: str) -> float | None:
    """Of a cell; of `worst cell` the lowest of the row. None where a cell has no run."""
    if stress == "worst cell":
        cells = [median(table, method, one) for one in columns(table) if one != MILD]
        return None if None in cells else min(cells)
    values = scores(table, method, stress)
    return float(np.median(values)) if values else None


def sign(table: dict, method: str, stress: str) -> str:
    """`+` or `-`: all seeds lie above or below all of grpo.py's; `?`: there are fewer than five."""
    ours, theirs = scores(table, method, stress), scores(table, "grpo", stress)
    few = min(len(ours), len(theirs))
    if few < SEEDS or method == "grpo":
        return ""
    doubt = "?" if few < ENOUGH else ""
    if min(ours) > max(theirs):
        return f"+{doubt}"
    return f"-{doubt}" if max(ours) < min(theirs) else ""


def cell(table: dict, method: str, stress: str, seeds: bool = True) -> str:
    """`0.85 (0.82–0.86) +?`: median, lowest and highest seed, sign."""
    middle, values = median(table, method, stress), scores(table, method, stress)
    if middle is None:
        return "–"
    spread = f" ({min(values):.2f}–{max(values):.2f})" if seeds and values else ""
    return f"{middle:.2f}{spread} {sign(table, method, stress)}".rstrip()


def ranking(table: dict, method: str) -> list[list[str]]:
    """A line for each stress: the method's score, grpo.py's, and the method's place."""
    rows = [["stress", method, "grpo", "place"]]
    for stress in [*columns(table), "worst cell"]:
        ours = median(table, method, stress)
        values = [median(table, name, stress) for name in methods(table)]
        known = [value for value in values if value is not None]
        place = 1 + sum(value > ours for value in known) if ours is not None else "–"
        cells = [cell(table, name, stress) for name in (method, "grpo")]
        rows.append([stress, *cells, f"{place} of {len(known)}"])
    return rows


def at_equal_tokens(table: dict, method: str, stress: str) -> float:
    """A cell's median score, had its runs been measured when they had sampled as many tokens as
    grpo.py's runs had (their median) at the measurements of a score."""
    of_grpo = [run["thousands"][-LAST:] for run in runs_of(table, "grpo", stress)]
    spent = np.median(of_grpo, axis=0)  # [LAST]
    runs = runs_of(table, method, stress)
    return float(np.median([np.interp(spent, r["thousands"], r["sampled"]).mean() for r in runs]))


def standings(table: dict, stress: str) -> list[list[str]]:
    """A line for each method that was run under this stress, the best one first."""
    others = [other for other in ("none", "worst cell") if other != stress]
    rows = [["method", stress, "at grpo's tokens", *others, "thousand tokens"]]
    names = [name for name in methods(table) if runs_of(table, name, stress)]
    for name in sorted(names, key=lambda name: -median(table, name, stress)):
        tokens = np.median([run["tokens"] for run in runs_of(table, name, stress)])
        equal = at_equal_tokens(table, name, stress)
        beside = [cell(table, name, other, seeds=False) for other in others]
        rows.append([name, cell(table, name, stress), f"{equal:.2f}", *beside, f"{tokens:.0f}"])
    return rows


def draw(table: dict, path: Path) -> None:
    """A heat map of all rows, dark for low, with a number in every cell."""
    from matplotlib.figure import Figure  # here: it takes a second

    names, heads = methods(table), [*columns(table), "worst cell"]
    medians = [[median(table, name, head) for head in heads] for name in names]
    figure = Figure(figsize=(12.5, 2.0 + 0.27 * len(names)), layout="constrained")
    axis = figure.subplots()
    shades = np.array(medians, float)  # None becomes NaN: a blank cell
    axis.pcolormesh(shades, cmap="cividis", vmin=0.3, vmax=0.9, edgecolors="white")
    for y, name in enumerate(names):
        for x, head in enumerate(heads):
            words = cell(table, name, head, seeds=False)
            colour = "white" if words < "0.60" else "black"
            axis.text(x + 0.5, y + 0.5, words, color=colour, ha="center", va="center")
    axis.set_xticks(np.arange(len(heads)) + 0.5, [textwrap.fill(head, 13) for head in heads])
    axis.set_yticks(np.arange(len(names)) + 0.5, names)
    axis.invert_yaxis()
    axis.axvline(len(heads) - 1, color="black", linewidth=2)
    axis.tick_params(length=0, labeltop=True, labelbottom=False)
    words = "Medians over seeds. + or -: all seeds above, or below, all of grpo's (?: fewer than 5)"
    axis.set_xlabel(words, loc="left")
    lab.entitle(figure, "Held-out accuracy at the end of training, under each stress")
    lab.save(figure, path)


def check_flags(file: Path, flags: str) -> None:
    """BadInput, before any run, for a file of another form and for a flag that it does not have."""
    module, argv = stressed(file, "none"), sys.argv
    try:
        sys.argv = [file.name, *shlex.split(flags)]
        parse(module.Args)
    finally:
        sys.argv = argv


def enter(words: Namespace, budget: str) -> int:
    """Run a file's row, draw its table and print its places; returns how many of its runs broke."""
    file = words.file.resolve()
    check_flags(file, f"{budget} {words.flags}")
    name = f"{file.stem} {words.flags}".strip()
    text = file.read_bytes() + f"{words.flags} {budget}".encode()  # another text: another table
    key = hashlib.sha256(text).hexdigest()[:8]
    path = words.out or Path(f"runs/race/{file.stem}-{key}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    broken = run_row(name, file, path, budget, words)
    table = stored(path, budget)
    if budget == BUDGET and path.resolve() != TABLE:  # beside the shipped rows of other names
        others = [one for one in stored(TABLE, BUDGET)["cells"] if one["method"] != name]
        table["cells"] += others
    draw(table, path.with_suffix(".png"))
    print("", lab.text(ranking(table, name)), "", path, sep="\n")
    return broken


def main() -> None:
    parser = arguments(__doc__, "labs.race")
    parser.allow_abbrev = False  # --s is no flag of ours
    parser.add_argument("file", nargs="?", type=Path, help="a file in the form of grpo.py")
    parser.add_argument("--flags", default="", help='of the method: --flags="--lr 1e-4"')
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default: {SEEDS}")
    choice = {"choices": STRESSES, "metavar": "STRESS", "help": "default: all"}
    parser.add_argument("--stresses", nargs="+", **choice)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--out", type=Path, help="the table (default: runs/race/FILE-....json)")
    choice = {"choices": STRESSES, "metavar": "STRESS", "nargs": "?", "const": "none"}
    parser.add_argument("--table", **choice, help="only print a table, sorted (default: none)")
    parser.add_argument("--redraw", action="store_true", help="only draw the shipped table")
    words, more = parser.parse_known_args()
    if sum(map(bool, (words.file, words.table, words.redraw))) != 1:
        parser.error("give one of FILE, --table and --redraw")
    if min(words.seeds, words.workers) < 1:
        parser.error("--seeds and --workers: must be 1 or more")
    added = [part for word in more for part in word.split("=", 1)]
    budget = f"{BUDGET} {shlex.join(added)}".strip()
    try:
        if words.table:
            table = json.loads((words.out or TABLE).read_text(encoding="utf-8"))
            print(lab.text(standings(table, words.table)))
        elif words.redraw:
            draw(stored(TABLE, BUDGET), ROOT / "docs/stability.png")
        elif enter(words, budget):  # some runs broke
            sys.exit(1)
    except (BadInput, OSError) as error:
        parser.error(in_one_line(error))
    except KeyboardInterrupt:
        print("labs.race: interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
