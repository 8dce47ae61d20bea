"""Compare several runs in one figure and one table.

    python -m tools.compare RUN_FOLDER ... [--out NAME]

It writes NAME.png and NAME.md (default: compare.png and compare.md) and prints the table. Runs may
be under way. Runs that differ only in their seed are of one kind. The figure shows the mean of a
kind as a line and the range from the lowest to the highest seed as a band; the table shows mean ±
standard deviation. A kind is named by its algorithm and by the flags in which it differs from other
kinds.
"""

import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from common.cli import BadInput, in_one_line, say
from common.records.curves import PANELS, ROUNDING, series, sheet, smooth
from common.records.files import atomic_write, read_lines, saved_config, write
from common.records.summary import fell
from tools import arguments

# Flags that do not change the training.
FREE = set(
    """id history back_to keep seed run_dir resume eval_only eval_every save_every save_hf wandb
    acted""".split()
)
# Flags that also name kinds of different algorithms, whose other flags differ by default.
EVERYWHERE = ("model", "task", "lr")
TITLES = {
    "reward": PANELS["reward"],
    "greedy": "held-out accuracy, greedy",
    "sampled": "held-out accuracy, sampled",
    **{name: PANELS[name] for name in ("response_len", "entropy", "grad_norm")},
}
# The colour-blind can tell these apart (Okabe and Ito, without the yellow).
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #56B4E9 #E69F00 #000000".split()
STYLES = ("-", "--", ":", "-.")
OURS = "<!-- tools.compare -->"  # the first line of a table that may be overwritten


@dataclass
class Run:
    """A run folder's config.json and the rows of its metrics.jsonl."""

    folder: Path
    config: dict
    lines: list[dict]


@dataclass
class Kind:
    """Runs with the same flags and different seeds."""

    runs: list[Run]
    label: str = ""

    @property
    def config(self) -> dict:
        return self.runs[0].config


def load(folder: Path) -> Run:
    """Load the run in `folder`. Raise BadInput if it has no run, or no measurement yet."""
    config = saved_config(folder)
    if not config:
        raise BadInput(f"{folder}: holds no run")
    lines = read_lines(folder / "metrics.jsonl")
    if not series(lines, "greedy").size:
        raise BadInput(f"{folder}: metrics.jsonl holds no measurement yet")
    return Run(folder, config, lines)


def flags_of(run: Run) -> dict:
    """Return the flags that change the training."""
    return {name: value for name, value in run.config.items() if name not in FREE}


def kinds(runs: list[Run]) -> list[Kind]:
    """Group runs by kind and keep their order. A second run with the same flags and seed, from
    another machine or version, starts a new kind."""
    found: list[Kind] = []
    for run in runs:
        for kind in found:
            seeds = [one.config["seed"] for one in kind.runs]
            if flags_of(kind.runs[0]) == flags_of(run) and run.config["seed"] not in seeds:
                kind.runs.append(run)
                break
        else:
            found.append(Kind([run]))
    labels = [label(kind, found) for kind in found]
    for kind, text in zip(found, labels):
        kind.label = text if labels.count(text) == 1 else f"{text} ({kind.runs[0].folder})"
    return found


def label(kind: Kind, among: list[Kind]) -> str:
    """Name a kind by its algorithm and the flags in which it differs from kinds of the same
    algorithm; for the flags of EVERYWHERE, from any kind."""
    words = [kind.config["algorithm"]]
    for name, value in flags_of(kind.runs[0]).items():
        others = [
            other
            for other in among
            if name in EVERYWHERE or other.config["algorithm"] == kind.config["algorithm"]
        ]
        if name == "algorithm" or all(other.config.get(name) == value for other in others):
            continue
        if isinstance(value, bool):
            words.append(name if value else f"no {name}")
        else:
            text = f"{value:g}" if isinstance(value, float) else str(value) or "''"
            words.append(f"{name} {text if len(text) <= 32 else '…' + text[-31:]}")
    return ", ".join(words)


def shared(runs: list[Run]) -> dict[str, str]:
    """Return the metrics that show the mechanism of all runs, with their common description."""
    first, *others = runs
    return {
        name: text
        for name, text in first.config["acted"].items()
        if all(other.config["acted"].get(name) == text for other in others)
        and all(series(run.lines, name).size for run in runs)
    }


def band(runs: list[Run], name: str, width: int) -> tuple[np.ndarray, ...]:
    """Return the steps that all runs have, and the mean, lowest and highest value at each, `[n]`.
    Metrics of every step are smoothed over `width` steps in each run. A NaN leaves a gap."""
    curves = []
    for run in runs:
        steps, values = series(run.lines, name)
        if name not in ("greedy", "sampled") and len(values):
            values = smooth(values, width)
        curves.append(dict(zip(steps.tolist(), values.tolist())))
    steps = sorted(set.intersection(*map(set, curves)))
    table = np.array([[curve[step] for step in steps] for curve in curves])  # [runs, n]
    return np.array(steps), table.mean(0), table.min(0), table.max(0)


def draw(among: list[Kind]) -> object:
    """Draw the figure of all kinds."""
    runs = [run for kind in among for run in kind.runs]
    titles = TITLES | shared(runs)
    if any(np.any(series(run.lines, "sampler_kl")[1] >= ROUNDING) for run in runs):
        titles.setdefault("sampler_kl", PANELS["sampler_kl"])
    width = min(len(run.lines) for run in runs) // 12 | 1
    setting = {f"{run.config['model']} on {run.config['task']}": None for run in runs}
    figure, axes = sheet(titles, " / ".join(setting))
    for name, axis in axes.items():
        marker = "o" if name in ("greedy", "sampled") else ""
        for i, kind in enumerate(among):
            colour = COLOURS[i % len(COLOURS)]
            style = STYLES[i // len(COLOURS) % len(STYLES)] + marker
            steps, mean, low, high = band(kind.runs, name, width)
            axis.plot(steps, mean, style, markersize=4, color=colour)
            if len(kind.runs) > 1:
                axis.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
    told = f"line: mean of {width} steps" if width > 1 else "line: each step"
    if len(runs) > len(among):
        told += ", mean of the seeds; band: lowest to highest seed"
    counts = [f" ({len(kind.runs)} seeds)" if len(kind.runs) > 1 else "" for kind in among]
    labels = [textwrap.fill(kind.label + count, 90) for kind, count in zip(among, counts)]
    columns = max(1, 100 // max(len(text) for text in labels))
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    labels = [text.replace("$", r"\$") for text in labels]  # show a $ as it is
    figure.legend(axis.lines, labels, title=told, **place)
    figure.set_figheight(figure.get_figheight() + 0.3 + 0.2 * len(labels) / columns)
    return figure


def figures(run: Run) -> dict[str, float]:
    """Return a run's numbers for the table, NaN if they are missing."""
    found = {}
    for name in ("greedy", "sampled", "response_len"):
        values = series(run.lines, name)[1] if any(name in line for line in run.lines) else [np.nan]
        found |= {f"{name} before": values[0], f"{name} after": values[-1]}
    greedy = series(run.lines, "greedy")[1]
    found |= {"best": np.nanmax(greedy), "fell": float(fell(greedy))}
    found |= {name: np.nansum(series(run.lines, name)[1]) for name in ("tokens", "seconds")}
    return found


def row(kind: Kind) -> str:
    """Write a row of the table."""
    runs = kind.runs
    found = [figures(run) for run in runs]

    def cell(of: str, digits: int) -> str:
        values = [each[of] for each in found if np.isfinite(each[of])]
        if not values:
            return "–"
        more = f" ± {stdev(values):,.{digits}f}" if len(values) > 1 else ""
        return f"{fmean(values):,.{digits}f}{more}"

    def change(of: str, digits: int) -> str:
        return f"{cell(f'{of} before', digits)} → {cell(f'{of} after', digits)}"

    done, steps = min(run.lines[-1]["step"] for run in runs), kind.config.get("steps")
    cells = [
        kind.label.replace("|", r"\|").replace("<", "&lt;"),  # neither a new column nor HTML
        ", ".join(str(run.config["seed"]) for run in runs),
        f"{done}" if done == steps else f"{done} of {steps}",
        *(change("greedy", 3), change("sampled", 3), cell("best", 3)),
        f"{sum(each['fell'] for each in found):.0f} of {len(runs)}",
        *(change("response_len", 0), cell("tokens", 0), cell("seconds", 0)),
    ]
    return f"| {' | '.join(cells)} |"


def table(among: list[Kind]) -> str:
    """Write the Markdown table, a row for each kind."""
    columns = "seed | steps | held-out greedy | held-out sampled | best greedy | fell"
    columns += " | response length | tokens trained on | seconds |"
    lines = [f"| kind | {columns}", f"|{'---|' * 10}", *map(row, among), ""]
    lines.append("Before → after; of several seeds mean ± standard deviation (n - 1).")
    return "\n".join(lines)


def target(out: str) -> tuple[Path, Path]:
    """Return the paths of picture and table for --out; raise BadInput if other files are there."""
    picture, text = Path(f"{out}.png"), Path(f"{out}.md")
    if not text.parent.is_dir():
        raise BadInput(f"--out {out}: no folder {text.parent}")
    ours = text.is_file() and text.read_bytes().startswith(OURS.encode())
    for path in (picture, text):
        if path.exists() and not ours:
            raise BadInput(f"--out {out}: {path} is another file: give another name")
    return picture, text


def main(folders: list[Path], out: str) -> None:
    """Write the picture and the table, and print the table."""
    picture, text = target(out)
    among = kinds([load(folder) for folder in {path.resolve(): path for path in folders}.values()])
    figure, rows = draw(among), table(among)
    command = shlex.join(["python", "-m", "tools.compare", *map(str, folders), "--out", out])
    made = f"{OURS}\n\n![Curves]({picture.name})\n\n{rows}\n\nMade by `{command}`\n"
    write(text, made)  # first, because its first line shows that both files are ours
    with atomic_write(picture) as partial:
        figure.savefig(partial, dpi=100, format="png")
    say(rows, "", picture, text)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--out", default="compare", help="a name (default: compare)")
    words = parser.parse_args()
    try:
        main(words.folders, words.out)
    except (BadInput, OSError) as error:
        parser.error(in_one_line(error))
