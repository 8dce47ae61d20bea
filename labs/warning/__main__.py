"""What warns first before a collapse, how many steps ahead, and how often does it cry wolf?

The nine files, healthy and under what makes them fall. A rule watches one metric: its mean over
five steps, itself or in multiples of its mean over the run's first ten, is beyond a limit
(rules.py). Limits are fitted on the odd seeds and scored on the even ones.

    python -m labs.warning
"""

import sys

import numpy as np

from labs import lab
from labs.race.stresses import STRESSES
from labs.warning.alarm import Rule
from labs.warning.rules import alarm_rules, half, keep, lead, rules, scored  # noqa: F401 (keep: for lab)

TITLE = "The cut and the gap warn of half of the falls, the usual numbers of a quarter or none"
FLAGS = "--steps 100 --eval_every 5 --eval_problems 128 --eval_samples 2 --sample_every 0"
FLAGS += " --sampler_tolerance 1e6"  # else a quantised or stale sampler would end the run
ROWS = 128  # responses of a step
FAST = "16 updates, lr x3"
NINE = "grpo gspo sapo stapo maspo minirl vcpo goldilocks deep_grpo"
FILES = {
    "none": NINE,
    "lr x3": NINE,
    "all four at half strength": NINE,
    "quantised sampler": "grpo gspo sapo maspo minirl",
    "stale sampler": "grpo sapo",
    FAST: "grpo",
    "temperature-mismatched sampler": "grpo sapo minirl",
    "noisy verifier": "grpo stapo gspo",
    "groups of two": "grpo",
}
SEEDS = 4
# In the figure: those of the alarm, and what people watch
SHOWN = "sampler_kl masked_below grpo_cut_share gate_closed reward entropy response_len weight_max"
SHOWN += " ref_kl grad_norm"


def command(file: str, stress: str) -> str:
    """A run's command line."""
    if stress == FAST:
        return f"-m labs.race.stresses {file}.py none {FLAGS} --lr 9e-4 --minibatches 16"
    flags = FLAGS + STRESSES[stress].flags(ROWS)
    return f"-m labs.race.stresses {file}.py '{stress}' {flags}"


ARMS = {
    f"{file}, {stress}": command(file, stress)
    for stress, files in FILES.items()
    for file in files.split()
}


def said(rule: Rule) -> str:
    """`sampler_kl above 0.092`, `ref_kl above 150 times`."""
    beyond = f"{'above' if rule.above else 'below'} {rule.limit:g}"
    return f"{rule.metric} {beyond}{'' if rule.itself else ' times'}"


def leads(sounding: list[Rule], runs: list[dict]) -> list[int]:
    """Of each run whose fall any of these rules announces: how many steps ahead the first does."""
    first = [max((lead(rule, run) for rule in sounding), default=0) for run in runs if run["fall"]]
    return sorted(steps for steps in first if steps)


def quartiles(steps: list[int]) -> str:
    """`25 (10–40)`: the median, and a quarter on either side."""
    if not steps:
        return "–"
    low, middle, high = np.quantile(steps, (0.25, 0.5, 0.75))
    return f"{middle:.0f} ({low:.0f}–{high:.0f})"


def counted(name: str, sounding: list[Rule], runs: list[dict]) -> list[str]:
    """A row: what any of these rules announces of these runs' falls, and their false alarms."""
    ahead = leads(sounding, runs)
    falls = [run for run in runs if run["fall"]]
    healthy = [run for run in runs if not run["fall"]]
    alarms = [run for run in healthy if any(scored(rule, [run]).alarms for rule in sounding)]
    announced = f"{len(ahead)} of {len(falls)}"
    return [name, announced, quartiles(ahead), f"{len(alarms)} of {len(healthy)}"]


def rows(results: dict) -> list[list[str]]:
    """Each metric's rule; then all rules of the alarm together, by kind of run and by file."""
    even, table = half(results, 2), [["", "falls announced", "steps ahead", "false alarms"]]
    found = rules(results)
    for rule in found:
        table.append(counted(said(rule), [rule], [run for run in even if rule.metric in run]))
    alarm = alarm_rules(results)
    table.append(counted("all of the alarm", alarm, even))
    kinds = {arm.partition(", ")[part] for arm in results for part in (0, 2)}
    for kind in [*NINE.split(), *FILES]:
        if kind in kinds:
            chosen = {a: runs for a, runs in results.items() if kind in (a.partition(", ")[::2])}
            table.append(counted(kind, alarm, half(chosen, 2)))
    return table


def draw(results: dict) -> object:
    """Of each metric: the share of falls and of other runs in which its rule sounds; how early."""
    even = half(results, 2)
    found = {rule.metric: rule for rule in rules(results)}
    shown = [found[metric] for metric in SHOWN.split() if metric in found][::-1]
    panels = "share of runs in which the rule sounds", "steps ahead of each announced fall"
    figure, axes = lab.sheet(TITLE, *panels, width=11, height=4.6)
    for place, rule in enumerate(shown):
        false = rule.alarms / max(1, rule.healthy)
        announced = rule.announced / max(1, rule.falls)
        axes[0].plot([false, announced], [place, place], color=lab.GREY, linewidth=1, zorder=1)
        axes[0].plot(false, place, "X", color=lab.ORANGE, markersize=8)
        axes[0].plot(announced, place, "o", color=lab.BLUE, markersize=8)
        ahead = leads([rule], [run for run in even if rule.metric in run])
        if ahead:
            lab.dots(axes[1], place, ahead, lab.BLUE)
    axes[0].set_yticks(range(len(shown)), labels=[said(rule) for rule in shown])
    axes[1].set_yticks(range(len(shown)), labels=[""] * len(shown))
    axes[0].set_xlim(-0.03, 1.03)
    axes[1].set_ylim(axes[0].get_ylim())
    axes[1].set_xlim(0, 100)
    axes[1].set_xlabel("steps")
    lab.key(axes[0], {"runs that did not fall": lab.ORANGE, "falls announced": lab.BLUE}, x=0.55)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
