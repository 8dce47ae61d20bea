r"""80/20: trains only the tokens at which the policy was uncertain.

Wang et al. (Qwen, Tsinghua), "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective
Reinforcement Learning for LLM Reasoning", 2025, arXiv 2506.01939.

The problem: most tokens of a worked answer were certain before they were drawn, such as the end of
a word or the digits of a result. Only a few tokens are forks, at which the policy could have
continued in different ways. All of them share one advantage.

The idea: train only the forks, in right and in wrong responses. The authors report the accuracy of
training on all tokens at 8B, and a higher one at 14B and 32B. The other 80% of the tokens alone do
much worse.

Objective, over all response tokens y_t of a mini-batch, with r = π_θ(y_t) / π_old(y_t):

    J = 1/(Σ_i Σ_t I) Σ_i Σ_t I min(r Â_i, clip(r, 1-ε_low, 1+ε_high) Â_i)
    Â_i = (R_i - mean R) / std R
    I = 1 if H_t >= τ, else 0;    τ = the 80% quantile of H_t    (of π_θ now, no gradient)

H_t is the entropy of π_θ where y_t was drawn, and the quantile is over the mini-batch.

Gradient weight on ∇ log π_θ(y_t), before the average over the tokens kept:

    I M r Â
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

Little is lost, because a token of probability near 1 has almost no gradient (at H = 0 none). At the
kept tokens nothing is biased: H depends on the position, not on the token drawn there. At a fork
every token is trained, elsewhere none. stapo.py selects by the drawn token, and only rewarded ones.

KL-Cov is another rule, which chooses tokens by their effect on the entropy (Cui et al., arXiv
2505.22617). To first order, a step lowers the entropy by the covariance of log π_θ and Â, and a few
tokens contribute far more to it than the others:

    c = (log π_θ(y_t) - mean) (Â_i - mean)           both means over the mini-batch's tokens
    --tokens kl_cov      r Â - |log r| at the 0.2% of the largest c, r Â elsewhere: no clip

What bounds a step: the clip, and tokens left out.

Base file: stapo.py. Differs from it in:
1. The mask I: by entropy alone, for right and wrong responses; or by covariance.

Run it:
    torchrun -m variants.entropy20                          # laptop, 2 to 4 minutes, no download
    torchrun -m variants.entropy20 --tokens kl_cov          # by the covariance instead
    # eight GPUs (not yet run on several); the paper's rollout, 16 mini-batches and no warm-up
    torchrun --nproc_per_node=8 -m variants.entropy20 --model Qwen/Qwen3-8B-Base \
        --task dapo-math-17k --eval_task aime24 --prompts_per_step 512 --group_size 16 \
        --minibatches 16 --max_new_tokens 20480 --lr 1e-6 --warmup 0 --tensor_parallel 2 \
        --gradient_checkpointing --vllm_sleep --vllm_memory 0.7
"""

from dataclasses import dataclass
import math
from typing import Literal

from common.batch import Rollout
from common.cli import Fraction, NonNegative
from common.distributed import gather, World
from common.launch import launch
from common.metrics import clip_shares
import numpy
import torch
from torch import Tensor

import stapo
from variants import Trunk, loop_of


@dataclass
class Args(Trunk):
    clip_low: NonNegative = 0.2
    """ε of the lower clip (paper)."""
    clip_high: NonNegative = 0.28
    """ε of the upper clip (paper)."""
    top_entropy: Fraction = 0.2
    """Share of the tokens that are trained: those of the largest entropy (paper)."""
    tokens: Literal["entropy", "kl_cov"] = "entropy"
    """Rule that chooses tokens: entropy (the tokens to train), or kl_cov, the covariance of log π_θ
    and Â (the tokens to keep near π_old)."""
    kl_cov_share: Fraction = 2e-3
    """kl_cov: share of tokens kept near π_old, by largest c (authors' 7B script; verl: 2e-4)."""
    kl_cov_coef: NonNegative = 1.0
    """κ of kl_cov: coefficient of |log r| on these tokens (authors' scripts; verl: 0.1)."""


def top_threshold(share: float, pool: Tensor) -> Tensor:
    """Return τ, so that this share of the values `[M]` is at least τ."""
    if len(pool) == 0:
        return pool.new_tensor(0.0)
    values = pool.cpu().numpy()  # torch.quantile takes at most 2^24 numbers
    return pool.new_tensor(numpy.quantile(values, 1 - share))


def choose_tokens(args: Args, batch: Rollout, world: World) -> None:
    """Write the column `chosen` `[m, T]`: True on the tokens that `--tokens` chooses. The choice is
    over the mini-batch of all ranks."""
    on = batch.mask.bool()  # [m, T]
    if args.tokens == "kl_cov":
        share = args.kl_cov_share
        A = batch.advantages[:, None].expand_as(batch.logp)  # [m, T]
        mean_logp = gather(batch.logp[on], world).mean()  # []
        mean_A = gather(A[on], world).mean()  # []
        score = (batch.logp - mean_logp) * (A - mean_A)  # [m, T]: c
    else:
        share = args.top_entropy
        score = batch.entropy  # [m, T]
    # Responses of a group begin alike; rounding must not make them differ.
    batch.chosen = score >= top_threshold(share, gather(score[on], world)) - 1e-5  # [m, T]


def pull(args: Args, logp: Tensor, batch: Rollout) -> Tensor:
    """Return KL-Cov's κ |log r| `[n, T]`, which keeps a token near π_old."""
    return args.kl_cov_coef * (logp - batch.old_logp).abs()  # [n, T]


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r; 1 until the rollout's first optimiser step
    if args.tokens == "kl_cov":  # every token is trained, without a clip
        objective = ratio * A - pull(args, logp, batch) * batch.chosen  # [n, T]
        return -(objective * mask).sum(), mask.sum()  # a mean over all tokens
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
    objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    kept = mask * batch.chosen  # [n, T]: I
    return -(objective * kept).sum(), kept.sum()  # a mean over the tokens left


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    mask = batch.mask  # [n, T]
    chosen = mask * batch.chosen  # [n, T]
    if args.tokens == "kl_cov":
        stats = clip_shares(logp, batch, math.inf, math.inf)  # it has no clip
        stats["held_share"] = chosen.sum(), mask.sum()
        stats["held_pull"] = (pull(args, logp, batch) * chosen).sum(), chosen.sum()
    else:
        stats = clip_shares(logp, batch, args.clip_low, args.clip_high)
        stats["left_out"] = (mask - chosen).sum(), mask.sum()
        stats["fork_entropy"] = (batch.entropy * chosen).sum(), chosen.sum()
    return stats


ACTED = {
    "left_out": "tokens not trained (share)",
    "fork_entropy": "entropy of those trained (nats)",
}


advantages = stapo.advantages
main = loop_of(stapo, globals())


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. No dynamic sampling and no overlong punishment (the paper builds on DAPO). Tokens of
#    zero-variance groups are in the quantile and in the denominator.
# 2. τ is the quantile over the mini-batch of all ranks together. The authors' code takes the top
#    20% of each micro-batch, so memory decides which tokens are trained.
# 3. No bound on r if Â < 0. The authors' script passes `clip_ratio_c=10`, verl's bound.
# 4. Covariances are over the mini-batch of all ranks, too, under π_θ at its start; verl's are over
#    a micro-batch. The 0.2% is a quantile, rounded up.
#
# TRL (`top_entropy_quantile`) divides by all tokens, which makes the same gradient five times
# smaller.
#
# An improbable token at a position of low entropy has the largest gradient on the logits. Here it
# is left out, even if it is punished. KL-Cov comes from "The Entropy Mechanism of Reinforcement
# Learning for Reasoning Language Models", 2025.
#
# Objective and ε are as in the paper and the authors' code; TRL's numbers agree, except for that
# factor. The code shows that π_θ's entropies are meant, not π_old's. KL-Cov is as in verl's code.
# Its 0.2% and coefficient 1 are from scripts for 7B, which we read in copies; verl has 0.02% and,
# in its configuration, 0.1.
