"""The sampler is not the policy: an 8-bit copy of a mixture of experts, and MiniRL's weight.

minirl.py runs on the embedded mixture of experts, at three times the usual learning rate. The
sampler rounds parameters to 8 bits, so its router chooses other experts, and the gap between μ and
π_old grows during training. The weight π/μ (`--correct_mismatch`) corrects for the gap, and routing
replay (r3) removes a part of it. With `--rollout_dtype float32` there is no gap. Three more methods
run with eight bits: icepop.py, dppo.py, and jet.py, whose trainer computes with the sampler's
rounded parameters.

The last two arms have a gap a hundred times as wide, at the usual learning rate: their sampler has
three bits (quantised.py). One arm has the weight and the other does not. Sampler and policy both
answer the held-out problems.

    python -m labs.mismatch
"""

import sys

import numpy as np

from labs import lab

TITLE = "Runs decay without a gap, too; with three bits the weight decides what is trained"
FLAGS = "--model tiny-moe --lr 1e-3 --steps 80 --eval_every 20 --save_every 1000"
FLAGS += " --sampler_tolerance 10"
RUN = f"minirl.py {FLAGS}"
NO_WEIGHT = " --no_correct_mismatch"
ARMS = {
    "weight π/μ": RUN,
    "no weight": RUN + NO_WEIGHT,
    "weight and replay r3": f"{RUN} --routing_replay r3",
    "replay r3 alone": f"{RUN} --routing_replay r3{NO_WEIGHT}",
}
ARMS |= {name: f"-m variants.{name.lower()} {FLAGS}" for name in ("IcePop", "DPPO", "Jet")}
ARMS["exact sampler"] = f"{RUN} --rollout_dtype float32"
SMALL = f"{RUN.replace('1e-3', '3e-4').replace('80', '60')} --rollout_dtype float32"
WIDE = {"3 bits, weight π/μ": SMALL, "3 bits, no weight": SMALL + NO_WEIGHT}
ARMS |= WIDE
QUANTISED = (
    "from common.rollout import make_engine",
    "from labs.mismatch.quantised import engine_of, evaluate\n\nmake_engine = engine_of(3)",
)
DAMAGE = dict.fromkeys(WIDE, QUANTISED)
COLUMNS = ("greedy", "sampled", "sampler_kl")
COLUMNS += ("policy_greedy", "policy_sampled")  # only the arms of three bits have them
COLOURS = {"weight π/μ": lab.BLUE, "no weight": lab.ORANGE, "weight and replay r3": lab.GREEN}
COLOURS["replay r3 alone"] = lab.PINK
SEEDS, LOW = 5, 0.5


def rows(results: dict) -> list[list[str]]:
    """Make the table, with two more columns for the accuracy of the policy itself."""
    numbers = {
        "greedy at the end": (lab.last_value("greedy"), ".2f"),
        "sampled at the end": (lab.last_value("sampled"), ".2f"),
        "the policy itself, greedy": (lab.last_value("policy_greedy"), ".2f"),
        "the policy itself, sampled": (lab.last_value("policy_sampled"), ".2f"),
        "10³ KL(μ ‖ π_old), first 20": (lambda run: 1e3 * np.mean(run["sampler_kl"][:20]), ".1f"),
        "10³ KL(μ ‖ π_old), last 20": (lambda run: 1e3 * lab.tail(run["sampler_kl"]), ".1f"),
    }
    table = lab.table(results, numbers)
    for row, runs in zip(table, ["", *results.values()]):
        lost = sum(run["greedy"][-1] < LOW for run in runs)
        row.insert(3, f"{lost} of {len(runs)}" if runs else "ended below 0.5")
    return table


def draw(results: dict) -> object:
    """Draw the figure. Three other methods and the gap are only in the table."""
    words = "three times the learning rate:\ngreedy accuracy at the end"
    words = words, "3 bits, usual learning rate:\naccuracy of policy and sampler"
    figure, axes = lab.make_figure(TITLE, *words, width=8.6)
    arms = [*COLOURS, "exact sampler"]
    for y, arm in enumerate(reversed(arms)):
        ends = [run["greedy"][-1] for run in results[arm]]
        lab.dots(axes[0], y, ends, COLOURS.get(arm, lab.BLACK))
    axes[0].set_yticks(range(len(arms)), labels=reversed(arms))
    axes[0].set_xlim(0, 1.02)
    for arm, colour in zip(WIDE, (lab.BLUE, lab.ORANGE)):
        name = arm.removeprefix("3 bits, ")
        for column, who, style in (("policy_sampled", "policy", "-"), ("sampled", "sampler", ":")):
            lab.median_curve(axes[1], results[arm], column, colour, linestyle=style)
            end = np.median([run[column][-1] for run in results[arm]])
            if name != "no weight" or who == "sampler":  # its policy is too close to the other
                lab.label(axes[1], results[arm][0][f"{column}@"][-1], end, who, colour)
    axes[1].set_ylim(0, 1.02)
    lab.legend(axes[1], {name: COLOURS[name] for name in ("weight π/μ", "no weight")})
    for axis in axes:
        axis.tick_params(labelsize=12)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
