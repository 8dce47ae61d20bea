"""Any two algorithm files side by side, part by part: one HTML page that works offline.

    python -m tools.side [--out side.html]

Equal lines are folded, changed lines stand beside each other, and marks (`# <own>`) are left out.
The page's arrow keys change the right file, and side.html#grpo,stapo,policy_loss opens one part.

A variant has its whole loop here. A function that it takes from its base file stands as there.
"""

import importlib
import re
from pathlib import Path

from checks.files import MODULES, PATHS, VARIANTS, base_of
from common.cli import BadInput, in_one_line

from tools import arguments, page
from tools.explorer import NINE
from tools.look import write
from tools.maintain.losses import weight

TEMPLATE = Path(__file__).with_suffix(".html")
MARKS = re.compile(r"(?m)^ *# </?own>\n|  # </?own>$")
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
    """Each part that a file has, in order: together they are its text."""
    starts: dict[str, int] = {}
    for part, (_, pattern) in PARTS.items():
        at = max(starts.values(), default=0)
        if found := re.compile(pattern, re.MULTILINE).search(text, at):
            starts[part] = found.start(found.lastindex or 0)
    ends = [*starts.values(), len(text)][1:]
    return {part: text[a:b] for (part, a), b in zip(starts.items(), ends)}


def shown(name: str) -> str:
    """A file's text without marks; a variant's with its loop."""
    text = MARKS.sub("", PATHS[name].read_text("utf-8"))
    if LOOP.search(text):
        loop = importlib.import_module(MODULES[name]).main.source
        text = LOOP.sub(lambda _: MARKS.sub("", loop), text)
    return text


def taken(name: str, part: str) -> tuple[str, str]:
    """A part that a variant does not have: the base file that has it, and its text there."""
    base = base_of(PATHS[name]).stem
    own = parts_of(shown(base))
    return (base, own[part]) if part in own else taken(base, part)


def data() -> dict:
    """All files as numbers of lines, as most lines stand in several."""
    table: dict[str, int] = {}
    files = {}
    for name in (*NINE, *VARIANTS):
        text = shown(name)
        parts = parts_of(text)
        others = {part: taken(name, part) for part in CALLED if part not in parts}
        texts = parts | {part: found for part, (_, found) in others.items()}
        files[name] = {
            "title": text.partition('"""')[2].partition("\n")[0].rstrip("."),
            "weight": weight(text),
            "taken": {part: base for part, (base, _) in others.items()},
            "parts": {
                part: [table.setdefault(line, len(table)) for line in own.splitlines()]
                for part, own in texts.items()
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
