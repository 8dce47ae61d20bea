"""PACED-RL: the partition function as a measure of difficulty.

Kim et al., "Beyond Normalization: Rethinking the Partition Function as a Difficulty Scheduler for
RLVR", 2026, arXiv 2602.12642.

Objective, for G responses y_i to each prompt q, chosen for a partition function Z(q):

    J = -1/G Σ_i β/2 (log Z(q) + log π_θ(y_i) - log π_old(y_i) - R_i/β)²
    β log Z(q) = V(q) = σ(u · mean_t h_t(q) + v),     fitted to R by the same square
    q = the one of K candidates whose V is nearest to τ = 1/2

Gradient weight on ∇ log π_θ(y_t), one for all tokens of y_i, before the mean over responses:

    Â_i - β log (π_θ(y_i) / π_old(y_i)),     Â_i = R_i - V(q)

Max E[R] - β KL(π_θ ‖ π_old) has one answer, π* = π_old exp(R/β) / Z: every response at its old
probability times exp(R/β). Trajectory balance asks each single response to agree with that. All
squares are 0 exactly where π_θ = π* and Z = E_old[exp(R/β)]. For rewards 0 and 1 this is 1 + p
(exp(1/β) - 1), where p is the probability of a right answer. So log Z has to be learned together
with π_θ.

For any π_θ, the log Z with the least loss obeys β log Z = p + β KL(π_old ‖ π_θ). At the start of a
step this is p. So the number that training needs anyway predicts from a prompt's text how hard it
is. The curriculum takes prompts that the model solves half the time (goldilocks.py says why).

At π_θ = π_old the gradient is the plain policy gradient with the baseline V. It needs no group: a
group that is all right still shows that V was too low. As π_θ leaves π_old the second term pulls it
back, where PPO's clip would cut.

Base file: goldilocks.py. Differs from it in:
1. The teacher predicts the mean reward instead of sqrt(p (1-p)), and the candidate nearest to τ is
   chosen, not the largest.
2. The same number, computed before the rollout, is log Z in the loss. The loss is trajectory
   balance instead of the clipped ratio; no z-score, no reference model.

Differs from the paper in:
1. The paper's log Z is a small network on fixed embeddings, trained by the loss along with the
   policy, at almost no cost. Here it is goldilocks' teacher, a language model with two updates per
   step of its own, from a window, at π_θ = π_old.
2. No replay. In the paper batches also hold earlier right answers to the prompts whose V was most
   wrong, from a buffer of 128 (64 new ones a step).
3. J is trajectory balance times β/2, so that the first term of the weight is the policy gradient's.
4. K, the share of random choices and the teacher's rates are those of goldilocks.py (ours).

Confidence: balance against π_old, the proposition on V, τ and β are as two readers of the paper
report them; we have not read the paper. We derived the identities and tested them with all
responses enumerated (checks/paced.py). We do not know how the paper draws candidates and how replay
enters the loss.

Run it:
    torchrun -m variants.paced                              # laptop, 2 to 4 minutes, no download
    torchrun -m variants.paced --explore 1                  # the same, prompts drawn uniformly
    # a node of eight, the paper's lengths
    torchrun --nproc_per_node=8 -m variants.paced --model Qwen/Qwen2.5-Math-1.5B --task math \\
        --teacher_lr 1e-5 --prompts_per_step 128 --group_size 8 --max_new_tokens 3072 --lr 1e-6 \\
        --weight_decay 0.1 --micro_tokens 8192
"""

import copy  # <own>
from dataclasses import dataclass
import math
from pathlib import Path
from random import Random  # <own>
from typing import NamedTuple  # <own>

from common.batch import Rollout, balance_tokens
from common.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.cli import BadInput, Share  # <own>
from common.clock import timed  # <own>
from common.data import Problem, Task, load_task  # <own>
from common.distributed import World, clip_gradients, divide_gradients, shard
from common.distributed import gather  # <own>
from common.launch import launch
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from common.metrics import Means, evaluate, metrics_by_sign, rollout_metrics
from common.model import load_model
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
    warmup: Whole = 5
    """Steps in which lr rises linearly to its full value (our choice; verl's default: 0)."""
    betas: Betas = (0.9, 0.95)
    """AdamW's decay rates (OpenRLHF's; verl's, which most papers have, are 0.9 0.999)."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay (our choice; verl's default: 0.01)."""
    grad_clip: Positive = 1.0
    """Largest gradient norm; larger gradients are scaled down to it (verl's default)."""
    # <own>
    anchor: Positive = 0.05
    """β: weight of KL(π_θ ‖ π_old) against the reward (paper)."""
    target: Share = 0.5
    """τ: the chosen prompts should have this chance of a right answer (paper)."""
    candidates: Count = 16
    """K: prompts that compete for each slot of the batch (our choice)."""
    explore: Share = 0.1
    """η: share of slots filled at random, so that the teacher sees all kinds (our choice)."""
    window: Count = 256
    """Latest prompts the teacher learns from; few, as V has to follow the student (our choice)."""
    teacher_batch: Count = 64
    """Prompts in one update of the teacher; before it has them, choice is random (our choice)."""
    teacher_updates: Whole = 2
    """Updates of the teacher per step (our choice)."""
    teacher_lr: Positive = 1e-3
    """The teacher's learning rate; its head has ten times this (our choice; real models: 1e-5)."""
    # </own>


def advantages(rewards: Tensor, expected: Tensor) -> Tensor:  # <own>
    """R - V: `[P, G]`, `[P]` -> `[P, G]`. The baseline V is predicted from the prompt's text."""
    return rewards - expected[:, None]  # [P, G]  # <own>


# <own>
class Teacher(torch.nn.Module):
    """V(q) = β log Z(q) = σ(u · mean_t h_t(q) + v): the student's chance to be right, as
    predicted from the text of the prompt."""

    def __init__(self, backbone: torch.nn.Module):
        super().__init__()
        self.lm, self.head = backbone, torch.nn.Linear(backbone.config.hidden_size, 1)
        [torch.nn.init.zeros_(one) for one in self.head.parameters()]  # at first all V are 1/2

    def forward(self, sequences: Tensor, lengths: Tensor) -> Tensor:
        """`sequences [n, S]` right-padded, `lengths [n]` -> `[n]` in (0, 1)."""
        hidden = self.lm(input_ids=sequences, use_cache=False).last_hidden_state  # [n, S, H]
        real = torch.arange(hidden.shape[1], device=lengths.device) < lengths[:, None]  # [n, S]
        mean = (hidden * real[..., None]).sum(dim=1) / lengths[:, None]  # [n, H]
        return self.head(mean)[:, 0].float().sigmoid()  # as 1 < Z < exp(1/β)


class Choice(NamedTuple):
    """What a slot of the batch is filled with."""

    problem: Problem
    predicted: float  # V of the problem
    above: float  # how much nearer it is to τ than V of the mean candidate
    by_chance: bool


def select(
    values: Tensor, candidates: list[list], target: float, explore: float, rng: Random
) -> list[Choice]:
    """Fill each slot: with the candidate of which `values [B, K]` is nearest to the target, or with
    probability `explore` a random one. A prompt is taken twice only if its slot has no other."""
    merits = -(values - target).abs()  # [B, K]
    above = merits - merits.mean(dim=1, keepdim=True)  # [B, K]
    chosen, taken = [], set()
    rows = zip(values.tolist(), merits.tolist(), above.tolist(), candidates)
    for predicted, scores, better, problems in rows:
        order = sorted(range(len(problems)), key=lambda k: -scores[k])
        chance = rng.random() < explore
        if chance:
            rng.shuffle(order)
        k = next((k for k in order if problems[k].prompt not in taken), order[0])
        taken.add(problems[k].prompt)
        chosen.append(Choice(problems[k], predicted[k], better[k], chance))
    return chosen


class Curriculum:
    """Chooses the student's prompts. In each step `choose` asks the teacher for V(q) of all
    candidates before the rollout. `expects` returns V of this rank's choices. After the rewards
    `learn` fits V to the mean rewards.

    The ranks divide the teacher's work and share the results. All ranks make the same choice.
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
        """Fill the B slots of a step, those of all ranks: each with the one of K candidates with
        V(q) nearest to τ, or with a random one."""
        args, B, K = self.args, self.args.prompts_per_step, self.args.candidates
        P, rank = B // self.world.size, self.world.rank
        slots = range((step - 1) * B, step * B)
        pool = [[self.task.train(slot * K + k) for k in range(K)] for slot in slots]  # [B, K]
        # Each rank computes V for its own slots. Then every rank chooses for all slots, so that no
        # two ranks take the same prompt.
        asked = [one.prompt_ids for slot in pool[rank * P : (rank + 1) * P] for one in slot]
        values = gather(self.predict(asked), self.world).view(B, K).cpu()  # [B, K]
        explore = args.explore if len(self.window) >= args.teacher_batch else 1.0  # no teacher yet
        self.rng.seed(f"{args.seed}/{step}")
        return select(values, pool, args.target, explore, self.rng)

    def learn(self, chosen: list[Choice], rewards: Tensor) -> dict[str, tuple]:
        """Add the mean rewards of all ranks' prompts to the window and update the teacher;
        `rewards [P, G]` are this rank's. Returns metrics as pairs (sum, count)."""
        # Only the mean is stored: Σ_i (V - R_i)² and G (V - mean R)² have the same gradient.
        observed = gather(rewards.mean(dim=1), self.world).cpu()  # [B]
        ids = [choice.problem.prompt_ids for choice in chosen]
        self.window = [*self.window, *zip(ids, observed.tolist())][-self.args.window :]
        known = len(self.window) >= self.args.teacher_batch
        for _ in range(self.args.teacher_updates if known else 0):
            # Squared error on random rows of the window, divided over the ranks
            rows = self.rng.sample(self.window, self.args.teacher_batch)
            share = rows[self.world.rank :: self.world.size]
            targets = torch.tensor([observed for _, observed in share], device=self.world.device)
            self.predict([ids for ids, _ in share], targets)
            divide_gradients(self.teacher, len(share), self.world)
            if math.isfinite(clip_gradients(self.teacher, self.args.grad_clip)):
                self.optimizer.step()
            self.optimizer.zero_grad()
        best = torch.tensor([not choice.by_chance for choice in chosen])  # [B]
        idle = (observed == 0) | (observed == 1)  # [B]
        above = torch.tensor([choice.above for choice in chosen])  # [B]
        predicted = torch.tensor([choice.predicted for choice in chosen])  # [B]
        return {
            "expected": (predicted.sum(), len(chosen)),
            "chosen_over_mean": ((above * best).sum(), best.sum()),
            "zero_groups_chosen": ((idle & best).sum(), best.sum()),
            "zero_groups_uniform": ((idle & ~best).sum(), (~best).sum()),
        }

    @timed("teacher")
    def predict(self, prompts: list[list[int]], targets: Tensor | None = None) -> Tensor:
        """V(q) of these prompts `[n]`; with `targets [n]` also the gradient of Σ (V - target)²."""
        # A batch of prompts without responses
        none, values = [[]] * len(prompts), torch.zeros(len(prompts), device=self.world.device)
        batch = Rollout.pack(prompts=prompts, tokens=none, logps=none, eos=[], device=values.device)
        for rows in micro_batches(self.teacher, batch, self.args.micro_tokens, self.world):
            micro = batch.rows(rows)
            with torch.set_grad_enabled(targets is not None):
                f = self.teacher(micro.sequences[:, : micro.prompt_len.max()], micro.prompt_len)
            if targets is not None:
                (f - targets[rows]).square().sum().backward()
            values[rows] = f.detach()
        return values


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
ACTED = {"chosen_over_mean": "how much nearer to τ than the mean candidate"}
# </own>


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
    # One ratio for the whole response, because trajectory balance is about whole responses.
    log_ratio = ((logp - batch.old_logp) * mask).sum(dim=1, keepdim=True)  # [n, 1]
    # β (log Z + log π_θ - log π_old) - R, with V = β log Z in the advantage
    imbalance = args.anchor * log_ratio - A  # [n, 1]
    # How far V may lie above p: β KL(π_old ‖ π_θ), from responses of π_old.
    stats = {"anchor_kl": (-args.anchor * log_ratio.sum(), mask.new_tensor(len(mask)))}
    return imbalance.square().sum() / (2 * args.anchor), mask.new_tensor(len(mask)), stats
    # </own>


def main(args: Args, world: World) -> None:
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    curriculum = Curriculum(args, lm, task, world)  # <own>
    policy = shard(Policy(lm), args, world)
    adam = {"betas": args.betas, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **adam)
    both = torch.nn.ModuleList([policy, curriculum.teacher])  # <own>
    optimizers = [optimizer, curriculum.optimizer]  # <own>
    run = Run(args, task, world, Path(__file__).stem, ACTED)
    # What else a checkpoint holds: each has a state_dict.
    parts = {"engine": engine, "curriculum": curriculum}  # <own>
    done = 0  # steps trained so far
    if args.resume:
        done = load_checkpoint(run.folder, both, optimizers, parts, world)  # <own>
    engine.sync(policy)
    run.start(done)
    if done == 0:
        run.log(0, evaluate(engine, task, args, world))
    P, G = args.prompts_per_step // world.size, args.group_size  # P: this rank's prompts

    for step in run.steps():
        means = Means()

        # Rollout: for each of P slots the candidate with V nearest to τ, G responses.
        chosen = curriculum.choose(step)  # <own>
        mine = chosen[world.rank * P : (world.rank + 1) * P]  # <own>
        problems = [choice.problem for choice in mine]  # <own>
        prompts = [problem.prompt_ids for problem in problems]
        rollout = engine.generate(prompts, G, args.max_new_tokens, args.temperature)  # N = P·G rows

        # Reward and advantages. A group is never split over ranks: its mean needs no communication.
        rewards = task.score(rollout, problems, G)  # [P, G]
        expected = rewards.new_tensor([choice.predicted for choice in mine])  # [P]: V  # <own>
        rollout.advantages = advantages(rewards, expected).flatten()  # [N]  # <own>

        means.add(**curriculum.learn(chosen, rewards))  # <own>

        # Mini-batches of whole groups. In each, the ranks exchange rows until they have about
        # equally many tokens.
        minibatches = [balance_tokens(part, world) for part in rollout.split(args.minibatches)]
        # The trainer computes the log-probs of π_old, the policy that sampled. The sampler's own
        # log-probs come from other kernels. A ratio against those would mix two things: how far the
        # policy moved, and how much sampler and trainer differ (see minirl.py).
        # The first mini-batch needs no pass: until the first optimiser step π_θ is π_old.
        for minibatch in minibatches[1:]:
            minibatch.old_logp = all_logprobs(policy, minibatch, args, world).logp  # [n, T]

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
            save_checkpoint(run.folder, step, both, optimizers, parts, world)  # <own>
    if args.save_hf:
        save_model(policy, tokenizer, run.folder / "model", world)
    run.finish()


if __name__ == "__main__":
    launch(main, Args)
