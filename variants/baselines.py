"""Baselines: what is subtracted from a reward, and what it is divided by.

RLOO: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from
Human Feedback in LLMs", 2024, arXiv 2402.14740.

Objective, over all response tokens y_t of a mini-batch, with r = π_θ(y_t) / π_old(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t min(r Â_i, clip(r, 1-ε_low, 1+ε_high) Â_i)
    Â_i by `--baseline`, below

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    M r Â
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

The file has five more methods: REINFORCE (Williams, 1992), REINFORCE++ and its form with a group's
mean (Hu et al., 2501.03262), MaxRL (2602.02710), and the divisor of ScaleRL (2510.13786).

    --baseline  method                  Â_i                                    a group all right
    none        REINFORCE               R_i                                    1
    rloo        RLOO                    R_i - mean of the group's others       0
    batch       REINFORCE++             whitened R_i                           positive
    group       REINFORCE++-baseline    whitened (R_i - group's mean)          0, nearly
    maxrl       MaxRL                   (R_i - group's mean) / group's mean    0
    scalerl     ScaleRL                 (R_i - group's mean) / their std       0

Any number that does not depend on y_i may be subtracted without changing the expected gradient; it
changes the variance. REINFORCE pushes every right answer up and no wrong one down. The group's mean
contains R_i: with it the gradient is (G-1)/G of the true one. RLOO removes this factor, as its
advantage is G/(G-1) (R_i - mean R). Whitening subtracts the batch's mean and divides by its
standard deviation.

With a batch's mean, prompts compete. Answers to a prompt that is always solved are above it and
pushed up; most answers to a hard prompt are pushed down. A group's mean compares only answers to
one prompt. A batch's std rescales all prompts alike, whereas the group's std in GRPO gives prompts
near 0 or 1 a larger weight. MaxRL's division gives hard prompts the weight 1/p, so its gradient is
that of log p instead of p. ScaleRL's std is that of all R_i - group's mean in the batch. `none` and
`batch` need no group, so `--group_size 1` is enough.

Base file: justrl.py. Differs from it in:
1. Advantages by `--baseline`; the batch is the rollout, over all ranks.

Differs from the papers in:
1. All have the same loss, with clip and without KL. REINFORCE++ has the k1 estimate in its reward.
   RLOO takes one step per rollout and has no clip.
2. Whitening counts each response as often as it has tokens, as verl does, since each token has its
   response's advantage. verl puts 1e-8 into the root; here 1e-6 is added to the std. `group` also
   subtracts the mean of R_i - group's mean over the batch's tokens. It is not 0 if longer responses
   are worse.
3. MaxRL where no answer is right: 0, as in prime-rl.
4. ScaleRL is more than its advantages: CISPO's loss, averaged by prompt, a float32 head, no
   zero-variance prompts, and no prompts again that were solved at 0.9. TRL's
   `scale_rewards="batch"` divides by the std of the rewards. This number also contains differences
   between prompts, so it is larger.

Confidence: RLOO and REINFORCE++ as in verl and TRL; ScaleRL's division as in its paper; MaxRL as in
prime-rl. The papers' other choices are second hand.

Run it:
    torchrun -m variants.baselines                          # laptop, 2 to 4 minutes, no download
    # a node of eight
    torchrun --nproc_per_node=8 -m variants.baselines --task dapo-math-17k --eval_task aime24 \\
        --model Qwen/Qwen3-1.7B-Base --baseline batch --prompts_per_step 128 --group_size 8 \\
        --max_new_tokens 8192 --lr 1e-6 --gradient_checkpointing
"""

from dataclasses import dataclass
import math
from pathlib import Path
from typing import Literal  # <own>

from common.batch import Rollout, balance_tokens
from common.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard
from common.distributed import ALONE, global_sum  # <own>
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
    """ε of the lower clip (authors' script)."""
    clip_high: NonNegative = 0.28  # <own>
    """ε of the upper clip (authors' script)."""
    baseline: Literal["none", "rloo", "batch", "group", "maxrl", "scalerl"] = "rloo"  # <own>
    """How Â is computed (see the table above)."""

    def compares(self) -> bool:  # <own>
        return self.baseline not in ("none", "batch")  # <own>


# <own>
def advantages(
    rewards: Tensor, how: str = "rloo", sizes: Tensor | None = None, world: World = ALONE
) -> Tensor:
    """`[P, G]` -> `[P, G]`; sizes `[P, G]`: tokens of each response (1 if not given).

    Rewards [1, 0, 0, 0] give 1 and 0s (none), 1 and -1/3s (rloo), 3 and -1s (maxrl).
    """
    # If all rewards are equal, all advantages must be exactly 0. But rounding makes the mean of
    # eight rewards of 0.3 not quite 0.3. So subtract the first reward from all of them.
    equal = rewards - rewards[:, :1]  # [P, G]
    centred, G = equal - equal.mean(dim=1, keepdim=True), rewards.shape[1]  # [P, G]
    each = torch.ones_like(rewards)  # [P, G]
    if how == "none":
        return rewards
    if how == "rloo":
        return centred * (G / (G - 1))
    if how == "maxrl":
        mean = rewards.mean(dim=1, keepdim=True)  # [P, 1]
        return torch.where(mean > 0, centred / mean, 0.0)
    if how == "scalerl":
        return centred / (moments(centred, each, world)[1] + 1e-6)
    values = rewards if how == "batch" else centred  # [P, G]
    mean, std = moments(values, each if sizes is None else sizes, world)
    return (values - mean) / (std + 1e-6)


def moments(values: Tensor, sizes: Tensor, world: World) -> tuple[float, float]:
    """Mean and sample standard deviation over all ranks; each value counts `sizes` times."""
    values = values.double()  # [P, G]: in float64 the mean of any number of 0.3 is exactly 0.3
    sums = global_sum({"n": sizes.sum(), "sum": (sizes * values).sum()}, world)
    mean = sums["sum"] / sums["n"]
    squares = global_sum({"sum": (sizes * (values - mean).square()).sum()}, world)["sum"]
    return mean, (squares / max(1.0, sums["n"] - 1)) ** 0.5


def effect(rewards: Tensor, advantages: Tensor) -> dict[str, tuple[Tensor, Tensor | int]]:
    """Metrics as (sum, count) pairs: the distance of Â from R minus the group's mean, and the share
    of Σ |Â| in zero-variance groups."""
    idle = (rewards == rewards[:, :1]).all(dim=1)  # [P]
    apart = (advantages - (rewards - rewards.mean(dim=1, keepdim=True))).abs()  # [P, G]
    size = advantages.abs()  # [P, G]
    return {"apart": (apart.sum(), apart.numel()), "idle_push": (size[idle].sum(), size.sum())}


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
ACTED = {
    "apart": "distance of Â from R minus the group's mean, mean",
    "idle_push": "share of |Â| in zero-variance groups",
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
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r. It is 1 before the rollout's first step
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
    # min, and not the clip alone: a token that moved in the wrong direction keeps its gradient, so
    # that it can come back.
    objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    out_above, out_below = ratio > 1 + args.clip_high, ratio < 1 - args.clip_low  # [n, T]
    cut = ((A > 0) & out_above) | ((A < 0) & out_below)  # [n, T]: M = 0
    stats = {"clip_share": ((cut * mask).sum(), mask.sum())}
    stats["clip_above"] = ((cut & out_above) * mask).sum(), mask.sum()
    stats["clip_below"] = ((cut & out_below) * mask).sum(), mask.sum()
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
        # <own>
        sizes = rollout.mask.sum(dim=1).view(P, G)  # [P, G]
        A = advantages(rewards, args.baseline, sizes, world)  # [P, G]
        rollout.advantages = A.flatten()  # [N]
        means.add(**effect(rewards, A))
        # </own>

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
