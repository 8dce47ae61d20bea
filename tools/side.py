"""Any two algorithm files side by side, part by part: one HTML page that works offline.

    python -m tools.side [--out side.html]

Equal lines are folded, changed lines stand beside each other, and marks (`# <own>`) are left out.
The page's arrow keys change the right file, and side.html#grpo,stapo,policy_loss opens one part.
With `,alone` behind it, the page has nothing else, and no comments: for a slide or a picture.

A variant has its whole loop here, and all its flags: those that it has from its base class, too.
These lines have no number, because they are not in its file. A function that it takes from its base
file stands as there, with that file's numbers.
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

Line = tuple[int, str]  # its number in the file, 0 if it is not in the file; its text

TEMPLATE = Path(__file__).with_suffix(".html")
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


def unmarked(text: str, first: int = 1) -> list[Line]:
    """Number the lines of a text from `first`, and leave out the marks."""
    numbered = enumerate(text.splitlines(), first)
    return [
        (number, line.removesuffix("  # <own>"))
        for number, line in numbered
        if line.strip() not in ("# <own>", "# </own>")
    ]


def text_of(lines: list[Line]) -> str:
    return "".join(f"{line}\n" for _, line in lines)


def from_elsewhere(text: str) -> list[Line]:
    """Return the lines of a text that is not in the file, without marks and blank ends."""
    return [(0, line) for _, line in unmarked(text.rstrip())]


def parts_of(lines: list[Line]) -> dict[str, list[Line]]:
    """Split a file's lines into the parts that it has. In order they are the whole file."""
    text = text_of(lines)
    starts: dict[str, int] = {}
    for part, (_, pattern) in PARTS.items():
        at = max(starts.values(), default=0)
        if found := re.compile(pattern, re.MULTILINE).search(text, at):
            starts[part] = found.start(found.lastindex or 0)
    places = [text.count("\n", 0, start) for start in starts.values()]
    return {part: lines[a:b] for part, a, b in zip(starts, places, [*places[1:], len(lines)])}


def by_flag(lines: list[Line]) -> dict[str, list[Line]]:
    """Map each flag of a class to its lines without blank ones. "class" has the lines before the
    flags, and "def" the methods after them."""
    name = "class"
    found: dict[str, list[Line]] = {}
    for number, line in lines:
        if begins := re.match(r"    (def|\w+(?=: .* = ))", line):
            name = begins[1]
        if line:
            found.setdefault(name, []).append((number, line))
    return found


def all_flags(name: str, own: list[Line]) -> list[Line]:
    """Return a variant's flags: those of its base class in their order, with its own lines where it
    changes one, then the flags that it adds."""
    bases = importlib.import_module(MODULES[name]).Args.__mro__[1:]
    flags: dict[str, list[Line]] = {"class": []}
    for base in reversed(bases[: bases.index(Flags)]):
        flags |= by_flag(from_elsewhere(inspect.getsource(base)))
    flags |= by_flag(own)
    if "def" in flags:
        flags["def"] = flags.pop("def")  # methods stay behind all flags
    return [line for lines in flags.values() for line in lines] + [(0, ""), (0, "")]


def shown(name: str) -> dict[str, list[Line]]:
    """Return a file's parts; a variant's with its loop and all its flags."""
    source = PATHS[name].read_text("utf-8")
    lines = unmarked(source)
    if found := LOOP.search(text_of(lines)):
        start, end = (text_of(lines).count("\n", 0, at) for at in found.span())
        loop = importlib.import_module(MODULES[name]).main.source
        lines[start:end] = from_elsewhere(loop)
    parts = parts_of(lines)
    if name in VARIANTS:
        parts["flags"] = all_flags(name, parts["flags"])
    return parts


def taken(name: str, part: str) -> tuple[str, list[Line]]:
    """Find a part that a variant does not have: return the base file that has it, and its lines."""
    base = base_of(PATHS[name]).stem
    own = shown(base)
    return (base, own[part]) if part in own else taken(base, part)


def data() -> dict:
    """Return all files. A line is its index in a table, because most lines are in several files."""
    table: dict[str, int] = {}
    files = {}
    for name in (*NINE, *VARIANTS):
        source = PATHS[name].read_text("utf-8")
        parts = shown(name)
        others = {part: taken(name, part) for part in CALLED if part not in parts}
        parts |= {part: lines for part, (_, lines) in others.items()}
        files[name] = {
            "title": source.partition('"""')[2].partition("\n")[0].rstrip("."),
            "weight": weight(source),
            "taken": {part: base for part, (base, _) in others.items()},
            "numbers": {part: [number for number, _ in lines] for part, lines in parts.items()},
            "parts": {
                part: [table.setdefault(line, len(table)) for _, line in lines]
                for part, lines in parts.items()
            },
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
