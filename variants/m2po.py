"""M2PO: a budget for the whole batch instead of a clip for each token.

Zheng et al., "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on
LLMs?", 2025, arXiv 2510.01161.

Objective, over all response tokens y_t of a mini-batch, with w = π_θ(y_t) / μ(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t M_t w Â_i
    Â_i = (R_i - mean R) / std R
    T = tokens with (Â > 0 and w > 1) or (Â < 0 and w < 1)
    M_t = 0 for the fewest of T, of largest (log w)², that leave a mean in T of at most τ; else 1

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    M_t w Â

μ are the probabilities with which the tokens were sampled, by any weights. T are the *trust-region
tokens*: they have moved in the direction of their advantage, and their gradient moves them further
from μ. PPO's clip can act only on these tokens, and so does this mask. A token that fell although
it was rewarded keeps its weight, because its gradient leads back.

The second moment, the mean of (log w)², bounds the variance of w. The mean of log w, a KL, does
not, because tokens that rose and tokens that fell cancel in it. There is one bound for the
mini-batch. With stale samples many tokens are a little outside any clip range, and PPO's clip drops
them all. Here nothing is dropped while the mean holds; beyond it only the farthest tokens are
dropped. The authors report stable training on samples 256 updates old, with 0.06% of the tokens
masked where GRPO clips 1.22%.

Base file: justrl.py. Differs from it in:
1. The mask of the mini-batch's second moment instead of min and clip.
2. w against the sampler instead of r against π_old. One ratio corrects for the sampler's numerics
   and for staleness, as in minirl.py. It has no cap: Â < 0 and w > 1 is not a trust-region token.

Differs from the paper in:
1. The mask is chosen once for each mini-batch, over all ranks, before its gradient. This takes one
   more forward pass. We know of no other difference from Algorithm 1.

Other code differs from Algorithm 1. The authors' code finds the bound b for which the mean of
min((log w)², b) over the trust-region tokens is τ. It then applies PPO's min and clip at exp(±√b),
for each micro-batch. This drops more tokens: if log w is normal with spread 0.3, 19% of all tokens
instead of 10%. AReaL pools and masks all tokens. It drops 19% there, and the gradient of half of
those leads back to μ.

Confidence: we read the rule in the authors' code and in an independent implementation of Algorithm
1 (ms-swift), and τ = 0.04 in the authors' scripts and on their project page. Title and findings are
from the abstract.

Run it:
    torchrun -m variants.m2po                               # laptop, 2 to 4 minutes, no download
    torchrun -m variants.m2po --budget 1e-4                 # where it acts
    # a node of eight, sizes are ours
    torchrun --nproc_per_node=8 -m variants.m2po --model Qwen/Qwen3-1.7B-Base --lr 1e-6 \\
        --task dapo-math-17k --eval_task math500 --prompts_per_step 128 --group_size 16 \\
        --minibatches 16 --max_new_tokens 8192 --gradient_checkpointing
"""

from dataclasses import dataclass
import math
from pathlib import Path

from common.batch import Rollout, balance_tokens
from common.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard
from common.distributed import gather  # <own>
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
    budget: Positive = 0.04  # <own>
    """τ: largest mean of (log π_θ/μ)² over the trust-region tokens that are kept (paper)."""


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
def trust_region_tokens(log_weight: Tensor, A: Tensor) -> Tensor:
    """True `[n, T]` for tokens that moved in the direction of their advantage `[n, 1]`: Â > 0 and
    w > 1, or Â < 0 and w < 1."""
    return ((A > 0) & (log_weight > 0)) | ((A < 0) & (log_weight < 0))  # [n, T]


def second_moment_bound(args: Args, squares: Tensor) -> Tensor:
    """The largest of the squares `[M]` that is kept. The smallest ones are kept, as many as their
    mean stays at most `--budget`. Returns 0 if none can be kept."""
    ordered = squares.double().cpu().sort().values  # [M]
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)  # [M]: increasing
    kept = int((means <= args.budget).sum())
    return ordered[kept - 1].to(squares) if kept else squares.new_tensor(0.0)  # []


def choose_tokens(args: Args, batch: Rollout, world: World) -> None:
    """Write the column `masked` `[m, T]` of a mini-batch, whose bound is one of all ranks."""
    log_weight = batch.logp - batch.rollout_logp  # [m, T]: log π_θ/μ
    outward = trust_region_tokens(log_weight, batch.advantages[:, None])  # [m, T]
    outward &= batch.mask.bool()
    squares = log_weight.square()  # [m, T]
    bound = second_moment_bound(args, gather(squares[outward], world))  # []
    # 1e-6: rounding must not treat equal tokens differently.
    batch.masked = outward & (squares > bound + 1e-6)  # [m, T]


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
ACTED = {
    "masked_share": "tokens masked (share)",
    "second_moment": "mean of (log π_θ/μ)² of the trust-region tokens, before the mask",
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
    log_weight = logp - batch.rollout_logp  # [n, T]: log π_θ/μ
    weight = log_weight.exp()  # [n, T]: w, not clipped
    squares = log_weight.detach().square()  # [n, T]
    outward = trust_region_tokens(log_weight, A) & mask.bool()  # [n, T]
    masked = batch.masked  # [n, T]
    objective = ~masked * weight * A  # [n, T]
    largest = torch.cat([mask.new_zeros(1), weight.detach()[mask > 0]]).max()  # []
    stats = {
        "masked_share": (masked.sum(), mask.sum()),
        "second_moment": ((squares * outward).sum(), outward.sum()),
        "weight_max": (largest, None),
    }
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
            # <own>
            # π_θ/μ of the whole mini-batch, on all ranks: the bound before any gradient.
            minibatch.logp = all_logprobs(policy, minibatch, args, world).logp  # [m, T]
            choose_tokens(args, minibatch, world)
            # </own>
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
