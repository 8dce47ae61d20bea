"""Where the time of a step goes: seconds by phase, counted by the functions that take them."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import torch

SECONDS: dict[str, float] = defaultdict(float)  # by phase, since the last line of metrics.jsonl
RUNNING: list[str] = []  # the phases that run now, one inside the other


@contextlib.contextmanager
def timed(phase: str) -> Iterator[None]:
    """Above a function: its seconds count towards `phase`. If another timed function calls it, they
    count towards the phase of that one alone. An error keeps the outermost phase as `error.phase`.
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
        SECONDS[phase] += time.perf_counter() - start


def wait_for_gpu() -> None:
    """Kernels run after the call returns. Without this, another phase gets their time."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
