"""Blockwise advantages: working and answer each have their own reward.

Pavlenko et al. (Nebius), "Blockwise Advantage Estimation for Multi-Objective RL with Verifiable
Rewards", 2026, arXiv 2602.10231.

Objective, for G responses y_i to one prompt, with r = π_θ(y_t) / π_old(y_t) for each token y_t:

    J = 1/G Σ_i Σ_k 1/|T_ik| Σ_{t in T_ik} min(r Â_ik, clip(r, 1-ε, 1+ε) Â_ik)
    Â_ik = R_ik - b_ik:    the reward of block k, less its baseline; no std
    b_i1 = mean of R_j1 over the group
    b_i2 = mean of R_j2 over those of the group with R_j1 = R_i1

Gradient weight on ∇ log π_θ(y_t), for t in block k, before the three averages:

    M r Â_k
    M = 0 if (Â_k > 0 and r > 1+ε) or (Â_k < 0 and r < 1-ε), else 1

T_i1 are the tokens of the working, up to and including the marker (`--marker`, here the last `#`).
T_i2 are the tokens of the answer after it. GRPO gives all tokens of a response one advantage. A
right working with a mistake in its last line is punished from its first token, and a lucky answer
rewards the mistakes before it. With a reward for each block this does not happen, and no weights
are needed to add the rewards up.

The difficulty is the baseline of the later block. The possible reward of an answer depends on the
working before it. Against the group's mean every answer to a good working looks good, and the
working's reward counts twice. The right baseline is the mean reward of answers to this very
working, which would need more samples from there. The outcome-conditioned baseline uses the group
instead: it compares an answer with those after a working of the same reward. If there is no other
one, the advantage is 0 (`alone`). The working gets no signal from its answer. Here it comes to take
a step too many, which costs it nothing, and accuracy falls again.

The task's own verifier gives a block's reward. It sees that block alone: the working up to the
marker, or the marker and the answer. With `variants/steps.py` (partial rewards for every right step
and for the answer) the two add up to the reward of the whole. With `arithmetic` the verifier finds
nothing in a working, so its reward is always 0 and nothing is learnt from it.

Base file: grpo.py. Differs from it in:
1. Rewards, advantages and token means by block; their sum.
2. Advantages without std. No KL term, no reference model.
3. The default task.
4. `entropy_good`, `len_good` and the like go by the sign of the answer's advantage.

Differs from the paper in:
1. The paper's blocks are a solution and the confidence in it, with Brier's score as the second
   reward.
2. The paper's outcome is right or wrong; ours is the working's reward.
3. We do not know ε; 0.2 is ours. The paper also steers the entropy to a target, and has weight
   decay 0.1.

Confidence: loss, baselines and sizes are as read in the paper; there is no code of the authors. We
do not know how it treats a response without its last block; ours counts as 0.

Run it:
    torchrun -m variants.blockwise                          # laptop, 2 to 4 minutes, no download
    # a node of eight, the paper's batch; blocks: the thinking, and what follows it
    torchrun --nproc_per_node=8 -m variants.blockwise --task dapo-math-17k --marker "</think>" \\
        --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --eval_task math500 \\
        --prompts_per_step 64 --group_size 32 --max_new_tokens 8192 --lr 1e-6 --warmup 64 \\
        --weight_decay 0.1 --micro_tokens 8192
"""

from dataclasses import dataclass
import math
from pathlib import Path
from typing import Literal  # <own>

from common.batch import Rollout, balance_tokens
from common.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.cli import BadInput, blame  # <own>
from common.clock import timed  # <own>
from common.data import load_task
from common.data import Task  # <own>
from common.distributed import World, clip_gradients, divide_gradients, shard
from common.distributed import global_sum  # <own>
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
    """ε of the lower clip, which is at 1 - ε (PPO's value; DeepSeekMath gives none)."""
    clip_high: NonNegative = 0.2
    """ε of the upper clip, which is at 1 + ε (our choice; DAPO and STAPO: 0.28)."""
    task: str = "variants/steps.py"  # <own>
    """As in every file; the default has a verifier with partial rewards for the working."""
    marker: str = "#"  # <own>
    """Ends the working; one token, of which the last one in a response counts."""
    baseline: Literal["none", "batch", "group", "outcome"] = "outcome"  # <own>
    """Baseline of an answer's reward: none, or the mean of the batch, of the group, or of those
    answers in the group whose working has the same reward."""


def advantages(rewards: Tensor) -> Tensor:
    """Reward minus group mean: `[P, G]` -> `[P, G]`. [1, 0, 0, 0]: [.75, -.25, -.25, -.25]."""
    # If all rewards are equal, all advantages must be exactly 0. But rounding makes the mean of
    # eight rewards of 0.3 not quite 0.3. So subtract the first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # If all responses are right, or all are wrong, the advantages are exactly 0: a prompt that is
    # too easy or too hard teaches nothing.
    return centred  # no std: a block's reward keeps its scale  # <own>


# <own>
def compared(args: Args, working: Tensor) -> Tensor:
    """True `[P, G, G]` if answer j is in the baseline of answer i, given the workings' rewards."""
    return (working[:, :, None] == working[:, None]) | (args.baseline == "group")


def answer_advantages(args: Args, rewards: Tensor, working: Tensor, world: World) -> Tensor:
    """Advantages of the answers, from their rewards and those of their workings: `[P, G]` each."""
    if args.baseline == "none":
        return rewards
    if args.baseline == "batch":
        total = global_sum({"reward": rewards.sum(), "count": rewards.numel()}, world)
        return rewards - total["reward"] / total["count"]
    alike = compared(args, working)  # [P, G, G]
    # The mean of the differences is exactly 0 for equal rewards.
    apart = rewards[:, :, None] - rewards[:, None]  # [P, G, G]
    return (apart * alike).sum(dim=2) / alike.sum(dim=2)  # [P, G]


def marker_token(args: Args, tokenizer: object) -> int:
    """The marker's token id."""
    with blame(f"--marker {args.marker}: this model's tokenizer cannot write it"):
        ids = tokenizer(args.marker, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] == tokenizer.eos_token_id:
        raise BadInput(f"--marker {args.marker}: must be one token of this model, and not its last")
    return ids[0]


def working_mask(rollout: Rollout, marker: int) -> Tensor:
    """1.0 on the working's tokens `[N, T]`: up to the last marker, or all if there is none."""
    found = (rollout.tokens == marker) & rollout.mask.bool()  # [N, T]
    ahead = found.flip(1).cumsum(1).flip(1) > 0  # [N, T]: a marker is here or later
    return rollout.mask * (ahead | ~found.any(1, keepdim=True))


def block_texts(rollout: Rollout, marker: int, tokenizer: object) -> tuple[list[str], list[str]]:
    """The working of every response up to the marker, and the answer from the marker on."""
    rows, ends = rollout.response_ids(), rollout.working.sum(1).long().tolist()
    blocks = [row[:end] for row, end in zip(rows, ends)]
    blocks += [[marker, *row[end:]] for row, end in zip(rows, ends)]
    texts = tokenizer.batch_decode(blocks, skip_special_tokens=True)
    return texts[: len(rows)], texts[len(rows) :]


@timed("reward")
def block_rewards(task: Task, rollout: Rollout, answers: list[str], marker: int) -> list[Tensor]:
    """The rewards of the workings and those of the answers, `[N]` each."""
    found = []
    for texts in block_texts(rollout, marker, task.tokenizer):
        found.append(torch.tensor(task.verifier(texts, answers), device=rollout.mask.device))
    return found


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
ACTED = {
    "advantages_apart": "|Â of the working - Â of the answer|",
    "alone": "answers without a sibling to compare with (share)",
    "working_reward": "reward of the working",
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
    # <own>
    working = batch.working  # [n, T]: 1 on the working, 0 on the answer
    # [n, T]: each token has its block's advantage
    A = torch.where(working > 0, batch.working_advantages[:, None], batch.advantages[:, None])
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
    stats["advantages_apart"] = (batch.working_advantages - batch.advantages).abs().sum(), len(mask)
    # 1/|T_ik|: a block's mean, so three tokens of answer weigh as much as thirty of working.
    blocks = (mask * working, mask * (1 - working))  # [n, T], [n, T]
    means = [(objective * block).sum(1) / block.sum(1).clamp(min=1) for block in blocks]  # [n] each
    return -sum(means).sum(), mask.new_tensor(len(mask)), stats  # sum, count
    # </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    marker = marker_token(args, tokenizer)  # <own>
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
        task.score(rollout, problems, G)  # the whole responses' rewards, for metrics  # <own>
        # <own>
        rollout.working = working_mask(rollout, marker)  # [N, T]
        answers = [p.answer for p in problems for _ in range(G)]
        working, answer = block_rewards(task, rollout, answers, marker)  # [N], [N]
        working, answer = working.view(P, G), answer.view(P, G)
        rollout.working_advantages = advantages(working).flatten()  # [N]
        rollout.advantages = answer_advantages(args, answer, working, world).flatten()  # [N]
        alone = compared(args, working).sum(dim=2) == 1  # [P, G]
        means.add(working_reward=(working.sum(), P * G), answer_reward=(answer.sum(), P * G))
        means.add(alone=(alone.sum(), P * G))
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
