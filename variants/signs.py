"""Signs: separate weights for right and wrong responses, and outliers left out.

Zhu et al., "The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning",
2025, arXiv 2506.01347.

Objective, for G responses y_i to one prompt, with r = π_θ(y_t) / π_old(y_t) for each token y_t:

    J = 1/G Σ_i 1/|y_i| Σ_t { min(r u_i Â_i, clip(r, 1-ε, 1+ε) u_i Â_i) - β k3 }
    Â_i = (R_i - mean R) / std R
    u_i = λ if Â_i > 0, else 1;    0 if y_i is an outlier
    k3 = π_ref/π_θ - log(π_ref/π_θ) - 1

Gradient weight on ∇ log π_θ(y_t), before the two averages:

    M r u Â + β (π_ref/π_θ - 1)        (with `--kl_ratio` the second term is β r log(π_ref/π_θ))
    M = 0 if (Â > 0 and r > 1+ε) or (Â < 0 and r < 1-ε), else 1

k3 is grpo.py's, a KL term towards π_ref. This file tests two pieces of advice for stability.

The first is to give right and wrong responses different weights. Which of them should weigh more is
disputed. The usual advice gives wrong ones a small weight: pushing a sampled token down lifts all
others, most of all the most likely one, whether it is good or not. arXiv 2505.18830 finds that
right tokens fall together with the wrong response they are in. This paper finds the opposite. A
response that is pushed up is sampled more and pushed up again, until only one is left: pass@1 rises
and pass@k falls. Pushing wrong responses down spreads their probability over the rest. Wrong ones
alone (λ = 0) often match PPO and GRPO, and λ = 0.1, the authors' choice, improves pass@k on the
whole. Adam cancels a common scale, so λ sets a ratio: 10 is the advice, 0.1 the paper, 1 grpo.py.
The lab labs/signs shows both sides on one prompt. It also shows that half of a z-score is not the
paper's half: it does not find rare right answers.

The second is to leave outliers out, here by length and by mean log-probability. No source gives
numbers, and an outlier need not be noise. In 30 default steps (seed 1) 3% of the responses were
outliers, and 94% of those were wrong: once most responses are right, a wrong one is unusual. So the
filter removes the responses that the paper found most useful. We do not filter by reward: the one
right answer to a hard prompt would be an outlier, too.

Base file: grpo.py. Differs from it in:
1. Positive advantages times λ.
2. Outliers get the advantage 0. They stay in the baseline, in the mean and in the KL term.
3. `--baseline none`, the paper's: Â = 1 for a right response and -1 for a wrong one.

Differs from the paper in:
1. The paper has no baseline: the advantage is λ for a right response and -1 for a wrong one, so a
   group without any right response is pushed down. By default ours weights the group's z-scores,
   which are 0 there.
2. The paper leaves no outliers out.
3. The paper has the mean over tokens, no KL term, and an entropy bonus of 0.001. Its scripts keep
   this default of verl, and ε 0.2. It also makes four updates per rollout, but PSR and NSR (λ = 0)
   first drop the responses without weight, and make fewer updates.

Confidence: we read λ, sizes and settings in the authors' code, and the findings in the abstracts.
The filter is ours.

Run it:
    torchrun -m variants.signs                              # laptop, 2 to 4 minutes, no download
    torchrun -m variants.signs --baseline none --outliers 0 --beta 0    # W-REINFORCE; NSR with
    #                                                                     --positive_weight 0
    # a node of eight, the authors' sizes (they have 7B)
    torchrun --nproc_per_node=8 -m variants.signs --model Qwen/Qwen2.5-Math-1.5B --task math \\
        --eval_task math500 --prompts_per_step 1024 --group_size 8 --max_new_tokens 3072 \\
        --lr 1e-6 --warmup 0 --beta 0 --outliers 0 --baseline none --micro_tokens 8192
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
from common.distributed import gather  # <own>
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from common.logprobs import frozen_reference  # <own>
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
    """ε of the lower clip, which is at 1 - ε (PPO's value; DeepSeekMath gives none)."""
    clip_high: NonNegative = 0.2
    """ε of the upper clip, which is at 1 + ε (our choice; DAPO and STAPO: 0.28)."""
    # <own>
    beta: NonNegative = 0.01
    """β of the KL term; 0: no reference model (our choice; DeepSeekMath: 0.04, R1: 0.001)."""
    kl_ratio: bool = False
    """Multiply k3 by r, so that its gradient is the gradient of the KL (DeepSeek-V3.2)."""
    positive_weight: NonNegative = 0.1
    """λ: weight of right responses; 0: learn only from wrong ones (paper)."""
    baseline: Literal["group", "none"] = "group"
    """group: Â is the group's z-score; none: 1 for a right response, -1 for a wrong one (paper)."""
    outliers: NonNegative = 3.0
    """k: a response is an outlier if its length or its mean log μ is more than k standard
    deviations from the rollout's mean; 0: off (our choice)."""
    # </own>


def advantages(rewards: Tensor) -> Tensor:
    """Group z-score: `[P, G]` -> `[P, G]`. Rewards [1, 0, 0, 0] give [1.5, -0.5, -0.5, -0.5]."""
    # If all rewards are equal, all advantages must be exactly 0. But rounding makes the mean of
    # eight rewards of 0.3 not quite 0.3. So subtract the first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # If all responses are right, or all are wrong, the advantages are exactly 0: a prompt that is
    # too easy or too hard teaches nothing. The 1e-6 only prevents 0/0.
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)  # [P, G]


# <own>
def signs(rewards: Tensor) -> Tensor:
    """Without a baseline: `[P, G]` -> `[P, G]`. Rewards [1, 0, 0, 0] give [1, -1, -1, -1]."""
    return 2 * rewards - 1  # with λ: R - 1 + λ R, whose mean gradient is (1 + λ) ∇p


def measures(rollout: Rollout) -> Tensor:
    """The length and the mean log μ of each response: `[N, 2]`."""
    lengths = rollout.mask.sum(1)  # [N]
    return torch.stack([lengths, rollout.rollout_logp.sum(1) / lengths], dim=1).double()


def outliers(args: Args, own: Tensor, every: Tensor) -> Tensor:
    """True `[N]` where one of the measures `own [N, 2]` is more than k standard deviations from the
    mean of `every [M, 2]`, those of all ranks."""
    # 1e-5: if all are alike, rounding makes no outlier.
    limit = args.outliers * every.std(0, correction=0) + 1e-5  # [2]
    return ((own - every.mean(0)).abs() > limit).any(1) & (args.outliers > 0)


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
ACTED = {
    "damped": "advantages taken away (share of Σ |Â|)",
    "outlier_share": "outliers (share of responses)",
    "outlier_reward": "their reward",
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
    A = torch.where(A > 0, args.positive_weight * A, A)  # [n, 1]: u Â
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
    stats["damped"] = (batch.advantages.abs() - A[:, 0].abs()).sum(), batch.advantages.abs().sum()
    if args.beta > 0:
        log_ref_ratio = batch.ref_logp - logp  # [n, T]: log(π_ref/π_θ), not log(π_θ/π_ref)
        k3 = log_ref_ratio.exp() - log_ref_ratio - 1  # [n, T]
        k3 = ratio * k3 if args.kl_ratio else k3  # [n, T]: r has a gradient too
        objective = objective - args.beta * k3  # [n, T]
        stats["ref_kl"] = ((k3 * mask).sum(), mask.sum())
    per_response = (objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # [n]: 1/|y_i|
    # The caller divides by the responses of this mini-batch, on all ranks: 1/G, and the mean over
    # prompts.
    return -per_response.sum(), mask.new_tensor(len(mask)), stats  # sum, count
    # </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    reference = frozen_reference(args, lm, world)  # π_ref; None if β is 0  # <own>
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
        # <own>
        if args.baseline == "none":
            rollout.advantages = signs(rewards).flatten()  # [N]
        own = measures(rollout)  # [N, 2]
        odd = outliers(args, own, gather(own, world))  # [N]
        rollout.advantages[odd] = 0.0  # after the baseline, which counts them
        means.add(outlier_share=(odd.sum(), len(odd)))
        means.add(outlier_reward=(rewards.flatten()[odd].sum(), odd.sum()))
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
        # <own>
        if reference:
            for minibatch in minibatches:
                minibatch.ref_logp = all_logprobs(reference, minibatch, args, world).logp  # [n, T]
        # </own>

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
