"""Judges: exact match for arithmetic, math-verify for mathematics, reasoning-gym for its tasks.

The two libraries run sympy on whatever the model wrote, which can hang, take all memory or raise.
Each answer is so judged in a worker process under bounds that the kernel enforces: an alarm kills
the worker even in the middle of C code (a Python-level time-out would not; and math-verify's own,
based on signals, silently fails when called from a thread). `python -m common.reward` is that
worker: JSON lines in, one verdict a line out. It does not import torch.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SECONDS, MEMORY = 5.0, 2 * 2**30  # bounds on one answer
START_SECONDS = 120.0  # bound on the start of a worker: slow disks are slow, but a hang must end
GYM_SIZE = 100_000  # problems in a reasoning-gym set; some sets make all of them at once
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


class MathJudge:
    """Scores text answers with math-verify in worker processes.

    With `gym` it scores by that reasoning-gym set's own function, which may give part marks; the
    reference answers are then the problems' indices. `killed` counts the answers that broke their
    bounds of `seconds` and `memory` (bytes).
    """

    def __init__(
        self, workers: int = 0, seconds: float = SECONDS, memory: int = MEMORY, gym: str = ""
    ):
        self.limits, self.gym, self.killed = (seconds, memory), gym, 0
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = workers or min(8, max(1, cores))
        self.idle: queue.Queue[subprocess.Popen | None] = queue.Queue()
        for _ in range(workers):
            self.idle.put(None)  # started when first needed
        self.threads = ThreadPoolExecutor(workers)

    def __call__(self, completions: list[str], answers: list[str]) -> list[float]:
        """1.0 where the final answer equals the reference, else 0.0 (or part marks)."""
        return list(self.threads.map(self._judge, completions, answers))

    def _judge(self, completion: str, answer: str) -> float:
        worker, verdict = self.idle.get(), ""
        try:
            worker = worker or self._start()
            text = completion if self.gym else final_answer(completion)
            worker.stdin.write(json.dumps([text, answer]) + "\n")
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
        words = [*map(str, self.limits), self.gym, str(START_SECONDS)]
        worker = subprocess.Popen(
            [sys.executable, "-m", "common.reward", *words],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C: the trainer finishes its step and needs its judge
        )
        if worker.stdout.readline() != "ready\n":
            from common.distributed import RunStopped  # imports torch: a worker does without

            worker.kill()
            reason = f"exit code {worker.wait()}: is its package installed, is memory left?"
            raise RunStopped(f"the judge {self.gym or 'math-verify'} does not start ({reason})")
        return worker

    def close(self) -> None:
        """End the workers."""
        self.threads.shutdown()
        while not self.idle.empty():
            if worker := self.idle.get():
                worker.stdin.close()
                worker.wait()
                worker.stdout.close()


def worker(seconds: float, memory: int, gym: str, start_seconds: float) -> None:
    """Judge [answer, reference] lines from stdin until it closes; print a score for each."""
    verdicts, sys.stdout = sys.stdout, sys.stderr  # what a library prints must not pass for one
    # SIGALRM's default action: the kernel ends this process.
    signal.setitimer(signal.ITIMER_REAL, start_seconds)
    score = gym_score(gym) if gym else math_score()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_REAL, 0)
    print("ready", file=verdicts, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            points = float(score(*json.loads(line)))
        except Exception:  # MemoryError and RecursionError included
            points = 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(points, file=verdicts, flush=True)


def math_score() -> Callable[[str, str], bool]:
    """math-verify's comparison of an answer with a reference."""
    from math_verify import parse, verify

    def score(answer: str, reference: str) -> bool:
        gold = parse(f"${reference}$", parsing_timeout=None)
        return verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None)

    return score


def gym_score(name: str) -> Callable[[str, str], float]:
    """A reasoning-gym set's own score of an answer to the problem with that index."""
    from reasoning_gym.utils import extract_answer

    rows = gym_rows(name)
    return lambda answer, index: rows.score_answer(extract_answer(answer), rows[int(index)])


def gym_rows(name: str) -> object:
    """The problems of a reasoning-gym set, by index; the same ones in every process."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=GYM_SIZE, seed=0)


if __name__ == "__main__":
    worker(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
