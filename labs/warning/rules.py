"""Falls, and the rules that announce them: fitted on the odd seeds, scored on the even ones.

python -m labs.warning.rules     writes common/alarms.json: the rules that are worth an alarm
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

from checks.files import ROOT
from common.alarm import Rule, block_means, compared, sounds
from common.run import atomic_write

LOST = 0.8  # of the best accuracy: below it, and never back, is a fall
FALSE = 0.05  # largest share of healthy runs in which a rule may sound
WORTH, FEW = 0.5, 3  # of the falls, and in number: announced by a rule that is worth an alarm
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


def to_two_digits(number: float, rounded: Callable) -> float:
    """By math.ceil or math.floor."""
    if number == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(number))) - 1)
    return float(f"{rounded(number / unit) * unit:.3g}")


def fitted(metric: str, itself: bool, above: bool, runs: list[dict]) -> Rule | None:
    """The loosest rule with so few false alarms in these runs: it announces most falls."""
    healthy = [run for run in runs if metric in run and not run["fall"]]
    extremes = []
    for run in healthy:
        known = [number for number in compared(run[metric], itself) if math.isfinite(number)]
        extremes += [max(known) if above else min(known)] if known else []
    if not extremes:
        return None
    allowed = int(FALSE * len(healthy))
    limit = sorted(extremes, reverse=above)[min(allowed, len(extremes) - 1)]
    limit = to_two_digits(limit, math.ceil if above else math.floor)
    return scored(Rule(metric, itself, above, limit), runs)


def best_rule(metric: str, runs: list[dict]) -> Rule | None:
    """Of a metric's change and itself, rising and falling, what announces most falls here."""
    best = None
    for itself in (False, True):
        for above in (True, False):
            rule = fitted(metric, itself, above, runs)
            if rule and rule.announced > (best.announced if best else 0):
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


def worth(rule: Rule) -> bool:
    """Whether a run should sound it."""
    announces = rule.announced >= max(FEW, WORTH * rule.falls)
    return announces and rule.alarms <= FALSE * rule.healthy


if __name__ == "__main__":
    stored = json.loads(Path(__file__).with_name("table.json").read_text(encoding="utf-8"))
    chosen = [rule._asdict() for rule in rules(stored["results"]) if worth(rule)]
    with atomic_write(ROOT / "common/alarms.json") as path:
        rows = ",\n".join(json.dumps(row) for row in chosen)
        path.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
