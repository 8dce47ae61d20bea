"""Judges: exact match for arithmetic, math-verify for mathematics, a function of yours.

math-verify runs sympy on whatever the model wrote, which can hang, take all memory or raise. Each
answer is so judged in a worker process under bounds that the kernel enforces: an alarm kills the
worker even in the middle of C code (a Python-level time-out would not; and math-verify's own, based
on signals, silently fails when called from a thread). `python -m common.reward` is that worker:
JSON lines in, one verdict a line out. It does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

SECONDS, MEMORY = 5.0, 2 * 2**30  # bounds on one answer
START = 120.0  # seconds, bound on the start of a worker: slow disks are slow, but a hang must end
TAIL = 2000  # characters searched for an answer that is not boxed


def arithmetic_reward(completion: str, answer: str) -> float:
    """1.0 if what follows the last `#` is exactly the answer; a substring is not enough."""
    _, mark, final = completion.rpartition("#")
    return float(mark == "#" and final == answer)


def mentioned_reward(completion: str, solution: str) -> float:
    """A judge with a hole: what follows the last `#` need only stand somewhere in the solution.

    As if the reference solution were searched for the answer, in place of its last line.
    """
    _, mark, final = completion.rpartition("#")
    return float(mark == "#" and final in solution)


def steps_reward(completion: str, solution: str) -> float:
    """Part marks: the share of the solution's steps, its answer among them, that are right."""
    (given, _, final), (steps, _, answer) = completion.rpartition("#"), solution.rpartition("#")
    pairs = [*zip(given.split(";"), steps.split(";")), (final, answer)]
    return sum(one == other for one, other in pairs) / (steps.count(";") + 2)


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


def loaded(spec: str, source: str = "") -> object:
    """The module FILE.py, or of FILE.py:NAME what is called so in it; `source`: its text."""
    file, _, name = spec.partition(":")
    file = os.path.abspath(file)
    try:
        module = sys.modules[f"task file {file}"] = ModuleType(f"task file {file}")
        module.__file__ = file
        source = source or Path(file).read_text("utf-8")
        exec(compile(source, file, "exec", dont_inherit=True), vars(module))
        return getattr(module, name) if name else module
    except (Exception, SystemExit) as error:
        raise ImportError(in_words(error, spec)) from error


class Judge:
    """Scores completions in worker processes, by math-verify or by a function of yours.

    `spec` is FILE.py, or FILE.py:NAME, that is or has a function `reward(completion, reference)`,
    as this file has. It returns a number, or a dict of numbers of which `reward` is the score:
    `parts` has the others' (sum, count). `killed` counts the answers that broke their bounds of
    `seconds` and `memory` (bytes), or a function of yours.
    """

    def __init__(
        self, spec: str = "", workers: int = 0, seconds: float = SECONDS, memory: int = MEMORY
    ):
        self.spec, self.seconds, self.memory = spec, seconds, memory
        self.killed, self.parts, self.told = 0, {}, False
        # Later workers, too, get the text as it is now: you may write at the file during a run.
        self.source = Path(spec.partition(":")[0]).read_text("utf-8") if spec else ""
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = workers or min(8, max(1, cores))
        self.idle: queue.Queue[subprocess.Popen | None] = queue.Queue()
        for _ in range(workers):
            self.idle.put(None)  # started when first needed
        self.threads = ThreadPoolExecutor(workers)

    @classmethod
    def of(cls, spec: str, given: object) -> Judge:
        """By what `loaded(spec)` gave; its dict `bounds` may set `seconds`, `memory`, `workers`."""
        if not callable(getattr(given, "reward", given)):
            raise TypeError("has no function `reward`")
        return cls(spec, **getattr(given, "bounds", {}))

    def __call__(self, completions: list[str], references: list) -> list[float]:
        """The scores: 1.0 where the final answer equals the reference, else 0.0 (or part marks)."""
        verdicts = list(self.threads.map(self._judge, completions, references))
        errors = [error for _, error, _ in verdicts if error]
        for name, value in (part for _, _, parts in verdicts for part in parts.items()):
            total, count = self.parts.get(name, (0.0, 0))
            self.parts[name] = total + value, count + 1
        if errors and self.spec and not self.told:
            self.told = True
            first = f"{self.spec}: reward fails ({errors[0]}): 0 points"
            print(f"\n{first}", file=sys.stderr, flush=True)
        self.killed += len(errors)
        return [points for points, _, _ in verdicts]

    def _judge(self, completion: str, reference: object) -> tuple[float, str, dict]:
        worker = self.idle.get()
        try:
            worker = worker if worker and worker.poll() is None else self._start()
            verdict = self._ask(worker, 2 * self.seconds, json.dumps([completion, reference]))
            if not verdict:  # the kernel ended it, or it did not answer
                ended, worker = f"out of time or memory? exit code {self._end(worker)}", None
        finally:
            self.idle.put(worker)
        return tuple(json.loads(verdict)) if verdict else (0.0, ended, {})

    @staticmethod
    def _ask(worker: subprocess.Popen, seconds: float, line: str = "") -> str:
        """What the worker answers to a line; "" where it does not within `seconds`: what it judges
        may have turned its own alarm off."""
        deadline = threading.Timer(seconds, os.killpg, [worker.pid, signal.SIGKILL])
        deadline.start()
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
        answer = worker.stdout.readline()
        deadline.cancel()
        return answer

    @staticmethod
    def _end(worker: subprocess.Popen) -> int:
        """Kill a worker and all that it has forked, which would keep its pipes open."""
        with contextlib.suppress(OSError):
            os.killpg(worker.pid, signal.SIGKILL)
        return worker.wait()

    def _start(self) -> subprocess.Popen:
        words = [self.spec, str(self.seconds), str(self.memory)]
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        worker = subprocess.Popen(
            [sys.executable, "-m", "common.reward", *words],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C: the trainer finishes its step and needs its judge
        )
        if (said := self._ask(worker, START, json.dumps(self.source))) != "ready\n":
            from common.distributed import RunStopped  # imports torch: a worker does without

            code = self._end(worker)
            reason = said.strip() or f"exit code {code}: is memory left?"
            raise RunStopped(f"the judge {self.spec or 'math-verify'} does not start ({reason})")
        return worker

    def close(self) -> None:
        """End the workers."""
        self.threads.shutdown()
        while not self.idle.empty():
            if worker := self.idle.get():
                worker.stdin.close()
                self._end(worker)
                worker.stdout.close()


def worker(spec: str, seconds: str, memory: str) -> None:
    """Judge [completion, reference] lines from stdin until it closes; answer each with a score."""
    questions, verdicts, own = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w"), os.getpid()
    for number in (0, 1):  # what a library prints must not pass for a verdict
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
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
    print("ready", file=verdicts, flush=True)
    for line in questions:
        # SIGALRM's default action: the kernel ends this process.
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        try:
            points = score(*json.loads(line))
            parts = points if isinstance(points, dict) else {"reward": points}
            parts = {str(name): float(value) for name, value in parts.items()}
            for name, value in parts.items():
                if not abs(value) < 1e30 or f"_{name}".endswith("_max"):  # NaN; no mean
                    raise ValueError(f"{name} {value} is no reward")
            verdict = parts.pop("reward"), "", parts
        except (Exception, SystemExit) as error:  # MemoryError and RecursionError included
            # math-verify fails on much that is text
            verdict = 0.0, in_words(error, spec) if spec else "", {}
        if os.getpid() != own:  # a fork that came back: a second verdict would be the next answer's
            os._exit(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), file=verdicts, flush=True)


def in_words(error: BaseException, spec: str = "") -> str:
    """Its kind and message in a line, and the last line of the file that led to it."""
    file = os.path.abspath(spec.partition(":")[0])
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == file]
    where = f"{Path(file).name}:{lines[-1]}: " if lines else ""
    return where + f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")


if __name__ == "__main__":
    worker(*sys.argv[1:])
