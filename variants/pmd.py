"""PMD: policy mirror descent, a regulariser in place of every clip.

Kimi Team, "Kimi k1.5: Scaling Reinforcement Learning with LLMs",
2025, arXiv 2501.12599.

Objective, for G responses y_i to one prompt, sampled from π_old:

    J = -1/G Σ_i 1/L τ/2 (Â_i/τ - log (π_θ(y_i) / π_old(y_i)))²
    Â_i = R_i - mean R
    L: the longest response allowed, a constant

Gradient weight on ∇ log π_θ(y_t), one for all tokens of y_i, before the mean over responses:

    (Â_i - τ log (π_θ(y_i) / π_old(y_i))) / L

Max E[R] - τ KL(π_θ ‖ π_old) has one answer, π* = π_old exp(R/τ) / Z, and that is a statement about
every response: R - τ log Z = τ log π*/π_old. Nothing in it asks who sampled the response. So the
square of the difference can be made small on old samples, with no importance weight and no clip:
the method is off-policy by design. On-policy its gradient is REINFORCE's with the group's mean; as
a response moves, τ log(π_θ/π_old) is taken off its advantage, and once that is used up the sign
turns. A clip is silent beyond its bound and has no say in how far a token goes that others carry
along; this pulls back, more strongly the further out.

The group's mean stands for τ log Z, and they are not near. At τ = 0.01 and one right answer in two
τ log Z is 0.993 and asks a right response for log π_θ/π_old = 0.69, twice as likely; the mean, 0.5,
asks for 50, which no probability can do. Within a step the squares cannot become 0, then: τ is a
brake and no target. paced.py learns the Z that fits; on what the mean does instead there is an
analysis (arXiv 2602.05933: a mixture of KL and χ² that is stricter where rewards are low).

Base file: dr_grpo.py. Differs from it in:
1. The square of the whole response's log ratio in place of ratio and clip.

Differs from the paper in:
1. 1/L is the base file's. There the sum over tokens is not divided; OpenKimi divides by |y_i|.
2. Four optimiser steps per rollout. There an iteration has many, on its samples and on older ones,
   and starts with a new optimiser.
3. No punishment for length, no curriculum, no partial rollouts.
4. τ is not given there; 0.01 is OpenKimi's (arXiv 2602.05933), for responses of thousands of
   tokens. On short ones it does little: `--tau 0.5` shows it at work.

Confidence: the square, the mean for τ log Z and the gradient as two readers of the paper report
them; the paper not read. Kimi's τ would settle the rest. OpenKimi's code (February 2026) has the
square; its scripts take the mean of the other responses, which makes Â 16/15 of ours at their
G = 16, and its `ploo` estimates τ log Z itself, also from the others.

Run it:
    torchrun -m variants.pmd                                # laptop, two minutes, no download
    torchrun -m variants.pmd --tau 0.5
    # a node of eight, OpenKimi's sizes
    torchrun --nproc_per_node=8 -m variants.pmd --model Qwen/Qwen2.5-7B --task dapo-math-17k \\
        --eval_task aime24 --prompts_per_step 512 --group_size 16 --minibatches 16 --lr 1e-6 \\
        --max_new_tokens 8192 --gradient_checkpointing
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
    tau: Positive = 0.01  # <own>
    """τ: how strongly π_θ is held to π_old (OpenKimi's; the paper gives none)."""


def advantages(rewards: Tensor) -> Tensor:
    """Reward over the group's mean: `[P, G]` -> `[P, G]`. [1, 0, 0, 0]: [.75, -.25, -.25, -.25]."""
    # Equal rewards become exactly 0 first: the mean of eight 0.3 is not quite 0.3.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # A group all right or all wrong gives exactly 0: a prompt too easy or too hard teaches nothing
    # about the reward.
    return centred  # no std: 1/std would weight prompts by their difficulty  # <own>


# The metrics that show the mechanism at work; the first stays 0 while it does nothing.
# <own>
ACTED = {
    "pull": "mean |τ log(π_θ/π_old)| of a response, against |Â|",
    "turned": "responses whose weight has changed its sign (share)",
}
# </own>


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
    # The whole response's: what the regulariser holds is a distribution over responses.
    log_ratio = ((logp - old_logp) * mask).sum(dim=1, keepdim=True)  # [n, 1]
    # A square and no bound: far out it does not let go, it pulls back.
    objective = A * log_ratio - args.tau / 2 * log_ratio**2  # [n, 1]
    weight = A - args.tau * log_ratio.detach()  # [n, 1]: on ∇ log π_θ(y)
    live = A != 0  # [n, 1]: the others have no sign to change
    stats = {
        "pull": (args.tau * log_ratio.abs().sum(), A.abs().sum()),
        "turned": ((live & (weight * A < 0)).sum(), live.sum()),
    }
    # 1/L for all, as in the base file: a matter of lr.
    return -objective.sum() / args.max_new_tokens, mask.new_tensor(len(mask)), stats
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
