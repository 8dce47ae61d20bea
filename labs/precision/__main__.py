"""Parameters in bfloat16: an update smaller than half their spacing rounds to nothing.

The lab takes the embedded model, one real rollout, grpo.py's loss and four steps of AdamW. The
parameters are float32 throughout; or bfloat16 throughout, with the optimiser's state; or, as in
common/distributed.py, a float32 master with a bfloat16 copy for the forward and backward passes.

    python -m labs.precision
"""

import copy
import functools
import sys

import numpy as np
import torch
from common.batch import Rollout
from common.data import load_task
from common.distributed import ALONE, clip_gradients
from common.logprobs import Policy, response_logprobs
from common.model import load_model
from common.rollout import HFEngine
import checks

from labs import lab, toy

TITLE = "Parameters in bfloat16: at a small learning rate the update rounds away"
WAYS = ("float32", "float32 master", "bfloat16")
RATES = (1e-6, 1e-5, 1e-4, 1e-3)
ARMS = {f"{way}, {lr:.0e}".replace("e-0", "e-"): (way, lr) for way in WAYS for lr in RATES}
COLOURS = dict(zip(WAYS, (lab.BLACK, lab.BLUE, lab.ORANGE)))
grpo = toy.load("grpo")


@functools.cache
def sampled(seed: int, prompts: int) -> tuple[Policy, Rollout]:
    """The start model, and a rollout of its own with advantages."""
    args = checks.no_kl(grpo, seed=seed)
    lm, tokenizer = load_model("tiny")
    task, engine = load_task(args, tokenizer), HFEngine(lm, ALONE, seed, "float32", 1024)
    problems = [task.train(i) for i in range(prompts)]
    rollout = engine.generate([p.prompt_ids for p in problems], args.group_size, 64, 1.0)
    texts = tokenizer.batch_decode(rollout.response_ids(), skip_special_tokens=True)
    scores = task.verifier(texts, [p.answer for p in problems for _ in range(args.group_size)])
    rewards = torch.tensor(scores).view(prompts, args.group_size)  # [P, G]
    rollout.advantages = grpo.advantages(rewards).flatten()  # [N]
    return Policy(lm), rollout


def copied(policy: Policy, dtype: torch.dtype) -> Policy:
    """The same parameters in `dtype`. Buffers (the rotary frequencies) stay as they are."""
    policy = copy.deepcopy(policy)
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    return policy


def function(policy: Policy, rollout: Rollout) -> torch.Tensor:
    """log π of the rollout's tokens `[M]`, computed in float32, so only the parameters differ."""
    with torch.no_grad():
        logp, _ = response_logprobs(copied(policy, torch.float32), rollout, 1.0)  # [N, T]
    return logp[rollout.mask.bool()]


def measure(arm: str, seed: int, quick: bool) -> dict:
    """Share of the parameters that a step changes, and how far four steps have moved log π."""
    way, lr = ARMS[arm]
    start, rollout = sampled(seed, 16)
    args = checks.no_kl(grpo)
    held = copied(start, torch.bfloat16 if way == "bfloat16" else torch.float32)  # is stepped on
    used = copied(held, torch.float32 if way == "float32" else torch.bfloat16)  # does the passes
    optimizer = torch.optim.AdamW(held.parameters(), lr, betas=args.betas, weight_decay=0.0)
    before, changed, batches = function(held, rollout), [], rollout.split(args.minibatches)
    for batch in batches:
        with torch.no_grad():
            batch.old_logp, batch.entropy = response_logprobs(used, batch, 1.0)  # [n, T]
    for batch in batches:
        logp, _ = response_logprobs(used, batch, 1.0)  # [n, T]
        names = ("old_logp", "advantages", "entropy", "mask")
        given = {name: getattr(batch, name) for name in names}
        loss, _ = checks.loss_of(grpo, args, logp=logp, **given)
        used.zero_grad()
        loss.backward()
        for twin, master in zip(used.parameters(), held.parameters()):
            master.grad = twin.grad.to(master.dtype)
        clip_gradients(held, args.grad_clip)
        old = [master.detach().clone() for master in held.parameters()]
        optimizer.step()
        for twin, master in zip(used.parameters(), held.parameters()):
            twin.data.copy_(master)
        different = [(master != was).sum().item() for master, was in zip(held.parameters(), old)]
        changed.append(sum(different) / sum(was.numel() for was in old))
    moved = (function(held, rollout) - before).abs().mean().item()
    return {"changed": float(np.mean(changed)), "moved": moved}


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "parameters changed by a step, %", "mean |Δ log π| after four"]]
    for arm, runs in results.items():
        share = [{"percent": 100 * run["changed"]} for run in runs]
        table.append([arm, lab.cell(share, "percent", ".3g"), lab.cell(runs, "moved", ".2g")])
    return table


def draw(results: dict) -> object:
    words = "parameters that a step changes (share)", "mean |Δ log π| after four steps, nats"
    figure, axes = lab.sheet(TITLE, *words)
    for axis, name in zip(axes, ("changed", "moved")):
        for way, colour in COLOURS.items():
            arms = [results[arm] for arm in ARMS if ARMS[arm][0] == way]
            middle, low, high = np.array([lab.over(runs, name) for runs in arms]).T  # [rates]
            axis.fill_between(RATES, low, high, color=colour, alpha=0.15, linewidth=0)
            dashed = "--" if way == "float32 master" else "-"
            axis.plot(RATES, middle, dashed, color=colour, marker="o", linewidth=2)
        axis.set(xscale="log", yscale="log", xlabel="learning rate")
    for axis, heights in zip(axes, ((0.72, 0.52, 0.02), (4e-2, 2e-2, 4e-5))):
        x = 1e-6 if axis is axes[0] else 1.3e-6
        lab.label(axis, x, heights[0], "float32 master, dashed", lab.BLUE)
        lab.label(axis, x, heights[1], "under it float32", lab.BLACK)
        lab.label(axis, 1.4e-5, heights[2], "bfloat16", lab.ORANGE)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
