"""Routing replay, clip and length: the statements of the MiniRL paper on a mixture of experts.

minirl.py trains the embedded mixture of experts with a sampler of few bits. N is the number of
optimiser steps for each rollout. Every arm takes 160 of these steps, with mini-batches of 4
prompts, so a rollout has 4 N prompts. The arms cross N with routing replay (none, R2, R3), with the
clip and with the division by the length. At N = 1 every ratio is 1 and no clip acts. grpo.py and
gspo.py run at N = 4 beside it. The policy itself answers the held-out problems.

    python -m labs.experts
"""

import sys

import numpy as np

from labs import lab

TITLE = "Replay does not help here; with eight updates per rollout and replay the clip does"
LEVELS = 3  # on either side of 0: three bits
UPDATES = 160
ALL = "--model tiny-moe --rollout_dtype float32 --sampler_tolerance 10 --lr 6e-4"
ALL += " --eval_samples 2 --save_every 1000"
REPLAY = ("none", "r2", "r3")
CLIP = {"clip": "", "no clip": " --clip_low 1 --clip_high 1e9"}
LENGTH = {"sum": "", "mean": " --length_norm"}


def command(file: str, N: int, levels: int = LEVELS) -> str:
    steps = UPDATES // N
    flags = f"--prompts_per_step {4 * N} --minibatches {N} --steps {steps}"
    return f"-m labs.experts.sampler {levels} {file} {ALL} {flags} --eval_every {steps // 4}"


ARMS = {}
for N in (1, 2, 4, 8):
    for clip in ("clip",) if N == 1 else CLIP:
        for length in LENGTH:
            for replay in REPLAY:
                arm = f"N = {N}, {replay}, {clip}, {length}"
                flags = f" --routing_replay {replay}{CLIP[clip]}{LENGTH[length]}"
                ARMS[arm] = command("minirl.py", N) + flags
for N in (1, 8):
    ARMS[f"N = {N}, exact sampler"] = command("minirl.py", N, levels=0)
    ARMS[f"N = {N}, no weight"] = command("minirl.py", N) + " --no_correct_mismatch"
for name in ("grpo", "gspo"):
    ARMS[f"N = 4, {name}"] = command(f"{name}.py", 4)
COLUMNS = ("greedy", "sampled", "entropy", "sampler_kl", "experts_differ", "response_len")
COLUMNS += ("masked_share", "grad_norm")
SEEDS = 3


def rows(results: dict) -> list[list[str]]:
    numbers = {
        "sampled at the end": (lab.end, ".2f"),
        "highest sampled": (lab.high("sampled"), ".2f"),
        "entropy at the end": (lab.late("entropy"), ".2f"),
        "KL(μ ‖ π_old), last 20 steps": (lab.late("sampler_kl"), ".3f"),
        "tokens of other experts": (lab.late("experts_differ"), ".2f"),  # minirl.py's alone
    }
    return lab.table(results, numbers)


def draw(results: dict) -> object:
    """Accuracy at the end against N, a panel for each replay; a dot is a run."""
    figure, axes = lab.sheet(TITLE, *(f"replay {replay}" for replay in REPLAY), width=12)
    colours = {"clip, sum": lab.BLUE, "no clip, sum": lab.ORANGE}
    colours |= {"clip, mean": lab.GREEN, "no clip, mean": lab.PINK}
    for axis, replay in zip(axes, REPLAY):
        for place, (kind, colour) in enumerate(colours.items()):
            for N in (1, 2, 4, 8):
                runs = results.get(f"N = {N}, {replay}, {kind}", [])
                x = np.log2(N) + 0.09 * (place - 1.5)
                axis.scatter([x] * len(runs), [lab.end(run) for run in runs], s=18, color=colour)
        axis.set_xticks(range(4), labels=(1, 2, 4, 8))
        axis.set_xlabel("N: optimiser steps for each rollout")
        axis.set_ylim(0, 1)
    axes[0].set_ylabel("sampled accuracy at the end")
    lab.key(axes[0], colours)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
