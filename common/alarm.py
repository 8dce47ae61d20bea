"""The alarm: a metric has left its first values, as it did before falls of accuracy.

`python -m labs.warning` measures which metrics do so, and writes alarms.json beside this module:
for each a threshold, and how often it was right and wrong on runs that it was not fitted on.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

BLOCK, FIRST = 5, 10  # steps that a mean is taken over; first steps, which it is compared with


class Rule(NamedTuple):
    """Sounds where a metric's mean over a block is more than `times` its mean over the first steps,
    or, where `times` is below 1, less. It did before `announced` of `falls` falls, and in
    `alarms` of `healthy` healthy runs."""

    metric: str
    times: float
    announced: int = 0
    falls: int = 0
    alarms: int = 0
    healthy: int = 0


class Alarm(NamedTuple):
    """The first time that a rule sounds in a run: the last step of the block, and the factor."""

    step: int
    times: float
    rule: Rule

    def __str__(self) -> str:
        rule = self.rule
        before = f"{rule.announced} of {rule.falls} falls began so"
        healthy = f"{rule.alarms} of {rule.healthy} healthy runs did"
        what = f"{rule.metric} is {self.times:.2g} times its first mean"
        return f"step {self.step}: {what}; {before}, {healthy} (docs/metrics.md)"


def stored_rules() -> list[Rule]:
    """The rules of alarms.json."""
    rows = json.loads(Path(__file__).with_name("alarms.json").read_text(encoding="utf-8"))
    return [Rule(**row) for row in rows]


def block_means(lines: list[dict], metric: str) -> list[float]:
    """A metric's means over steps 1 to BLOCK, and so on, as far as blocks are whole; NaN where no
    step has a value."""
    values = [line.get(metric) for line in lines if line["step"] > 0]
    values = np.array([np.nan if value is None else value for value in values], float)  # [steps]
    blocks = values[: len(values) // BLOCK * BLOCK].reshape(-1, BLOCK)  # [blocks, BLOCK]
    known = np.isfinite(blocks)  # [blocks, BLOCK]
    total = np.where(known, blocks, 0.0).sum(axis=1)  # [blocks]
    count = known.sum(axis=1)  # [blocks]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).tolist()


def sounds(rule: Rule, means: list[float]) -> Alarm | None:
    """The rule's first alarm in a run with these block means, if it has one."""
    first = float(np.mean(means[: FIRST // BLOCK])) if len(means) >= FIRST // BLOCK else 0.0
    if not first > 0:  # nothing is a multiple of 0, or of no number
        return None
    for block in range(FIRST // BLOCK, len(means)):
        times = means[block] / first
        beyond = times > rule.times if rule.times > 1 else times < rule.times
        if beyond:
            return Alarm((block + 1) * BLOCK, times, rule)
    return None


def alarms(lines: list[dict], rules: list[Rule]) -> list[Alarm]:
    """The alarms of a run, given its lines of metrics.jsonl: at most one of each rule."""
    found = [sounds(rule, block_means(lines, rule.metric)) for rule in rules]
    return [alarm for alarm in found if alarm]
