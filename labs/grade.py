"""Grade an exercise of labs.blank: print the checks that fail, each with a number that it found. In
an algorithm's file the checks of single parts come first, then those of the whole loss: its value,
gradient and count on a batch, with several flags, also in micro-batches; `measures` comes last.

    python -m labs.grade mine/grpo.py [--hint] [--exercise grpo]
    python -m labs.grade mine.py:grpo_loss      judges a loss with any arguments (labs/judge.py)

--exercise, the file's name, or its first line, which labs.blank writes, say which exercise it is.
The exit code is 0 if all checks hold, 1 if not, 2 if FILE is no exercise. --hint gives the rules.

The file runs in a process of its own with limits on time and memory. That protects against
accidents, but not against a file that is made to cheat or to do harm: read others' files first.
"""

import contextlib
import gc
import os
import re
import signal
import sys
import textwrap
import tokenize
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType

import checks
import torch
from checks.files import MODULES
from checks import harness
from checks.harness import NO_MEASURES
from common.cli import BadInput, in_one_line, say
from common.tasks.reward import bound_memory
from tools import arguments

from labs import exercise_checks, judge
from labs.blank import HEAD, REQUIRED, single
from labs.handed_in import in_words, load

CHECK_SECONDS = 30  # limit for one check; the slowest takes one second
MEMORY = 4 << 30  # bytes, beyond what the grader itself has
# Checks of the whole, in their order. A wrong part fails them, too, so the first of those that fail
# is shown, and only if every part holds.
WHOLE_CHECKS = "check_fixture check_loss check_parts_add_up check_statistics".split()
Check = Callable[[ModuleType], None]


def exercise_of(path: Path, source: str, exercise: str | None) -> str:
    """Find out which exercise a file is."""
    first = re.match(HEAD.format(name=r"(\w+)"), source)
    known = [*MODULES, *single()]
    names = [exercise] if exercise else [path.stem, *(first.groups() if first else ())]
    for name in names:
        if name in known:
            return name
    question = f"{exercise or path}: which exercise is it? Give --exercise NAME, one of"
    raise BadInput(f"{question} {', '.join(known)}")


def checks_of(name: str) -> list[Check]:
    """List the checks of an exercise, those of parts first."""
    if name in MODULES:
        return sorted(checks.of(name)[0], key=stage)
    return list(exercise_checks.CHECKS[name])


def stage(check: Check | None) -> int:
    """Return 0 for a check of a part, or the place among the checks of the whole, from 1."""
    name = check.__name__ if check else ""
    return WHOLE_CHECKS.index(name) + 1 if name in WHOLE_CHECKS else 0


def shown(failed: dict[Check | None, str]) -> list[Check | None]:
    """Return the checks to show: all parts that fail, or else the first check of the whole."""
    parts = [check for check in failed if stage(check) == 0]
    return parts or [*failed][:1]


def read(path: Path) -> str:
    """Read the text of a Python file."""
    if not path.is_file():  # reading a pipe might never end
        raise BadInput(f"{path}: not a file")
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not UTF-8 text") from error


def limit_this_process() -> None:
    """Bound the memory of the student's process, and discard what it prints."""
    for output in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    bound_memory(MEMORY)


def run_checks(name: str, path: Path, source: str, results: Connection) -> None:
    """Run in the student's process: load the file and run its checks; send each one's result."""
    # A fork has no threads of the libraries, so never collect objects that they own.
    gc.freeze()
    limit_this_process()
    own_process = os.getpid()

    def send(problem: str) -> None:
        if os.getpid() != own_process:  # a fork that returned here would go on with the checks
            os._exit(1)
        results.send(problem)

    try:
        module = load(source, path)
    except BaseException as error:
        send(in_words(error, path))
        return
    wanted = REQUIRED if name in MODULES else (name,)
    missing = [function for function in wanted if not hasattr(module, function)]
    if missing:
        send(f"it has no function {' and no '.join(missing)}")
        return
    send("")
    for check in checks_of(name):
        send(outcome(module, check, path))


def outcome(module: ModuleType, check: Check, path: Path) -> str:
    """Return what is wrong according to a check, which allows for float32; "" if it holds."""
    torch.manual_seed(0)
    harness.ROUNDING = 1e-6
    try:
        with warnings.catch_warnings(action="ignore"):
            check(module)
    except BaseException as error:
        return in_words(error, path) or "it does not hold"
    finally:
        harness.ROUNDING = 0.0
    return ""


def grade(name: str, path: Path, source: str) -> tuple[dict[Check | None, str], int]:
    """Return what is wrong, by check (None: loading the file), and how many checks hold. A file
    that ends its process, or runs too long, fails the current check, and the others do not run."""
    ours, theirs = Pipe(duplex=False)
    with warnings.catch_warnings(action="ignore"):  # about threads, which sleep in libraries
        child = os.fork()  # torch is loaded already
    if child == 0:
        try:
            os.setpgid(0, 0)
            run_checks(name, path, source, theirs)
        finally:
            os._exit(0)
    with contextlib.suppress(OSError):  # the child calls it, too, and the second call may fail
        os.setpgid(child, child)
    theirs.close()
    failed, held = {}, 0
    try:
        for step in [None, *checks_of(name)]:
            problem, goes_on = next_verdict(ours)
            if problem:
                failed[step] = problem
            elif step:
                held += 1
            if not goes_on or None in failed:
                break
    finally:
        os.kill(child, signal.SIGKILL)
        with contextlib.suppress(OSError):  # kills what it has forked, if anything is left
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return failed, held


def next_verdict(results: Connection) -> tuple[str, bool]:
    """Return the next check's verdict, and whether the process goes on."""
    if not results.poll(CHECK_SECONDS):
        return f"still running after {CHECK_SECONDS} seconds: an endless loop?", False
    try:
        return results.recv(), True
    except EOFError:
        return "it ended its process: os._exit, or a crash", False


def hint(failed: dict[Check | None, str]) -> str:
    """Say, a line each, what is not written yet and what the other checks shown ask for."""
    if None in failed:
        return "Make the file run first."
    lines = []
    for check in shown(failed):
        _, missing, function = failed[check].partition("TODO: ")
        rule = f"What check {plain_name(check)} asks for: {check.__doc__}"
        lines.append(f"{function} is not written yet." if missing else " ".join(rule.split()))
    return "\n".join(dict.fromkeys(lines))


def plain_name(check: Check | None) -> str:
    """Write check_eos_counts as "eos counts"."""
    return check.__name__.removeprefix("check_").replace("_", " ") if check else "the file"


def report(failed: dict[Check | None, str], held: int, every: list[Check]) -> str:
    """List the checks that fail and are shown, grouped by reason, and count those that hold."""
    to_show = shown(failed)
    groups: dict[str, list[str]] = {}
    for check in to_show:
        groups.setdefault(failed[check], []).append(plain_name(check))
    paragraphs, indent = [], " " * 9
    for reason, names in groups.items():
        for text in (f"NOT YET  {', '.join(names)}", f"{indent}Found: {reason}"):
            paragraphs.append(textwrap.fill(text, 92, subsequent_indent=indent))
    last = f"{held} of {len(every)} checks hold."
    if held + len(failed) < len(every):
        last += " The others were not run."
    elif len(failed) > len(to_show):
        whole = [plain_name(check) for check in failed if check not in to_show]
        last += f" After these come: {', '.join(whole)}."
    return "\n".join([*paragraphs, textwrap.fill(last, 92)])


def main() -> int:
    parser = arguments(__doc__, "labs.grade")
    parser.add_argument("file", metavar="FILE[:FUNCTION]")
    parser.add_argument("--hint", action="store_true")
    parser.add_argument("--exercise", metavar="NAME", help="which one FILE is meant to be")
    words = parser.parse_args()
    if sys.flags.optimize:
        parser.error("python -O and PYTHONOPTIMIZE remove the checks: run without them")
    file, _, function = words.file.partition(":")
    path = Path(file)
    try:
        source = read(path)
        if function:
            return judge.judge(path, source, function)
        name = exercise_of(path, source, words.exercise)
    except (BadInput, OSError) as error:
        parser.error(str(error) if function else in_one_line(error))
    failed, held = grade(name, path, source)
    every = checks_of(name)
    for check, problem in [*failed.items()]:
        if problem == NO_MEASURES:  # `measures` is an exercise of its own
            say("Not graded: measures, which is a second, optional exercise.")
            del failed[check]
            every.remove(check)
    say(report(failed, held, every))
    if failed and words.hint:
        for line in hint(failed).splitlines():
            say(textwrap.fill(f"Hint. {line}", 100))
        if name in MODULES:
            say(f"The judge names known mistakes: python -m labs.grade {path}:policy_loss")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
