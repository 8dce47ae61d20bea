"""Lp-Reg: low-probability regularisation, which protects rare negative-advantage tokens.

Huang et al. (Tencent), "Low-probability Tokens Sustain Exploration in Reinforcement Learning with
Verifiable Reward", 2025, arXiv 2510.03222.

Objective, over all response tokens y_t of a mini-batch, with r = π_θ(y_t) / π_old(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t { min(r Â_i, clip(r, 1-ε_low, 1+ε_high) Â_i) - β I k3 }
    I = 1 if Â_i < 0 and π_θ(y_t) <= δ and π_θ(y_t) < π_proxy(y_t), else 0
    k3 = π_proxy/π_θ - log(π_proxy/π_θ) - 1
    π_proxy = π_old without the tokens of p < κ max p, renormalised;    Â_i = (R_i - mean R) / std R

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    M r Â + β I (π_proxy/π_θ - 1)
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

δ is the ρ-quantile of π_θ(y_t) over the mini-batch's negative-advantage tokens. A rare token in a
bad response is pushed down with it, whether it was to blame or not. It is seldom drawn, so right
responses seldom push it up again. In the authors' runs rare ways to continue ("wait", "but")
disappear, and exploration with them. An entropy bonus would raise noise as well. Lp-Reg separates
the two by relative probability: a token with less than κ of the most likely token's probability is
noise and is not protected. The rarest of the other tokens get a second term. It is 0 at π_proxy and
pulls up below it, more strongly the further a token has fallen.

With nothing filtered out, Â = -1 and β = 1, the weight is -r + 1/r - 1, which is 0 at r = 0.62. So
such a token, left alone, falls to three fifths within a rollout and no further. On-policy the term
is small: at r = 1 it is the filtered probability over the rest. PPO's clip would end the fall at
0.8. The authors' clip has no lower bound (ε_low = 1), so only the regulariser acts. A clip only
stops pushing, so other tokens can still drag a token down; the regulariser pulls it back.

Base file: justrl.py. Differs from it in:
1. The term β I k3, from a column π_proxy that the pass for π_old computes, too.
2. ε_low = 1, ε_high = 9: in effect r <= 10 where Â > 0, and no bound where Â < 0.
3. One more forward pass per mini-batch: δ is a quantile of π_θ over all of it.

Differs from the paper in:
1. δ is over the mini-batch of all ranks together, and at least one token is at or below it. The
   authors' code sorts each micro-batch. So memory decides which tokens are protected, and none is
   if ρ of the micro-batch's negative-advantage tokens is less than two.
2. k3 is not cut. The authors' code takes verl's k3, cut at 10. This removes the gradient of a token
   that has fallen to a thirteenth of π_proxy, where it is needed most.
3. As in the authors' code, k3 is of the sampled token, and π_proxy > π_θ is required. The paper
   writes KL(π_proxy ‖ π_θ) and requires π_proxy > 0.
4. ρ is 0.05 here, 0.01 at 14B and 0.005 at 32B. A mini-batch here has a few hundred
   negative-advantage tokens. 0.01 of them are two to five tokens, most of them noise by κ.
5. The authors' README shows on-policy runs, with one optimiser step per rollout: the second
   command. There r = 1, and the term is only the filtered probability over the rest.

Confidence: we read loss, proxy, constants and sizes in the authors' code; the paper's own formula
is second hand.

Run it:
    torchrun -m variants.lp_reg                             # laptop, 2 to 4 minutes, no download
    torchrun -m variants.lp_reg --minibatches 1             # on-policy
    # a node of eight, the authors' sizes off-policy (they have 14B on eight nodes)
    torchrun --nproc_per_node=8 -m variants.lp_reg --model Qwen/Qwen3-8B-Base \\
        --task dapo-math-17k --eval_task aime24 --prompts_per_step 256 --group_size 8 \\
        --minibatches 8 --max_new_tokens 8192 --max_prompt_tokens 2048 --lr 1e-6 --warmup 0 \\
        --rare_share 0.01 --tensor_parallel 2 --gradient_checkpointing
"""

from dataclasses import dataclass
import math
from functools import partial  # <own>
from pathlib import Path

from common.batch import Rollout, balance_tokens
from common.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.cli import PositiveShare, Share  # <own>
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard
from common.distributed import gather  # <own>
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
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
    # <own>
    clip_low: NonNegative = 1.0
    """ε of the lower clip; at 1 there is no lower bound (authors' script)."""
    clip_high: NonNegative = 9.0
    """ε of the upper clip (authors' script)."""
    rare_share: Share = 0.05
    """ρ: share of negative-advantage tokens, the rarest ones, that may be protected (our choice;
    paper: 0.01 at 14B, 0.005 at 32B)."""
    kappa: PositiveShare = 0.02
    """κ: a token below this share of the most likely token's probability is noise (paper)."""
    proxy_weight: NonNegative = 1.0
    """β of the protecting term (authors' script)."""
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
def proxy_logprobs(logprobs: Tensor, tokens: Tensor, kappa: float) -> Tensor:
    """log π_proxy of the tokens `[b]`, given log π_old `[b, V]`; -inf for filtered tokens."""
    noise = logprobs.exp() < kappa * logprobs.amax(-1, keepdim=True).exp()  # [b, V]
    left = logprobs.masked_fill(noise, -torch.inf)  # [b, V]
    return left.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def rare_threshold(args: Args, logp: Tensor) -> Tensor:
    """log δ, given log π_θ `[M]` of all negative-advantage tokens; below all tokens if M is 0."""
    if len(logp) == 0:
        return logp.new_tensor(-torch.inf)
    values = logp.detach().cpu().numpy()  # torch.quantile takes at most 2^24 numbers
    return logp.new_tensor(numpy.quantile(values, args.rare_share))


def choose_tokens(args: Args, batch: Rollout, world: World) -> None:
    """Write the column `rare` `[m, T]` of a mini-batch, whose δ is one of all ranks."""
    bad = (batch.advantages[:, None] < 0) & batch.mask.bool()  # [m, T]
    threshold = rare_threshold(args, gather(batch.logp[bad], world))  # []: log δ
    # 1e-5: responses of a group begin alike, and rounding must not make their tokens differ.
    batch.rare = bad & (batch.logp <= threshold + 1e-5)  # [m, T]


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
ACTED = {
    "protected_share": "negative-advantage tokens protected (share)",
    "protected_pull": "their pull upwards, β (π_proxy/π_θ - 1)",
    "noise_share": "rarest tokens that count as noise (share)",
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
    bad, now = (A < 0) & mask.bool(), logp.detach()  # [n, T], [n, T]
    rare, proxy_logp = batch.rare, batch.proxy_logp  # [n, T], [n, T]
    protected = rare & (now < proxy_logp - 1e-5)  # [n, T]: I
    # Filled first: log 0 is -inf, and a mask cannot remove an infinite value later.
    log_proxy_ratio = (proxy_logp - logp).masked_fill(~protected, 0.0)  # [n, T]
    k3 = log_proxy_ratio.exp() - log_proxy_ratio - 1  # [n, T]
    objective = objective - args.proxy_weight * k3  # [n, T]
    pull = args.proxy_weight * log_proxy_ratio.expm1()  # [n, T]
    stats["protected_share"] = protected.sum(), bad.sum()
    stats["protected_pull"] = pull.sum(), protected.sum()
    stats["noise_share"] = (rare & proxy_logp.isinf()).sum(), rare.sum()
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
        # <own>
        readout = partial(proxy_logprobs, kappa=args.kappa)  # instead of entropy
        for minibatch in minibatches:
            found = all_logprobs(policy, minibatch, args, world, readout)
            minibatch.old_logp = found.logp  # [n, T]
            minibatch.proxy_logp = found.statistic  # [n, T]: π_old without its noise
        # </own>
        # Stop if the sampler's log-probs, μ, are far from π_old: then one of the two is broken.
        means.add(**run.check_sampler(minibatches))  # <own>

        # Update: one optimiser step per mini-batch, in as many micro-batches as memory requires.
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / max(1, args.warmup))
        for minibatch in minibatches:
            # <own>
            # π_θ of the whole mini-batch, on all ranks: δ before any gradient.
            minibatch.logp = all_logprobs(policy, minibatch, args, world).logp  # [m, T]
            choose_tokens(args, minibatch, world)
            # </own>
            denominator = 0.0
            for rows in micro_batches(policy, minibatch, args.micro_tokens, world):
                micro = minibatch.rows(rows)
                logp, micro.entropy = response_logprobs(policy, micro, args.temperature)  # [n, T]
                loss, count, stats = policy_loss(args, logp, micro)
                loss.backward()  # a sum: gradients add up over micro-batches
                denominator = denominator + count
                # logp keeps its gradient, ∂loss/∂log π_θ: minus each token's weight on ∇ log π_θ.
                minibatch.put(rows, logp=logp.detach(), entropy=micro.entropy, weight=-logp.grad)
                means.add(loss=(loss, count), **stats)
            # Sums become means: gradients and token weights are divided by the count of all ranks.
            minibatch.weight /= divide_gradients(policy, denominator, world)
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
