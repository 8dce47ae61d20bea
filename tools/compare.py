"""Several runs in one figure and one table, or the curves of each run.

    python -m tools.compare RUN_FOLDER ... [--out NAME]
    python -m tools.compare --curves RUN_FOLDER ...
    python -m tools.compare --sheet FILE.png RUN_FOLDER ...

The first command writes NAME.png and NAME.md (default: compare.png and compare.md) and prints the
table. Runs that differ only in their seed are of one kind. The figure shows their mean as a line
and the range from the lowest to the highest seed as a band; the table shows their mean ± their
standard deviation. A kind is called by its algorithm and by the flags in which it differs from
another kind.

--curves draws the curves.png of each run again, also while the run is under way. --sheet draws one
picture with a row of four small panels for each run; the first run is repeated in grey in all rows.
"""

import json
import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from common.cli import BadInput, blame, in_one_line, say
from common.curves import BLUE, ORANGE, PANELS, ROUNDING, series, sheet, smooth
from common.run import draw_run, read_lines, saved_config, atomic_write
from tools import arguments

# Flags that do not change the training
FREE = set("seed run_dir resume eval_only eval_every save_every save_hf wandb acted".split())
# Flags that also tell kinds of different algorithms apart; the others have defaults of their own
EVERYWHERE = ("model", "task", "lr")
TITLES = {
    "reward": PANELS["reward"],
    "greedy": "held-out accuracy, greedy",
    "sampled": "held-out accuracy, sampled",
    **{name: PANELS[name] for name in ("response_len", "entropy", "grad_norm")},
}
# Told apart by the colour-blind, too (Okabe and Ito, without the yellow)
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #56B4E9 #E69F00 #000000".split()
STYLES = ("-", "--", ":", "-.")
NUMBER = int | float
# The values that tools read from a config.json, and their types
CONFIG = {"algorithm": str, "model": str, "task": str, "seed": int, "lr": NUMBER, "acted": dict}
OURS = "<!-- tools.compare -->"  # the first line of a table that may be written over


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


def fit(value: object, kind: object, name: str = "") -> None:
    """ValueError if `value`, which messages call `name`, is not of its kind: a type, `[kind]` for a
    list, `{name: kind}` for an object that has at least these names."""
    if isinstance(kind, dict):
        for key, of in kind.items():
            if not isinstance(value, dict) or key not in value:
                raise ValueError(f"{name} has no {key}".strip())
            fit(value[key], of, f"{name} {key}".strip())
        return
    if isinstance(kind, list):
        fit(value, list, name)
        for place, one in enumerate(value, 1):
            fit(one, kind[0], f"{name} {place}")
        return
    right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if right and isinstance(value, NUMBER):
        right = abs(value) < 1e300  # neither NaN nor too large for a float
    if not right:
        raise ValueError(f"{name} is {str(value)[:40]!r}")
    if isinstance(value, str):
        value.encode()  # half of a character cannot be written anywhere


def config_of(folder: Path) -> dict:
    """config.json of the run in `folder`, empty if there is none. BadInput if a value that tools
    read cannot be a run's."""
    config = saved_config(folder)
    with blame(f"{folder}/config.json: is not a run's"):
        if config:
            fit(config, CONFIG)
            fit(config["acted"], dict.fromkeys(config["acted"], str), "acted")
            json.dumps(config, ensure_ascii=False).encode()  # the other flags' texts, too
    return config


def run_of(folder: Path) -> tuple[dict, list[dict]]:
    """The config.json and the rows of metrics.jsonl of the run in `folder`. BadInput if there is
    none, or if a metric is neither a number nor null."""
    if not (config := config_of(folder)):
        raise BadInput(f"{folder}: holds no run")
    path = folder / "metrics.jsonl"
    lines = read_lines(path)
    for number, line in enumerate(lines, 1):
        with blame(f"{path}:{number}: is not a run's"):
            fit(line, dict.fromkeys(line, NUMBER | None))
    return config, lines


def load(folder: Path) -> Run:
    """The run in `folder`. BadInput if nothing is measured yet, or if metrics.jsonl has a step
    twice or lacks one."""
    config, lines = run_of(folder)
    for number, line in enumerate(lines, 1):
        if line["step"] != lines[0]["step"] + number - 1:
            path = folder / "metrics.jsonl"
            raise BadInput(f"{path}:{number}: step {line['step']} does not follow the line before")
    if not series(lines, "greedy").size:
        raise BadInput(f"{folder}: metrics.jsonl holds no measurement yet")
    return Run(folder, config, lines)


def kinds(runs: list[Run]) -> list[Kind]:
    """Runs sorted by kind, in the given order. A second run with the same flags and seed (another
    machine, another version) starts a new kind."""
    found, seen = {}, {}
    for run in runs:
        flags = tuple(sorted((k, repr(v)) for k, v in run.config.items() if k not in FREE))
        again = seen[flags, run.config["seed"]] = seen.get((flags, run.config["seed"]), -1) + 1
        found.setdefault((flags, again), Kind([])).runs.append(run)
    for kind in found.values():
        kind.label = label(kind, list(found.values()))
    labels = [kind.label for kind in found.values()]
    for kind in found.values():
        if labels.count(kind.label) > 1:
            kind.label += f" ({kind.runs[0].folder})"
    return list(found.values())


def label(kind: Kind, among: list[Kind]) -> str:
    """The algorithm, and the flags in which it differs from kinds of the same algorithm (and
    `EVERYWHERE` from any)."""
    same = [other for other in among if other.config["algorithm"] == kind.config["algorithm"]]
    several = {
        name: {repr(other.config.get(name)) for other in (among if name in EVERYWHERE else same)}
        for name in kind.config
        if name not in FREE | {"algorithm"}
    }
    words = [kind.config["algorithm"]]
    for name in (name for name, values in several.items() if len(values) > 1):
        value = kind.config[name]
        if isinstance(value, bool):
            words.append(name if value else f"no {name}")
        else:
            text = f"{value:g}" if isinstance(value, float) else str(value) or "''"
            words.append(f"{name} {text if len(text) <= 32 else '…' + text[-31:]}")
    return ", ".join(words)


def shared(among: list[Kind]) -> dict[str, str]:
    """The metrics that every run has and that show its mechanism -> their descriptions, except
    those with different meanings."""
    words: dict[str, set] = {}
    for kind in among:
        for name, text in kind.config["acted"].items():
            words.setdefault(name, set()).add(text)
    runs = [run for kind in among for run in kind.runs]
    return {
        name: texts.pop()
        for name, texts in words.items()
        if len(texts) == 1 and all(series(run.lines, name).size for run in runs)
    }


def band(runs: list[Run], name: str, width: int) -> tuple[np.ndarray, ...]:
    """The steps, and the mean, lowest and highest value of the runs at each, `[n]`, up to the end
    of the shortest run.

    Metrics of every step are smoothed over `width` steps, run by run; NaN is a gap.
    """
    curves = []
    for run in runs:
        steps, values = series(run.lines, name)
        if name not in ("greedy", "sampled"):
            values = smooth(values, width) if len(values) else values
        curves.append(dict(zip(steps.tolist(), values.tolist())))
    last = min(max(curve, default=-1) for curve in curves)
    steps = sorted({step for curve in curves for step in curve if step <= last})
    table = np.array([[curve.get(step, np.nan) for step in steps] for curve in curves])
    known = np.ma.masked_invalid(table)  # [runs, n]
    found = (known.mean(axis=0), known.min(axis=0), known.max(axis=0))
    return np.array(steps), *(np.ma.filled(values, np.nan) for values in found)


def draw(among: list[Kind]) -> object:
    """The figure of all kinds."""
    runs = [run for kind in among for run in kind.runs]
    titles = TITLES | shared(among)
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
    labels = [text.replace("$", r"\$") for text in labels]  # a $ is a $
    figure.legend(axis.lines, labels, title=told, **place)
    figure.set_figheight(figure.get_figheight() + 0.3 + 0.2 * len(labels) / columns)
    return figure


def figures(run: Run) -> dict[str, float]:
    """The numbers of a run in the table; NaN for missing ones."""
    found = {}
    for name in ("greedy", "sampled", "response_len"):
        values = series(run.lines, name)[1] if any(name in line for line in run.lines) else [np.nan]
        found |= {f"{name} before": values[0], f"{name} after": values[-1]}
    known = [value for value in series(run.lines, "greedy")[1] if np.isfinite(value)]
    found["best"] = max(known, default=np.nan)
    found |= {name: np.nansum(series(run.lines, name)[1]) for name in ("tokens", "seconds")}
    return found


def row(name: str, runs: list[Run]) -> str:
    """A row of the table: runs that differ in their seeds, or one run."""
    found = [figures(run) for run in runs]

    def cell(of: str, digits: int) -> str:
        values = [each[of] for each in found if np.isfinite(each[of])]
        if not values:
            return "–"
        more = f" ± {stdev(values):,.{digits}f}" if len(values) > 1 else ""
        return f"{fmean(values):,.{digits}f}{more}"

    def change(of: str, digits: int) -> str:
        return f"{cell(f'{of} before', digits)} → {cell(f'{of} after', digits)}"

    done, steps = min(run.lines[-1]["step"] for run in runs), runs[0].config.get("steps")
    cells = [
        name.replace("|", r"\|").replace("<", "&lt;"),  # neither a new column nor HTML
        ", ".join(str(run.config["seed"]) for run in runs),
        f"{done}" if done == steps else f"{done} of {steps}",
        *(change("greedy", 3), change("sampled", 3), cell("best", 3)),
        *(change("response_len", 0), cell("tokens", 0), cell("seconds", 0)),
    ]
    return f"| {' | '.join(cells)} |"


def table(among: list[Kind], each_run: bool = True) -> str:
    """Markdown: a row for each kind, then a row for each run."""
    columns = "seed | steps | held-out greedy | held-out sampled | best greedy | response length"
    columns += " | tokens trained on | seconds |"
    rule = f"|{'---|' * 9}"
    lines = [f"| kind | {columns}", rule, *(row(kind.label, kind.runs) for kind in among), ""]
    lines.append("Before → after; of several seeds mean ± standard deviation (n - 1).")
    if each_run:
        lines += ["", f"| run | {columns}", rule]
        lines += [row(str(run.folder), [run]) for kind in among for run in kind.runs]
    return "\n".join(lines)


def target(out: str) -> tuple[Path, Path]:
    """The picture's and the table's path for --out; BadInput if another file has that path."""
    name = Path(out)
    if name.is_dir():
        name = name / "compare"
    elif name.suffix in (".png", ".md"):
        name = name.with_suffix("")
    picture, text = (name.with_name(f"{name.name}.{kind}") for kind in ("png", "md"))
    if not name.parent.is_dir():
        raise BadInput(f"--out {out}: no folder {name.parent}")
    ours = text.is_file() and text.read_bytes().startswith(OURS.encode())
    for path in (picture, text):
        if path.exists() and not ours:
            raise BadInput(f"--out {out}: {path} is another file: give another name")
    return picture, text


def draw_sheet(runs: list[Run]) -> object:
    """A figure with four small panels for each run: reward, held-out accuracy, response length and
    the first metric that shows the algorithm acting. The first run is grey in the other rows. All
    rows end with the shortest run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.35 * len(runs) + 0.7), layout="constrained")
    figure.suptitle(
        "line: mean of 9 steps; held-out accuracy: circles greedy, squares sampled; "
        f"grey: {runs[0].config['algorithm']}",
        fontsize=11,
    )
    rows = figure.subplots(len(runs), 4, sharex=True, squeeze=False)
    for run, axes in zip(runs, rows):
        own = next(iter(run.config["acted"]))
        for shown, grey in ((runs[0], True), (run, False)):
            draw_row(axes, shown, own, grey)
        axes[0].set_ylabel(run.config["algorithm"], fontsize=11, fontweight="bold")
        axes[3].set_title(textwrap.fill(run.config["acted"][own], 29), fontsize=9, color=ORANGE)
    for axis, title in zip(rows[0], ("reward", "held-out accuracy", "response length (tokens)")):
        axis.set_title(title, fontsize=11)
    shortest = min(run.lines[-1]["step"] for run in runs)
    for axis in rows[-1]:
        axis.set_xlabel("step", fontsize=10)
        axis.set_xlim(-0.03 * shortest, 1.03 * shortest)
    return figure


def draw_row(axes: np.ndarray, run: Run, own: str, grey: bool) -> None:
    """One run's curves in the four panels of a row; in grey without its own metric."""
    blue, orange = ("0.75", "0.75") if grey else (BLUE, ORANGE)
    for axis, name in zip(axes, ("reward", "greedy", "response_len", own)):
        axis.tick_params(labelsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.5g}")
        if name == own and grey:
            continue
        steps, values = series(run.lines, name)
        if name == "greedy":
            axis.plot(steps, values, "o-", markersize=3, color=blue)
            axis.plot(*series(run.lines, "sampled"), "s--", markersize=3, color=orange)
            axis.set_ylim(-0.03, 1.03)
        elif 2 * len(steps) < len(run.lines):  # rare events are dots
            axis.plot(steps, values, "o", markersize=3, color=orange)
        else:
            axis.plot(steps, smooth(values, 9), color=orange if name == own else blue)
    axes[0].set_ylim(-0.03, 1.03)


def save_sheet(folders: list[Path], picture: Path) -> None:
    """Draw the sheet of these runs into `picture`."""
    if picture.suffix != ".png" or not picture.parent.is_dir():
        raise BadInput(f"--sheet {picture}: must be a .png file in a folder that exists")
    from PIL import Image  # a dependency of matplotlib

    figure = draw_sheet([load(folder) for folder in folders])
    with atomic_write(picture) as partial:
        figure.savefig(partial, dpi=100, format="png")
        few_colours = Image.open(partial).convert("RGB").quantize(64)  # a third of the bytes
        few_colours.save(partial, format="png", optimize=True)
    say(picture)


def main(folders: list[Path], out: str) -> None:
    """Write the picture and the table, and print the table."""
    picture, text = target(out)
    among = kinds([load(folder) for folder in {path.resolve(): path for path in folders}.values()])
    figure, rows = draw(among), table(among)
    command = shlex.join(["python", "-m", "tools.compare", *sys.argv[1:]])
    with atomic_write(
        text
    ) as partial:  # first: its first line shows that the picture beside it is ours
        made = f"{OURS}\n\n![Curves]({picture.name})\n\n{rows}\n\nMade by `{command}`\n"
        partial.write_text(made, encoding="utf-8")
    with atomic_write(picture) as partial:
        figure.savefig(partial, dpi=100, format="png")
    say(rows, "", picture, text)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--out", default="compare", help="a name or a folder (default: compare)")
    parser.add_argument("--curves", action="store_true", help="draw the curves.png of each run")
    parser.add_argument("--sheet", type=Path, metavar="FILE.png", help="a row for each run")
    words = parser.parse_args()
    try:
        if words.curves:
            for folder in words.folders:
                run_of(folder)  # BadInput where there is no run
                say(draw_run(folder))
        elif words.sheet:
            save_sheet(words.folders, words.sheet)
        else:
            main(words.folders, words.out)
    except (BadInput, OSError) as error:
        parser.error(in_one_line(error))
