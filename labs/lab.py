"""What every lab shares: its command line, its seeds, its table, its figure, its page.

A lab is a module with
    TITLE            the finding, over the figure
    ARMS             arm -> what it is: for a toy anything, else a command line: `grpo.py FLAGS`,
                     `-m variants.dapo FLAGS`
    measure(arm, seed, quick)   one run -> numbers and short series; not for command lines, whose
    COLUMNS          are the columns of metrics.jsonl that are kept instead
    QUICKLY          more flags for them when quick
    DAMAGE           arm -> (what stands in its file once, what it becomes): a bug, on purpose
    rows(results)    the table: a list of rows of cells, the head first
    draw(results)    the figure
`results` is {arm: [one run's numbers, ...]}, a run for each seed. The page NAME.md quotes medians
of the table as `0.97<!--row/column-->`; between `<!--table-->` and `<!--/table-->` it stands whole.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from types import ModuleType

import common  # noqa: F401  (before torch)
import numpy as np
from common.plumbing.curves import series, smooth
from common.distributed import BadInput, first_line
from common.plumbing.folder import read_lines, whole
from tests.checks import replaced
from tools.marks import ROOT
from tqdm import tqdm

HERE = Path(__file__).parent
SEEDS, QUICK = 20, 3  # of a full run, of a quick one
QUICKLY = "--steps 4 --eval_every 2 --eval_problems 16"  # of training runs, when quick
# Told apart by the colour-blind, too (Okabe and Ito)
BLACK, GREY, BLUE, ORANGE, GREEN, PINK = "#222222 #888888 #0072B2 #D55E00 #009E73 #CC79A7".split()


def main(lab: ModuleType) -> None:
    """`python -m labs.NAME`: measure, write the table and the figure, print the table."""
    name = lab.__spec__.name.split(".")[-1]
    parser = argparse.ArgumentParser(
        prog=f"labs.{name}",
        usage=argparse.SUPPRESS,  # an error is one line
        description=lab.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, help=f"runs of each arm (default: {SEEDS})")
    parser.add_argument("--quick", action="store_true", help="fewer seeds, smaller: seconds")
    parser.add_argument("--redraw", action="store_true", help="only draw the table that is there")
    parser.add_argument("--out", type=Path, default=Path("runs/labs"), help="default: runs/labs")
    words = parser.parse_args()
    table, figure = words.out / "tables" / f"{name}.json", words.out / "figures" / f"{name}.png"
    full = getattr(lab, "SEEDS", SEEDS)
    seeds = words.seeds if words.seeds is not None else QUICK if words.quick else full
    try:
        if seeds < 1:
            raise BadInput(f"--seeds {seeds}: must be 1 or more")
        if words.redraw and not table.exists():
            raise BadInput(f"--redraw: no {table}; the one that we ship is drawn with --out labs")
        for path in (table, figure):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not words.redraw:
            run(lab, table, seeds, words.quick)
        results = json.loads(table.read_text())["results"]
        with whole(figure) as partial:
            lab.draw(results).savefig(partial, dpi=150, format="png")
        page = HERE / f"{name}.md"
        if words.out.resolve() == HERE and page.exists():
            page.write_text(filled(page.read_text(), lab.rows(results)))
        print(text(lab.rows(results)), "", table, figure, sep="\n")
    except (BadInput, OSError) as error:
        parser.error(first_line(error))


def run(lab: ModuleType, table: Path, seeds: int, quick: bool) -> None:
    """Every arm with every seed; the table is written after each run.

    A lab of whole training runs has two under way at a time, and goes on where its table ends.
    """
    runs = hasattr(lab, "COLUMNS")
    old = json.loads(table.read_text()) if runs and table.exists() else {}
    known = {
        arm: old["results"][arm] if old and old["arms"].get(arm) == what else []
        for arm, what in lab.ARMS.items()
    }
    if old and old["quick"] != quick:
        known = {arm: [] for arm in lab.ARMS}
    todo = [(s, arm) for s in range(seeds) for arm in lab.ARMS if s >= len(known[arm])]
    options = [f"--seeds {seeds}"] + ["--quick"] * quick
    head = {
        "command": " ".join(["python -m", lab.__spec__.name, *options]),
        "seeds": seeds,
        "quick": quick,
        "date": str(date.today()),
        "arms": {arm: what if isinstance(what, str) else "" for arm, what in lab.ARMS.items()},
    }

    def one(job: tuple[int, str]) -> dict:
        seed, arm = job
        if runs:
            flags = f"{QUICKLY} {getattr(lab, 'QUICKLY', '')}" if quick else ""
            damage = getattr(lab, "DAMAGE", {}).get(arm)
            return trained(f"{lab.ARMS[arm]} {flags}", seed + 1, lab.COLUMNS, damage)
        return lab.measure(arm, seed + 1, quick)

    start, spent = time.time(), old.get("seconds", 0) if any(known.values()) else 0
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(one, todo) if runs else map(one, todo)
        for (_, arm), found in zip(todo, tqdm(done, lab.__spec__.name, len(todo), leave=False)):
            known[arm].append({key: plain(value) for key, value in found.items()})
            if runs or len(known[arm]) == seeds:
                head["seconds"] = round(spent + time.time() - start)
                write(table, head | {"results": known})


def write(table: Path, content: dict) -> None:
    """A table, a series a line."""
    lines = re.sub(r"(?<=[\[\d,])\s+(?=[-\]\dN])", " ", json.dumps(content, indent=1))
    with whole(table) as partial:
        partial.write_text(lines.replace("[ ", "[").replace(" ]", "]") + "\n")


def plain(value: object) -> object:
    """Numbers to four digits, a curve's to three: a table is to be read, and kept."""
    if isinstance(value, str):
        return value
    array = np.asarray(value, float)
    return [float(f"{v:.3g}") for v in array] if array.ndim else float(f"{array:.4g}")


def trained(command: str, seed: int, columns: tuple, damage: tuple[str, str] | None = None) -> dict:
    """A training run as a process of one thread -> its columns of metrics.jsonl, each with the
    steps, as `name` and `name@`. One that stopped itself is a result, too: `stopped` says why."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryDirectory() as folder:
        words = [*command.split(), "--seed", seed, "--run_dir", f"{folder}/run"]
        if damage:
            source, words[0] = ROOT / words[0], f"{folder}/{words[0]}"
            Path(words[0]).write_text(replaced(source, *damage))
            environment["PYTHONPATH"] = str(ROOT)
        call = [sys.executable, *map(str, words)]
        ended = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)
        metrics = Path(folder, "run", "metrics.jsonl")
        if not metrics.exists() or ended.returncode < 0:
            raise BadInput(f"{command}: {(ended.stderr.splitlines() or ['no word'])[-1]}")
        lines = read_lines(metrics)
    found = {}
    for name in columns:
        found[f"{name}@"], found[name] = series(lines, name)
    return found | ({"stopped": ended.stderr.splitlines()[-1]} if ended.returncode else {})


# The table, in a terminal and in the page


def text(rows: list[list[str]]) -> str:
    """Cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)


def markdown(rows: list[list[str]]) -> str:
    """The same as a table of the page."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def filled(page: str, rows: list[list[str]]) -> str:
    """The page with the table and every number that it quotes as the table has them."""
    page = re.sub(
        r"(<!--table-->\n).*?(<!--/table-->)",
        lambda found: f"{found[1]}{markdown(rows)}\n{found[2]}",
        page,
        flags=re.DOTALL,
    )
    cells = {f"{row[0]}/{head}": cell for row in rows[1:] for head, cell in zip(rows[0], row)}
    return re.sub(
        r"[^\s(]+<!--(.+?/.+?)-->", lambda m: f"{cells[m[1]].split()[0]}<!--{m[1]}-->", page
    )


# Over seeds


def over(runs: list[dict], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Median, and the two ends between which 80% of the seeds lie, of a number or a series."""
    values = np.array([run[name] for run in runs], float)  # inf: never
    return tuple(np.nanquantile(values, (0.5, 0.1, 0.9), 0, method="inverted_cdf"))


def cell(runs: list[dict], name: str, form: str = ".2f") -> str:
    """Median and range of 80% of the seeds, for a table: `0.51 (0.48–0.60)`."""
    middle, low, high = (format(x, form).replace("inf", "never") for x in over(runs, name))
    return middle if low == high else f"{middle} ({low}–{high})"


def tail(values: list[float], count: int = 20) -> float:
    """The mean of a series' last values."""
    return float(np.mean(values[-count:]))


def spent(run: dict) -> list[float]:
    """Tokens sampled for training up to each evaluation, with branches' and dropped ones; in
    thousands."""
    return [sum(run["tokens"][: int(step)]) / 1000 for step in run["sampled@"]]


def at_tokens(run: dict, thousands: float) -> float:
    """Sampled accuracy when so many tokens were sampled, between two evaluations on a line."""
    return float(np.interp(thousands, spent(run), run["sampled"]))


# Figures


def sheet(title: str, *panels: str, width: float = 9.0, height: float = 4.2) -> tuple:
    """A figure under its finding, and axes side by side, one for each panel's title."""
    from matplotlib.figure import Figure  # here: it takes a second that no test should cost

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, words in zip(axes, panels):
        axis.set_title(words, fontsize=10, loc="left", color="#444444")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plain_ticks(axis: object, which: str, ticks: tuple) -> None:
    """A logarithmic axis, `x` or `y`, with these numbers on it and no powers of ten."""
    getattr(axis, f"set_{which}scale")("log")
    getattr(axis, f"set_{which}ticks")(ticks, labels=[f"{tick:g}" for tick in ticks])
    getattr(axis, f"{which}axis").minorticks_off()


def line(axis: object, x: np.ndarray, runs: list[dict], name: str, colour: str, **style) -> None:
    """The median over seeds as a line, 80% of them as a band."""
    middle, low, high = over(runs, name)
    axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.plot(x, middle, color=colour, linewidth=2, **style)


def label(axis: object, x: float, y: float, words: str, colour: str, **more) -> None:
    """Words at a line, in its colour: better than a legend."""
    style = {"ha": "left", "va": "center", "fontsize": 9.5, "fontweight": "bold"} | more
    axis.annotate(words, (x, y), (4, 0), textcoords="offset points", color=colour, **style)


def key(axis: object, colours: dict[str, str]) -> None:
    """Each arm's name in its colour, where lines cross too often for labels."""
    for place, (name, colour) in enumerate(colours.items()):
        label(axis, 0.02, 0.05 + 0.065 * place, name, colour, xycoords="axes fraction")


def curves(axis: object, results: dict, column: str, colours: dict, width: int = 1) -> None:
    """A column of every run over its steps, a thin line for each seed, in its arm's colour."""
    for arm, colour in colours.items():
        for run in results[arm]:
            values = smooth(run[column], width)
            axis.plot(run[f"{column}@"], values, color=colour, linewidth=1.3, alpha=0.8)
    axis.set_xlabel("step")
