"""What every lab shares: its command line, its seeds, its table, its figure, its page.

A lab is a folder with `__main__.py`, README.md, table.json and figure.png. A second experiment on
the same subject is a *part*: PART.py, PART.json and PART.png, run by `--part PART`. Each of the two
kinds of module has
    TITLE            the finding, which stands above the figure
    ARMS             arm -> what it is: for a toy anything, else a command line: `grpo.py FLAGS`,
                     `-m variants.dapo FLAGS`
    measure(arm, seed, quick)   one run -> numbers and short series; `quick` is always False. Not
                     for command lines; those have
    COLUMNS          the columns of metrics.jsonl that are kept
    SHORT            more flags for them in a smoke test, which shows nothing
    DAMAGE           arm -> (what stands in its file once, what it becomes): a bug, on purpose
    SEEDS            runs of each arm, if it is not 20
    rows(results)    the table: a list of rows of cells, the head first
    draw(results)    the figure
`results` is {arm: [one run's numbers, ...]}, a run for each seed, from the table's first seed on,
so that the n-th runs of two arms are a pair. README.md quotes cells of the table as
`0.97<!--row/column-->`, of a part's as `0.97<!--PART# row/column-->`. Between `<!--table-->` and
`<!--/table-->` stands the table, with `<!--table PART: 1 3-->` that of a part with two of its
columns. `--out labs` fills all of them in again.

Rules for what a lab may say:
- An arm that is named after a paper is that paper's method, or its name says what differs.
- A sentence with "because" is measured, by an arm or a number of the table, or it is labelled as a
  guess ("we think").
- A difference within the spread of the control's seeds is reported as that, and not as an effect.
- Where the ranges of two arms overlap, their seeds are compared in pairs ("19 of 20 seeds", by
  `wins`), and not by two medians.
- "Replicated" means that it was run again with seeds that its author had not seen
  (`--first_seed`).
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from types import ModuleType

import common  # noqa: F401  (before torch)
import numpy as np
from common.cli import BadInput, blame, in_one_line
from common.curves import series, smooth
from common.run import read_lines, atomic_write
from checks import replaced
from checks.files import ROOT
from tqdm import tqdm

HERE = Path(__file__).parent
SEEDS, QUICK = 20, 3  # of a full run; of a quick toy, which shows what the full one does
SHORT = "--steps 4 --eval_every 2 --eval_problems 16"  # of training runs, in a smoke test
SMOKE = "Smoke test: shows nothing"  # instead of a finding
# Told apart by the colour-blind, too (Okabe and Ito)
BLACK, GREY, BLUE, ORANGE, GREEN, PINK = "#222222 #888888 #0072B2 #D55E00 #009E73 #CC79A7".split()
CHILDREN: set[subprocess.Popen] = set()  # training runs under way


def main(lab: ModuleType, **parts: ModuleType) -> None:
    """`python -m labs.NAME [--part PART]`: measure, write the table and the figure, print the
    table."""
    survive_the_terminal()
    program = lab.__spec__.parent
    parser = argparse.ArgumentParser(
        prog=program,
        usage=argparse.SUPPRESS,  # an error is one line
        description=lab.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if parts:
        parser.add_argument("--part", choices=parts, help="a second experiment on the subject")
    parser.add_argument("--seeds", type=int, help="runs of each arm (default: the page's)")
    parser.add_argument("--first_seed", type=int, default=1, help="the others follow (default: 1)")
    # A toy with few seeds shows its finding; a short training run does not, and has another name
    few = parser.add_mutually_exclusive_group()
    told = f"of a toy: {QUICK} seeds, at full length"
    few.add_argument("--quick", dest="few", action="store_const", const="quick", help=told)
    told = "of training runs: one short run of each arm, to try the machine: shows nothing"
    few.add_argument("--smoke", dest="few", action="store_const", const="smoke", help=told)
    parser.add_argument("--redraw", action="store_true", help="only draw the table that is there")
    parser.add_argument("--out", type=Path, default=Path("runs/labs"), help="default: runs/labs")
    words = parser.parse_args()
    lab = parts.get(getattr(words, "part", None), lab)
    runs = hasattr(lab, "COLUMNS")
    try:
        make(lab, words)
    except (BadInput, OSError) as error:
        parser.error(in_one_line(error))
    except KeyboardInterrupt:
        kept = "runs that ended are kept, and the same command goes on from there"
        kept = kept if runs and not words.few else "nothing was written"
        print(f"{parser.prog}: interrupted; {kept}", file=sys.stderr)
        sys.exit(130)


def part_of(lab: ModuleType) -> str:
    """The name of a lab's part; "" for the lab itself."""
    name = lab.__spec__.name.rpartition(".")[2]
    return "" if name == "__main__" else name


def make(lab: ModuleType, words: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    if words.seeds is not None and words.seeds < 1:
        raise BadInput(f"--seeds {words.seeds}: must be 1 or more")
    if words.first_seed < 0:
        raise BadInput(f"--first_seed {words.first_seed}: must be 0 or more")
    runs, own = hasattr(lab, "COLUMNS"), getattr(lab, "SEEDS", SEEDS)
    if runs and words.few == "quick":
        raise BadInput("--quick: this lab is of training runs, give --smoke")
    if not runs and words.few == "smoke":
        raise BadInput("--smoke: this lab is a toy, give --quick")
    # Other seeds than the page's, and quick or short runs, have tables of their own.
    kind = f".from{words.first_seed}" if words.first_seed != 1 else ""
    kind += f".{words.few}" if words.few else ""
    part = part_of(lab)
    folder = words.out / lab.__spec__.parent.rpartition(".")[2]
    table = folder / f"{part or 'table'}{kind}.json"
    figure = folder / f"{part or 'figure'}{kind}.png"
    if words.redraw and not table.exists():
        raise BadInput(f"--redraw: no {table}; the one that we ship is drawn with --out labs")
    folder.mkdir(parents=True, exist_ok=True)
    if not words.redraw:
        if words.few == "smoke":
            own = 1
        elif words.few == "quick":
            own = QUICK
        elif not runs:  # a toy is measured again, with as many seeds as its table has
            own = max(own, count(stored(table).get("results", {})))
        seeds = words.seeds or own
        run(lab, table, seeds, words.few, words.first_seed)
    results, smoke = stored(table)["results"], words.few == "smoke"
    try:
        rows, drawn = lab.rows(results), lab.draw(results)
    except LookupError as error:  # another version's arms or columns
        if not words.redraw:
            raise
        raise BadInput(f"{table}: not what this lab draws (it lacks {error})") from error
    if smoke:
        entitle(drawn, SMOKE)
        drawn.text(0.5, 0.5, SMOKE, fontsize=30, color=GREY, alpha=0.7, ha="center", va="center")
    with atomic_write(figure) as partial:
        drawn.savefig(partial, dpi=150, format="png")
    page = folder / "README.md"
    if words.out.resolve() == HERE and not kind and page.exists():
        page.write_text(filled(page.read_text(encoding="utf-8"), rows, part), encoding="utf-8")
    print(*[SMOKE, ""] * smoke, text(rows), "", table, figure, sep="\n")


def survive_the_terminal() -> None:
    """A terminal that cannot show an arrow or a Greek letter is no reason to stop."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")


def stored(table: Path) -> dict:
    """A lab's table as it was written; empty where there is none. BadInput if it is none."""
    if not table.exists():
        return {}
    with blame(f"{table}: damaged, remove it or give another --out"):
        content = json.loads(table.read_text(encoding="utf-8"))
        found = [run.keys() for runs in content["results"].values() for run in runs]
        if not found or not {"seeds", "quick", "arms"} <= content.keys():
            raise ValueError("no table of a lab")
    return content


def count(results: dict) -> int:
    """Seeds that some arm has."""
    return max(map(len, results.values()), default=0)


def run(lab: ModuleType, table: Path, seeds: int, few: str | None = None, first: int = 1) -> None:
    """Every arm with every seed, `first` and those after it.

    A lab of whole training runs has two under way at a time, writes its table after each, and goes
    on where its table ends. A toy's is written at the end. Runs are not replaced by fewer, and a
    table of other seeds is not touched; quick ones and smoke tests (`few`) are nobody's work.
    """
    runs = hasattr(lab, "COLUMNS")
    old = {} if few else stored(table)
    if old and old.get("first_seed", 1) != first:
        raise BadInput(f"{table}: begins with seed {old.get('first_seed', 1)}, not {first}")
    known = {
        arm: old["results"].get(arm, []) if runs and old and old["arms"].get(arm) == what else []
        for arm, what in lab.ARMS.items()
    }
    lost = {arm: found for arm, found in old.get("results", {}).items() if not known.get(arm)}
    if seeds < (most := count(lost)):
        more = f"has {most} seeds, which {seeds} would replace"
        raise BadInput(f"{table}: {more}; give --seeds {most} or more, or another --out")
    todo = [(s, arm) for s in range(seeds) for arm in lab.ARMS if s >= len(known[arm])]
    most = max(seeds, count(known))
    options = [f"--seeds {most}"]
    options += [f"--first_seed {first}"] if first != 1 else []
    options += [f"--{few}"] if few else []
    part = part_of(lab)
    options = [f"--part {part}", *options] if part else options
    head = {
        "command": " ".join(["python -m", lab.__spec__.parent, *options]),
        "seeds": most,
        "first_seed": first,
        "quick": bool(few),
        **({"note": SMOKE} if few == "smoke" else {}),
        "date": str(date.today()),
        "arms": {arm: what if isinstance(what, str) else "" for arm, what in lab.ARMS.items()},
    }

    def one(job: tuple[int, str]) -> dict:
        seed, arm = first + job[0], job[1]
        if runs:
            flags = f"{SHORT} {getattr(lab, 'SHORT', '')}" if few else ""
            damage = getattr(lab, "DAMAGE", {}).get(arm)
            return trained(f"{lab.ARMS[arm]} {flags}", seed, lab.COLUMNS, damage)
        return lab.measure(arm, seed, False)

    start, spent = time.time(), old.get("seconds", 0) if any(known.values()) else 0
    with ThreadPoolExecutor(2) as pool, stopping(pool):
        done = pool.map(one, todo) if runs else map(one, todo)
        bar = {"desc": lab.__spec__.parent, "total": len(todo), "leave": False}
        # disable=None: no bar where nobody watches, as in a file
        for (_, arm), found in zip(todo, tqdm(done, disable=None, **bar)):
            known[arm].append({key: plain(value) for key, value in found.items()})
            if runs or min(map(len, known.values())) == seeds:
                head["seconds"] = round(spent + time.time() - start)
                write(table, head | {"results": known})


@contextlib.contextmanager
def stopping(pool: ThreadPoolExecutor) -> Iterator[None]:
    """On an error, and on Ctrl-C, no run begins any more, and those under way end."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in list(CHILDREN):
            child.terminate()
        raise


def write(table: Path, content: dict) -> None:
    """A table, a series a line."""
    lines = re.sub(r"(?<=[\[\d,])\s+(?=[-\]\dN])", " ", json.dumps(content, indent=1))
    with atomic_write(table) as partial:
        partial.write_text(lines.replace("[ ", "[").replace(" ]", "]") + "\n", encoding="utf-8")


def plain(value: object) -> object:
    """Numbers to four digits, a curve's to three: a table is to be read, and kept."""
    if isinstance(value, str):
        return value
    array = np.asarray(value, float)
    return [float(f"{v:.3g}") for v in array] if array.ndim else float(f"{array:.4g}")


def trained(command: str, seed: int, columns: tuple, damage: tuple[str, str] | None = None) -> dict:
    """A training run as a process of one thread -> its columns of metrics.jsonl, each with the
    steps, as `name` and `name@`. One that stopped itself is a result, too: `stopped` says why. One
    that somebody stopped, or that broke, is none."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    environment["PYTHONIOENCODING"] = "utf-8"
    with tempfile.TemporaryDirectory() as folder:
        words = [*command.split(), "--seed", seed, "--run_dir", f"{folder}/run"]
        if damage:
            source, words[0] = ROOT / words[0], f"{folder}/{words[0]}"
            Path(words[0]).write_text(replaced(source, *damage), encoding="utf-8")
            environment["PYTHONPATH"] = str(ROOT)
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "encoding": "utf-8"}
        call = [sys.executable, *map(str, words)]
        with subprocess.Popen(call, cwd=ROOT, env=environment, **pipes) as child:
            CHILDREN.add(child)
            said = (child.communicate()[1].splitlines() or ["no word"])[-1]
            CHILDREN.discard(child)
        run, code = Path(folder, "run"), child.returncode
        if code == 0 and not (run / "summary.json").exists():
            raise BadInput(f"{command} --seed {seed}: was stopped before its end: no result")
        if code and not (code == 1 and ": error: " in said and (run / "metrics.jsonl").exists()):
            raise BadInput(f"{command} --seed {seed}: exit code {code}: {said}")
        lines = read_lines(run / "metrics.jsonl")
    found = {}
    for name in columns:
        found[f"{name}@"], found[name] = series(lines, name)
    return found | ({"stopped": said} if code else {})


# The table, in a terminal and in the page


def text(rows: list[list[str]]) -> str:
    """Cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)


def markdown(rows: list[list[str]]) -> str:
    """The same as a table of the page."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def filled(page: str, rows: list[list[str]], part: str = "") -> str:
    """The page with the table and the quoted numbers of a part ("": the lab itself) as `rows` has
    them; what it quotes of other parts stays."""
    cells = {f"{row[0]}/{head}": cell for row in rows[1:] for head, cell in zip(rows[0], row)}

    def table(found: re.Match) -> str:
        start, of, columns = found[1], found[2], found[3]
        if (of or "") != part:
            return found[0]
        places = [0, *map(int, columns.split())] if columns else range(len(rows[0]))
        shown = [[row[place] for place in places] for row in rows]
        return f"{start}{markdown(shown)}\n<!--/table-->"

    def quoted(found: re.Match) -> str:
        of, cell = found[1], found[2]
        if (of or "") != part:
            return found[0]
        return f"{cells[cell].split()[0]}<!--{part + '# ' * bool(part)}{cell}-->"

    page = re.sub(
        r"(<!--table(?: (\w+))?(?:: ([\d ]+))?-->\n).*?<!--/table-->", table, page, flags=re.DOTALL
    )
    return re.sub(r"[^\s(]+<!--(?:(\w+)# )?(.+?/.+?)-->", quoted, page)


# Over seeds


def over(runs: list[dict], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Median, and the two ends between which 80% of the seeds lie, of a number or a series."""
    values = np.array([run[name] for run in runs], float)  # inf: never
    return tuple(np.nanquantile(values, (0.5, 0.1, 0.9), 0, method="inverted_cdf"))


def cell(runs: list[dict], name: str, form: str = ".2f") -> str:
    """Median and range of 80% of the seeds, for a table: `0.51 (0.48–0.60)`."""
    middle, low, high = (format(x, form).replace("inf", "never") for x in over(runs, name))
    return middle if low == high else f"{middle} ({low}–{high})"


def wins(a: list[dict], b: list[dict], name: str | Callable[[dict], float]) -> str:
    """In how many seeds, of those that both have, `a` is above `b`: `19 of 20`.

    `name` is a number's, or a function of a run, such as `lambda run: run["greedy"][-1]`. A tie,
    like a NaN, is no win; where less is better, give the two the other way round.
    """
    value = name if callable(name) else lambda run: run[name]
    won = [value(one) > value(other) for one, other in zip(a, b)]
    return f"{sum(won)} of {len(won)}"


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


def entitle(figure: object, words: str) -> None:
    """The finding, or what takes its place."""
    figure.suptitle(words, x=0.01, ha="left", fontsize=13, fontweight="bold")


def sheet(title: str, *panels: str, width: float = 9.0, height: float = 4.2) -> tuple:
    """A figure under its finding, and axes side by side, one for each panel's title."""
    from matplotlib.figure import Figure  # here: it takes a second that no test should cost

    figure = Figure(figsize=(width, height), layout="constrained")
    entitle(figure, title)
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


def key_down(axis: object, colours: dict[str, str], x: float, y: float) -> None:
    """The same, downwards from a given place."""
    for place, (name, colour) in enumerate(colours.items()):
        label(axis, x, y - 0.065 * place, name, colour, xycoords="axes fraction")


def bands(axis: object, runs: list[dict], column: str, colour: str, **style: object) -> None:
    """The median of a column over its steps as a line, and the middle 80% of the seeds (of five:
    all) as a band, as far as all runs go. `width`: how many steps each run is averaged over."""
    width = style.pop("width", 1)
    length = min(len(run[column]) for run in runs)
    steps = np.array(runs[0][f"{column}@"][:length])
    smoothed = [{column: smooth(run[column], width)[:length]} for run in runs]
    line(axis, steps, smoothed, column, colour, **style)
    axis.set_xlabel("step")


def curves(axis: object, results: dict, column: str, colours: dict, width: int = 1) -> None:
    """A column of every run over its steps, a thin line for each seed, in its arm's colour."""
    for arm, colour in colours.items():
        for run in results[arm]:
            values = smooth(run[column], width)
            axis.plot(run[f"{column}@"], values, color=colour, linewidth=1.3, alpha=0.8)
    axis.set_xlabel("step")
