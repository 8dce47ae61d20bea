r"""MiniRL: the first-order view of policy gradients, with its two discrepancies made explicit.

Qwen team, "Stabilizing Reinforcement Learning with LLMs: Formulation and Practices",
2025, arXiv 2512.01374.

The problem: the true objective is the expected reward of whole responses, but a loss is a sum over
tokens. This sum is a first-order approximation, exact if the policy π_θ equals the sampler μ, and
good only while the two are close. Two discrepancies separate them:

    π_θ/μ  =  π_old/μ       train-inference discrepancy: the same parameters, other numerics
              x π_θ/π_old   staleness: newer parameters

The idea: keep the two apart. The weight π_θ/μ corrects for both; the mask M stops a token whose
staleness alone is too large. The usual mistake is to mix them up, by masking on π_θ/μ or weighting
by r. Dividing by the response's length breaks the approximation even at π_θ = μ.

Objective, for responses y sampled by the inference engine, whose probabilities are μ:

    J = E_y~μ [ Σ_t M_t sg[min(π_θ(y_t)/μ(y_t), 5)] Â log π_θ(y_t) ]
    Â = R - mean R  (of the group; no std),     r = π_θ(y_t)/π_old(y_t)
    M_t = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

R is the reward of y, Â its advantage. π_θ is the policy being trained, and π_old the policy that
sampled, as the trainer evaluates it. sg[x] is x without gradient.

Gradient weight on ∇ log π_θ(y_t), summed over tokens, averaged over responses:

    M_t min(π_θ/μ, 5) Â

In a mixture of experts, a router scores the experts of each layer and sends a token to the best k.
Either discrepancy may send it to other experts, that is, through other parameters. Routing replay
fixes the choice. R2 replays what the trainer chose under π_old, recorded in the pass for old_logp.
R3 replays what the sampler chose, which the engine reports with its tokens. Only the result of the
router's `torch.topk` is replaced: the experts' weights come from the current scores at the recorded
indices, so the router keeps its gradient (common/scale/routing.py).

Differs from grpo.py in:
1. Advantages without std, a sum over tokens without a length, -log π with a detached weight instead
   of min and clip.
2. Both discrepancies are real here. The sampler uses an 8-bit copy of the parameters (in production
   FP8 inference, or only other kernels). With four mini-batches, π_θ moves away from π_old.
3. `--routing_replay`, with `--model tiny-moe`.
4. ε 0.2 / 0.27, no KL term, no reference model.

Run it:
    torchrun minirl.py                                      # laptop, 2 to 4 minutes, no download
    torchrun minirl.py --model tiny-moe --routing_replay r3
    # one H100 (80 GB); float8 needs it or a newer card
    torchrun minirl.py --model Qwen/Qwen3-1.7B-Base --task gsm8k --prompts_per_step 64 \
        --max_new_tokens 2048 --lr 1e-6 --micro_tokens 8192 --save_every 10 \
        --vllm_sleep --vllm_memory 0.55
    # 32 H100s, with experts (not yet run on several GPUs)
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29500 \
        minirl.py --model Qwen/Qwen3-30B-A3B-Base --task dapo-math-17k --eval_task aime25 \
        --prompts_per_step 256 --group_size 16 --lr 1e-6 --gradient_checkpointing \
        --max_new_tokens 8192 --routing_replay r3 --vllm_sleep --vllm_memory 0.75
"""

from dataclasses import dataclass
import math
from pathlib import Path
from typing import Literal  # <own>

from common.batch import Rollout, balance_tokens
from common.cli import Betas, Count, CountOrZero, Flags, NonNegative, Positive, Temperature
from common.cli import BadInput  # <own>
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard, total_count
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from common.metrics import Means, evaluate, metrics_by_sign, rollout_metrics
from common.metrics import clip_shares  # <own>
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
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float8"] = "float8"  # <own>
    """Precision of the sampler's weights (auto: as dtype; float8 with vllm: on GPUs only)."""
    clip_low: NonNegative = 0.2
    """ε of the mask's lower bound (paper)."""
    # <own>
    clip_high: NonNegative = 0.27
    """ε of the mask's upper bound (paper)."""
    is_cap: Positive = 5.0
    """Largest importance weight π_θ/μ (paper)."""
    correct_mismatch: bool = True
    """False: weight by r alone, the paper's ablation without train-inference correction."""
    length_norm: bool = False
    """True: divide by the response's length, the paper's ablation."""
    routing_replay: Literal["none", "r2", "r3"] = "none"
    """Experts to replay in a mixture of experts: r2 the trainer's under π_old, r3 the sampler's."""
    # </own>


def advantages(rewards: Tensor) -> Tensor:
    """Return centred rewards `[P, G]`. Rewards [1, 0, 0, 0] give [0.75, -0.25, -0.25, -0.25]."""
    # Equal rewards must give advantages of exactly 0, but the float32 mean of eight rewards of 0.3
    # is not exactly 0.3. So first subtract the group's first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # If all responses are right, or all wrong, the advantages are exactly 0. Then this prompt adds
    # no gradient but that of a KL term.
    return centred  # no std: dividing by it would weight prompts by their difficulty  # <own>


# <own>
def experts_differ(batch: Rollout, trainer_experts: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens that sampler and trainer sent to different experts in some layer, tokens)."""
    differ, fed = batch.mask.new_zeros(()), batch.ends - 1  # [N]: the last token is not fed back
    # Why row by row? The columns are on the CPU, and sort's indices are eight times as large.
    for end, *row in zip(fed.tolist(), batch.sampler_experts, trainer_experts):
        sampler, trainer = (x[:end].to(differ.device).sort(dim=-1).values for x in row)
        differ += (sampler != trainer).flatten(1).any(dim=1).sum()  # of [end, layers, k]
    return differ, fed.sum()


def importance_weight(args: Args, logp: Tensor, batch: Rollout) -> Tensor:
    """Return π_θ/μ `[n, T]` before its cap, without gradient."""
    behaviour = batch.rollout_logp if args.correct_mismatch else batch.old_logp  # [n, T]
    return (logp.detach() - behaviour).exp()  # [n, T]


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
    weight = importance_weight(args, logp, batch).clamp(max=args.is_cap)  # [n, T]
    ratio = (logp.detach() - batch.old_logp).exp()  # [n, T]: r, for the mask only
    out_above, out_below = ratio > 1 + args.clip_high, ratio < 1 - args.clip_low  # [n, T]
    cut = ((A > 0) & out_above) | ((A < 0) & out_below)  # [n, T]: M = 0
    objective = ~cut * weight * A * logp  # [n, T]: only log π_θ has a gradient
    per_response = (objective * mask).sum(dim=1)  # [n]: a sum, not a mean
    if args.length_norm:
        per_response = per_response / mask.sum(dim=1).clamp(min=1)  # [n]
    # The caller divides by the number of responses in this mini-batch, over all ranks. That does
    # two things at once: 1/G, and the mean over prompts.
    return -per_response.sum(), mask.new_tensor(len(mask))  # sum, count
    # </own>


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    # <own>
    mask = batch.mask  # [n, T]
    uncapped = importance_weight(args, logp, batch)  # [n, T]
    return {
        **clip_shares(logp, batch, args.clip_low, args.clip_high, name="masked"),
        "weight": ((uncapped.clamp(max=args.is_cap) * mask).sum(), mask.sum()),
        "weight_max": (torch.cat([mask.new_zeros(1), uncapped[mask > 0]]).max(), "max"),
    }
    # </own>


# <own>
# Metrics that show the method at work. If the first is always 0, the run says so at its end.
ACTED = {
    "masked_share": "tokens masked (share)",
    "weight_max": "largest weight π_θ/μ, before its cap",
}
# </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    # In vLLM recording switches its scheduling ahead off, so there it records only for a replay.
    experts = args.rollout == "hf" or args.routing_replay == "r3"  # <own>
    engine = make_engine(args, lm, world, record_experts=experts)  # <own>
    policy = shard(Policy(lm), args, world)
    adam = {"betas": args.betas, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **adam)
    run = Run(args, task, world, Path(__file__).stem, ACTED)
    parts = {"engine": engine}  # other objects to save in a checkpoint (each has a state_dict)
    # <own>
    replay = f"--routing_replay {args.routing_replay}"
    if args.routing_replay != "none" and not policy.routing.active:
        raise BadInput(f"{replay}: {args.model} {policy.routing.why_not}")
    if args.routing_replay == "r3" and not engine.reports_experts:
        raise BadInput(f"{replay}: vLLM reports experts only on a GPU, without --tensor_parallel")
    records = engine.reports_experts or args.routing_replay == "r2"  # the trainer's experts
    # </own>
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
        # <own>
        for minibatch in minibatches:
            if args.routing_replay == "r3":  # in π_old's own evaluation, too
                minibatch.replayed_experts = minibatch.sampler_experts
            old = all_logprobs(policy, minibatch, args, world, experts=records)
            minibatch.old_logp = old.logp  # [n, T]
            if args.routing_replay == "r2":  # at the first mini-batch this changes nothing
                minibatch.replayed_experts = old.experts
            if engine.reports_experts:
                means.add(experts_differ=experts_differ(minibatch, old.experts))
        # </own>
        # Stop if the sampler's log-probs, μ, are far from π_old: then one of the two is broken.
        means.add(**run.check_sampler(minibatches))  # <own>

        # 4. Update: one optimiser step per mini-batch, in as many micro-batches as memory requires.
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / max(1, args.warmup))
        for minibatch in minibatches:
            denominator = 0.0
            for rows in micro_batches(policy, minibatch, args.micro_tokens, world):
                micro = minibatch.rows(rows)
                logp, micro.entropy = response_logprobs(policy, micro, args.temperature)  # [n, T]
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
# 1. The hf engine rounds the 8-bit copy's weights, not its activations (vLLM on a GPU: both).
# 2. A sum over tokens exceeds `--grad_clip 1` at nearly every step (norms of 0.9 to 16 here). So
#    steps with large gradients weigh less than without it. Adam cancels a constant scale, but not
#    this one.
# 3. `--no_correct_mismatch` is the paper's ablation only with one mini-batch, where r is 1.
# 4. The paper's setting: Qwen3-30B-A3B-Base after a cold start, up to 32,768 tokens, and N = 1, 2,
#    4 or 8 mini-batches per rollout, each of 64 prompts with 16 responses.
#
# R3 narrows both gaps, but from the start it trains with a routing that the model would not choose.
# In the paper, R3 brings nothing at N = 1. At larger N training needs both the mask and replay: R2
# is better at N = 2, R3 is needed at N = 4 (the default here) and 8, where R2 collapses.
#
# We did not read the curves in the paper's figures (version 3, 3 December 2025). Its text gives no
# learning rate, optimiser or gradient clip, and names no released code.
