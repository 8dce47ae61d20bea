"""The table of docs/results.md, from finished runs; or the ranges of docs/metrics.md. All numbers
are those of metrics.jsonl: a run is finished where its last line is that of its last step.

python -m tools.maintain.results runs/grpo-arithmetic-s1 runs/grpo-arithmetic-s2 ...
python -m tools.maintain.results --ranges runs/*-arithmetic-s1
"""

from collections import defaultdict
from pathlib import Path

from common.plumbing.errors import BadInput, first_line
from tools import arguments
from tools.compare import load

FIRST = 10  # steps of a run that count as its beginning; its last third is its end
SHOWN = {"greedy": 2, "sampled": 2, "length": 0}  # column -> digits


def read(folder: Path) -> dict:
    """A finished run's algorithm, and its numbers before and after."""
    run = load(folder)
    done, steps = run.lines[-1]["step"], run.config.get("steps")
    if done != steps:
        raise BadInput(f"{folder} is no finished run: at step {done} of {steps}")
    found = {"algorithm": run.config["algorithm"], "steps": run.lines}
    for name, metric in (("greedy",) * 2, ("sampled",) * 2, ("length", "response_len")):
        known = [line[metric] for line in run.lines if line.get(metric) is not None]
        if not known:
            raise BadInput(f"{folder}: metrics.jsonl has no {metric}")
        found |= {f"{name}_before": known[0], f"{name}_after": known[-1]}
    return found


def table(folders: list[Path]) -> str:
    """Finished runs as a Markdown table: a row for each algorithm, a number for each run."""
    runs = defaultdict(list)
    for run in map(read, folders):
        runs[run["algorithm"]].append(run)

    def each(name: str, column: str) -> str:
        return " / ".join(
            f"{run[column]:.{SHOWN[column.partition('_')[0]]}f}" for run in runs[name]
        )

    lines = ["| algorithm | held-out greedy | held-out sampled | response length |"]
    lines.append("|---" * 4 + "|")
    for name in runs:
        cells = [f"{each(name, f'{x}_before')} → {each(name, f'{x}_after')}" for x in SHOWN]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def span(values: list[float]) -> str:
    """Lowest and highest, to two digits: `0.12 to 0.5`, or the one number."""
    low, high = (f"{float(f'{value:.2g}'):g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def ranges(folders: list[Path]) -> str:
    """Every metric's mean in the first steps and in the last third, lowest and highest run of it,
    as a Markdown table."""
    means = defaultdict(list)  # metric -> (first, last) of each run
    for run in map(read, folders):
        steps = run["steps"]
        for name in dict.fromkeys(key for line in steps for key in line):
            first, last = (
                [line[name] for line in part if line.get(name) is not None]
                for part in (steps[: FIRST + 1], steps[-(len(steps) // 3 or 1) :])
            )
            if first and last:
                means[name].append((sum(first) / len(first), sum(last) / len(last)))
    lines = [f"| metric | first {FIRST} steps | last third |", "|---|---|---|"]
    for name in sorted(means.keys() - {"step"}):
        begin, end = (span(list(values)) for values in zip(*means[name]))
        lines.append(f"| `{name}` | {begin} | {end} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--ranges", action="store_true", help="every metric, at both ends of a run")
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    try:
        words = parser.parse_args()
        print((ranges if words.ranges else table)(words.folders))
    except (BadInput, OSError) as error:
        parser.error(first_line(error))
