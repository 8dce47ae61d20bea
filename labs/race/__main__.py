"""Train a file in the form of grpo.py under the stresses of labs/stresses.py, and rank it.

    python -m labs.race my_method.py               three seeds: about half an hour
    python -m labs.race my_method.py --seeds 1 --steps 8 --out try.json       does it run at all?
    python -m labs.race grpo.py --model FOLDER --task gsm8k --steps 30 --out table.json
    python -m labs.race --table "lr x3"       every method's score, the best one first

FILE comes first. Flags that are not listed below are passed to every run. They make another race,
which needs another table. A table may have the rows of several files. Finished runs are kept, and
after an interruption the same command continues. docs/stability.md explains the scores.
"""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from checks.files import ROOT
from common.cli import BadInput, in_one_line
from common.records.files import read_lines
from tools import arguments

from labs import lab
from labs.stresses import STRESSES, flags_under, stressed

TABLE = ROOT / "labs/race/table.json"
# The last flag keeps runs going if sampler and trainer differ, because the race measures that.
BUDGET = "--steps 40 --prompts_per_step 16 --group_size 8 --eval_every 8 --eval_problems 256"
BUDGET += " --eval_samples 2 --sampler_tolerance 1e6"
SEEDS, ENOUGH = 3, 5  # runs of a cell; with ENOUGH a sign has no question mark
LAST = 3  # measurements in a score
MILD = "mildly quantised sampler"  # not every row has it, so it is never the worst cell
LATE = 16  # how many last steps the stored means cover
DIARY = ("entropy", "zero_groups", "sampler_gap", "response_len", "grad_norm")
Cells = dict[tuple[str, str], list[dict]]  # (method, stress) -> its finished runs


# A table


def read(path: Path, budget: str = "") -> Cells:
    """Read the cells of a table, {} without a file. Raise BadInput if it is of another race."""
    if not path.exists():
        return {}
    table = json.loads(path.read_text(encoding="utf-8"))
    if budget and table["budget"] != budget:
        raise BadInput(f"{path}: measured with {table['budget']}; give another --out")
    return {(entry["method"], entry["stress"]): entry["runs"] for entry in table["cells"]}


def write(path: Path, budget: str, cells: Cells) -> None:
    """Write the cells into a table and keep its other contents."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    listed = [{"method": name, "stress": on, "runs": runs} for (name, on), runs in cells.items()]
    lab.write(path, table | {"budget": budget, "cells": listed})


# Runs


def measured(file: Path, flags: str, stress: str, seed: int, budget: str) -> dict:
    """Run once in a new process; return what is stored of the run, or why it `broke`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    if "--model" not in budget:  # the embedded model needs one CPU thread and float32
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        run = Path(folder) / "run"
        words = shlex.split(f"{budget} {flags} --seed {seed}")
        command = [sys.executable, "-m", "labs.stresses", str(file), stress, *words]
        output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        ended = subprocess.run([*command, "--run_dir", str(run)], env=environment, **output)
        if ended.returncode or not (run / "summary.json").exists():
            message = (ended.stderr.splitlines() or ["it printed no error"])[-1]
            return {"seed": seed, "broke": f"exit code {ended.returncode}: {message[-200:]}"}
        return {"seed": seed} | kept(read_lines(run / "metrics.jsonl"))


def kept(lines: list[dict]) -> dict:
    """Return what is stored of a run: `sampled`, the accuracies after the steps `at`; `thousands`
    of tokens sampled until then; and means of the last steps, where a missing value counts as 0."""
    thousands = np.cumsum([line.get("tokens", 0) / 1000 for line in lines])
    places = [place for place, line in enumerate(lines) if "sampled" in line]
    late = {}
    for name in DIARY:
        mean = np.mean([line.get(name) or 0.0 for line in lines[-LATE:]])
        late[name] = float(f"{mean:.3g}")
    return {
        "at": [lines[place]["step"] for place in places],
        "sampled": [round(lines[place]["sampled"], 4) for place in places],
        "thousands": [round(float(thousands[place]), 3) for place in places],
        "late": late,
    }


def run_row(name: str, file: Path, path: Path, budget: str, words: Namespace) -> int:
    """Run what a table's row lacks, one seed after another; return how many runs broke."""
    cells, broken, jobs = read(path, budget), 0, []
    for seed in range(1, 1 + words.seeds):
        for stress in words.stresses or STRESSES:
            there = [run["seed"] for run in cells.get((name, stress), [])]
            # We know which prompts are uninformative only for arithmetic.
            if seed not in there and not ("--task" in budget and STRESSES[stress].uninformative):
                jobs.append((stress, seed))
    with ThreadPoolExecutor(words.workers) as pool:
        runs = pool.map(lambda job: measured(file, words.flags, *job, budget), jobs)
        for (stress, seed), run in zip(jobs, runs):
            if "broke" in run:
                broken += 1
            else:
                cells.setdefault((name, stress), []).append(run)
                cells[name, stress].sort(key=lambda result: result["seed"])
                write(path, budget, cells)
            verdict = run.get("broke") or f"{score(run):.3f}"
            print(f"{name}, {stress}, seed {seed}: {verdict}", flush=True)
    return broken


# Scores


def score(run: dict) -> float:
    """Return the mean accuracy of the last three measurements."""
    return round(float(np.mean(run["sampled"][-LAST:])), 6)


def scores(cells: Cells, method: str, stress: str) -> list[float]:
    """Return the scores of a cell, by seed."""
    return [score(run) for run in cells.get((method, stress), [])]


def columns(cells: Cells) -> list[str]:
    """List the stresses that the table has."""
    return [stress for stress in STRESSES if any(stress == known for _, known in cells)]


def methods(cells: Cells) -> list[str]:
    """List the methods that the table has."""
    return list(dict.fromkeys(method for method, _ in cells))


def median(cells: Cells, method: str, stress: str) -> float | None:
    """Return a cell's median score, or the row's minimum for `worst cell`; None without runs."""
    if stress == "worst cell":
        row = [median(cells, method, column) for column in columns(cells) if column != MILD]
        return None if None in row else min(row)
    values = scores(cells, method, stress)
    return float(np.median(values)) if values else None


def sign(cells: Cells, method: str, stress: str) -> str:
    """Return `+` (`-`) if all seeds are above (below) all of grpo.py's; `?`: fewer than five."""
    ours, theirs = scores(cells, method, stress), scores(cells, "grpo", stress)
    few = min(len(ours), len(theirs))
    if few < SEEDS or method == "grpo":
        return ""
    doubt = "?" if few < ENOUGH else ""
    if min(ours) > max(theirs):
        return f"+{doubt}"
    return f"-{doubt}" if max(ours) < min(theirs) else ""


def cell(cells: Cells, method: str, stress: str) -> str:
    """Write a cell as `0.85 (0.82–0.86) +?`: median, lowest and highest seed, sign."""
    middle, values = median(cells, method, stress), scores(cells, method, stress)
    if middle is None:
        return "–"
    spread = f" ({min(values):.2f}–{max(values):.2f})" if values else ""
    return f"{middle:.2f}{spread} {sign(cells, method, stress)}".rstrip()


def ranking(cells: Cells, method: str) -> list[list[str]]:
    """Make a row for each stress: the method's score, grpo.py's, and the method's place."""
    rows = [["stress", method, "grpo", "place"]]
    for stress in [*columns(cells), "worst cell"]:
        ours = median(cells, method, stress)
        values = [median(cells, name, stress) for name in methods(cells)]
        known = [value for value in values if value is not None]
        place = 1 + sum(value > ours for value in known) if ours is not None else "–"
        both = [cell(cells, name, stress) for name in (method, "grpo")]
        rows.append([stress, *both, f"{place} of {len(known)}"])
    return rows


def standings(cells: Cells, stress: str) -> list[list[str]]:
    """Make a row for each method that ran under this stress, the best one first. `at grpo's tokens`
    is its score at the times when it had sampled as many tokens as grpo.py at its measurements
    (median)."""
    spent = [run["thousands"][-LAST:] for run in cells.get(("grpo", stress), [])]
    rows = []
    for name in methods(cells):
        if runs := cells.get((name, stress)):
            equal = "–"
            if spent:
                at = np.median(spent, axis=0)  # [LAST]
                there = [np.interp(at, run["thousands"], run["sampled"]).mean() for run in runs]
                equal = f"{np.median(there):.2f}"
            tokens = np.median([run["thousands"][-1] for run in runs])
            rows.append([name, cell(cells, name, stress), equal, f"{tokens:.0f}"])
    rows.sort(key=lambda row: -median(cells, row[0], stress))
    return [["method", stress, "at grpo's tokens", "thousand tokens"], *rows]


# The command


def enter(words: Namespace, budget: str) -> int:
    """Run a file's row and print its places; return how many of its runs broke."""
    file = words.file.resolve()
    flags = shlex.split(f"{budget} {words.flags}")
    flags_under("none", stressed(file, "none"), flags)  # a wrong flag fails here, before any run
    name = f"{file.stem} {words.flags}".strip()
    text = file.read_bytes() + f"{words.flags} {budget}".encode()  # a changed file gets a new table
    key = hashlib.sha256(text).hexdigest()[:8]
    path = words.out or Path(f"runs/race/{file.stem}-{key}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    broken = run_row(name, file, path, budget, words)
    cells = read(path, budget)
    if budget == BUDGET:  # compare with the shipped rows of other names
        cells |= {key: runs for key, runs in read(TABLE).items() if key[0] != name}
    print("", lab.text(ranking(cells, name)), "", path, sep="\n")
    return broken


def main() -> None:
    parser = arguments(__doc__, "labs.race")
    parser.allow_abbrev = False  # an abbreviation might be a flag of the file
    parser.add_argument("file", nargs="?", type=Path, help="a file in the form of grpo.py")
    parser.add_argument("--flags", default="", help='of the method: --flags="--lr 1e-4"')
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default: {SEEDS}")
    choice = {"choices": STRESSES, "metavar": "STRESS"}
    parser.add_argument("--stresses", nargs="+", **choice, help="default: the ten")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--out", type=Path, help="the table (default: runs/race/FILE-....json)")
    choice |= {"nargs": "?", "const": "none"}
    parser.add_argument("--table", **choice, help="only print a table, sorted (default: none)")
    words, more = parser.parse_known_args()
    if bool(words.file) == bool(words.table):
        parser.error("give FILE or --table")
    if min(words.seeds, words.workers) < 1:
        parser.error("--seeds and --workers: must be 1 or more")
    added = [part for word in more for part in word.split("=", 1)]
    try:
        if words.table:
            print(lab.text(standings(read(words.out or TABLE), words.table)))
        elif enter(words, f"{BUDGET} {shlex.join(added)}".strip()):  # some runs broke
            sys.exit(1)
    except (BadInput, OSError) as error:
        parser.error(in_one_line(error))
    except KeyboardInterrupt:
        parser.exit(130, "labs.race: interrupted; the same command continues\n")


if __name__ == "__main__":
    main()
