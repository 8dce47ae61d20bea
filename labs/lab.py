"""What all labs share: command line, seeds, table and figure. Each lab measures in its own folder.

A lab is a folder with `__main__.py`, README.md, table.json and figure.png. Its module has
    TITLE            the finding, printed above the figure
    ARMS             arm -> its settings: anything for a toy, otherwise a command line such as
                     `grpo.py FLAGS` or `-m variants.dapo FLAGS`
    measure(arm, seed)   for a toy: one run -> numbers and short series. Labs of command lines have
                     instead
    COLUMNS          the columns of metrics.jsonl to keep, or arm -> columns
    SHORT, QUICK     for a quick run, which shows nothing: more flags, and the arms if not all
    DAMAGE           arm -> (a text that its file has once, what it becomes): a deliberate bug
    before(arm, seed, folder)   writes what a run starts from into a folder, which is FOLDER in its
                     command line; the run itself is in FOLDER/run
    SEEDS            runs of each arm, if not 20
    rows(results)    the table: a list of rows of cells, beginning with the head
    draw(results)    the figure
`results` is {arm: [one run's numbers, ...]} with a run for each seed, starting from seed 1, so the
n-th runs of two arms are a pair.

Rules for what a lab may say:
- An arm named after a paper is that paper's method, or its name says what differs.
- A sentence with "because" is measured, by an arm or a number of the table, or it is marked as a
  guess ("we think").
- A difference within the spread of the control's seeds is reported as such, not as an effect.
- If the ranges of two arms overlap, their seeds are compared in pairs ("19 of 20 seeds"), not by
  two medians.
"""

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
from common.cli import BadInput, in_one_line
from common.records.curves import series, smooth
from common.records import files
from common.records.files import atomic_write, read_lines
from checks import replaced
from checks.files import ROOT
from tools import arguments
from tqdm import tqdm

FULL_SEEDS = 20  # seeds of a full run
TOY_SEEDS = 3  # seeds of a quick toy, which shows the same finding
SHORT = "--steps 4 --eval_every 2 --eval_problems 16"  # flags of quick training runs
SMOKE = "Smoke test: shows nothing"  # the title of quick training runs instead of the finding
# The colour-blind can tell these apart (Okabe and Ito).
BLACK, GREY, BLUE, ORANGE, GREEN, PINK = "#222222 #888888 #0072B2 #D55E00 #009E73 #CC79A7".split()


def main(lab: ModuleType) -> None:
    """Run `python -m labs.NAME`: measure, write the table and the figure, print the table."""
    program = lab.__spec__.name.removesuffix(".__main__")
    parser = arguments(lab.__doc__, program)
    parser.add_argument("--seeds", type=int, help="runs of each arm (default: the page's)")
    quick = (
        f"a toy: {TOY_SEEDS} seeds; training runs: one short run of each arm, which shows nothing"
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, default=Path("runs/labs"), help="default: runs/labs")
    words = parser.parse_args()
    trains = is_training(lab)
    seeds = words.seeds
    if seeds is None:
        seeds = getattr(lab, "SEEDS", FULL_SEEDS)
        if words.quick:
            seeds = 1 if trains else min(TOY_SEEDS, seeds)
    if seeds < 1:
        parser.error(f"--seeds {seeds}: must be 1 or more")
    kind = ".quick" if words.quick else ""  # a quick run must not overwrite a full one
    folder = words.out / program.removeprefix("labs.")
    table, figure = folder / f"table{kind}.json", folder / f"figure{kind}.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results = run(lab, table, seeds, words.quick)
        drawn = lab.draw(results)
        if trains and words.quick:
            set_title(drawn, SMOKE)
            drawn.text(0.5, 0.5, SMOKE, fontsize=30, color=GREY, alpha=0.7, ha="center")
        save(drawn, figure)
    except (BadInput, OSError) as error:
        parser.error(in_one_line(error))
    except KeyboardInterrupt:
        parser.exit(130, f"{program}: interrupted; training runs that ended are kept\n")
    print(text(lab.rows(results)), "", table, figure, sep="\n")


def is_training(lab: ModuleType) -> bool:
    """Tell whether a lab's arms are command lines of training runs; else it is a toy."""
    return hasattr(lab, "COLUMNS")


def run(lab: ModuleType, table: Path, seeds: int, quick: bool) -> dict:
    """Run every arm with every seed, and return the runs of each arm.

    A lab of training runs runs two at a time, writes its table after each, and continues where its
    table ends. With a complete table, such as ours, it only draws. A toy is measured again. Quick
    runs are not cached.
    """
    trains = is_training(lab)
    arms = getattr(lab, "QUICK", lab.ARMS) if quick else lab.ARMS
    commands = {arm: lab.ARMS[arm] if isinstance(lab.ARMS[arm], str) else "" for arm in arms}
    results = {arm: [] for arm in arms}
    beside = {}  # what other programs have put into the table
    if trains and not quick and table.exists():
        old = json.loads(table.read_text(encoding="utf-8"))
        if "beside" in old:
            beside["beside"] = old["beside"]
        for arm, command in commands.items():
            if old["arms"].get(arm) == command:
                results[arm] = old["results"][arm]
    todo = [(s, arm) for s in range(seeds) for arm in arms if s >= len(results[arm])]
    head = {
        "command": f"python -m {lab.__spec__.name.removesuffix('.__main__')} --seeds {seeds}",
        "quick": quick,
        "date": str(date.today()),
        "arms": commands,
    } | beside

    def run_job(job: tuple[int, str]) -> dict:
        seed, arm = 1 + job[0], job[1]
        if not trains:
            return lab.measure(arm, seed)
        flags = f"{SHORT} {getattr(lab, 'SHORT', '')}" if quick else ""
        damage = getattr(lab, "DAMAGE", {}).get(arm)
        before = partial(lab.before, arm, seed) if hasattr(lab, "before") else lambda folder: None
        columns = lab.COLUMNS[arm] if isinstance(lab.COLUMNS, dict) else lab.COLUMNS
        return trained(f"{lab.ARMS[arm]} {flags}", seed, columns, damage, before)

    with ThreadPoolExecutor(2) as pool:  # an error cancels the runs that have not begun
        done = pool.map(run_job, todo) if trains else map(run_job, todo)
        # disable=None shows no bar if the output is not a terminal.
        for (_, arm), kept in zip(todo, tqdm(done, total=len(todo), leave=False, disable=None)):
            results[arm].append({key: plain(value) for key, value in kept.items()})
            if trains:
                write(table, head | {"results": results})
    if not trains:
        write(table, head | {"results": results})
    return results


def write(table: Path, content: dict) -> None:
    """Write a table with one series per line."""
    lines = re.sub(r"(?<=[\[\d,])\s+(?=[-\]\dN])", " ", json.dumps(content, indent=1))
    files.write(table, lines.replace("[ ", "[").replace(" ]", "]") + "\n")


def plain(value: object) -> object:
    """Round a number to four digits and a curve to three, because people read and store tables."""
    if isinstance(value, str):
        return value
    array = np.asarray(value, float)
    return [float(f"{v:.3g}") for v in array] if array.ndim else float(f"{array:.4g}")


def columns_of(lines: list[dict], names: tuple[str, ...]) -> dict:
    """Return columns of metrics.jsonl that have values, as `name`, and their steps, as `name@`."""
    columns = {}
    for name in names:
        steps, values = series(lines, name)
        if len(steps):
            columns[f"{name}@"], columns[name] = steps, values
    return columns


def one_thread() -> dict[str, str]:
    """Return the environment of a training process with one thread."""
    return os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def trained(
    command: str,
    seed: int,
    names: tuple[str, ...],
    damage: tuple[str, str] | None = None,
    before: Callable[[Path], None] = lambda folder: None,
) -> dict:
    """Train in a process of its own; return these columns of its metrics.jsonl. A run that stopped
    itself is a result, and `stopped` says why. A run that was interrupted or crashed is not."""
    environment = one_thread()
    with tempfile.TemporaryDirectory() as folder:
        before(Path(folder))
        command = command.replace("FOLDER", folder)
        words = [*shlex.split(command), "--seed", str(seed), "--run_dir", f"{folder}/run"]
        if damage:
            source, words[0] = ROOT / words[0], f"{folder}/{words[0]}"
            Path(words[0]).write_text(replaced(source, *damage), encoding="utf-8")
            environment["PYTHONPATH"] = str(ROOT)
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        ended = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, **pipes)
        shown = ended.stderr.splitlines() or ["no word"]
        errors = [line for line in shown if ": error: " in line]  # the bar may follow it
        message = (errors or shown)[-1]
        run, code = Path(folder, "run"), ended.returncode
        if code == 0 and not (run / "summary.json").exists():
            raise BadInput(f"{command} --seed {seed}: was stopped before its end: no result")
        if code and not (code == 1 and ": error: " in message and (run / "metrics.jsonl").exists()):
            raise BadInput(f"{command} --seed {seed}: exit code {code}: {message}")
        lines = read_lines(run / "metrics.jsonl")
    return columns_of(lines, names) | ({"stopped": message} if code else {})


def text(rows: list[list[str]]) -> str:
    """Write cells in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)


# Over seeds


def median_and_band(runs: list[dict], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the median over seeds, and the ends of the middle 80%, of a number or a series."""
    values = np.array([run[name] for run in runs], float)  # inf means never
    return tuple(np.nanquantile(values, (0.5, 0.1, 0.9), 0, method="inverted_cdf"))


def cell(runs: list[dict], name: str, form: str = ".2f") -> str:
    """Write the median and the middle 80% of the seeds for a table: `0.51 (0.48–0.60)`."""
    numbers = median_and_band(runs, name)
    middle, low, high = (format(x, form).replace("inf", "never") for x in numbers)
    return middle if low == high else f"{middle} ({low}–{high})"


def table(results: dict, numbers: dict[str, tuple], runs: bool = True) -> list[list[str]]:
    """Make a table with a row for each arm and a cell for each of `numbers`: title -> (function of
    a run, format). A number that no run has (None) is a dash. With `runs`, count the runs, too."""
    rows = [["arm", *["runs"] * runs, *numbers]]
    for arm, every in results.items():
        rows.append([arm, *[str(len(every))] * runs])
        for number, form in numbers.values():
            known = [{"x": value} for run in every if (value := number(run)) is not None]
            rows[-1].append(cell(known, "x", form) if known else "–")
    return rows


def last_value(name: str) -> Callable[[dict], float | None]:
    """Make a function for `table`: a column's last value, None if the run lacks the column."""
    return lambda run: run[name][-1] if len(run.get(name, [])) else None


def mean_of_last_20(name: str) -> Callable[[dict], float | None]:
    """Make a function for `table`: a column's mean over the last 20 steps."""
    return lambda run: tail(run[name]) if len(run.get(name, [])) else None


def maximum(name: str) -> Callable[[dict], float]:
    """Make a function for `table`: a column's highest value."""
    return lambda run: max(run[name])


def tail(values: list[float], count: int = 20) -> float:
    """Return the mean of a series' last `count` values."""
    return float(np.mean(values[-count:]))


def spent(run: dict) -> list[float]:
    """Count the tokens sampled for training up to each evaluation, in thousands, including those
    of branches and of dropped responses."""
    return [sum(run["tokens"][: int(step)]) / 1000 for step in run["sampled@"]]


def at_tokens(run: dict, thousands: float) -> float:
    """Interpolate the sampled accuracy to the time when that many tokens had been sampled."""
    return float(np.interp(thousands, spent(run), run["sampled"]))


# Figures


def save(figure: object, path: Path) -> None:
    """Write a figure as a PNG of 256 colours, which takes a third of the bytes."""
    from PIL import Image  # imported here for the same reason as matplotlib below

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format="png")
    with atomic_write(path) as partial:
        picture = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        picture.save(partial, "png", optimize=True)


def set_title(figure: object, words: str) -> None:
    """Write the finding, or a replacement, above a figure."""
    figure.suptitle(words, x=0.01, ha="left", fontsize=13, fontweight="bold")


def make_figure(
    title: str, *panels: str, width: float = 9.0, height: float = 4.2, rows: int = 1
) -> tuple:
    """Make a figure under its finding; return it with an axis for each panel's title."""
    os.environ["MPLBACKEND"] = "agg"  # as in common/records/curves.py
    from matplotlib.figure import Figure  # here, because it takes a second to import

    figure = Figure(figsize=(width, height), layout="constrained")
    set_title(figure, title)
    axes = figure.subplots(rows, len(panels) // rows, squeeze=False).flatten()
    for axis, words in zip(axes, panels):
        axis.set_title(words, fontsize=10, loc="left", color="#444444")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plain_ticks(axis: object, which: str, ticks: tuple) -> None:
    """Make an axis, `x` or `y`, logarithmic, with these numbers instead of powers of ten."""
    getattr(axis, f"set_{which}scale")("log")
    getattr(axis, f"set_{which}ticks")(ticks, labels=[f"{tick:g}" for tick in ticks])
    getattr(axis, f"{which}axis").minorticks_off()


def line(axis: object, x: np.ndarray, runs: list[dict], name: str, colour: str, **style) -> None:
    """Draw the median over seeds as a line, and the middle 80% as a band."""
    middle, low, high = median_and_band(runs, name)
    axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.plot(x, middle, color=colour, linewidth=2, **style)


def dots(axis: object, y: float, values: list[float], colour: str) -> None:
    """Draw a row at height y: a dot for each seed, and a bar at their median."""
    axis.scatter(values, np.full(len(values), y), s=30, color=colour, alpha=0.5)
    axis.plot(np.median(values), y, "|", color=colour, markersize=16, markeredgewidth=3)


def label(axis: object, x: float, y: float, words: str, colour: str, **more) -> None:
    """Write words beside a line in its colour, instead of a legend."""
    style = {"ha": "left", "va": "center", "fontsize": 9.5, "fontweight": "bold"} | more
    axis.annotate(words, (x, y), (4, 0), textcoords="offset points", color=colour, **style)


def legend(axis: object, colours: dict[str, str], x: float = 0.02, y: float | None = None) -> None:
    """Write each arm's name in its colour, if lines cross too often for labels: upwards from the
    lower corner, or downwards from y."""
    for place, (name, colour) in enumerate(colours.items()):
        height = 0.05 + 0.065 * place if y is None else y - 0.065 * place
        label(axis, x, height, name, colour, xycoords="axes fraction")


def median_curve(axis: object, runs: list[dict], column: str, colour: str, **style: object) -> None:
    """Draw the median of a column over its steps as a line, and the middle 80% of the seeds (all of
    five) as a band, as far as all runs go. Each run is averaged over `width` steps."""
    width = style.pop("width", 1)
    length = min(len(run[column]) for run in runs)
    steps = np.array(runs[0][f"{column}@"][:length])
    smoothed = [{column: smooth(run[column], width)[:length]} for run in runs]
    line(axis, steps, smoothed, column, colour, **style)
    axis.set_xlabel("step")


def curves(axis: object, results: dict, column: str, colours: dict, width: int = 1) -> None:
    """Draw a column over its steps, as a thin line for each seed in its arm's colour."""
    for arm, colour in colours.items():
        for run in results[arm]:
            values = smooth(run[column], width)
            axis.plot(run[f"{column}@"], values, color=colour, linewidth=1.3, alpha=0.8)
    axis.set_xlabel("step")
