"""Draw a run's curves.png anew, also while it is under way: `python -m tools.curves RUN ...`."""

import sys
from pathlib import Path

from common.plumbing.curves import draw_curves
from common.plumbing.errors import BadInput, first_line

from tools.compare import run_of


def main() -> None:
    """Draw each run; a line for each picture."""
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
            raise BadInput("usage: python -m tools.curves RUN ...")
        for argument in sys.argv[1:]:
            run_of(Path(argument))  # refuses what no run has written
            print(draw_curves(Path(argument)))
    except (BadInput, OSError) as error:
        print(f"tools.curves: error: {first_line(error)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
