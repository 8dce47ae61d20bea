r"""SAPO: Soft Adaptive Policy Optimization.

Gao et al. (Qwen team), "Soft Adaptive Policy Optimization",
2025, arXiv 2511.20347.

The problem: GRPO's clip has a hard edge. A token just inside it counts fully, and a token just
outside it has no gradient at all.

The idea: replace the clip by a smooth gate. It is 1 at r = 1 and falls as the ratio leaves 1 in
either direction, so no token ever loses its whole gradient. The weight is the gate times r, so it
still grows up to about r = 2 (to 1.57 Â) before it falls. A larger τ makes the gate narrower. The
paper takes τ_neg > τ_pos, because pushing a sampled token down raises the logits of all others, and
most of those, it says, are nonsense. Here swapping the two made no larger difference than another
seed does (docs/claims.md).

Objective, for G responses y_i to one prompt, with r = π_θ(y_t) / π_old(y_t) for each token y_t:

    J = 1/G Σ_i 1/|y_i| Σ_t f(r) Â_i
    Â_i = (R_i - mean R) / std R
    f(r) = 4/τ σ(τ (r - 1)),     τ = τ_pos if Â_i > 0, else τ_neg

R_i is the reward of y_i, |y_i| its number of tokens, Â_i its advantage. π_θ is the policy being
trained, π_old the policy that generated the responses. σ is the logistic function. The gate is the
derivative f'(r), which is the sech² below.

Gradient weight on ∇ log π_θ(y_t), without the factors 1/G and 1/|y_i|:

    r Â sech²(τ (r - 1) / 2)          which is Â at r = 1, for every τ

Only the gradient of f matters, not its value (2/τ at r = 1): do not detach f or multiply it by r.

Differs from grpo.py in:
1. A soft gate instead of min and clip, still per token. (If a response's tokens move together, it
   acts much like a gate on GSPO's ratio.)
2. No KL term, no reference model.

Run it:
    torchrun sapo.py                                        # laptop, 2 to 4 minutes, no download
    # one H100 (80 GB)
    torchrun sapo.py --model Qwen/Qwen3-1.7B-Base --task gsm8k --prompts_per_step 64 \
        --max_new_tokens 2048 --lr 1e-6 --micro_tokens 8192 --save_every 10 \
        --vllm_sleep --vllm_memory 0.55
    # eight H100s (not yet run on several GPUs)
    torchrun --nproc_per_node=8 sapo.py --model Qwen/Qwen3-1.7B-Base --task dapo-math-17k \
        --eval_task aime25 --prompts_per_step 64 --group_size 16 --max_new_tokens 8192 --lr 1e-6 \
        --micro_tokens 8192 --vllm_sleep --vllm_memory 0.7
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
    tau_pos: Positive = 1.0  # <own>
    """τ of tokens with positive advantage (paper)."""
    tau_neg: Positive = 1.05  # <own>
    """τ of tokens with negative advantage (paper: most stable of 0.95, 1.0 and 1.05)."""


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
def temperatures(args: Args, batch: Rollout) -> Tensor:
    """Return τ `[n, 1]`, which depends on the sign of Â."""
    A = batch.advantages[:, None]  # [n, 1]
    return torch.where(A > 0, A.new_tensor(args.tau_pos), A.new_tensor(args.tau_neg))  # [n, 1]


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
    tau = temperatures(args, batch)  # [n, 1]
    objective = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * A  # [n, T]: f(r) Â
    per_response = (objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # [n]: 1/|y_i|
    # The caller divides by the number of responses in this mini-batch, over all ranks. That does
    # two things at once: 1/G, and the mean over prompts.
    return -per_response.sum(), mask.new_tensor(len(mask))  # sum, count
    # </own>


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    # <own>
    mask = batch.mask  # [n, T]
    A = batch.advantages[:, None]  # [n, 1]
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r
    gate = 1 / torch.cosh(temperatures(args, batch) * (ratio - 1) / 2) ** 2  # [n, T]: f'(r)
    up, down = (A > 0) * mask, (A < 0) * mask  # [n, T]
    return {
        "gate_closed": (((1 - gate) * mask).sum(), mask.sum()),
        "gate_pos": ((gate * up).sum(), up.sum()),
        "gate_neg": ((gate * down).sum(), down.sum()),
    }
    # </own>


# <own>
# Metrics that show the method at work. If the first is always 0, the run says so at its end.
ACTED = {
    "gate_closed": "how far the gate is closed (0 to 1)",
    "gate_pos": "gate where Â > 0 (1: open)",
    "gate_neg": "gate where Â < 0 (1: open)",
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
# 1. Model, data and the run's size. The paper's setting, as summarised by others: Qwen3-30B-A3B
#    after a cold start, and four mini-batches per rollout, which is also the default here.
# 2. AdamW's betas, warm-up, gradient clip, group size and the 1e-6 beside std are ours (not known).
# 3. log r is not clamped. If it is above 88, exp(log r) overflows, and the step is skipped.
