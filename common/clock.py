"""Where the time of a step goes: `timed` functions add their seconds to a phase."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import torch

SPENT: dict[str, float] = defaultdict(float)  # by phase, since the last line of metrics.jsonl
RUNNING: list[str] = []  # the phases that run now, from the outermost to the innermost


@contextlib.contextmanager
def timed(phase: str) -> Iterator[None]:
    """Count the seconds of the decorated function towards `phase`. If another timed function calls
    it, only the caller's phase counts them. An exception gets the outermost phase as `.phase`.
    """
    wait_for_gpu()
    start = time.perf_counter()
    RUNNING.append(phase)
    try:
        yield
        wait_for_gpu()
    except Exception as error:
        error.phase = RUNNING[0]
        raise
    finally:
        RUNNING.pop()
    if not RUNNING:
        SPENT[phase] += time.perf_counter() - start


def wait_for_gpu() -> None:
    """Wait for kernels, which run on after their call returns; else the next phase is charged."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
