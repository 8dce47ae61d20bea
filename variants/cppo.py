r"""CPPO: Cumulative Prefix-divergence Policy Optimization.

Mao et al., "Beyond Uniform Token-Level Trust Region in LLM Reinforcement Learning",
2026, arXiv 2606.10968.

The problem: DPPO lets every token move equally far from μ. But all later tokens are sampled after
an early one. If π_θ would have gone elsewhere there, the whole rest of the response is off-policy.
The objective's error is bounded by a constant times Σ_t (T - t) D_t, in which early tokens count
most.

The idea: weight D by position, the first token most, and give each prefix a budget, b per token.
Once a response has spent more than its budget, its next tokens may move less.

Objective, for responses y sampled by the inference engine, whose probabilities are μ:

    J = E_y~μ [ Σ_t M_t sg[min(π_θ(y_t)/μ(y_t), c)] Â log π_θ(y_t) ]
    M_t = 0 if (Â > 0 and π_θ > μ or Â < 0 and π_θ < μ) and w_t D_t > δ_t, else 1
    D_t = |π_θ - μ|,     w_t = 1 - (1 - w_min) (t-1)/(T-1)
    δ_t = min(δ, δ + Σ_{s<t} (b w_s - w_s D_s)),     b = P90 of the response's D, in [0.02, 0.04]

sg[x] is x without gradient, c a cap, T the length of the response.

Gradient weight on ∇ log π_θ(y_t), summed over tokens, averaged over responses:

    M_t min(π_θ/μ, c) Â

Weight and budget mask only tokens that move away from μ. But a token without a gradient spends
from the budget, too.

What is T? In the paper and in one of the authors' two implementations (UniRL) it is the response's
own length. In the other (verl, pull request 6731) it is the length to which all responses are
padded, so the weight of a short response hardly falls: with 100 of 8,192 tokens it ends at 0.998
instead of 0.8. The default is the paper's (`--weight_span response`), also because a response then
has the same loss under every length limit.

Base file: dppo.py. Differs from it in:
1. The mask: position weights and a budget.
2. Removed: KL as the divergence, `--two_sided`, `--soft` and `--log_square`.

Run it:
    torchrun -m variants.cppo                               # laptop, 2 to 4 minutes, no download
    torchrun -m variants.cppo --weight_span limit           # as in verl's pull request
    torchrun -m variants.cppo --budget_low 1 --budget_high 1            # without the budget
    # eight GPUs (not yet run on several)
    torchrun --nproc_per_node=8 -m variants.cppo --model Qwen/Qwen3-8B-Base --task dapo-math-17k \
        --eval_task aime24 --prompts_per_step 256 --group_size 16 --minibatches 8 --lr 1e-6 \
        --max_new_tokens 8192 --gradient_checkpointing --vllm_sleep --vllm_memory 0.7
"""

from dataclasses import dataclass
from typing import Literal

from common.batch import Rollout
from common.cli import NonNegative, Positive, Share
from common.launch import launch
import torch
from torch import Tensor

from variants import dppo, loop_of, Trunk


@dataclass
class Args(Trunk):
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float8"] = "float8"
    """Precision of the sampler's weights (auto: as dtype; float8 with vllm: on GPUs only)."""
    delta: NonNegative = 0.15
    """δ, the largest weighted divergence from μ (paper; 0.2 for its mixture of experts)."""
    weight_min: Share = 0.8
    """w_min: the weight of the last token (paper; 1: no position weights)."""
    weight_span: Literal["response", "limit"] = "response"
    """T: the response's length (paper, UniRL) or --max_new_tokens (verl's pull request)."""
    budget_low: NonNegative = 0.02
    """Smallest b, the budget of a token of the prefix (paper)."""
    budget_high: NonNegative = 0.04
    """Largest b (paper, UniRL; a port that quotes the authors' code: 0.1)."""
    is_cap: Positive = 20.0
    """c: largest importance weight π_θ/μ (verl's default)."""
    acts_on_ratio = True  # no flag: ACTED's first is 0 while every ratio is 1


def spending(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return w_t D_t and δ_t, `[n, T]` each, for log π_θ `[n, T]` without gradient."""
    mask = batch.mask  # [n, T]
    divergence = (logp.exp() - batch.rollout_logp.exp()).abs()  # [n, T]: D
    before = mask.cumsum(dim=1) - mask  # [n, T]: t - 1
    span = mask.sum(dim=1, keepdim=True)  # [n, 1]: T
    if args.weight_span == "limit":
        span = torch.full_like(span, args.max_new_tokens)
    weight = 1 - (1 - args.weight_min) * before / (span - 1).clamp(min=1)  # [n, T]: w
    only = torch.where(mask > 0, divergence, torch.nan)  # [n, T]
    budget = only.nanquantile(0.9, dim=1, keepdim=True) if len(only) else span  # [n, 1]: b
    budget = budget.clamp(args.budget_low, args.budget_high)
    spent = weight * divergence  # [n, T]: w D
    left = (budget * weight - spent) * mask  # [n, T]: what a token leaves of its budget
    left = left.cumsum(dim=1) - left  # [n, T]: over the tokens before
    return spent, args.delta + left.clamp(max=0)


def masked(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return True where M = 0, and True where only the prefix's budget makes it 0: two `[n, T]`,
    for log π_θ `[n, T]` without gradient."""
    spent, threshold = spending(args, logp, batch)  # [n, T]
    A = batch.advantages[:, None]  # [n, 1]
    away = A * (logp - batch.rollout_logp) > 0  # [n, T]: the update moves π_θ away from μ
    cut = away & ~(spent <= threshold)  # [n, T]: NaN counts as beyond
    return cut, cut & (spent <= args.delta)


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    cut, _ = masked(args, logp.detach(), batch)  # [n, T]: M = 0
    weight = (logp.detach() - batch.rollout_logp).exp()  # [n, T]: π_θ/μ, without gradient
    weight = weight.clamp(max=args.is_cap)  # [n, T]
    objective = ~cut * weight * A * logp  # [n, T]: only log π_θ has a gradient
    per_response = (objective * mask).sum(dim=1)  # [n]: a sum, not a mean
    return -per_response.sum(), mask.new_tensor(len(mask))  # a mean over responses


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    mask = batch.mask  # [n, T]
    cut, by_budget = masked(args, logp, batch)  # [n, T]
    uncapped = (logp - batch.rollout_logp).exp()  # [n, T]: π_θ/μ
    return {
        "masked_share": ((cut * mask).sum(), mask.sum()),
        "budget_share": ((by_budget * mask).sum(), mask.sum()),
        "weight": ((uncapped.clamp(max=args.is_cap) * mask).sum(), mask.sum()),
        "weight_max": (torch.cat([mask.new_zeros(1), uncapped[mask > 0]]).max(), None),
    }


ACTED = {
    "masked_share": "tokens masked (share)",
    "budget_share": "tokens that only the prefix's budget masked (share)",
    "weight_max": "largest weight π_θ/μ, before its cap",
}


# The diff of dppo.py's loop
LOOP = """
     parts = {"engine": engine}  # other objects to save in a checkpoint (each has a state_dict)
+    if args.budget_low > args.budget_high:
+        raise BadInput(f"--budget_low {args.budget_low}: is above --budget_high {args.budget_high}")
"""
main = loop_of(dppo, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. D compares two coins, this token or any other, as in both implementations. The paper's
#    experiments have the total variation over the 20 most likely tokens.
# 2. Advantages have no std, and tokens are summed, as in the base file.
# 3. The paper writes π_θ/μ Â. A detached weight times Â log π_θ has the same gradient. The cap is
#    verl's.
#
# We read the paper's sections 2 and 3 (equations 8 to 11, algorithm 1), UniRL's cppo.py and verl's
# pull request, which give equation 22. checks/ has the numbers of both. `--max_new_tokens` stands
# for verl's padded length, which is the length limit there, too. A response of one token has weight
# 1 here and in UniRL. slime's flags of the same name are another rule, on log-ratios.
