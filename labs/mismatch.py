"""The sampler is not the policy: an 8-bit copy of a mixture of experts, and MiniRL's weight.

minirl.py on the embedded mixture of experts, at three times the usual step size. The sampler rounds
weights to 8 bits, and its router then chooses other experts: the gap between μ and π_old grows as
training goes on. The weight π/μ (`--correct_mismatch`) corrects for it; routing replay (r3) takes a
part of the gap away. And a gap that is a plain bug, met in public code: a sampler at another
temperature than the trainer's. Three neighbours under eight bits: icepop.py, dppo.py, and jet.py,
whose trainer computes with the sampler's rounded weights.

    python -m labs.mismatch
"""

import sys

from labs import lab

TITLE = "The gap to the sampler grows; but without any gap (Jet) runs decay as well"
RUN = "minirl.py --model tiny-moe --lr 1e-3 --steps 80 --eval_every 20 --save_every 1000"
RUN += " --sampler_tolerance 10"
ARMS = {
    "weight π/μ": RUN,
    "no weight": f"{RUN} --no_correct_mismatch",
    "weight and replay r3": f"{RUN} --routing_replay r3",
    "replay r3 alone": f"{RUN} --routing_replay r3 --no_correct_mismatch",
}
COLD = "args.max_new_tokens, args.temperature)", "args.max_new_tokens, 0.8)"
ARMS["cold, weight π/μ"] = f"{RUN} --rollout_dtype float32"
ARMS["cold, no weight"] = f"{RUN} --rollout_dtype float32 --no_correct_mismatch"
DAMAGE = {arm: COLD for arm in ARMS if arm.startswith("cold")}  # the sampler at temperature 0.8
FLAGS = RUN.removeprefix("minirl.py ")
ARMS |= {name: f"-m variants.{name.lower()} {FLAGS}" for name in ("IcePop", "DPPO", "Jet")}
COLUMNS = ("greedy", "sampled", "sampler_kl", "weight_max", "response_len")
COLOURS = {"weight π/μ": lab.BLUE, "no weight": lab.ORANGE, "weight and replay r3": lab.GREEN}
COLOURS["replay r3 alone"] = lab.PINK
KIN = {"weight π/μ": lab.BLUE, "IcePop": lab.ORANGE, "DPPO": lab.GREEN, "Jet": lab.PINK}
SEEDS, LOW = 5, 0.5


def rows(results: dict) -> list[list[str]]:
    head = ["arm", "greedy at the end", "ended below 0.5", "KL(μ ‖ π_old), last 20 steps"]
    table = [head]
    for arm, runs in results.items():
        ended = [
            {"end": run["greedy"][-1], "kl": 1e3 * lab.tail(run["sampler_kl"])} for run in runs
        ]
        lost = f"{sum(run['end'] < LOW for run in ended)} of {len(runs)}"
        table.append([arm, lab.cell(ended, "end"), lost, lab.cell(ended, "kl", ".1f") + " · 10⁻³"])
    return table


def draw(results: dict) -> object:
    """Without the cold arms, and MiniRL's gaps alone; Jet's is rounding, far below that axis."""
    words = "MiniRL, held-out accuracy, greedy", "its kin", "KL(μ ‖ π_old), nats per token"
    figure, axes = lab.sheet(TITLE, *words, width=12)
    for axis, colours in zip(axes, (COLOURS, KIN, COLOURS)):
        column, width = ("sampler_kl", 9) if axis is axes[2] else ("greedy", 1)
        lab.curves(axis, results, column, colours, width)
    lab.key(axes[0], COLOURS)
    lab.key(axes[1], KIN)
    for axis in axes[:2]:
        axis.set_ylim(0, 1.02)
    lab.plain_ticks(axes[2], "y", (1e-4, 1e-3, 1e-2))
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
