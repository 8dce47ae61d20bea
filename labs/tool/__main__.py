"""A tool, a tool that fails, and a mask that is missing.

variants/tool.py on the embedded task: the policy writes `7*8=`, a calculator writes `56`. In some
arms 30% of the calls in training fail, or get a wrong number; in some the tool's tokens are trained
like the policy's own. Held-out problems are answered with a tool that works.

    python -m labs.tool
"""

import sys

import numpy as np

from labs import lab

TITLE = "A tool helps; if failed calls cost the reward, it is unlearned"
FLAGS = "--steps 60 --eval_every 10 --eval_problems 128 --save_every 1000"
BROKEN = f"-m labs.tool.broken HOW tool.py {FLAGS}"
UNSEEN = "--sampler_tolerance 100"  # the check of sampler against trainer never stops the run
ARMS = {
    "no tool": f"grpo.py {FLAGS}",
    "tool": f"-m variants.tool {FLAGS}",
    "fails, ends": BROKEN.replace("HOW", "fails") + " --failed_call end",
    "fails, empty reply": BROKEN.replace("HOW", "fails"),
    "fails, dropped": BROKEN.replace("HOW", "fails") + " --failed_call drop",
    "no mask": BROKEN.replace("HOW", "mask"),
    "no mask, no check": f"{BROKEN.replace('HOW', 'mask')} {UNSEEN}",
    "wrong replies": BROKEN.replace("HOW", "wrong"),
    "wrong replies, no mask, no check": f"{BROKEN.replace('HOW', 'wrong+mask')} {UNSEEN}",
}
COLUMNS = ("sampled", "reward", "called", "grad_norm")
SEEDS = 5
COLOURS = {
    "tool": lab.BLUE,
    "no tool": lab.GREY,
    "fails, empty reply": lab.GREEN,
    "fails, dropped": lab.PINK,
    "fails, ends": lab.ORANGE,
}


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "runs", "sampled before", "sampled at the end", "responses that call"]]
    table[0] += ["training reward", "largest gradient norm", "stopped"]
    for arm, runs in results.items():
        whole = [run for run in runs if "stopped" not in run]
        steps = sorted({str(len(run["reward"]) + 1) for run in runs if "stopped" in run})
        stopped = f"{len(runs) - len(whole)}, step {', '.join(steps)}" if steps else "0"
        if not whole:
            table.append([arm, str(len(runs)), *["–"] * 5, stopped])
            continue
        ended = [
            {
                "before": run["sampled"][0],
                "end": run["sampled"][-1],
                "called": lab.tail(run["called"], 10) if run["called"] else np.inf,
                "reward": lab.tail(run["reward"], 10),
                "norm": max(run["grad_norm"]),
            }
            for run in whole
        ]
        cells = [lab.cell(ended, name) for name in ("before", "end")]
        cells.append(lab.cell(ended, "called").replace("never", "–"))
        cells += [lab.cell(ended, "reward"), lab.cell(ended, "norm", ".1f"), stopped]
        table.append([arm, str(len(runs)), *cells])
    return table


def draw(results: dict) -> object:
    words = "held-out accuracy, sampled (with a tool that works)", "responses that call the tool"
    figure, axes = lab.sheet(TITLE, *words, width=11)
    lab.curves(axes[0], results, "sampled", COLOURS)
    called = {arm: colour for arm, colour in COLOURS.items() if arm != "no tool"}
    lab.curves(axes[1], results, "called", called, width=5)
    for axis in axes:
        axis.set_ylim(0, 1.02)
    lab.key(axes[1], COLOURS, x=0.5, y=0.78)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
