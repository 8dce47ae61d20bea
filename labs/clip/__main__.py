"""What does the clip protect against? GRPO's clip, no clip, and a clip without the min.

grpo.py runs at three times its learning rate, where the clip matters, with 1, 4 and 16
mini-batches. `--clip_low 1e9 --clip_high 1e9` turns the clip off. A clip *without* the min is not a
flag of the file. It is a bug that this lab puts in. (With one mini-batch r is 1, so the bug changes
nothing.)

More mini-batches change two things at once: r leaves 1, and an Adam step sees fewer responses. The
*on-policy* arms change only the second. They sample 8, 32 or 128 new responses for each step, so r
is 1 and no clip acts. They take as many steps, with as much warm-up, and as many responses in all
as the arm of the same batch size. With 128 responses they take four times as many.

    python -m labs.clip
"""

import sys

import numpy as np

from labs import lab

TITLE = "Runs fall if a step sees few responses, reused or not; the clip slows the fall a little"
RUN = "grpo.py --lr 1e-3 --steps 60 --eval_every 10 --eval_samples 2 --save_every 1000"
FREE = "--clip_low 1e9 --clip_high 1e9"
ARMS = {
    f"{name}, {n} per rollout": f"{RUN} --minibatches {n} {flags}".strip()
    for n in (1, 4, 16)
    for name, flags in (("clip", ""), ("no clip", FREE))
}
DAMAGE = {}
for n in (4, 16):
    ARMS[f"no min, {n} per rollout"] = f"{RUN} --minibatches {n}"
    DAMAGE[f"no min, {n} per rollout"] = "torch.minimum(ratio * A, clipped * A)", "clipped * A"
SEEN = {arm: 128 // int(arm.split()[-3]) for arm in ARMS}  # responses per Adam step
ANEW = "grpo.py --lr 1e-3 --eval_samples 2 --save_every 10000 --minibatches 1"
for prompts, steps in ((16, 240), (4, 240), (1, 960)):
    arm, P = f"on-policy, {8 * prompts} a step", f" --prompts_per_step {prompts}"
    often = f" --steps {steps} --warmup {steps // 12} --eval_every {steps // 6}"
    ARMS[arm], SEEN[arm] = f"{ANEW}{P if prompts < 16 else ''}{often}", 8 * prompts
COLUMNS = ("greedy", "clip_share")
COLOURS = {"clip": lab.BLUE, "no clip": lab.ORANGE, "no min": lab.GREY, "on-policy": lab.BLACK}
SEEDS = 5


def updates(arm: str, run: dict) -> np.ndarray:
    """Adam steps up to each evaluation."""
    each = 1 if arm.startswith("on-policy") else 128 // SEEN[arm]
    return each * np.array(run["greedy@"])


def rows(results: dict) -> list[list[str]]:
    numbers = {
        "greedy at the end": (lab.last("greedy"), ".2f"),
        "highest greedy": (lab.high("greedy"), ".2f"),
        "mean greedy": (lambda run: np.mean(run["greedy"][1:]), ".2f"),
        "clip share, mean (%)": (lambda run: 100 * np.mean(run["clip_share"]), ".2f"),
    }
    table = lab.table(results, numbers)
    table[0][2:2] = ["responses per Adam step", "Adam steps"]
    for row, (arm, runs) in zip(table[1:], results.items()):
        row[2:2] = [str(SEEN[arm]), str(int(updates(arm, runs[0])[-1]))]
    return table


def draw(results: dict) -> object:
    sizes = sorted(set(SEEN.values()), reverse=True)
    words = [f"an Adam step sees {n} responses" for n in sizes]
    figure, axes = lab.sheet(TITLE, *words, width=11)
    for axis, size in zip(axes, sizes):
        shown = {}
        for arm, runs in results.items():
            name = arm.split(",")[0]
            if SEEN[arm] == size:
                moved = [run | {"greedy@": updates(arm, run)} for run in runs]
                style = {"linestyle": "--" if arm == "no clip, 1 per rollout" else "-"}
                lab.bands(axis, moved, "greedy", COLOURS[name], **style)
                shown[name] = COLOURS[name]
        axis.set(ylim=(0, 1.02), xlabel="Adam step")
        both = {"clip": lab.BLUE, "no clip (the same)": lab.ORANGE, "on-policy": lab.BLACK}
        lab.key(axis, both if size == 128 else shown, 0.5, 0.3 if size > 8 else 0.95)
    axes[0].set_ylabel("held-out accuracy, greedy")
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
