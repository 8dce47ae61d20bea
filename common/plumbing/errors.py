"""Errors that are one line for people; `launch` shows them. Standard library only."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO


class BadInput(ValueError):
    """The user gave something wrong: shown as one line, exit code 2, nothing written."""


class RunStopped(RuntimeError):
    """Going on would train on wrong numbers: shown as one line, exit code 1."""


@contextlib.contextmanager
def blame(what: str, kind: type = BadInput) -> Iterator[None]:
    """Any error inside becomes one line for people: "`what` (its message)".

    For other people's code, which raises many kinds: file formats, tokenizers, hub clients.
    """
    try:
        yield
    except (BadInput, RunStopped):
        raise
    except (Exception, SystemExit) as error:
        raise kind(f"{what} ({in_one_line(error)})") from error


def say(*lines: str, file: TextIO | None = None) -> None:
    """Print on `file`, or stdout. A full disk or a closed pipe there ends no program."""
    file = file or sys.stdout
    try:
        print(*lines, sep="\n", file=file, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # also for what is in the buffer


def in_one_line(error: BaseException) -> str:
    """The first 240 characters of an exception's message, without line breaks."""
    return " ".join(str(error).split())[:240] or type(error).__name__
