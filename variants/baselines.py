r"""Baselines: what is subtracted from a reward, and what it is divided by.

RLOO: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from
Human Feedback in LLMs", 2024, arXiv 2402.14740.

Objective, over all response tokens y_t of a mini-batch, with r = π_θ(y_t) / π_old(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t min(r Â_i, clip(r, 1-ε_low, 1+ε_high) Â_i)
    Â_i by `--baseline`, below

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    M r Â
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

The file has five more methods: REINFORCE (Williams, 1992), REINFORCE++ and its form with a group's
mean (Hu et al., 2501.03262), MaxRL (2602.02710), and the divisor of ScaleRL (2510.13786).

    --baseline  method                  Â_i                                    a group all right
    none        REINFORCE               R_i                                    1
    rloo        RLOO                    R_i - mean of the group's others       0
    batch       REINFORCE++             whitened R_i                           positive
    group       REINFORCE++-baseline    whitened (R_i - group's mean)          0, nearly
    maxrl       MaxRL                   (R_i - group's mean) / group's mean    0
    scalerl     ScaleRL                 (R_i - group's mean) / their std       0

Any number that does not depend on y_i may be subtracted without changing the expected gradient; it
changes the variance. REINFORCE pushes every right answer up and no wrong one down. The group's mean
contains R_i: with it the gradient is (G-1)/G of the true one. RLOO removes this factor. Whitening
subtracts the batch's mean and divides by its standard deviation.

With a batch's mean, prompts compete. Answers to a prompt that is always solved are above it and
pushed up; most answers to a hard prompt are pushed down. A group's mean compares only answers to
one prompt. A batch's std rescales all prompts alike, whereas the group's std in GRPO gives prompts
near 0 or 1 a larger weight. MaxRL's division gives hard prompts the weight 1/p, so its gradient is
that of log p instead of p. ScaleRL's std is that of all R_i - group's mean in the batch.

Base file: justrl.py. Differs from it in:
1. Advantages by `--baseline`; the batch is the rollout, over all ranks.

Run it:
    torchrun -m variants.baselines                          # laptop, 2 to 4 minutes, no download
    # a node of eight
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
    """`[P, G]` -> `[P, G]`; sizes `[P, G]`: tokens of each response (default: 1).

    Rewards [1, 0, 0, 0] give 1 and 0s (none), 1 and -1/3s (rloo), 3 and -1s (maxrl).
    """
    # Equal rewards must give advantages of exactly 0. But rounding makes the mean of eight part
    # marks of 0.3 not quite 0.3. So subtract the first reward from all of them.
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
    """Mean and sample standard deviation over all ranks; each value counts `sizes` times."""
    values = values.double()  # [P, G]: in float64 the mean of any number of 0.3 is exactly 0.3
    sums = global_sum({"n": sizes.sum(), "sum": (sizes * values).sum()}, world)
    mean = sums["sum"] / sums["n"]
    squares = global_sum({"sum": (sizes * (values - mean).square()).sum()}, world)["sum"]
    return mean, (squares / max(1.0, sums["n"] - 1)) ** 0.5


def effect(rewards: Tensor, advantages: Tensor) -> dict[str, tuple[Tensor, Tensor | int]]:
    """Metrics as (sum, count) pairs: the distance of Â from R minus the group's mean, and the share
    of Σ |Â| in zero-variance groups."""
    idle = (rewards == rewards[:, :1]).all(dim=1)  # [P]
    apart = (advantages - (rewards - rewards.mean(dim=1, keepdim=True))).abs()  # [P, G]
    size = advantages.abs()  # [P, G]
    return {"apart": (apart.sum(), apart.numel()), "idle_push": (size[idle].sum(), size.sum())}


# Metrics that show the method at work. If the first one is 0 in all steps, it never acted.
ACTED = {
    "apart": "distance of Â from R minus the group's mean, mean",
    "idle_push": "share of |Â| in zero-variance groups",
}


# Lines of justrl.py's loop and what they become here
LOOP = """
-        rollout.advantages = advantages(rewards).flatten()  # [N]
+        sizes = rollout.mask.sum(dim=1).view(P, G)  # [P, G]
+        A = advantages(rewards, args.baseline, sizes, world)  # [P, G]
+        rollout.advantages = A.flatten()  # [N]
+        means.add(**effect(rewards, A))
"""
main = loop_of(justrl, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the papers in:
# 1. All have the same loss, with clip and without KL. REINFORCE++ has the k1 estimate in its
#    reward. RLOO takes one step per rollout and has no clip.
# 2. Whitening counts each response as often as it has tokens, as verl does, since each token has
#    its response's advantage. verl puts 1e-8 into the root; here 1e-6 is added to the std. `group`
#    also subtracts the mean of R_i - group's mean over the batch's tokens. It is not 0 if longer
#    responses are worse.
# 3. MaxRL where no answer is right: 0, as in prime-rl.
# 4. ScaleRL is more than its advantages: CISPO's loss, averaged by prompt, a float32 head, no
#    zero-variance prompts, and no prompts again that were solved at 0.9. TRL's
#    `scale_rewards="batch"` divides by the std of the rewards. This number also contains
#    differences between prompts, so it is larger.
#
# RLOO and REINFORCE++ are as in verl and TRL, ScaleRL's division as in its paper, MaxRL as in
# prime-rl. The papers' other choices are second hand.
