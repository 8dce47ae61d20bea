"""Write docs/losses.md: every loss on one page, as it stands in its file; of most variants the
weight alone.

python -m tools.maintain.losses
"""

import ast
import re

from common.records.files import write

from tools import arguments
from checks.files import ALGORITHMS, PATHS, ROOT

PAGE = ROOT / "docs" / "losses.md"
INTRODUCTION = """# Every loss on one page

Each `policy_loss` as it stands in its file, under the weight that it gives to ∇ log π_θ(y_t); of
most variants, at the end, the weight alone. A loss returns a sum and the count that divides it. `A`
is the advantage Â, `ratio` is r = π_θ/π_old, μ the sampler's probability, `mask` is 1 on response
tokens. [common/batch.py](../common/batch.py) lists the columns of `batch`. Where a weight stands
without the average over tokens and responses, the return line has it. A comment stands only where
its line stands first. Advantages and other symbols are explained in the files. [The
checks](../checks/__init__.py) compare the files with the papers' formulas and other people's code.

If you have ten minutes, read GRPO, GSPO, SAPO and CISPO.

A method differs from grpo.py in one or more of six places; vcpo and recipe also in the learning
rate, jet in the forward pass. The headings below go by the fourth.

1. Prompts and responses: goldilocks, paced, dapo, deep_grpo, tool, recipe; stale: vcpo, recipe; of
   8-bit weights: minirl and its variants.
2. Advantages: minirl and its variants, dr_grpo, deep_grpo, baselines, signs, laconic, dapo,
   blockwise, ppo, opd, vcpo, paced, recipe.
3. Ratio, of a response: gspo, vespo, paced, vcpo (to μ); of a token, to μ: minirl, dppo, cppo, jet,
   m2po, opd. icepop and recipe multiply by π_old/μ.
4. Bound: all but goldilocks, deep_grpo, dr_grpo, blockwise, signs, laconic, tool, ppo.
5. Average, over all tokens: justrl and its variants, stapo, entropy20, maspo, deep_grpo, opd, ppo,
   recipe; over a block: blockwise; a sum: minirl, dppo, cppo, centred, jet, dr_grpo, paced.
6. Terms: only goldilocks, deep_grpo, signs, laconic and tool keep the KL term. Others are in
   lp_reg, centred, paced, dppo, entropy20 and, in the reward, ppo.
"""
WITH_CODE = "grpo deep_grpo stapo sapo maspo cispo minirl dppo gspo vcpo".split()
WEIGHTS = """## Other variants: the weight

M is the clip, as above. Each file explains its other symbols and has the average and the code.
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


def read(name: str) -> tuple[str, str, str]:
    """Source, the weight, and title with a link, of a file."""
    path = PATHS[name]
    source = path.read_text(encoding="utf-8")
    header = ast.get_docstring(ast.parse(source), clean=False)
    title = header.partition("\n")[0].rstrip(".")
    return source, weight(header), f"[{title}](../{path.relative_to(ROOT).as_posix()})"


def section(name: str, shared: list[str], seen: set[str]) -> str:
    """Heading, weight and code of a file; a line that was seen before, without its comment."""
    source, formula, title = read(name)
    lines = "\n\n".join(loss(source, shared)).splitlines()
    code = "\n".join(line.partition("  # ")[0] if line in seen else line for line in lines)
    seen.update(lines)
    return f"### {title}\n\n```text\n{formula}```\n```python\n{code}\n```\n"


def entry(name: str) -> str:
    """Title and weight of a file; the clip M and remarks in brackets are left to the file."""
    _, formula, title = read(name)
    first = re.split(r" {3,}\(", formula.strip().splitlines()[0])[0]
    return f"- {title}: `{' '.join(first.split())}`"


def page() -> str:
    """The whole page."""
    shared = loss(PATHS["grpo"].read_text(encoding="utf-8"), [])[:-1]
    parts, weights, seen = [INTRODUCTION], [WEIGHTS], set()
    for group, names in GROUPS.items():
        shown = [name for name in names.split() if name in WITH_CODE]
        if shown:
            parts.append(f"## {group}\n")
        parts += [section(name, [] if name == "grpo" else shared, seen) for name in shown]
        entries = [entry(name) for name in names.split() if name not in WITH_CODE]
        if entries:
            weights.append("\n".join([f"{group}:\n", *entries, ""]))
    with_loss = " ".join(GROUPS.values()).split()
    others = [name for name in ALGORITHMS if name not in with_loss]
    links = [f"[{n}](../{PATHS[n].relative_to(ROOT).as_posix()})" for n in others]
    last = f"## The loss of another file\n\n{', '.join(links)}: what they change is no loss.\n"
    return "\n".join([*parts, *weights, last])


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    write(PAGE, page())
