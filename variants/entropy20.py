"""80/20: trains only the tokens at which the policy was uncertain.

Wang et al. (Qwen, Tsinghua), "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective
Reinforcement Learning for LLM Reasoning", 2025, arXiv 2506.01939.

Objective, over all response tokens y_t of a mini-batch, with r = π_θ(y_t) / π_old(y_t):

    J = 1/(Σ_i Σ_t I) Σ_i Σ_t I min(r Â_i, clip(r, 1-ε_low, 1+ε_high) Â_i)
    Â_i = (R_i - mean R) / std R
    I = 1 if H_t >= τ, else 0;    τ = the 80% quantile of H_t    (of π_θ now, no gradient)

Gradient weight on ∇ log π_θ(y_t), before the average over the tokens kept:

    I M r Â
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

H_t is the entropy of π_θ where y_t was drawn; the quantile is over the mini-batch. Most tokens of a
worked answer were certain before they were drawn: the end of a word, the digits of a result. A few
tokens are forks, at which the policy could have continued in different ways. The authors train only
these, with both signs. They report the accuracy of training on all tokens at 8B, and a higher one
at 14B and 32B; the other 80% alone do much worse.

Little is lost, because a token of probability near 1 has almost no gradient (at H = 0 none). At the
kept tokens nothing is biased. H depends on the place, not on the token drawn there: at a fork every
token is trained, elsewhere none. stapo.py selects by the drawn token, and only rewarded ones. Here
an improbable token at a place of low entropy, which has the largest gradient of all, is left out
when it is punished, too.

Another rule, KL-Cov, chooses tokens by their effect on the entropy (Cui et al., "The Entropy
Mechanism of Reinforcement Learning for Reasoning Language Models", 2025, arXiv 2505.22617). To
first order a step lowers the entropy by the covariance of log π_θ and Â. The authors find that few
tokens contribute far more to it than the others:

    c = (log π_θ(y_t) - mean) (Â_i - mean)           both means over the mini-batch's tokens
    --tokens kl_cov      r Â - |log r| at the 0.2% of the largest c, r Â elsewhere: no clip

Base file: stapo.py. Differs from it in:
1. The mask I: by entropy alone, for right and wrong responses; or by covariance.

Differs from the paper in:
1. No dynamic sampling and no overlong punishment (the paper builds on DAPO). Tokens of
   zero-variance groups are in the quantile and in the denominator.
2. τ is the quantile over the mini-batch of all ranks together. The authors' code takes the top 20%
   of each micro-batch, so memory decides which tokens are trained.
3. No bound on r where Â < 0. The authors' script passes `clip_ratio_c=10`, verl's bound.
4. Covariances, too, are of the mini-batch over all ranks, under π_θ when it begins; verl's are of a
   micro-batch. The 0.2% is a quantile, rounded up.
TRL (`top_entropy_quantile`) divides by all tokens: the same gradient, five times smaller.

Confidence: objective and ε are as in the paper and the authors' code; TRL's numbers agree, except
for that factor. The code shows that π_θ's entropies are meant, not π_old's. KL-Cov is as in verl's
code. Its 0.2% and coefficient 1 are from scripts for 7B, read in copies; verl's are 0.02% and, in
its configuration, 0.1.

Run it:
    torchrun -m variants.entropy20                          # laptop, 2 to 4 minutes, no download
    torchrun -m variants.entropy20 --tokens kl_cov          # by the covariance instead
    # a node of eight; the paper's rollout, with 16 mini-batches and no warm-up
    torchrun --nproc_per_node=8 -m variants.entropy20 --model Qwen/Qwen3-8B-Base \\
        --task dapo-math-17k --eval_task aime24 --prompts_per_step 512 --group_size 16 \\
        --minibatches 16 --max_new_tokens 20480 --lr 1e-6 --warmup 0 --tensor_parallel 2 \\
        --gradient_checkpointing --vllm_sleep --vllm_memory 0.7
"""

from dataclasses import dataclass
import math
from pathlib import Path
from typing import Literal

from common.batch import Rollout, balance_tokens
from common.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.cli import Share  # <own>
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard
from common.distributed import gather  # <own>
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from common.logprobs import entropies
from common.metrics import Means, evaluate, metrics_by_sign, rollout_metrics
from common.model import load_model
from common.rollout import make_engine
from common.run import Run
import numpy  # <own>
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
    """ε of the lower clip (paper)."""
    clip_high: NonNegative = 0.28  # <own>
    """ε of the upper clip (paper)."""
    top_entropy: Share = 0.2  # <own>
    """Share of the tokens that are trained: those of the largest entropy (paper)."""
    # <own>
    tokens: Literal["entropy", "kl_cov"] = "entropy"
    """Rule that chooses tokens: by entropy those that are trained; or by the covariance of log π_θ
    and Â those that are kept near π_old (kl_cov)."""
    kl_cov_share: Share = 2e-3
    """kl_cov: share of tokens kept near π_old, by largest covariance (7B script; verl: 2e-4)."""
    kl_cov_coef: NonNegative = 1.0
    """κ, kl_cov: coefficient of |log r| there (scripts; verl: 0.1)."""
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
def top_threshold(share: float, pool: Tensor) -> Tensor:
    """τ: this share of the values `[M]` is at least τ."""
    if len(pool) == 0:
        return pool.new_tensor(0.0)
    values = pool.cpu().numpy()  # torch.quantile takes at most 2^24 numbers
    return pool.new_tensor(numpy.quantile(values, 1 - share))


def choose_tokens(args: Args, batch: Rollout, world: World) -> None:
    """Write the column `chosen` `[m, T]`: the tokens that `--tokens` chooses from a mini-batch of
    all ranks."""

    def pooled(values: Tensor) -> Tensor:
        return gather(values, world)

    on, logp = batch.mask.bool(), batch.logp  # [m, T], [m, T]
    score, share = batch.entropy, args.top_entropy  # [m, T]
    if args.tokens == "kl_cov":
        A = batch.advantages[:, None].expand_as(logp)  # [n, T]
        score = (logp - pooled(logp[on]).mean()) * (A - pooled(A[on]).mean())  # [n, T]: c
        share = args.kl_cov_share
    # Responses of a group begin alike; rounding must not make them differ
    batch.chosen = score >= top_threshold(share, pooled(score[on])) - 1e-5


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
ACTED = {
    "left_out": "tokens not trained (share)",
    "fork_entropy": "entropy of those trained (nats)",
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
    objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    out_above, out_below = ratio > 1 + args.clip_high, ratio < 1 - args.clip_low  # [n, T]
    clips = args.tokens != "kl_cov"
    cut = (((A > 0) & out_above) | ((A < 0) & out_below)) & clips  # [n, T]: M = 0
    chosen = batch.chosen  # [n, T]
    kept = mask * (chosen if args.tokens == "entropy" else True)  # [n, T]: I
    stats = {"clip_share": ((cut * mask).sum(), mask.sum())}
    stats["clip_above"] = ((cut & out_above) * mask).sum(), mask.sum()
    stats["clip_below"] = ((cut & out_below) * mask).sum(), mask.sum()
    if args.tokens == "kl_cov":
        pull = args.kl_cov_coef * (logp - batch.old_logp).abs() * chosen  # [n, T]
        objective = ratio * A - pull  # [n, T]
        stats["held_share"] = (mask * chosen).sum(), mask.sum()
        stats["held_pull"] = (pull.detach() * mask).sum(), (mask * chosen).sum()
    else:
        stats["left_out"] = (mask - kept).sum(), mask.sum()
        stats["fork_entropy"] = (batch.entropy * kept).sum(), kept.sum()
    return -(objective * kept).sum(), kept.sum(), stats  # a mean over the tokens left
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
            # <own>
            # H of the whole mini-batch under π_θ, on all ranks: τ before any gradient.
            now = all_logprobs(policy, minibatch, args, world, entropies)
            minibatch.logp, minibatch.entropy = now.logp, now.statistic  # [m, T], [m, T]
            choose_tokens(args, minibatch, world)
            # </own>
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
