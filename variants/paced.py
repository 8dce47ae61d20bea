r"""PACED-RL: the partition function as a measure of difficulty.

Kim et al., "Beyond Normalization: Rethinking the Partition Function as a Difficulty Scheduler for
RLVR", 2026, arXiv 2602.12642.

The problem: a curriculum should choose prompts that the model solves half the time (goldilocks.py
says why), but how hard a prompt is has to be predicted by a model of its own.

The idea: take a loss that needs this number anyway. E[R] - β KL(π_θ ‖ π_old) has one maximum,
π* = π_old exp(R/β) / Z: every response at its old probability times exp(R/β). Trajectory balance
asks each single response to agree with that. For this it needs Z, the partition function of the
prompt, and Z says how hard the prompt is.

Objective, for G responses y_i to each prompt q, chosen for a partition function Z(q):

    J = -1/G Σ_i β/2 (log Z(q) + log π_θ(y_i) - log π_old(y_i) - R_i/β)²
    β log Z(q) = V(q) = σ(u · mean_t h_t(q) + v),     fitted to R by the same square
    q = the one of K candidates whose V is nearest to τ = 1/2

Gradient weight on ∇ log π_θ(y_t), one for all tokens of y_i, before the mean over responses:

    Â_i - β log (π_θ(y_i) / π_old(y_i)),     Â_i = R_i - V(q)

All squares are 0 only if π_θ = π* and Z = E_old[exp(R/β)]. For rewards 0 and 1 this Z is 1 + p
(exp(1/β) - 1), where p is the probability of a right answer. So log Z has to be learned together
with π_θ.

Why does Z predict the difficulty? For any π_θ, the log Z with the least loss obeys β log Z = p +
β KL(π_old ‖ π_θ). At the start of a step this is p. So V, which is predicted from a prompt's text,
says how hard the prompt is.

At π_θ = π_old the gradient is the plain policy gradient with the baseline V. It needs no group: a
group that is all right still shows that V was too low. As π_θ leaves π_old the second term pulls it
back, where PPO's clip would cut.

Base file: goldilocks.py. Differs from it in:
1. The teacher predicts the mean reward instead of sqrt(p (1-p)), and the candidate nearest to τ is
   chosen, not the largest.
2. The same number, computed before the rollout, is log Z in the loss. The loss is trajectory
   balance instead of the clipped ratio; no z-score, no reference model.

Run it:
    torchrun -m variants.paced                              # laptop, 2 to 4 minutes, no download
    torchrun -m variants.paced --explore 1                  # the same, prompts drawn uniformly
    # eight GPUs (not yet run on several), the paper's lengths
    torchrun --nproc_per_node=8 -m variants.paced --model Qwen/Qwen2.5-Math-1.5B --task math \
        --teacher_lr 1e-5 --prompts_per_step 128 --group_size 8 --max_new_tokens 3072 --lr 1e-6 \
        --weight_decay 0.1 --micro_tokens 8192
"""

from dataclasses import dataclass

from common.batch import Rollout
from common.cli import Count, CountOrZero, Fraction, Positive
from common.launch import launch
from torch import Tensor

import goldilocks
from goldilocks import Choice
from variants import Trunk, loop_of


@dataclass
class Args(Trunk):
    anchor: Positive = 0.05
    """β: weight of KL(π_θ ‖ π_old) against the reward (paper)."""
    target: Fraction = 0.5
    """τ: the chosen prompts should have this chance of a right answer (paper)."""
    candidates: Count = 16
    """K: prompts that compete for each slot of the batch (our choice)."""
    explore: Fraction = 0.1
    """η: share of slots filled at random, so that the teacher sees all kinds (our choice)."""
    window: Count = 256
    """Latest prompts the teacher learns from; few, so that V follows the student (our choice)."""
    teacher_batch: Count = 64
    """Prompts in one update of the teacher; before it has them, choice is random (our choice)."""
    teacher_updates: CountOrZero = 2
    """Updates of the teacher per step (our choice)."""
    teacher_lr: Positive = 1e-3
    """The teacher's learning rate; its head has ten times this (our choice; real models: 1e-5)."""

    def compares(self) -> bool:
        return False  # the baseline is V, which learns from equal rewards, too


def advantages(rewards: Tensor, expected: Tensor) -> Tensor:
    """Return R - V `[P, G]`. The baseline V, `expected [P]`, is predicted from the prompts."""
    return rewards - expected[:, None]  # [P, G]


class Curriculum(goldilocks.Curriculum):
    """The curriculum of goldilocks.py, whose teacher now predicts V(q) = β log Z(q), the student's
    chance to be right. `choose` takes the candidates with V nearest to τ; then `expected [P]` holds
    V of this rank's chosen prompts."""

    def predict(self, prompts: list[list[int]], targets: Tensor | None = None) -> Tensor:
        """Return by how much V `[n]` misses τ, negated. With `targets`, add a gradient to V."""
        # V = 2 f is in (0, 1), so 1 < Z < exp(1/β). At first every V is 1/2.
        self.V = 2 * super().predict(prompts, None if targets is None else targets / 2)  # [n]
        return -(self.V - self.args.target).abs()

    def choose(self, step: int) -> list[Choice]:
        chosen, K = super().choose(step), self.args.candidates
        V = self.V.view(-1, K)  # [P, K]: of this rank's candidates
        first = self.world.rank * len(V)
        mine = [choice.problem.index % K for choice in chosen[first : first + len(V)]]  # P, below K
        self.expected = V[range(len(V)), mine]  # [P]
        return chosen

    def learning_value(self, rewards: Tensor) -> Tensor:
        # Why the mean? Σ_i (V - R_i)² and G (V - mean R)² have the same gradient.
        return rewards.mean(dim=1)

    def learn(self, chosen: list[Choice], rewards: Tensor) -> dict[str, tuple]:
        expected = self.expected.sum(), len(self.expected)
        stats = super().learn(chosen, rewards)
        return {"expected": expected, "chosen_over_mean": stats["chosen_over_mean"]}


def log_ratio(logp: Tensor, batch: Rollout) -> Tensor:
    """Return log (π_θ(y) / π_old(y)) `[n, 1]`. Trajectory balance is about whole responses."""
    return ((logp - batch.old_logp) * batch.mask).sum(dim=1, keepdim=True)  # [n, 1]


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    # β (log Z + log π_θ - log π_old) - R, with V = β log Z in the advantage
    imbalance = args.anchor * log_ratio(logp, batch) - A  # [n, 1]
    return imbalance.square().sum() / (2 * args.anchor), mask.new_tensor(len(mask))  # sum, count


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    # How far V may lie above p: β KL(π_old ‖ π_θ), from responses of π_old.
    return {"anchor_kl": (-args.anchor * log_ratio(logp, batch).sum(), len(logp))}


ACTED = {"chosen_over_mean": "how much nearer to τ than the mean candidate"}


# The diff of goldilocks.py's loop
LOOP = """
-    reference = frozen_reference(args, lm, world)  # π_ref; None if β is 0

-        # 1. Rollout: for each of P slots the candidate from which most can be learned, G responses.
+        # 1. Rollout: for each of P slots the candidate with V nearest to τ, G responses.

-        rollout.advantages = advantages(rewards).flatten()  # [N]
+        rollout.advantages = advantages(rewards, curriculum.expected).flatten()  # [N]

-        if reference:
-            for minibatch in minibatches:
-                minibatch.ref_logp = all_logprobs(reference, minibatch, args, world).logp  # [n, T]
"""
main = loop_of(goldilocks, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. The paper's log Z is a small network on fixed embeddings. The loss trains it along with the
#    policy, at almost no cost. Here it is goldilocks' teacher, a language model with two updates
#    per step, from a window, at π_θ = π_old.
# 2. No replay. In the paper batches also hold earlier right answers to the prompts whose V was most
#    wrong, from a buffer of 128 (64 new ones a step).
# 3. J is trajectory balance times β/2, so that the first term of the weight is the same as in the
#    policy gradient.
#
# We have not read these parts of the paper: balance against π_old, the proposition on V, τ and β
# are as two readers report them. We derived the identities and tested them with all responses
# enumerated (checks/paced.py). We do not know how the paper draws candidates and how replay enters
# the loss.
