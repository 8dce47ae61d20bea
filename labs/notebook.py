"""The course as a notebook, made from its page: labs/course.md.

    python -m labs.notebook [FILE]              default: runs/labs/course.ipynb
    python -m labs.notebook --teacher [FILE]    with the teacher's notes and the answer key's link

It works in any checkout of this repository: its first cell looks for the folder upwards from where
the notebook lies. On a machine without one, such as Colab, its first lines clone and install. A
fenced bash block of the page becomes a cell, each of its lines a command of the shell; a line
`**Look** at FILE.png` shows that figure. All else is text. What stands between `<!--teacher-->` and
`<!--/teacher-->` is left out of a student's notebook. A file that is there is not written over: it
may hold somebody's answers.
"""

import argparse
import json
import os
import re
from pathlib import Path

from common.plumbing.errors import BadInput, first_line

from labs.lab import survive_the_terminal

PAGE = Path(__file__).parent / "course.md"
FIRST = """\
# On a machine without the repository, such as Colab: put its address here, and remove the three #
# !git clone ADDRESS_OF_THIS_REPOSITORY rl
# %cd rl
# %pip install --quiet -r requirements-cpu.txt
import os
import sys
from pathlib import Path

from IPython.display import Image

here = Path.cwd().resolve()
folders = [folder for folder in (here, *here.parents) if (folder / "labs/course.md").exists()]
assert folders, f"no repository above {here}: move this notebook into the repository's folder"
os.chdir(folders[0])
os.environ.update(TQDM_MININTERVAL="30", TQDM_MAXINTERVAL="60")  # quiet progress bars

SMOKE = STEPS = ""
# To try the machine, in a few minutes: then the training runs are smoke tests and show nothing
# SMOKE, STEPS = "--smoke", "--steps 9 --prompts_per_step 4 --eval_problems 8"


def look(file):
    \"\"\"The figure of training runs.\"\"\"
    if SMOKE:
        print("Smoke test: shows nothing")
    smoke = Path(file).with_suffix(".smoke.png")
    return Image(str(smoke if SMOKE and smoke.exists() else file))
"""
FOR_TEACHERS = re.compile(r"<!--teacher-->\n?(.*?)<!--/teacher-->\n?", re.DOTALL)
PART = re.compile(r"^```bash\n(.*?)^```\n|^\*\*Look\*\* at `(.*?)`.*?\n", re.MULTILINE | re.DOTALL)


def command(line: str) -> str:
    """A line for the shell as a line of a cell: this Python, and where training runs, or the bug
    hunt's, a place for flags that make them short. A toy of few seeds is quick enough, and shows
    what it shows."""
    line, mark, comment = line.partition("  # ")
    if re.match(r"python \w+\.py", line):
        line += " {STEPS}"
    elif re.match(r"python -m labs\.bug \d+$", line):
        line += " {SMOKE}"
    return "!" + re.sub(r"\bpython ", '"{sys.executable}" ', line) + mark + comment


def picture(file: str) -> str:
    """A cell that shows a figure: a toy's, or one of training runs."""
    return f'Image("{file}")' if file.startswith("runs/labs/figures/") else f'look("{file}")'


def cell(kind: str, text: str) -> dict:
    """A cell of nbformat 4."""
    more = {"execution_count": None, "outputs": []} if kind == "code" else {}
    lines = text.strip("\n").splitlines(keepends=True)
    return {"cell_type": kind, "metadata": {}, "source": lines} | more


def notebook(page: str, folder: Path, teacher: bool = False) -> dict:
    """A notebook of the page, which lies in `folder`; with the teacher's notes or without."""
    page = FOR_TEACHERS.sub(r"\1" if teacher else "", page)
    # Links to other files lead there from the notebook's folder; those within the page stay
    page = re.sub(r"\]\((?!http|#)", f"]({os.path.relpath(PAGE.parent, folder)}/", page)
    cells, end = [cell("code", FIRST)], 0
    for part in PART.finditer(page):
        cells.append(cell("markdown", page[end : part.end() if part[2] else part.start()]))
        shell = "\n".join(map(command, (part[1] or "").splitlines()))
        cells.append(cell("code", shell or picture(part[2])))
        end = part.end()
    cells = [*cells, cell("markdown", page[end:])]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    kept = [cell for cell in cells if cell["source"]]
    return {"nbformat": 4, "nbformat_minor": 4, "metadata": kernel, "cells": kept}


def main() -> None:
    """Write it, if it is not there yet."""
    survive_the_terminal()
    parser = argparse.ArgumentParser(
        prog="labs.notebook",
        usage=argparse.SUPPRESS,  # an error is one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Path("runs/labs/course.ipynb")
    parser.add_argument("file", nargs="?", type=Path, default=default, metavar="FILE")
    parser.add_argument("--teacher", action="store_true", help="with the teacher's notes")
    words = parser.parse_args()
    file = words.file
    try:
        if file.suffix != ".ipynb":
            raise BadInput(f"{file}: a notebook's name ends in .ipynb")
        file.parent.mkdir(parents=True, exist_ok=True)
        page = PAGE.read_text(encoding="utf-8")
        made = json.dumps(notebook(page, file.parent, words.teacher), indent=1) + "\n"
        if not file.exists():
            with file.open("x", encoding="utf-8") as new:
                new.write(made)
        elif file.read_bytes() != made.encode():
            raise BadInput(f"{file}: is there, with somebody's work in it: give another name")
        print(file)
    except (BadInput, OSError) as error:
        parser.error(first_line(error))


if __name__ == "__main__":
    main()
