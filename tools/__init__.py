"""The programs besides training. Run them as `python -m tools.NAME`; `--help` explains each.

    page          a run's stored responses as an HTML page, every token coloured by its weight
    compare       several runs in one table
    evaluate      accuracy of a model, or of a run's newest checkpoint, on any data sets
    memory        the GPU and host memory that a command needs
    explorer      an HTML page that shows what each loss does to a token
    side          an HTML page that shows any two algorithm files side by side
    make_tiny     the embedded models, trained again
    make_smollm2  a real model, from a PyPI package
`maintain` has the programs for maintainers of this project.
"""

import argparse
import sys
from pathlib import Path


def arguments(doc: str, program: str | None = None) -> argparse.ArgumentParser:
    """Make a parser for a program whose help is `doc`. Its errors are one line, without the usage,
    and characters that the terminal cannot show print as escapes."""
    sys.stdout.reconfigure(errors="backslashreplace")
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "usage": argparse.SUPPRESS}
    return argparse.ArgumentParser(program, description=doc, **how)


def empty_folder(folder: Path) -> Path:
    """Create a folder if needed. Raise OSError, before any work, if it is not empty."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder}: is not empty, give another")
    return folder
