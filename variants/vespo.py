"""VESPO: Variational sEquence-level Soft Policy Optimization.

Shen et al., "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM
Training", 2026, arXiv 2602.10693.

Objective, over all response tokens y_t, with W = π_θ(y) / π_old(y) for a whole response y:

    J = 1/(Σ_i |y_i|) Σ_i Σ_t sg[φ(W_i)] Â_i log π_θ(y_t)
    φ(W) = W^k e^{λ(1-W)},     (k, λ) = (2, 3) if Â >= 0 else (3, 2)
    Â_i = (R_i - mean R) / std R

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    φ(W) Â

Responses were sampled from π_old, so the gradient of the expected reward has the weight W, the
product of all token ratios. This is unbiased. But a product of hundreds of factors is near 0 or
huge, and one response can dominate the batch. GSPO takes the |y|-th root, which is no longer an
importance weight. vcpo.py caps W, so responses far above the cap keep the whole cap.

VESPO replaces W by φ(W). A proposal near both π_old and π_θ, with a budget for its mean weight,
leads to W^k e^{-λW}: small where W is small, and almost 0 where W is large. φ(1) = 1, so an
on-policy response has the plain policy gradient. The maximum is at W = k/λ and depends on the sign
of Â. For Â > 0 it is at W = 2/3, where other updates have lowered the response's probability; φ
falls as the response rises: φ(2) = 0.20. For Â < 0 it is at W = 1.5, where the response has become
more likely; φ(2) = 1.08, and φ falls as the response falls: φ(0.5) = 0.34.

Base file: justrl.py. Differs from it in:
1. -log π with the detached weight φ(W) of the whole response instead of min and clip.

Differs from the paper in:
1. The paper's W is against the sampler. The released runs without asynchrony take the trainer's
   π_old, as here, and can multiply the sampler's π_old/μ into W.
2. Title, φ and constants here are those of versions 1 and 2. According to its listing, version 3
   (May 2026, not read) has "Stable" no longer in its title and bounds the variance explicitly.

Confidence: we read φ, constants, clamps and sizes in the authors' code and scripts, and the
proposal in their README. (The docstring of that code has other constants, which nothing uses.) The
paper's runs take 4 to 64 optimiser steps per rollout, the released scripts without asynchrony 8 to
64.

Run it:
    torchrun -m variants.vespo                              # laptop, 2 to 4 minutes, no download
    # a node of eight; the authors: 2048 prompts, Qwen3-30B-A3B-Base, eight nodes, else the same
    torchrun --nproc_per_node=8 -m variants.vespo --model Qwen/Qwen3-8B-Base --task dapo-math-17k \\
        --eval_task aime25 --prompts_per_step 256 --group_size 8 --minibatches 8 --lr 1e-6 \\
        --max_new_tokens 15360 --gradient_checkpointing --vllm_sleep --vllm_memory 0.7
"""

from dataclasses import dataclass
import math
from pathlib import Path

from common.batch import Rollout, balance_tokens
from common.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.cli import Exponent  # <own>
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
    # <own>
    k_pos: Exponent = 2.0
    """k where Â >= 0 (authors' code)."""
    lambda_pos: Exponent = 3.0
    """λ where Â >= 0: φ is largest at W = k / λ (authors' code)."""
    k_neg: Exponent = 3.0
    """k where Â < 0 (authors' code)."""
    lambda_neg: Exponent = 2.0
    """λ where Â < 0 (authors' code)."""
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


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
# <own>
ACTED = {
    "reshaped": "mean |φ - 1|, φ the weight of a response",
    "weight_max": "largest W, before φ",
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
    log_ratio = (logp.detach() - batch.old_logp).clamp(-20, 20)  # [n, T]: log r, without gradient
    # No 1/|y|: W is the product of the ratios. The authors' clamps keep it finite; φ is 0 there.
    log_W = (log_ratio * mask).sum(dim=1, keepdim=True).clamp(-20, 20)  # [n, 1]
    k = torch.where(A >= 0, args.k_pos, args.k_neg)  # [n, 1]
    lam = torch.where(A >= 0, args.lambda_pos, args.lambda_neg)  # [n, 1]
    phi = (lam + k * log_W - lam * log_W.exp()).exp()  # [n, 1]: W^k e^{λ(1-W)}
    objective = phi * A * logp  # [n, T]: one weight for all tokens of a response
    n = mask.new_tensor(len(mask))
    stats = {"reshaped": ((phi - 1).abs().sum(), n)}
    stats["gate_pos"] = (phi * (A > 0)).sum(), (A > 0).sum()
    stats["gate_neg"] = (phi * (A < 0)).sum(), (A < 0).sum()
    stats["weight_max"] = torch.cat([mask.new_zeros(1), log_W.exp()[:, 0]]).max(), None
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
