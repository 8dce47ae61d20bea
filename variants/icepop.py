r"""IcePop and related corrections for the gap between sampler and trainer.

Ling team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model",
2025, arXiv 2510.18855.

The problem: the sampler has the trainer's weights, but not its probabilities, because of other
kernels, another precision, or other experts. PPO's ratio does not contain this gap, because both
its policies are the trainer's.

The idea: measure the gap by w = π_old/μ, which is fixed before the first update. Multiply a token's
term by w, or drop the token if w is outside a band (here 0.5 to 5). IcePop takes such a w for an
error, which a capped weight would still trust.

Objective, for responses y sampled by the inference engine, whose probabilities are μ:

    J = E_y~μ [ 1/|y| Σ_t C_t min(r Â, clip(r, 1-ε_low, 1+ε_high) Â) ]
    r = π_θ(y_t)/π_old(y_t),     w = π_old(y_t)/μ(y_t),     Â = R - mean R  (of the group; no std)
    C_t = w if α <= w <= β, else 0

Gradient weight on ∇ log π_θ(y_t), averaged over tokens, then over responses:

    C_t M r Â
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

Why is C outside of min and clip? Inside, a token with w = 1.5 would be clipped although the policy
has not moved. The related corrections are, with W = Π_t w of a response:

    tis        min(w, β), or min(W, β)                      truncated importance sampling
    cis        min(w, 1 + (β-1) max(1 - π_old, 0.005))      calibrated, arXiv 2609.32444
    mis        w if α <= w <= β, else 0; or the same of W   masked importance sampling
    icepop     mis of each token
    geometric  1 if α <= exp(mean_t log w) <= β, else 0     long responses leave any band for W
    opsm       0 if Â < 0 and mean_t log(μ/π_θ) > δ, else 1     DeepSeek-V3.2, arXiv 2512.02556
    none       1

Per token the correction is biased, because the tokens before it came from μ, too. Per response it
is not, but W's variance grows exponentially with the length. Every band and cap trades bias for
variance. Only opsm looks at π_θ, so only opsm sees staleness, too.

cis bounds an error of the logits instead of w. Such an error e shifts the log-odds of a token, and
w = π_old + (1 - π_old) exp(e). So the same e leaves the w of a sure token near 1. With exp(e) <= β
the cap is β for a rare token and almost 1 for a sure one. The 0.005 is for rounding.

What bounds a step: a bounded weight on log π.

Base file: minirl.py. Differs from it in:
1. PPO's min and clip on r, times a correction of w alone. The base file has -log π with min(π_θ/μ,
   5), which corrects for both at once.
2. The mean over a response's tokens by default. Removed: the ablation without μ (here `--correction
   none`) and routing replay.
3. The sampler is an 8-bit copy, which makes a gap to correct. To repair a run of another file, add
   `--rollout_dtype auto`.
Loop: dppo.py's, which is minirl.py's without routing replay, with the diff below.

Run it:
    torchrun -m variants.icepop                             # laptop, 2 to 4 minutes, no download
    torchrun -m variants.icepop --w_low 0.8 --w_high 1.25   # where it drops tokens
    torchrun -m variants.icepop --correction mis --correction_level sequence --w_high 2
    torchrun -m variants.icepop --correction cis --w_high 3.3           # β of its paper
    # eight GPUs (not yet run on several)
    torchrun --nproc_per_node=8 -m variants.icepop --model Qwen/Qwen3-1.7B-Base \
        --task dapo-math-17k --eval_task aime25 --prompts_per_step 64 --group_size 16 \
        --max_new_tokens 8192 --lr 1e-6 --micro_tokens 8192
"""

from dataclasses import dataclass
from typing import Literal

from common.batch import Rollout
from common.cli import NonNegative, Positive
from common.launch import launch
from common.metrics import clip_shares
import torch
from torch import Tensor

from variants import dppo, loop_of, Trunk


@dataclass
class Args(Trunk):
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float8"] = "float8"
    """Precision of the sampler's weights (auto: as dtype; float8 with vllm: on GPUs only)."""
    clip_low: NonNegative = 0.2
    """ε of the lower clip (MiniRL's paper)."""
    clip_high: NonNegative = 0.27
    """ε of the upper clip (MiniRL's paper)."""
    length_norm: bool = True
    """Divide by the response's length, as the paper does; False: minirl.py's sum over tokens."""
    correction: Literal["tis", "cis", "mis", "icepop", "geometric", "opsm", "none"] = "icepop"
    """How C is computed from w = π_old/μ (the table in this file's header)."""
    correction_level: Literal["token", "sequence"] = "token"
    """tis and mis: use a token's w, or the product over its response."""
    w_low: NonNegative = 0.5
    """α: smallest w (OpenRLHF, verl; TRL's for mis: 0.5; verl's for geometric: 0.999)."""
    w_high: Positive = 5.0
    """β: largest w (OpenRLHF, verl; slime's for tis: 2; paper's for cis: 3.3; TRL's for mis: 2;
    verl's for geometric: 1.001)."""
    opsm_delta: Positive = 0.5
    """δ of opsm, nats per token (TRL, as the paper gives none; slime: 0.0001)."""


def correction(args: Args, logp: Tensor, batch: Rollout) -> Tensor:
    """Return C `[n, T]`, the factor on a token's term that corrects for the gap."""
    mask, A = batch.mask, batch.advantages[:, None]  # [n, T], [n, 1]

    def kept(x: Tensor) -> Tensor:
        return (x >= args.w_low) & (x <= args.w_high)

    def over_response(x: Tensor) -> Tensor:
        return (x * mask).sum(dim=1, keepdim=True)  # [n, 1]

    length = over_response(mask).clamp(min=1)  # [n, 1]
    log_w = (batch.old_logp - batch.rollout_logp) * mask  # [n, T]: the same weights, other numerics
    geometric = (over_response(log_w) / length).exp()  # [n, 1]: a mean over tokens
    drift = over_response(batch.rollout_logp - logp) / length  # [n, 1]: of π_θ, gap and staleness
    w = (over_response(log_w) if args.correction_level == "sequence" else log_w).exp()
    unsure = (1 - batch.old_logp.exp()).clamp(min=0.005)  # [n, T]: the weight of other tokens
    masked = torch.where(kept(w), w, 0.0)  # as w: [n, T], or W [n, 1]. ∞ · False would be NaN
    weight = {
        "tis": w.clamp(max=args.w_high),
        "cis": torch.minimum(w, 1 + (args.w_high - 1) * unsure),
        "mis": masked,
        "icepop": masked,
        "geometric": kept(geometric),
        "opsm": (A >= 0) | (drift <= args.opsm_delta),
        "none": torch.ones_like(mask),
    }[args.correction]
    return weight.to(mask.dtype).expand_as(mask)


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    weight = correction(args, logp.detach(), batch)  # [n, T]: C
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r; 1 until the rollout's first optimiser step
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
    objective = weight * torch.minimum(ratio * A, clipped * A)  # [n, T]: outside of min and clip
    per_response = (objective * mask).sum(dim=1)  # [n]: a sum, not a mean
    if args.length_norm:
        per_response = per_response / mask.sum(dim=1).clamp(min=1)  # [n]
    return -per_response.sum(), mask.new_tensor(len(mask))  # a mean over responses


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    mask = batch.mask  # [n, T]
    weight = correction(args, logp, batch)  # [n, T]: C
    uncapped = (batch.old_logp - batch.rollout_logp).exp()  # [n, T]: w
    return {
        **clip_shares(logp, batch, args.clip_low, args.clip_high, name="masked"),
        "corrected": (((weight - 1).abs() * mask).sum(), mask.sum()),
        "dropped_share": (((weight == 0) * mask).sum(), mask.sum()),
        "weight": ((weight * mask).sum(), mask.sum()),
        "weight_max": (torch.cat([mask.new_zeros(1), uncapped[mask > 0]]).max(), "max"),
    }


ACTED = {
    "corrected": "mean |C - 1|, C the correction",
    "dropped_share": "tokens dropped by it (share)",
    "weight_max": "largest w = π_old/μ of a token",
}


# The diff of dppo.py's loop
LOOP = """
     parts = {"engine": engine}  # other objects to save in a checkpoint (each has a state_dict)
+    if args.correction_level == "sequence" and args.correction not in ("tis", "mis"):
+        raise BadInput(f"--correction_level sequence: is for tis and mis, not {args.correction}")
+    if not args.w_low <= 1 <= args.w_high:  # w of engines that agree
+        raise BadInput(f"--w_low {args.w_low}, --w_high {args.w_high}: 1 must lie between them")
"""
advantages = dppo.advantages
main = loop_of(dppo, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. α and β are OpenRLHF's and verl's for IcePop; the flags name the values of the other
#    corrections.
# 2. Advantages (without std) and ε are the base file's; no KL term.
#
# The default band drops hardly any token of the embedded models: over 30 steps 1 in 100,000, with
# the mixture of experts 1 in 10,000. The band from 0.8 to 1.25 drops 2 in 1,000. The authors later
# saw a fixed band drop fewer and fewer tokens while the gap widened (KPop, 2026).
#
# Two other losses have the same name. In the first, the band is on π_θ/μ, which is also the weight,
# and it has neither min nor clip. It is prime-rl's (its documentation; 0.2 to 5 there), GLM-5's
# (arXiv 2602.15763) and SkyRL's `rollout_is`. minirl.py is near it, with a cap and PPO's mask for
# the band. The second, "Online IcePop" (2025), takes one step per rollout, so that r = 1 and no
# clip acts: `--minibatches 1`.
#
# cis: the authors' code writes λ = β - 1 = 2.3 and κ = 0.005, has ε 0.2 and 0.28, and averages over
# all tokens (cis/operator.py of kzhao5/CIS-RL; checks/ has its numbers).
#
# The rule is as the authors restate it in a later post and as OpenRLHF, slime and verl have it;
# tis, mis and opsm are also as in TRL's code, and geometric is as in verl's. We do not know the
# paper's α and β; we know Online IcePop at second hand.
