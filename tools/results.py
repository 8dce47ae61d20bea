"""The table of docs/results.md, from finished runs; or the ranges of docs/metrics.md.

python -m tools.results runs/grpo-arithmetic-s1 runs/grpo-arithmetic-s2 ...
python -m tools.results --ranges runs/*-arithmetic-s1
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

FIRST = 10  # steps of a run that count as its beginning; its last third is its end
SHOWN = {"greedy": 2, "sampled": 2, "length": 0}  # column -> digits


def read(folder: Path) -> dict:
    """A finished run's algorithm, and its numbers before and after."""
    path = folder / "config.json"
    try:
        found = {"algorithm": str(json.loads(path.read_text())["algorithm"])}
        path = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found["steps"] = lines
        found["length_before"] = float(lines[1]["response_len"])
        found["length_after"] = float(lines[-1]["response_len"])
        path = folder / "summary.json"
        summary = json.loads(path.read_text())
        names = [f"{how}_{when}" for how in ("greedy", "sampled") for when in ("before", "after")]
        return found | {name: float(summary[name]) for name in names}
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is no finished run: it has no {path.name}") from None
    except (OSError, ValueError, TypeError, LookupError) as error:
        why = f"{path.name} is not that of one ({error!r})"
        raise ValueError(f"{folder} is no finished run: {why}") from error


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
    # No usage: an error is one line
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranges", action="store_true", help="every metric, at both ends of a run")
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    try:
        words = parser.parse_args()
        print((ranges if words.ranges else table)(words.folders))
    except ValueError as error:
        parser.error(str(error))
