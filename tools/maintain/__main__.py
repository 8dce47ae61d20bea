"""Carry a change of an algorithm file into the other files and into the pages made from them.

    python -m tools.maintain             all of the programs below, in this order
    python -m tools.maintain walk side   only these

spread copies a change of grpo.py that is not committed yet (a committed one: see its own help),
marks lists differences outside the marks, and the others write pages of docs/. The explorer takes
most of the time, and needs it only if a loss changed.

After each program this prints which files changed, and at the end which programs left work to you;
then the exit code is 1.
"""

import subprocess
import sys

from checks.files import ROOT

from tools import arguments

PROGRAMS = {
    "spread": "tools.maintain.spread",
    "marks": "tools.maintain.marks",
    "walk": "tools.maintain.walk",
    "losses": "tools.maintain.losses",
    "explorer": "tools.explorer --out docs/explorer.html",
    "side": "tools.side --out docs/side.html",
}


def contents() -> dict[str, bytes]:
    """Read the files that the programs may change."""
    paths = [*ROOT.glob("*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*.html")]
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths}


def main(names: list[str]) -> int:
    """Run these programs in the order of PROGRAMS; return how many left work to you."""
    left = []
    for name, program in PROGRAMS.items():
        if name not in names:
            continue
        print(f"\npython -m {program}", flush=True)
        before = contents()
        code = subprocess.run([sys.executable, "-m", *program.split()], cwd=ROOT).returncode
        changed = [file for file, text in contents().items() if text != before[file]]
        print(f"changed: {', '.join(changed) or 'nothing'}")
        if code:
            left.append(name)
    print(f"\nleft to you: {', '.join(left) or 'nothing'}")
    return len(left)


if __name__ == "__main__":
    parser = arguments(__doc__, "tools.maintain")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(PROGRAMS)}")
    chosen = parser.parse_args().names or [*PROGRAMS]
    if unknown := {*chosen} - {*PROGRAMS}:
        parser.error(f"{unknown.pop()}: is none of {', '.join(PROGRAMS)}")
    sys.exit(1 if main(chosen) else 0)
