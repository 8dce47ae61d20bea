"""Judging answers: exact match for the arithmetic task, math-verify for text mathematics,
reasoning-gym for its tasks.

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
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SECONDS, MEMORY = 5.0, 2 * 2**30  # bounds on one answer
START_SECONDS = 120.0  # bound on the start of a worker: slow disks are slow, but a hang must end
GYM_SIZE = 100_000  # problems in a reasoning-gym set; some sets make all of them at once
TAIL = 2000  # characters searched for an answer that is not boxed


def arithmetic_reward(completion: str, answer: str) -> float:
    """1.0 if what follows the last `#` is exactly the answer. No `#`, no reward; a substring is not
    enough."""
    _, mark, final = completion.rpartition("#")
    return float(mark == "#" and final == answer)


def final_answer(completion: str) -> str:
    """The last \\boxed{...} with its braces balanced; "" if it never closes; the end of the text if
    there is no box.

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


def gym_rows(name: str) -> object:
    """The problems of a reasoning-gym set, by index; the same ones in every process."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=GYM_SIZE, seed=0)


class MathJudge:
    """Scores text answers with math-verify in worker processes; `killed` counts the answers that
    broke their bounds.

    With `gym` it scores by that reasoning-gym set's own function, which may give part marks; the
    reference answers are then the problems' indices.
    """

    def __init__(
        self, workers: int = 0, seconds: float = SECONDS, memory: int = MEMORY, gym: str = ""
    ):
        self.limits, self.gym, self.killed = (seconds, memory), gym, 0
        self.idle: queue.Queue[subprocess.Popen | None] = queue.Queue()
        workers = workers or min(
            8, max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        )
        for _ in range(workers):
            self.idle.put(None)  # started when first needed
        self.threads = ThreadPoolExecutor(workers)

    def __call__(self, completions: list[str], answers: list[str]) -> list[float]:
        """1.0 where the completion's final answer equals the reference, else 0.0 (or part
        marks)."""
        return list(self.threads.map(self._judge, completions, answers))

    def _judge(self, completion: str, answer: str) -> float:
        worker, verdict = self.idle.get(), ""
        try:
            if worker is None:
                worker = self._start()
            text = completion if self.gym else final_answer(completion)
            worker.stdin.write(json.dumps([text, answer]) + "\n")
            worker.stdin.flush()
            verdict = worker.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            if worker is not None and not verdict:  # the kernel ended it
                self.killed += 1
                worker.kill()
                worker.wait()
                worker = None
            self.idle.put(worker)
        return float(verdict or 0)

    def _start(self) -> subprocess.Popen:
        worker = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "common.reward",
                *map(str, self.limits),
                self.gym,
                str(START_SECONDS),
            ],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # Ctrl-C is for the trainer, which finishes its step and still needs its judge
            start_new_session=True,
        )
        if worker.stdout.readline() != "ready\n":
            # Not above: it imports torch, which a worker does without
            from common.distributed import RunStopped

            worker.kill()
            reason = f"exit code {worker.wait()}: is its package installed, is memory left?"
            raise RunStopped(f"the judge {self.gym or 'math-verify'} does not start ({reason})")
        return worker

    def close(self) -> None:
        """End the workers."""
        self.threads.shutdown()
        while not self.idle.empty():
            worker = self.idle.get()
            if worker is not None:
                worker.stdin.close()
                worker.wait()
                worker.stdout.close()


def worker(seconds: float, memory: int, gym: str, start_seconds: float) -> None:
    """Judge [answer, reference] lines from stdin until it closes; print a score for each."""
    import resource
    import signal

    # Whatever a library prints must not pass for a verdict
    verdicts, sys.stdout = sys.stdout, sys.stderr
    # SIGALRM's default action: the kernel ends this process
    signal.setitimer(signal.ITIMER_REAL, start_seconds)
    if gym:
        rows = gym_rows(gym)
        from reasoning_gym.utils import extract_answer

        def score(answer: str, reference: str) -> float:
            return rows.score_answer(answer=extract_answer(answer), entry=rows[int(reference)])
    else:
        from math_verify import parse, verify

        def score(answer: str, reference: str) -> float:
            gold = parse(f"${reference}$", parsing_timeout=None)
            return verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None)

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


if __name__ == "__main__":
    worker(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
