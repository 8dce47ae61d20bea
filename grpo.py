r"""GRPO: Group Relative Policy Optimization.

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
2024, arXiv 2402.03300.

The problem: a policy gradient has less noise if a response's reward is compared with the reward
that was to be expected. PPO predicts it with a second model, which also has to be trained.

The idea: sample a group of responses to each prompt, and compare each reward with the mean of the
group. Responses above the mean become more likely, responses below it less likely, and no second
model is needed. Two parts of the objective restrain the policy. The clip drops the gradient of a
token whose probability has moved by a factor of 1 ± ε in the wanted direction; it is not a hard
limit, because a single step can overshoot it. The KL term pulls the policy towards the model before
training, to limit what it forgets.

Objective, for G responses y_i to one prompt, with r = π_θ(y_t) / π_old(y_t) at token t of y_i:

    J = 1/G Σ_i 1/|y_i| Σ_t { min(r Â_i, clip(r, 1-ε, 1+ε) Â_i) - β k3 }
    Â_i = (R_i - mean R) / std R
    k3 = π_ref/π_θ - log(π_ref/π_θ) - 1     (never negative; its mean under π_θ is KL(π_θ ‖ π_ref))

R_i is the reward of y_i, |y_i| its length, Â_i the advantage of its tokens; mean and std are the
group's. π_θ is the policy being trained, π_old the policy that sampled, π_ref the model before
training. π(y_t) means π(y_t | prompt, y_<t). ε is the clip's width, β the KL term's weight.

Gradient weight on ∇ log π_θ(y_t), without the factors 1/G and 1/|y_i|; M is the clip's mask:

    M r Â + β (π_ref/π_θ - 1)          (with `--kl_ratio` the second term is β r log(π_ref/π_θ))
    M = 0 if (Â > 0 and r > 1+ε) or (Â < 0 and r < 1-ε), else 1

This is the base file. The eight other algorithm files here copy it, except for lines marked
`# <own>`. The end of each file lists its differences from its paper.

Run it:
    torchrun grpo.py                                        # laptop, 2 to 4 minutes, no download
    # one H100 (80 GB): a minute a step, measured with random weights of this shape (docs/gpu.md)
    torchrun grpo.py --model Qwen/Qwen3-1.7B-Base --task gsm8k --prompts_per_step 64 \
        --max_new_tokens 2048 --lr 1e-6 --minibatches 1 --micro_tokens 8192 --save_every 10 \
        --vllm_sleep --vllm_memory 0.55
    # eight H100s (not yet run on several GPUs); 64 x 16 = 1024 responses (paper: 1024, G = 64)
    torchrun --nproc_per_node=8 grpo.py --model Qwen/Qwen3-1.7B-Base --task dapo-math-17k \
        --eval_task math500 --prompts_per_step 64 --group_size 16 --max_new_tokens 4096 \
        --lr 1e-6 --beta 0.04 --minibatches 1 --micro_tokens 8192
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
from common.logprobs import frozen_reference
from common.metrics import Means, evaluate, metrics_by_sign, rollout_metrics
from common.metrics import clip_shares
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
    clip_low: NonNegative = 0.2
    """ε of the lower clip, which is at 1 - ε (PPO's value; DeepSeekMath gives none)."""
    clip_high: NonNegative = 0.2
    """ε of the upper clip, which is at 1 + ε (our choice; DAPO, STAPO: 0.28; DeepSeek-R1: 10)."""
    beta: NonNegative = 0.01
    """β of the KL term; 0: no reference model (our choice; DeepSeekMath: 0.04; R1: 0.001)."""
    kl_ratio: bool = False
    """Multiply k3 by r, so that its gradient is the gradient of the KL (DeepSeek-V3.2)."""


def advantages(rewards: Tensor) -> Tensor:
    """Return group z-scores `[P, G]`. Rewards [1, 0, 0, 0] give about [1.5, -0.5, -0.5, -0.5]."""
    # Equal rewards must give advantages of exactly 0, but the float32 mean of eight rewards of 0.3
    # is not exactly 0.3. So first subtract the group's first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # If all responses are right, or all wrong, the advantages are exactly 0. Then this prompt adds
    # no gradient but that of a KL term. The 1e-6 only prevents 0/0.
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)  # [P, G]


def k3(args: Args, logp: Tensor, batch: Rollout) -> Tensor:
    """Return k3 `[n, T]`. Its *value* estimates KL(π_θ ‖ π_ref), but its *gradient* belongs to
    KL(π_ref ‖ π_θ). With `--kl_ratio` both belong to the first (docs/questions.md, question 13)."""
    log_ref_ratio = batch.ref_logp - logp  # [n, T]: log(π_ref/π_θ), not log(π_θ/π_ref)
    kl = log_ref_ratio.exp() - log_ref_ratio - 1  # [n, T]
    if args.kl_ratio:
        kl = (logp - batch.old_logp).exp() * kl  # [n, T]: r has a gradient, too
    return kl


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the sum of the loss over the n rows of `batch`, and the count to divide it by.

    A row is one response of up to T tokens; `logp [n, T]` is log π_θ, with gradient. The columns of
    `batch` that files share are listed in `Rollout`. The caller sums over micro-batches and ranks
    and divides once: a mean of means would give the rows of a small micro-batch more weight.
    """
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r; 1 until the rollout's first optimiser step
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
    # Why min, and not the clip alone? A token that moved in the wrong direction must keep its
    # gradient, so that it can come back.
    objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    if args.beta > 0:
        objective = objective - args.beta * k3(args, logp, batch)  # [n, T]
    per_response = (objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # [n]: 1/|y_i|
    # The caller divides by the number of responses in this mini-batch, over all ranks. That does
    # two things at once: 1/G, and the mean over prompts.
    return -per_response.sum(), mask.new_tensor(len(mask))  # sum, count


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    stats = clip_shares(logp, batch, args.clip_low, args.clip_high)
    if args.beta > 0:
        stats["ref_kl"] = (k3(args, logp, batch) * batch.mask).sum(), batch.mask.sum()
    return stats


# Metrics that show the method at work. If the first is always 0, the run says so at its end.
ACTED = {"clip_share": "tokens clipped (share)", "ref_kl": "KL to π_ref (nats per token)"}


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    reference = frozen_reference(args, lm, world)  # π_ref; None if β is 0
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
        if reference:
            for minibatch in minibatches:
                minibatch.ref_logp = all_logprobs(reference, minibatch, args, world).logp  # [n, T]

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
# 1. The paper does not state ε. 0.2 is PPO's value and the usual choice.
# 2. std is the sample standard deviation plus 1e-6, as in verl. It divides by G-1, like TRL; the
#    paper does not say. Dividing by G would make every advantage sqrt(G/(G-1)) times larger (7% at
#    G = 8). AdamW cancels this, but for `--grad_clip`, its epsilon and the balance with the KL.
# 3. β is 0.04 in the paper. Here it is 0.01, because the small model must move far from π_ref to
#    learn its task. Algorithm 1 sets π_ref to the policy at the start of each of its I iterations;
#    here I = 1, so π_ref never changes.
# 4. A rollout (all responses of one step) is used for four optimiser steps, in the paper for one.
#    With one step, r is always 1 and the clip never acts.
# 5. log r is not clamped (verl clamps it to ±20). If it is above 88, exp(log r) overflows, and the
#    step is skipped.
#
# As in the paper, a token with Â < 0 that became more likely (r > 1) is never clipped. With Â = -1
# and r = 50 its weight is -50, as much as that of 50 tokens at r = 1. Some frameworks bound r at 3
# for these tokens (a dual clip).
# DeepSeek-R1 was trained with GRPO in another setting: ε = 10, β = 0.001, a learning rate of 3e-6,
# 16 mini-batches from one rollout of 8,192 responses, and a new π_ref every 400 steps. Its printed
# objective has one ratio for the whole response, where DeepSeekMath has one for each token.
