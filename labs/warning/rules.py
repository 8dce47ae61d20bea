"""Falls, and the rules that announce them: fitted on the odd seeds, scored on the even ones.

python -m labs.warning.rules     prints the rules that are worth an alarm
"""

import json
import math
from pathlib import Path

import numpy as np

from labs.warning.alarm import BLOCK, Rule, block_means, compared, sounds

LOST = 0.8  # of the best accuracy: below it, and never back, is a fall
FALSE = 0.05  # largest share of healthy runs in which a rule may sound
# Of limits: two digits, as they are easy to read
LIMITS = [
    float(f"{m}e{e}") for e in range(-7, 4) for m in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
]
# What a rule that is worth an alarm does: announces so many of the falls, and false alarms in at
# most so many of the other runs, or in one
WORTH, SELDOM = 1 / 3, 0.1
# The outcome; what repeats another metric, depends on the machine, or is set beforehand
UNWATCHED = "step greedy sampled tokens tokens_per_s loss lr judge_killed skipped seconds lag"


def fall(lines: list[dict]) -> int:
    """The evaluation from which on held-out accuracy stays below LOST of the best one before it:
    its step, or 0 if there is none."""
    best, since = 0.0, 0
    for line in lines:
        if "sampled" not in line:
            continue
        if line["sampled"] >= LOST * best:
            since = 0
        elif since == 0:
            since = line["step"]
        best = max(best, line["sampled"])
    return since


def fell(run: dict) -> bool:
    """Whether a run falls, of which a lab has stored the column `sampled`."""
    measured = zip(run["sampled@"], run["sampled"])
    return fall([{"step": step, "sampled": sampled} for step, sampled in measured]) > 0


def keep(lines: list[dict]) -> dict:
    """What is stored of a run: the step of its fall, and each metric's means over blocks."""
    names = {name for line in lines for name in line if not name.startswith("seconds_")}
    watched = sorted(names - set(UNWATCHED.split()))
    return {"fall": fall(lines)} | {name: block_means(lines, name) for name in watched}


def lead(rule: Rule, run: dict) -> int:
    """How many steps before the run's fall the rule sounds; 0 if it does not."""
    alarm = sounds(rule, run.get(rule.metric, []))
    return max(0, int(run["fall"]) - alarm.step) if alarm else 0


def scored(rule: Rule, runs: list[dict]) -> Rule:
    """The rule with its counts on the runs that have its metric."""
    having = [run for run in runs if rule.metric in run]
    falls = [run for run in having if run["fall"]]
    healthy = [run for run in having if not run["fall"]]
    return rule._replace(
        announced=sum(lead(rule, run) > 0 for run in falls),
        falls=len(falls),
        alarms=sum(sounds(rule, run[rule.metric]) is not None for run in healthy),
        healthy=len(healthy),
    )


def extreme(run: dict, rule: Rule) -> float:
    """The number furthest in the rule's direction, before the run's fall; NaN if there is none."""
    numbers = compared(run[rule.metric], rule.itself)
    if run["fall"]:
        numbers = numbers[: math.ceil(run["fall"] / BLOCK) - 1]
    known = [number for number in numbers if math.isfinite(number)] or [math.nan]
    return max(known) if rule.above else min(known)


def fitted(metric: str, itself: bool, above: bool, runs: list[dict]) -> Rule:
    """The rule that announces most falls of these runs, of those with few false alarms; of equal
    ones the one whose limit is furthest off."""
    best = Rule(metric, itself, above, math.inf if above else -math.inf)
    having = [run for run in runs if metric in run]
    falls = np.array([extreme(run, best) for run in having if run["fall"]])
    healthy = np.array([extreme(run, best) for run in having if not run["fall"]])
    most = 1
    for limit in LIMITS if above else reversed(LIMITS):
        announced = np.sum(falls > limit if above else falls < limit)  # false for NaN
        alarms = np.sum(healthy > limit if above else healthy < limit)
        if alarms <= FALSE * len(healthy) and announced >= most:
            most, best = announced, best._replace(limit=limit)
    return scored(best, runs)


def best_rule(metric: str, runs: list[dict]) -> Rule | None:
    """Of a metric's change and itself, rising and falling, what announces most falls here."""
    best = None
    for itself in (False, True):
        for above in (True, False):
            rule = fitted(metric, itself, above, runs)
            if rule.announced > (best.announced if best else 0):
                best = rule
    return best


def half(results: dict, first: int) -> list[dict]:
    """The runs of seeds first, first + 2, ..."""
    return [run for runs in results.values() for run in runs[first - 1 :: 2]]


def rules(results: dict) -> list[Rule]:
    """The best rule of each metric, with its counts on the even seeds; first those that announce
    most falls."""
    odd, even = half(results, 1), half(results, 2)
    metrics = sorted({name for run in odd for name in run} - {"fall", "stopped"})
    found = [best_rule(metric, odd) for metric in metrics]
    return sorted([scored(rule, even) for rule in found if rule], key=lambda r: -r.announced)


def alarm_rules(results: dict) -> list[Rule]:
    """The rules that a run sounds: worth it by their counts on the even seeds, and on the odd ones
    each announces at least two falls that those before it miss."""
    chosen, missed = [], [run for run in half(results, 1) if run["fall"]]
    for rule in rules(results):
        left = [run for run in missed if not lead(rule, run)]
        enough = rule.announced >= WORTH * rule.falls and len(missed) - len(left) >= 2
        if enough and rule.alarms <= max(1, SELDOM * rule.healthy):
            chosen.append(rule)
            missed = left
    return chosen


if __name__ == "__main__":
    stored = json.loads(Path(__file__).with_name("table.json").read_text(encoding="utf-8"))
    chosen = [json.dumps(rule._asdict()) for rule in alarm_rules(stored["results"])]
    print("\n".join(chosen))
