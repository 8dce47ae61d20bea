"""DPPO: Divergence Proximal Policy Optimization.

Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning",
2026, arXiv 2602.04879.

Objective, for responses y sampled by the inference engine, whose probabilities are μ:

    J = E_y~μ [ Σ_t M_t sg[min(π_θ(y_t)/μ(y_t), c)] Â log π_θ(y_t) ]
    M_t = 0 if (Â > 0 and π_θ > μ or Â < 0 and π_θ < μ) and D(μ, π_θ) > δ, else 1
    D = |π_θ - μ|   or   D = μ log(μ/π_θ) + (1-μ) log((1-μ)/(1-π_θ))     (TV or KL of two coins)

Gradient weight on ∇ log π_θ(y_t), summed over tokens, averaged over responses:

    M_t min(π_θ/μ, c) Â                (`--log_square κ` adds - 2 κ log(π_θ/μ) at every token)

A trust region should bound the distance of two distributions. The ratio of the sampled token is a
poor measure of it. From 0.001 to 0.0013 the ratio is 1.3 and the token is cut, although only 0.0003
of the probability has moved. From 0.8 to 0.99 the ratio is 1.24 and the token passes, although a
fifth has moved. So a bound on ratios restrains rare tokens, but not common ones.

DPPO bounds the divergence of a coin: this token or any other. Merging outcomes never adds to a
divergence, so the coin's is a lower bound of the vocabulary's, and it needs only the log-probs. The
two δ of the paper mean much the same: TV <= sqrt(KL / 2) (Pinsker), so KL 0.05 allows TV 0.158.

Like PPO's clip, the mask acts only in the direction of the advantage. It measures from μ, not from
π_old. Where sampler and trainer disagree, a token is away from μ before the first update. With a
region around π_old, as in minirl.py, or without one, as in cispo.py, the authors see this
difference grow until the run collapses.

Base file: minirl.py. Differs from it in:
1. The mask: a divergence from μ instead of the ratio to π_old.
2. Cap 20. Removed: the ablation without μ, as the mask needs μ; the length norm; and routing
   replay, without which the authors' mixture of experts stays stable.

Differs from the paper in:
1. Only the coin's divergence; the paper also has one over the most likely tokens.
2. Advantages have no std, and tokens are summed, as in the base file. verl's script does the same,
   and also divides the sums by a constant.
3. The cap is 20, as in verl and TRL. The authors' own code has 10. verl's script sets 10,000, in
   effect none.

prime-rl's IPO is this mask with |π_θ - μ| <= 0.3 on both sides for any Â, w uncapped, and (log w)²
times 1e-3 on every token. Its page (read in November 2026) calls it the default. Its code of 21
August 2026 has 0.1 there, and as the default DPPO's mask at 0.2 with the same square. Nothing pulls
a masked token back, but the square does. The last command below is IPO, except for its average over
all tokens, which only changes lr.

Confidence: we read masks and caps in the authors' code and verl's, and IPO in prime-rl's code and
page. δ is as TRL and verl's script give the paper's, which asks for a large cap.

Run it:
    torchrun -m variants.dppo                               # laptop, 2 to 4 minutes, no download
    torchrun -m variants.dppo --trust_region kl
    torchrun -m variants.dppo --two_sided --delta 0.3 --log_square 1e-3 --is_cap 1e9    # IPO
    # a node of eight, the sizes of verl's script (which trains Qwen3-30B-A3B-Base)
    torchrun --nproc_per_node=8 -m variants.dppo --model Qwen/Qwen3-8B-Base --task dapo-math-17k \\
        --eval_task aime24 --prompts_per_step 256 --group_size 16 --minibatches 8 --lr 1e-6 \\
        --max_new_tokens 8192 --gradient_checkpointing --vllm_sleep --vllm_memory 0.7
"""

from dataclasses import dataclass
import math
from pathlib import Path
from typing import Literal

from common.batch import Rollout, balance_tokens
from common.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
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
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float8"] = "float8"
    """Precision of the sampler's weights (auto: as dtype; float8 with vllm: on GPUs only)."""
    trust_region: Literal["tv", "kl"] = "tv"
    """D: total variation or KL divergence, of the sampled token against all others."""
    delta: NonNegative = 0.0
    """δ, the largest divergence from μ (0: the paper's, 0.15 of tv and 0.05 of kl)."""
    is_cap: Positive = 20.0
    """c: largest importance weight π_θ/μ (verl's default)."""
    two_sided: bool = False
    """Mask beyond δ in both directions (prime-rl's IPO: with --delta 0.3)."""
    log_square: NonNegative = 0.0
    """κ: weight of (log π_θ/μ)² on every token, masked or not (our choice; prime-rl: 1e-3)."""
    # </own>


def advantages(rewards: Tensor) -> Tensor:
    """Reward minus group mean: `[P, G]` -> `[P, G]`. [1, 0, 0, 0]: [.75, -.25, -.25, -.25]."""
    # If all rewards are equal, all advantages must be exactly 0. But rounding makes the mean of
    # eight rewards of 0.3 not quite 0.3. So subtract the first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # If all responses are right, or all are wrong, the advantages are exactly 0: a prompt that is
    # too easy or too hard teaches nothing.
    return centred  # no std: dividing by it would weight prompts by their difficulty  # <own>


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
# <own>
ACTED = {
    "masked_share": "tokens masked (share)",
    "weight_max": "largest weight π_θ/μ, before its cap",
}
DELTA = {"tv": 0.15, "kl": 0.05}  # δ of the paper
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
    log_weight = logp.detach() - batch.rollout_logp  # [n, T]
    uncapped = log_weight.exp()  # [n, T]: π_θ/μ
    weight = uncapped.clamp(max=args.is_cap)  # [n, T]: without gradient
    p, mu = logp.detach().exp(), batch.rollout_logp.exp()  # [n, T]: the coins' probabilities
    if args.trust_region == "tv":
        divergence = (p - mu).abs()  # [n, T]
    else:  # 1e-8: at μ = 1 the second term is 0, not 0 · ∞
        others = ((1 - mu + 1e-8) / (1 - p + 1e-8)).log()  # [n, T]
        divergence = (1 - mu) * others - mu * log_weight  # [n, T]: KL(μ ‖ π_θ)
    # `~ <=`, so that NaN (a p that rounds to more than 1) counts as beyond.
    beyond = ~(divergence <= (args.delta or DELTA[args.trust_region]))  # [n, T]
    out_above, out_below = beyond & (p > mu), beyond & (p < mu)  # [n, T]
    cut = ((A > 0) & out_above) | ((A < 0) & out_below)  # [n, T]: M = 0
    if args.two_sided:
        cut = beyond  # [n, T]: also tokens that would come back
    objective = ~cut * weight * A * logp  # [n, T]: only log π_θ has a gradient
    objective = (
        objective - args.log_square * (logp - batch.rollout_logp) ** 2
    )  # [n, T]: brings it back
    per_response = (objective * mask).sum(dim=1)  # [n]: a sum, not a mean
    stats = {
        "masked_share": ((cut * mask).sum(), mask.sum()),
        "masked_above": (((cut & out_above) * mask).sum(), mask.sum()),
        "masked_below": (((cut & out_below) * mask).sum(), mask.sum()),
        "weight": ((weight * mask).sum(), mask.sum()),
        "weight_max": (torch.cat([mask.new_zeros(1), uncapped[mask > 0]]).max(), None),
    }
    # The caller divides by the responses of this mini-batch, on all ranks: 1/G, and the mean over
    # prompts.
    return -per_response.sum(), mask.new_tensor(len(mask)), stats  # sum, count
    # </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)  # <own>
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
        # <own>
        for minibatch in minibatches:
            minibatch.old_logp = all_logprobs(policy, minibatch, args, world).logp  # [n, T]
        # </own>
        # Stop if the sampler's log-probs, μ, are far from π_old: then one of the two is broken.
        means.add(**run.check_sampler(minibatches))  # <own>

        # Update: one optimiser step per mini-batch, in as many micro-batches as memory requires.
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / max(1, args.warmup))
        for minibatch in minibatches:
            denominator = 0.0
            for rows in micro_batches(policy, minibatch, args.micro_tokens, world):
                micro = minibatch.rows(rows)
                logp, micro.entropy = response_logprobs(policy, micro, args.temperature)  # [n, T]
                loss, count, stats = policy_loss(args, logp, micro)
                loss.backward()  # a sum: gradients add up over micro-batches
                denominator = denominator + count
                # logp keeps its gradient, ∂loss/∂log π_θ: minus each token's weight on ∇ log π_θ.
                minibatch.put(rows, logp=logp.detach(), entropy=micro.entropy, weight=-logp.grad)
                means.add(loss=(loss, count), **stats)
            # Sums become means: gradients and token weights are divided by the count of all ranks.
            minibatch.weight /= divide_gradients(policy, denominator, world)
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
