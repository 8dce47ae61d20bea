"""The README's table of results: `python docs/results.py runs/grpo-arithmetic-s1 runs/grpo-arithmetic-s2 ...`."""

import json
import sys
from collections import defaultdict
from pathlib import Path


def table(folders: list[Path]) -> str:
    """Finished runs as a Markdown table, a row for each algorithm: before → after, a number for each run."""
    rows = defaultdict(list)
    for folder in folders:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "summary.json").read_text())
        summary |= {"length_before": lines[1]["response_len"], "length_after": lines[-1]["response_len"]}
        rows[json.loads((folder / "config.json").read_text())["algorithm"]].append(summary)

    def each(runs: list[dict], name: str, digits: int) -> str:
        return " / ".join(f"{run[name]:.{digits}f}" for run in runs)

    shown = {"greedy": 2, "sampled": 2, "length": 0}
    text = "| algorithm | held-out greedy | held-out sampled | response length |\n|---|---|---|---|\n"
    for name, runs in rows.items():
        cells = [f"{each(runs, f'{x}_before', d)} → {each(runs, f'{x}_after', d)}" for x, d in shown.items()]
        text += f"| {name} | {' | '.join(cells)} |\n"
    return text


def main(arguments: list[str]) -> int:
    """Print the table; one line and 2 where a folder holds no finished run."""
    for folder in map(Path, arguments):
        for name in ("config.json", "metrics.jsonl", "summary.json"):
            if not (folder / name).is_file():
                print(f"results.py: error: {folder} is no finished run: it has no {name}", file=sys.stderr)
                return 2
    if not arguments:
        print("results.py: error: usage: python docs/results.py RUN_FOLDER ...", file=sys.stderr)
        return 2
    print(table([Path(argument) for argument in arguments]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
