"""Write docs/losses.md: every loss on one page, each as it stands in its file.

python -m tools.maintain.losses
"""

import ast
import re
import sys

from common.run import atomic_write

from tools import arguments
from checks.files import ALGORITHMS, PATHS, ROOT

PAGE = ROOT / "docs" / "losses.md"
INTRODUCTION = """# Every loss on one page

Each `policy_loss` as it stands in its file, under the weight that it gives to ∇ log π_θ(y_t). It
returns a sum and the count that divides it. `A` is the advantage Â, `ratio` is r = π_θ/π_old, μ the
sampler's probability, `mask` is 1 on response tokens. [common/batch.py](../common/batch.py) lists
the columns of `batch`. Where a weight stands without the average over tokens and responses, the
return line has it. Advantages, comments and the meaning of other symbols are in the files. A test
holds this page to the files, and [the checks](../checks/__init__.py) hold the files to the papers'
formulas and to other people's code.
"""
# What keeps one step from moving the policy too far
GROUPS = {
    "A clip of the token's ratio": "grpo justrl dapo dr_grpo blockwise signs deep_grpo",
    "The clip, and tokens left out": "stapo entropy20 lp_reg",
    "A smooth gate on the token's ratio": "sapo maspo",
    "A bounded weight on log π": "cispo minirl dppo cppo icepop m2po centred opd",
    "The response's ratio": "gspo vespo vcpo",
    "Something else": "ppo paced recipe",
}


def weight(header: str) -> str:
    """The closed-form gradient weight, from a file's docstring."""
    after = header[header.index("Gradient weight on") :]
    return re.search(r"\n\n((?:    .*\n)+)", after)[1]


def definition(source: str, node: ast.FunctionDef) -> str:
    """A function without its docstring, its comments and the marks of what differs."""
    lines = source.splitlines()
    head = lines[node.lineno - 1 : node.body[0].lineno - 1]
    start = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
    body = [line for line in lines[start : node.end_lineno] if not line.strip().startswith("#")]
    return "\n".join([*head, *body]) + "\n"


def loss(source: str, shared: list[str]) -> list[str]:
    """`policy_loss` and, before it, the file's own functions that it calls, and these call; but
    none of those that grpo.py shows (`shared`)."""
    functions = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
    called = ["policy_loss"]
    for name in called:  # it grows
        for node in ast.walk(functions[name]):
            callee = node.func.id if isinstance(node, ast.Call) and hasattr(node.func, "id") else ""
            if callee in functions and callee not in called:
                called.append(callee)
    in_order = [definition(source, functions[name]) for name in functions if name in called]
    return [text for text in in_order if text not in shared]


def section(name: str, shared: list[str]) -> str:
    """Heading, weight and code of a file."""
    path = PATHS[name]
    source = path.read_text(encoding="utf-8")
    header = ast.get_docstring(ast.parse(source), clean=False)
    title = header.partition("\n")[0].rstrip(".")
    code = "\n\n".join(loss(source, shared))
    link = f"../{path.relative_to(ROOT).as_posix()}"
    return f"### [{title}]({link})\n\n```text\n{weight(header)}```\n```python\n{code}```\n"


def page() -> str:
    """The whole page."""
    shared = loss(PATHS["grpo"].read_text(encoding="utf-8"), [])[:-1]
    parts = [INTRODUCTION]
    shown = []
    for group, names in GROUPS.items():
        parts.append(f"## {group}\n")
        for name in names.split():
            parts.append(section(name, [] if name == "grpo" else shared))
            shown.append(name)
    others = [name for name in ALGORITHMS if name not in shown]
    links = [f"[{n}](../{PATHS[n].relative_to(ROOT).as_posix()})" for n in others]
    parts.append(
        f"## The loss of another file\n\n{', '.join(links)}: what they change is no loss.\n"
    )
    return "\n".join(parts)


def main() -> None:
    with atomic_write(PAGE) as path:
        path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    sys.exit(main())
