"""JustRL: the plain recipe, with nothing added.

He et al., "JustRL: Scaling a 1.5B LLM with a Simple RL Recipe",
2025, arXiv 2512.16649.

Objective, over all response tokens y_t of a mini-batch, with r = π_θ(y_t) / π_old(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t min(r Â_i, clip(r, 1-ε_low, 1+ε_high) Â_i)
    Â_i = (R_i - mean R) / std R

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    M r Â
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

No KL term, no entropy bonus, no dynamic sampling, no punishment for length, no stages, nothing
scheduled. The authors train two models of 1.5B parameters for thousands of steps with one setting,
and report that neither collapses and that two usual additions (DAPO's overlong punishment, a more
lenient verifier) make them worse. It is what every addition in this repository should be measured
against.

Two things it does take from DAPO. The token mean: every token counts the same, in a long response
as in a short one. And ε_high > ε_low: a token at probability 0.01 may rise to 0.0128 and not just
to 0.012 before its gradient is cut, and rare tokens are where new behaviour comes from.

Base file: grpo.py. Differs from it in:
1. The mean over all tokens of the mini-batch in place of the mean of response means.
2. ε 0.2 / 0.28.
3. No KL term, no reference model.

Differs from the paper in:
1. Its script passes `clip_ratio_c=10`, verl's bound on r where Â < 0; here there is none.
2. Weight decay is 0.1 and the warm-up 10 steps there: flags.

Confidence: formula, ε and sizes read in the authors' script; their findings in the paper's abstract
and second hand.

Run it:
    torchrun -m variants.justrl                             # laptop, two minutes, no download
    # a node of eight, the paper's sizes (it has four)
    torchrun --nproc_per_node=8 -m variants.justrl --task dapo-math-17k --eval_task aime24 \\
        --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --prompts_per_step 256 --group_size 8 \\
        --max_new_tokens 15360 --lr 1e-6 --warmup 10 --weight_decay 0.1 --gradient_checkpointing
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard
from common.logprobs import Policy, all_logprobs, frozen_reference, micro_batches
from common.logprobs import response_logprobs, sampler_gap
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
    model: str = "tiny"
    """Hub name, local folder, or `tiny`, the embedded model."""
    steps: Count = 150
    """Rollouts, each followed by `minibatches` optimiser steps (ours)."""
    prompts_per_step: Count = 16
    """Prompts in a rollout, over all ranks (ours)."""
    group_size: Count = 8
    """G: responses to each prompt (DeepSeekMath: 64)."""
    minibatches: Count = 4
    """Optimiser steps per rollout; from the second on π_θ has left π_old and the ratios are alive
    (DeepSeekMath: 1)."""
    max_new_tokens: Count = 64
    """Length limit of a response (DeepSeekMath: 1024)."""
    temperature: Temperature = 1.0
    """Sampling temperature, also applied in every log-probability (papers: 1)."""
    lr: Positive = 3e-4
    """AdamW's learning rate, constant after warm-up; right for the embedded model (DeepSeekMath:
    1e-6 at 7B)."""
    eval_every: Count = 25
    """Steps between two measurements on the held-out problems (ours)."""
    save_every: Count = 50
    """Steps between two checkpoints (ours)."""
    save_hf: bool = False
    """Write the final model in the Hugging Face format, to `model` in the run folder."""
    resume: bool | Literal["auto"] = False
    """Go on from the newest checkpoint in the run folder; auto: if there is one."""
    micro_tokens: Count = 16384
    """Padded tokens in one forward and backward pass: changes memory, never the gradient (ours)."""
    warmup: Whole = 5
    """Steps over which lr rises linearly (ours; verl's default: none)."""
    betas: Betas = (0.9, 0.95)
    """AdamW's decay rates (OpenRLHF's; verl, on which most of the papers' code runs, has 0.9
    0.999)."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay (ours; verl's default: 0.01)."""
    grad_clip: Positive = 1.0
    """Largest gradient norm (verl's default)."""
    clip_low: NonNegative = 0.2
    """ε below 1 (authors' script)."""
    clip_high: NonNegative = 0.28  # <own>
    """ε above 1 (authors' script)."""


def advantages(rewards: Tensor) -> Tensor:
    """Group z-score: `[P, G]` -> `[P, G]`. Rewards [1, 0, 0, 0] give [1.5, -0.5, -0.5, -0.5]."""
    # Equal rewards become exactly 0 first: the mean of eight 0.3 is not quite 0.3.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # A group all right or all wrong gives exactly 0: a prompt too easy or too hard teaches nothing
    # about the reward. The 1e-6 only keeps 0/0 away.
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)  # [P, G]


# The metrics that show the mechanism at work; the first stays 0 while it does nothing.
ACTED = {"clip_share": "tokens clipped (share)"}  # <own>


def policy_loss(
    args: Args,
    *,
    logp: Tensor,
    old_logp: Tensor,
    rollout_logp: Tensor,
    ref_logp: Tensor | None,
    entropy: Tensor,
    advantages: Tensor,
    mask: Tensor,
) -> tuple[Tensor, Tensor, dict]:
    """-J summed over the n rows given, what to divide it by, and statistics as (sum, count) pairs.

    All `[n, T]` but advantages `[n]`. The caller adds sums and counts up over micro-batches and
    ranks and divides once: a mean of micro-batch means would be another objective. Every file is
    handed the same tensors, needed or not.
    """
    A = advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    # <own>
    ratio = (logp - old_logp).exp()  # [n, T]: r, 1 until the first optimiser step of a rollout
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
    # min, not just clip: it keeps the gradient of tokens that moved the wrong way, so that they can
    # be brought back.
    objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    out_above, out_below = ratio > 1 + args.clip_high, ratio < 1 - args.clip_low  # [n, T]
    cut = ((A > 0) & out_above) | ((A < 0) & out_below)  # [n, T]: M = 0
    stats = {"clip_share": ((cut * mask).sum(), mask.sum())}
    stats["clip_above"] = ((cut & out_above) * mask).sum(), mask.sum()
    stats["clip_below"] = ((cut & out_below) * mask).sum(), mask.sum()
    return -(objective * mask).sum(), mask.sum(), stats  # the mean over all tokens
    # </own>


def main(args: Args, world: World) -> None:
    """The whole training loop."""
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    reference = frozen_reference(args, lm, world)  # π_ref; None without a KL term
    policy = shard(Policy(lm), args, world)
    decay = {"betas": args.betas, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **decay)
    run = Run(args, task, world, Path(__file__).stem, ACTED)
    done = 0  # steps
    if args.resume:
        done, state = load_checkpoint(run.folder, policy, optimizer, world)
        engine.load_state_dict(state["engine"])
    engine.sync(policy)
    run.start(done)
    if done == 0:
        run.clock("evaluate")
        run.log(0, evaluate(engine, task, tokenizer, args, world))
    P, G = args.prompts_per_step // world.size, args.group_size  # P: this rank's prompts

    for step in run.steps(done, args.steps):
        means = Means()

        # Rollout: this rank's P prompts, G responses each. The cursor is a function of the step:
        # nothing else to save.
        run.clock("rollout")
        cursor = (step - 1) * args.prompts_per_step + world.rank * P
        problems = [task.train(cursor + i) for i in range(P)]
        prompts = [problem.prompt_ids for problem in problems]
        rollout = engine.generate(prompts, G, args.max_new_tokens, args.temperature)  # N = P·G rows

        # Reward and advantages. Groups never span ranks, so their statistics need no communication.
        run.clock("reward")
        texts = tokenizer.batch_decode(rollout.response_ids(), skip_special_tokens=True)
        scores = task.verifier(texts, [p.answer for p in problems for _ in range(G)])
        rewards = torch.tensor(scores, device=world.device).view(P, G)  # [P, G]
        rollout.record_rewards(problems, rewards)  # samples.jsonl: which row answers what
        rollout.advantages = advantages(rewards).flatten()  # [N]
        means.add(distinct=(task.distinct(texts, G), P))  # falls to 1: nothing left to compare

        # π_old: the weights that sampled, evaluated by the trainer. The sampler's own numbers come
        # from other kernels, and a ratio against them would mix two things: how far the policy
        # moved, and how the engines differ (minirl.py is about that).
        run.clock("old_logp")
        # Mini-batches of whole groups. In each the ranks exchange rows until their token
        # counts are about equal.
        minibatches = [balance_tokens(part, world) for part in rollout.split(args.minibatches)]
        # Divided into micro-batches as the update will be: its first ratios are then exactly 1.
        for minibatch in minibatches:
            minibatch.old_logp, _ = all_logprobs(policy, minibatch, args, world)  # [n, T]
            if reference:
                minibatch.ref_logp, _ = all_logprobs(reference, minibatch, args, world)
        # Stops the run where μ, the sampler's numbers, is far from π_old: ratios would be wrong.
        sampler = run.check_sampler(sampler_gap(minibatches, world))

        # Update: a mini-batch is one optimiser step, in as many micro-batches as memory asks for.
        run.clock("update")
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / max(1, args.warmup))
        for minibatch in minibatches:
            denominator = 0.0
            for rows in micro_batches(policy, minibatch, args.micro_tokens, world):
                micro = minibatch.rows(rows)
                logp, entropy = response_logprobs(policy, micro, args.temperature)  # [n, T]
                loss, count, stats = policy_loss(
                    args,
                    logp=logp,
                    old_logp=micro.old_logp,
                    rollout_logp=micro.rollout_logp,
                    ref_logp=micro.ref_logp,
                    entropy=entropy,
                    advantages=micro.advantages,
                    mask=micro.mask,
                )
                loss.backward()  # sums: gradients add up over micro-batches
                denominator = denominator + count
                run.watch(minibatch, rows, logp, entropy, count)  # samples.jsonl: logp.grad
                means.add(loss=(loss, count), **stats, **by_sign(entropy, micro))
            divide_gradients(policy, denominator, world)  # by what all ranks have counted: the mean
            norm = clip_gradients(policy, args.grad_clip)
            if run.gradient_is_finite(norm, minibatch, means):  # NaN would ruin the weights
                optimizer.step()
            optimizer.zero_grad()

        run.clock("sync")
        engine.sync(policy)

        metrics = means.add(**of_rollout(rollout, rewards, task)).reduce(world) | sampler
        metrics["lr"] = optimizer.param_groups[0]["lr"]
        if run.due(step, args.eval_every):
            run.clock("evaluate")
            metrics |= evaluate(engine, task, tokenizer, args, world)
        run.log(step, metrics)  # before the checkpoint: a kill in between would lose it for good
        if run.due(step, args.save_every):
            run.clock("save")
            state = {"engine": engine.state_dict()}
            save_checkpoint(run.folder, step, policy, optimizer, state, world)
    if args.save_hf:
        save_model(policy, tokenizer, run.folder / "model", world)
    run.finish()


if __name__ == "__main__":
    launch(main, Args)
