"""All programs besides training: docs/development.md has a line for each."""

import argparse
import sys
from pathlib import Path


def arguments(doc: str, program: str | None = None) -> argparse.ArgumentParser:
    """A parser for a program whose help is `doc`. Its errors are one line, without the usage. It
    prints characters that the terminal cannot show as escapes."""
    sys.stdout.reconfigure(errors="backslashreplace")
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "usage": argparse.SUPPRESS}
    return argparse.ArgumentParser(program, description=doc, **how)


def empty_folder(folder: Path) -> Path:
    """The folder, created if needed. OSError, before any work, if it is not empty."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder}: is not empty, give another")
    return folder
