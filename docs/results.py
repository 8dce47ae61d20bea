"""The README's table of results: `python docs/results.py runs/grpo-arithmetic-s1
runs/grpo-arithmetic-s2 ...`."""

import argparse
import json
from collections import defaultdict
from pathlib import Path


def read(folder: Path) -> dict:
    """A finished run's algorithm, and its numbers before and after."""
    path = folder / "config.json"
    try:
        found = {"algorithm": str(json.loads(path.read_text())["algorithm"])}
        path = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found |= {
            f"length_{when}": float(lines[i]["response_len"])
            for when, i in (("before", 1), ("after", -1))
        }
        path = folder / "summary.json"
        summary = json.loads(path.read_text())
        names = [f"{how}_{when}" for how in ("greedy", "sampled") for when in ("before", "after")]
        return found | {name: float(summary[name]) for name in names}
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is no finished run: it has no {path.name}") from None
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ValueError(
            f"{folder} is no finished run: {path.name} is not that of one ({error!r})"
        ) from error


def table(folders: list[Path]) -> str:
    """Finished runs as a Markdown table, a row for each algorithm: before → after, a number for
    each run."""
    rows = defaultdict(list)
    for run in map(read, folders):
        rows[run["algorithm"]].append(run)

    def each(runs: list[dict], name: str, digits: int) -> str:
        return " / ".join(f"{run[name]:.{digits}f}" for run in runs)

    shown = {"greedy": 2, "sampled": 2, "length": 0}
    text = (
        "| algorithm | held-out greedy | held-out sampled | response length |\n|---|---|---|---|\n"
    )
    for name, runs in rows.items():
        cells = [
            f"{each(runs, f'{x}_before', d)} → {each(runs, f'{x}_after', d)}"
            for x, d in shown.items()
        ]
        text += f"| {name} | {' | '.join(cells)} |\n"
    return text


if __name__ == "__main__":
    # No usage: an error is one line
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    try:
        print(table(parser.parse_args().folders))
    except ValueError as error:
        parser.error(str(error))
