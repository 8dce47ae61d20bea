"""The table of docs/results.md, from finished runs.

python -m tools.results runs/grpo-arithmetic-s1 runs/grpo-arithmetic-s2 ...
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

SHOWN = {"greedy": 2, "sampled": 2, "length": 0}  # column -> digits


def read(folder: Path) -> dict:
    """A finished run's algorithm, and its numbers before and after."""
    path = folder / "config.json"
    try:
        found = {"algorithm": str(json.loads(path.read_text())["algorithm"])}
        path = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
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


if __name__ == "__main__":
    # No usage: an error is one line
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    try:
        print(table(parser.parse_args().folders))
    except ValueError as error:
        parser.error(str(error))
