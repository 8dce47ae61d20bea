"""Score centering: the part of the gradient that only moves the policy to or from the sampler goes.

Marek and Ryabinin, "Score Centering Stabilizes Off-policy Reinforcement Learning", 2026, arXiv
2609.20807.

Objective, for responses y sampled by the inference engine, whose probabilities are μ:

    J = E_y~μ [ Σ_t Â (w(y_t) log π_θ(y_t) - Σ_v sg[c(v)] log π_θ(v)) ]
    c(v) = μ(v) w(v) - α π_θ(v) for the sampler's K most likely tokens v, else 0
    w = 1, or a bounded π_θ/μ;     Â = R - mean R  (of the group; no std)

Gradient weight on ∇ log π_θ(y_t) and on every ∇ log π_θ(v), summed over tokens, averaged over
responses:

    w(y_t) Â     and     -c(v) Â

The gradient of a token's log-probability is its score. Under the policy's own samples the mean
score at a prefix is zero: Σ_v π_θ(v) ∇ log π_θ(v) = ∇ 1 = 0. Under the sampler's it is not, and the
update at a prefix has two parts (here with w = 1):

    E_μ[A ∇ log π_θ]  =  E_μ[A] E_μ[∇ log π_θ]  +  Cov_μ(A, ∇ log π_θ)
                         (drift)                   (what was learnt from rewards)

The drift says nothing about which token was better. It moves π_θ to μ where the prefix is promising
(E_μ[A] > 0), and away from μ where it is not. The same gap gives the same push in every step. The
group's mean does not remove it: it makes the mean of A zero over a prompt, not at each prefix. The
centred estimate subtracts the mean score, so that the covariance alone remains.

The mean needs μ of all tokens, and an engine reports K of them. Outside of these K (the tail), μ is
taken as ρ π_θ, with ρ the ratio of the masses that are left: (1 - Σ_K μ) / (1 - Σ_K π_θ). Hence
α = ρ w(1/ρ). With K = vocabulary, which the embedded models allow, there is no tail: the mean is
exact, and α does not matter.

With `--weight` the sampled token has a weight, and so has its mean:

    none    1
    tis     min(π_θ/μ, w_high)
    icepop  π_θ/μ if w_low <= π_θ/μ <= w_high, else 0

The untruncated π_θ/μ leaves nothing to centre: μ π_θ/μ = π_θ, whose mean score is zero. So centring
and importance weights are two ways to the same end. One removes the drift but keeps the sampler's
distribution over tokens; the other also replaces it, at the price of variance.

Base file: minirl.py, because its objective is a weight times Â log π_θ, too: a clip of the ratio,
as in icepop.py or grpo.py, would have to be centred itself. Differs from it in:
1. The centring.
2. No mask M. The weight is 1 by default.
3. Removed: routing replay and the ablations of the weight (here `--weight`).

Differs from the paper in: we read its abstract, its formulas as NeMo-RL's guide and vime's code
state them, and neither its text nor its settings. Advantages, the sum over tokens and the optimiser
are the base file's. Both tail masses are at least 1e-6, as in vime.

Confidence: c and α equal those of vime's published function (its numbers are in checks/). NeMo-RL
adds the term to whatever loss is configured, with its clip; SkyRL has it on by default since 0.5.0.

Run it:
    torchrun -m variants.centred                            # laptop, 2 to 4 minutes, no download
    torchrun -m variants.centred --weight tis               # with truncated importance sampling
    torchrun -m variants.centred --centre_top 0             # without centring: the ablation
    # a node of eight
    torchrun --nproc_per_node=8 -m variants.centred --model Qwen/Qwen3-1.7B-Base \\
        --task dapo-math-17k --eval_task aime25 --prompts_per_step 64 --group_size 16 \\
        --max_new_tokens 8192 --lr 1e-6 --micro_tokens 8192 --centre_top 128
"""

from dataclasses import dataclass
import math
from pathlib import Path
from typing import Literal

from common.batch import Rollout, balance_tokens
from common.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.cli import BadInput  # <own>
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
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float8"] = "float8"  # <own>
    """Precision of the sampler's weights (auto: as dtype; float8 with vllm: on GPUs only)."""
    # <own>
    centre_top: Whole = 20
    """K: the sampler's most likely tokens, whose probabilities it reports at each place; at most
    the vocabulary; 0: no centring (vLLM's own largest number; the paper's is unknown to us)."""
    weight: Literal["none", "tis", "icepop"] = "none"
    """w, a function of π_θ/μ (the table in this file's header)."""
    w_low: NonNegative = 0.5
    """icepop: smallest weight (OpenRLHF, verl)."""
    w_high: Positive = 5.0
    """tis and icepop: largest weight (OpenRLHF, verl; vime: 2)."""
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


# <own>
def importance_weight(args: Args, ratio: Tensor) -> Tensor:
    """w, of π_θ/μ of a token, or of the whole tail: of the same shape."""
    if args.weight == "tis":
        return ratio.clamp(max=args.w_high)
    if args.weight == "icepop":
        kept = (ratio >= args.w_low) & (ratio <= args.w_high)
        return torch.where(kept, ratio, 0.0)  # ∞ · False would be NaN
    return torch.ones_like(ratio)


def centring(args: Args, batch: Rollout) -> Tensor:
    """c `[n, T, K]`, without gradient: what each of the sampler's most likely tokens adds to the
    mean of the score, w ∇ log π_θ, under μ."""
    pi, mu = batch.top_logp.detach().exp(), batch.sampler_top.exp()  # [n, T, K]
    weight = importance_weight(args, (batch.top_logp.detach() - batch.sampler_top).exp())
    tails = [(1 - x.sum(dim=-1, keepdim=True)).clamp(min=1e-6) for x in (mu, pi)]  # [n, T, 1]
    rho = tails[0] / tails[1]  # [n, T, 1]: in the tail, μ = ρ π_θ
    alpha = rho * importance_weight(args, 1 / rho)  # [n, T, 1]: μ w = α π_θ there
    # The tail's mean score, α Σ_tail π_θ ∇ log π_θ, is -α Σ_K π_θ ∇ log π_θ: both add up to 0.
    return mu * weight - alpha * pi  # [n, T, K]


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
ACTED = {
    "centred": "half of Σ |c|: probability that is in another place (share)",
    "tail": "μ outside of the K most likely tokens (share)",
    "weight_max": "largest π_θ/μ of a token, before its bound",
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
    uncapped = (logp.detach() - batch.rollout_logp).exp()  # [n, T]: π_θ/μ
    weight = importance_weight(args, uncapped)  # [n, T]: w
    score = weight * logp  # [n, T]: its gradient is the weighted score
    stats = {
        "weight": ((weight * mask).sum(), mask.sum()),
        "weight_max": (torch.cat([mask.new_zeros(1), uncapped[mask > 0]]).max(), None),
    }
    if args.centre_top > 0:
        c = centring(args, batch)  # [n, T, K]
        score = score - (c * batch.top_logp).sum(dim=-1)  # [n, T]: its mean under μ goes
        tail = 1 - batch.sampler_top.exp().sum(dim=-1)  # [n, T]
        stats["centred"] = (c.abs().sum(dim=-1) / 2 * mask).sum(), mask.sum()
        stats["tail"] = (tail * mask).sum(), mask.sum()
    per_response = (A * score * mask).sum(dim=1)  # [n]: a sum, not a mean
    # The caller divides by the responses of this mini-batch, on all ranks: 1/G, and the mean over
    # prompts.
    return -per_response.sum(), mask.new_tensor(len(mask)), stats  # sum, count
    # </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world, record_top=args.centre_top)  # <own>
    policy = shard(Policy(lm), args, world)
    adam = {"betas": args.betas, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **adam)
    run = Run(args, task, world, Path(__file__).stem, ACTED)
    parts = {"engine": engine}  # what else a checkpoint holds: each has a state_dict
    done = 0  # steps trained so far
    # <own>
    if not args.w_low <= 1 <= args.w_high:  # the weight where sampler and trainer agree
        raise BadInput(f"--w_low {args.w_low}, --w_high {args.w_high}: 1 must lie between them")
    # </own>
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
