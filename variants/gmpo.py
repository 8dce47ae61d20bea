"""GMPO: Geometric-Mean Policy Optimization.

Zhao et al., "Geometric-Mean Policy Optimization",
2025, arXiv 2507.20673.

Objective, for G responses y_i to one prompt, with r = π_θ(y_t) / π_old(y_t) for each token y_t:

    J = 1/G Σ_i s_i Â_i
    s_i = exp( 1/|y_i| Σ_t c(log r) )
    c(x) = min(x, ε_high) if Â_i > 0, else max(x, -ε_low);    Â_i = (R_i - mean R) / std R

Gradient weight on ∇ log π_θ(y_t), before the mean over responses:

    M_t s_i Â_i / |y_i|
    M_t = 0 if (Â_i > 0 and log r > ε_high) or (Â_i < 0 and log r < -ε_low), else 1

GRPO averages r Â over a response, an arithmetic mean. One outlier of r = 20 is a sixth of the
objective of a hundred tokens. The geometric mean of the same ratios is GSPO's s_i; there the
outlier moves s by 3%. GSPO takes the mean and then clips s: a response is in or out as a whole.
GMPO clips each log r and then takes the mean. A token beyond ε has no gradient any more, and it can
change s by ε / |y| at most. The other tokens keep their gradient. So the bound can be much wider
than PPO's: 0.67 to 1.49 instead of 0.8 to 1.2.

A token that moved against its advantage is not bounded, as under PPO's min: a token with Â < 0 and
r = 20 still raises s. It, too, is only one of |y| tokens.

Base file: gspo.py. Differs from it in:
1. The clip comes before the mean, on each token's log r, and is 0.4 wide.
2. No count of the tokens that GRPO would clip.

Differs from the paper in:
1. Model, data and the run's size: the authors' script for Qwen2.5-Math-7B has rollouts of 128
   prompts x 8 responses, lr 1e-6, no KL term.
2. Four optimiser steps per rollout. The script goes through it once, in batches of 128: eight
   steps, if these are responses.

Confidence: we read clip, order, one-sidedness, 0.4 and the division by std in the authors' code
(github.com/callsys/GMPO, July 2025). verl's `geo_mean`, which names that script as its source,
gives the same numbers. We have not read the paper itself.

Run it:
    torchrun -m variants.gmpo                               # laptop, 2 to 4 minutes, no download
    torchrun -m variants.gmpo --clip_low 0.05 --clip_high 0.05    # where the clip acts
    # a node of eight, sizes are ours
    torchrun --nproc_per_node=8 -m variants.gmpo --model Qwen/Qwen3-1.7B-Base --lr 1e-6 \\
        --task dapo-math-17k --eval_task aime24 --prompts_per_step 64 --group_size 16 \\
        --max_new_tokens 8192 --gradient_checkpointing
"""

from dataclasses import dataclass
import math
from pathlib import Path

from common.batch import Rollout
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard
from common.logprobs import Policy, all_logprobs, frozen_reference, micro_batches
from common.logprobs import response_logprobs
from common.plumbing.balance import balance_tokens
from common.plumbing.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.plumbing.evaluation import evaluate
from common.plumbing.flags import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.plumbing.launch import launch
from common.plumbing.metrics import Means, by_sign, of_rollout
from common.plumbing.model import load_model
from common.plumbing.tracking import Run
from common.rollout import make_engine
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
    clip_low: NonNegative = 0.4  # <own>
    """ε below 0, of log r: r down to 0.67 (paper)."""
    clip_high: NonNegative = 0.4  # <own>
    """ε above 0, of log r: r up to 1.49 (paper)."""


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
ACTED = {"clip_share": "tokens clipped (share)"}  # <own>


def policy_loss(
    args: Args, logp: Tensor, entropy: Tensor, batch: Rollout
) -> tuple[Tensor, Tensor, dict]:
    """Returns three things: the sum of the loss over the n rows of `batch`, the count that divides
    this sum, and statistics as pairs (sum, count).

    A row is one response of up to T tokens. `logp` (with gradient) and `entropy` are of π_θ, both
    `[n, T]`. `Rollout` lists the columns of `batch`. The caller adds up the sums and the counts of
    all micro-batches and ranks, and then divides once. Dividing in each micro-batch would give the
    tokens of a small one a larger weight.
    """
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    # <own>
    log_ratio = (logp - batch.old_logp) * mask  # [n, T]: padding must not enter the mean
    clipped = log_ratio.clamp(-args.clip_low, args.clip_high)  # [n, T]
    # Each token's own min, in logs: the bound that is worse for J. A token that moved in the wrong
    # direction keeps its ratio and its gradient.
    bounded = torch.where(A > 0, log_ratio.minimum(clipped), log_ratio.maximum(clipped))  # [n, T]
    # The mean comes after the clip, so one token can change s by ε / |y| at most.
    s = (bounded.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).exp()  # [n]
    objective = s * batch.advantages  # [n]
    out_above, out_below = log_ratio > args.clip_high, log_ratio < -args.clip_low  # [n, T]
    cut = ((A > 0) & out_above) | ((A < 0) & out_below)  # [n, T]: M = 0
    stats = {
        "clip_share": ((cut * mask).sum(), mask.sum()),
        "clip_above": (((cut & out_above) * mask).sum(), mask.sum()),
        "clip_below": (((cut & out_below) * mask).sum(), mask.sum()),
    }
    return -objective.sum(), mask.new_tensor(len(mask)), stats  # sum, count
    # </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    reference = frozen_reference(args, lm, world)  # π_ref; None without a KL term
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

    for step in run.steps(done, args.steps):
        means = Means()

        # Rollout: this rank's P prompts, G responses each. The step number alone decides which
        # prompts are used, so a checkpoint need not save a position in the data.
        cursor = (step - 1) * args.prompts_per_step + world.rank * P
        problems = [task.train(cursor + i) for i in range(P)]
        prompts = [problem.prompt_ids for problem in problems]
        rollout = engine.generate(prompts, G, args.max_new_tokens, args.temperature)  # N = P·G rows

        # Reward and advantages. A group is never split over ranks: its mean needs no communication.
        rewards = task.score(rollout, problems, means)  # [P, G]
        rollout.advantages = advantages(rewards).flatten()  # [N]

        # Mini-batches of whole groups. In each, the ranks exchange rows until they have about
        # equally many tokens.
        minibatches = [balance_tokens(part, world) for part in rollout.split(args.minibatches)]
        # The trainer computes the log-probs of π_old, the policy that sampled. The sampler's own
        # log-probs come from other kernels. A ratio against those would mix two things: how far the
        # policy moved, and how much sampler and trainer differ (see minirl.py).
        # The micro-batches are those of the update. With others, rounding would make the first
        # ratios differ from 1.
        for minibatch in minibatches:
            minibatch.old_logp, _ = all_logprobs(policy, minibatch, args, world)  # [n, T]
            if reference:
                minibatch.ref_logp, _ = all_logprobs(reference, minibatch, args, world)
        # Stop if the sampler's log-probs, μ, are far from π_old: then one of the two is broken.
        sampler = run.check_sampler(minibatches)

        # Update: one optimiser step per mini-batch, in as many micro-batches as memory requires.
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / max(1, args.warmup))
        for minibatch in minibatches:
            denominator = 0.0
            for rows in micro_batches(policy, minibatch, args.micro_tokens, world):
                micro = minibatch.rows(rows)
                logp, entropy = response_logprobs(policy, micro, args.temperature)  # [n, T]
                loss, count, stats = policy_loss(args, logp, entropy, micro)
                loss.backward()  # a sum: gradients add up over micro-batches
                denominator = denominator + count
                minibatch.put(rows, logp=logp.detach(), entropy=entropy, weight=-logp.grad)
                means.add(loss=(loss, count), **stats)
            # From sums to means: by the count of all ranks. So are the weights of the tokens.
            minibatch.weight /= divide_gradients(policy, denominator, world)
            norm = clip_gradients(policy, args.grad_clip)
            run.check_gradient(norm, minibatch, means)  # stops if several in a row are NaN
            if math.isfinite(norm):  # else skip the step
                optimizer.step()
            optimizer.zero_grad()
            means.add(**by_sign(minibatch))
        engine.sync(policy)

        means.add(**of_rollout(rollout, rewards, task))
        metrics = means.reduce(world) | sampler | {"lr": optimizer.param_groups[0]["lr"]}
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
