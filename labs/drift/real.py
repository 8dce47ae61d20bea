"""Drift on a real model: its share of the gradient when the sampler's weights are rounded.

SmolLM2-135M after the warm start of labs/real samples eight worked sums to each of 32 prompts, with
its weights in bfloat16, in float8, or in four bits. Nothing is trained. The gradient by all
parameters is computed for eight groups of prompts, with the drift and without it. Every inner
product is between two groups, so noise adds no length. The interval is a jackknife's, over groups.
The sampler's 128 most likely tokens stand for the vocabulary; the tail is as in centred.py.

    python -m labs.real.start runs/smollm2 runs/smollm2-sums    # once: its warm start
    python -m labs.drift.real
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from common.cli import BadInput
from common.data import load_task
from common.distributed import ALONE
from common.logprobs import Policy
from common.model import load_model
from common.rollout import HFEngine
from variants import centred

from labs import lab
from labs.drift.__main__ import PLAIN, gradients
from labs.race.stresses import quantise

TITLE = "The drift's share of a real model's gradient"
MODEL = Path("runs/smollm2-sums")
ARMS = {"bfloat16": 0, "float8": 0, "four bits": 7}  # levels on either side of 0, if rounded so
GROUPS, PROMPTS, RESPONSES, SEEDS = 8, 4, 8, 1
METHODS = {"nothing": PLAIN, "centred": centred.Args(centre_top=128)}


def share(inner: dict[str, np.ndarray], groups: list[int]) -> float:
    """The drift's length of the gradient's, from inner products `[GROUPS, GROUPS]` of two different
    groups; 0 if the drift has no length beyond noise, NaN if the gradient has none."""
    square = {}
    for name, products in inner.items():
        among = products[np.ix_(groups, groups)]
        square[name] = among.sum() - np.trace(among)
    if square["nothing"] <= 0:
        return np.nan
    return float(np.sqrt(max(0.0, square["drift"]) / square["nothing"]))


def measure(arm: str, seed: int) -> dict:
    """Mean gap, the drift's share, and half of its 95% interval."""
    if not MODEL.exists():
        raise BadInput(f"{MODEL}: is not there, make it: python -m labs.real.start --help")
    lm, tokenizer = load_model(str(MODEL), ALONE)
    task = load_task(replace(PLAIN, task="labs/real/sums.py:worked", seed=seed), tokenizer)
    precision = "float32" if ARMS[arm] else arm
    engine = HFEngine(lm, ALONE, seed, precision, 256, top=METHODS["centred"].centre_top)
    engine.sync(Policy(lm))  # it rounds to float8 where it takes over weights
    if ARMS[arm]:
        quantise(engine.lm, ARMS[arm])
    vectors, gaps = {"nothing": [], "drift": []}, []
    for group in range(GROUPS):
        problems = [task.train(group * PROMPTS + i) for i in range(PROMPTS)]
        batch = engine.generate([one.prompt_ids for one in problems], RESPONSES, 56, 1.0)
        rewards = task.score(batch, problems, RESPONSES)  # [P, G]
        batch.advantages = centred.advantages(rewards).flatten()  # [N]
        found = gradients(lm, batch, METHODS)
        gaps.append(float(found["gap"]))
        # Halved in size: eight groups of 135 million numbers, twice
        vectors["nothing"].append(found["nothing"].bfloat16())
        vectors["drift"].append((found["nothing"] - found["centred"]).bfloat16())
    inner = {}
    for name, every in vectors.items():
        rows = [[float(one.float() @ other.float()) for other in every] for one in every]
        inner[name] = np.array(rows)  # [GROUPS, GROUPS]
    whole = share(inner, list(range(GROUPS)))
    without = [share(inner, [j for j in range(GROUPS) if j != i]) for i in range(GROUPS)]
    error = np.sqrt((GROUPS - 1) * np.var(without))
    t = 2.36  # of seven degrees of freedom
    half = "?" if np.isnan(error) else t * error  # without some group: no length beyond noise
    return {"gap": np.mean(gaps), "share": whole, "half": half}


def rows(results: dict) -> list[list[str]]:
    """Gap and share of each sampler."""
    table = [["sampler's weights", "gap", "drift's length, of the gradient's"]]
    for arm, runs in results.items():
        run = runs[0]
        half = run["half"] if run["half"] == "?" else f"{run['half']:.2f}"
        table.append([arm, f"{run['gap']:.4f}", f"{run['share']:.2f} ± {half}"])
    return table


def draw(results: dict) -> object:
    """The share over the gap, with its interval where there is one."""
    figure, axes = lab.sheet(TITLE, "drift's length, of the gradient's", width=5.5)
    for arm, runs in results.items():
        run = runs[0]
        error = None if run["half"] == "?" else run["half"]
        point = run["gap"], run["share"]
        axes[0].errorbar(*point, error, color=lab.PINK, marker="o", capsize=3)
        lab.label(axes[0], *point, arm, lab.PINK)
    lab.plain_ticks(axes[0], "x", (0.01, 0.1, 1, 3))
    axes[0].set_ylim(-0.2, 1.2)
    axes[0].set_xlabel("gap of the sampler (nats per token)")
    return figure


if __name__ == "__main__":
    torch.set_num_threads(1)
    lab.main(sys.modules[__name__])
