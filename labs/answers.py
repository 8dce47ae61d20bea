"""The numbers of the answer key: labs/answers.md, filled from the labs' tables.

    python -m labs.answers          after a table has changed

Between `<!--numbers: LAB-->` and `<!--/numbers-->` it writes the lab's table once more. Behind each
median stands what a single seed may give: the range of our n seeds, widened at both ends by 2.5 / n
of itself (five seeds: by half, twenty: by an eighth).
"""

import argparse
import importlib
import json
import re
import warnings
from pathlib import Path
from types import ModuleType

import common  # noqa: F401  (before torch)
from common.plumbing.errors import BadInput, first_line
import numpy as np
from common.plumbing.folder import whole

from labs import lab

PAGE = lab.HERE / "answers.md"
NUMBERS = re.compile(r"(<!--numbers: (\w+)-->\n).*?(<!--/numbers-->)", re.DOTALL)


def number(cell: str) -> float:
    """The first word of a cell as a number; NaN if it is none."""
    try:
        return float(cell.split()[0].replace("never", "inf"))
    except ValueError:
        return np.nan


def tolerance(values: list[float]) -> tuple[float, float]:
    """Between which numbers one more seed may end; a share stays one, a count is not negative."""
    low, high = min(values), max(values)
    if not np.isfinite(high):
        return low, high
    more = 2.5 / len(values) * (high - low)
    least = 0.0 if low >= 0 else -np.inf
    most = 1.0 if 0 <= low and high <= 1 else np.inf
    return max(low - more, least), min(high + more, most)


def answer(cells: list[str], middle: str) -> str:
    """A cell of the key: of the page's, and of every seed's alone."""
    values, first = [number(cell) for cell in cells], middle.split()[0]
    values = [value for value in values if not np.isnan(value)]
    if " of " in middle or not np.isfinite(values).any():
        return middle
    digits = len(first.partition(".")[2]) if "e" not in first else None
    form = ".1e" if digits is None else f".{digits}f"
    low, high = (format(x, form).replace("inf", "never") for x in tolerance(values))
    unit = re.sub(r"^\S+( \(.*?\))?", "", middle)
    return f"{first}{unit}" if low == high else f"{first} ({low} to {high}){unit}"


def numbers(module: ModuleType, results: dict) -> list[list[str]]:
    """The lab's table with the range of one seed."""
    most = max(map(len, results.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of medians of what never came
        alone = [
            module.rows({arm: [runs[min(seed, len(runs) - 1)]] for arm, runs in results.items()})
            for seed in range(most)
        ]
    head, *rows = module.rows(results)
    return [head] + [
        [row[0], *(answer([one[y + 1][x + 1] for one in alone], c) for x, c in enumerate(row[1:]))]
        for y, row in enumerate(rows)
    ]


def filled(page: str) -> str:
    """The key with the numbers of the tables that are there now."""

    def block(found: re.Match) -> str:
        table = lab.HERE / "tables" / f"{found[2]}.json"
        results = json.loads(table.read_text(encoding="utf-8"))["results"]
        made = numbers(importlib.import_module(f"labs.{found[2]}"), results)
        return f"{found[1]}{lab.markdown(made)}\n{found[3]}"

    return NUMBERS.sub(block, page)


def main() -> None:
    """Fill the page."""
    parser = argparse.ArgumentParser(
        prog="labs.answers",
        usage=argparse.SUPPRESS,  # an error is one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    try:
        with whole(PAGE) as partial:
            Path(partial).write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        print(PAGE)
    except (BadInput, OSError) as error:
        parser.error(first_line(error))


if __name__ == "__main__":
    main()
