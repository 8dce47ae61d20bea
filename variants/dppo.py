r"""DPPO: Divergence Proximal Policy Optimization.

Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning",
2026, arXiv 2602.04879.

The problem: a trust region should bound the distance between two distributions, but the ratio of
the sampled token measures it badly. From 0.001 to 0.0013 the ratio is 1.3 and a clip at 1.28 acts,
although only 0.0003 of the probability has moved. From 0.8 to 0.99 the ratio is 1.24 and it does
not, although a fifth has moved. So a bound on ratios restrains rare tokens, but not common ones.

The idea: bound the divergence D of a distribution with two outcomes, this token and any other (a
coin), which needs only the sampled token's log-probs. Merging outcomes never adds to a divergence,
so D is a lower bound of the vocabulary's. D > δ proves that the vocabulary's exceeds δ, too; D <= δ
guarantees nothing about the other tokens.

Objective, for responses y sampled by the inference engine, whose probabilities are μ:

    J = E_y~μ [ Σ_t M_t sg[min(π_θ(y_t)/μ(y_t), c)] Â log π_θ(y_t) ]
    M_t = 0 if (Â > 0 and π_θ > μ or Â < 0 and π_θ < μ) and D(μ, π_θ) > δ, else 1
    D = |π_θ - μ|   or   D = μ log(μ/π_θ) + (1-μ) log((1-μ)/(1-π_θ))     (TV or KL of two coins)

sg[x] is x without gradient, c a cap, δ the largest D allowed: 0.15 for TV, 0.05 for KL.

Gradient weight on ∇ log π_θ(y_t), summed over tokens, averaged over responses:

    M_t min(π_θ/μ, c) Â                (`--log_square κ` adds - 2 κ log(π_θ/μ) at every token)
    M_t = 1 - sign(Â (π_θ - μ)) D/δ    (with `--soft`)

The two δ agree at μ = 1/2, where a KL of 0.05 is a TV of 0.154. But a token of μ near 0, say 1e-6,
may rise to 0.15 under TV before the mask acts, and to 0.05 under KL.

Like PPO's clip, the mask acts only in the direction of the advantage. But it measures from μ, not
from π_old. If sampler and trainer disagree, a token is away from μ before the first update. With a
region around π_old, as in minirl.py, or without any, as in cispo.py, the authors see this
difference grow until the run collapses.

DRPO (`--soft`, arXiv 2606.09821) replaces the mask's edge by a slope. M falls from 1 at μ to 0 at
the distance δ, and beyond δ it is negative, which pushes the token back. On the way back M is above
1. But with the published δ of 12.5 M stays between 0.92 and 1.08, because |π_θ - μ| <= 1, and never
pushes back. The published loss has no cap, so the command below sets c so high that it never acts.

IPO (`--two_sided`, prime-rl) masks a token that is too far from μ in either direction.

What bounds a step: a bounded weight on log π.

Base file: minirl.py. Differs from it in:
1. The mask: a divergence from μ instead of the ratio to π_old.
2. Cap 20. Removed: `--no_correct_mismatch`, because the mask needs μ; `--length_norm`; and routing
   replay, without which the authors' mixture of experts is stable.

Run it:
    torchrun -m variants.dppo                               # laptop, 2 to 4 minutes, no download
    torchrun -m variants.dppo --trust_region kl
    torchrun -m variants.dppo --soft --delta 12.5 --is_cap 1e9          # DRPO
    torchrun -m variants.dppo --two_sided --delta 0.3 --is_cap 1e4      # prime-rl's IPO
    # eight GPUs (not yet run on several); verl's script has these sizes for Qwen3-30B-A3B-Base
    torchrun --nproc_per_node=8 -m variants.dppo --model Qwen/Qwen3-8B-Base --task dapo-math-17k \
        --eval_task aime24 --prompts_per_step 256 --group_size 16 --minibatches 8 --lr 1e-6 \
        --max_new_tokens 8192 --gradient_checkpointing --vllm_sleep --vllm_memory 0.7
"""

from dataclasses import dataclass
from typing import Literal

from common.batch import Rollout
from common.cli import NonNegative, Positive
from common.launch import launch
import torch
from torch import Tensor

import minirl
from variants import Trunk, loop_of


@dataclass
class Args(Trunk):
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float8"] = "float8"
    """Precision of the sampler's weights (auto: as dtype; float8 with vllm: on GPUs only)."""
    trust_region: Literal["tv", "kl"] = "tv"
    """D: total variation or KL divergence, of the sampled token against all others."""
    delta: NonNegative = 0.0
    """δ, the largest divergence from μ (0: the paper's, 0.15 for tv and 0.05 for kl)."""
    is_cap: Positive = 20.0
    """c: largest importance weight π_θ/μ (verl's default)."""
    two_sided: bool = False
    """Mask beyond δ in both directions (prime-rl's IPO: --delta 0.3); with soft, no effect."""
    soft: bool = False
    """A weight that falls with the divergence, instead of the mask (DRPO: with --delta 12.5)."""
    log_square: NonNegative = 0.0
    """κ: weight of (log π_θ/μ)² on every token, masked or not (our choice; prime-rl: 1e-3)."""


DELTA = {"tv": 0.15, "kl": 0.05}  # δ of the paper


def distance(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return two `[n, T]` for log π_θ `[n, T]` without gradient: D/δ; and 1 on tokens that moved
    from μ in the direction of Â, -1 on tokens that moved the other way."""
    p, mu = logp.exp(), batch.rollout_logp.exp()  # [n, T]: the coins' probabilities
    if args.trust_region == "tv":
        divergence = (p - mu).abs()  # [n, T]
    else:  # 1e-8: at μ = 1 the second term is 0, not 0 · ∞. A p may round to above 1.
        no_mu, no_p = (1 - mu).clamp(min=0), (1 - p).clamp(min=0)  # [n, T]: of all other tokens
        others = ((no_mu + 1e-8) / (no_p + 1e-8)).log()  # [n, T]
        divergence = no_mu * others - mu * (logp - batch.rollout_logp)  # [n, T]: KL(μ ‖ π_θ)
    way = batch.advantages[:, None].sign() * (p - mu).sign()  # [n, T]
    return divergence / (args.delta or DELTA[args.trust_region]), way


def masked(args: Args, logp: Tensor, batch: Rollout) -> Tensor:
    """Return True `[n, T]` where M is 0 (with `--soft`: below 0)."""
    far, way = distance(args, logp, batch)  # [n, T]
    return far > 1 if args.two_sided else (far > 1) & (way > 0)  # [n, T]


def gate(args: Args, logp: Tensor, batch: Rollout) -> Tensor:
    """Return M `[n, T]`: 0 or 1, or with `--soft` the slope."""
    if args.soft:
        far, way = distance(args, logp, batch)  # [n, T]
        return 1 - way * far  # [n, T]
    return 1 - masked(args, logp, batch).to(logp.dtype)  # [n, T]


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    M = gate(args, logp.detach(), batch)  # [n, T]
    weight = (logp.detach() - batch.rollout_logp).exp()  # [n, T]: π_θ/μ, without gradient
    weight = weight.clamp(max=args.is_cap)  # [n, T]
    objective = M * weight * A * logp  # [n, T]: only log π_θ has a gradient
    # The square brings a token back, masked or not.
    objective = objective - args.log_square * (logp - batch.rollout_logp) ** 2  # [n, T]
    per_response = (objective * mask).sum(dim=1)  # [n]: a sum, not a mean
    return -per_response.sum(), mask.new_tensor(len(mask))  # a mean over responses


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    mask = batch.mask  # [n, T]
    M = gate(args, logp, batch)  # [n, T]
    cut = masked(args, logp, batch)  # [n, T]: with `--soft` those that are pushed back
    uncapped = (logp - batch.rollout_logp).exp()  # [n, T]: π_θ/μ
    weight = uncapped.clamp(max=args.is_cap)  # [n, T]
    return {
        "masked_share": (((1 - M).abs() * mask).sum(), mask.sum()),
        "masked_above": ((cut * (uncapped > 1) * mask).sum(), mask.sum()),
        "masked_below": ((cut * (uncapped < 1) * mask).sum(), mask.sum()),
        "weight": ((weight * mask).sum(), mask.sum()),
        "weight_max": (torch.cat([mask.new_zeros(1), uncapped[mask > 0]]).max(), "max"),
    }


ACTED = {
    "masked_share": "tokens masked (share); with `--soft` the mean of |1 - M|",
    "weight_max": "largest weight π_θ/μ, before its cap",
}


# The diff of minirl.py's loop
LOOP = """
-    # In vLLM recording switches its scheduling ahead off, so there it records only for a replay.
-    experts = args.rollout == "hf" or args.routing_replay == "r3"
-    engine = make_engine(args, lm, world, record_experts=experts)
+    engine = make_engine(args, lm, world)

-    replay = f"--routing_replay {args.routing_replay}"
-    if args.routing_replay != "none" and not policy.routing.active:
-        raise BadInput(f"{replay}: {args.model} {policy.routing.why_not}")
-    if args.routing_replay == "r3" and not engine.reports_experts:
-        raise BadInput(f"{replay}: vLLM reports experts only on a GPU, without --tensor_parallel")
-    records = engine.reports_experts or args.routing_replay == "r2"  # the trainer's experts

-            if args.routing_replay == "r3":  # in π_old's own evaluation, too
-                minibatch.replayed_experts = minibatch.sampler_experts
-            old = all_logprobs(policy, minibatch, args, world, experts=records)
-            minibatch.old_logp = old.logp  # [n, T]
-            if args.routing_replay == "r2":  # at the first mini-batch this changes nothing
-                minibatch.replayed_experts = old.experts
-            if engine.reports_experts:
-                means.add(experts_differ=experts_differ(minibatch, old.experts))
+            minibatch.old_logp = all_logprobs(policy, minibatch, args, world).logp  # [n, T]
"""
advantages = minirl.advantages
main = loop_of(minirl, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. Only the coin's divergence; the paper also has one over the most likely tokens.
# 2. The cap is 20, as in verl and TRL. The authors' code has 10; the paper asks for a large cap.
# 3. DRPO's M comes from the loss -Â r + |Â| μ (r-1)²/(2ε) with r = π_θ/μ, in the paper and in
#    UniRL, which clamps log r to ±20. Our δ is its ε. `--soft` without `--delta` has DPPO's δ.
#
# Advantages without std and sums over tokens are as in the base file and in verl's script for DPPO,
# which also divides the sums by a constant.
#
# prime-rl's IPO masks tokens with |π_θ - μ| > 0.3, for any Â, takes the token mean and caps π_θ/μ
# at 1e4 (the newest configuration that we could read; earlier ones differ). A default of August
# 2026 was `--delta 0.2 --log_square 1e-3 --is_cap 1e9`, where the square pulls masked tokens back.
#
# Masks and caps are from the authors' code and verl's, IPO from prime-rl's code and page. δ is the
# paper's as TRL and verl's script give it.
