"""What an algorithm file changes in its base file, and the marks that show it: the definition for
tests and tools.

The lines that a file does not share with its base file end in `# <own>`, or stand between a line
`# <own>` and one `# </own>`; in the base file they are those that other files may
lack. Any file can be a base: `Base file: stapo.py` in a header names it; without that it is
`grpo.py`. A file keeps its base file's marks: together they are all that differs from `grpo.py`.

    python -m tools.maintain.marks     changed code lines of every file, and those outside its marks
"""

import ast
import difflib
import io
import sys
import tokenize
from pathlib import Path

from checks.files import algorithms, base_of

from tools import arguments


def code_lines(source: str) -> list[tuple[int, str]]:
    """(line number, code without its comment) of every line that is not blank, comment or
    docstring."""
    skipped = set()
    for node in ast.walk(ast.parse(source)):
        for child in node.body if isinstance(getattr(node, "body", None), list) else []:
            value = getattr(child, "value", None)
            if (
                isinstance(child, ast.Expr)
                and isinstance(value, ast.Constant)
                and isinstance(value.value, str)
            ):
                skipped |= set(range(child.lineno, child.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {
        token.start[0]: token.start[1] for token in tokens if token.type == tokenize.COMMENT
    }
    lines = [
        (n, line[: comments.get(n)].rstrip())
        for n, line in enumerate(source.splitlines(), 1)
        if n not in skipped
    ]
    return [(number, line) for number, line in lines if line.strip()]


def marked_lines(source: str) -> set[int]:
    """Lines with a trailing `# <own>`, and all lines from such a mark down to a `# </own>`."""
    marked, pending = set(), []
    for number, line in enumerate(source.splitlines(), 1):
        if line.rstrip().endswith("# </own>"):
            if not pending:
                raise ValueError(f"line {number} closes a mark that was not opened")
            marked |= set(range(pending[-1], number + 1))
            pending = []
        elif line.rstrip().endswith("# <own>"):
            marked.add(number)
            pending.append(number)
    return marked


def changes(path: Path, base: Path) -> tuple[list[str], int]:
    """Changed code lines against `base` that lie outside the marks of either file, and how many
    changed in all."""
    (ours, own), (theirs, old) = (
        (code_lines(s := p.read_text("utf-8")), marked_lines(s)) for p in (path, base)
    )
    loose, changed = [], 0
    matcher = difflib.SequenceMatcher(
        None, [c for _, c in theirs], [c for _, c in ours], autojunk=False
    )
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind != "equal":
            changed += max(b - a, d - c)
            gone = (
                theirs[a:b] if kind == "delete" else []
            )  # what was replaced is marked where it was replaced
            for file, marks, lines in ((base, old, gone), (path, own, ours[c:d])):
                loose += [f"{file.name}:{n}: {text}" for n, text in lines if n not in marks]
    return loose, changed


def main() -> int:
    """Print every file's distance from its base file; returns how many changes no mark covers."""
    unmarked = 0
    for path in algorithms():
        if base := base_of(path):
            loose, changed = changes(path, base)
            print(f"{path.stem}: {changed} code lines from {base.name}", *loose, sep="\n    ")
            unmarked += len(loose)
    return unmarked


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    sys.exit(1 if main() else 0)
