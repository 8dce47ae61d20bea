"""Grades an exercise of labs.blank, in words.

    python -m labs.grade mine/grpo.py [--hint]

The file's name says which exercise it is. Exit code 0 where all its checks hold, else 1. --hint
says what usually turns the same checks red.
"""

import argparse
import importlib
import linecache
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType

import common  # noqa: F401  (before torch)
import torch
from common.distributed import BadInput, first_line
from tests import checks
from tests.adapters import MODULES

from labs import exercise_checks
from labs.blank import TAKEN, single

SECONDS = 20  # for one check: the slowest takes one
Verdict = tuple[Callable | None, str]  # a check (None: loading the file), what is wrong with it


class TooLong(BaseException):
    """A check has had its seconds."""


def exercise(name: str) -> tuple[list[Callable], tuple[str, ...]]:
    """The checks of an exercise, and the functions that are asked for."""
    if name in MODULES:
        return checks.of(name)[0], TAKEN
    if name not in single():
        known = ", ".join([*MODULES, *single()])
        raise BadInput(f"{name}.py: the file's name says which exercise it is, one of {known}")
    return list(exercise_checks.CHECKS[name]), (name,)


@contextmanager
def guarded() -> Iterator[None]:
    """Seconds are counted, what is printed is swallowed."""

    def end(number: int, frame: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def in_words(error: BaseException, path: Path) -> str:
    """What a student's exception says, and at which line of the file it was met."""
    if isinstance(error, TooLong):
        return f"it was still at work after {SECONDS} seconds: a loop without end?"
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"line {error.lineno} is no Python: {error.msg}"
    if isinstance(error, NotImplementedError):
        return first_line(error)
    if isinstance(error, KeyError) and not error.__traceback__.tb_next.tb_next:
        return f"{error} is missing from the statistics, the third that policy_loss returns"
    lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    if isinstance(error, AssertionError) and not lines:
        return first_line(error) if error.args and isinstance(error.args[0], str) else ""
    at = f" at line {lines[-1].lineno}: {lines[-1].line}" if lines else ""
    said = textwrap.shorten(" ".join(str(error).split()), 200, placeholder=" ...")
    return f"{type(error).__name__}{at} ({said})"


def load(path: Path, source: str) -> ModuleType:
    """The student's file as a module."""
    module = ModuleType(f"handed_in_{path.stem}")
    module.__file__, sys.modules[module.__name__] = str(path), module  # dataclasses look it up
    linecache.cache[str(path)] = (len(source), None, source.splitlines(True), str(path))
    exec(compile(source, str(path), "exec"), vars(module))
    return module


def verdicts(path: Path, source: str) -> Iterator[Verdict]:
    """What is wrong with the text of an exercise that stands, or would, at `path`, check by check.

    Nothing that a wrong answer does comes out of here as an exception.
    """
    every, wanted = exercise(path.stem)
    try:
        with guarded():
            module = load(path, source)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        yield None, in_words(error, path)
        return
    missing = [name for name in wanted if not callable(getattr(module, name, None))]
    if missing:
        yield None, f"there is no function {' and no '.join(missing)} in it"
        return
    for check in every:
        torch.manual_seed(0)
        try:
            with guarded():
                check(module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            yield check, in_words(error, path)


def likely(name: str, red: list[Callable]) -> list[str]:
    """Of an algorithm's named damages, those that turn exactly the same checks red."""
    every, mutants = checks.of(name)
    original = importlib.import_module(MODULES[name])
    names = {check.__name__ for check in red}
    return [
        damage
        for damage, (old, new, *_) in mutants.items()
        if {c.__name__ for c in checks.red(checks.mutate(original, old, new), every)} == names
    ]


def hint(name: str, found: list[Verdict]) -> str:
    """What usually turns these checks red."""
    red = [check for check, _ in found if check]
    if any("TODO" in reason for _, reason in found):
        return "Write what is still a TODO, then ask again."
    if name not in MODULES:
        return "; ".join(exercise_checks.CHECKS[name][check] for check in red)
    causes = likely(name, red) if red else []
    told = "Such a damage turns just these checks red: " + "; ".join(causes)
    return told if causes else f"Compare with the gradient weight in the head of {name}.py."


def plainly(check: Callable | None) -> str:
    """check_asymmetric_clip -> asymmetric clip"""
    return check.__name__.removeprefix("check_").replace("_", " ") if check else "the file"


def report(found: list[Verdict], total: int) -> str:
    """The verdict, for a terminal."""
    lines = []
    for check, reason in found:
        lines.append(f"NOT YET  {plainly(check)}")
        words = " ".join((check.__doc__ or "").split()) if check else ""
        for part in filter(None, (words, reason and f"Here: {reason}")):
            lines.append(textwrap.fill(part, 92, initial_indent=" " * 9, subsequent_indent=" " * 9))
    held = total - len(found) if all(check for check, _ in found) else 0
    return "\n".join([*lines, f"{held} of {total} checks hold."])


def main() -> int:
    """Exit code 0: all hold; 1: not yet. (2: no exercise.)"""
    parser = argparse.ArgumentParser(
        prog="labs.grade",
        usage=argparse.SUPPRESS,  # an error is one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--hint", action="store_true")
    words = parser.parse_args()
    try:
        every, _ = exercise(words.file.stem)
        source = words.file.read_text()
    except (BadInput, OSError, UnicodeDecodeError) as error:
        parser.error(first_line(error))
    found = list(verdicts(words.file, source))
    print(report(found, len(every)))
    if found and words.hint:
        print(textwrap.fill("Hint. " + hint(words.file.stem, found), 100))
    elif found:
        print("--hint says more.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
