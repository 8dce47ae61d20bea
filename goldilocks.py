r"""Goldilocks RL: a teacher that picks prompts which are neither too easy nor too hard.

Mahrooghi, Lotfi, Abbe (EPFL, Apple), "Goldilocks RL: Tuning Task Difficulty to Escape Sparse
Rewards for Reasoning", 2026, arXiv 2602.14868.

The problem: a prompt that the student always or never solves gives no gradient but that of a KL
term, so its samples are wasted. In a large data set no prompt comes back soon, so its difficulty
cannot be looked up.

The idea: a teacher f, a second language model, predicts from a prompt's text alone how much it can
teach, even if it was never tried. K candidates are drawn for each slot of the batch. The one with
the largest f(q) is taken or, with probability η, a random one. After the rewards, the teacher is
trained on what the student's groups showed.

Objective, GRPO's, on prompts q that a teacher f chooses, each as the best of K candidates:

    J = 1/G Σ_i 1/|y_i| Σ_t { min(r Â_i, clip(r, 1-ε, 1+ε) Â_i) - β k3 }
    Â_i = (R_i - mean R) / std R
    q = argmax f over K candidates,     f(q) = 1/2 σ(u · mean_t h_t(q) + v)
    f is fitted to sqrt(p̂ (1-p̂)),     p̂ the share of right answers in q's own group

h_t are the teacher's last hidden states, u and v its output's parameters, and σ is the logistic
function. The fit minimises the squared error. The reward R_i of y_i, r = π_θ(y_t)/π_old(y_t), and
k3, the KL term to π_ref, are as in grpo.py.

Gradient weight on ∇ log π_θ(y_t), without the factors 1/G and 1/|y_i|:

    M r Â + β (π_ref/π_θ - 1)          (with `--kl_ratio` the second term is β r log(π_ref/π_θ))
    M = 0 if (Â > 0 and r > 1+ε) or (Â < 0 and r < 1-ε), else 1

Why does f predict this quantity? Let p be the student's chance to solve q. For rewards 0 or 1,
on-policy, with an infinitely large group and β = 0,

    |∇J_q| = sqrt(p (1-p)) · | E[ĝ | right] - E[ĝ | wrong] |,     ĝ = ∇ log π(y) / |y|

The first factor is 0 for a prompt that is always or never solved, and largest at p = 1/2. (Without
std in Â it is p (1-p).) The second factor depends on p, too, so the product may peak elsewhere.

Differs from grpo.py in:
1. The choice of prompts before the rollout; the teacher's update after the rewards. The teacher is
   a second model with its own optimiser, sharded and saved like the policy. The loss is grpo.py's.

Run it:
    torchrun goldilocks.py                                  # laptop, 2 to 4 minutes, no download
    torchrun goldilocks.py --explore 1                      # the same, prompts drawn uniformly
    # one H100 (80 GB)
    torchrun goldilocks.py --model Qwen/Qwen2.5-0.5B --task gsm8k --prompts_per_step 64 \
        --max_new_tokens 2048 --lr 1e-6 --teacher_lr 1e-5 --micro_tokens 8192 --save_every 10 \
        --vllm_sleep --vllm_memory 0.55
    # eight H100s (not yet run on several GPUs)
    torchrun --nproc_per_node=8 goldilocks.py --model Qwen/Qwen2.5-1.5B --task math \
        --teacher_lr 1e-5 --prompts_per_step 64 --group_size 16 --max_new_tokens 2048 --lr 1e-6 \
        --micro_tokens 8192
"""

import copy  # <own>
from dataclasses import dataclass
import math
from pathlib import Path
from random import Random  # <own>
from typing import NamedTuple  # <own>

from common.batch import Rollout, balance_tokens
from common.cli import Betas, Count, CountOrZero, Flags, NonNegative, Positive, Temperature
from common.cli import BadInput, Fraction  # <own>
from common.clock import timed  # <own>
from common.data import Problem, Task, load_task  # <own>
from common.distributed import World, clip_gradients, divide_gradients, shard, total_count
from common.distributed import gather  # <own>
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from common.logprobs import frozen_reference  # <own>
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
    clip_low: NonNegative = 0.2
    """ε of the lower clip, which is at 1 - ε (PPO's value; DeepSeekMath gives none)."""
    clip_high: NonNegative = 0.2
    """ε of the upper clip, which is at 1 + ε (our choice; DAPO, STAPO: 0.28; DeepSeek-R1: 10)."""
    # <own>
    beta: NonNegative = 0.01
    """β of the KL term; 0: no reference model (our choice; DeepSeekMath: 0.04; R1: 0.001)."""
    kl_ratio: bool = False
    """Multiply k3 by r, so that its gradient is the gradient of the KL (DeepSeek-V3.2)."""
    candidates: Count = 16
    """K: prompts that compete for each slot of the batch (our choice)."""
    explore: Fraction = 0.1
    """η: share of slots filled at random, so that the teacher sees all kinds (our choice)."""
    window: Count = 2048
    """Number of latest prompts from which the teacher learns (our choice)."""
    teacher_batch: Count = 64
    """Prompts in one update of the teacher; before it has them, choice is random (our choice)."""
    teacher_updates: CountOrZero = 2
    """Updates of the teacher per step (our choice)."""
    teacher_lr: Positive = 1e-3
    """The teacher's learning rate; its head has ten times this (our choice; real models: 1e-5)."""
    # </own>


def advantages(rewards: Tensor) -> Tensor:
    """Return group z-scores `[P, G]`. Rewards [1, 0, 0, 0] give about [1.5, -0.5, -0.5, -0.5]."""
    # Equal rewards must give advantages of exactly 0, but the float32 mean of eight rewards of 0.3
    # is not exactly 0.3. So first subtract the group's first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # If all responses are right, or all wrong, the advantages are exactly 0. Then this prompt adds
    # no gradient but that of a KL term. The 1e-6 only prevents 0/0.
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)  # [P, G]


# <own>
class Teacher(torch.nn.Module):
    """f(q) = 1/2 σ(u · mean_t h_t(q) + v): what a prompt can teach, predicted from its text."""

    def __init__(self, backbone: torch.nn.Module):
        super().__init__()
        self.lm, self.head = backbone, torch.nn.Linear(backbone.config.hidden_size, 1)
        # At first every f is 1/4.
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, sequences: Tensor, lengths: Tensor) -> Tensor:
        """Return f `[n]`, in (0, 1/2), of right-padded `sequences [n, S]` with `lengths [n]`."""
        hidden = self.lm(input_ids=sequences, use_cache=False).last_hidden_state  # [n, S, H]
        real = torch.arange(hidden.shape[1], device=lengths.device) < lengths[:, None]  # [n, S]
        mean = (hidden * real[..., None]).sum(dim=1) / lengths[:, None]  # [n, H]
        return 0.5 * self.head(mean)[:, 0].float().sigmoid()  # the range of sqrt(p (1-p))


class Choice(NamedTuple):
    """The problem that fills a slot of the batch, and how it was chosen."""

    problem: Problem
    above: float  # f of the problem, minus the mean f of the candidates
    by_chance: bool


def select(values: Tensor, candidates: list[list], explore: float, rng: Random) -> list[Choice]:
    """Fill each slot with its best candidate by `values [B, K]` or, with probability `explore`,
    with a random one. A prompt is taken twice only if its slot has no other."""
    above = values - values.mean(dim=1, keepdim=True)  # [B, K]
    chosen, taken = [], []
    for scores, better, problems in zip(values.tolist(), above.tolist(), candidates):
        order = sorted(range(len(problems)), key=lambda k: -scores[k])
        chance = rng.random() < explore
        if chance:
            rng.shuffle(order)
        k = next((k for k in order if problems[k].prompt not in taken), order[0])
        taken.append(problems[k].prompt)  # a text, or messages, which have no hash
        chosen.append(Choice(problems[k], better[k], chance))
    return chosen


class Curriculum:
    """The choice of the student's prompts. In each step `choose` asks the teacher for f(q) of all
    candidates before the rollout. After the rewards `learn` trains the teacher on their values.

    The ranks divide the teacher's work and share the results, so all of them have the same values,
    make the same choice and keep the same window.
    """

    def __init__(self, args: Args, lm: torch.nn.Module, task: Task, world: World):
        if not world.size <= args.teacher_batch <= args.window:
            raise BadInput(f"--teacher_batch {args.teacher_batch}: above --window or below ranks")
        self.args, self.task, self.world = args, task, world
        self.teacher = shard(Teacher(copy.deepcopy(lm.base_model)), args, world)
        head = {"params": self.teacher.head.parameters(), "lr": 10 * args.teacher_lr}
        groups = [{"params": self.teacher.lm.parameters()}, head]
        self.optimizer = torch.optim.AdamW(groups, lr=args.teacher_lr, weight_decay=0.0, fused=True)
        self.window: list[tuple] = []  # the latest choices: (prompt ids, value observed)
        self.rng = Random()  # seeded anew in every step, so it need not be saved

    def state_dict(self) -> dict:
        return {"window": self.window}

    def load_state_dict(self, state: dict) -> None:
        self.window = state["window"]

    def choose(self, step: int) -> list[Choice]:
        """Fill the B slots of a step, those of all ranks: each with the candidate of the largest
        f(q) among K, or with a random one."""
        args, B, K = self.args, self.args.prompts_per_step, self.args.candidates
        P, rank = B // self.world.size, self.world.rank
        slots = range((step - 1) * B, step * B)
        pool = [[self.task.train(slot * K + k) for k in range(K)] for slot in slots]  # [B, K]
        # Each rank computes f for its own slots. Then every rank chooses for all slots, so that no
        # two ranks take the same prompt.
        ids = [problem.prompt_ids for slot in pool[rank * P : (rank + 1) * P] for problem in slot]
        values = gather(self.predict(ids), self.world).view(B, K).cpu()  # [B, K]
        explore = args.explore if len(self.window) >= args.teacher_batch else 1.0  # no teacher yet
        self.rng.seed(f"{args.seed}/{step}")
        return select(values, pool, explore, self.rng)

    def learn(self, chosen: list[Choice], rewards: Tensor) -> dict[str, tuple]:
        """Add the learning values of all ranks' prompts to the window, update the teacher, and
        return metrics as pairs (sum, count). `rewards [P, G]` are this rank's."""
        observed = gather(self.learning_value(rewards), self.world).cpu()  # [B]
        ids = [choice.problem.prompt_ids for choice in chosen]
        self.window = [*self.window, *zip(ids, observed.tolist())][-self.args.window :]
        known = len(self.window) >= self.args.teacher_batch
        for _ in range(self.args.teacher_updates if known else 0):
            # Squared error on random rows of the window, which the ranks divide among them.
            rows = self.rng.sample(self.window, self.args.teacher_batch)
            share = rows[self.world.rank :: self.world.size]
            targets = torch.tensor([observed for _, observed in share], device=self.world.device)
            self.predict([ids for ids, _ in share], targets)
            divide_gradients(self.teacher, len(rows), self.world)
            if math.isfinite(clip_gradients(self.teacher, self.args.grad_clip)):
                self.optimizer.step()
            self.optimizer.zero_grad()
        best = torch.tensor([not choice.by_chance for choice in chosen])  # [B]
        above, idle = torch.tensor([choice.above for choice in chosen]), observed == 0  # [B], [B]
        return {
            "chosen_over_mean": ((above * best).sum(), best.sum()),
            "zero_groups_chosen": ((idle & best).sum(), best.sum()),
            "zero_groups_uniform": ((idle & ~best).sum(), (~best).sum()),
        }

    def learning_value(self, rewards: Tensor) -> Tensor:
        """Return sqrt(p̂ (1-p̂)) of each group `[P, G]` -> `[P]`, the population standard deviation
        of the rewards, also of partial ones. All wrong or all right gives 0, which is learned."""
        return (rewards - rewards[:, :1]).std(dim=1, correction=0)

    @timed("teacher")
    def predict(self, prompts: list[list[int]], targets: Tensor | None = None) -> Tensor:
        """Return f(q) of prompts `[n]`. With `targets [n]`, add the gradient of Σ (f - target)²."""
        # A batch of prompts without responses.
        none, values = [[]] * len(prompts), torch.zeros(len(prompts), device=self.world.device)
        batch = Rollout.pack(prompts=prompts, tokens=none, logps=none, eos=[], device=values.device)
        for rows in micro_batches(self.teacher, batch, self.args.micro_tokens, self.world):
            # If only another rank has rows left, this one runs a pass and takes nothing from it.
            micro = batch.rows(rows if len(rows) else slice(1))
            with torch.set_grad_enabled(targets is not None):
                f = self.teacher(micro.sequences[:, : micro.prompt_len.max()], micro.prompt_len)
            if targets is not None:
                (f - targets[rows]).square().sum().backward()
            values[rows] = f.detach()
        return values


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
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r; 1 until the rollout's first optimiser step
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
    # Why min, and not the clip alone? A token that moved in the wrong direction must keep its
    # gradient, so that it can come back.
    objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    if args.beta > 0:
        objective = objective - args.beta * k3(args, logp, batch)  # [n, T]
    per_response = (objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # [n]: 1/|y_i|
    # The caller divides by the number of responses in this mini-batch, over all ranks. That does
    # two things at once: 1/G, and the mean over prompts.
    return -per_response.sum(), mask.new_tensor(len(mask))  # sum, count
    # </own>


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    # <own>
    stats = clip_shares(logp, batch, args.clip_low, args.clip_high)
    if args.beta > 0:
        stats["ref_kl"] = (k3(args, logp, batch) * batch.mask).sum(), batch.mask.sum()
    return stats
    # </own>


# Metrics that show the method at work. If the first is always 0, the run says so at its end.
ACTED = {"chosen_over_mean": "f of chosen prompts, minus their candidates' mean"}  # <own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    reference = frozen_reference(args, lm, world)  # π_ref; None if β is 0  # <own>
    curriculum = Curriculum(args, lm, task, world)  # <own>
    policy = shard(Policy(lm), args, world)
    adam = {"betas": args.betas, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **adam)
    both = torch.nn.ModuleList([policy, curriculum.teacher])  # <own>
    optimizers = [optimizer, curriculum.optimizer]  # <own>
    run = Run(args, task, world, Path(__file__).stem, ACTED)
    # Other objects to save in a checkpoint (each has a state_dict).
    parts = {"engine": engine, "curriculum": curriculum}  # <own>
    done = load_checkpoint(run.checkpoint, both, optimizers, parts, world)  # <own>
    engine.sync(policy)
    run.start(done)
    if done == 0:
        run.log(0, evaluate(engine, task, args, world))
    P, G = args.prompts_per_step // world.size, args.group_size  # P: this rank's prompts

    for step in run.steps():
        means = Means()

        # 1. Rollout: for each of P slots the candidate from which most can be learned, G responses.
        chosen = curriculum.choose(step)  # <own>
        problems = [pick.problem for pick in chosen[world.rank * P : (world.rank + 1) * P]]  # <own>
        prompts = [problem.prompt_ids for problem in problems]
        rollout = engine.generate(prompts, G, args.max_new_tokens, args.temperature)  # N = P·G rows

        # 2. Reward and advantages. A group is on one rank: its mean needs no communication.
        rewards = task.score(rollout, problems, G)  # [P, G]
        rollout.advantages = advantages(rewards).flatten()  # [N]

        means.add(**curriculum.learn(chosen, rewards))  # <own>

        # 3. Log-probs, in mini-batches of whole groups. Within each, the ranks exchange rows until
        # they have about the same number of tokens.
        minibatches = [balance_tokens(part, world) for part in rollout.split(args.minibatches)]
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
            save_checkpoint(run.folder, step, both, optimizers, parts, world, args.keep)  # <own>
    if args.save_hf:
        save_model(policy, tokenizer, run.folder / "model", world)
    run.finish()


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. K, η, the window and the teacher's optimiser, batch and learning rates are ours (no public code
#    gives them). So are one tournament per slot and no repeated prompt in a batch.
# 2. The teacher takes turns with the student on the same devices; the paper gives it 2 of 8 GPUs.
# 3. The paper's setting: a stream of 3 million problems (OpenMathReasoning). The command above
#    draws 64 x 16 candidates per step from MATH's 7,500, so prompts come back after seven steps.
# 4. f averages the last hidden states and has a bias; summaries say only w · MeanPool(Embed(q)).
#
# We read only the abstract and the start of the introduction (version 2, 8 May 2026). What else we
# say of the paper is from two summaries of version 1 (16 February 2026). They have no bias v, K, η,
# window's size, learning rates or std. The std here (sample, + 1e-6) is GRPO's usual one.
