r"""Dr. GRPO: GRPO done right, without its two biases.

Liu et al. (Sea AI Lab), "Understanding R1-Zero-Like Training: A Critical Perspective",
2025, arXiv 2503.20783.

The problem: GRPO divides twice by a number that depends on the samples, by a response's length and
by the std of a group's rewards. Each time the gradient is no longer the gradient of the expected
reward.

The idea: leave both divisions out. What remains is the policy gradient with the group's mean as its
baseline (RLOO's, times (G-1)/G).

Objective, for G responses y_i to one prompt, with r = π_θ(y_t) / π_old(y_t) for each token y_t:

    J = 1/G Σ_i 1/L Σ_t min(r Â_i, clip(r, 1-ε, 1+ε) Â_i)
    Â_i = R_i - mean R
    L: the longest response allowed, a constant

Gradient weight on ∇ log π_θ(y_t), before the mean over responses:

    M r Â / L
    M = 0 if (Â > 0 and r > 1+ε) or (Â < 0 and r < 1-ε), else 1

What does 1/|y_i| do? It gives the tokens of a long response less weight. Of two wrong answers the
longer one is punished less for each token. So it pays to write more in a wrong answer, and less in
a right one. Responses grow longer, wrong ones most of all, and this looks like learning to think.

What does 1/std do? It gives a larger weight, 1/sqrt(p(1-p)), to prompts on which nearly all or
nearly no samples are right. At p = 1/8 this weight is half as much again as at 1/2. The constant L
only rescales lr, and Adam cancels that.

What bounds a step: a clip of the token's ratio.

Base file: grpo.py. Differs from it in:
1. Advantages without std.
2. A sum over tokens divided by the constant `--max_new_tokens`.
3. No KL term, no reference model.
Loop: sapo.py's, which is grpo.py's without π_ref.

Run it:
    torchrun -m variants.dr_grpo                            # laptop, 2 to 4 minutes, no download
    # eight GPUs (not yet run on several); the authors: 128 prompts, G = 8, at most 3000 tokens
    torchrun --nproc_per_node=8 -m variants.dr_grpo --model Qwen/Qwen2.5-Math-1.5B \
        --task dapo-math-17k --eval_task math500 --prompts_per_step 128 --group_size 8 \
        --max_new_tokens 3000 --lr 1e-6 --minibatches 1 --micro_tokens 8192
"""

from dataclasses import dataclass

from common.batch import Rollout
from common.cli import NonNegative
from common.launch import launch
from torch import Tensor

import sapo
from variants import Trunk, justrl, loop_of


@dataclass
class Args(Trunk):
    clip_low: NonNegative = 0.2
    """ε of the lower clip (authors' code)."""
    clip_high: NonNegative = 0.2
    """ε of the upper clip (authors' code)."""


def advantages(rewards: Tensor) -> Tensor:
    """Return centred rewards `[P, G]`. Rewards [1, 0, 0, 0] give [0.75, -0.25, -0.25, -0.25]."""
    # Equal rewards must give advantages of exactly 0, but the float32 mean of eight rewards of 0.3
    # is not exactly 0.3. So first subtract the group's first reward from all of them.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # If all responses are right, or all wrong, the advantages are exactly 0. Then this prompt adds
    # no gradient but that of a KL term.
    return centred  # no std: 1/std would weight prompts by their difficulty


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    total, _ = justrl.policy_loss(args, logp, batch)  # min(r Â, clip(r) Â), summed over all tokens
    # 1/L for all: dividing by its own length would make a long wrong response cheap.
    return total / args.max_new_tokens, batch.mask.new_tensor(len(logp))  # a mean over responses


ACTED = {"clip_share": "tokens clipped (share)"}


measures = justrl.measures
main = loop_of(sapo, globals())


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. The authors' code divides by 3000, the length limit of its runs; ours divides by the run's own
#    limit.
# 2. Four optimiser steps per rollout. The authors' code takes one epoch of a batch as large as the
#    rollout, so r = 1 always.
# 3. `--grad_clip 1` sees a gradient of another scale than in GRPO.
#
# Objective, constant and sizes are from the authors' code; ε is its default, 0.2.
