"""LACONIC: a budget of tokens, and a price that adapts.

Liu et al., "LACONIC: Length-Aware Constrained Reinforcement Learning for LLM",
2026, arXiv 2602.14468.

Objective, for G responses y_i to one prompt, with r = π_θ(y_t) / π_old(y_t) for each token y_t:

    J = 1/G Σ_i 1/|y_i| Σ_t { min(r Â_i, clip(r, 1-ε, 1+ε) Â_i) - β k3 }
    Â_i = (R'_i - mean R') / std R',     R'_i = R_i - λ max(0, |y_i|/B - 1)
    after each step: λ <- clip(λ + η (mean |y| / B - 1), floor, Λ)

Gradient weight on ∇ log π_θ(y_t), without the factors 1/G and 1/|y_i|:

    M r Â + β (π_ref/π_θ - 1)          (with `--kl_ratio` the second term is β r log(π_ref/π_θ))
    M = 0 if (Â > 0 and r > 1+ε) or (Â < 0 and r < 1-ε), else 1

The aim is to be right as often as possible with B tokens on average: max E[R] with E|y| ≤ B. A
fixed charge on length solves this for one price λ, which is not known in advance. A price that is
too high costs right answers; one that is too low saves nothing. Dual ascent finds the price. While
responses are longer than the budget λ rises; otherwise it falls, at most to its floor. Meanwhile
the policy maximises R - λ c.

The cost c is clipped: within the budget, writing less earns nothing. The update of λ uses the
length without this clip. With the clipped cost, whose mean is never negative, λ could only rise. If
the ceiling Λ is below B / (limit - B), every right answer stays worth more than any wrong one.

In a group of equal verdicts the z-score cancels λ: its advantages are those of -c for any λ > 0,
where GRPO learns nothing. With a large η, price and policy oscillate. On the embedded task a right
answer needs its tokens: with the defaults λ rises to Λ, and length and accuracy stay GRPO's. In the
second command the price outweighs answers: lengths swing between 8 and 25 tokens, and greedy
accuracy is 0.47 after 60 steps, not 0.97 (one seed).

Base file: grpo.py. Differs from it in:
1. The rewards for the advantages (`reward` in the metrics stays the verifier's), and λ.

Differs from the paper in:
1. The released code subtracts another 0.1 (default 0.01) for responses cut at the limit. It also
   caps the charge, at a height that its scripts' constants do not reach.
2. B, η, Λ are ours: the paper's runs have hundreds of steps and thousands of tokens.

Confidence: cost, update, their order and constants are from the authors' README and notes on the
code; we have not read the code. We assume that the rest of the objective is GRPO's, with std.

Run it:
    torchrun -m variants.laconic                            # laptop, 2 to 4 minutes, no download
    torchrun -m variants.laconic --length_budget 14 --price_lr 0.5 --price_ceiling 1
    # a node of eight, the authors' sizes and constants
    torchrun --nproc_per_node=8 -m variants.laconic --length_budget 1500 --price_lr 0.002 \\
        --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --task math --price_ceiling 0.1 \\
        --prompts_per_step 128 --group_size 4 --max_new_tokens 4096 --lr 1e-6 \\
        --micro_tokens 8192
"""

from dataclasses import dataclass
import math
from pathlib import Path

from common.batch import Rollout, balance_tokens
from common.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.cli import BadInput  # <own>
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard
from common.distributed import global_sum  # <own>
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from common.logprobs import frozen_reference  # <own>
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
    # <own>
    beta: NonNegative = 0.01
    """β of the KL term; 0: no reference model (our choice; DeepSeekMath: 0.04, R1: 0.001)."""
    kl_ratio: bool = False
    """Multiply k3 by r, so that its gradient is the gradient of the KL (DeepSeek-V3.2)."""
    length_budget: Count = 16
    """B: tokens that responses may have on average (our choice; paper: 1500 to 3000)."""
    price_lr: NonNegative = 0.2
    """η: learning rate of λ, which begins at 0 (our choice; authors' scripts: 0.002)."""
    price_floor: NonNegative = 1e-5
    """Least λ (authors' scripts)."""
    price_ceiling: NonNegative = 0.3
    """Λ: greatest λ (our choice; authors' scripts: 0.1)."""
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


# <own>
def excess(lengths: Tensor, budget: int) -> Tensor:
    """c of responses of these lengths: tokens beyond the budget, divided by it; at least 0."""
    return (lengths / budget - 1).clamp(min=0)


class Budget:
    """The price λ of length. In each step `charge` subtracts λ c from the rewards and sets the next
    step's λ. All ranks have the same λ."""

    def __init__(self, args: Args, world: World):
        if not args.price_floor <= args.price_ceiling <= 1e6:  # beyond, float32 loses R
            raise BadInput(f"--price_ceiling {args.price_ceiling}: below price_floor or above 1e6")
        self.args, self.world, self.price = args, world, 0.0  # λ

    def state_dict(self) -> dict:
        return {"price": self.price}

    def load_state_dict(self, state: dict) -> None:
        self.price = state["price"]

    def charge(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """R - λ c, from rewards and lengths, all `[P, G]`."""
        args = self.args
        self.over = lengths > args.length_budget  # [P, G]
        self.paid = self.price * excess(lengths, args.length_budget)  # [P, G]
        total = global_sum({"tokens": lengths.sum(), "rows": lengths.numel()}, self.world)
        # The mean of all lengths, not of c: if responses are short on average λ falls.
        slope = total["tokens"] / total["rows"] / args.length_budget - 1
        price = self.price + args.price_lr * slope
        self.asked, self.price = self.price, min(max(price, args.price_floor), args.price_ceiling)
        return rewards - self.paid

    def statistics(self) -> dict[str, tuple]:
        """Metrics of the latest charge as (sum, count) pairs."""
        return {
            "charged": (self.paid.sum(), self.paid.numel()),
            "price": (self.asked, 1),
            "over_budget": (self.over.sum(), self.over.numel()),
        }


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
ACTED = {
    "charged": "reward paid for length, mean",
    "price": "λ, the price of length",
    "over_budget": "responses over the budget (share)",
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
    if args.beta > 0:
        log_ref_ratio = batch.ref_logp - logp  # [n, T]: log(π_ref/π_θ), not log(π_θ/π_ref)
        k3 = log_ref_ratio.exp() - log_ref_ratio - 1  # [n, T]
        k3 = ratio * k3 if args.kl_ratio else k3  # [n, T]: r has a gradient too
        objective = objective - args.beta * k3  # [n, T]
        stats["ref_kl"] = ((k3 * mask).sum(), mask.sum())
    per_response = (objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # [n]: 1/|y_i|
    # The caller divides by the responses of this mini-batch, on all ranks: 1/G, and the mean over
    # prompts.
    return -per_response.sum(), mask.new_tensor(len(mask)), stats  # sum, count
    # </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    reference = frozen_reference(args, lm, world)  # π_ref; None if β is 0  # <own>
    budget = Budget(args, world)  # <own>
    policy = shard(Policy(lm), args, world)
    adam = {"betas": args.betas, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **adam)
    run = Run(args, task, world, Path(__file__).stem, ACTED)
    # What else a checkpoint holds: each has a state_dict.
    parts = {"engine": engine, "budget": budget}  # <own>
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
        lengths = rollout.mask.sum(dim=1).view(P, G)  # [P, G]  # <own>
        charged = budget.charge(rewards, lengths)  # [P, G]  # <own>
        rollout.advantages = advantages(charged).flatten()  # [N]  # <own>

        # Mini-batches of whole groups. In each, the ranks exchange rows until they have about
        # equally many tokens.
        minibatches = [balance_tokens(part, world) for part in rollout.split(args.minibatches)]
        # The trainer computes the log-probs of π_old, the policy that sampled. The sampler's own
        # log-probs come from other kernels. A ratio against those would mix two things: how far the
        # policy moved, and how much sampler and trainer differ (see minirl.py).
        # The first mini-batch needs no pass: until the first optimiser step π_θ is π_old.
        for minibatch in minibatches[1:]:
            minibatch.old_logp = all_logprobs(policy, minibatch, args, world).logp  # [n, T]
        # <own>
        if reference:
            for minibatch in minibatches:
                minibatch.ref_logp = all_logprobs(reference, minibatch, args, world).logp  # [n, T]
        # </own>

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

        means.add(**budget.statistics())  # <own>
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
