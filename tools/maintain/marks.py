"""Find the lines that an algorithm file changes in grpo.py, and the marks that show them. Tests and
tools share these definitions.

A line that grpo.py does not have ends in `# <own>`, or is between a line `# <own>` and a line
`# </own>`. grpo.py has no marks. A line of it that a file lacks counts among its changes.

    python -m tools.maintain.marks     changed code lines of every file, and those outside its marks
"""

import ast
import difflib
import io
import sys
import tokenize
from pathlib import Path

from checks.files import FIRST, NINE, PATHS

from tools import arguments


def code_lines(source: str) -> list[tuple[int, str]]:
    """List (line number, code without its comment) of the lines that are not blank, comment or
    docstring."""
    texts = set()  # the lines of all docstrings, and of the help below flags
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                texts.update(range(node.lineno, node.end_lineno + 1))
    comments = {}  # line -> the column where its comment begins
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.start[1]
    lines = []
    for number, line in enumerate(source.splitlines(), 1):
        code = line[: comments.get(number)].rstrip()
        if code and number not in texts:
            lines.append((number, code))
    return lines


def marked_lines(source: str) -> set[int]:
    """Return lines that end in `# <own>`, and lines from such a mark to the next `# </own>`."""
    marked, pending = set(), []  # pending: marks that a `# </own>` may still close
    for number, line in enumerate(source.splitlines(), 1):
        if line.rstrip().endswith("# </own>"):
            if not pending:
                raise ValueError(f"line {number} closes a mark that was not opened")
            marked.update(range(pending[-1], number + 1))
            pending = []
        elif line.rstrip().endswith("# <own>"):
            marked.add(number)
            pending.append(number)
    return marked


def changes(path: Path, base: Path) -> tuple[list[str], int]:
    """Return the code lines that are not in `base` and have no mark, and the number of all changed
    lines."""
    source = path.read_text("utf-8")
    lines, marks = code_lines(source), marked_lines(source)
    texts = [text for _, text in lines]
    base_texts = [text for _, text in code_lines(base.read_text("utf-8"))]
    matcher = difflib.SequenceMatcher(None, base_texts, texts, autojunk=False)
    loose, changed = [], 0
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            continue
        changed += max(b - a, d - c)
        for number, text in lines[c:d]:
            if number not in marks:
                loose.append(f"{path.name}:{number}: {text}")
    return loose, changed


def main() -> int:
    """Print how much every file changes in grpo.py; return the number of unmarked changes."""
    unmarked = 0
    for name in NINE[1:]:
        loose, changed = changes(PATHS[name], PATHS[FIRST])
        print(f"{name}: {changed} code lines from grpo.py", *loose, sep="\n    ")
        unmarked += len(loose)
    return unmarked


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    sys.exit(1 if main() else 0)
