"""Judges: exact match for arithmetic, math-verify for mathematics, a function of yours.

math-verify runs sympy on whatever the model wrote, which can hang, take all memory or raise. Each
answer is so judged in a worker process under bounds that the kernel enforces: an alarm kills the
worker even in the middle of C code (a Python-level time-out would not; and math-verify's own, based
on signals, silently fails when called from a thread). `python -m common.reward` is that worker:
JSON lines in, one verdict a line out. It does not import torch.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SECONDS, MEMORY = 5.0, 2 * 2**30  # bounds on one answer
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


def math_score() -> Callable[[str, str], bool]:
    """math-verify's comparison of a completion's final answer with a reference."""
    from math_verify import parse, verify

    def score(completion: str, reference: str) -> bool:
        gold, answer = f"${reference}$", final_answer(completion)
        gold, answer = (parse(text, parsing_timeout=None) for text in (gold, answer))
        return verify(gold, answer, timeout_seconds=None)

    return score


class Judge:
    """Scores completions in worker processes, by math-verify or by a function of yours.

    `scorer` is FILE:NAME: in that Python file NAME() returns the function (completion, reference)
    -> score. `killed` counts the answers that broke their bounds of `seconds` and `memory` (bytes).
    """

    def __init__(
        self,
        scorer: str = f"{__file__}:math_score",
        workers: int = 0,
        seconds: float = SECONDS,
        memory: int = MEMORY,
    ):
        self.words, self.killed = [scorer, str(seconds), str(memory)], 0
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = workers or min(8, max(1, cores))
        self.idle: queue.Queue[subprocess.Popen | None] = queue.Queue()
        for _ in range(workers):
            self.idle.put(None)  # started when first needed
        self.threads = ThreadPoolExecutor(workers)

    def __call__(self, completions: list[str], answers: list[str]) -> list[float]:
        """The scores: 1.0 where the final answer equals the reference, else 0.0 (or part marks)."""
        return list(self.threads.map(self._judge, completions, answers))

    def _judge(self, completion: str, answer: str) -> float:
        worker, verdict = self.idle.get(), ""
        try:
            worker = worker or self._start()
            worker.stdin.write(json.dumps([completion, answer]) + "\n")
            worker.stdin.flush()
            verdict = worker.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            if worker and not verdict:  # the kernel ended it
                self.killed += 1
                worker.kill()
                worker.wait()
                worker = None
            self.idle.put(worker)
        return float(verdict or 0)

    def _start(self) -> subprocess.Popen:
        worker = subprocess.Popen(
            [sys.executable, "-m", "common.reward", *self.words],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C: the trainer finishes its step and needs its judge
        )
        if worker.stdout.readline() != "ready\n":
            from common.distributed import RunStopped  # imports torch: a worker does without

            reason = f"exit code {worker.wait()}: is its package installed, is memory left?"
            raise RunStopped(f"the judge {self.words[0]} does not start ({reason})")
        return worker

    def close(self) -> None:
        """End the workers."""
        self.threads.shutdown()
        while not self.idle.empty():
            if worker := self.idle.get():
                worker.stdin.close()
                worker.wait()
                worker.stdout.close()


def worker(scorer: str, seconds: str, memory: str) -> None:
    """Judge [completion, reference] lines from stdin until it closes; print a score for each."""
    verdicts, sys.stdout = sys.stdout, open(os.devnull, "w")  # a library's print is no verdict
    file, _, name = scorer.rpartition(":")
    score = runpy.run_path(file)[name]()
    sys.stderr = sys.stdout
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", file=verdicts, flush=True)
    for line in sys.stdin:
        # SIGALRM's default action: the kernel ends this process.
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        try:
            points = float(score(*json.loads(line)))
        except Exception:  # MemoryError and RecursionError included
            points = 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(points, file=verdicts, flush=True)


if __name__ == "__main__":
    worker(*sys.argv[1:])
