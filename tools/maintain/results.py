"""The table of docs/results.md from finished runs, or the ranges of docs/metrics.md.

    python -m tools.maintain.results runs/grpo-arithmetic-s1 runs/grpo-arithmetic-s2 ...
    python -m tools.maintain.results --ranges runs/*-arithmetic-s1

All numbers come from metrics.jsonl. A run is finished if its last line is that of its last step.
"""

from collections import defaultdict
from pathlib import Path

from common.cli import BadInput, in_one_line
from tools import arguments
from tools.compare import load

FIRST = 10  # steps of a run that count as its beginning; its last third is its end
SHOWN = {"greedy": 2, "sampled": 2, "response_len": 0}  # metric -> digits


def read(folder: Path) -> dict:
    """A finished run's algorithm, and its numbers before and after."""
    run = load(folder)
    done, steps = run.lines[-1]["step"], run.config.get("steps")
    if done != steps:
        raise BadInput(f"{folder} is no finished run: at step {done} of {steps}")
    found = {"algorithm": run.config["algorithm"], "steps": run.lines}
    for metric in SHOWN:
        known = values_of(run.lines, metric)
        if not known:
            raise BadInput(f"{folder}: metrics.jsonl has no {metric}")
        found[metric] = (known[0], known[-1])
    return found


def values_of(lines: list[dict], metric: str) -> list[float]:
    """The metric's values in these lines; null is left out."""
    return [line[metric] for line in lines if line.get(metric) is not None]


def table(folders: list[Path]) -> str:
    """Finished runs as a Markdown table: a row for each algorithm, a number for each run."""
    runs = defaultdict(list)
    for folder in folders:
        run = read(folder)
        runs[run["algorithm"]].append(run)
    lines = ["| algorithm | held-out greedy | held-out sampled | response length |"]
    lines.append("|---" * 4 + "|")
    for name, seeds in runs.items():
        cells = []
        for metric, digits in SHOWN.items():
            before = " / ".join(f"{run[metric][0]:.{digits}f}" for run in seeds)
            after = " / ".join(f"{run[metric][1]:.{digits}f}" for run in seeds)
            cells.append(f"{before} → {after}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def span(values: list[float]) -> str:
    """Lowest and highest, to two digits: `0.12 to 0.5`, or the one number."""
    low, high = (f"{float(f'{value:.2g}'):g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def ranges(folders: list[Path]) -> str:
    """Every metric's mean in the first steps and in the last third, from the lowest run to the
    highest, as a Markdown table."""
    begins, ends = defaultdict(list), defaultdict(list)  # metric -> the mean of each run
    for folder in folders:
        steps = read(folder)["steps"]
        third = max(1, len(steps) // 3)
        for name in {key for line in steps for key in line}:
            first = values_of(steps[: FIRST + 1], name)
            last = values_of(steps[-third:], name)
            if first and last:
                begins[name].append(sum(first) / len(first))
                ends[name].append(sum(last) / len(last))
    lines = [f"| metric | first {FIRST} steps | last third |", "|---|---|---|"]
    for name in sorted(begins.keys() - {"step"}):
        lines.append(f"| `{name}` | {span(begins[name])} | {span(ends[name])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--ranges", action="store_true", help="every metric, at start and end")
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    try:
        words = parser.parse_args()
        print((ranges if words.ranges else table)(words.folders))
    except (BadInput, OSError) as error:
        parser.error(in_one_line(error))
