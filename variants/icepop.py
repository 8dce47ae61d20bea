"""IcePop and related corrections for the gap between sampler and trainer.

Ling team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model",
2025, arXiv 2510.18855.

Objective, for responses y sampled by the inference engine, whose probabilities are μ:

    J = E_y~μ [ 1/|y| Σ_t C_t min(r Â, clip(r, 1-ε_low, 1+ε_high) Â) ]
    r = π_θ(y_t)/π_old(y_t),     w = π_old(y_t)/μ(y_t),     Â = R - mean R  (of the group; no std)
    C_t = w if α <= w <= β, else 0

Gradient weight on ∇ log π_θ(y_t), averaged over tokens, then over responses:

    C_t M r Â
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

The sampler has the trainer's weights, but not its probabilities, because of other kernels, another
precision, or other experts in a mixture of experts. PPO's ratio does not contain this gap, because
both its policies are the trainer's. w is the gap, fixed before the first update. The correction
multiplies PPO's term from outside. Inside the clip, noise of the engines would move tokens beyond
its bound before anything was learned.

IcePop drops a token whose w is far from 1: if two engines with the same weights differ by a factor
of two, it takes this for an error, which a capped weight would still trust. The related corrections
are, with W = Π_t w, the product over a response:

    tis        min(w, β), or min(W, β)                      truncated importance sampling
    mis        w if α <= w <= β, else 0; or the same of W   masked importance sampling
    icepop     the same of w, by definition
    geometric  1 if α <= exp(mean_t log w) <= β, else 0     long responses leave any band for W
    opsm       0 if Â < 0 and mean_t log(μ/π_θ) > δ, else 1     DeepSeek-V3.2, arXiv 2512.02556
    none       1

Per token the correction is biased, because the tokens before it came from μ, too. Per response it
is not, but W's variance grows exponentially with the length. Every band and cap trades bias for
variance. Only opsm looks at π_θ, so also at staleness, and only at bad responses: the policy learns
little from mistakes that it would hardly make any more.

The default band drops hardly any token of the embedded models (1 in 100,000 over 30 steps, of the
mixture of experts 1 in 10,000); between 0.8 and 1.25, 2 in 1,000. The authors later saw a fixed
band drop fewer and fewer tokens while the gap widened (KPop, 2026).

Base file: minirl.py. Differs from it in:
1. PPO's min and clip on r, times a correction of w alone. The base file has -log π with min(π_θ/μ,
   5), which corrects for both at once.
2. The mean over a response's tokens by default. Removed: the ablation without μ (here `--correction
   none`) and routing replay.

Differs from the paper in:
1. α and β are OpenRLHF's and verl's for IcePop; the flags name the values of the other corrections.
2. Advantages without std and ε are the base file's; no KL term.

Two other losses have the same name. prime-rl's has the band on π_θ/μ, which is also the weight, and
neither min nor clip (its documentation; 0.2 to 5 there). "Online IcePop" (2025) takes one step per
rollout, so that r = 1 and no clip acts: `--minibatches 1`.

Confidence: the rule is as the authors restate it in a later post and as OpenRLHF, slime and verl
have it. We read tis, mis and opsm also in TRL's code, geometric in verl's. We do not know the
paper's α and β; Online IcePop is second hand.

Run it:
    torchrun -m variants.icepop                             # laptop, 2 to 4 minutes, no download
    torchrun -m variants.icepop --w_low 0.8 --w_high 1.25   # where it drops tokens
    torchrun -m variants.icepop --correction mis --correction_level sequence --w_high 2
    # a node of eight
    torchrun --nproc_per_node=8 -m variants.icepop --model Qwen/Qwen3-1.7B-Base \\
        --task dapo-math-17k --eval_task aime25 --prompts_per_step 64 --group_size 16 \\
        --max_new_tokens 8192 --lr 1e-6 --micro_tokens 8192
"""

from dataclasses import dataclass
import math
from pathlib import Path
from typing import Literal

from common.batch import Rollout, balance_tokens
from common.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.cli import BadInput  # <own>
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
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float8"] = "float8"  # <own>
    """Precision of the sampler's weights (auto: as dtype; float8 with vllm: on GPUs only)."""
    clip_low: NonNegative = 0.2
    """ε of the lower clip (MiniRL's paper)."""
    clip_high: NonNegative = 0.27  # <own>
    """ε of the upper clip (MiniRL's paper)."""
    length_norm: bool = True  # <own>
    """Divide by the response's length, as the paper does; False: minirl.py's sum over tokens."""
    # <own>
    correction: Literal["tis", "mis", "icepop", "geometric", "opsm", "none"] = "icepop"
    """How C is computed from w = π_old/μ (the table in this file's header)."""
    correction_level: Literal["token", "sequence"] = "token"
    """tis and mis: use a token's w, or the product over its response."""
    w_low: NonNegative = 0.5
    """α: smallest w (OpenRLHF, verl; TRL's for mis: 0.5; verl's for geometric: 0.999)."""
    w_high: Positive = 5.0
    """β: largest w (OpenRLHF, verl; slime's for tis: 2; TRL's for mis: 2; verl's for geometric:
    1.001)."""
    opsm_delta: Positive = 0.5
    """δ of opsm, nats per token (TRL, as the paper gives none; slime: 0.0001)."""
    # </own>


def advantages(rewards: Tensor) -> Tensor:
    """Reward minus group mean: `[P, G]` -> `[P, G]`. [1, 0, 0, 0]: [.75, -.25, -.25, -.25]."""
    # If all rewards are equal, all advantages must be exactly 0. But rounding makes the mean of
    # eight rewards of 0.3 not quite 0.3. So subtract the first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # If all responses are right, or all are wrong, the advantages are exactly 0: a prompt that is
    # too easy or too hard teaches nothing.
    return centred  # no std: dividing by it would weight prompts by their difficulty  # <own>


# <own>
def correction(args: Args, logp: Tensor, batch: Rollout) -> Tensor:
    """C `[n, T]`: the factor on a token's term that corrects for the engines' gap."""
    mask, A = batch.mask, batch.advantages[:, None]  # [n, T], [n, 1]

    def kept(x: Tensor) -> Tensor:
        return (x >= args.w_low) & (x <= args.w_high)

    def over_response(x: Tensor) -> Tensor:
        return (x * mask).sum(dim=1, keepdim=True)  # [n, 1]

    length = over_response(mask).clamp(min=1)  # [n, 1]
    log_w = (batch.old_logp - batch.rollout_logp) * mask  # [n, T]: the same weights, other numerics
    geometric = (over_response(log_w) / length).exp()  # [n, 1]: a mean over tokens
    drift = over_response(batch.rollout_logp - logp) / length  # [n, 1]: of π_θ, gap and staleness
    w = (over_response(log_w) if args.correction_level == "sequence" else log_w).exp()
    masked = torch.where(kept(w), w, 0.0)  # as w: [n, T], or W [n, 1]. ∞ · False would be NaN
    weight = {
        "tis": w.clamp(max=args.w_high),
        "mis": masked,
        "icepop": masked,
        "geometric": kept(geometric),
        "opsm": (A >= 0) | (drift <= args.opsm_delta),
        "none": torch.ones_like(mask),
    }[args.correction]
    return weight.to(mask.dtype).expand_as(mask)


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
ACTED = {
    "corrected": "mean |C - 1|, C the correction",
    "dropped_share": "tokens dropped by it (share)",
    "weight_max": "largest w = π_old/μ of a token",
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
    uncapped = (batch.old_logp - batch.rollout_logp).exp()  # [n, T]: w
    weight = correction(args, logp.detach(), batch)  # [n, T]: C
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r. It is 1 before the rollout's first step
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
    out_above, out_below = ratio > 1 + args.clip_high, ratio < 1 - args.clip_low  # [n, T]
    cut = ((A > 0) & out_above) | ((A < 0) & out_below)  # [n, T]: M = 0
    objective = weight * torch.minimum(ratio * A, clipped * A)  # [n, T]: outside of min and clip
    per_response = (objective * mask).sum(dim=1)  # [n]: a sum, not a mean
    if args.length_norm:
        per_response = per_response / mask.sum(dim=1).clamp(min=1)  # [n]
    stats = {
        "corrected": (((weight - 1).abs() * mask).sum(), mask.sum()),
        "dropped_share": (((weight == 0) * mask).sum(), mask.sum()),
        "masked_share": ((cut * mask).sum(), mask.sum()),
        "masked_above": (((cut & out_above) * mask).sum(), mask.sum()),
        "masked_below": (((cut & out_below) * mask).sum(), mask.sum()),
        "weight": ((weight * mask).sum(), mask.sum()),
        "weight_max": (torch.cat([mask.new_zeros(1), uncapped[mask > 0]]).max(), None),
    }
    # The caller divides by the responses of this mini-batch, on all ranks: 1/G, and the mean over
    # prompts.
    return -per_response.sum(), mask.new_tensor(len(mask)), stats  # sum, count
    # </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)  # <own>
    policy = shard(Policy(lm), args, world)
    adam = {"betas": args.betas, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **adam)
    run = Run(args, task, world, Path(__file__).stem, ACTED)
    parts = {"engine": engine}  # what else a checkpoint holds: each has a state_dict
    done = 0  # steps trained so far
    # <own>
    if args.correction_level == "sequence" and args.correction not in ("tis", "mis"):
        raise BadInput(f"--correction_level sequence: is for tis and mis, not {args.correction}")
    if not args.w_low <= 1 <= args.w_high:  # w of engines that agree
        raise BadInput(f"--w_low {args.w_low}, --w_high {args.w_high}: 1 must lie between them")
    # </own>
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
        for minibatch in minibatches:
            minibatch.old_logp = all_logprobs(policy, minibatch, args, world).logp  # [n, T]
        # </own>
        # Stop if the sampler's log-probs, μ, are far from π_old: then one of the two is broken.
        means.add(**run.check_sampler(minibatches))  # <own>

        # Update: one optimiser step per mini-batch, in as many micro-batches as memory requires.
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / max(1, args.warmup))
        for minibatch in minibatches:
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
