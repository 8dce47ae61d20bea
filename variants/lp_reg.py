r"""Lp-Reg: low-probability regularisation, which protects rare tokens of wrong responses.

Huang et al. (Tencent), "Low-probability Tokens Sustain Exploration in Reinforcement Learning with
Verifiable Reward", 2025, arXiv 2510.03222.

The problem: a rare token of a wrong response is pushed down with it, whether it was to blame or
not. It is seldom drawn, so right responses seldom push it up again. Over a run, rare ways to
continue ("wait", "but") disappear, and exploration with them. An entropy bonus would raise noise as
well.

The idea: tell the two apart by relative probability. A token with less than κ of the most likely
token's probability is noise, and nothing protects it. The rarest of the other tokens are pulled up
when they fall. A survey of 2026 says that Lp-Reg "weights rare tokens down". It does the opposite:
no weight is lowered, and a rare token with Â < 0 gets a second term that holds it up.

Objective, over all response tokens y_t of a mini-batch, with r = π_θ(y_t) / π_old(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t { min(r Â_i, clip(r, 1-ε_low, 1+ε_high) Â_i) - β I k3 }
    I = 1 if Â_i < 0 and π_θ(y_t) <= δ and π_θ(y_t) < π_proxy(y_t), else 0
    k3 = π_proxy/π_θ - log(π_proxy/π_θ) - 1
    π_proxy = π_old without the tokens of p < κ max p, renormalised;    Â_i = (R_i - mean R) / std R

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    M r Â + β I (π_proxy/π_θ - 1)
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

δ is the ρ-quantile of π_θ(y_t) over the mini-batch's tokens with Â < 0. The second term is 0 at
π_proxy and pulls up below it, more strongly the further a token has fallen.

With nothing filtered out, Â = -1 and β = 1, the weight is -r + 1/r - 1, which is 0 at r = 0.62. So
such a token, left alone, falls to three fifths within a rollout and no further. On-policy the term
is small: at r = 1 it is the filtered probability over the rest. PPO's clip would end the fall at
0.8. The authors' clip has no lower bound (ε_low = 1), so only this term acts. A clip only stops
pushing, so other tokens can still drag a token down; the term pulls it back.

What bounds a step: a clip of the token's ratio.

Base file: stapo.py. Differs from it in:
1. The term β I k3 instead of the mask of spurious tokens. π_proxy is a column that the pass for
   π_old computes, too.
2. ε_low = 1, ε_high = 9: in effect r <= 10 where Â > 0, and no bound where Â < 0.

Run it:
    torchrun -m variants.lp_reg                             # laptop, 2 to 4 minutes, no download
    torchrun -m variants.lp_reg --minibatches 1             # on-policy
    # eight GPUs (not yet run on several); the authors' sizes off-policy (they have 14B)
    torchrun --nproc_per_node=8 -m variants.lp_reg --model Qwen/Qwen3-8B-Base \
        --task dapo-math-17k --eval_task aime24 --prompts_per_step 256 --group_size 8 \
        --minibatches 8 --max_new_tokens 8192 --max_prompt_tokens 2048 --lr 1e-6 --warmup 0 \
        --rare_share 0.01 --tensor_parallel 2 --gradient_checkpointing
"""

from dataclasses import dataclass
from functools import partial  # noqa: F401  (for LOOP)

from common.batch import Rollout
from common.cli import NonNegative, PositiveShare, Share
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
    clip_low: NonNegative = 1.0
    """ε of the lower clip; at 1 there is no lower bound (authors' script)."""
    clip_high: NonNegative = 9.0
    """ε of the upper clip (authors' script)."""
    rare_share: Share = 0.05
    """ρ: share of the tokens with Â < 0, the rarest ones, that may be protected (our choice; paper:
    0.01 at 14B, 0.005 at 32B)."""
    kappa: PositiveShare = 0.02
    """κ: a token below this share of the most likely token's probability is noise (paper)."""
    proxy_weight: NonNegative = 1.0
    """β of the protecting term (authors' script)."""


def proxy_logprobs(logprobs: Tensor, tokens: Tensor, kappa: float) -> Tensor:
    """Return log π_proxy of the tokens `[b]` from log π_old `[b, V]`; -∞ for filtered tokens."""
    noise = logprobs.exp() < kappa * logprobs.amax(-1, keepdim=True).exp()  # [b, V]
    left = logprobs.masked_fill(noise, -torch.inf)  # [b, V]
    return left.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def rare_threshold(args: Args, logp: Tensor) -> Tensor:
    """Return log δ from log π_θ `[M]` of all tokens with Â < 0; -∞ if there are none."""
    if len(logp) == 0:
        return logp.new_tensor(-torch.inf)
    values = logp.cpu().numpy()  # torch.quantile takes at most 2^24 numbers
    return logp.new_tensor(numpy.quantile(values, args.rare_share))


def negative(batch: Rollout) -> Tensor:
    """Return True `[n, T]` on the tokens of responses with Â < 0."""
    return (batch.advantages[:, None] < 0) & batch.mask.bool()


def choose_tokens(args: Args, batch: Rollout, world: World) -> None:
    """Write the column `rare` `[m, T]`: True on the rarest tokens with Â < 0, among the mini-batch of
    all ranks."""
    bad = negative(batch)  # [m, T]
    threshold = rare_threshold(args, gather(batch.logp[bad], world))  # []: log δ
    # 1e-5: responses of a group begin alike, and rounding must not make their tokens differ.
    batch.rare = bad & (batch.logp <= threshold + 1e-5)  # [m, T]


def protected(logp: Tensor, batch: Rollout) -> Tensor:
    """Return I `[n, T]`: True on rare tokens that are less likely than under π_proxy."""
    return batch.rare & (logp.detach() < batch.proxy_logp - 1e-5)


def log_proxy_ratio(logp: Tensor, batch: Rollout) -> Tensor:
    """Return log(π_proxy/π_θ) `[n, T]`, 0 on tokens that are not protected."""
    # Filled, not multiplied: log 0 of a filtered token is -inf, and -inf · 0 is NaN.
    return (batch.proxy_logp - logp).masked_fill(~protected(logp, batch), 0.0)


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r; 1 until the rollout's first optimiser step
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
    objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    log_ratio = log_proxy_ratio(logp, batch)  # [n, T]
    k3 = log_ratio.exp() - log_ratio - 1  # [n, T]: 0 on tokens that are not protected
    objective = objective - args.proxy_weight * k3  # [n, T]
    return -(objective * mask).sum(), mask.sum()  # a mean over all tokens


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    held = protected(logp, batch)  # [n, T]
    pull = args.proxy_weight * log_proxy_ratio(logp, batch).expm1()  # [n, T]
    noise = batch.rare & batch.proxy_logp.isinf()  # [n, T]
    return {
        **clip_shares(logp, batch, args.clip_low, args.clip_high),
        "protected_share": (held.sum(), negative(batch).sum()),
        "protected_pull": (pull.sum(), held.sum()),
        "noise_share": (noise.sum(), batch.rare.sum()),
    }


ACTED = {
    "protected_share": "protected, of the tokens with Â < 0 (share)",
    "protected_pull": "their pull upwards, β (π_proxy/π_θ - 1)",
    "noise_share": "rarest tokens that count as noise (share)",
}


# The diff of stapo.py's loop, which has the pass over each mini-batch
LOOP = """
-        # The first mini-batch needs no pass: until the first optimiser step π_θ is π_old.
-        for minibatch in minibatches[1:]:
-            minibatch.old_logp = all_logprobs(policy, minibatch, args, world).logp  # [n, T]
+        readout = partial(proxy_logprobs, kappa=args.kappa)  # log π_proxy, from the same pass
+        for minibatch in minibatches:  # of all: π_proxy is π_old without its noise
+            old = all_logprobs(policy, minibatch, args, world, readout)
+            minibatch.old_logp, minibatch.proxy_logp = old.logp, old.statistic  # [n, T], [n, T]

-            # A pass over every mini-batch, the first too, without gradient: p and H, for τ_h.
+            # A pass over every mini-batch, the first too, without gradient: π_θ, for δ.
"""
advantages = stapo.advantages
main = loop_of(stapo, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. δ is over the mini-batch of all ranks together, and at least one token is at or below it. The
#    authors' code sorts each micro-batch. So memory decides which tokens are protected, and none is
#    if ρ of the micro-batch's tokens with Â < 0 is less than two.
# 2. k3 is not cut. The authors' code takes verl's k3, cut at 10. This removes the gradient of a
#    token that has fallen to a thirteenth of π_proxy, where it is needed most.
# 3. As in the authors' code, k3 is of the sampled token, and π_proxy > π_θ is required. The paper
#    writes KL(π_proxy ‖ π_θ) and requires π_proxy > 0.
# 4. ρ is 0.05 here, 0.01 at 14B and 0.005 at 32B. A mini-batch here has a few hundred tokens with
#    Â < 0. 0.01 of them are two to five tokens, most of them noise by κ.
# 5. The authors' README shows on-policy runs, with one optimiser step per rollout: the header's
#    second command. There r = 1, and the term is only the filtered probability over the rest.
#
# Loss, proxy, constants and sizes are those of the authors' code; the paper's formula is second
# hand.
