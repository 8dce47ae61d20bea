"""Compare the numbers of several runs in one table.

    python -m tools.compare RUN_FOLDER ...

Runs may be under way. Runs that differ only in their seed are of one kind, and share a row with
mean ± standard deviation. A kind is named by its algorithm and by the flags in which it differs
from other kinds. `python -m tools.page RUN OTHER` draws the curves of two runs.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from common.cli import BadInput, in_one_line
from common.records.curves import series
from common.records.files import read_lines, saved_config
from common.records.summary import fell
from tools import arguments

# Flags that do not change the training.
FREE = set(
    """id history back_to keep seed run_dir resume eval_every save_every save_hf wandb
    acted""".split()
)
# Flags that also name kinds of different algorithms, whose other flags differ by default.
EVERYWHERE = ("model", "task", "lr")


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
    groups: list[Kind] = []
    for run in runs:
        for kind in groups:
            seeds = [member.config["seed"] for member in kind.runs]
            if flags_of(kind.runs[0]) == flags_of(run) and run.config["seed"] not in seeds:
                kind.runs.append(run)
                break
        else:
            groups.append(Kind([run]))
    labels = [label(kind, groups) for kind in groups]
    for kind, text in zip(groups, labels):
        kind.label = text if labels.count(text) == 1 else f"{text} ({kind.runs[0].folder})"
    return groups


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


def figures(run: Run) -> dict[str, float]:
    """Return a run's numbers for the table, NaN if they are missing."""
    numbers = {}
    for name in ("greedy", "sampled", "response_len"):
        values = series(run.lines, name)[1] if any(name in line for line in run.lines) else [np.nan]
        numbers |= {f"{name} before": values[0], f"{name} after": values[-1]}
    greedy = series(run.lines, "greedy")[1]
    numbers |= {"best": np.nanmax(greedy), "fell": float(fell(greedy))}
    numbers |= {name: np.nansum(series(run.lines, name)[1]) for name in ("tokens", "seconds")}
    return numbers


def row(kind: Kind) -> str:
    """Write a row of the table."""
    runs = kind.runs
    numbers = [figures(run) for run in runs]

    def cell(of: str, digits: int) -> str:
        values = [each[of] for each in numbers if np.isfinite(each[of])]
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
        f"{sum(each['fell'] for each in numbers):.0f} of {len(runs)}",
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


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    try:
        folders = {path.resolve(): path for path in parser.parse_args().folders}
        print(table(kinds([load(folder) for folder in folders.values()])))
    except (BadInput, OSError) as error:
        parser.error(in_one_line(error))
