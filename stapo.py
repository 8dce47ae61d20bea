r"""STAPO: Spurious-Token-Aware Policy Optimization.

Liu et al. (Tsinghua, DiDi), "STAPO: Stabilizing Reinforcement Learning for LLMs by Silencing Rare
Spurious Tokens", 2026, arXiv 2602.15620.

The problem: a right response may contain a spurious token, to which the model gave a tiny
probability while it was sure of another token. The authors say that such a token did not help, but
it gets the same advantage as the rest of the response, and the largest gradient.

The idea: find these tokens by their probability and by the entropy at their position, and leave
them out of the loss, which is GRPO's with a wider upper clip, averaged over the tokens left. Only
positive advantages are masked, which biases the gradient: such a token can only be pushed down. The
mask cannot tell a slip from a discovery. In labs/junk one rare token decides the reward: it stays
at probability 0.001 in all 20 seeds of STAPO, and GRPO learns it in all 20.

Objective, over all response tokens y_t of a mini-batch, with r = π_θ(y_t) / π_old(y_t):

    J = 1/(Σ_i Σ_t I) Σ_i Σ_t I min(r Â_i, clip(r, 1-ε_low, 1+ε_high) Â_i)
    Â_i = (R_i - mean R) / std R
    I = 0 if Â_i > 0 and π_θ(y_t) < τ_p and H_t < τ_h, else 1        (I has no gradient)

R_i is the reward of response y_i, Â_i its advantage. π_θ is the current policy, which is trained,
and π_old the policy that generated the responses. H_t is the entropy of π_θ at the position where
y_t was drawn. By default τ_p is 0.002 and τ_h the 0.8 quantile of H_t over the mini-batch's tokens.

Gradient weight on ∇ log π_θ(y_t), before the average over the tokens left:

    I M r Â
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

Differs from grpo.py in:
1. The mask I, and a denominator that counts the kept tokens. (In runs of the tiny model the mask
   hardly acts, on about 4 tokens in a million.)
2. Token-mean instead of the mean of response means, ε 0.2 / 0.28, no KL term: the recipe of JustRL
   (variants/justrl.py), on which the paper builds.
3. One more forward pass per mini-batch, because τ_h must be known before the first gradient.

Why is the gradient of such a token the largest? Theorem 3.1 is about the gradient with respect to
the logits a, with c the weight above and V the size of the vocabulary:

    |∇_a J|² = c² (1 - 2 π(y_t) + Σ_v π(v)²)
    c² (1 - 2π + e^-H)  <=  |∇_a J|²  <=  c² (2 - 2π - C_V H²),     C_V = (V - 1) / (V ln² V)

Both bounds are largest at a low probability and a low entropy. The difference is small: the norm is
at most √2 times that of a rare token at high entropy.

Run it:
    torchrun stapo.py                                       # laptop, 2 to 4 minutes, no download
    # one H100 (80 GB)
    torchrun stapo.py --model Qwen/Qwen3-1.7B-Base --task gsm8k --prompts_per_step 64 \
        --max_new_tokens 2048 --lr 1e-6 --micro_tokens 8192 --save_every 10 \
        --vllm_sleep --vllm_memory 0.55
    # the paper's batch and lengths, on eight H100s (not yet run on several GPUs)
    torchrun --nproc_per_node=8 stapo.py --model Qwen/Qwen3-8B-Base --task dapo-math-17k \
        --eval_task aime24 --prompts_per_step 256 --group_size 8 --max_new_tokens 15360 --lr 1e-6 \
        --warmup 10 --gradient_checkpointing --tensor_parallel 2 --vllm_sleep --vllm_memory 0.7
"""

from dataclasses import dataclass
import math
from pathlib import Path
from typing import Literal  # <own>

from common.batch import Rollout, balance_tokens
from common.cli import Betas, Count, CountOrZero, Flags, NonNegative, Positive, Temperature
from common.cli import Fraction  # <own>
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard, total_count
from common.distributed import gather  # <own>
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from common.logprobs import entropies  # <own>
from common.metrics import Means, evaluate, metrics_by_sign, rollout_metrics
from common.metrics import clip_shares  # <own>
from common.model import load_model
from common.records.checkpoint import load_checkpoint, save_checkpoint, save_model
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
    warmup: CountOrZero = 5
    """Steps in which lr rises linearly to its full value (our choice; verl's default: 0)."""
    betas: Betas = (0.9, 0.95)
    """AdamW's β1 and β2 (OpenRLHF's; verl and most papers: 0.9 0.999)."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay (our choice; verl's default: 0.01)."""
    grad_clip: Positive = 1.0
    """Largest gradient norm; larger gradients are scaled down to it (verl's default)."""
    clip_low: NonNegative = 0.2
    """ε of the lower clip (paper)."""
    clip_high: NonNegative = 0.28  # <own>
    """ε of the upper clip (paper)."""
    tau_p: Fraction = 0.002  # <own>
    """A token below this probability may be spurious (paper); a larger value finds more of them."""
    # <own>
    entropy_rule: Literal["all", "candidates"] = "all"
    """Tokens over which the quantile τ_h is taken: all (paper, versions 1 to 3), or candidates, the
    tokens below tau_p in right responses (paper, version 4)."""
    entropy_quantile: Fraction = 0.8
    """all: the quantile; tokens of lower entropy may be spurious (paper, versions 1 to 3)."""
    candidate_quantile: Fraction = 0.75
    """candidates: the quantile; those of lower entropy are spurious (paper, version 4)."""
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
def entropy_threshold(args: Args, entropy: Tensor) -> Tensor:
    """Return τ_h, a quantile of `entropy [tokens]`, of the tokens that `--entropy_rule` selects."""
    quantile = args.entropy_quantile if args.entropy_rule == "all" else args.candidate_quantile
    values = entropy.cpu().numpy()  # torch.quantile takes at most 2^24 numbers
    # Without any candidate no quantile exists. A τ_h of 0 silences nothing.
    return entropy.new_tensor(numpy.quantile(values, quantile) if len(values) else 0.0)


def choose_tokens(args: Args, batch: Rollout, world: World) -> None:
    """Write the column `spurious` `[m, T]` of a mini-batch of m rows: True on tokens to silence.

    Candidates are the improbable tokens of right responses. They are spurious if the policy was
    sure of another token: if the entropy is below τ_h, a quantile over the mini-batch of all ranks.
    """
    mask = batch.mask.bool()  # [m, T]
    improbable = batch.logp.exp() < args.tau_p  # [m, T]
    candidates = (batch.advantages[:, None] > 0) & improbable & mask  # [m, T]
    among = mask if args.entropy_rule == "all" else candidates  # [m, T]
    threshold = entropy_threshold(args, gather(batch.entropy[among], world))  # []
    # Responses of a group begin alike, and equal prefixes have equal entropies up to rounding. The
    # 1e-5 keeps all of them on one side of τ_h, which may be one of these entropies.
    sure = batch.entropy < threshold - 1e-5  # [m, T]
    batch.spurious = candidates & sure  # [m, T]


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
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
    objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    kept = mask * ~batch.spurious  # [n, T]: I
    return -(objective * kept).sum(), kept.sum()  # a mean over the tokens left
    # </own>


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    # <own>
    spurious = batch.spurious  # [n, T]
    return {
        **clip_shares(logp, batch, args.clip_low, args.clip_high),
        "silenced_share": (spurious.sum(), batch.mask.sum()),
        "silenced_prob": ((logp.exp() * spurious).sum(), spurious.sum()),
        "silenced_entropy": ((batch.entropy * spurious).sum(), spurious.sum()),
    }
    # </own>


# <own>
# Metrics that show the method at work. If the first is always 0, the run says so at its end.
ACTED = {
    "silenced_share": "tokens silenced (share)",
    "silenced_prob": "their probability",
    "silenced_entropy": "entropy at their places (nats)",
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
            # <own>
            # A pass over every mini-batch, the first too, without gradient: p and H, for τ_h.
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
# 1. The rule for τ_h is that of versions 1 to 3; `--entropy_rule candidates` is that of version 4,
#    the 75% quantile over low-probability tokens of right responses. It needs large mini-batches,
#    because a single such token is never below its own quantile. Here a mini-batch has a thousand
#    tokens, and in 150 steps (seed 1) none held two different candidates.
# 2. Versions 1 to 3 state τ_h ambiguously, as "80%" and as "τ_h = 20%". We read: the 20% of the
#    tokens with the highest entropy are always kept, so τ_h = quantile(H, 0.80), over all response
#    tokens of a mini-batch. quantile(H, 0.20), which is often quoted, does not fit their text.
# 3. A right response is one with Â > 0. If the whole group is right, Â is 0, and its tokens have no
#    gradient. std R divides by G - 1. The paper does not say so, but the advantages of its examples
#    show it (2.47 for the only right response of eight).
# 4. Model, data and the run's size. The paper's setting: 256 prompts with 8 responses each, four
#    mini-batches, up to 15,360 tokens, AdamW at lr 1e-6 after 10 steps of warm-up.
#
# The authors find that about one token in ten thousand is enough to destroy a run, and that
# silencing it loses no signal. Version 4 calls the accuracy largely insensitive to τ_p. Of version
# 5 we know only the abstract.
