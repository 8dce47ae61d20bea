"""An exercise: a file of this repository with its heart taken out.

    python -m labs.blank                    lists the exercises
    python -m labs.blank grpo > mine/grpo.py
    python -m labs.grade mine/grpo.py

Of an algorithm's file `advantages` and `policy_loss` keep their signature and what they promise;
their bodies are yours. The others are one function each.
"""

import argparse
import ast
import sys
import textwrap
from pathlib import Path

from common.distributed import BadInput, first_line
from tools.marks import algorithms

EXERCISES = Path(__file__).parent / "exercises.py"
TAKEN = ("advantages", "policy_loss")
STATS, INDENT = "The statistics are", "    # "
TODO = '    raise NotImplementedError("TODO: {name}")'


def single() -> list[str]:
    """The exercises that are one function each."""
    tree = ast.parse(EXERCISES.read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def statistics(function: ast.FunctionDef) -> list[str]:
    """The names that a `policy_loss` gives its statistics."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("stats"):
            target = node.targets[0]
            keys = [target.slice] if isinstance(target, ast.Subscript) else node.value.keys
            found += [key.value for key in keys]
    return found


def emptied(source: str, names: tuple[str, ...]) -> str:
    """The source, of these functions only signature and docstring."""
    lines = source.splitlines()
    functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
    for node in reversed([n for n in functions if n.name in names]):
        names = ", ".join(statistics(node))
        told = textwrap.wrap(
            f"{STATS}: {names}", 94, initial_indent=INDENT, subsequent_indent=INDENT
        )
        todo = [*(told if names else []), TODO.format(name=node.name)]
        lines[node.body[0].end_lineno : node.end_lineno] = todo
    return "\n".join(lines) + "\n"


def blank(name: str) -> str:
    """The text of an exercise. BadInput for a name that is none."""
    files = {path.stem: path for path in algorithms()}
    if name in files:
        return emptied(files[name].read_text(), TAKEN)
    if name not in single():
        raise BadInput(f"{name}: no exercise; there are {', '.join([*files, *single()])}")
    source = EXERCISES.read_text()
    nodes = {node.name: node for node in ast.parse(source).body if hasattr(node, "name")}
    node, used = nodes[name], ast.unparse(nodes[name])
    imports = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
    needed = [n for n in imports if any(f"{alias.name}" in used for alias in n.names)]
    body = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
    words = f'"""Exercise {name}: grade it with `python -m labs.grade {name}.py`."""'
    parts = [words, "\n".join(map(ast.unparse, needed)), "", emptied(body, (name,))]
    return "\n\n".join(part for part in parts if part).replace("\n\n\n\n", "\n\n\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="labs.blank",
        usage=argparse.SUPPRESS,  # an error is one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME")
    name = parser.parse_args().name
    try:
        everything = [path.stem for path in algorithms()] + single()
        sys.stdout.write(blank(name) if name else "\n".join(everything) + "\n")
    except (BadInput, OSError) as error:
        parser.error(first_line(error))
