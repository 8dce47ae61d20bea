"""Any two algorithm files side by side: one HTML page that works offline.

    python -m tools.reader [A [B]] [--out reader.html]

The page opens with A and B. With one name it shows that file beside its base file; without a name
it shows grpo.py and the file nearest to it. In the page you can choose every other file. The page
shows the files' lines (coloured by pygments), the marks of the lines that each file changes, and
the gradient weight of its own `policy_loss`.

The page's form and its program are in tools/reader.html; tools/look.* is shared with tools.page.
"""

import ast
import importlib
import os
import re
from math import log10
from pathlib import Path
from types import ModuleType

from checks import terms
from checks.files import MODULES, ROOT, algorithms, base_of
from common.cli import BadInput, in_one_line
import torch
from torch import Tensor

from tools import arguments
from tools.look import coloured, short, write
from tools.maintain.marks import changes, marked_lines

TEMPLATE = Path(__file__).with_suffix(".html")
# Tokens that a loss may weigh differently: π_old, and the entropy where the token was drawn. One
# in five is a fork, so that an 80% quantile of the entropy lies between the forks and the rest.
KINDS = {
    "unlikely": (0.02, 1.0),
    "likely": (0.5, 0.8),
    "nearly certain": (0.97, 0.15),
    "rare, where another was sure": (0.0001, 0.1),
    "at a fork": (0.02, 3.0),
}
LOWEST, HIGHEST, NEAR = 0.02, 50.0, 1e-3  # ratios shown; half the width of the closer look


# A file's text


def sections(source: str) -> tuple[dict[str, int], list[str]]:
    """The first line of each part of a file, in the file's order, and the lines of the header that
    give the gradient weight."""
    lines, tree = source.splitlines(), ast.parse(source)
    named = {node.name: node for node in tree.body if hasattr(node, "name")}
    loop = next(
        n for n in tree.body if ast.unparse(n).startswith(("LOOP = ", "main = ", "def main"))
    )
    first = {n: min([d.lineno, *(x.lineno for x in d.decorator_list)]) for n, d in named.items()}
    loss = first.get("policy_loss", loop.lineno)  # a variant's may be its base file's
    own = named.get("advantages")  # likewise
    weight = next(i for i, line in enumerate(lines) if line.startswith("Gradient weight on "))
    notes = next(i for i in range(weight + 1, len(lines)) if re.match(r"\S", lines[i]))
    starts = {
        "formula": 1,
        "notes": notes + 1,
        "imports": tree.body[0].end_lineno + 1,
        "flags": first["Args"],
        "advantages": first["advantages"] if own else loss,
        "helpers": own.end_lineno + 1 if own else loss,
        "loss": loss,
        "loop": loop.lineno,
    }
    return starts, [line.strip() for line in lines[weight + 1 : notes] if line.strip()]


# Its gradient weight


def weights(module: ModuleType, ratios: Tensor) -> Tensor:
    """`weights_together`, but ratio by ratio if one row's loss depends on other rows (m2po's on a
    mean, whose budget 1.24 exceeds alone but not in the batch)."""
    probe = torch.tensor([0.5, 0.7, 1.1, 1.24], dtype=torch.float64)
    apart = [weights_together(module, ratio[None]) for ratio in probe]
    if torch.cat(apart, -1).allclose(weights_together(module, probe)):
        return weights_together(module, ratios)
    return torch.cat([weights_together(module, ratio[None]) for ratio in ratios], -1)


def weights_together(module: ModuleType, ratios: Tensor) -> Tensor:
    """The weight on ∇ log π, by autograd of the file's own `policy_loss`: `[N]` -> `[2, kinds, N]`,
    for Â = 1 and Â = -1.

    One batch of one-token responses, so that a response's ratio is its token's; μ = π_old, and
    π_ref = π_θ, where a KL term has no gradient.
    """
    old, entropy = torch.tensor(list(KINDS.values()), dtype=torch.float64).T  # [kinds]
    ratios = torch.minimum(ratios, 1 / old[:, None])  # [kinds, N]: no probability above 1
    shape = (2, *ratios.shape)

    def column(values: Tensor) -> Tensor:
        return values.expand(shape).reshape(-1, 1)  # [n, 1]

    old_logp = column(old[:, None].log())  # [n, 1]
    logp = (old_logp + column(ratios.log())).requires_grad_()  # [n, 1]
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)[:, None, None]  # [2, 1, 1]
    total, _, _ = terms(
        module,
        module.Args(),
        logp=logp,
        old_logp=old_logp,
        ref_logp=logp.detach(),
        entropy=column(entropy[:, None]),
        advantages=column(signs)[:, 0],
        mask=torch.ones_like(old_logp),
    )
    return -torch.autograd.grad(total, logp)[0].reshape(shape)


def curves(module: ModuleType) -> dict:
    """A file's weights on a grid of ratios that is finer close to 1.

    `scale` is the largest of them at r = 1, which the others are divided by. `of` holds [Â = 1,
    Â = -1] of the first kind, and of every other kind whose curve differs.
    """
    wide = torch.logspace(log10(LOWEST), log10(HIGHEST), 400, dtype=torch.float64)
    close = torch.linspace(1 - NEAR, 1 + NEAR, 101, dtype=torch.float64)
    ratios = torch.cat([wide, close]).unique()  # [N]
    scale = weights(module, torch.ones(1, dtype=torch.float64)).abs().max().item() or 1.0
    known = weights(module, ratios) / scale  # [2, kinds, N]
    of = {}
    for k, (old, _) in enumerate(KINDS.values()):
        possible = ratios < 1 / old  # [N]
        if k == 0 or not known[:, k, possible].allclose(known[:, 0, possible]):
            of[k] = [[short(c, 4) for c in sign] for sign in known[:, k]]
    return {"scale": short(scale, 7), "ratios": [short(r, 9) for r in ratios], "of": of}


# The page


def page_data(folder: Path) -> dict:
    """All data of the page; links lead from `folder`. A line that several files share is stored
    once, in `lines`; each file lists the numbers of its lines."""
    known: dict[tuple, int] = {}
    files = []
    for path in algorithms():
        source, base = path.read_text(), base_of(path)
        starts, formula = sections(source)
        files.append(
            {
                "name": path.stem,
                "title": source.splitlines()[0].strip('"').rstrip("."),
                "path": path.relative_to(ROOT).as_posix(),
                "base": base and base.stem,
                "changed": changes(path, base)[1] if base else 0,
                "lines": [known.setdefault(tuple(x), len(known)) for x in coloured(source)],
                "own": sorted(marked_lines(source)),
                "sections": starts,
                "formula": formula,
                "weights": curves(importlib.import_module(MODULES[path.stem])),
                "link": Path(os.path.relpath(path, folder)).as_posix(),
            }
        )
    kinds = [[name, *numbers] for name, numbers in KINDS.items()]
    span = {"wide": [LOWEST, HIGHEST], "near": [1 - NEAR, 1 + NEAR]}
    return {"lines": list(known), "kinds": kinds, "spans": span, "files": files}


def chosen(words: list[str]) -> tuple[str, str]:
    """The two files to open with."""
    files = {path.stem: path for path in algorithms()}
    names = [Path(word).stem for word in words]
    for word, name in zip(words, names):
        if name not in files:
            raise BadInput(f"no algorithm file {word}: choose among {', '.join(files)}")
    if len(names) > 2:
        raise BadInput(f"{len(names)} files: the page shows two")
    if not names:
        far = {n: changes(p, t)[1] for n, p in files.items() if (t := base_of(p))}
        names = [min(far, key=far.get)]
    if len(names) == 1:
        base = base_of(files[names[0]])
        names.insert(0, base.stem if base else names[0])
    return names[0], names[1]


def main(words: list[str], out: Path) -> None:
    """Write the page and print where it is."""
    start = chosen(words)
    write(TEMPLATE, {"start": start, **page_data(out.parent.resolve())}, out)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="a name, such as grpo")
    parser.add_argument("--out", type=Path, default=Path("reader.html"), help="the page to write")
    given = parser.parse_args()
    try:
        main(given.files, given.out)
    except (BadInput, OSError) as error:
        parser.error(in_one_line(error))
