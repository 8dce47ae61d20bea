"""OPD: on-policy distillation, a teacher scores every token of the student's own samples.

Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
2023, arXiv 2306.13649.

Objective, over all response tokens y_t of a mini-batch, with w = π_θ(y_t) / μ(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t sg[min(w, C)] sg[Â_t] log π_θ(y_t)
    Â_t = β (log π_T(y_t) - log π_θ(y_t)) + α Â_i
    Â_i = (R_i - mean R) / std R

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    min(w, C) { β log(π_T/π_θ) + α Â_i }

π_T is the teacher, a frozen model that reads the same tokens, and μ is the sampler. By default α is
0: training uses no reward and compares no group. The verifier still runs, so the metrics show
rewards.

A token that the teacher finds more likely than the student does is pushed up, any other token down.
In the mean over the next token that π_θ would draw, this is the gradient of -KL(π_θ ‖ π_T) at this
prefix; w corrects for tokens drawn by μ. It leaves out how a token changes the prefixes after it.
The gradient of the KL of whole responses has the sum of all later differences, too. A teacher's
advice may be worth little on a prefix that it would never have written. `strayed` is the share of
tokens after one that is very unlikely under the teacher.

The advantage uses log π_θ of now, not π_old. So it goes to 0 by itself as the student approaches
the teacher. There is no clip. We guess that a signal that ends at its target needs none. C bounds
the weight of a token that was rare under the sampler.

Base file: grpo.py. Differs from it in:
1. The teacher's difference instead of the clipped ratio and k3. π_T is loaded and run as π_ref is
   there (--offload_reference).
2. The mean over all tokens of the mini-batch instead of the mean of response means.

Differs from the paper, and from public code, in:
1. The paper uses whole distributions and their derivatives (KL in either direction, or between).
   Here the sampled token is an action, as in Thinking Machines' blog (2025). This needs one number
   of the teacher for each token.
2. slime adds β times the difference, with π_old's log-probs, to any advantage (β 1) and passes the
   sum to PPO's clip. verl uses the student's current log-probs, can bound the difference (its
   scripts: 10), and clips as well; or it derives a divergence over the teacher's top tokens.
   prime-rl has w without a bound, adds 1e-3 log² w, and leaves out all tokens with π_θ - μ below
   -0.2 (its code of 21 August 2026).
3. β, α, C and the learning rate are ours. Groups are needed only if α > 0; without a reward
   `--group_size 1` is enough.

Confidence: we read the formulas in the three projects' code of 2026, and the paper's abstract.

Run it:
    torchrun -m variants.opd                                # laptop, 2 to 4 minutes, no download
    # a node of eight; the teacher's weights are sharded like the student's
    torchrun --nproc_per_node=8 -m variants.opd --model Qwen/Qwen3-1.7B-Base --task dapo-math-17k \\
        --teacher Qwen/Qwen3-8B --eval_task math500 --prompts_per_step 64 --max_new_tokens 4096 \\
        --lr 1e-6 --gradient_checkpointing
"""

from dataclasses import dataclass
import math
from pathlib import Path
from typing import Literal  # <own>

from common.batch import Rollout, balance_tokens
from common.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.cli import BadInput  # <own>
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs  # <own>
from common.metrics import Means, evaluate, metrics_by_sign, rollout_metrics
from common.model import load_model
from common.rollout import make_engine
from common.run import Run
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase  # <own>


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
    teacher: str = "tiny-teacher"
    """π_T: hub name or folder of a model that has the student's tokens, or `tiny-teacher`."""
    beta: NonNegative = 1.0
    """β: weight of the teacher's difference; 0 loads no teacher (slime, verl, prime-rl: 1)."""
    reward_weight: NonNegative = 0.0
    """α: weight of the reward's advantage (our choice; 1 with beta 1 is slime's mix with GRPO)."""
    weights: Literal["mu", "none"] = "mu"
    """w: π_θ/μ, or 1, as if every token came from the current policy."""
    is_cap: Positive = 5.0
    """C: largest weight (our choice; minirl.py's)."""
    # </own>

    def compares(self) -> bool:  # <own>
        return self.reward_weight > 0  # the teacher scores single tokens  # <own>


def advantages(rewards: Tensor) -> Tensor:
    """Group z-score: `[P, G]` -> `[P, G]`. Rewards [1, 0, 0, 0] give [1.5, -0.5, -0.5, -0.5]."""
    # <own>
    if rewards.shape[1] == 1:  # no other response to compare with; α is 0, so Â is not used
        return torch.zeros_like(rewards)  # [P, 1]
    # </own>
    # If all rewards are equal, all advantages must be exactly 0. But rounding makes the mean of
    # eight rewards of 0.3 not quite 0.3. So subtract the first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # If all responses are right, or all are wrong, the advantages are exactly 0: a prompt that is
    # too easy or too hard teaches nothing. The 1e-6 only prevents 0/0.
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)  # [P, G]


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
ACTED = {"teacher_kl": "KL to the teacher (nats per token)"}  # <own>
# log 0.01: we assume that the teacher would not write a token below this probability.
FOREIGN = -4.6  # <own>


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
    A = args.reward_weight * A.expand_as(mask)  # [n, T]: α Â_i
    stats = {}
    if args.beta > 0:
        # Detached: no gradient flows through an advantage.
        apart = batch.teacher_logp - logp.detach()  # [n, T]: log π_T - log π_θ, 0 where they agree
        A = A + args.beta * apart
        stats["teacher_kl"] = (-apart * mask).sum(), mask.sum()
        foreign = (batch.teacher_logp < FOREIGN) * mask  # [n, T]
        strayed = (foreign.cumsum(dim=1) - foreign > 0) * mask  # [n, T]: after such a token
        stats["strayed"] = strayed.sum(), mask.sum()
    uncapped = (logp.detach() - batch.rollout_logp).exp()  # [n, T]: w
    weight = uncapped.clamp(max=args.is_cap) if args.weights == "mu" else torch.ones_like(mask)
    stats["weight"] = (weight * mask).sum(), mask.sum()
    stats["weight_max"] = torch.cat([mask.new_zeros(1), uncapped[mask > 0]]).max(), None
    objective = weight * A * logp  # [n, T]
    return -(objective * mask).sum(), mask.sum(), stats
    # </own>


# <own>
def frozen_teacher(args: Args, tokenizer: PreTrainedTokenizerBase, world: World) -> Policy | None:
    """π_T, loaded like a reference model. BadInput if it cannot read the student's tokens."""
    if args.beta <= 0:
        return None
    lm, its = load_model(args.teacher, world, "--teacher")
    # Tokens are passed by number. With another tokenizer they would be other words.
    if not tokenizer.get_vocab().items() <= its.get_vocab().items():
        raise BadInput(f"--teacher {args.teacher}: its tokens are not the student's")
    longest = min(args.max_prompt_tokens + args.max_new_tokens, tokenizer.model_max_length)
    if its.model_max_length < longest:
        reads = f"reads {its.model_max_length} tokens, prompt and response may have {longest}"
        raise BadInput(f"--teacher {args.teacher}: {reads}")
    teacher = shard(Policy(lm), args, world, args.offload_reference)
    return teacher.requires_grad_(False).eval()


# </own>
def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    reference = frozen_teacher(args, tokenizer, world)  # <own>
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
        if reference:
            for minibatch in minibatches:
                found = all_logprobs(reference, minibatch, args, world)  # <own>
                minibatch.teacher_logp = found.logp  # [n, T]  # <own>

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
