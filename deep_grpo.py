r"""DEEP-GRPO: branching where a failed response can still be saved.

Guo et al., "Deep Dense Exploration for LLM Reinforcement Learning via Pivot-Driven Resampling",
2026, arXiv 2602.14169.

The problem: more responses from the start mostly repeat what is found anyway, although a failed
response is often right up to some point.

The idea: cut a failed response at one of its own states, the pivot, and sample K new endings there.
All K start from one state, so comparing them may say more than comparing responses that share only
the prompt. The pivot should be deep enough to lead to something new (the factor d^γ) and early
enough to be saved (the factor σ). σ is a logistic regression of "some branch succeeded" on the
depth d, fitted during training. In our runs branches are right less often than new responses
(docs/claims.md).

Objective, token-means over main responses and over branches, with r = π_θ(y_t) / π_old(y_t):

    J = 1/T_main Σ_main l + λ 1/T_branch Σ_branch l - β (mean k3 over main + mean k3 over branches)
    l = min(r Â, clip(r, 1-ε, 1+ε) Â)
    Â = R - mean R,   of a main response over its group of G, of a branch over its K siblings
    a failed response is cut after segment i:  Q(i) ∝ σ(u d_i + v) d_i^γ,   d_i = (i+1)/(segments+1)

R is the reward. T_main and T_branch count the tokens of the two streams; λ weighs the second. π_θ
is the policy being trained, π_old the policy that generated the responses.

Gradient weight on ∇ log π_θ(y_t), before each stream's average:

    main: M r Â + k,  branch: λ M r Â + k,  its prefix: 0;    k: grpo.py's β (π_ref/π_θ - 1)
    M = 0 if (Â > 0 and r > 1+ε) or (Â < 0 and r < 1-ε), else 1

i = 0 is the bare prompt, the root. It can be drawn, and a response of one segment has no other cut.
Its K "branches" are then K more answers from the start. At first the embedded model mostly guesses
in one segment, so most branches are of this kind. Metrics named `_root` count them separately.

Differs from grpo.py in:
1. The branches. They are sampled after the rewards, from all failed responses at once, and join the
   mini-batch of their parent response. The prompt of a branch is prompt + prefix, so the prefix
   gets no gradient.
2. Advantages are mean-centred, without the standard deviation. The loss is a token-mean for each
   stream (main responses, branches).

Run it:
    torchrun deep_grpo.py                                   # laptop, a few minutes, no download
    torchrun deep_grpo.py --branch_weight 0 # control: branches have only the KL term, β 1e-4
    # one H100 (80 GB)
    torchrun deep_grpo.py --model Qwen/Qwen2.5-Math-1.5B --task gsm8k --prompts_per_step 32 \
        --boundary . --minibatches 1 --max_new_tokens 2048 --lr 1e-6 --micro_tokens 8192 \
        --save_every 10 --vllm_sleep --vllm_memory 0.55
    # eight H100s (not yet run on several GPUs); the paper's batch and lengths, on all of MATH
    torchrun --nproc_per_node=8 deep_grpo.py --model Qwen/Qwen2.5-Math-1.5B --task math \
        --boundary . --prompts_per_step 64 --minibatches 1 --max_new_tokens 3072 --lr 1e-6 \
        --micro_tokens 8192
"""

from dataclasses import dataclass
import math
from pathlib import Path
from random import Random  # <own>

from common.batch import Rollout, balance_tokens
from common.cli import Betas, Count, CountOrZero, Flags, NonNegative, Positive, Temperature
from common.cli import AtLeastTwo, BadInput, Exponent  # <own>
from common.clock import timed  # <own>
from common.data import Task, load_task  # <own>
from common.distributed import World, clip_gradients, divide_gradients, shard, total_count
from common.distributed import gather, global_sum  # <own>
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from common.logprobs import frozen_reference  # <own>
from common.metrics import Means, evaluate, metrics_by_sign, rollout_metrics
from common.metrics import clip_shares  # <own>
from common.model import load_model
from common.records.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.rollout import Engine, make_engine  # <own>
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
    clip_low: NonNegative = 0.2
    """ε of the lower clip, which is at 1 - ε (PPO's value; DeepSeekMath gives none)."""
    clip_high: NonNegative = 0.2
    """ε of the upper clip, which is at 1 + ε (our choice; DAPO, STAPO: 0.28; DeepSeek-R1: 10)."""
    # <own>
    beta: NonNegative = 1e-4
    """β of the KL term; 0 loads no reference model (paper)."""
    kl_ratio: bool = False
    """Multiply k3 by r, so that its gradient is the gradient of the KL (DeepSeek-V3.2)."""
    boundary: str = ";"
    """Text that ends a segment; a token that ends in it allows a branch (paper: `.`)."""
    branches: AtLeastTwo = 8
    """K: new endings from each pivot (paper)."""
    branch_weight: NonNegative = 1.0
    """λ: weight of the branches' stream (paper)."""
    depth_power: Exponent = 2.0
    """γ: preference for deep pivots (paper)."""
    # </own>


def advantages(rewards: Tensor) -> Tensor:
    """Return centred rewards `[P, G]`. Rewards [1, 0, 0, 0] give [0.75, -0.25, -0.25, -0.25]."""
    # Equal rewards must give advantages of exactly 0, but the float32 mean of eight rewards of 0.3
    # is not exactly 0.3. So first subtract the group's first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    return centred  # <own>


# <own>
def pivots(response: list[int], boundaries: set[int]) -> list[int]:
    """Return where a response can be cut: at 0 (the root) and at all segment ends but the last."""
    return [0] + [i for i, t in enumerate(response, 1) if t in boundaries and i < len(response)]


def pivot_distribution(count: int, u: float, v: float, depth_power: float) -> tuple[Tensor, Tensor]:
    """Return the depths d `[count]` of a response's pivots, and Q `[count]` ∝ σ(u d + v) d^γ."""
    depth = torch.arange(1, count + 1).double() / (count + 1)  # [count]: the root's is not 0
    weight = torch.sigmoid(u * depth + v) * depth**depth_power  # [count]
    return depth, weight / weight.sum()


def choose_pivot(
    response: list[int], boundaries: set[int], u: float, v: float, depth_power: float, rng: Random
) -> tuple[int, float]:
    """Draw from Q how many tokens of a failed response are kept. Return this and the depth."""
    cuts = pivots(response, boundaries)
    depth, chances = pivot_distribution(len(cuts), u, v, depth_power)
    i = rng.choices(range(len(cuts)), chances.tolist())[0]
    return cuts[i], depth[i].item()


def fit_success(feedback: list[tuple[float, float]]) -> tuple[float, float]:
    """Fit P(some branch succeeds | depth) = σ(u depth + v) to (depth, 0 or 1) pairs; return (u, v).

    The fit minimises Σ log-loss + u²/2. With at most 10 pairs, or if all outcomes are the same, P
    is 1 everywhere: u = 0, v = ∞. Branches at the root count as well. The root competes with the
    other pivots in Q, so its chance of success has to be estimated, too.
    """
    if len(feedback) <= 10 or len({success for _, success in feedback}) < 2:
        return 0.0, float("inf")
    depth, success = torch.tensor(feedback, dtype=torch.float64).T  # [n], [n]
    features = torch.stack([depth, torch.ones_like(depth)], dim=1)  # [n, 2]
    parameters = torch.zeros(2, dtype=torch.float64)  # u, v
    penalty = torch.tensor([1.0, 0.0], dtype=torch.float64)  # on u alone
    for _ in range(30):  # Newton's method
        p = torch.sigmoid(features @ parameters)  # [n]
        gradient = features.T @ (p - success) + penalty * parameters  # [2]
        hessian = features.T @ (features * (p * (1 - p))[:, None]) + penalty.diag()  # [2, 2]
        parameters = parameters - torch.linalg.solve(hessian, gradient)
    return tuple(parameters.tolist())


class Branches:
    """New endings for failed responses. In each step, after the rewards, `grow` cuts the failed
    responses, samples and scores; `join` puts every branch into its parent's mini-batch.

    Each rank branches from its own responses. The regression uses the outcomes of all ranks.
    """

    def __init__(self, args: Args, engine: Engine, task: Task, world: World):
        # Tokens that end a segment
        texts = task.tokenizer.batch_decode([[token] for token in range(len(task.tokenizer))])
        self.ends = {i for i, text in enumerate(texts) if text.rstrip(" ").endswith(args.boundary)}
        if not args.boundary or not self.ends:
            raise BadInput(f"--boundary {args.boundary!r}: no token ends in it")
        self.args, self.engine, self.task, self.world = args, engine, task, world
        self.feedback: list[list[float]] = []  # depth, whether some branch succeeded

    def state_dict(self) -> dict:
        return {"feedback": self.feedback}

    def load_state_dict(self, state: dict) -> None:
        self.feedback = state["feedback"]

    @timed("branch")
    def grow(self, rollout: Rollout, rewards: Tensor, problems: list) -> tuple[Rollout, dict]:
        """Sample K new endings of every failed response (`rewards [P, G]`). Return the endings with
        an advantage, whose column `origin` is the parent's row of `rollout`, and metrics."""
        args, world, K, G = self.args, self.world, self.args.branches, self.args.group_size
        # Each failed response is cut at one of its pivots, drawn from Q
        failed = (rewards.flatten() <= 0).nonzero()[:, 0]  # [F]: rows
        u, v = fit_success(self.feedback)
        responses, parents = rollout.response_ids(), [problems[i // G] for i in failed.tolist()]
        prefixes, depths = [], []
        for row, parent in zip(failed.tolist(), parents):
            rng = Random(f"{args.seed}/{parent.index * G + row % G}")  # seeded, nothing saved
            kept, depth = choose_pivot(responses[row], self.ends, u, v, args.depth_power, rng)
            prefixes.append(responses[row][:kept])
            depths.append(depth)
        # Sample K new endings from each pivot, all in one batch.
        starts = [parent.prompt_ids for parent in parents]
        grown = self.engine.generate(starts, K, args.max_new_tokens, args.temperature, prefixes)
        outcome = self.task.score(grown, parents, K)  # [F, K]
        grown.advantages = advantages(outcome).flatten()  # [F·K]: over siblings only
        grown.origin = failed.repeat_interleave(K)  # [F·K]
        # The regression is fitted to the latest pivots of all ranks
        saved = (outcome > 0).any(dim=1)  # [F]
        tried = torch.stack([torch.tensor(depths), saved.float().cpu()], dim=1)  # [F, 2]
        self.feedback = [*self.feedback, *gather(tried, world).tolist()][-10_000:]
        # Siblings that are all right or all wrong have no gradient
        used = grown.rows(grown.advantages.abs() > 1e-8)
        wrong = (rewards <= 0).all(dim=1)  # [P]
        rescued = wrong[(failed[saved] // G).unique()]
        tokens = grown.mask.sum()
        # Cuts inside a response and cuts at the root are counted separately
        deep = torch.tensor([len(prefix) > 0 for prefix in prefixes], dtype=torch.bool)  # [F]
        # Sums: these tokens are added to the main stream's
        stats = {"branches_used": (len(used), "sum"), "tokens": (tokens, "sum")}
        stats["groups_rescued"] = rescued.sum(), wrong.sum()
        stats["extra_tokens"] = tokens, rollout.mask.sum()
        stats["pivots_root"] = (~deep).sum(), len(deep)
        for ending, at in (("", deep), ("_root", ~deep)):
            stats[f"branch_reward{ending}"] = outcome[at].sum(), outcome[at].numel()
            stats[f"pivots_saved{ending}"] = saved[at].sum(), at.sum()
        return used, stats

    def join(self, rollout: Rollout, grown: Rollout) -> list[Rollout]:
        """Return the mini-batches: equal shares of the main rows, each with its branches. The
        column `branch` is 0 on main rows, and T_main / T_branch of the mini-batch on branches."""
        rollout.branch = torch.zeros_like(rollout.advantages)  # [N]
        parts = rollout.split(self.args.minibatches)
        for i, part in enumerate(parts):
            branches = grown.rows(grown.origin // len(part) == i)
            counts = {"main": part.mask.sum(), "branch": branches.mask.sum()}
            tokens = global_sum(counts, self.world)
            factor = tokens["main"] / max(1, tokens["branch"])
            branches.branch = torch.full_like(branches.advantages, factor)
            parts[i] = Rollout.join(part, branches)
        return parts


def k3(args: Args, logp: Tensor, batch: Rollout) -> Tensor:
    """Return k3 `[n, T]`. Its *value* estimates KL(π_θ ‖ π_ref), but its *gradient* belongs to
    KL(π_ref ‖ π_θ). With `--kl_ratio` both belong to the first (docs/questions.md, question 13)."""
    log_ref_ratio = batch.ref_logp - logp  # [n, T]: log(π_ref/π_θ), not log(π_θ/π_ref)
    kl = log_ref_ratio.exp() - log_ref_ratio - 1  # [n, T]
    if args.kl_ratio:
        kl = (logp - batch.old_logp).exp() * kl  # [n, T]: r has a gradient, too
    return kl


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
    branch = batch.branch  # [n]: 0 on main rows, on branches T_main / T_branch of the mini-batch
    main = branch == 0  # [n]
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r; 1 until the rollout's first optimiser step
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
    # Why min, and not the clip alone? A token that moved in the wrong direction must keep its
    # gradient, so that it can come back.
    objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    objective = objective * torch.where(main, 1.0, args.branch_weight)[:, None]  # [n, T]: λ
    if args.beta > 0:
        objective = objective - args.beta * k3(args, logp, batch)  # [n, T]
    # The caller divides by T_main. With the factor T_main / T_branch, the branches are averaged
    # over their own tokens.
    per_response = (objective * mask).sum(dim=1) * torch.where(main, 1.0, branch)  # [n]
    return -per_response.sum(), mask[main].sum()  # sum, count
    # </own>


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    # <own>
    stats = clip_shares(logp, batch, args.clip_low, args.clip_high)
    if args.beta > 0:
        stats["ref_kl"] = (k3(args, logp, batch) * batch.mask).sum(), batch.mask.sum()
    return stats
    # </own>


# <own>
# Metrics that show the method at work. If the first is always 0, the run says so at its end.
ACTED = {
    "branches_used": "branches in the batch",
    "groups_rescued": "failed groups saved by a branch (share)",
    "extra_tokens": "tokens of branches per main token",
}
# </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    branches = Branches(args, engine, task, world)  # <own>
    reference = frozen_reference(args, lm, world)  # π_ref; None if β is 0  # <own>
    policy = shard(Policy(lm), args, world)
    adam = {"betas": args.betas, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **adam)
    run = Run(args, task, world, Path(__file__).stem, ACTED)
    # Other objects to save in a checkpoint (each has a state_dict).
    parts = {"engine": engine, "branches": branches}  # <own>
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

        # Branches: K new endings of every failed response.
        grown, stats = branches.grow(rollout, rewards, problems)  # <own>
        means.add(**stats)  # <own>

        # 3. Log-probs, in mini-batches of whole groups. Within each, the ranks exchange rows until
        # they have about the same number of tokens.
        shares = branches.join(rollout, grown)  # <own>
        minibatches = [balance_tokens(part, world) for part in shares]  # <own>
        # The trainer computes the log-probs of π_old, the policy that sampled. The sampler's own
        # log-probs come from other kernels, so a ratio against them would mix two things: how far
        # the policy has moved, and how much sampler and trainer differ (minirl.py separates them).
        # The first mini-batch needs no pass: until the first optimiser step π_θ is π_old.
        for minibatch in minibatches[1:]:
            minibatch.old_logp = all_logprobs(policy, minibatch, args, world).logp  # [n, T]
        # <own>
        if reference:
            for minibatch in minibatches:
                minibatch.ref_logp = all_logprobs(reference, minibatch, args, world).logp  # [n, T]
        # </own>

        # 4. Update: one optimiser step per mini-batch, in as many micro-batches as memory requires.
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
            if first:  # stop if sampler (μ) and trainer (π_old) are far apart: one must be wrong
                means.add(**run.check_sampler(minibatches))
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
# 1. Four optimiser steps per rollout. The paper's setting (released code): one step on 64 prompts
#    with 8 responses each, up to 3,072 tokens, lr 1e-6. So its clip never acts. No dual clip at 3.
# 2. Only branches with zero advantage are dropped, because main rows stay in GRPO's average. The
#    released code drops all such rows. It also drops a step's branches if fewer than 128 are left;
#    batches here are too small for that.
# 3. The regression is a 2-parameter Newton method instead of scikit-learn, with the same penalty:
#    u²/2, none on v. The released code keeps it once fitted. Here it is fitted anew at each step,
#    and P = 1 again if the latest 10,000 outcomes were all the same.
# 4. A segment ends with any token whose text ends in `--boundary` (".", ")."). In the released code
#    only the token "." ends one.
# 5. Each stream is a mean over its tokens, as in the released code. A summary says that the paper's
#    objective averages over responses. The paper trains on MATH's levels 3 to 5.
#
# Formulas and sizes are those of the authors' first code (github befocuss/Deep-GRPO 4d45405, 31
# January 2026). checks/deep_grpo.py has its numbers, and those of AgentCombo/DEEP-GRPO (b49943b, 4
# July 2026), to which version 2 links. There pivots are only an option: by default a teacher
# corrects failed responses, and the verified right prefixes become prompts. Its README says why:
# branches cost much generation, and because the first error is not known, most of them start where
# all is lost, or where nothing was wrong yet. We read only the paper's abstract (version 2, 12 June
# 2026). A summary of version 1 has the same Q, γ = 2, K = 8 and λ = 1, but no ε, β or batch.
