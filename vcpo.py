r"""VCPO: Variance-Controlled Policy Optimization.

Huang et al. (MIT, NVIDIA), "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs",
ICML 2026 (PMLR v306), arXiv 2602.17616.

The problem: asynchronous training learns from responses of older weights. Importance weights w
keep the gradient unbiased, but its variance is high: a few responses with a large w dominate it.

The idea: take smaller steps when the variance is high, and lower it. The effective sample size ESS
says how many responses the batch is really worth. When it falls, the learning rate falls with its
square root, as for a smaller batch under Adam. The baseline b is chosen for the least variance:
responses with large weights and large gradients count most in it. (Any b leaves the gradient
unbiased, because E[w g] = 0. With equal weights and norms, b is GRPO's group mean.)

Objective, for B responses y_i that were sampled from μ, the weights of k updates ago:

    J = 1/B Σ_i sg[min(w_i, 8)] Â_i 1/|y_i| Σ_t log π_θ(y_t),     w_i = Π_t π_θ(y_t)/μ(y_t)
    Â_i = (R_i - b) / std R,     b = Σ w_i² |g_i|² R_i / Σ w_i² |g_i|²  over the prompt's group
    g_i = ∇ Σ_t log π_θ(y_t),     ĝ_i = g_i/|y_i|
    lr_eff = lr sqrt(min(1, ρ/ρ_on)),     ρ = ESS/B,     ESS = (Σ w_i)² / Σ w_i²  over the batch

R_i is the reward of y_i, |y_i| its number of tokens. π_θ is the policy being trained, and sg[x] is
x without gradient. lr keeps its full value as long as ρ is at least ρ_on. b is the best baseline of
the plain estimate Σ w g (R - b). J cuts the weights and divides the gradients by the length, so for
J this b is not optimal (see the end).

Gradient weight on ∇ log π_θ(y_t), one for all tokens of y_i, before the mean over responses:

    min(w_i, 8) Â_i / |y_i|          (never clipped; ESS sees the weights uncut)

How is |g_i| found without a backward pass for each response? One backward pass of Σ_i Σ_t log π_θ
brings to every linear map y = W x the gradient d_s at its output, at each place s of each response.
The part of g_i at W is Σ_s d_s x_sᵀ over the places of response i. A hook adds the squared norm of
this part to |g_i|² and drops the part. So one pass gives the norms of a whole micro-batch, and the
batch's gradient is never formed (common/scale/norms.py, which treats other layers likewise).

Differs from grpo.py in:
1. A queue. The first `--lag` steps only fill it. Over as many more steps, the age of a batch grows
   from 0 to `--lag` updates and then stays there. This is the staleness of an asynchronous system
   without its speed-up: here sampling and training take turns.
2. No π_old, no ratio clip, no KL term: each response has one weight, against the sampler's
   log-probs.
3. The baseline and the learning rate, as above; one optimiser step per batch.
4. One more pass before each update, for the norms. The update is then grpo.py's loop.

Run it:
    torchrun vcpo.py                                        # laptop, 2 to 4 minutes, no download
    torchrun vcpo.py --no_optimal_baseline --no_ess_scaling # only the lag and the cut at 8
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
from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.cli import BadInput  # <own>
from common.data import load_task
from common.distributed import World, clip_gradients, divide_gradients, shard, total_count
from common.distributed import gather  # <own>
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from common.metrics import Means, evaluate, metrics_by_sign, rollout_metrics
from common.model import load_model
from common.records.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.rollout import make_engine
from common.run import Run
from common.scale.norms import gradient_norms, unsupported_module  # <own>
import torch
from torch import Tensor


@dataclass
class Args(Flags):
    steps: Count = 150
    """Rollouts, all but the first `lag` followed by `minibatches` optimiser steps (our choice)."""
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
    warmup: Whole = 0  # <own>
    """Trained batches over which lr rises linearly (paper: none)."""
    betas: Betas = (0.9, 0.95)
    """AdamW's decay rates (OpenRLHF's; verl's, which most papers have, are 0.9 0.999)."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay (our choice; verl's default: 0.01)."""
    grad_clip: Positive = 1.0
    """Largest gradient norm; larger gradients are scaled down to it (verl's default)."""
    # <own>
    lag: Whole = 8
    """k: batches that are trained between sampling a batch and training on it (paper: 12 on GSM8K,
    10 on MATH)."""
    is_cap: Positive = 8.0
    """Largest weight of a response in the loss (paper); ESS sees the weights uncut."""
    ess_scaling: bool = True
    """Lower the learning rate by the square root of the batch's effective sample size."""
    rho_on: Positive = 1.0
    """ESS ratio from which the learning rate has its full value (paper: 1, and 0.55 for long
    tool-use responses)."""
    optimal_baseline: bool = True
    """Subtract b (see the header); False: the group's mean."""
    # </own>


def advantages(rewards: Tensor) -> Tensor:
    """Return group z-scores `[P, G]`. Rewards [1, 0, 0, 0] give about [1.73, -.58, -.58, -.58]."""
    # Equal rewards must give advantages of exactly 0, but rounding makes the mean of eight part
    # marks of 0.3 not quite 0.3. So first subtract the group's first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # If all responses are right, or all wrong, the advantages are exactly 0, so a prompt that is
    # too easy or too hard teaches nothing.
    # <own>
    # The population's std, as in the authors' code. baseline_shift adds the baseline b.
    std = rewards.std(dim=1, keepdim=True, correction=0)  # [P, 1]
    return centred / torch.where(std > 1e-8, std, 1.0)  # [P, G]


def log_weight(logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> Tensor:
    """Return log w of each response `[n]`: the sum over its tokens, not the mean."""
    return ((logp.detach() - rollout_logp) * mask).sum(dim=1)


def truncated(args: Args, log_w: Tensor) -> Tensor:
    """Return min(w, 8), which is finite for any log w."""
    return log_w.clamp(-20, 20).exp().clamp(max=args.is_cap)


def ess_ratio(log_w: Tensor) -> Tensor:
    """Return ρ = ESS/B = (Σ w)² / (B Σ w²) from log w `[B]`. It is always finite."""
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

    A row is one response of up to T tokens. `Rollout` lists the columns of `batch`; `logp [n, T]`
    is log π_θ, with gradient. The caller adds up the sums and counts of all micro-batches and ranks
    and divides once. Dividing in each would give the tokens of a small micro-batch more weight.
    """
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    # <own>
    weight = truncated(args, log_weight(logp, batch.rollout_logp, mask))  # [n]: without gradient
    per_response = (logp * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # [n]: 1/|y_i| Σ log π
    objective = weight * batch.advantages * per_response  # [n]
    return -objective.sum(), mask.new_tensor(len(mask))  # the mean over responses
    # </own>


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient. Nothing trains on them."""
    # <own>
    log_w = log_weight(logp, batch.rollout_logp, batch.mask)  # [n]
    weights = log_w.clamp(max=20).exp()  # [n]
    return {
        "weight": (truncated(args, log_w).sum(), len(log_w)),
        "weight_max": (torch.cat([weights.new_zeros(1), weights]).max(), None),
    }
    # </own>


# <own>
# Metrics that show the method at work. If the first is 0 at every step, the method never acted.
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
    # What else a checkpoint holds: each has a state_dict.
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

        # 3. Log-probs of π_old: the weights that sampled, evaluated by the trainer. The loss does
        # not use them: its weights compare with μ, which the sampler reported, and so correct for
        # staleness and engine at once. The sampler check needs them.
        # <own>
        # Mini-batches. The ranks exchange whole groups, which b needs, until their token counts
        # are about equal.
        minibatches = [balance_tokens(part, world, G) for part in rollout.split(args.minibatches)]
        # </own>
        for minibatch in minibatches:  # of all: the update may be of another batch  # <own>
            minibatch.old_logp = all_logprobs(policy, minibatch, args, world).logp  # [n, T]
        # Stop if the sampler's log-probs, μ, are far from π_old: then one of the two is broken.
        means.add(**run.check_sampler(minibatches))  # <own>

        # From here on the batch is the one that is due, sampled `lag` batches ago. While the queue
        # fills, no batch is due: the step trains on nothing and logs what it sampled.
        # <own>
        sampled = {"tokens": (rollout.mask.sum(), None)}  # counted now, not when it is due
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
                # logp keeps its gradient, ∂loss/∂log π_θ: minus each token's weight on ∇ log π_θ.
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
            # With a count of 0 nothing is logged.
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
        means.add(**rollout_metrics(rollout, G, task) | sampled)  # <own>
        metrics = means.reduce(world) | {"lr": optimizer.param_groups[0]["lr"]}
        if run.due(step, args.eval_every):
            metrics |= evaluate(engine, task, args, world)
        run.log(step, metrics, minibatches)  # before saving: a kill must not lose this line
        if run.due(step, args.save_every):
            save_checkpoint(run.folder, step, policy, optimizer, parts, world, args.keep)
    if args.save_hf:
        save_model(policy, tokenizer, run.folder / "model", world)
    run.finish()


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. b is weighted by w²|g|², as in the paper. The released code has min(w, 8)² w² |g|², because its
#    g already contains the weight. For rewards 0 or 1, equally likely, in groups of 16 and a
#    standard deviation of 1.2 of log w, this moves b by 0.08 (median), and by up to 0.5.
# 2. ESS is computed in log space. In the released code w overflows float32 at log w > 88, which
#    long responses can reach. ESS is then NaN, min(1, NaN) is 1, and nothing is damped. Its ε of
#    1e-8 stops learning if all weights are small: of 512 responses, all with log w = -10, -12 or
#    -15, ρ is 0.99, 0.66 or 0.005 (here always 1), so that lr falls to 1, 0.81 or 0.07 of itself.
# 3. All responses of a batch are from the same weights, exactly k updates old. The paper's k is the
#    largest lag, and its rollouts are partial: several versions can write one response.
# 4. A model is refused if the norm pass does not support one of its parts (experts). It can be
#    trained with `--no_optimal_baseline`, which takes the group's mean for b.
# 5. The paper's setting on MATH (authors' scripts): 32 prompts with 16 responses each, one step per
#    batch, up to 2,048 tokens, lr 1e-6. On GSM8K: 8 prompts with 8 responses each.
#
# Here and in the released code b is applied to min(w, 8) g/|y|, for which it is not the best
# baseline. We enumerated all answers of 40 small random tasks. On-policy, the variance is a fifth
# above the least possible one (median). It is above the variance of the plain group mean in 27 of
# the tasks; off-policy in 16.
#
# Formulas and constants are those of the authors' code (github mit-han-lab/vcpo c7f030f, 2 March
# 2026), whose numbers checks/vcpo.py has; std and 1/|y| are from the authors' scripts. We read only
# the paper's abstract (version 2, same day) and quotations of sections 3.2, 3.3, 3.5 and appendix
# E.2 (w²|g|² in b, the square root, ESS of uncut weights, the cut at 8).
