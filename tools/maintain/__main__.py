"""Carry a change of an algorithm file into the pages made from it.

    python -m tools.maintain [--only NAME ...]

This runs the programs below in their order. `marks` lists differences from grpo.py outside the
marks, and the others write pages. If no loss changed, you can leave out `explorer`, which takes
longest. At the end stand the files that changed since the last commit, and the programs that left
work to you; then the exit code is 1.
"""

import subprocess
import sys

from checks.files import ROOT

from tools import arguments

PROGRAMS = {
    "marks": "tools.maintain.marks",
    "walk": "tools.maintain.walk",
    "losses": "tools.maintain.losses",
    "explorer": "tools.explorer --out docs/explorer.html",
    "side": "tools.side --out docs/side.html",
}


def main(names: list[str]) -> int:
    """Run programs; return the number of those that left work to you."""
    left = []
    for name, program in PROGRAMS.items():
        if name in names:
            print(f"\npython -m {program}", flush=True)
            if subprocess.run([sys.executable, "-m", *program.split()], cwd=ROOT).returncode:
                left.append(name)
    print("\nchanged since the last commit:", flush=True)
    subprocess.run(["git", "status", "--short"], cwd=ROOT)
    print(f"left to you: {', '.join(left) or 'nothing'}")
    return len(left)


if __name__ == "__main__":
    parser = arguments(__doc__, "tools.maintain")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=PROGRAMS, default=PROGRAMS)
    sys.exit(1 if main(parser.parse_args().only) else 0)
