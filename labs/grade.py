"""Grades an exercise of labs.blank, in words and numbers.

    python -m labs.grade mine/grpo.py [--hint] [--exercise grpo]

The file's name says which exercise it is; or else its first line, which labs.blank writes; or
--exercise. Exit code 0 where all its checks hold, 1 where one does
not, 2 where FILE is no exercise. --hint says which damage has the same effect.

The file runs in a process of its own, with bounds on time and memory, so that no accident in it
passes for an answer. The bounds are no prison: a file can do what you can do, and one that is made
to deceive the grader may succeed. So read what comes from others before you grade it.
"""

import argparse
import builtins
import contextlib
import importlib
import json
import linecache
import os
import re
import secrets
import select
import signal
import sys
import textwrap
import time
import tokenize
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import common  # noqa: F401  (before torch)
from common.plumbing.errors import BadInput, first_line
import numpy
import torch
import checks
from checks.files import MODULES
from torch import Tensor

from labs import exercise_checks
from labs.blank import HEAD, TAKEN, single
from labs.why import why

SECONDS = 30  # for one check: the slowest takes one
MEMORY = 4 << 30  # bytes, beyond what the grader itself has
LARGEST = 1 << 20  # bytes of a file
NOT_RUN = "not run"
Verdict = tuple[Callable | None, str]  # a check (None: loading the file), what is wrong with it


def meant(path: Path, source: str, asked: str | None) -> str:
    """Which exercise a file is: the one asked for, or by its name, or by its first line."""
    first = re.match(HEAD.format(name=r"(\w+)"), source)
    known = [*MODULES, *single()]
    names = [asked] if asked else [path.stem, *(first.groups() if first else ())]
    found = [name for name in names if name in known]
    if not found:
        told = f"{asked or path}: which exercise is it? Give --exercise NAME, one of"
        raise BadInput(f"{told} {', '.join(known)}")
    return found[0]


def exercise(name: str) -> tuple[list[Callable], tuple[str, ...]]:
    """The checks of an exercise, and the functions that are asked for."""
    if name in MODULES:
        return checks.of(name)[0], TAKEN
    return list(exercise_checks.CHECKS[name]), (name,)


def read(path: Path) -> str:
    """The text of a file, decoded as Python does it: with or without a mark, by its coding line."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file" if not path.exists() else f"{path}: is no file")
    if path.stat().st_size > LARGEST:
        raise BadInput(f"{path}: has more than {LARGEST} bytes: no exercise is that long")
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        told = "it is not UTF-8, nor what a coding line of its own says"
        raise BadInput(f"{path}: is no text that Python reads: {told}") from error


# In the student's process


def in_words(error: BaseException, path: Path) -> str:
    """What an exception says, and at which line of the student's file it was met."""
    kind = type(error).__name__
    try:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame for frame in frames if frame.filename == str(path)]
        if isinstance(error, RecursionError):
            return "it calls itself without end"
        if isinstance(error, SyntaxError) and error.filename == str(path):
            return f"line {error.lineno} is no Python: {error.msg}"
        if isinstance(error, NotImplementedError):
            return first_line(error)
        if isinstance(error, KeyError) and not lines:
            return f"{error} is missing from the statistics, the third that policy_loss returns"
        if isinstance(error, AssertionError) and frames[-1] not in lines:
            return " ".join(str(error).split()) if error.args else why(error)
        kind += f" at line {lines[-1].lineno}: {lines[-1].line}" if lines else ""
        said = textwrap.shorten(" ".join(str(error).split()), 200, placeholder=" ...")
        return f"{kind} ({said})" if said else kind
    except BaseException:  # its words raise one, too
        return f"{kind}, which cannot be put into words"


def load(path: Path, source: str) -> ModuleType:
    """The student's file as a module."""
    module = ModuleType(f"handed_in_{path.stem}")
    module.__file__, sys.modules[module.__name__] = str(path), module  # dataclasses look it up
    linecache.cache[str(path)] = (len(source), None, source.splitlines(True), str(path))
    exec(compile(source, str(path), "exec"), vars(module))
    return module


def bare(x: object) -> object:
    """The tensors and numbers that a function returned, as what they are without methods of their
    own: one whose `==` is always true is a number like others."""
    if isinstance(x, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor.as_subclass(x, Tensor)
    if isinstance(x, numpy.generic):
        return numpy.generic.item(x)
    if isinstance(x, dict):
        return {str(name): bare(value) for name, value in dict.items(x)}
    if isinstance(x, tuple | list):
        kind = tuple if isinstance(x, tuple) else list
        return kind(bare(value) for value in kind.__iter__(x))
    for kind in (int, float):
        if isinstance(x, kind) and type(x) not in (kind, bool):
            return getattr(kind, f"__{kind.__name__}__")(x)
    if x is None or type(x) in (int, float, bool):
        return x
    raise TypeError(f"it returns {type(x).__name__}, which is neither a tensor nor a number")


def wrapped(function: Callable) -> Callable:
    return lambda *args, **kwargs: bare(function(*args, **kwargs))


def machinery() -> dict:
    """What the verdict rests on, which no answer has a reason to change."""
    names = (__name__, "checks", "labs.exercise_checks", "labs.why", *MODULES.values())
    ours = [m for name, m in sys.modules.items() if name.startswith(names)]
    found = {}
    for owner in (*ours, builtins, torch, Tensor):
        for name, thing in vars(owner).items():
            found[id(owner), name] = thing
            if owner in ours and isinstance(thing, FunctionType):
                found[id(owner), name, "code"] = thing.__code__
            elif owner in ours and isinstance(thing, dict | list | tuple) and name.isupper():
                found[id(owner), name, "text"] = repr(thing)
    return found


def differs(now: object, before: object) -> bool:
    """Not where torch replaces a function of its own, as some imports make it do."""
    if isinstance(before, str):
        return now != before
    return now is not before and not str(getattr(now, "__module__", "")).startswith("torch.")


def verdicts(name: str, path: Path, source: str) -> Iterator[Verdict]:
    """What is wrong with the text of an exercise that stands, or would, at `path`, check by check;
    an empty reason for a check that holds.

    Nothing that a wrong answer does comes out of here as an exception.
    """
    every, wanted = exercise(name)
    importlib.import_module(MODULES.get(name, "labs.exercises"))  # and what it imports
    before = machinery()
    try:
        module = load(path, source)
    except BaseException as error:
        yield None, in_words(error, path)
        return
    missing = [name for name in wanted if not callable(getattr(module, name, None))]
    if missing:
        yield None, f"there is no function {' and no '.join(missing)} in it"
        return
    yield None, ""
    for name in wanted:
        setattr(module, name, wrapped(getattr(module, name)))
    for check in every:
        reason = ""
        torch.manual_seed(0)
        try:
            check(module)
        except BaseException as error:
            reason = in_words(error, path) or "it does not hold"
        now = {} if reason else machinery()  # only a good verdict can be a false one
        if now and any(differs(now.get(key), thing) for key, thing in before.items()):
            reason = "the file changes what it is judged by"
        yield check, reason


def bounded(channel: int) -> None:
    """From here on this process has bounds, and speaks through the channel alone."""
    os.setpgid(0, 0)
    os.closerange(3, channel), os.closerange(channel + 1, 4096)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    sys.stdout = sys.stderr = open(nowhere, "w", closefd=False)
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has each
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (600, 600))  # where the grader itself was killed
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def answer(name: str, path: Path, source: str, channel: int, key: str) -> None:
    """The whole life of the student's process: verdicts into the channel, a line each."""
    me = os.getpid()
    for number, (_, reason) in enumerate(verdicts(name, path, source)):
        if os.getpid() == me:  # not from a fork of the student's
            line = json.dumps({"key": key, "number": number, "reason": reason}) + "\n"
            os.write(channel, line.encode())


# In the grader's

SILENT = "it was still at work after {} seconds: a loop without end?"
FORGED = "something else than the checks speaks in the channel of their verdicts"


def lines(pipe: int, child: int) -> Iterator[str]:
    """What comes through the channel, line by line, each within its seconds. What the generator
    returns is why nothing more does."""
    held, until = b"", time.monotonic() + SECONDS
    while time.monotonic() < until:
        if select.select([pipe], [], [], 0.2)[0]:
            part = os.read(pipe, 1 << 16)
            if not part or len(held) > LARGEST:
                return ended(child)
            *whole, held = (held + part).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace")
                until = time.monotonic() + SECONDS
        elif os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return ended(child)
    return SILENT.format(SECONDS)


def ended(child: int) -> str:
    """How the process came to its end; it has a second to do so."""
    for _ in range(20):
        if dead := os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if dead.si_code == os.CLD_EXITED:
                return f"it ended the process, with code {dead.si_status}, before a verdict"
            return f"it ended the process: {signal.strsignal(dead.si_status).lower()}"
        time.sleep(0.05)
    return "it closed the channel of the verdicts"


def graded(name: str, path: Path, source: str) -> list[Verdict]:
    """The verdicts on a file that are not good, from a process of its own.

    Whatever ends that process, or keeps it too long, is the verdict on the check it was at. The
    rest is not run then: what has not been said to hold does not.
    """
    steps, key = [None, *exercise(name)[0]], secrets.token_hex()
    ours, theirs = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # of threads that sleep in libraries
        child = os.fork()
    if child == 0:
        try:
            os.close(ours)
            bounded(theirs)
            answer(name, path, source, theirs, key)
        finally:
            os._exit(0)
    os.close(theirs)
    found: list[Verdict] = []
    spoken = lines(ours, child)
    try:
        for number, step in enumerate(steps):
            try:
                said = json.loads(next(spoken))
                reason, on = said["reason"], number or not said["reason"]
                if (said["key"], said["number"]) != (key, number):
                    raise ValueError
            except StopIteration as last:
                reason, on = last.value, False
            except (ValueError, TypeError, KeyError):
                reason, on = FORGED, False
            found += [(step, reason)] * bool(reason)
            if not on:
                return found + [(rest, NOT_RUN) for rest in steps[number + 1 :]]
        return found
    finally:
        os.close(ours)
        for kill in (os.killpg, os.kill):  # with what it has started, and where it has no group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# Hints


def damages(name: str) -> Iterator[tuple[str, Callable[[], ModuleType]]]:
    """The named damages of an exercise, and what makes each."""
    if name in MODULES:
        original, mutants = importlib.import_module(MODULES[name]), checks.of(name)[1]
    else:
        original = importlib.import_module("labs.exercises")
        mutants = exercise_checks.MUTANTS[name]
    for damage, (old, new, *_) in mutants.items():
        yield damage, lambda old=old, new=new: checks.mutate(original, old, new)


def explained(name: str, found: list[Verdict]) -> dict[str, set[Callable]]:
    """Damages whose verdicts, numbers included, are among those found, and which of them."""
    # Where it was raised is of no matter
    reasons = {check: re.sub(r" at line \d+: .* \(", " (", reason) for check, reason in found}
    every = exercise(name)[0]
    causes, until = {}, time.monotonic() + SECONDS
    for damage, made in damages(name):
        if time.monotonic() > until:  # of a file whose checks are slow
            break
        module = made()
        alike = {c for c in every if c in reasons and verdict(module, c) == reasons[c]}
        if alike and not any(verdict(module, c) for c in every if c not in reasons):
            causes[damage] = alike
    return causes


def verdict(module: ModuleType, check: Callable) -> str:
    """What a check says of a module of ours."""
    torch.manual_seed(0)
    try:
        check(module)
    except Exception as error:
        return in_words(error, Path()) or "it does not hold"
    return ""


def hint(name: str, found: list[Verdict]) -> str:
    """Which damages we know that have the same effect, to the digits of the verdicts."""
    if any("TODO" in reason for _, reason in found):
        return "Write what is still a TODO, then ask again."
    found = [(check, reason) for check, reason in found if reason != NOT_RUN]
    left, said = {check for check, _ in found if check}, []
    causes = explained(name, found) if left else {}
    while left and causes:
        most = max(len(seen & left) for seen in causes.values())
        best = [damage for damage, seen in causes.items() if len(seen & left) == most]
        seen = causes[best[0]] & left
        if not seen:
            break
        best = [damage for damage in best if causes[damage] & left == seen]
        names = " or ".join(f"'{damage}'" for damage in best)
        if seen == {check for check, _ in found}:
            said.append(f"{names} has just this effect")
        else:
            said.append(f"{names} would explain: {', '.join(sorted(map(plainly, seen)))}")
        left -= seen
    if left and name not in MODULES:
        told = exercise_checks.CHECKS[name]
        said += [told[check] for check in told if check in left]
    elif left:
        names = ", ".join(sorted(map(plainly, left))) if said else "These numbers"
        said.append(
            f"{names}: of no damage that we have a name for. Compare with the gradient weight in "
            f"the head of {name}.py, and with what its blank says of each statistic"
        )
    return ". ".join(said) + "." if said else "Nothing of it could be run."


# The verdict


def plainly(check: Callable | None) -> str:
    """check_asymmetric_clip -> asymmetric clip"""
    return check.__name__.removeprefix("check_").replace("_", " ") if check else "the file"


def printable(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def report(found: list[Verdict], total: int) -> str:
    """The verdict, for a terminal. Until one check holds it names the checks, those with the same
    reason together; from then on it says of each what it asks for."""
    said = [(check, reason) for check, reason in found if reason != NOT_RUN]
    held = total - len(found) if all(check for check, _ in said) else 0
    groups: dict[object, list[Verdict]] = {}
    for check, reason in said:
        key = (check, reason) if held else reason
        groups.setdefault(key, []).append((check, reason))
    told = []
    indented = {"initial_indent": " " * 9, "subsequent_indent": " " * 9}
    for together in groups.values():
        first, reason = together[0]
        names = "NOT YET  " + ", ".join(plainly(check) for check, _ in together)
        told.append(textwrap.fill(names, 92, subsequent_indent=" " * 9))
        asked = " ".join((first.__doc__ or "").split()) if held else ""
        if asked:
            told.append(textwrap.fill(asked, 92, **indented))
        if reason:
            told.append(textwrap.fill(f"Found: {printable(reason)}", 92, **indented))
    if len(said) < len(found) and said[0][0]:
        told.append(f"Not run after that: {len(found) - len(said)}.")
    return "\n".join([*told, f"{held} of {total} checks hold."])


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
    parser.add_argument("--exercise", metavar="NAME", help="which one FILE is meant to be")
    words = parser.parse_args()
    for stream in (sys.stdout, sys.stderr):  # a terminal may know fewer letters than we use
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        source = read(words.file)
        name = meant(words.file, source, words.exercise)
    except (BadInput, OSError) as error:
        parser.error(first_line(error))
    try:
        found = graded(name, words.file, source)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    print(report(found, len(exercise(name)[0])))
    if found and words.hint:
        print(textwrap.fill("Hint. " + hint(name, found), 100))
    elif found:
        print("--hint says more.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
