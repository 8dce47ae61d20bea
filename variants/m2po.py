r"""M2PO: a budget for the whole batch instead of a clip for each token.

Zheng et al., "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on
LLMs?", 2025, arXiv 2510.01161.

The problem: with stale samples many tokens are a little outside any clip range, and PPO's clip
drops them all.

The idea: set one bound for the whole mini-batch, on the mean of (log w)². While the mean holds,
nothing is dropped; beyond it, only the farthest tokens are. The authors report stable training on
samples 256 updates old, with 0.06% of the tokens masked where GRPO clips 1.22%.

Objective, over all response tokens y_t of a mini-batch, with w = π_θ(y_t) / μ(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t M_t w Â_i
    Â_i = (R_i - mean R) / std R
    T = tokens with (Â > 0 and w > 1) or (Â < 0 and w < 1)
    M_t = 0 on the largest (log w)² in T, as few as bring the mean of the rest to τ; else 1

μ are the probabilities with which the tokens were sampled, however old the sampler's weights are.

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    M_t w Â

T are the *trust-region tokens*: they have moved in the direction of their advantage, and their
gradient moves them further from μ. PPO's clip can act only on these tokens, and so does this mask.
A token that fell although it was rewarded keeps its weight, because its gradient leads back.

Why the second moment? The mean of (log w)² bounds the variance of w. The mean of log w, a KL, does
not, because tokens that rose and tokens that fell cancel in it.

Base file: justrl.py. Differs from it in:
1. The mask of the mini-batch's second moment instead of min and clip.
2. w against the sampler instead of r against π_old. One ratio corrects for the sampler's numerics
   and for staleness, as in minirl.py. It has no cap: Â < 0 and w > 1 is not a trust-region token.
Loop: stapo.py's, which has one more forward pass per mini-batch, here for the mask.

Run it:
    torchrun -m variants.m2po                               # laptop, 2 to 4 minutes, no download
    torchrun -m variants.m2po --budget 1e-4                 # where it acts
    # eight GPUs (not yet run on several), sizes are ours
    torchrun --nproc_per_node=8 -m variants.m2po --model Qwen/Qwen3-1.7B-Base --lr 1e-6 \
        --task dapo-math-17k --eval_task math500 --prompts_per_step 128 --group_size 16 \
        --minibatches 16 --max_new_tokens 8192 --gradient_checkpointing
"""

from dataclasses import dataclass

from common.batch import Rollout
from common.cli import Positive
from common.distributed import gather, World
from common.launch import launch
import torch
from torch import Tensor

import stapo
from variants import Trunk, loop_of


@dataclass
class Args(Trunk):
    budget: Positive = 0.04
    """τ: largest mean of (log π_θ/μ)² over the trust-region tokens that are kept (paper)."""
    acts_on_ratio = True  # no flag: ACTED's first is 0 while every ratio is 1


def trust_region_tokens(log_weight: Tensor, A: Tensor) -> Tensor:
    """Return True `[n, T]` on tokens that moved in the direction of their advantage `A [n, 1]`:
    Â > 0 and w > 1, or Â < 0 and w < 1."""
    return ((A > 0) & (log_weight > 0)) | ((A < 0) & (log_weight < 0))  # [n, T]


def second_moment_bound(args: Args, squares: Tensor) -> Tensor:
    """Return the largest of the squares `[M]` that is kept, or 0 if none can be kept. The smallest
    are kept: as many of them as possible with a mean of at most `--budget`."""
    ordered = squares.double().cpu().sort().values  # [M]
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)  # [M]: increasing
    kept = int((means <= args.budget).sum())
    return ordered[kept - 1].to(squares) if kept else squares.new_tensor(0.0)  # []


def choose_tokens(args: Args, batch: Rollout, world: World) -> None:
    """Write the column `masked` `[m, T]` of a mini-batch. All ranks share one bound."""
    log_weight = batch.logp - batch.rollout_logp  # [m, T]: log π_θ/μ
    outward = trust_region_tokens(log_weight, batch.advantages[:, None])  # [m, T]
    outward &= batch.mask.bool()
    squares = log_weight.square()  # [m, T]
    bound = second_moment_bound(args, gather(squares[outward], world))  # []
    # 1e-6: rounding must not treat equal tokens differently.
    batch.masked = outward & (squares > bound + 1e-6)  # [m, T]


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    weight = (logp - batch.rollout_logp).exp()  # [n, T]: w, not clipped
    objective = ~batch.masked * weight * A  # [n, T]
    return -(objective * mask).sum(), mask.sum()  # the mean over all tokens


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    mask, A = batch.mask, batch.advantages[:, None]  # [n, T], [n, 1]
    log_weight = logp - batch.rollout_logp  # [n, T]: log π_θ/μ
    outward = trust_region_tokens(log_weight, A) & mask.bool()  # [n, T]
    weights = log_weight.exp()[mask > 0]  # [M]
    return {
        "masked_share": (batch.masked.sum(), mask.sum()),
        "second_moment": ((log_weight.square() * outward).sum(), outward.sum()),
        "weight_max": (torch.cat([mask.new_zeros(1), weights]).max(), None),
    }


ACTED = {
    "masked_share": "tokens masked (share)",
    "second_moment": "mean of (log π_θ/μ)² of the trust-region tokens, before the mask",
}


main = loop_of(stapo, globals())


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. The mask is chosen once for each mini-batch, over all ranks, before its gradient. This takes
#    one more forward pass. We know of no other difference from Algorithm 1.
#
# Other code differs from Algorithm 1. The authors' code finds the bound b for which the mean of
# min((log w)², b) over the trust-region tokens is τ. It then applies PPO's min and clip at
# exp(±√b), for each micro-batch. This drops more tokens: if log w is normal with spread 0.3, it
# drops 19% of all tokens instead of 10%. AReaL pools and masks all tokens. It also drops 19% there,
# but the gradient of half of those leads back to μ.
#
# The rule is as in the authors' code and in an independent implementation of Algorithm 1
# (ms-swift). τ = 0.04 is from the authors' scripts and project page. We read only the paper's
# abstract.
