r"""MASPO: Mass-Adaptive Soft Policy Optimization.

Fu et al. (Meituan), "MASPO: Unifying Gradient Utilization, Probability Mass, and Signal Reliability
for Robust and Sample-Efficient LLM Reasoning", 2026, arXiv 2602.17550.

The problem: GRPO's clip removes the whole gradient of a token outside it, and its ε is the same for
likely and rare tokens. At probability 0.01 a ratio of 1.5 moves half a percent of the probability
mass; at 0.9 it is impossible. So one ε for both restrains rare tokens too much.

The idea: change three things in the clip. First, a soft gate F lowers the gradient of a token that
GRPO clips, but does not remove it. Second, the gate's width σ grows as π_old falls, so a rare token
may move by a larger ratio. Third, a clear success (large Â) may move further and a clear failure
less far, because pushing down is held to be riskier.

Objective, over all response tokens y_t of a mini-batch, with r = π_θ(y_t) / π_old(y_t):

    J = 1/Σ|y_i| Σ_i Σ_t sg[F] r Â_i,     Â_i = (R_i - mean R) / std R
    F = exp(-(r - 1)² / 2σ²)  if Â > 0 and r > 1, or Â < 0 and r < 1 (away from π_old),  else 1
    σ = m (1 + β_pos Â)  if Â > 0,   m / (1 - β_neg Â)  if Â < 0   (the factor within [0.1, 10])
    m = σ_base / π_old^α   within [σ_base, σ_high]

R_i is the reward of response y_i, |y_i| its number of tokens, Â_i its advantage. π_θ is the policy
being trained, π_old the policy that generated the responses, and sg[F] is F without its gradient.
σ_base, σ_high, α and the two β are flags.

Gradient weight on ∇ log π_θ(y_t), before the average over the mini-batch's tokens:

    F r Â          (F is detached: it lowers the gradient and has none of its own)

Differs from grpo.py in:
1. The Gaussian gate instead of min and clip. It never gates an update that brings a token back.
2. Token-mean over the mini-batch instead of the mean of response means.
3. No KL term, no reference model.

Run it:
    torchrun maspo.py                                       # laptop, 2 to 4 minutes, no download
    # one H100 (80 GB)
    torchrun maspo.py --model Qwen/Qwen3-1.7B-Base --task gsm8k --prompts_per_step 64 \
        --max_new_tokens 2048 --lr 1e-6 --micro_tokens 8192 --save_every 10 \
        --vllm_sleep --vllm_memory 0.55
    # eight H100s (not yet run on several GPUs); the paper's model, data, batch; our group, length
    torchrun --nproc_per_node=8 maspo.py --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B \
        --task dapo-math-17k --eval_task aime24 --prompts_per_step 512 --minibatches 16 \
        --max_new_tokens 8192 --lr 1e-6 --alpha 0.5 --micro_tokens 8192
"""

from dataclasses import dataclass
import math
from pathlib import Path

from common.batch import Rollout, balance_tokens
from common.cli import Betas, Count, CountOrZero, Flags, NonNegative, Positive, Temperature
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard, total_count
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from common.metrics import Means, evaluate, metrics_by_sign, rollout_metrics
from common.model import load_model
from common.records.checkpoint import load_checkpoint, save_checkpoint, save_model
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
    warmup: CountOrZero = 5
    """Steps in which lr rises linearly to its full value (our choice; verl's default: 0)."""
    betas: Betas = (0.9, 0.95)
    """AdamW's β1 and β2 (OpenRLHF's; verl and most papers: 0.9 0.999)."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay (our choice; verl's default: 0.01)."""
    grad_clip: Positive = 1.0
    """Largest gradient norm; larger gradients are scaled down to it (verl's default)."""
    # <own>
    sigma_base: Positive = 1.0
    """Width of the gate for a token of probability 1 (authors' code; 1 to 3 recommended)."""
    sigma_high: Positive = 10.0
    """Largest width, however rare the token (authors' code)."""
    alpha: NonNegative = 0.3
    """How fast the width grows as a token gets rarer (authors' code; 0.5 for their 1.5B model)."""
    beta_pos: NonNegative = 0.03
    """How much a positive advantage widens the gate (authors' code)."""
    beta_neg: NonNegative = 0.03
    """How much a negative advantage narrows it (authors' code)."""
    token_clip: NonNegative = 0.2
    """ε of the clip that is logged for comparison; it changes nothing (GRPO's)."""
    # </own>


def advantages(rewards: Tensor) -> Tensor:
    """Return group z-scores `[P, G]`. Rewards [1, 0, 0, 0] give about [1.5, -0.5, -0.5, -0.5]."""
    # Equal rewards must give advantages of exactly 0, but the float32 mean of eight rewards of 0.3
    # is not exactly 0.3. So first subtract the group's first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # If all responses are right, or all wrong, the advantages are exactly 0. Then this prompt adds
    # no gradient but that of a KL term. The 1e-6 only prevents 0/0.
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)  # [P, G]


# <own>
def gate_widths(args: Args, batch: Rollout) -> Tensor:
    """Return σ `[n, T]`. The gate is wider for a rarer token and for a larger advantage."""
    A = batch.advantages[:, None]  # [n, 1]
    width = args.sigma_base / batch.old_logp.exp() ** args.alpha  # [n, T]: by probability mass
    width = width.clamp(args.sigma_base, args.sigma_high)  # [n, T]: m
    risk = torch.where(A > 0, 1 + args.beta_pos * A, 1 / (1 - args.beta_neg * A))  # [n, 1]
    return width * risk.clamp(0.1, 10)  # [n, T]


def gates(args: Args, ratio: Tensor, batch: Rollout) -> Tensor:
    """Return F `[n, T]`, between 0 and 1, of the ratios r `[n, T]`."""
    outward = batch.advantages[:, None] * (ratio - 1) > 0  # [n, T]: away from π_old
    narrowed = (-((ratio - 1) ** 2) / (2 * gate_widths(args, batch) ** 2)).exp()  # [n, T]
    return torch.where(outward, narrowed, 1.0)  # [n, T]: the way back is never gated


# </own>
def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the sum of the loss over the n rows of `batch`, and the count to divide it by.

    A row is one response of up to T tokens; `logp [n, T]` is log π_θ, with gradient. The columns of
    `batch` that files share are listed in `Rollout`. The caller sums over micro-batches and ranks
    and divides once: a mean of means would give the rows of a small micro-batch more weight.
    """
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    # <own>
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r; 1 until the rollout's first optimiser step
    # Detached, as in the authors' code, though their README calls the gate differentiable. With its
    # derivative the weight would be Â r F (1 - r (r - 1) / σ²), negative beyond r = 1.618 at σ = 1.
    F = gates(args, ratio.detach(), batch)  # [n, T]
    objective = F * ratio * A  # [n, T]
    return -(objective * mask).sum(), mask.sum()  # token mean: all count the same
    # </own>


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    # <own>
    mask = batch.mask  # [n, T]
    A = batch.advantages[:, None]  # [n, 1]
    old_p = batch.old_logp.exp()  # [n, T]: the token's probability mass
    ratio = (logp - batch.old_logp).exp()  # [n, T]
    gate, sigma = gates(args, ratio, batch), gate_widths(args, batch)  # [n, T], [n, T]
    up, down = (A > 0) * mask, (A < 0) * mask  # [n, T]
    cut = (A * (ratio - 1) > A.abs() * args.token_clip) * mask  # [n, T]: GRPO would cut these
    pull = ratio * A.abs() * cut  # [n, T]: without the gate
    kept = gate * ratio * A.abs() * cut  # [n, T]: with it
    rare, common = (old_p < 0.1) * mask, (old_p > 0.9) * mask  # [n, T]
    return {
        "gate_closed": (((1 - gate) * mask).sum(), mask.sum()),
        "gate_pos": ((gate * up).sum(), up.sum()),
        "gate_neg": ((gate * down).sum(), down.sum()),
        "grpo_cut_share": (cut.sum(), mask.sum()),
        "kept_where_grpo_cuts": (kept.sum(), pull.sum()),
        "width_rare": ((sigma * rare).sum(), rare.sum()),
        "width_common": ((sigma * common).sum(), common.sum()),
    }
    # </own>


# <own>
# Metrics that show the method at work. If the first is always 0, the run says so at its end.
ACTED = {
    "gate_closed": "how far the gate is closed (0 to 1)",
    "grpo_cut_share": "tokens that GRPO would cut (share)",
    "kept_where_grpo_cuts": "share of their weight that the gate keeps",
}
# </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    policy = shard(Policy(lm), args, world)
    adam = {"betas": args.betas, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **adam)
    run = Run(args, task, world, Path(__file__).stem, ACTED)
    parts = {"engine": engine}  # other objects to save in a checkpoint (each has a state_dict)
    done = load_checkpoint(run.checkpoint, policy, optimizer, parts, world)  # steps; 0: a new run
    engine.sync(policy)
    run.start(done)
    if done == 0:
        run.log(0, evaluate(engine, task, args, world))
    P, G = args.prompts_per_step // world.size, args.group_size  # P: this rank's prompts

    for step in run.steps():
        means = Means()

        # 1. Rollout: this rank's P prompts, G responses each. The step number alone decides which
        # prompts are used, so a checkpoint need not save a position in the data.
        cursor = (step - 1) * args.prompts_per_step + world.rank * P
        problems = [task.train(cursor + i) for i in range(P)]
        prompts = [problem.prompt_ids for problem in problems]
        rollout = engine.generate(prompts, G, args.max_new_tokens, args.temperature)  # N = P·G rows

        # 2. Reward and advantages. A group is on one rank: its mean needs no communication.
        rewards = task.score(rollout, problems, G)  # [P, G]
        rollout.advantages = advantages(rewards).flatten()  # [N]

        # 3. Log-probs, in mini-batches of whole groups. Within each, the ranks exchange rows until
        # they have about the same number of tokens.
        minibatches = [balance_tokens(part, world) for part in rollout.split(args.minibatches)]
        # The trainer computes the log-probs of π_old, the policy that sampled. The sampler's own
        # log-probs come from other kernels, so a ratio against them would mix two things: how far
        # the policy has moved, and how much sampler and trainer differ (minirl.py separates them).
        # The first mini-batch needs no pass: until the first optimiser step π_θ is π_old.
        for minibatch in minibatches[1:]:
            minibatch.old_logp = all_logprobs(policy, minibatch, args, world).logp  # [n, T]

        # 4. Update: one optimiser step per mini-batch, in as many micro-batches as memory requires.
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
                loss, count = policy_loss(args, logp, micro)
                loss.backward()  # a sum: gradients add up over micro-batches
                denominator = denominator + count
                # logp.grad (response_logprobs keeps it) is minus the weight on ∇ log π_θ (header).
                minibatch.put(rows, logp=logp.detach(), entropy=micro.entropy, weight=-logp.grad)
                means.add(loss=(loss, count), **measures(args, logp.detach(), micro))
            # Sums become means: divide gradients and token weights by the count over all ranks.
            denominator = total_count(denominator, world)
            divide_gradients(policy, denominator, world)
            minibatch.weight /= denominator
            if first:  # stop if sampler (μ) and trainer (π_old) are far apart: one must be wrong
                means.add(**run.check_sampler(minibatches))
            norm = clip_gradients(policy, args.grad_clip)
            means.add(**run.check_gradient(norm, minibatch))  # stops if several in a row are NaN
            if math.isfinite(norm):  # else skip the step
                optimizer.step()
            optimizer.zero_grad()
            means.add(**metrics_by_sign(minibatch))
        engine.sync(policy)

        # 5. Log the step; evaluate and save when it is time.
        means.add(**rollout_metrics(rollout, G))
        metrics = means.reduce(world) | {"lr": optimizer.param_groups[0]["lr"]}
        if run.due(step, args.eval_every):
            metrics |= evaluate(engine, task, args, world)
        run.log(step, metrics, minibatches)  # before saving, so that a killed run keeps this line
        if run.due(step, args.save_every):
            save_checkpoint(run.folder, step, policy, optimizer, parts, world, args.keep)
    if args.save_hf:
        save_model(policy, tokenizer, run.folder / "model", world)
    run.finish()


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. Four mini-batches per rollout. The paper's setting: a batch of 512 in mini-batches of 32, so 16
#    optimiser steps per rollout.
# 2. The normaliser of the displayed objective could not be checked; token-mean is the default of
#    the authors' code. The bounds of σ are also from their code; the formula in their README has no
#    bounds.
# 3. No clamp of log r to ±20 (their code); it only acts on a ratio that has exploded.
#
# Formulas, constants and the std (sample, + 1e-6) are those of the authors' code (github
# FlyTune/MASPO-RL 22b4681, 20 April 2026), whose numbers checks/maspo.py has. We read only the
# abstract of the paper (version 3, 18 April 2026; ACL 2026): its batch, mini-batches, missing KL
# term and detached gate are from summaries.
