"""Verifiers: math-verify for mathematics, or the `reward` of a task file, in bounded processes.

math-verify runs sympy on whatever the model wrote, which can hang, take all memory or raise. So
each answer is scored in a worker process under bounds that the kernel enforces: an alarm ends the
worker even in the middle of C code (a Python-level time-out would not, and math-verify's own, based
on signals, silently fails when called from a thread). `python -m common.tasks.reward` is that
worker: it reads numbered questions and writes numbered verdicts, each a line of JSON. It imports no
torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
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
from pathlib import Path
from types import ModuleType

from common.cli import BadInput, RunStopped, blame, say
from common.tasks.answers import final_answer, marked, written

SECONDS, MEMORY = 5.0, 2 * 2**30  # bounds on one answer; `bounds` of a task file may set others
TASK_FILE = re.compile(r"(.+\.py)(?::([^/]*))?")  # FILE.py or FILE.py:NAME
START = 120.0  # seconds, bound on the start of a worker: disks may be slow, but a hang must end


def reward(completion: str, reference: str) -> float:
    """1.0 where the completion's final answer equals the reference, else 0."""
    from common.tasks.equality import equal  # slow to import; workers of a task file do not need it

    answer = final_answer(completion)
    gold = marked(reference)  # it may be marked like an answer
    return float(bool(answer) and equal(written(reference if gold is None else gold), answer))


def read_task_file(spec: str) -> str:
    """The text of the task file FILE.py or FILE.py:NAME."""
    path = Path(TASK_FILE.fullmatch(spec)[1])
    if not path.is_file():
        raise BadInput(f"--task {spec}: no such file")
    with blame(f"--task {spec}: cannot be read"):
        return path.read_text("utf-8-sig")


def load_task_file(spec: str, source: str = "") -> object:
    """FILE.py as a module, or for FILE.py:NAME the object of that name in it.

    `source` is the file's text, if it was read before.
    """
    file, name = TASK_FILE.fullmatch(spec).groups()
    file = os.path.abspath(file)
    sys.path.append(os.path.dirname(file))  # last: a file beside it cannot shadow a library
    module = ModuleType(f"task file {file}".replace(".", "_"))  # a dot would ask for a package
    sys.modules[module.__name__] = module  # dataclasses and pickle look for it there
    module.__file__ = file
    exec(compile(source or read_task_file(spec), file, "exec", dont_inherit=True), vars(module))
    if name and not hasattr(module, name):
        raise BadInput(f"--task {spec}: {name} is not in the file")
    return getattr(module, name) if name else module


def digest(rows: list) -> str:
    """SHA-256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()


def fingerprint(spec: str, source: str, task: object, last: int = 0) -> str:
    """Of a task file's text and some of its problems. These differ between processes if they depend
    on chance, or on the order of a set. Also tries the `last` problem of a run."""
    try:
        task.train(last)
        return digest([source, task.held_out[:8], [task.train(number) for number in range(8)]])
    except Exception as error:
        needs = f"needs train(i) for every i, and a list held_out ({describe(error)})"
        raise BadInput(f"--task {spec}: {needs}") from error


@dataclass(eq=False)
class Verifier:
    """Scores completions in worker processes: by math-verify, or by the `reward` of a task file.

    `spec` is the task file, FILE.py or FILE.py:NAME, or "" for math-verify. An answer on which the
    function fails, or that breaks the bounds of `seconds` and `memory` (bytes), earns 0. `killed`
    counts these (but not math-verify's own errors, which wrong answers cause), `failure` describes
    the first, and `works` is True once an answer was scored.
    """

    spec: str = ""
    workers: int = 0  # 0: one for each core, at most 8
    seconds: float = SECONDS
    memory: int = MEMORY
    function: str = "reward"  # or "reply", of a task file with a tool: see `ask`
    problems: str = ""  # the `fingerprint` of the file, to which the workers must come, too

    def __post_init__(self):
        self.killed = 0
        self.failure = ""
        self.works = False
        self.answers = {}  # completions of the last call -> their final answers
        # Workers that start later get the same text, even if the file is edited during the run.
        self.source = read_task_file(self.spec) if self.spec else ""
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.question_numbers = itertools.count()
        self.threads = ThreadPoolExecutor(self.workers or min(8, max(1, cores)))
        self.thread = threading.local()  # of each thread: its worker, started when first needed

    def __call__(self, completions: list[str], references: list) -> list[float]:
        """A score for each completion, given its reference."""
        return [score for score, _ in self.ask(completions, references)]

    def final_answers(self, completions: list[str]) -> list[str]:
        """The final answers of completions of the last call, which came with their scores."""
        return [self.answers[completion] for completion in completions]

    def ask(self, completions: list[str], references: list) -> list[tuple[float | str | None, str]]:
        """The scores, or what `reply` returned, each with "" or a description of what failed."""
        verdicts = list(self.threads.map(self._score, completions, references))
        failures = [failure for _, failure, _ in verdicts if failure]
        if failures and self.spec and not self.failure:
            self.failure = failures[0]
            cost = ": 0 points" if self.function == "reward" else ""
            say(f"\n{self.spec}: {self.function} fails ({self.failure}){cost}", file=sys.stderr)
        self.killed += len(failures)
        self.works = self.works or len(failures) < len(verdicts)
        self.answers = {text: answer for text, (_, _, answer) in zip(completions, verdicts)}
        return [(score, failure) for score, failure, _ in verdicts]

    def take_killed(self) -> int:
        """How many answers failed since the last call."""
        killed = self.killed
        self.killed = 0
        return killed

    def _score(self, completion: str, reference: object) -> tuple[float | str | None, str, str]:
        """The score of one completion, "" or a description of what failed, its final answer."""
        worker = getattr(self.thread, "worker", None)
        if worker is None or worker.process.poll() is not None:
            worker = Worker(self)
            self.thread.worker = worker
        number = next(self.question_numbers)
        # Twice the worker's own bound: this deadline is for a function that turned the alarm off.
        line = worker.ask([number, completion, reference], 2 * self.seconds)
        # The errors of a line that is not [number, score, failure, answer]
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            answered, score, failure, answer = json.loads(line)
            if answered == number:
                return score, failure, answer
        # No line, or one that is no verdict on this answer. Later lines of this worker could also
        # be about another answer, so it ends here; the next answer gets a new one.
        code = worker.end()
        if line:
            return 0.0, "something else wrote into the worker's channel", ""
        return 0.0, f"out of time or memory? exit code {code}", ""


class Worker:
    """A process that scores answers, and a socket to it: one line there, one line back."""

    def __init__(self, of: Verifier):
        # -P: without the current folder, which may hold a json.py or another `common`.
        words = [sys.executable, "-P", "-m", "common.tasks.reward"]
        words += [of.spec, str(of.seconds), str(int(of.memory)), of.function]
        self.channel, workers_end = socket.socketpair()
        self.process = subprocess.Popen(
            words,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=workers_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the trainer's: it finishes its step first
        )
        workers_end.close()  # the channel closes when the worker ends
        line = self.ask([of.source, of.problems], START)
        if line != "ready\n":
            code = self.end()
            reason = line.strip() or f"exit code {code}: is memory left?"
            raise RunStopped(f"the verifier {of.spec or 'math-verify'} does not start ({reason})")

    def ask(self, question: object, seconds: float) -> str:
        """The worker's next line, or "" if none comes within `seconds`.

        This process keeps the deadline itself. Waiting for the channel to close could last for
        ever: a process that the worker has forked may hold it open.
        """
        received, deadline = b"", time.monotonic() + seconds
        with contextlib.suppress(OSError):  # closed, or out of time
            self.channel.settimeout(seconds)
            self.channel.sendall(json.dumps(question).encode() + b"\n")
            while part := self.channel.recv(2**16):
                received += part
                if part.endswith(b"\n"):
                    return received.decode(errors="replace")
                self.channel.settimeout(max(0.0, deadline - time.monotonic()))
        return ""

    def end(self) -> int:
        """Kill the worker and what it has forked; returns its exit code."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.channel.close()
        return self.process.wait()


def work(spec: str, seconds: str, memory: str, name: str) -> None:
    """The worker: answers each line [number, completion, reference] with [number, score, failure,
    final answer], until the channel, which is its stdin, closes."""
    questions = os.fdopen(os.dup(0))  # descriptor 0 is this end of the socket pair
    verdicts = os.fdopen(os.dup(0), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a reward function must not read the questions
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
        # When the alarm rings the kernel ends this process, even if the trainer is gone.
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        number, completion, reference = json.loads(line)
        points, failure, answer = 0.0, "", ""
        try:
            answer = final_answer(completion)
            result = score(completion, reference)
            if name == "reply":
                if not isinstance(result, str | None):
                    raise ValueError(f"{result!r} is no text")
            else:
                result = float(result)
                if math.isnan(result) or abs(result) > 1e30:
                    raise ValueError(f"{result} is no reward")
            points = result
        except BaseException as error:  # MemoryError, RecursionError and SystemExit included
            # math-verify raises on many texts: then the answer is wrong, and nothing has failed.
            failure = describe(error) if spec else ""
        if os.getpid() != own_process:  # a fork that came back would take the next question
            os._exit(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(BrokenPipeError):  # the trainer was killed meanwhile
            print(json.dumps([number, points, failure, answer]), file=verdicts, flush=True)
    os.killpg(0, signal.SIGKILL)  # the run is over: ends what rewards have left behind


def bound_memory(most: int) -> None:
    """Bound this process to `most` bytes beyond what it has now; no core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such bound
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most += pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def describe(error: BaseException) -> str:
    """An error's kind and message, after the line of the task file where it happened."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__]
    lines = [one for one in frames if one.filename == frames[0].filename]
    place = f"{Path(lines[-1].filename).name}:{lines[-1].lineno}: " if lines else ""
    return " ".join((place + traceback.format_exception_only(error)[-1]).split())[:400]


if __name__ == "__main__":
    work(*sys.argv[1:])
