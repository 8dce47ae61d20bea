"""GRPO: Group Relative Policy Optimization.

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
2024, arXiv 2402.03300.

Objective, for G responses y_i to one prompt, with r = π_θ(y_t) / π_old(y_t) for each token y_t:

    J = 1/G Σ_i 1/|y_i| Σ_t { min(r Â_i, clip(r, 1-ε, 1+ε) Â_i) - β k3 }
    Â_i = (R_i - mean R) / std R
    k3 = π_ref/π_θ - log(π_ref/π_θ) - 1     (>= 0; under samples of π_θ its mean is KL(π_θ ‖ π_ref))

Gradient weight on ∇ log π_θ(y_t), before 1/G and 1/|y_i|:

    M r Â + β (π_ref/π_θ - 1)          (with `--kl_ratio` the second term is β r log(π_ref/π_θ))
    M = 0 if (Â > 0 and r > 1+ε) or (Â < 0 and r < 1-ε), else 1

R_i is the reward of y_i, |y_i| its number of tokens; π_θ is being trained, π_old are the weights
that sampled, π_ref those before training, all given the prompt and the tokens before y_t.
The group replaces PPO's value network: a response is good if it beats its siblings. The clip takes
the gradient away from a token that has already moved by ε in the direction of its advantage
(`--clip_high` up, `--clip_low` down). The KL term pulls back to π_ref, so that the policy keeps
what it could do before; its gradient is that of another KL (docs/questions.md, question 24), and
with `--kl_ratio` its own.

This is the base file: every other file repeats it, except for the lines that it marks.

Differs from the paper in:
1. ε is not stated there; 0.2, PPO's value, is customary.
2. std is the sample standard deviation (divide by G-1) plus 1e-6, as in verl; TRL too divides by
   G-1. The paper does not say which. The population's makes every advantage sqrt(G/(G-1)) times
   larger (7% at G = 8): a matter of lr.
3. β is 0.04 in the paper, 0.01 here, between it and DeepSeek-R1's 0.001: the embedded model must
   be able to move far.
4. Four optimiser steps per rollout where the paper takes one. With one, r = 1 always and the clip
   never acts.
5. No dual clip. A bad token that became more likely (Â < 0, r > 1) keeps the weight r, and one such
   token can outweigh a batch; some frameworks therefore bound it at r = 3 by default.
6. log r is not clamped (verl: to ±20). Beyond 88 exp overflows, and the step is skipped.

Run it:
    torchrun grpo.py                                        # laptop, two minutes, no download
    # a node of eight; paper: batch 1024, G = 64, lr 1e-6
    torchrun --nproc_per_node=8 grpo.py --model Qwen/Qwen3-1.7B-Base --task dapo-math-17k \\
        --eval_task math500 --prompts_per_step 64 --group_size 16 --max_new_tokens 4096 \\
        --lr 1e-6 --beta 0.04 --minibatches 1 --micro_tokens 8192
    # several nodes
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29500 \\
        grpo.py ...
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
    """ε below 1 (ours: DeepSeekMath gives none, PPO's value)."""
    clip_high: NonNegative = 0.2
    """ε above 1 (ours; DAPO and STAPO widen it to 0.28)."""
    beta: NonNegative = 0.01  # <own>
    """β of the KL term; 0 loads no reference model (ours; DeepSeekMath: 0.04, R1: 0.001)."""
    kl_ratio: bool = False  # <own>
    """k3 times r: then its gradient is the KL's own, on π_old's samples too (DeepSeek-V3.2)."""


def advantages(rewards: Tensor) -> Tensor:
    """Group z-score: `[P, G]` -> `[P, G]`. Rewards [1, 0, 0, 0] give [1.5, -0.5, -0.5, -0.5]."""
    # Equal rewards become exactly 0 first: the mean of eight 0.3 is not quite 0.3.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # A group all right or all wrong gives exactly 0: a prompt too easy or too hard teaches nothing
    # about the reward. The 1e-6 only keeps 0/0 away.
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)  # [P, G]


# The metrics that show the mechanism at work; the first stays 0 while it does nothing.
ACTED = {"clip_share": "tokens clipped (share)", "ref_kl": "KL to π_ref (nats per token)"}  # <own>


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
    if args.beta > 0:
        log_ref_ratio = ref_logp - logp  # [n, T]: in this direction; reversed it is another KL
        k3 = log_ref_ratio.exp() - log_ref_ratio - 1  # [n, T]
        k3 = ratio * k3 if args.kl_ratio else k3  # [n, T]: with the gradient through r
        objective = objective - args.beta * k3  # [n, T]
        stats["ref_kl"] = ((k3 * mask).sum(), mask.sum())
    per_response = (objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # [n]: 1/|y_i|
    return -per_response.sum(), mask.new_tensor(len(mask)), stats  # sum, count: 1/G comes later
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
