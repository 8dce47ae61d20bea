"""How much of `common` there is, and how much of it a default laptop run executes.

    python -m tools.rooms        code lines of every room: executed, all

It really runs `grpo.py`, on the embedded model and task, for two steps with evaluation and a
checkpoint, in a folder that is then deleted. Code lines are those of tools/marks.py; a statement
counts with all its lines, and a function's head where its body runs.
"""

import ast
import contextlib
import runpy
import sys
import tempfile
from pathlib import Path
from types import FrameType

from tools import arguments
from checks.files import ROOT
from tools.marks import code_lines

COMMON = ROOT / "common"
FLAGS = "--steps 2 --eval_problems 16 --prompts_per_step 4 --run_dir".split()


def traced() -> dict[Path, set[int]]:
    """The numbers of the lines that one run executes, of every file of `common`."""
    seen = {str(path): set() for path in COMMON.rglob("*.py")}

    def call(frame: FrameType, event: str, value: object) -> object:
        lines = seen.get(frame.f_code.co_filename)
        if lines is None:
            return None  # not ours: its lines are not reported

        def line(frame: FrameType, event: str, value: object) -> object:
            lines.add(frame.f_lineno)
            return line

        return line

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        sys.argv = ["grpo.py", *FLAGS, f"{folder}/run"]
        sys.settrace(call)
        try:
            runpy.run_path(str(ROOT / "grpo.py"), run_name="__main__")
        finally:
            sys.settrace(None)
    return {Path(name): lines for name, lines in seen.items()}


def executed(source: str, seen: set[int]) -> int:
    """How many code lines of a file are executed, if the lines `seen` were reported."""
    ran: dict[int, bool] = {}  # by line, whether its statement ran
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            body = getattr(node, "body", None)
            first, last = start(node), start(body[0]) - 1 if body else node.end_lineno
            lines = range(first, last + 1)
            function = isinstance(node, ast.FunctionDef)
            counts = range(last + 1, node.end_lineno + 1) if function else lines
            ran |= dict.fromkeys(lines, not seen.isdisjoint(counts))
    total, after = 0, False
    for number, _ in reversed(code_lines(source)):
        after = ran.get(number, after)  # `else:` and `finally:` go with the statement after them
        total += after
    return total


def start(node: ast.AST) -> int:
    """The line where a statement begins, with its decorators."""
    return min(one.lineno for one in (node, *getattr(node, "decorator_list", [])))


def main() -> None:
    """Print a line for each room, and the two totals."""
    rows = []
    for path, seen in sorted(traced().items()):
        source = path.read_text("utf-8")
        rows.append((executed(source, seen), len(code_lines(source)), path.relative_to(COMMON)))
    for run, every, name in (*rows, (sum(r[0] for r in rows), sum(r[1] for r in rows), "total")):
        print(f"{run:5d} of {every:4d}  {name}")


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    main()
