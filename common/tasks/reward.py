"""Verifiers: math-verify for mathematics, or the `reward` of a task file, in bounded processes.

math-verify runs sympy on whatever the model wrote, which can hang, take all memory or raise. So
each answer is scored in a worker process under bounds that the kernel enforces. Its alarm ends the
worker even in the middle of C code. A time-out in Python would not, and math-verify's own, which
uses signals, silently fails in a thread. `python -m common.tasks.reward` is that worker: it reads
numbered questions and writes numbered verdicts, each as a line of JSON. It does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from common.cli import BadInput, RunStopped, blame, say
from common.tasks.answers import PATTERN, final_answer, in_one_spelling, marked_answer

# Bounds on one answer; a task file may set others in `bounds`.
ANSWER_SECONDS, MEMORY = 5.0, 2 * 2**30
LARGEST = 2**24  # of rewards: float32, in which they are compared, rounds larger integers
TASK_FILE = re.compile(r"(.+\.py)(?::([^/]*))?")  # FILE.py or FILE.py:NAME
START = 120.0  # seconds in which a worker must start: disks may be slow, but a hang must end


class Verdict(NamedTuple):
    """What a verifier says of a response."""

    score: float  # or what a task file's `reply` returned: a text or None
    answer: str = ""  # the response's final answer; "" if it gives none
    failure: str = ""  # why the function failed, which costs the response its score


def reward(completion: str, reference: str) -> float:
    """Return 1.0 if the completion's final answer equals the reference, else 0.0."""
    from common.tasks.equality import answers_equal  # slow to import; a task file needs it not

    answer = final_answer(completion)
    return float(
        bool(answer) and answers_equal(in_one_spelling(reference_answer(reference)), answer)
    )


def reference_answer(reference: str) -> str:
    """Return what is in a reference's box or behind its label; without one, the reference."""
    gold = marked_answer(reference)
    return reference if gold is None else gold


@cache
def is_gradable(reference: str) -> bool:
    """Tell whether a response can earn a reference: in a box it must be an answer equal to itself,
    and no placeholder such as N/A."""
    gold = reference_answer(reference)
    answer = final_answer(rf"\boxed{{{gold}}}")
    if not answer or PATTERN.NO_ANSWER.fullmatch(answer):
        return False
    return answer == in_one_spelling(gold)


def read_task_file(spec: str) -> str:
    """Read the text of the task file FILE.py or FILE.py:NAME."""
    with blame(f"--task {spec}: cannot be read"):
        return Path(TASK_FILE.fullmatch(spec)[1]).read_text("utf-8-sig")


def load_task_file(spec: str, source: str = "") -> object:
    """Load FILE.py as a module; for FILE.py:NAME, return the object of that name in it.

    `source` is the file's text, if it has been read already.
    """
    file, name = TASK_FILE.fullmatch(spec).groups()
    file = os.path.realpath(file)  # its helpers are beside the file, not beside a link to it
    source = source or read_task_file(spec)
    sys.path.append(str(Path(file).parent))  # last, so that a file beside it shadows no library
    module = ModuleType(f"task file {file}".replace(".", "_"))  # a dot would mean a package
    sys.modules[module.__name__] = module  # dataclasses and pickle look for it there
    module.__file__ = file
    exec(compile(source, file, "exec", dont_inherit=True), vars(module))
    if name and not hasattr(module, name):
        raise BadInput(f"--task {spec}: {name} is not in the file")
    return getattr(module, name) if name else module


def digest(rows: list) -> str:
    """Return the SHA-256 of the rows as JSON."""
    return hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()


def fingerprint(spec: str, source: str, task: object, last: int = 0) -> str:
    """Hash a task file's text and some of its problems, and try a run's `last` problem. Hashes of
    two processes differ if the problems depend on chance, or on the order of a set."""
    try:
        task.train(last)
        return digest([source, task.held_out[:8], [task.train(number) for number in range(8)]])
    except Exception as error:
        needs = f"needs train(i) for every i, and a list held_out ({describe(error)})"
        raise BadInput(f"--task {spec}: {needs}") from error


@dataclass(eq=False)
class Verifier:
    """A verifier that scores completions in worker processes.

    `spec` is the task file, FILE.py or FILE.py:NAME, or "" for math-verify. An answer earns 0 if
    the function fails on it, or if it breaks the bounds of `seconds` and `memory` (bytes): its
    verdict then has a `failure`. math-verify's own errors, which wrong answers cause, are none.
    """

    spec: str = ""
    workers: int = 0  # 0: one for each core, at most 8
    seconds: float = ANSWER_SECONDS
    memory: int = MEMORY
    function: str = "reward"  # or "reply", in a task file with a tool
    problems: str = ""  # the `fingerprint` of the file, which the workers must also find

    def __post_init__(self):
        self.told = False  # the first failure is printed, and no other
        # Keep the text: workers that start later get the same, even if the file was edited.
        self.source = read_task_file(self.spec) if self.spec else ""
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.question_numbers = itertools.count()
        self.threads = ThreadPoolExecutor(self.workers or min(8, max(1, cores)))
        self.thread = threading.local()  # each thread's worker, started when it is first needed

    def __call__(self, completions: list[str], references: list) -> list[Verdict]:
        """Score each completion against its reference."""
        verdicts = list(self.threads.map(self._score, completions, references))
        failures = [verdict.failure for verdict in verdicts if verdict.failure]
        if failures and self.spec and not self.told:
            self.told = True
            cost = ": 0 points" if self.function == "reward" else ""
            say(f"\n{self.spec}: {self.function} fails ({failures[0]}){cost}", file=sys.stderr)
        return verdicts

    def _score(self, completion: str, reference: object) -> Verdict:
        """Score one completion in this thread's worker."""
        worker = getattr(self.thread, "worker", None)
        if worker is None or worker.process.poll() is not None:
            worker = Worker(self)
            self.thread.worker = worker
        number = next(self.question_numbers)
        # Wait twice the worker's own bound, in case the function has turned the alarm off.
        line = worker.exchange([number, completion, reference], 2 * self.seconds)
        # These errors come from a line that is not [number, score, answer, failure].
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            answered, score, answer, failure = json.loads(line)
            if answered == number:
                return Verdict(score, answer, failure)
        # There was no line, or not a verdict on this answer. Later lines of this worker could then
        # belong to other answers, so it ends here, and the next answer gets a new worker.
        code = worker.end()
        if line:
            return Verdict(0.0, failure="something else wrote into the worker's channel")
        return Verdict(0.0, failure=f"out of time or memory? exit code {code}")


class Worker:
    """A process that scores answers, and a socket to it: one line there, one line back."""

    def __init__(self, of: Verifier):
        # -P leaves out the current folder, which may hold a json.py or another `common`. With -u,
        # what a reward prints arrives even if the worker is killed.
        words = [sys.executable, "-P", "-u", "-m", "common.tasks.reward"]
        words += [of.spec, str(of.seconds), str(int(of.memory)), of.function]
        self.channel, workers_end = socket.socketpair()
        # What a reward prints is for the person; math-verify's libraries print for nobody.
        printed = 2 if of.spec else subprocess.DEVNULL  # 2: this process's stderr
        self.process = subprocess.Popen(
            words,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=workers_end,
            stdout=printed,
            stderr=printed,
            start_new_session=True,  # Ctrl-C must reach only the trainer, which finishes its step
        )
        workers_end.close()  # the channel closes when the worker ends
        line = self.exchange([of.source, of.problems], START)
        if line != "ready\n":
            code = self.end()
            reason = line.strip() or f"exit code {code}: is memory left?"
            raise RunStopped(f"the verifier {of.spec or 'math-verify'} does not start ({reason})")

    def exchange(self, question: object, seconds: float) -> str:
        """Send a question and return the worker's next line, or "" if none comes in `seconds`.

        This process keeps the deadline itself. Waiting for the channel to close could last for
        ever, because a process that the worker has forked may hold it open.
        """
        received, deadline = b"", time.monotonic() + seconds
        with contextlib.suppress(OSError):  # the channel is closed, or the time is up
            self.channel.settimeout(seconds)
            self.channel.sendall(json.dumps(question).encode() + b"\n")
            while part := self.channel.recv(2**16):
                received += part
                if part.endswith(b"\n"):
                    return received.decode(errors="replace")
                self.channel.settimeout(max(0.0, deadline - time.monotonic()))
        return ""

    def end(self) -> int:
        """Kill the worker and what it has forked; return its exit code."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.channel.close()
        return self.process.wait()


def run_worker(spec: str, seconds: str, memory: str, name: str) -> None:
    """Run the worker: answer each line [number, completion, reference] with [number, score,
    final answer, failure], until the channel, which is its stdin, closes."""
    questions = os.fdopen(os.dup(0))  # descriptor 0 is this end of the socket pair
    verdicts = os.fdopen(os.dup(0), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a reward function must not read questions
    source, problems = json.loads(questions.readline())
    try:
        task = load_task_file(spec, source) if spec else None
        score = getattr(task, name) if spec else reward
        if not spec:
            score("x+1", "1+x")  # loads math-verify before the bounds hold
        elif problems and fingerprint(spec, source, task) != problems:
            raise ValueError("other problems than in the trainer: a set's order, or chance")
    except Exception as error:
        print(describe(error), file=verdicts, flush=True)
        return
    bound_memory(int(memory))
    print("ready", file=verdicts, flush=True)
    own_process = os.getpid()
    for line in questions:
        # When the alarm rings, the kernel ends this process, even if the trainer is gone.
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        number, completion, reference = json.loads(line)
        points, answer, failure = 0.0, "", ""
        try:
            answer = final_answer(completion)
            result = score(completion, reference)
            if name == "reply":
                if not isinstance(result, str | None):
                    raise ValueError(f"{result!r} is no text")
            else:
                result = float(result)
                if not abs(result) <= LARGEST:  # also true of NaN
                    raise ValueError(f"{result} is no reward from -2**24 to 2**24")
            points = result
        except BaseException as error:  # also MemoryError, RecursionError and SystemExit
            # math-verify raises on many texts. Then the answer is wrong, but nothing has failed.
            failure = describe(error) if spec else ""
        if os.getpid() != own_process:  # a fork that returned here would take the next question
            os._exit(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(BrokenPipeError):  # the trainer has been killed
            print(json.dumps([number, points, answer, failure]), file=verdicts, flush=True)
    os.killpg(0, signal.SIGKILL)  # the run is over; end what reward functions have left behind


def bound_memory(most: int) -> None:
    """Let this process take at most `most` more bytes than now, and write no core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS cannot bound memory
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most += pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def describe(error: BaseException) -> str:
    """Describe an error: the task file's line where it happened, its kind and its message."""
    trace = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if frame.filename != __file__]
    lines = [frame for frame in frames if frame.filename == frames[0].filename]
    place = f"{Path(lines[-1].filename).name}:{lines[-1].lineno}: " if lines else ""
    return " ".join((place + traceback.format_exception_only(error)[-1]).split())[:400]


if __name__ == "__main__":
    run_worker(*sys.argv[1:])
