r"""Baselines: what is subtracted from a reward, and what it is divided by.

RLOO: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from
Human Feedback in LLMs", 2024, arXiv 2402.14740.

The problem: an advantage compares a reward with a baseline, the expected reward. Papers differ in
the baseline and in the divisor, but change other things at the same time.

The idea: put six choices behind one flag, and leave everything else alone.

Objective, over all response tokens y_t of a mini-batch, with r = π_θ(y_t) / π_old(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t min(r Â_i, clip(r, 1-ε_low, 1+ε_high) Â_i)
    Â_i by `--baseline`, below

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    M r Â
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

Besides RLOO the file has five methods: REINFORCE (Williams, 1992), REINFORCE++ and its form with a
group's mean (Hu et al., 2501.03262), MaxRL (2602.02710), and the divisor of ScaleRL (2510.13786).

    --baseline  method                  Â_i                                    a group all right
    none        REINFORCE               R_i                                    1
    rloo        RLOO                    R_i - mean of the group's others       0
    batch       REINFORCE++             whitened R_i                           positive
    group       REINFORCE++-baseline    whitened (R_i - group's mean)          0, nearly
    maxrl       MaxRL                   (R_i - group's mean) / group's mean    0
    scalerl     ScaleRL                 (R_i - group's mean) / their std       0

What may be subtracted? Any number that does not depend on y_i: it changes the variance of the
gradient, but not its expectation. REINFORCE subtracts nothing, so it pushes every right answer up
and no wrong one down. The group's mean contains R_i itself, which makes the expected gradient
(G-1)/G of the true one. RLOO takes the mean of the others and so removes this factor. Whitening
subtracts the batch's mean and divides by the batch's standard deviation.

With the batch's mean, prompts compete. Answers to a prompt that is always solved are above the mean
and pushed up, and most answers to a hard prompt are pushed down. A group's mean compares only
answers to one prompt.

The divisor decides how much a prompt counts. A batch's std rescales all prompts alike, but the
group's std in GRPO gives a larger weight to prompts that are solved nearly never or nearly always.
MaxRL's division gives hard prompts the weight 1/p, where p is the chance to solve the prompt, so
its gradient is that of log p instead of p. ScaleRL divides by the std of all R_i - group's mean in
the batch.

Base file: justrl.py. Differs from it in:
1. Advantages by `--baseline`; the batch is the rollout, over all ranks.

Run it:
    torchrun -m variants.baselines                          # laptop, 2 to 4 minutes, no download
    # eight GPUs (not yet run on several)
    torchrun --nproc_per_node=8 -m variants.baselines --task dapo-math-17k --eval_task aime24 \
        --model Qwen/Qwen3-1.7B-Base --baseline batch --prompts_per_step 128 --group_size 8 \
        --max_new_tokens 8192 --lr 1e-6 --gradient_checkpointing
"""

from dataclasses import dataclass
from typing import Literal

from common.distributed import ALONE, global_sum, World
from common.launch import launch
import torch
from torch import Tensor

from variants import justrl, loop_of


@dataclass
class Args(justrl.Args):
    baseline: Literal["none", "rloo", "batch", "group", "maxrl", "scalerl"] = "rloo"
    """How Â is computed (see the header); for none and batch, `--group_size 1` is enough."""

    def compares(self) -> bool:
        return self.baseline not in ("none", "batch")


def advantages(
    rewards: Tensor, how: str = "rloo", sizes: Tensor | None = None, world: World = ALONE
) -> Tensor:
    """Return the advantages `[P, G]` of `rewards [P, G]`, as `how` says.

    Rewards [1, 0, 0, 0] give 1 and 0s (none), 1 and -1/3s (rloo), 3 and -1s (maxrl). Whitening
    counts each response as often as it has tokens: `sizes [P, G]`, by default 1.
    """
    # Equal rewards must give advantages of exactly 0, but the float32 mean of eight rewards of 0.3
    # is not exactly 0.3. So first subtract the group's first reward from all of them.
    shifted = rewards - rewards[:, :1]  # [P, G]
    centred = shifted - shifted.mean(dim=1, keepdim=True)  # [P, G]
    G = rewards.shape[1]
    once = torch.ones_like(rewards)  # [P, G]
    if how == "none":
        return rewards
    if how == "rloo":
        return centred * (G / (G - 1))
    if how == "maxrl":
        mean = rewards.mean(dim=1, keepdim=True)  # [P, 1]
        return torch.where(mean > 0, centred / mean, 0.0)
    if how == "scalerl":
        _, std = moments(centred, once, world)
        return centred / (std + 1e-6)
    values = rewards if how == "batch" else centred  # [P, G]
    mean, std = moments(values, once if sizes is None else sizes, world)
    return (values - mean) / (std + 1e-6)


def moments(values: Tensor, sizes: Tensor, world: World) -> tuple[float, float]:
    """Return mean and sample standard deviation over all ranks. Each value counts `sizes` times."""
    values = values.double()  # [P, G]: in float64 the mean of any number of 0.3 is exactly 0.3
    sums = global_sum({"n": sizes.sum(), "sum": (sizes * values).sum()}, world)
    mean = sums["sum"] / sums["n"]
    squares = global_sum({"sum": (sizes * (values - mean).square()).sum()}, world)["sum"]
    return mean, (squares / max(1.0, sums["n"] - 1)) ** 0.5


def effect(rewards: Tensor, advantages: Tensor) -> dict[str, tuple[Tensor, Tensor | int]]:
    """Return metrics as (sum, count) pairs: how far Â is from R minus the group's mean, and the
    share of Σ |Â| in zero-variance groups."""
    idle = (rewards == rewards[:, :1]).all(dim=1)  # [P]
    apart = (advantages - (rewards - rewards.mean(dim=1, keepdim=True))).abs()  # [P, G]
    size = advantages.abs()  # [P, G]
    return {"apart": (apart.sum(), apart.numel()), "idle_push": (size[idle].sum(), size.sum())}


ACTED = {
    "apart": "distance of Â from R minus the group's mean, mean",
    "idle_push": "share of |Â| in zero-variance groups",
}


# The diff of justrl.py's loop
LOOP = """
-        rollout.advantages = advantages(rewards).flatten()  # [N]
+        sizes = rollout.mask.sum(dim=1).view(P, G)  # [P, G]
+        A = advantages(rewards, args.baseline, sizes, world)  # [P, G]
+        rollout.advantages = A.flatten()  # [N]
+        means.add(**effect(rewards, A))
"""
measures = justrl.measures
policy_loss = justrl.policy_loss
main = loop_of(justrl, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the papers in:
# 1. Here all six have the same loss, with a clip and without a KL term. REINFORCE++ has the KL in
#    its reward (the k1 estimate). RLOO takes one step per rollout and has no clip.
# 2. Whitening counts each response as often as it has tokens, as in verl, because each token has
#    its response's advantage. verl puts 1e-8 into the root; here 1e-6 is added to the std. `group`
#    also subtracts the mean of R_i - group's mean over the batch's tokens, which is not 0 if longer
#    responses are worse.
# 3. If no answer of a group is right, MaxRL's advantages are 0, as in prime-rl.
# 4. ScaleRL is more than its advantages: it has CISPO's loss, averaged by prompt, and a float32
#    head; it leaves out zero-variance prompts, and does not repeat prompts that were solved at 0.9.
#    TRL's `scale_rewards="batch"` divides by the std of the rewards. This number is larger, because
#    it also contains differences between prompts.
#
# RLOO and REINFORCE++ are as in verl and TRL, ScaleRL's division is as in its paper, and MaxRL as
# in prime-rl. We know the papers' other choices at second hand.
