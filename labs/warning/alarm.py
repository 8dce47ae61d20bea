"""The alarm: a metric has left its first values, as it did before falls of accuracy.

`python -m labs.warning` measures which metrics do so, and how often they do it in vain.
"""

import math
from typing import NamedTuple

import numpy as np

BLOCK, FIRST = 5, 2  # steps that a mean is taken over; blocks whose mean is the first one


class Rule(NamedTuple):
    """Sounds where a metric's mean over a block is above (or below) `limit`, `itself` or in
    multiples of its first mean. It did so before `announced` of `falls` falls, and in `alarms` of
    `healthy` runs that did not fall."""

    metric: str
    itself: bool
    above: bool
    limit: float
    announced: int = 0
    falls: int = 0
    alarms: int = 0
    healthy: int = 0


class Alarm(NamedTuple):
    """The first time that a rule sounds in a run: the last step of the block, and the number that
    is beyond the limit."""

    step: int
    number: float
    rule: Rule


def block_means(lines: list[dict], metric: str) -> list[float]:
    """A metric's means over steps 1 to BLOCK, and so on, as far as blocks are whole; NaN where no
    step of a block has a value."""
    values = [line.get(metric) for line in lines if line["step"] > 0]
    values = np.array([np.nan if value is None else value for value in values], float)  # [steps]
    blocks = values[: len(values) // BLOCK * BLOCK].reshape(-1, BLOCK)  # [blocks, BLOCK]
    known = np.isfinite(blocks)  # [blocks, BLOCK]
    total = np.where(known, blocks, 0.0).sum(axis=1)  # [blocks]
    count = known.sum(axis=1)  # [blocks]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).tolist()


def compared(means: list[float], itself: bool) -> list[float]:
    """What a rule compares with its limit: the block means, or multiples of the first mean. NaN
    where there is none yet, or the first mean is no positive number."""
    if itself:
        return means
    first = sum(means[:FIRST]) / FIRST
    later = [mean / first if first > 0 else math.nan for mean in means[FIRST:]]
    return [math.nan] * FIRST + later


def sounds(rule: Rule, means: list[float]) -> Alarm | None:
    """The rule's first alarm in a run with these block means, if it has one."""
    for block, number in enumerate(compared(means, rule.itself), 1):
        beyond = number > rule.limit if rule.above else number < rule.limit  # false for NaN
        if beyond:
            return Alarm(block * BLOCK, number, rule)
    return None
