r"""Lp-Reg: low-probability regularisation, which protects rare tokens of wrong responses.

Huang et al. (Tencent), "Low-probability Tokens Sustain Exploration in Reinforcement Learning with
Verifiable Reward", 2025, arXiv 2510.03222.

The problem: a rare token of a wrong response is pushed down with it, to blame or not. It is seldom
drawn, so right responses seldom push it up again. Rare ways to continue ("wait", "but") disappear,
and exploration with them. An entropy bonus would raise noise as well.

The idea: a token with less than κ of the most likely token's probability is noise. Hold up the
rarest of the others. (A survey says that Lp-Reg "weights rare tokens down". That is wrong: no
weight is lowered, and a rare token with Â < 0 gets a second term, which pulls it up.)

Objective, over all response tokens y_t of a mini-batch, with r = π_θ(y_t) / π_old(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t { min(r Â_i, clip(r, 1-ε_low, 1+ε_high) Â_i) - β I k3 }
    I = 1 if Â_i < 0 and π_θ(y_t) <= δ and π_θ(y_t) < π_proxy(y_t), else 0
    k3 = π_proxy/π_θ - log(π_proxy/π_θ) - 1;    Â_i = (R_i - mean R) / std R
    π_proxy = π_old without the tokens of p < κ max p, renormalised

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    M r Â + β I (π_proxy/π_θ - 1)
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

δ is the ρ-quantile of π_θ(y_t) over the mini-batch's tokens with Â < 0. If nothing is filtered out,
Â = -1 and β = 1, the weight is -r + 1/r - 1, which is 0 at r = 0.62: a token left alone falls no
further within a rollout. PPO's clip would only stop the push, at 0.8; this term also pulls back a
token that others drag down. On-policy it is small.

What bounds a step: a clip of the token's ratio.

Base file: stapo.py. Differs from it in:
1. The term β I k3 instead of the mask. The pass for π_old computes the column π_proxy, too.
2. ε_low = 1, ε_high = 9: in effect r <= 10 where Â > 0, and no bound where Â < 0.

Run it:
    torchrun -m variants.lp_reg                             # laptop, 2 to 4 minutes, no download
    # eight GPUs (not yet run on several); the authors' sizes off-policy (they have 14B)
    torchrun --nproc_per_node=8 -m variants.lp_reg --model Qwen/Qwen3-8B-Base --rare_share 0.01 \
        --task dapo-math-17k --prompts_per_step 256 --minibatches 8 --max_new_tokens 8192 \
        --lr 1e-6 --warmup 0 --tensor_parallel 2 --gradient_checkpointing
"""

from dataclasses import dataclass
from functools import partial  # noqa: F401  (for LOOP)

from common.batch import Rollout
from common.cli import Fraction, NonNegative, PositiveFraction
from common.distributed import gather, World
from common.launch import launch
import torch
from torch import Tensor

import stapo
from variants import entropy20, justrl, loop_of, Trunk


@dataclass
class Args(Trunk):
    clip_low: NonNegative = 1.0
    """ε of the lower clip; at 1 there is no lower bound (authors' script)."""
    clip_high: NonNegative = 9.0
    """ε of the upper clip (authors' script)."""
    rare_share: Fraction = 0.05
    """ρ: share of the tokens with Â < 0, the rarest ones, that may be protected (our choice; paper:
    0.01 at 14B, 0.005 at 32B)."""
    kappa: PositiveFraction = 0.02
    """κ: a token below this share of the most likely token's probability is noise (paper)."""
    proxy_weight: NonNegative = 1.0
    """β of the protecting term (authors' script)."""


def proxy_logprobs(logprobs: Tensor, tokens: Tensor, kappa: float) -> Tensor:
    """Return log π_proxy of the tokens `[b]` from log π_old `[b, V]`; -∞ for filtered tokens."""
    noise = logprobs.exp() < kappa * logprobs.amax(-1, keepdim=True).exp()  # [b, V]
    left = logprobs.masked_fill(noise, -torch.inf)  # [b, V]
    return left.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def choose_tokens(args: Args, batch: Rollout, world: World) -> None:
    """Write the column `rare` `[m, T]`: True on the rarest tokens with Â < 0, among the mini-batch
    of all ranks."""
    bad = (batch.advantages[:, None] < 0) & batch.mask.bool()  # [m, T]
    delta = entropy20.top_threshold(1 - args.rare_share, gather(batch.logp[bad], world))  # []
    # Responses of a group begin alike; rounding must not make them differ.
    batch.rare = bad & (batch.logp <= delta + 1e-5)  # [m, T]


def log_proxy_ratio(logp: Tensor, batch: Rollout) -> Tensor:
    """Return log(π_proxy/π_θ) `[n, T]` where I = 1, and 0 elsewhere."""
    fallen = batch.rare & (logp.detach() < batch.proxy_logp - 1e-5)  # [n, T]: I
    # Filled, not multiplied: log 0 of a filtered token is -inf, and -inf · 0 is NaN.
    return (batch.proxy_logp - logp).masked_fill(~fallen, 0.0)


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    total, count = justrl.policy_loss(args, logp, batch)  # PPO's clip, a mean over all tokens
    log_ratio = log_proxy_ratio(logp, batch)  # [n, T]
    k3 = log_ratio.exp() - log_ratio - 1  # [n, T]: 0 on tokens that are not protected
    return total + args.proxy_weight * (k3 * batch.mask).sum(), count


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    bad = (batch.advantages[:, None] < 0) * batch.mask  # [n, T]
    log_ratio = log_proxy_ratio(logp, batch)  # [n, T]: above 0 on protected tokens
    held = (log_ratio > 0).sum()
    return {
        **justrl.measures(args, logp, batch),
        "protected_share": (held, bad.sum()),
        "protected_pull": (args.proxy_weight * log_ratio.expm1().sum(), held),
        "noise_share": ((batch.rare & batch.proxy_logp.isinf()).sum(), batch.rare.sum()),
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
# 1. δ is over the mini-batch of all ranks; the authors' code sorts each micro-batch.
# 2. k3 is not cut. The authors' code cuts it at 10: below a thirteenth of π_proxy nothing pulls.
# 3. As in the authors' code, k3 is of the sampled token, and π_proxy > π_θ is required. The paper,
#    which we know at second hand, writes KL(π_proxy ‖ π_θ) and requires π_proxy > 0.
