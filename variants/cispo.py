r"""CISPO: cap the importance weight, drop no token.

MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
2025, arXiv 2506.13585.

The problem: PPO's clip drops tokens. A good token that has risen by ε has no gradient any more, and
rare tokens reach the clip first. In reasoning, the paper says, these are the forks, "However",
"Wait", "Recheck", which decide the rest of the response. The more updates per rollout (M1 takes
16), the more of them are lost.

The idea: bound only the weight of a token. r corrects for sampling from π_old, and min(r, c)
prevents one token from outweighing a batch, but the gradient of log π_θ always flows.

Objective, over all response tokens y_t of a mini-batch, with r = π_θ(y_t) / π_old(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t sg[min(r, c)] Â_i log π_θ(y_t)
    Â_i = (R_i - mean R) / std R

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    min(r, c) Â

sg[x] is x without gradient, and it matters. Without it the derivative of r log π_θ is
r (1 + log π_θ). Below probability 1/e its sign turns, so rare tokens are pushed down when they are
rewarded.

What is lost without the clip? The clip also kept tokens near π_old. Here nothing does until the
next rollout. DPPO's authors see collapse where sampler and trainer differ (dppo.py).

What bounds a step: a bounded weight on log π.

Base file: justrl.py. Differs from it in:
1. -log π with a detached, capped weight instead of min and clip. `--clip_low` and `--clip_high`
   only count which tokens justrl.py would drop.

Run it:
    torchrun -m variants.cispo                              # laptop, 2 to 4 minutes, no download
    # eight GPUs (not yet run on several); M1's steps per rollout
    torchrun --nproc_per_node=8 -m variants.cispo --model Qwen/Qwen3-1.7B-Base \
        --task dapo-math-17k --eval_task math500 --prompts_per_step 128 --group_size 16 \
        --minibatches 16 --max_new_tokens 8192 --lr 1e-6 --micro_tokens 8192
"""

from dataclasses import dataclass

from common.batch import Rollout
from common.cli import NonNegative, Positive
from common.launch import launch
from common.metrics import clip_shares
import torch
from torch import Tensor

from variants import justrl, loop_of, Trunk


@dataclass
class Args(Trunk):
    clip_low: NonNegative = 0.2
    """ε of justrl.py's lower clip; here tokens beyond it are only counted (DAPO's authors)."""
    clip_high: NonNegative = 0.28
    """ε of its upper clip, likewise (DAPO's authors)."""
    is_cap: Positive = 5.0
    """c: largest importance weight r (the paper gives none; ScaleRL's, as TRL has it)."""
    acts_on_ratio = True  # not a flag: never acting is no fault if every ratio is 1


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    ratio = (logp.detach() - batch.old_logp).exp()  # [n, T]: r, without gradient
    weight = ratio.clamp(max=args.is_cap)  # [n, T]: from above only
    objective = weight * A * logp  # [n, T]: every token keeps its gradient
    return -(objective * mask).sum(), mask.sum()  # the mean over all tokens


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    mask = batch.mask  # [n, T]
    ratio = (logp - batch.old_logp).exp()  # [n, T]
    beyond = clip_shares(logp, batch, args.clip_low, args.clip_high)  # where PPO's M would be 0
    return {
        "kept_beyond_clip": beyond["clip_share"],
        "capped_share": (((ratio > args.is_cap) * mask).sum(), mask.sum()),
        "weight_max": (torch.cat([mask.new_zeros(1), ratio[mask > 0]]).max(), None),
    }


ACTED = {
    "kept_beyond_clip": "tokens that justrl's clip would drop (share)",
    "weight_max": "largest ratio r, before its cap",
}


advantages = justrl.advantages
main = loop_of(justrl, globals())


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. The paper does not give its cap; 5 is ScaleRL's (arXiv 2510.13786), as TRL has it.
# 2. Four optimiser steps per rollout; M1 takes 16. So on the embedded task no weight is near 5
#    (`--is_cap 1.2` shows the cap at work). No dynamic sampling, no punishment for length.
#
# Public code has three conventions for the cap. The first gives c itself (TRL: 5, as here). The
# second gives ε of the cap 1 + ε, and switches the lower side off with ε_low >= 1 (slime; verl's
# example, where ε 0.2 makes c = 1.2). The third has both sides: slime and verl again, if ε_low
# stays at the usual 0.2. That is another loss, in which a token that has become rare keeps the
# weight 0.8. In M1, ε_low is too large to act.
#
# The formula without a lower bound is as two frameworks quote the paper. Cap and token mean are as
# in TRL's code, the conventions as in TRL's, slime's and verl's.
