"""Judging answers: exact match for the arithmetic task, the math-verify library for text mathematics.

math-verify runs sympy on whatever the model wrote, which can hang, take all memory or raise. Each answer is therefore
judged in a worker process under bounds that the kernel enforces: an alarm kills the worker even in the middle of C code
(a Python-level time-out would not; and math-verify's own, based on signals, silently fails when called from a thread).
`python -m common.reward` is that worker: JSON lines in, one verdict a line out. It does not import torch.
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
TAIL = 2000  # characters searched for an answer that is not boxed


def arithmetic_reward(completion: str, answer: str) -> float:
    """1.0 if what follows the last `#` is exactly the answer. No `#`, no reward; a substring is not enough."""
    _, mark, final = completion.rpartition("#")
    return float(mark == "#" and final == answer)


def final_answer(completion: str) -> str:
    """The last \\boxed{...} with its braces balanced; "" if it never closes; the end of the text if there is no box.

    Only the last box counts: a response that boxes every candidate must not be paid for one of them.
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
    """Scores text answers with math-verify in worker processes; `killed` counts the answers that broke their bounds."""

    def __init__(self, workers: int = 0, seconds: float = SECONDS, memory: int = MEMORY):
        self.limits, self.killed = (seconds, memory), 0
        self.idle: queue.Queue[subprocess.Popen | None] = queue.Queue()
        workers = workers or min(8, max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        for _ in range(workers):
            self.idle.put(None)  # started when first needed
        self.threads = ThreadPoolExecutor(workers)

    def __call__(self, completions: list[str], answers: list[str]) -> list[float]:
        """1.0 where the completion's final answer equals the reference, else 0.0."""
        return list(self.threads.map(self._judge, completions, answers))

    def _judge(self, completion: str, answer: str) -> float:
        worker, verdict = self.idle.get(), ""
        try:
            if worker is None:
                worker = self._start()
            worker.stdin.write(json.dumps([final_answer(completion), answer]) + "\n")
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
        return float(verdict.strip() == "1")

    def _start(self) -> subprocess.Popen:
        seconds, memory = self.limits
        worker = subprocess.Popen(
            [sys.executable, "-m", "common.reward", str(seconds), str(memory)],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the trainer, which finishes its step and still needs its judge
        )
        if worker.stdout.readline() != "ready\n":
            raise RuntimeError("the math judge does not start: is math-verify installed? (pip install math-verify)")
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


def worker(seconds: float, memory: int) -> None:
    """Judge [answer, reference] lines from stdin until it closes; print 1 or 0 for each."""
    import resource
    import signal

    verdicts, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints must not pass for a verdict
    from math_verify import parse, verify

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", file=verdicts, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM's default action: the kernel ends this process
        try:
            answer, reference = json.loads(line)
            gold = parse(f"${reference}$", parsing_timeout=None)
            right = verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None)
        except Exception:  # MemoryError and RecursionError included
            right = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(int(right), file=verdicts, flush=True)


if __name__ == "__main__":
    worker(float(sys.argv[1]), int(sys.argv[2]))
