"""Print the whole loop of a variant: `python -m variants dapo`."""

import argparse
import importlib
from pathlib import Path

files = sorted(Path(__file__).parent.glob("[a-z]*.py"))
NAMES = [path.stem for path in files if "launch(main" in path.read_text("utf-8")]

if __name__ == "__main__":
    # Without the usage, an error is one line.
    parser = argparse.ArgumentParser("variants", description=__doc__, usage=argparse.SUPPRESS)
    known = ", ".join(NAMES)
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=known)
    for name in parser.parse_args().names:
        print(importlib.import_module(f"variants.{name}").main.source)
