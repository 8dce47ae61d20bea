"""What warns first before a collapse, how many steps ahead, and how often does it cry wolf?

The nine files, healthy and under what makes them fall. A rule watches one metric: its mean over
five steps, divided by its mean over the run's first ten, is beyond a threshold. Thresholds are
fitted on the odd seeds and scored on the even ones. Writes common/alarms.json, too.

    python -m labs.warning
"""

import sys

import numpy as np
from checks.files import ROOT
from common.alarm import Rule, block_means, sounds

from labs import lab

TITLE = "What warns before a fall"
FLAGS = "--steps 100 --eval_every 5 --eval_problems 128 --eval_samples 2 --sample_every 0"
FLAGS += " --sampler_tolerance 1e6"  # else a quantised or stale sampler would end the run
NINE = "grpo gspo sapo stapo maspo minirl vcpo goldilocks deep_grpo".split()
FAST = "16 updates, lr x3"
FILES = {
    "none": NINE,
    "lr x3": NINE,
    "all four at half strength": NINE,
    "quantised sampler": ["grpo", "gspo", "sapo", "maspo", "minirl"],
    "stale sampler": ["grpo", "sapo"],
    FAST: ["grpo"],
    "temperature-mismatched sampler": ["grpo", "sapo", "minirl"],
    "noisy verifier": ["grpo", "stapo", "gspo"],
    "groups of two": ["grpo"],
}
ARMS = {}
for stress, files in FILES.items():
    for file in files:
        flags = f"none {FLAGS} --lr 9e-4 --minibatches 16" if stress == FAST else f"'{stress}' {FLAGS}"
        ARMS[f"{file}, {stress}"] = f"-m labs.race.stresses {file}.py {flags}"
SEEDS = 4
LOST = 0.8  # of the best accuracy: below it, and never back, is a fall
FALSE = 0.05  # largest share of healthy runs in which a rule may sound, where it is fitted
SHOWN = 10  # lines of the table
# The outcome itself, what only repeats another metric, and what measures the machine
UNWATCHED = "step greedy sampled tokens tokens_per_s loss lr judge_killed skipped seconds lag".split()
FACTORS = (1.2, 1.5, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100, 200, 500, 1000)


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
    means = {name: block_means(lines, name) for name in sorted(names - set(UNWATCHED))}
    return {"fall": fall(lines)} | means


def scored(rule: Rule, runs: list[dict]) -> tuple[Rule, list[int]]:
    """The rule with its counts on the runs that have its metric, and how many steps ahead of the
    fall it sounded in each run whose fall it announced."""
    leads, falls, false, healthy = [], 0, 0, 0
    for run in runs:
        if rule.metric not in run:
            continue
        alarm = sounds(rule, run[rule.metric])
        if run["fall"]:
            falls += 1
            if alarm and alarm.step < run["fall"]:
                leads.append(int(run["fall"] - alarm.step))
        else:
            healthy += 1
            false += bool(alarm)
    return Rule(rule.metric, rule.times, len(leads), falls, false, healthy), leads


def fitted(metric: str, runs: list[dict]) -> Rule | None:
    """The rule on this metric that announces most falls of these runs, with few false alarms; of
    equals the one that sounds latest. None if no rule announces any."""
    best = Rule(metric, 1.0)
    for factor in FACTORS:
        for times in (factor, 1 / factor):
            rule, _ = scored(Rule(metric, times), runs)
            quiet = rule.alarms <= FALSE * rule.healthy
            if quiet and rule.announced >= max(1, best.announced):
                best = rule
    return best if best.announced else None


def halves(results: dict) -> tuple[list[dict], list[dict]]:
    """The runs of odd seeds, of even seeds."""
    odd = [run for runs in results.values() for run in runs[::2]]
    even = [run for runs in results.values() for run in runs[1::2]]
    return odd, even


def ranked(results: dict) -> list[tuple[Rule, list[int]]]:
    """The fitted rule of each metric, scored on the other half of the seeds: first the one that
    announces the largest share of all falls."""
    odd, even = halves(results)
    metrics = sorted({name for run in odd for name in run} - {"fall"})
    found = []
    for metric in metrics:
        rule = fitted(metric, odd)
        if rule:
            found.append(scored(rule, even))
    return sorted(found, key=lambda one: -one[0].announced)
