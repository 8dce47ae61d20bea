"""PMD: policy mirror descent, a regulariser instead of a clip.

Kimi Team, "Kimi k1.5: Scaling Reinforcement Learning with LLMs",
2025, arXiv 2501.12599.

Objective, for G responses y_i to one prompt, sampled from π_old:

    J = -1/G Σ_i 1/L τ/2 (Â_i/τ - log (π_θ(y_i) / π_old(y_i)))²
    Â_i = R_i - mean R
    L: the longest response allowed, a constant

Gradient weight on ∇ log π_θ(y_t), one for all tokens of y_i, before the mean over responses:

    (Â_i - τ log (π_θ(y_i) / π_old(y_i))) / L

Max E[R] - τ KL(π_θ ‖ π_old) has one answer, π* = π_old exp(R/τ) / Z. So every response obeys R - τ
log Z = τ log π*/π_old, whoever sampled it. PMD therefore makes the square of the difference small
on old samples, without importance weight and clip: it is off-policy by design. On-policy its
gradient is REINFORCE's with the group's mean. As a response moves, τ log(π_θ/π_old) is subtracted
from its advantage; once it exceeds the advantage the sign turns. A clip gives a token beyond its
bound no gradient, even if other tokens carry it further. This penalty pulls back, more strongly the
further the response has moved.

The group's mean stands for τ log Z, but the two are far apart. At τ = 0.01 and one right answer in
two, τ log Z is 0.993. It asks a right response for log π_θ/π_old = 0.69, twice the probability. The
mean, 0.5, asks for 50, which is impossible. So the squares cannot become 0 within a step: τ is a
brake, not a target. paced.py learns the Z that fits. arXiv 2602.05933 analyses the mean: it acts
like a mixture of KL and χ² that is stricter where rewards are low.

Base file: dr_grpo.py. Differs from it in:
1. The square of the whole response's log ratio instead of ratio and clip.

Differs from the paper in:
1. 1/L is the base file's. The paper does not divide the sum over tokens; OpenKimi divides by |y_i|.
2. Four optimiser steps per rollout. An iteration of the paper has many, on its samples and on older
   ones, and starts with a new optimiser.
3. No punishment for length, no curriculum, no partial rollouts.
4. The paper does not give τ; 0.01 is OpenKimi's (arXiv 2602.05933), for responses of thousands of
   tokens. On short ones it does little: `--tau 0.5` shows it at work.

Confidence: the square, the mean for τ log Z and the gradient are as two readers of the paper report
them; we have not read the paper. OpenKimi's code (February 2026) has the square. Its scripts take
the mean of the other responses, which makes Â 16/15 of ours at their G = 16. Its `ploo` estimates τ
log Z itself, also from the others.

Run it:
    torchrun -m variants.pmd                                # laptop, 2 to 4 minutes, no download
    torchrun -m variants.pmd --tau 0.5
    # a node of eight, OpenKimi's sizes
    torchrun --nproc_per_node=8 -m variants.pmd --model Qwen/Qwen2.5-7B --task dapo-math-17k \\
        --eval_task aime24 --prompts_per_step 512 --group_size 16 --minibatches 16 --lr 1e-6 \\
        --max_new_tokens 8192 --gradient_checkpointing --vllm_sleep --vllm_memory 0.7
"""

from dataclasses import dataclass
import math
from pathlib import Path

from common.batch import Rollout
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard
from common.logprobs import Policy, all_logprobs, frozen_reference, micro_batches
from common.logprobs import response_logprobs
from common.plumbing.balance import balance_tokens
from common.plumbing.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.plumbing.evaluation import evaluate
from common.plumbing.flags import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.plumbing.launch import launch
from common.plumbing.metrics import Means, by_sign, of_rollout
from common.plumbing.model import load_model
from common.plumbing.tracking import Run
from common.rollout import make_engine
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
    tau: Positive = 0.01  # <own>
    """τ: how strongly π_θ is held to π_old (OpenKimi's; the paper gives none)."""


def advantages(rewards: Tensor) -> Tensor:
    """Reward minus group mean: `[P, G]` -> `[P, G]`. [1, 0, 0, 0]: [.75, -.25, -.25, -.25]."""
    # If all rewards are equal, all advantages must be exactly 0. But rounding makes the mean of
    # eight rewards of 0.3 not quite 0.3. So subtract the first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # If all responses are right, or all are wrong, the advantages are exactly 0: a prompt that is
    # too easy or too hard teaches nothing.
    return centred  # no std: 1/std would weight prompts by their difficulty  # <own>


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
# <own>
ACTED = {
    "pull": "mean |τ log(π_θ/π_old)| of a response, divided by |Â|",
    "turned": "responses whose weight has changed its sign (share)",
}
# </own>


def policy_loss(
    args: Args, logp: Tensor, entropy: Tensor, batch: Rollout
) -> tuple[Tensor, Tensor, dict]:
    """Returns three things: the sum of the loss over the n rows of `batch`, the count that divides
    this sum, and statistics as pairs (sum, count).

    A row is one response of up to T tokens. `logp` (with gradient) and `entropy` are of π_θ, both
    `[n, T]`. `Rollout` lists the columns of `batch`. The caller adds up the sums and the counts of
    all micro-batches and ranks, and then divides once. Dividing in each micro-batch would give the
    tokens of a small one a larger weight.
    """
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    # <own>
    # One ratio for the whole response: the regulariser is about a distribution over responses.
    log_ratio = ((logp - batch.old_logp) * mask).sum(dim=1, keepdim=True)  # [n, 1]
    # The square has no bound: the further the response has moved, the more it pulls back.
    objective = A * log_ratio - args.tau / 2 * log_ratio**2  # [n, 1]
    weight = A - args.tau * log_ratio.detach()  # [n, 1]: on ∇ log π_θ(y)
    live = A != 0  # [n, 1]: Â = 0 has no sign
    stats = {
        "pull": (args.tau * log_ratio.abs().sum(), A.abs().sum()),
        "turned": ((live & (weight * A < 0)).sum(), live.sum()),
    }
    # 1/L for all, as in the base file: a matter of lr.
    return -objective.sum() / args.max_new_tokens, mask.new_tensor(len(mask)), stats
    # </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    reference = frozen_reference(args, lm, world)  # π_ref; None without a KL term
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

    for step in run.steps(done, args.steps):
        means = Means()

        # Rollout: this rank's P prompts, G responses each. The step number alone decides which
        # prompts are used, so a checkpoint need not save a position in the data.
        cursor = (step - 1) * args.prompts_per_step + world.rank * P
        problems = [task.train(cursor + i) for i in range(P)]
        prompts = [problem.prompt_ids for problem in problems]
        rollout = engine.generate(prompts, G, args.max_new_tokens, args.temperature)  # N = P·G rows

        # Reward and advantages. A group is never split over ranks: its mean needs no communication.
        rewards = task.score(rollout, problems, means)  # [P, G]
        rollout.advantages = advantages(rewards).flatten()  # [N]

        # Mini-batches of whole groups. In each, the ranks exchange rows until they have about
        # equally many tokens.
        minibatches = [balance_tokens(part, world) for part in rollout.split(args.minibatches)]
        # The trainer computes the log-probs of π_old, the policy that sampled. The sampler's own
        # log-probs come from other kernels. A ratio against those would mix two things: how far the
        # policy moved, and how much sampler and trainer differ (see minirl.py).
        # The micro-batches are those of the update. With others, rounding would make the first
        # ratios differ from 1.
        for minibatch in minibatches:
            minibatch.old_logp, _ = all_logprobs(policy, minibatch, args, world)  # [n, T]
            if reference:
                minibatch.ref_logp, _ = all_logprobs(reference, minibatch, args, world)
        # Stop if the sampler's log-probs, μ, are far from π_old: then one of the two is broken.
        sampler = run.check_sampler(minibatches)

        # Update: one optimiser step per mini-batch, in as many micro-batches as memory requires.
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / max(1, args.warmup))
        for minibatch in minibatches:
            denominator = 0.0
            for rows in micro_batches(policy, minibatch, args.micro_tokens, world):
                micro = minibatch.rows(rows)
                logp, entropy = response_logprobs(policy, micro, args.temperature)  # [n, T]
                loss, count, stats = policy_loss(args, logp, entropy, micro)
                loss.backward()  # a sum: gradients add up over micro-batches
                denominator = denominator + count
                minibatch.put(rows, logp=logp.detach(), entropy=entropy, weight=-logp.grad)
                means.add(loss=(loss, count), **stats)
            # From sums to means: by the count of all ranks. So are the weights of the tokens.
            minibatch.weight /= divide_gradients(policy, denominator, world)
            norm = clip_gradients(policy, args.grad_clip)
            run.check_gradient(norm, minibatch, means)  # stops if several in a row are NaN
            if math.isfinite(norm):  # else skip the step
                optimizer.step()
            optimizer.zero_grad()
            means.add(**by_sign(minibatch))
        engine.sync(policy)

        means.add(**of_rollout(rollout, rewards, task))
        metrics = means.reduce(world) | sampler | {"lr": optimizer.param_groups[0]["lr"]}
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
