"""Make an exercise: a file of this repository with function bodies removed.

    python -m labs.blank                    lists the exercises, from * (easy) to ***
    python -m labs.blank grpo > mine/grpo.py
    python -m labs.grade mine/grpo.py

In an algorithm's file, `advantages`, `policy_loss` and the functions that only the loss calls keep
their signature and docstring. `measures`, the metrics, is a second exercise that you may leave out.
All other exercises are one function each. The first line says which exercise it is, so the file may
have any name.
"""

import ast
import importlib
import sys
import textwrap
from pathlib import Path

from checks import harness
from checks.files import MODULES, algorithms
from common.cli import BadInput
from tools import arguments

EXERCISES = Path(__file__).parent / "exercises.py"
REQUIRED = ("advantages", "policy_loss")
# Parts of a loss, which are removed, too.
PARTS = tuple(
    "k3 sequence_ratio gates gate_widths temperatures importance_weight phi correction".split()
)
HEAD = "# Exercise: {name}"  # the first line
INDENT, TODO = "    # ", '    raise NotImplementedError("TODO: {name}")'
# Easy exercises are small. Hard ones have a catch, or need a close reading of the file's header.
EASY = "grpo dr_grpo justrl dapo goldilocks laconic sampler_logprobs accumulate pass_at_k shift"
HARD = "maspo vcpo deep_grpo stapo icepop rank_advantages"


def single() -> dict[str, ast.FunctionDef]:
    """Return the exercises that are one function each."""
    tree = ast.parse(EXERCISES.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def flags(function: ast.FunctionDef) -> list[str]:
    """Write comment lines with the flags of `Args` that a function reads."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "args":
            names.add(f"args.{node.attr}")
    if not names:
        return []
    sentence = f"It reads {', '.join(sorted(names))}: Args says what each does."
    return [INDENT + line for line in textwrap.wrap(sentence, 94)]


def explained(name: str) -> list[str]:
    """Write comment lines with the metrics that a file's `measures` returns."""
    spec = importlib.import_module(f"checks.{name}")
    args, _, batch = harness.busy_mini_batch(importlib.import_module(MODULES[name]), spec.CASES[0])
    names = ", ".join(spec.statistics(harness.as_batch(args, batch)))
    words = " ".join(spec.statistics.__doc__.split())
    text = f"A second exercise, if you like: the pairs (sum, count) of {names}. {words}"
    return [INDENT + line for line in textwrap.wrap(text, 94)]


def emptied(source: str, taken: tuple[str, ...], file: str = "") -> str:
    """Empty functions in a source, but keep signatures and docstrings; `measures` returns {}."""
    lines = source.splitlines()
    functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
    for node in reversed([n for n in functions if n.name in (*taken, "measures")]):
        start, end = node.body[0].end_lineno, node.end_lineno
        marks = [line.strip() for line in lines[start:end]]
        opened = marks.count("# <own>") > marks.count("# </own>")
        closed = opened and lines[end : end + 1] == ["    # </own>"]
        if closed:
            end += 1
        if node.name == "measures":
            todo = [*explained(file), "    return {}"]
        else:
            todo = [*flags(node), TODO.format(name=node.name)]
        if opened and not closed:  # the mark is closed further down
            todo.insert(0, "    # <own>")
        lines[start:end] = todo
    return "\n".join(lines) + "\n"


def files_of_exercises() -> dict[str, Path]:
    """Return the algorithm files with a function to write; some variants use their base file's."""
    texts = {path: path.read_text(encoding="utf-8") for path in algorithms()}
    return {p.stem: p for p, text in texts.items() if any(f"\ndef {x}(" in text for x in REQUIRED)}


def blank(name: str) -> str:
    """Write the text of an exercise. Raise BadInput for any other name."""
    files = files_of_exercises()
    if name in files:
        text = emptied(files[name].read_text(encoding="utf-8"), REQUIRED + PARTS, name)
        return f"{HEAD.format(name=name)}\n{text}"
    if name not in single():
        raise BadInput(f"{name}: not an exercise; there are {', '.join([*files, *single()])}")
    source, node = EXERCISES.read_text(encoding="utf-8"), single()[name]
    used = ast.unparse(node)
    imports = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
    needed = [n for n in imports if any(alias.name in used for alias in n.names)]
    body = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
    head = "\n\n".join([HEAD.format(name=name), "\n".join(map(ast.unparse, needed))]).rstrip()
    return f"{head}\n\n{emptied(body, (name,))}"


def listed() -> str:
    """List every exercise with its difficulty and its title."""
    files = {n: ast.parse(p.read_text(encoding="utf-8")) for n, p in files_of_exercises().items()}
    rows = []
    for name, node in (files | single()).items():
        stars = "*" if name in EASY.split() else "***" if name in HARD.split() else "**"
        first = " ".join(ast.get_docstring(node).split("\n\n")[0].split())
        rows.append(f"{name:17}{stars:4} {textwrap.shorten(first, 78, placeholder=' ...')}")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = arguments(__doc__, "labs.blank")
    parser.add_argument("name", nargs="?", metavar="NAME")
    name = parser.parse_args().name
    sys.stdout.reconfigure(encoding="utf-8")  # Python reads source files as UTF-8
    try:
        sys.stdout.write(blank(name) if name else listed())
        if name and sys.stdout.isatty():
            print(f"python -m labs.blank {name} > mine/{name}.py  writes it to a file")
    except (BadInput, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
