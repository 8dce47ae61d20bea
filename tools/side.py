"""Any two algorithm files side by side, part by part: one HTML page that works offline.

    python -m tools.side [--out side.html]

Equal lines are folded, changed lines stand beside each other, and marks (`# <own>`) are left out.
The page's arrow keys change the right file, and side.html#grpo,sapo,policy_loss opens one part.

With `,alone` behind it, the page has only that part, without comments: for a slide or a picture.

A variant has its whole loop and all its flags here. These parts have no line numbers, because they
come from several files. A function of its base file stands as there, with that file's numbers.
"""

import importlib
import inspect
import re
from pathlib import Path

from checks.files import MODULES, PATHS, VARIANTS, base_of
from common.cli import BadInput, Flags, in_one_line

from tools import arguments, page
from tools.explorer import NINE
from tools.look import write
from tools.maintain.losses import weight

TEMPLATE = Path(__file__).with_suffix(".html")
MARK = re.compile(r" *# </?own>")
FLAG = re.compile(r'(?s)    (\w+): [^\n]* = [^\n]*\n    """.*?"""\n')
# A variant's diff of a loop and the call that applies it
LOOP = re.compile(r'(?ms)^(?:# Lines of [^\n]*\n)?(?:LOOP = """.*?^"""\n)?main = loop_of\(.*?\)\n')
# Part -> its name on the page, and where it begins: at the group, or else at the match
PARTS = {
    "weight": ("objective and weight", r"\A"),
    "method": ("the method in words", r"^Gradient weight on [^\0]*?\n\n(?:    .*\n)+()"),
    "commands": ("commands", r"^Run it:"),
    "imports": ("imports", r"^(?:from|import) "),
    "flags": ("flags", r"^@dataclass"),
    "advantages": ("advantages", r"^def advantages"),
    "own": ("functions of its own", r"^(?:def (?!advantages)|class (?!Args)|@(?!.*\nclass Args))"),
    "policy_loss": ("policy_loss", r"^def policy_loss"),
    "measures": ("measures", r"^def measures"),
    "main": ("main: before the loop", r"^def main"),
    "rollout": ("1. rollout", r"^        # 1\. "),
    "reward": ("2. reward, advantages", r"^        # 2\. "),
    "log_probs": ("3. log-probs", r"^        # 3\. "),
    "update": ("4. update", r"^        # 4\. "),
    "log": ("5. log, evaluate, save", r"^        # 5\. "),
    "notes": ("differs from the paper", r"^# Differs from the paper"),
}
CALLED = ["advantages", "policy_loss", "measures"]  # what every loop calls


def parts_of(text: str) -> dict[str, str]:
    """Split a file's text into the parts that it has. In order they are the whole text."""
    starts: dict[str, int] = {}
    for part, (_, pattern) in PARTS.items():
        at = max(starts.values(), default=0)
        if match := re.compile(pattern, re.MULTILINE).search(text, at):
            starts[part] = match.start(match.lastindex or 0)
    ends = [*starts.values(), len(text)][1:]
    return {part: text[a:b] for (part, a), b in zip(starts.items(), ends)}


def all_flags(name: str, own: str) -> str:
    """Return a variant's flags: those of its base class in their order, with its own lines where it
    changes one, then the flags that it adds."""
    flags = {}
    for base in reversed(importlib.import_module(MODULES[name]).Args.__mro__):
        if base not in (object, Flags):
            flags |= {match[1]: match[0] for match in FLAG.finditer(inspect.getsource(base))}
    places = [match.span() for match in FLAG.finditer(own)]
    return own[: places[0][0]] + "".join(flags.values()) + own[places[-1][1] :]


def shown(name: str) -> dict[str, str]:
    """Return a file's parts; a variant's with its loop and all its flags."""
    text = PATHS[name].read_text("utf-8")
    if LOOP.search(text):
        loop = importlib.import_module(MODULES[name]).main.source
        text = LOOP.sub(lambda _: loop, text)
    parts = parts_of(text)
    if name in VARIANTS:
        parts["flags"] = all_flags(name, parts["flags"])
    return parts


def first_line(name: str, text: str) -> int:
    """Return the number of the text's first line in the file, 0 if the file does not have it."""
    source = PATHS[name].read_text("utf-8")
    return source.count("\n", 0, source.index(text)) + 1 if text in source else 0


def taken(name: str, part: str) -> tuple[str, str]:
    """Find a part that a variant does not have: return the base file that has it, and its text."""
    base = base_of(PATHS[name]).stem
    own = shown(base)
    return (base, own[part]) if part in own else taken(base, part)


def data() -> dict:
    """Return all files. A line is its index in a table, because most lines are in several files; a
    line that is only a mark is -1."""
    table: dict[str, int] = {}

    def index(line: str) -> int:
        if MARK.fullmatch(line):
            return -1
        return table.setdefault(line.removesuffix("  # <own>"), len(table))

    files = {}
    for name in (*NINE, *VARIANTS):
        source = PATHS[name].read_text("utf-8")
        parts = {part: (name, text) for part, text in shown(name).items()}
        others = {part: taken(name, part) for part in CALLED if part not in parts}
        parts |= others
        files[name] = {
            "title": source.partition('"""')[2].partition("\n")[0].rstrip("."),
            "weight": weight(source),
            "taken": {part: base for part, (base, _) in others.items()},
            "first": {part: first_line(file, text) for part, (file, text) in parts.items()},
            "parts": {part: [*map(index, text.splitlines())] for part, (_, text) in parts.items()},
        }
    names = {part: name for part, (name, _) in PARTS.items()}
    return {"names": names, "nine": NINE, "files": files, "lines": [*table]}


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, default=Path("side.html"), help="the page to write")
    out = parser.parse_args().out
    try:
        write(TEMPLATE, data() | page.overview_beside(out), out)
    except (BadInput, OSError) as error:
        parser.error(in_one_line(error))
