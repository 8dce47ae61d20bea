"""Every program beside training: docs/development.md has a line for each."""

import argparse
import sys


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser for a program whose help is `doc`. Its errors are one line, without the usage; what
    the terminal cannot show is printed as an escape."""
    sys.stdout.reconfigure(errors="backslashreplace")
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "usage": argparse.SUPPRESS}
    return argparse.ArgumentParser(description=doc, **how)
