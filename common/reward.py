"""Judges: exact match for arithmetic, math-verify for mathematics, a function of yours.

math-verify runs sympy on whatever the model wrote, which can hang, take all memory or raise. Each
answer is so judged in a worker process under bounds that the kernel enforces: an alarm kills the
worker even in the middle of C code (a Python-level time-out would not; and math-verify's own, based
on signals, silently fails when called from a thread). `python -m common.reward` is that worker: a
numbered question in, the verdict of that number out, each a line of JSON. It does not import torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tokenize
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from common.plumbing.errors import RunStopped

SECONDS, MEMORY = 5.0, 2 * 2**30  # bounds on one answer
MOST = {"seconds": 86_400, "memory": 2**50, "workers": 1000}  # that a reward's `bounds` may name
START = 120.0  # seconds, bound on the start of a worker: slow disks are slow, but a hang must end
TAIL = 2000  # characters searched for an answer that is not boxed


def final_answer(completion: str) -> str:
    """The last \\boxed{...}, braces balanced, or "" if it never closes; without a box, the end.

    Only the last box counts: a response that boxes every candidate must not be paid for one of
    them.
    """
    start = completion.rfind("\\boxed{")
    if start < 0:
        return completion[-TAIL:]
    depth = 0
    for end, character in enumerate(completion[start:], start + 1):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0 and character == "}":
            return completion[start:end]
    return ""


def reward(completion: str, reference: str) -> float:
    """1.0 where math-verify finds the completion's final answer equal to the reference, else 0."""
    from math_verify import parse, verify  # takes seconds, in the workers alone

    gold, answer = f"${reference}$", final_answer(completion)
    gold, answer = (parse(text, parsing_timeout=None) for text in (gold, answer))
    return float(verify(gold, answer, timeout_seconds=None))


def source_of(spec: str) -> str:
    """The text of FILE.py or FILE.py:NAME, in the encoding that the file declares."""
    file = spec.partition(":")[0]
    if not Path(file).is_file():  # a pipe would be waited for
        raise FileNotFoundError(f"No such file: {file}")
    with tokenize.open(file) as opened:
        return opened.read()


def loaded(spec: str, source: str = "") -> object:
    """The module FILE.py, or of FILE.py:NAME what is called so in it; `source`: its text."""
    file, _, name = spec.partition(":")
    file = os.path.abspath(file)
    sys.path.append(os.path.dirname(file))  # last: a neighbour hides no library
    try:
        module = sys.modules[f"task file {file}"] = ModuleType(f"task file {file}")
        module.__file__ = file
        exec(compile(source or source_of(file), file, "exec", dont_inherit=True), vars(module))
        return getattr(module, name) if name else module
    except BaseException as error:  # SystemExit and KeyboardInterrupt included
        raise ImportError(in_words(error, spec)) from error


class Verifier:
    """Scores completions in worker processes, by math-verify or by a function of yours.

    `spec` is FILE.py, or FILE.py:NAME, that is or has a function `reward(completion, reference)`,
    as this file has. It returns a number, or a dict of numbers of which `reward` is the score:
    `parts` has the others' (sum, count). `killed` counts the answers that broke their bounds of
    `seconds` and `memory` (bytes), or a function of yours; `failure` is the first of these in
    words, and `works` is true once an answer was judged without one.
    """

    def __init__(
        self, spec: str = "", workers: int = 0, seconds: float = SECONDS, memory: int = MEMORY
    ):
        self.spec, self.seconds, self.memory = spec, seconds, memory
        self.killed, self.parts, self.failure, self.works = 0, {}, "", False
        # Later workers, too, get the text as it is now: you may write at the file during a run.
        self.source = source_of(spec) if spec else ""
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = workers or min(8, max(1, cores))
        self.numbers = itertools.count()  # of the questions
        self.idle: queue.Queue[Worker | None] = queue.Queue()
        for _ in range(workers):
            self.idle.put(None)  # started when first needed
        self.threads = ThreadPoolExecutor(workers)

    @classmethod
    def of(cls, spec: str, given: object) -> Verifier:
        """By what `loaded(spec)` gave; its dict `bounds` may set `seconds`, `memory`, `workers`."""
        if not callable(getattr(given, "reward", given)):
            raise TypeError("has no function `reward`")
        bounds = getattr(given, "bounds", {})
        for name, most in MOST.items():
            value = bounds.get(name, most)
            if not isinstance(value, int | float) or not 0 < value <= most:  # true for NaN
                raise ValueError(f"bounds: {name} is {value!r}, not above 0 and at most {most}")
        return cls(spec, **bounds)

    def __call__(self, completions: list[str], references: list) -> list[float]:
        """The scores: 1.0 where the final answer equals the reference, else 0.0 (or part marks)."""
        verdicts = list(self.threads.map(self._judge, completions, references))
        errors = [error for _, error, _ in verdicts if error]
        for name, value in (part for _, _, parts in verdicts for part in parts.items()):
            total, count = self.parts.get(name, (0.0, 0))
            self.parts[name] = total + value, count + 1
        if errors and self.spec and not self.failure:
            self.failure = errors[0]
            first = f"{self.spec}: reward fails ({self.failure}): 0 points"
            print(f"\n{first}", file=sys.stderr, flush=True)
        self.killed += len(errors)
        self.works = self.works or len(errors) < len(verdicts)
        return [points for points, _, _ in verdicts]

    def _judge(self, completion: str, reference: object) -> tuple[float, str, dict]:
        worker = self.idle.get()
        try:
            if not worker or worker.process.poll() is not None:
                worker = Worker(self.spec, self.source, self.seconds, self.memory)
            number = next(self.numbers)
            # Twice its own bound: what it judges may have turned its own alarm off.
            said = worker.ask([number, completion, reference], 2 * self.seconds)
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # no JSON, no four
                given, points, error, parts = json.loads(said)
                if given == number:
                    return points, error, parts
            # Silence, or a line that is no verdict on this answer: nothing that this worker says
            # from here on can be trusted to be about the question it was asked.
            code, worker = worker.end(), None
            lost = f"out of time or memory? exit code {code}"
            return 0.0, "something else spoke in the worker's channel" if said else lost, {}
        finally:
            self.idle.put(worker)

    def close(self) -> None:
        """End the workers."""
        self.threads.shutdown()
        while not self.idle.empty():
            if worker := self.idle.get():
                worker.end()


class Worker:
    """A process that judges, and the channel to it: a line there, a line back."""

    def __init__(self, spec: str, source: str, seconds: float, memory: int):
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        # -P: the current folder may hold a json.py, or a `common` that is not ours.
        words = [sys.executable, "-P", "-m", "common.reward", spec, str(seconds), str(int(memory))]
        self.channel, theirs = socket.socketpair()
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            self.process = subprocess.Popen(
                words,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=errors,  # until it is ready
                start_new_session=True,  # Ctrl-C: the trainer finishes its step and needs it
            )
            theirs.close()  # the worker alone has it: its end is the channel's
            said = self.ask(source, START)
            if said == "ready\n":
                return
            code = self.end()
            errors.seek(0)
            last = errors.read().splitlines()[-1:]
        reason = said.strip() or printable(*last) or f"exit code {code}: is memory left?"
        raise RunStopped(f"the verifier {spec or 'math-verify'} does not start ({reason})")

    def ask(self, question: object, seconds: float) -> str:
        """The worker's next line; "" where none comes within `seconds`.

        The deadline is this process's own. To wait until the channel closes would be to wait for
        whatever the worker has forked, which may hold it open for ever.
        """
        said, until = b"", time.monotonic() + seconds
        with contextlib.suppress(OSError):  # closed, or out of time
            self.channel.settimeout(seconds)
            self.channel.sendall(json.dumps(question).encode() + b"\n")
            while part := self.channel.recv(2**16):
                said += part
                if part.endswith(b"\n"):
                    return said.decode(errors="replace")
                self.channel.settimeout(max(0.0, until - time.monotonic()))
        return ""

    def end(self) -> int:
        """Kill the worker and what it has forked; returns its exit code."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.channel.close()
        return self.process.wait()


def work(spec: str, seconds: str, memory: str) -> None:
    """In the worker: answer each [number, completion, reference] with [number, score, error,
    parts], until the channel, which is its stdin, closes."""
    questions, verdicts, own = os.fdopen(os.dup(0)), os.fdopen(os.dup(0), "w"), os.getpid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)  # what is judged must not read the questions
    source = json.loads(questions.readline())
    try:
        given = loaded(spec, source) if spec else sys.modules[__name__]
        score = getattr(given, "reward", given)
        if not spec:
            score("1", "1")  # loads math-verify
    except Exception as error:
        return print(in_words(error), file=verdicts, flush=True)
    with contextlib.suppress(ValueError, OSError):  # macOS knows no such bound
        pages = int(Path("/proc/self/statm").read_text().split()[0])  # what is loaded by now
        most = int(memory) + pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(nowhere, 2)
    print("ready", file=verdicts, flush=True)
    for line in questions:
        # SIGALRM's default action: the kernel ends this process.
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        number, *asked = json.loads(line)
        try:
            points = score(*asked)
            parts = points if isinstance(points, dict) else {"reward": points}
            parts = {str(name): float(value) for name, value in parts.items()}
            for name, value in parts.items():
                if not abs(value) < 1e30 or f"_{name}".endswith("_max"):  # NaN; no mean
                    raise ValueError(f"{name} {value} is no reward")
            verdict = number, parts.pop("reward"), "", parts
        except BaseException as error:  # MemoryError, RecursionError and SystemExit included
            # math-verify fails on much that is text
            verdict = number, 0.0, in_words(error, spec) if spec else "", {}
        if os.getpid() != own:  # a fork that came back would take the next question, too
            os._exit(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(BrokenPipeError):  # the trainer was killed meanwhile
            print(json.dumps(verdict), file=verdicts, flush=True)
    os.killpg(0, signal.SIGKILL)  # the run is over: what answers have left behind ends with it


def in_words(error: BaseException, spec: str = "") -> str:
    """Its kind and message in a line, and the last line of the file that led to it."""
    file = os.path.abspath(spec.partition(":")[0])
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == file]
    where = f"{Path(file).name}:{lines[-1]}: " if lines else ""
    words = ""
    with contextlib.suppress(BaseException):  # an error of yours may fail to say itself
        words = str(error)
    return where + printable(f"{type(error).__name__}: {words}").removesuffix(":")


def printable(text: str = "") -> str:
    """Its first line, as far as it fits, without what steers a terminal."""
    first = text.strip().partition("\n")[0][:240]
    return "".join(one if one.isprintable() else "?" for one in first)


if __name__ == "__main__":
    work(*sys.argv[1:])
