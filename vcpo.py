r"""VCPO: Variance-Controlled Policy Optimization.

Huang et al. (MIT, NVIDIA), "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs",
ICML 2026 (PMLR v306), arXiv 2602.17616.

The problem: asynchronous training learns from responses that an older policy μ sampled. Importance
weights w correct for that, but a few responses with a large w dominate the gradient.

The idea: take smaller steps when the gradient is noisy, and make it less noisy. The effective
sample size ESS says how many of its B responses a batch is worth; lr is multiplied by the square
root of ESS/B, a rule of thumb for smaller batches under Adam. And a baseline b, in which responses
with a large w and a large gradient count most, replaces the group's mean. For the loss that is used
b is often worse than the mean: in 40 small tasks, enumerated, the variance was larger with b in 27
tasks on-policy and in 16 off-policy.

Objective, for B responses y_i sampled from μ, the policy as it was k = `--lag` batches ago:

    J = 1/B Σ_i sg[min(w_i, 8)] Â_i 1/|y_i| Σ_t log π_θ(y_t),     w_i = Π_t π_θ(y_t)/μ(y_t)
    Â_i = (R_i - b) / std R,     b = Σ w_i² |g_i|² R_i / Σ w_i² |g_i|²  over the prompt's group
    g_i = ∇ Σ_t log π_θ(y_t),     lr_eff = lr sqrt(min(1, ρ/ρ_on)),     ρ = ESS/B
    ESS = (Σ w_i)² / Σ w_i²  over the batch

sg[x] is x without gradient, |y_i| the number of tokens of y_i, R_i its reward, and π_θ the policy
being trained. With the default ρ_on = 1 lr is lowered unless all w_i are equal.

Gradient weight on ∇ log π_θ(y_t), one for all tokens of y_i, before the mean over responses:

    min(w_i, 8) Â_i / |y_i|          (no ratio clip, only the cap at 8; ESS has the uncapped w)

Why this b? For the plain estimate Σ w g (R - b), it is where the derivative of E|w g (R - b)|² with
respect to b is 0. J is another estimate: it caps w and divides by |y_i|. With equal w and |g|, b is
the group's mean. Is the gradient unbiased? With a constant b and uncapped w it is, because
E[w g] = 0. But this b contains the response's own reward, and the cap changes w: both add bias.

How is |g_i| found without a backward pass for each response? One backward pass of all log-probs
brings to each linear layer, at each position s, the gradient d_s of the layer's output; x_s is the
layer's input there. The layer's part of g_i is the sum of d_s x_sᵀ over the positions of y_i. A
hook adds its squared norm to |g_i|² and drops it. So one pass gives the norms of all responses
(common/scale/norms.py; tests/common/test_norms.py takes a backward pass for each and compares).

Differs from grpo.py in:
1. A queue. The first k steps only fill it. In the next k steps the trained batch gets older, from 0
   to k batches; then its age is constant. This is asynchronous training without the speed-up.
2. No π_old, no ratio clip, no KL term: each response has one importance weight, against the
   sampler's log-probs.
3. The baseline and the learning rate, as above; one optimiser step per batch.
4. One more forward and backward pass before each update, for the norms.

Run it:
    torchrun vcpo.py                                        # laptop, 2 to 4 minutes, no download
    torchrun vcpo.py --no_optimal_baseline --no_ess_scaling # only the lag and the cap at 8
    # one H100 (80 GB)
    torchrun vcpo.py --model Qwen/Qwen3-1.7B-Base --task gsm8k --prompts_per_step 64 \
        --max_new_tokens 2048 --lr 1e-6 --micro_tokens 8192 --save_every 10 \
        --vllm_sleep --vllm_memory 0.55
    # the paper's batch, lag and lengths on MATH, on eight H100s (not yet run on several GPUs)
    torchrun --nproc_per_node=8 vcpo.py --model Qwen/Qwen2.5-7B --task math --prompts_per_step 32 \
        --group_size 16 --lag 10 --max_new_tokens 2048 --lr 1e-6 --weight_decay 0.1 \
        --gradient_checkpointing
"""

from collections import deque  # <own>
from dataclasses import dataclass
import math
from pathlib import Path

from common.batch import Rollout, balance_tokens
from common.cli import Betas, Count, CountOrZero, Flags, NonNegative, Positive, Temperature
from common.cli import BadInput  # <own>
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard, total_count
from common.distributed import gather  # <own>
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from common.logprobs import gradient_norms  # <own>
from common.metrics import Means, evaluate, metrics_by_sign, rollout_metrics
from common.model import load_model
from common.records.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.rollout import make_engine
from common.run import Run
from common.scale.norms import unsupported_module  # <own>
import torch
from torch import Tensor


@dataclass
class Args(Flags):
    steps: Count = 150
    """Rollouts; after the first `lag`, each has `minibatches` optimiser steps (our choice)."""
    prompts_per_step: Count = 8  # <own>
    """Prompts in a rollout, on all ranks together (our choice)."""
    group_size: Count = 8
    """G: responses to each prompt (DeepSeekMath: 64)."""
    minibatches: Count = 1  # <own>
    """Optimiser steps per batch (paper: 1)."""
    max_new_tokens: Count = 64
    """Largest number of tokens in a response (DeepSeekMath: 1024)."""
    temperature: Temperature = 1.0
    """Sampling temperature, also used for all log-probabilities (papers: 1)."""
    lr: Positive = 3e-4
    """AdamW's learning rate after warm-up, chosen for `tiny` (DeepSeekMath: 1e-6 at 7B)."""
    warmup: CountOrZero = 0  # <own>
    """Trained batches over which lr rises linearly (paper: none)."""
    betas: Betas = (0.9, 0.95)
    """AdamW's β1 and β2 (OpenRLHF's; verl and most papers: 0.9 0.999)."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay (our choice; verl's default: 0.01)."""
    grad_clip: Positive = 1.0
    """Largest gradient norm; larger gradients are scaled down to it (verl's default)."""
    # <own>
    lag: CountOrZero = 8
    """k: batches that are trained between sampling a batch and training on it (paper: 12 on GSM8K,
    10 on MATH)."""
    is_cap: Positive = 8.0
    """Cap of a response's importance weight in the loss (paper); ESS uses the uncapped weights."""
    ess_scaling: bool = True
    """Multiply the learning rate by sqrt(ρ/ρ_on), if ρ, the batch's ESS ratio, is below ρ_on."""
    rho_on: Positive = 1.0
    """ρ_on: ESS ratio with the full learning rate (paper: 1; 0.55 for long tool-use responses)."""
    optimal_baseline: bool = True
    """Subtract b (see the header); False: the group's mean."""
    # </own>


def advantages(rewards: Tensor) -> Tensor:
    """Return group z-scores `[P, G]`. Rewards [1, 0, 0, 0] give about [1.73, -.58, -.58, -.58]."""
    # Equal rewards must give advantages of exactly 0, but the float32 mean of eight rewards of 0.3
    # is not exactly 0.3. So first subtract the group's first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # If all responses are right, or all wrong, the advantages are exactly 0. Then this prompt adds
    # no gradient but that of a KL term.
    # <own>
    # The population's std, as in the authors' code. baseline_shift later replaces the mean by b.
    std = rewards.std(dim=1, keepdim=True, correction=0)  # [P, 1]
    return centred / torch.where(std > 1e-8, std, 1.0)  # [P, G]


def log_weight(logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> Tensor:
    """Return log w of each response `[n]`: the sum over its tokens, not the mean."""
    return ((logp.detach() - rollout_logp) * mask).sum(dim=1)


def truncated(args: Args, log_w: Tensor) -> Tensor:
    """Return min(w, `is_cap`), with log w clamped to ±20, so that it is finite for any log w."""
    return log_w.clamp(-20, 20).exp().clamp(max=args.is_cap)


def ess_ratio(log_w: Tensor) -> Tensor:
    """Return ρ = ESS/B = (Σ w)² / (B Σ w²) from log w `[B]`. It is always finite. It is 1 if all w
    are equal, however small, and it cannot see what μ never samples."""
    return (2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0)).exp() / len(log_w)


def baseline_shift(log_w: Tensor, norms: Tensor, advantages: Tensor) -> Tensor:
    """Return b of each group, in units of Â: Σ w²|g|² Â / Σ w²|g|², `[..., G]` -> `[...]`.

    (R - b)/std = Â - shift, because Â is (R - mean)/std. The shares are computed in log space,
    because w² can overflow after a hundred tokens.
    """
    share = torch.softmax(2 * log_w + 2 * norms.clamp(min=1e-30).log(), dim=-1)  # [..., G]
    return (share * advantages).sum(dim=-1)


def baseline_shifts(args: Args, policy: Policy, batch: Rollout, world: World) -> Tensor:
    """Return `baseline_shift` of each response's group `[n]`. All ranks must call it together."""
    A = batch.advantages.view(-1, args.group_size)  # [P, G]
    shifts, unequal = torch.zeros_like(A), (A != 0).any(dim=1)  # [P, G], [P]
    if args.optimal_baseline:
        # If all rewards are equal, b is their mean for any norms, so these groups need no pass.
        part = batch.rows(unequal.repeat_interleave(args.group_size))
        logp, norms = gradient_norms(policy, part, args, world)  # [n, T], [n]
        log_w = log_weight(logp, part.rollout_logp, part.mask).view(-1, A.shape[1])  # [p, G]
        shifts[unequal] = baseline_shift(log_w, norms.view_as(log_w), A[unequal])[:, None]
    return shifts.flatten()


class Stale:
    """A queue: `exchange` returns each batch `lag` batches after it was put in."""

    def __init__(self, args: Args, world: World):
        if args.lag >= args.steps:
            raise BadInput(f"--lag {args.lag}: must be below --steps {args.steps}")
        self.lag, self.device, self.ranks = args.lag, world.device, world.size
        self.queue: deque[list[Rollout]] = deque()  # a batch is a list of mini-batches

    def exchange(self, batch: list[Rollout]) -> list[Rollout]:
        """Put this step's batch in and return the batch that is due; [] while the queue fills."""
        self.queue.append(batch)
        return self.queue.popleft() if len(self.queue) > self.lag else []

    def state_dict(self) -> dict:
        queue = [[vars(part) for part in batch] for batch in self.queue]
        return {"queue": queue, "ranks": self.ranks, "lag": self.lag}

    def load_state_dict(self, state: dict) -> None:
        if state["ranks"] != self.ranks and state["queue"]:
            raise BadInput(f"--resume: batches in flight: use {state['ranks']} rank(s)")
        if state.get("lag", self.lag) != self.lag:
            raise BadInput(f"--back_to: batches in flight: use --lag {state['lag']}")
        for batch in state["queue"]:
            self.queue.append([Rollout(**part).to(self.device) for part in batch])


# </own>
def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the sum of the loss over the n rows of `batch`, and the count to divide it by.

    A row is one response of up to T tokens; `logp [n, T]` is log π_θ, with gradient. The columns of
    `batch` that files share are listed in `Rollout`. The caller sums over micro-batches and ranks
    and divides once: a mean of means would give the rows of a small micro-batch more weight.
    """
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    # <own>
    weight = truncated(args, log_weight(logp, batch.rollout_logp, mask))  # [n]: without gradient
    per_response = (logp * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # [n]: 1/|y_i| Σ log π
    objective = weight * batch.advantages * per_response  # [n]
    return -objective.sum(), mask.new_tensor(len(mask))  # the mean over responses
    # </own>


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    # <own>
    log_w = log_weight(logp, batch.rollout_logp, batch.mask)  # [n]
    weights = log_w.clamp(max=20).exp()  # [n]
    return {
        "weight": (truncated(args, log_w).sum(), len(log_w)),
        "weight_max": (torch.cat([weights.new_zeros(1), weights]).max(), "max"),
    }
    # </own>


# <own>
# Metrics that show the method at work. If the first is always 0, the run says so at its end.
ACTED = {
    "lr_damping": "reduction of the learning rate (share)",
    "ess_ratio": "effective sample size (share of the batch)",
    "weight_max": "largest weight of a response, uncut",
}
# </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    policy = shard(Policy(lm), args, world)
    adam = {"betas": args.betas, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **adam)
    run = Run(args, task, world, Path(__file__).stem, ACTED)
    stale = Stale(args, world)  # <own>
    # Other objects to save in a checkpoint (each has a state_dict).
    parts = {"engine": engine, "stale": stale}  # <own>
    done = load_checkpoint(run.checkpoint, policy, optimizer, parts, world)  # steps; 0: a new run
    engine.sync(policy)
    if args.optimal_baseline and (part := unsupported_module(policy)):  # <own>
        raise BadInput(f"{part}: no gradient norms, use --no_optimal_baseline")  # <own>
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

        # 3. Log-probs of π_old, the policy that sampled, by the trainer. The sampler check needs
        # them. The loss does not: its weights are π_θ/μ, with the sampler's own log-probs, and so
        # correct for stale samples and for the engine's numerics at once.
        # <own>
        # Mini-batches. The ranks exchange whole groups, which b needs, until their token counts
        # are about equal.
        minibatches = [balance_tokens(part, world, G) for part in rollout.split(args.minibatches)]
        # </own>
        for minibatch in minibatches:  # of all: the update may be of another batch  # <own>
            minibatch.old_logp = all_logprobs(policy, minibatch, args, world).logp  # [n, T]
        # Stop if the sampler's log-probs, μ, are far from π_old: then one of the two is broken.
        means.add(**run.check_sampler(minibatches))  # <own>

        # Put this batch into the queue and train on the one that leaves it, `lag` batches old.
        # While the queue fills, none leaves: the step trains on nothing and logs what it sampled.
        # <own>
        sampled = {"tokens": (rollout.mask.sum(), "sum")}  # counted now, not when it is due
        trained = max(0, step - 1 - args.lag)  # batches, before this step
        minibatches = stale.exchange(minibatches)
        if minibatches:
            rollout = Rollout.join(*minibatches)
            means.add(lag=(min(trained, args.lag) * args.minibatches, 1))  # age in updates
        # </own>

        # 4. Update: one optimiser step per mini-batch, in as many micro-batches as memory requires.
        warm_lr = args.lr * min(1.0, (trained + 1) / max(1, args.warmup))  # <own>
        optimizer.param_groups[0]["lr"] = warm_lr  # <own>
        for minibatch in minibatches:
            # <own>
            shift = baseline_shifts(args, policy, minibatch, world)  # [n]
            minibatch.advantages = minibatch.advantages - shift
            means.add(baseline_shift=(shift.abs().sum(), len(shift)))
            # </own>
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
            # <own>
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
        means.add(**rollout_metrics(rollout, G) | sampled)  # <own>
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
# 1. b is weighted by w²|g|², as in the paper. The released code has min(w, 8)² w² |g|², because its
#    g already contains the weight.
# 2. ESS is computed in log space. In the released code w overflows float32 at log w > 88, which
#    long responses can reach; ESS is then NaN, and lr is not lowered. That code also adds 1e-8 to
#    Σ w², which stops learning if all weights are small.
# 3. All responses of a batch were sampled at once; after the first 2k steps they are exactly k
#    batches old. The paper's k is the largest lag, and several versions can write one response.
# 4. A model is refused if the norm pass does not support one of its parts (experts). It can be
#    trained with `--no_optimal_baseline`, which takes the group's mean for b.
#
# The paper's setting on MATH (authors' scripts): 32 prompts with 16 responses each, one step per
# batch, up to 2,048 tokens, lr 1e-6. On GSM8K: 8 prompts with 8 responses each.
#
# The header's 40 tasks are random, with all answers enumerated. The loss, min(w, 8) g/|y|, is that
# of the released code, too. On-policy, b's variance was a fifth above the least possible (median).
#
# Formulas and constants are those of the authors' code (github mit-han-lab/vcpo c7f030f, 2 March
# 2026), with whose results checks/vcpo.py compares; std and 1/|y| are from the authors' scripts. We
# read only the paper's abstract (version 2, same day) and quotations of sections 3.2, 3.3, 3.5 and
# appendix E.2 (w²|g|² in b, the square root, ESS of uncapped weights, the cap at 8).
