r"""GSPO: Group Sequence Policy Optimization.

Zheng et al. (Qwen team), "Group Sequence Policy Optimization",
2025, arXiv 2507.18071.

The problem: GRPO rewards a whole response, but corrects for old samples with one ratio per token.
Each token ratio is a single sample of an importance weight. So, the paper argues, it adds noise,
and more of it in longer responses and in mixtures of experts. (An objection to this argument is in
docs/questions-more.md, question 40.)

The idea: a response has one reward, so it gets one ratio, too. s_i is the geometric mean of its
token ratios. The mean makes s_i so steady that its clip is about 600 times narrower than GRPO's.
The clip drops whole responses, and so many more tokens than GRPO's does. In the paper GSPO still
learns faster than GRPO; here it needs more tokens (docs/claims.md).

Objective, for G responses y_i to one prompt, with one ratio s_i for each response:

    J = 1/G Σ_i min(s_i Â_i, clip(s_i, 1-ε_low, 1+ε_high) Â_i)
    Â_i = (R_i - mean R) / std R
    s_i = (π_θ(y_i) / π_old(y_i))^(1/|y_i|) = exp( 1/|y_i| Σ_t log π_θ(y_t)/π_old(y_t) )

R_i is the reward of y_i, |y_i| its number of tokens, Â_i its advantage. π_θ is the policy being
trained, π_old the policy that generated the responses. ε_low and ε_high are the widths of the clip,
which the paper sets to 3e-4 and 4e-4 (section 5.1).

Gradient weight on ∇ log π_θ(y_t), one for all tokens of y_i, before the mean over responses:

    M_i s_i Â_i / |y_i|
    M_i = 0 if (Â_i > 0 and s_i > 1+ε_high) or (Â_i < 0 and s_i < 1-ε_low), else 1

Differs from grpo.py in:
1. The ratio and its clip are per response; every token of a response gets the same weight.
2. ε is tiny. Bfloat16's error of about 1e-2 in a log-prob shrinks to about ε in a mean over a
   thousand tokens, but to 3 ε over a hundred: train short responses with `--dtype float32`.
3. No KL term, no reference model.

Run it:
    torchrun gspo.py                                        # laptop, 2 to 4 minutes, no download
    # one H100 (80 GB)
    torchrun gspo.py --model Qwen/Qwen3-1.7B-Base --task gsm8k --prompts_per_step 64 \
        --max_new_tokens 2048 --lr 1e-6 --micro_tokens 8192 --save_every 10 \
        --vllm_sleep --vllm_memory 0.55
    # eight H100s (not yet run on several GPUs)
    torchrun --nproc_per_node=8 gspo.py --model Qwen/Qwen3-1.7B-Base --task dapo-math-17k \
        --eval_task aime24 --prompts_per_step 64 --group_size 16 --max_new_tokens 8192 --lr 1e-6 \
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
    clip_low: NonNegative = 3e-4  # <own>
    """ε of the lower clip of the sequence ratio (paper, section 5.1)."""
    clip_high: NonNegative = 4e-4  # <own>
    """ε of the upper clip of the sequence ratio (paper, section 5.1)."""
    token_clip: NonNegative = 0.2  # <own>
    """ε of the token-level clip that is logged for comparison; it changes nothing (GRPO's)."""


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
def sequence_ratio(logp: Tensor, batch: Rollout) -> Tensor:
    """Return s `[n]`, the likelihood ratio of each response to the power 1/|y|, so that one ε fits
    short and long responses. exp of the SUM would be the plain ratio, which is astronomically large
    or small after 100 tokens."""
    log_ratio = (logp - batch.old_logp) * batch.mask  # [n, T]: padding must not enter the mean
    return (log_ratio.sum(dim=1) / batch.mask.sum(dim=1).clamp(min=1)).exp()  # [n]


# </own>
def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the sum of the loss over the n rows of `batch`, and the count to divide it by.

    A row is one response of up to T tokens; `logp [n, T]` is log π_θ, with gradient. The columns of
    `batch` that files share are listed in `Rollout`. The caller sums over micro-batches and ranks
    and divides once: a mean of means would give the rows of a small micro-batch more weight.
    """
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    # <own>
    A_i = batch.advantages  # [n]
    s = sequence_ratio(logp, batch)  # [n]
    clipped = s.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n]
    # And the paper's GSPO-token? It writes sg[s] · π_θ(y_t)/sg[π_θ(y_t)] per token. With one
    # advantage per response, value and gradient are the same. It is for advantages that differ
    # between a response's tokens.
    objective = torch.minimum(s * A_i, clipped * A_i)  # [n]
    return -objective.sum(), mask.new_tensor(len(mask))  # sum, count
    # </own>


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    # <own>
    mask = batch.mask  # [n, T]
    A_i = batch.advantages  # [n]
    A = A_i[:, None]  # [n, 1]
    s = sequence_ratio(logp, batch)  # [n]
    above = (A_i > 0) & (s > 1 + args.clip_high)  # [n]
    below = (A_i < 0) & (s < 1 - args.clip_low)  # [n]
    cut = above | below  # [n]: M = 0
    token_ratio = (logp - batch.old_logp).exp()  # [n, T]: GRPO's
    far = A * (token_ratio - 1) > A.abs() * args.token_clip  # [n, T]: its clip would cut these
    live = A_i != 0  # [n]: responses with a gradient
    tokens = (live[:, None] * mask).sum()  # []
    return {
        "clip_share": (cut.sum(), live.sum()),
        "clip_above": (above.sum(), live.sum()),
        "clip_below": (below.sum(), live.sum()),
        "clip_share_of_tokens": ((cut[:, None] * mask).sum(), tokens),
        "token_clip_share": ((far * mask).sum(), tokens),
    }
    # </own>


# <own>
# Metrics that show the method at work. If the first is always 0, the run says so at its end.
ACTED = {
    "clip_share": "responses clipped (share)",
    "token_clip_share": "tokens that GRPO would clip (share)",
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
# 1. Model, data and the run's size. The paper's setting: Qwen3-30B-A3B-Base after a cold start, and
#    four mini-batches per rollout, which is also the default here.
# 2. AdamW's betas, the warm-up, the gradient clip, the group size and the 1e-6 beside std are ours,
#    because we know no values from the paper.
