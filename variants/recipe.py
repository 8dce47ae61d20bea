r"""The recipe: five layers that work together, each with a flag.

Parts of six papers (their files say which), on the base of He et al., "JustRL: Scaling a 1.5B LLM
with a Simple RL Recipe", 2025, arXiv 2512.16649.

The problem: the methods of this repository change different parts of a step. Their papers test
each one alone, so we do not know what they do together.

The idea: build one loop in which each of them is a layer that a flag switches off.

Objective, token-means over main responses and over branches, with r = π_θ(y_t) / π_old(y_t):

    J = 1/T_main Σ_main sg[min(w, 8)] I l + λ 1/T_branch Σ_branch sg[min(w, 8)] I l
    l = min(r Â, clip(r, 1-ε_low, 1+ε_high) Â)    or, with MASPO's gate,    sg[F] r Â
    Â = (R - b) / std R in a prompt's group, (R - mean R) / std R among a branch's siblings
    w = Π_t π_old(y_t)/μ(y_t) of a response,     I = 0 for STAPO's spurious tokens, else 1

Gradient weight on ∇ log π_θ(y_t), before each stream's average (a branch's times λ):

    min(w, 8) I M r Â    or    min(w, 8) F r Â
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

π_old is the policy when the batch is due, μ the policy that sampled it. b is vcpo.py's baseline,
or the mean. T_main and T_branch count the tokens with I = 1. sg[x] is x without gradient. These
are the layers:

    layer                        where              its file        off
    1 clip-higher, token mean    loss, average      justrl.py       --clip_high 0.2 --no_token_mean
    2 mask or gate of tokens     loss               stapo, maspo    --tokens none
    3 curriculum                 choice of prompts  goldilocks.py   --no_curriculum
    4 branches                   after the rewards  deep_grpo.py    --branches 0
    5 stale batches              queue, Â, lr       vcpo.py         --lag 0

Without layers this is grpo.py without KL term; with layer 1, justrl.py; with 1 and 2, stapo.py or
maspo.py; with 3, goldilocks.py without KL term. The end of the file says how layers 4 and 5 differ
from their files.

How do the layers meet? The teacher of layer 3 and the pivots of layer 4 learn from rewards when
these are sampled. With layer 5, the policy learns from them later, when they are due. STAPO's
quantile is over main rows and branches. The w of a branch is computed from its own tokens, without
its prefix. Only groups of main rows use b; a branch is compared with the plain mean of its
siblings.

Base file: grpo.py. Differs from it in:
1. The five layers; no KL term, no reference model.
Loop: its own, in full in this file.

Run it:
    torchrun -m variants.recipe                             # laptop, some minutes, no download
    torchrun -m variants.recipe --tokens none --no_curriculum --branches 0 --lag 0     # justrl.py
    # eight GPUs (not yet run on several); sizes are ours
    torchrun --nproc_per_node=8 -m variants.recipe --model Qwen/Qwen2.5-Math-1.5B --task math \
        --boundary . --prompts_per_step 64 --group_size 8 --max_new_tokens 3072 --lr 1e-6 \
        --teacher_lr 1e-5 --micro_tokens 8192
"""

from dataclasses import dataclass
import math
from pathlib import Path
from typing import Literal  # <own>

from common.batch import Rollout, balance_tokens
from common.cli import BadInput, Count, Exponent, NonNegative, Positive, Share, Whole  # <own>
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard, total_count
from common.distributed import gather, global_sum  # <own>
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from common.logprobs import entropies  # <own>
from common.metrics import Means, evaluate, metrics_by_sign, rollout_metrics
from common.metrics import clip_shares  # <own>
from common.model import load_model
from common.records.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.rollout import make_engine
from common.run import Run
from common.scale.norms import unsupported_module  # <own>
from variants import justrl  # <own>
from variants.justrl import advantages  # <own>
from deep_grpo import Branches  # <own>
from goldilocks import Curriculum  # <own>
from maspo import gates  # <own>
import stapo  # <own>
import torch
from torch import Tensor
from vcpo import Stale, baseline_shifts, ess_ratio, log_weight, truncated  # <own>


@dataclass
class Args(justrl.Args):  # <own>
    token_mean: bool = True  # <own>
    """Layer 1: the mean over all tokens; False: the mean of the responses' means."""
    tokens: Literal["none", "stapo", "maspo"] = "stapo"  # <own>
    """Layer 2: STAPO's mask of spurious tokens, or MASPO's soft gate instead of the clip."""
    tau_p: Share = 0.002  # <own>
    """stapo: a token below this probability may be spurious (paper)."""
    entropy_rule: Literal["all", "candidates"] = "all"  # <own>
    """stapo: tokens over which the quantile τ_h is taken (see stapo.py)."""
    entropy_quantile: Share = 0.8  # <own>
    """stapo, all: the quantile (paper, versions 1 to 3)."""
    candidate_quantile: Share = 0.75  # <own>
    """stapo, candidates: the quantile (paper, version 4)."""
    sigma_base: Positive = 1.0  # <own>
    """maspo: width of the gate for a token of probability 1 (authors' code)."""
    sigma_high: Positive = 10.0  # <own>
    """maspo: largest width, however rare the token (authors' code)."""
    alpha: NonNegative = 0.3  # <own>
    """maspo: how fast the width grows as a token gets rarer (authors' code)."""
    beta_pos: NonNegative = 0.03  # <own>
    """maspo: how much a positive advantage widens the gate (authors' code)."""
    beta_neg: NonNegative = 0.03  # <own>
    """maspo: how much a negative advantage narrows it (authors' code)."""
    curriculum: bool = True  # <own>
    """Layer 3: a teacher chooses the prompts; False: prompts come in their order."""
    candidates: Count = 16  # <own>
    """K: prompts that compete for each slot of the batch (our choice)."""
    explore: Share = 0.1  # <own>
    """η: share of slots filled at random, so that the teacher sees all kinds (our choice)."""
    window: Count = 2048  # <own>
    """Number of latest prompts from which the teacher learns (our choice)."""
    teacher_batch: Count = 64  # <own>
    """Prompts in one update of the teacher; before it has them, choice is random (our choice)."""
    teacher_updates: Whole = 2  # <own>
    """Updates of the teacher per step (our choice)."""
    teacher_lr: Positive = 1e-3  # <own>
    """The teacher's learning rate; its head has ten times this (our choice; real models: 1e-5)."""
    branches: Whole = 8  # <own>
    """Layer 4, K: new endings from a pivot of each failed response; 0: none (DEEP-GRPO's paper)."""
    boundary: str = ";"  # <own>
    """Text that ends a segment; a token that ends in it allows a branch (paper: `.`)."""
    branch_weight: NonNegative = 1.0  # <own>
    """λ: weight of the branches' stream (paper)."""
    depth_power: Exponent = 2.0  # <own>
    """γ: preference for deep pivots (paper)."""
    lag: Whole = 2  # <own>
    """Layer 5, k: batches trained between sampling a batch and training on it; 0: none (our choice;
    with four mini-batches this is eight updates, as in vcpo.py)."""
    is_cap: Positive = 8.0  # <own>
    """Cap of a response's importance weight in the loss (paper); ESS uses the uncapped weights."""
    ess_scaling: bool = True  # <own>
    """With a lag: multiply the learning rate by sqrt(ρ/ρ_on), if the ESS ratio ρ is below ρ_on."""
    rho_on: Positive = 1.0  # <own>
    """ρ_on: ESS ratio from which the learning rate has its full value (paper: 1)."""
    optimal_baseline: bool = True  # <own>
    """With a lag: subtract b (see vcpo.py); False: the group's mean."""


# <own>
def choose_tokens(args: Args, batch: Rollout, world: World) -> None:
    """Write the column `kept` `[m, T]`: I, the mask without STAPO's spurious tokens."""
    batch.kept = batch.mask  # [m, T]
    if args.tokens == "stapo":
        stapo.choose_tokens(args, batch, world)
        batch.kept = batch.mask * ~batch.spurious  # [m, T]


def divided_by_std(args: Args, grown: Rollout) -> Tensor:
    """Return the advantages of branches `[n]` as z-scores; deep_grpo.py only centres them.

    Siblings share their origin. Siblings that are not in `grown` have the advantage 0.
    """
    _, family = grown.origin.unique(return_inverse=True)  # [n]: which siblings
    squares = torch.zeros_like(grown.advantages)  # [n]: each family's sum of squares
    squares.index_add_(0, family, grown.advantages.square())
    std = (squares[family] / (args.branches - 1)).sqrt()  # [n]
    return grown.advantages / (std + 1e-6)


def balanced(part: Rollout, world: World, G: int) -> Rollout:
    """Call `balance_tokens` on main rows in whole groups, which b needs, and on branches row by
    row. Return both together."""
    main = part.branch == 0  # [n]
    rows = balance_tokens(part.rows(main), world, G)
    return Rollout.join(rows, balance_tokens(part.rows(~main), world))


def prepare(args: Args, policy: Policy, batch: Rollout, world: World) -> dict[str, tuple]:
    """Compute what needs a whole mini-batch before its first gradient. All ranks must call it.

    Subtract b from the advantages, store I in the column `kept`, and set `branch` to the main rows'
    divisor over the branches'. Return metrics as pairs (sum, count).
    """
    main, stats = batch.branch == 0, {}  # [n]
    if args.lag:
        shift = torch.zeros_like(batch.advantages)  # [n]: 0 for branches
        shift[main] = baseline_shifts(args, policy, batch.rows(main), world)
        batch.advantages = batch.advantages - shift
        stats["baseline_shift"] = shift.abs().sum(), main.sum()
    # p and H of the whole mini-batch under π_θ
    if args.tokens == "stapo":
        now = all_logprobs(policy, batch, args, world, entropies)
        batch.logp, batch.entropy = now.logp, now.statistic  # [n, T], [n, T]
    choose_tokens(args, batch, world)
    size = counted(args, batch.kept)  # [n]
    streams = global_sum({"main": size[main].sum(), "branch": size[~main].sum()}, world)
    balance = streams["main"] / max(1.0, streams["branch"])
    batch.branch = torch.where(main, 0.0, balance)  # [n]
    return stats


def counted(args: Args, kept: Tensor) -> Tensor:
    """Return what each row adds to its stream's denominator `[n]`: its kept tokens, or 1."""
    return kept.sum(dim=1) if args.token_mean else torch.ones_like(kept[:, 0])


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
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r; 1 until the rollout's first optimiser step
    if args.tokens == "maspo":
        objective = gates(args, ratio.detach(), batch) * ratio * A  # [n, T]: F r Â
    else:
        clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
        objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    if args.lag:
        log_w = log_weight(batch.old_logp, batch.rollout_logp, mask)  # [n]: π_θ/π_old is in r
        objective = objective * truncated(args, log_w)[:, None]  # [n, T]
    kept, branch = batch.kept, batch.branch  # [n, T]; [n]: 0 on main rows
    if not args.token_mean:
        objective = objective / kept.sum(dim=1, keepdim=True).clamp(min=1)  # [n, T]: 1/|y_i|
    main = branch == 0  # [n]
    # The caller divides by the size of the main rows. With the factor `branch`, the branches are
    # averaged over their own size; λ weighs them.
    stream = torch.where(main, 1.0, args.branch_weight * branch)  # [n]
    return -(objective * kept * stream[:, None]).sum(), counted(args, kept)[main].sum()
    # </own>


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    # <own>
    mask = batch.mask  # [n, T]
    if args.tokens == "maspo":
        ratio = (logp - batch.old_logp).exp()  # [n, T]
        closed = 1 - gates(args, ratio, batch)  # [n, T]
        stats = {"gate_closed": ((closed * mask).sum(), mask.sum())}
    else:
        stats = clip_shares(logp, batch, args.clip_low, args.clip_high)
    if args.lag:
        log_w = log_weight(batch.old_logp, batch.rollout_logp, mask)  # [n]
        weights = log_w.clamp(max=20).exp()  # [n]
        stats["weight"] = truncated(args, log_w).sum(), len(log_w)
        stats["weight_max"] = torch.cat([weights.new_zeros(1), weights]).max(), None
    stats["silenced_share"] = (mask - batch.kept).sum(), mask.sum()
    return stats
    # </own>


# <own>
# Metrics that show the method at work. If the first is always 0, the run says so at its end.
ACTED = {
    "layers_acted": "how many layers acted in the step",
    "branches_used": "branches in the batch",
    "ess_ratio": "effective sample size (share of the batch)",
}
# One metric for each layer. It is above 0 if the layer acted.
LAYERS = "clip_share gate_closed silenced_share chosen_over_mean branches_used lr_damping".split()
# </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    # <own>
    if args.branches == 1:
        raise BadInput("--branches 1: must be 0, or 2 or more: a branch is judged by its siblings")
    branches = Branches(args, engine, task, world) if args.branches else None
    curriculum = Curriculum(args, lm, task, world) if args.curriculum else None
    # </own>
    policy = shard(Policy(lm), args, world)
    adam = {"betas": args.betas, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **adam)
    # <own>
    both, optimizers = policy, optimizer
    if curriculum:
        both = torch.nn.ModuleList([policy, curriculum.teacher])
        optimizers = [optimizer, curriculum.optimizer]
    # </own>
    run = Run(args, task, world, Path(__file__).stem, ACTED)
    # <own>
    stale = Stale(args, world)
    # Other objects to save in a checkpoint (each has a state_dict).
    parts = {"engine": engine, "stale": stale}
    if curriculum:
        parts["curriculum"] = curriculum
    if branches:
        parts["branches"] = branches
    # </own>
    done = load_checkpoint(run.checkpoint, both, optimizers, parts, world)  # <own>
    engine.sync(policy)
    if args.lag and args.optimal_baseline and (part := unsupported_module(policy)):  # <own>
        raise BadInput(f"{part}: no gradient norms, use --no_optimal_baseline")  # <own>
    run.start(done)
    if done == 0:
        run.log(0, evaluate(engine, task, args, world))
    P, G = args.prompts_per_step // world.size, args.group_size  # P: this rank's prompts

    for step in run.steps():
        means = Means()

        # 1. Rollout: this rank's P prompts, in their order or by the teacher, G responses each.
        cursor = (step - 1) * args.prompts_per_step + world.rank * P
        problems = [task.train(cursor + i) for i in range(P)]
        # <own>
        if curriculum:
            chosen = curriculum.choose(step)
            problems = [one.problem for one in chosen[world.rank * P : (world.rank + 1) * P]]
        # </own>
        prompts = [problem.prompt_ids for problem in problems]
        rollout = engine.generate(prompts, G, args.max_new_tokens, args.temperature)  # N = P·G rows

        # 2. Reward and advantages. A group is on one rank: its mean needs no communication.
        rewards = task.score(rollout, problems, G)  # [P, G]
        rollout.advantages = advantages(rewards).flatten()  # [N]

        # <own>
        if curriculum:
            means.add(**curriculum.learn(chosen, rewards))
        sampled = rollout.mask.sum()  # tokens
        rollout.branch = torch.zeros_like(rollout.advantages)  # [N]
        shares = rollout.split(args.minibatches)
        if branches:
            # K new endings of every failed response, beside the main rows of its mini-batch.
            grown, stats = branches.grow(rollout, rewards, problems)
            means.add(**stats)
            grown.advantages = divided_by_std(args, grown)
            shares = branches.join(rollout, grown)
        # </own>

        # <own>
        # 3. Log-probs, in mini-batches. The ranks exchange whole groups, which b needs, until their
        # token counts are about equal.
        minibatches = [balanced(part, world, G) for part in shares]
        # </own>
        # The trainer computes the log-probs of π_old, the policy that sampled. The sampler's own
        # log-probs come from other kernels, so a ratio against them would mix two things: how far
        # the policy has moved, and how much sampler and trainer differ (minirl.py separates them).
        for minibatch in minibatches:  # of all: the update may be of another batch  # <own>
            minibatch.old_logp = all_logprobs(policy, minibatch, args, world).logp  # [n, T]
        # Stop if the sampler's log-probs, μ, are far from π_old: then one of the two is broken.
        means.add(**run.check_sampler(minibatches))  # <own>

        # From here on the batch is the one that is due, sampled `lag` batches ago. While the queue
        # fills, no batch is due: the step trains on nothing and logs what it sampled.
        # <own>
        trained = max(0, step - 1 - args.lag)  # batches, before this step
        minibatches = stale.exchange(minibatches)
        if minibatches:
            rollout = Rollout.join(*minibatches)
            rollout = rollout.rows(rollout.branch == 0)  # the main stream
            means.add(lag=(min(trained, args.lag) * args.minibatches, 1))  # age in updates
        # </own>

        # 4. Update: one optimiser step per mini-batch, in as many micro-batches as memory requires.
        # <own>
        # π_old of a stale batch is the policy before this update. So the clip bounds how far one
        # batch moves the policy; the weights w correct for its age.
        for minibatch in minibatches if args.lag else ():
            minibatch.old_logp = all_logprobs(policy, minibatch, args, world).logp  # [n, T]
        # </own>
        warm_lr = args.lr * min(1.0, (trained + 1) / max(1, args.warmup))  # <own>
        optimizer.param_groups[0]["lr"] = warm_lr  # <own>
        for minibatch in minibatches:
            means.add(**prepare(args, policy, minibatch, world))  # <own>
            denominator = 0.0
            for rows in micro_batches(policy, minibatch, args.micro_tokens, world):
                micro = minibatch.rows(rows)
                logp, micro.entropy = response_logprobs(policy, micro, args.temperature)  # [n, T]
                loss, count = policy_loss(args, logp, micro)
                loss.backward()  # a sum: gradients add up over micro-batches
                denominator = denominator + count
                # logp.grad is ∂loss/∂log π_θ. Its negative is the weight on ∇ log π_θ (header).
                minibatch.put(rows, logp=logp.detach(), entropy=micro.entropy, weight=-logp.grad)
                means.add(loss=(loss, count), **measures(args, logp.detach(), micro))
            # Sums become means: divide gradients and token weights by the count over all ranks.
            denominator = total_count(denominator, world)
            divide_gradients(policy, denominator, world)
            minibatch.weight /= denominator
            # <own>
            if args.lag:
                log_w = log_weight(minibatch.logp, minibatch.rollout_logp, minibatch.mask)  # [n]
                rho = ess_ratio(gather(log_w, world)).item()
                scale = min(1.0, rho / args.rho_on) ** 0.5 if args.ess_scaling else 1.0
                optimizer.param_groups[0]["lr"] = warm_lr * scale
                # Without --ess_scaling the count of lr_damping is 0, so it is not logged.
                means.add(ess_ratio=(rho, 1), lr_damping=(1 - scale, args.ess_scaling))
            # </own>
            norm = clip_gradients(policy, args.grad_clip)
            means.add(**run.check_gradient(norm, minibatch))  # stops if several in a row are NaN
            if math.isfinite(norm):  # else skip the step
                optimizer.step()
            optimizer.zero_grad()
            means.add(**metrics_by_sign(minibatch))
        engine.sync(policy)

        # 5. Log the step; evaluate and save when it is time.
        means.add(**rollout_metrics(rollout, G, task) | {"tokens": (sampled, None)})  # <own>
        metrics = means.reduce(world) | {"lr": optimizer.param_groups[0]["lr"]}
        metrics["layers_acted"] = sum(bool(metrics.get(name)) for name in LAYERS)  # <own>
        if run.due(step, args.eval_every):
            metrics |= evaluate(engine, task, args, world)
        run.log(step, metrics, minibatches)  # before saving, so that a killed run keeps this line
        if run.due(step, args.save_every):
            save_checkpoint(run.folder, step, both, optimizers, parts, world, args.keep)  # <own>
    if args.save_hf:
        save_model(policy, tokenizer, run.folder / "model", world)
    run.finish()


if __name__ == "__main__":
    launch(main, Args)

# Differs from the papers in:
# 1. All advantages are z-scores, as in grpo.py. In their papers branches are only centred, and VCPO
#    has the population's std, which is a constant factor.
# 2. vcpo.py has one optimiser step per batch, with w = π_θ/μ and no ratio. Here π_old is computed
#    anew when a stale batch is due. So w measures how far the policy had moved by then, r how far
#    this batch moves it, and the clip bounds r alone. With one step the gradient is the same.
#
# The combination is ours and in no paper; each part is as in its file.
