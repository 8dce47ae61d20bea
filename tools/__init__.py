"""All programs besides training: docs/development.md has a line for each."""

import argparse
import sys


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser for a program whose help is `doc`. Its errors are one line, without the usage. It
    prints characters that the terminal cannot show as escapes."""
    sys.stdout.reconfigure(errors="backslashreplace")
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "usage": argparse.SUPPRESS}
    return argparse.ArgumentParser(description=doc, **how)
