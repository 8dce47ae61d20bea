"""Every program beside training: docs/development.md has a line for each."""

import argparse
import sys


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser for a program whose help is `doc`. Its errors are one line, without the usage.
    Characters that the terminal cannot show are printed as escapes."""
    sys.stdout.reconfigure(errors="backslashreplace")
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "usage": argparse.SUPPRESS}
    return argparse.ArgumentParser(description=doc, **how)
