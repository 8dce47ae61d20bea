"""The course as a notebook, made from its page: labs/course.md.

    python -m labs.notebook [FILE]          default: runs/labs/course.ipynb

A fenced bash block of the page becomes a cell, each of its lines a command of the shell; a line
`**Look** at FILE.png` shows that figure. All else is text. The first cell has what makes every
command take seconds.
"""

import argparse
import json
import os
import re
from pathlib import Path

from common.distributed import BadInput, first_line
from common.plumbing.folder import whole
from tools.marks import ROOT

PAGE = Path(__file__).parent / "course.md"
FIRST = """\
import os
import sys

from IPython.display import Image

os.chdir({root!r})  # the repository
QUICK = STEPS = ""
# To try the machine, in seconds:
# QUICK, STEPS = "--quick", "--steps 9 --prompts_per_step 4 --eval_problems 8"
"""
PART = re.compile(r"^```bash\n(.*?)^```\n|^\*\*Look\*\* at `(.*?)`.*?\n", re.MULTILINE | re.DOTALL)


def command(line: str) -> str:
    """A line for the shell as a line of a cell: this Python, and a place for quick flags."""
    line, mark, comment = line.partition("  # ")
    if re.match(r"python (\w+\.py|-m labs\.(?!blank|grade))", line):
        line += " {STEPS}" if ".py" in line else " {QUICK}"
    return "!" + re.sub(r"\bpython ", '"{sys.executable}" ', line) + mark + comment


def cell(kind: str, text: str) -> dict:
    """A cell of nbformat 4."""
    more = {"execution_count": None, "outputs": []} if kind == "code" else {}
    lines = text.strip("\n").splitlines(keepends=True)
    return {"cell_type": kind, "metadata": {}, "source": lines} | more


def notebook(page: str, root: Path, folder: Path) -> dict:
    """A notebook of the page, which works in the folder `root` and lies in `folder`."""
    page = re.sub(r"\]\((?!http)", f"]({os.path.relpath(PAGE.parent, folder)}/", page)
    cells, end = [cell("code", FIRST.format(root=str(root)))], 0
    for part in PART.finditer(page):
        cells.append(cell("markdown", page[end : part.end() if part[2] else part.start()]))
        shell = "\n".join(map(command, (part[1] or "").splitlines()))
        cells.append(cell("code", shell or f'Image("{part[2]}")'))
        end = part.end()
    cells = [*cells, cell("markdown", page[end:])]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    kept = [cell for cell in cells if cell["source"]]
    return {"nbformat": 4, "nbformat_minor": 4, "metadata": kernel, "cells": kept}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="labs.notebook",
        usage=argparse.SUPPRESS,  # an error is one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Path("runs/labs/course.ipynb")
    parser.add_argument("file", nargs="?", type=Path, default=default, metavar="FILE")
    file = parser.parse_args().file
    try:
        if file.suffix != ".ipynb":
            raise BadInput(f"{file}: a notebook's name ends in .ipynb")
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole(file) as partial:
            made = notebook(PAGE.read_text(), ROOT, file.parent)
            partial.write_text(json.dumps(made, indent=1) + "\n")
        print(file)
    except (BadInput, OSError) as error:
        parser.error(first_line(error))
