"""Write docs/losses.md: the weights of all losses on one page, and the code of one of each kind.

python -m tools.maintain.losses
"""

import ast
import re

from common.records.files import write

from tools import arguments
from checks.files import ALGORITHMS, PATHS, ROOT, VARIANTS

PAGE = ROOT / "docs" / "losses.md"
INTRODUCTION = """# Every loss on one page

For one loss of each kind: the weight that it gives to ∇ log π_θ(y_t), then its `policy_loss`. The
other files follow with their weight only. A loss returns a sum and the count that divides it, so
its return line shows the average that the weight may leave out. `A` is the advantage Â, `ratio` is
r = π_θ/π_old, μ is the sampler's probability, and `mask` is 1 on response tokens. The files explain
other names, and [common/batch.py](../common/batch.py) the columns of `batch`. [The
checks](../checks/__init__.py) compare the files with the papers' formulas and other people's code.

Headings say what bounds a step. [One table](questions.md#one-table) compares all parts of thirteen
methods, and [variants](../variants/README.md) says what each variant changes.
"""
WITH_CODE = "grpo stapo sapo cispo gspo".split()  # one of each kind
WEIGHTS = """## The others: the weight

M is the clip, as above. Each file explains its other symbols, and has the average and the code.
"""
# What keeps a step from moving the policy too far? A variant's header says it in its own words:
# "What bounds a step: a clip of the token's ratio."
GROUPS = {
    "A clip of the token's ratio": ["grpo", "deep_grpo"],
    "The clip, and tokens left out": ["stapo"],
    "A smooth gate on the token's ratio": ["sapo", "maspo"],
    "A bounded weight on log π": ["minirl"],
    "The response's ratio": ["gspo", "vcpo"],
    "Something else": [],
}


def weight(header: str) -> str:
    """Read the closed-form gradient weight from a file's docstring."""
    after = header[header.index("Gradient weight on") :]
    return re.search(r"\n\n((?:    .*\n)+)", after)[1]


def definition(source: str, node: ast.FunctionDef) -> str:
    """Return a function's source without its docstring, comments and marks."""
    lines = source.splitlines()
    head = lines[node.lineno - 1 : node.body[0].lineno - 1]
    start = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
    body = [line for line in lines[start : node.end_lineno] if not line.strip().startswith("#")]
    return "\n".join([*head, *body]) + "\n"


def loss(source: str, shared: list[str]) -> list[str]:
    """Return `policy_loss` and, in the file's order, the file's functions that it calls, directly
    or not, except for those that grpo.py shows (`shared`)."""
    functions = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
    called = ["policy_loss"]
    for name in called:  # the list grows in this loop
        for node in ast.walk(functions[name]):
            callee = node.func.id if isinstance(node, ast.Call) and hasattr(node.func, "id") else ""
            if callee in functions and callee not in called:
                called.append(callee)
    in_order = [definition(source, functions[name]) for name in functions if name in called]
    return [text for text in in_order if text not in shared]


def read(name: str) -> tuple[str, str, str]:
    """Read a file; return its source, its weight, and its title with a link."""
    path = PATHS[name]
    source = path.read_text(encoding="utf-8")
    header = ast.get_docstring(ast.parse(source), clean=False)
    title = header.partition("\n")[0].rstrip(".")
    return source, weight(header), f"[{title}](../{path.relative_to(ROOT).as_posix()})"


def section(name: str, shared: list[str], seen: set[str]) -> str:
    """Write a file's heading, weight and code, without the comments of lines seen before."""
    source, formula, title = read(name)
    lines = "\n\n".join(loss(source, shared)).splitlines()
    code = "\n".join(line.partition("  # ")[0] if line in seen else line for line in lines)
    seen.update(lines)
    return f"### {title}\n\n```text\n{formula}```\n```python\n{code}\n```\n"


def entry(name: str) -> str:
    """Write a file's title and weight, without the clip M and remarks in brackets."""
    _, formula, title = read(name)
    first = re.split(r" {3,}\(", formula.strip().splitlines()[0])[0]
    return f"- {title}: `{' '.join(first.split())}`"


def groups() -> dict[str, list[str]]:
    """Return the files that have a loss of their own, by what bounds a step."""
    files = {group: [*names] for group, names in GROUPS.items()}
    for name in VARIANTS:
        source = PATHS[name].read_text(encoding="utf-8")
        match = re.search(r"^What bounds a step: (.*)\.$", source, re.MULTILINE)
        group = match[1][0].upper() + match[1][1:] if match else "Something else"
        if "\ndef policy_loss(" in source:
            files[group].append(name)
    return files


def page() -> str:
    """Write the whole page."""
    shared = loss(PATHS["grpo"].read_text(encoding="utf-8"), [])[:-1]
    parts, weights, seen = [INTRODUCTION], [WEIGHTS], set()
    for group, names in groups().items():
        shown = [name for name in names if name in WITH_CODE]
        if shown:
            parts.append(f"## {group}\n")
        parts += [section(name, [] if name == "grpo" else shared, seen) for name in shown]
        entries = [entry(name) for name in names if name not in WITH_CODE]
        entries = [re.sub(r"^(- \[[^]:]*): [^]]*", r"\1", line) for line in entries]  # short names
        if entries:
            weights.append("\n".join([f"{group}:\n", *entries, ""]))
    with_loss = sum(groups().values(), [])
    others = [name for name in ALGORITHMS if name not in with_loss]
    links = [f"[{n}](../{PATHS[n].relative_to(ROOT).as_posix()})" for n in others]
    what = "they change something other than the loss"
    last = f"## The loss of another file\n\n{', '.join(links)}: {what}.\n"
    return "\n".join([*parts, *weights, last])


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    write(PAGE, page())
