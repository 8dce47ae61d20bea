"""CISPO: cap the importance weight, drop no token.

MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
2025, arXiv 2506.13585.

Objective, over all response tokens y_t of a mini-batch, with r = π_θ(y_t) / π_old(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t sg[min(r, c)] Â_i log π_θ(y_t)
    Â_i = (R_i - mean R) / std R

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    min(r, c) Â

PPO's clip drops tokens: a good token that has risen by ε has no gradient any more. Rare tokens
reach the clip first. In reasoning, the paper says, these are the forks, "However", "Wait",
"Recheck", which decide the rest of the response. More updates per rollout (M1: 16) lose more of
them. CISPO bounds only the weight. r corrects for sampling from π_old, and min(r, c) prevents one
token from outweighing a batch. The gradient of log π_θ always flows.

sg matters. Without it the derivative of r log π_θ is r (1 + log π_θ). Below probability 1/e its
sign turns, and rare tokens are pushed down when they are rewarded.

The clip also kept tokens near π_old. Here nothing does until the next rollout. DPPO's authors see
collapse where sampler and trainer differ (dppo.py).

Public code has three conventions for the cap. The first is c itself (TRL: 5, as here). The second
is 1 + ε, with the lower side off at ε_low >= 1 (slime; verl's example, where ε 0.2 makes c = 1.2).
The third has both sides, in the same two if ε_low stays at the usual 0.2. That is another loss: a
token that has become rare keeps the weight 0.8. In M1, ε_low is too large to act.

Base file: justrl.py. Differs from it in:
1. -log π with a detached, capped weight instead of min and clip. `--clip_low` and `--clip_high`
   only count which tokens justrl.py would drop.

Differs from the paper in:
1. The paper does not give its cap; 5 is ScaleRL's (arXiv 2510.13786), as TRL has it.
2. Four optimiser steps per rollout where M1 takes 16. So no weight is near 5 on the embedded task
   (`--is_cap 1.2` shows the cap at work). No dynamic sampling, no punishment for length.

Confidence: formula and "no lower bound" are as two frameworks quote the paper. We read cap and
token mean in TRL's code, the conventions in TRL's, slime's and verl's.

Run it:
    torchrun -m variants.cispo                              # laptop, 2 to 4 minutes, no download
    # a node of eight; M1's steps per rollout
    torchrun --nproc_per_node=8 -m variants.cispo --model Qwen/Qwen3-1.7B-Base \\
        --task dapo-math-17k --eval_task math500 --prompts_per_step 128 --group_size 16 \\
        --minibatches 16 --max_new_tokens 8192 --lr 1e-6 --micro_tokens 8192
"""

from dataclasses import dataclass
import math
from pathlib import Path

from common.batch import Rollout, balance_tokens
from common.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from common.metrics import Means, evaluate, metrics_by_sign, rollout_metrics
from common.model import load_model
from common.rollout import make_engine
from common.run import Run
import torch
from torch import Tensor


@dataclass
class Args(Flags):
    steps: Count = 150
    """Training steps: a rollout, then `minibatches` optimiser steps (our choice)."""
    prompts_per_step: Count = 16
    """Prompts in a rollout, on all ranks together (our choice)."""
    group_size: Count = 8
    """G: responses to each prompt (DeepSeekMath: 64)."""
    minibatches: Count = 4
    """Optimiser steps per rollout; from the second on, π_θ differs from π_old (DeepSeekMath: 1)."""
    max_new_tokens: Count = 64
    """Largest number of tokens in a response (DeepSeekMath: 1024)."""
    temperature: Temperature = 1.0
    """Sampling temperature, also used for all log-probabilities (papers: 1)."""
    lr: Positive = 3e-4
    """AdamW's learning rate after warm-up, chosen for `tiny` (DeepSeekMath: 1e-6 at 7B)."""
    warmup: Whole = 5
    """Steps in which lr rises linearly to its full value (our choice; verl's default: 0)."""
    betas: Betas = (0.9, 0.95)
    """AdamW's decay rates (OpenRLHF's; verl's, which most papers have, are 0.9 0.999)."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay (our choice; verl's default: 0.01)."""
    grad_clip: Positive = 1.0
    """Largest gradient norm; larger gradients are scaled down to it (verl's default)."""
    clip_low: NonNegative = 0.2
    """ε of justrl.py's lower clip, which is only counted (DAPO's authors)."""
    clip_high: NonNegative = 0.28  # <own>
    """ε of its upper clip, likewise (DAPO's authors)."""
    is_cap: Positive = 5.0  # <own>
    """c: largest importance weight r (the paper gives none; ScaleRL's, as TRL has it)."""


def advantages(rewards: Tensor) -> Tensor:
    """Group z-score: `[P, G]` -> `[P, G]`. Rewards [1, 0, 0, 0] give [1.5, -0.5, -0.5, -0.5]."""
    # If all rewards are equal, all advantages must be exactly 0. But rounding makes the mean of
    # eight rewards of 0.3 not quite 0.3. So subtract the first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # If all responses are right, or all are wrong, the advantages are exactly 0: a prompt that is
    # too easy or too hard teaches nothing. The 1e-6 only prevents 0/0.
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)  # [P, G]


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
# <own>
ACTED = {
    "kept_beyond_clip": "tokens that justrl's clip would drop (share)",
    "weight_max": "largest ratio r, before its cap",
}
# </own>


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor, dict]:
    """Returns three things: the sum of the loss over the n rows of `batch`, the count that divides
    this sum, and statistics as pairs (sum, count).

    A row is one response of up to T tokens. `logp [n, T]` is of π_θ, with gradient. `Rollout` lists
    the columns of `batch`. The caller adds up the sums and the counts of all micro-batches and
    ranks, and then divides once. Dividing in each micro-batch would give the tokens of a small one
    a larger weight.
    """
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    # <own>
    ratio = (logp.detach() - batch.old_logp).exp()  # [n, T]: r, without gradient
    weight = ratio.clamp(max=args.is_cap)  # [n, T]: from above only
    objective = weight * A * logp  # [n, T]: every token keeps its gradient
    out_above, out_below = ratio > 1 + args.clip_high, ratio < 1 - args.clip_low  # [n, T]
    kept = ((A > 0) & out_above) | ((A < 0) & out_below)  # [n, T]: PPO's M would be 0
    stats = {"kept_beyond_clip": ((kept * mask).sum(), mask.sum())}
    stats["capped_share"] = ((ratio > args.is_cap) * mask).sum(), mask.sum()
    stats["weight_max"] = torch.cat([mask.new_zeros(1), ratio[mask > 0]]).max(), None
    return -(objective * mask).sum(), mask.sum(), stats  # the mean over all tokens
    # </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    policy = shard(Policy(lm), args, world)
    adam = {"betas": args.betas, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **adam)
    run = Run(args, task, world, Path(__file__).stem, ACTED)
    parts = {"engine": engine}  # what else a checkpoint holds: each has a state_dict
    done = 0  # steps trained so far
    if args.resume:
        done = load_checkpoint(run.folder, policy, optimizer, parts, world)
    engine.sync(policy)
    run.start(done)
    if done == 0:
        run.log(0, evaluate(engine, task, args, world))
    P, G = args.prompts_per_step // world.size, args.group_size  # P: this rank's prompts

    for step in run.steps():
        means = Means()

        # Rollout: this rank's P prompts, G responses each. The step number alone decides which
        # prompts are used, so a checkpoint need not save a position in the data.
        cursor = (step - 1) * args.prompts_per_step + world.rank * P
        problems = [task.train(cursor + i) for i in range(P)]
        prompts = [problem.prompt_ids for problem in problems]
        rollout = engine.generate(prompts, G, args.max_new_tokens, args.temperature)  # N = P·G rows

        # Reward and advantages. A group is never split over ranks: its mean needs no communication.
        rewards = task.score(rollout, problems, G)  # [P, G]
        rollout.advantages = advantages(rewards).flatten()  # [N]

        # Mini-batches of whole groups. In each, the ranks exchange rows until they have about
        # equally many tokens.
        minibatches = [balance_tokens(part, world) for part in rollout.split(args.minibatches)]
        # The trainer computes the log-probs of π_old, the policy that sampled. The sampler's own
        # log-probs come from other kernels. A ratio against those would mix two things: how far the
        # policy moved, and how much sampler and trainer differ (see minirl.py).
        # The first mini-batch needs no pass: until the first optimiser step π_θ is π_old.
        for minibatch in minibatches[1:]:
            minibatch.old_logp = all_logprobs(policy, minibatch, args, world).logp  # [n, T]

        # Update: one optimiser step per mini-batch, in as many micro-batches as memory requires.
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / max(1, args.warmup))
        for minibatch in minibatches:
            first = minibatch is minibatches[0]
            denominator = 0.0
            for rows in micro_batches(policy, minibatch, args.micro_tokens, world):
                micro = minibatch.rows(rows)
                logp, micro.entropy = response_logprobs(policy, micro, args.temperature)  # [n, T]
                if first:
                    micro.old_logp = logp.detach()  # [n, T]: these ratios are exactly 1
                    minibatch.put(rows, old_logp=micro.old_logp)
                loss, count, stats = policy_loss(args, logp, micro)
                loss.backward()  # a sum: gradients add up over micro-batches
                denominator = denominator + count
                # logp keeps its gradient, ∂loss/∂log π_θ: minus each token's weight on ∇ log π_θ.
                minibatch.put(rows, logp=logp.detach(), entropy=micro.entropy, weight=-logp.grad)
                means.add(loss=(loss, count), **stats)
            # Sums become means: gradients and token weights are divided by the count of all ranks.
            minibatch.weight /= divide_gradients(policy, denominator, world)
            if first:  # stop if the sampler's log-probs, μ, are far from π_old: one is broken
                means.add(**run.check_sampler(minibatches))
            norm = clip_gradients(policy, args.grad_clip)
            means.add(**run.check_gradient(norm, minibatch))  # stops if several in a row are NaN
            if math.isfinite(norm):  # else skip the step
                optimizer.step()
            optimizer.zero_grad()
            means.add(**metrics_by_sign(minibatch))
        engine.sync(policy)

        means.add(**rollout_metrics(rollout, G, task))
        metrics = means.reduce(world) | {"lr": optimizer.param_groups[0]["lr"]}
        if run.due(step, args.eval_every):
            metrics |= evaluate(engine, task, args, world)
        run.log(step, metrics, minibatches)  # before saving, so that no kill can lose this line
        if run.due(step, args.save_every):
            save_checkpoint(run.folder, step, policy, optimizer, parts, world)
    if args.save_hf:
        save_model(policy, tokenizer, run.folder / "model", world)
    run.finish()


if __name__ == "__main__":
    launch(main, Args)
