r"""Score centering: subtracts the drift that only moves the policy to or from the sampler.

Marek and Ryabinin, "Score Centering Stabilizes Off-policy Reinforcement Learning", 2026, arXiv
2609.20807.

The problem: if the sampler's probabilities differ from the policy's, a part of the gradient says
nothing about which token was better. It only moves the policy to the sampler, or away from it. The
same gap gives the same push in every step.

The idea: this part, the drift, comes from the mean of ∇ log π_θ over the tokens that the sampler
could have drawn. This mean can be computed, so subtract it.

Objective, for responses y sampled by the inference engine, whose probabilities are μ:

    J = E_y~μ [ Σ_t Â (sg[w(y_t)] log π_θ(y_t) - Σ_v sg[c(v)] log π_θ(v)) ]
    c(v) = μ(v) w(v) - α π_θ(v) for the sampler's K most likely tokens v, else 0
    w = 1, or a bounded π_θ/μ, times dppo.py's M if δ > 0;     Â = R - mean R  (of the group)

sg[x] is x without gradient. α is explained below.

Gradient weight on ∇ log π_θ(y_t) and on every ∇ log π_θ(v), summed over tokens, averaged over
responses:

    w(y_t) Â     and     -c(v) Â

Where does the drift come from? The gradient of a token's log-probability is its score. Under the
policy's own samples the mean score at a prefix is zero: Σ_v π_θ(v) ∇ log π_θ(v) = ∇ 1 = 0. Under
the sampler's it is not, and the update at a prefix has two parts (here with w = 1):

    E_μ[A ∇ log π_θ]  =  E_μ[A] E_μ[∇ log π_θ]  +  Cov_μ(A, ∇ log π_θ)
                         (drift)                   (what was learnt from rewards)

The drift moves π_θ towards μ if the prefix is promising (E_μ[A] > 0), and away from μ if it is not.
The group's mean does not remove it, because it makes the mean of A zero over a prompt, not at each
prefix. The centred estimate subtracts the mean score, so only the covariance remains.

The mean needs μ of all tokens, but an engine reports only K of them. Outside these K (the tail) μ
is taken as ρ π_θ, with ρ the ratio of the masses that are left: (1 - Σ_K μ) / (1 - Σ_K π_θ). Hence
α = ρ w(1/ρ). With K = vocabulary, which the embedded models allow, no tail is left, and the mean is
exact.

A trust region is a part of w, too. With DPPO's mask (`--delta`), w is 0 for each of the K tokens,
and for the sampled one, that is too far from μ in the direction of Â. The mean is subtracted at
every position, also if the sampled token itself is masked. With w = π_θ/μ inside the mask, c is 0
except for masked v, where it is -π_θ(v). So the mask by itself makes a drift, which moves masked
tokens back to μ. This drift is then all that the centring removes.

What bounds a step: a bounded weight on log π.

Base file: minirl.py. Differs from it in:
1. The centring.
2. No mask M by default. The weight is 1 by default.
3. Removed: routing replay and the ablations of the weight (here `--weight`).
Loop: dppo.py's, which is minirl.py's without routing replay, with the diff below.

Run it:
    torchrun -m variants.centred                            # laptop, 2 to 4 minutes, no download
    torchrun -m variants.centred --weight tis               # with truncated importance sampling
    torchrun -m variants.centred --weight tis --w_high 20 --delta 0.2   # with DPPO's mask
    torchrun -m variants.centred --centre_top 0             # without centring: the ablation
    # eight GPUs (not yet run on several)
    torchrun --nproc_per_node=8 -m variants.centred --model Qwen/Qwen3-1.7B-Base \
        --task dapo-math-17k --eval_task aime25 --prompts_per_step 64 --group_size 16 \
        --max_new_tokens 8192 --lr 1e-6 --micro_tokens 8192 --centre_top 128
"""

from dataclasses import dataclass
from typing import Literal

from common.batch import Rollout
from common.cli import NonNegative, Positive, Whole
from common.launch import launch
import torch
from torch import Tensor

from variants import dppo, loop_of, Trunk


@dataclass
class Args(Trunk):
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float8"] = "float8"
    """Precision of the sampler's weights (auto: as dtype; float8 with vllm: on GPUs only)."""
    centre_top: Whole = 20
    """K: number of most likely tokens whose probabilities the sampler reports per position, at
    most the vocabulary; 0: no centring (20 is vLLM's default limit; we do not know the paper's)."""
    weight: Literal["none", "tis", "icepop"] = "none"
    """w: 1 (none), min(π_θ/μ, w_high) (tis), or π_θ/μ from w_low to w_high, else 0 (icepop)."""
    w_low: NonNegative = 0.5
    """icepop: smallest weight (OpenRLHF, verl)."""
    w_high: Positive = 5.0
    """tis and icepop: largest weight (OpenRLHF, verl; vime: 2; dppo.py: 20)."""
    delta: NonNegative = 0.0
    """δ of DPPO's mask: w is 0 if π_θ is further than this from μ in the direction of Â; 0: no mask
    (SkyRL: 0.2)."""
    two_sided: bool = False
    """The mask acts in both directions (prime-rl: with δ 0.3, `--weight tis --w_high 1e4`)."""


def importance_weight(args: Args, ratio: Tensor) -> Tensor:
    """Return w from π_θ/μ, of tokens or of the whole tail. It has the shape of `ratio`."""
    if args.weight == "tis":
        return ratio.clamp(max=args.w_high)
    if args.weight == "icepop":
        kept = (ratio >= args.w_low) & (ratio <= args.w_high)
        return torch.where(kept, ratio, 0.0)  # ∞ · False would be NaN
    return torch.ones_like(ratio)


def token_weight(args: Args, logp: Tensor, sampler_logp: Tensor, A: Tensor) -> Tensor:
    """Return w of tokens, without gradient, from their log-probs by π_θ and by μ. A broadcasts to
    their shape."""
    weight = importance_weight(args, (logp - sampler_logp).exp())
    if args.delta > 0:
        moved = logp.exp() - sampler_logp.exp()
        outwards = torch.ones_like(moved, dtype=torch.bool) if args.two_sided else A * moved > 0
        weight = torch.where(outwards & (moved.abs() > args.delta), 0.0, weight)
    return weight


def centring(args: Args, batch: Rollout) -> Tensor:
    """Return c `[n, T, K]`, without gradient: what each of the sampler's most likely tokens adds to
    the mean of w ∇ log π_θ under μ."""
    A = batch.advantages[:, None, None]  # [n, 1, 1]
    pi, mu = batch.top_logp.detach().exp(), batch.sampler_top.exp()  # [n, T, K]
    weight = token_weight(args, batch.top_logp.detach(), batch.sampler_top, A)  # [n, T, K]
    mu_tail = (1 - mu.sum(dim=-1, keepdim=True)).clamp(min=1e-6)  # [n, T, 1]
    pi_tail = (1 - pi.sum(dim=-1, keepdim=True)).clamp(min=1e-6)  # [n, T, 1]
    rho = mu_tail / pi_tail  # [n, T, 1]: in the tail, μ = ρ π_θ
    alpha = rho * importance_weight(args, 1 / rho)  # [n, T, 1]: μ w = α π_θ there
    # The tail's mean score, α Σ_tail π_θ ∇ log π_θ, is -α Σ_K π_θ ∇ log π_θ: both add up to 0.
    return mu * weight - alpha * pi  # [n, T, K]


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    weight = token_weight(args, logp.detach(), batch.rollout_logp, A)  # [n, T]: w
    score = weight * logp  # [n, T]: its gradient is the weighted score
    if args.centre_top > 0:
        c = centring(args, batch)  # [n, T, K]
        score = score - (c * batch.top_logp).sum(dim=-1)  # [n, T]: less its mean under μ
    per_response = (A * score * mask).sum(dim=1)  # [n]: a sum, not a mean
    return -per_response.sum(), mask.new_tensor(len(mask))  # a mean over responses


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    mask = batch.mask  # [n, T]
    weight = token_weight(args, logp, batch.rollout_logp, batch.advantages[:, None])  # [n, T]: w
    ratio = (logp - batch.rollout_logp).exp()  # [n, T]: π_θ/μ
    stats = {
        "weight": ((weight * mask).sum(), mask.sum()),
        "weight_max": (torch.cat([mask.new_zeros(1), ratio[mask > 0]]).max(), "max"),
    }
    if args.centre_top > 0:
        moved = centring(args, batch).abs().sum(dim=-1) / 2  # [n, T]
        tail = 1 - batch.sampler_top.exp().sum(dim=-1)  # [n, T]
        stats["centred"] = (moved * mask).sum(), mask.sum()
        stats["tail"] = (tail * mask).sum(), mask.sum()
    return stats


ACTED = {
    "centred": "half of Σ |c|: probability that is in another place (share)",
    "tail": "μ outside of the K most likely tokens (share)",
    "weight_max": "largest π_θ/μ of a token, before its bound",
}


# The diff of dppo.py's loop
LOOP = """
-    engine = make_engine(args, lm, world)
+    engine = make_engine(args, lm, world, record_top=args.centre_top)

     parts = {"engine": engine}  # other objects to save in a checkpoint (each has a state_dict)
+    if not args.w_low <= 1 <= args.w_high:  # the weight where sampler and trainer agree
+        raise BadInput(f"--w_low {args.w_low}, --w_high {args.w_high}: 1 must lie between them")
"""
advantages = dppo.advantages
main = loop_of(dppo, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. Advantages, the sum over tokens and the optimiser are the base file's.
# 2. Both tail masses are at least 1e-6, as in vime.
#
# The untruncated π_θ/μ leaves nothing to centre: μ π_θ/μ = π_θ, whose mean score is zero. So
# centring and importance weights are two ways to the same end. Centring removes the drift but keeps
# the sampler's distribution over tokens. The weights also correct that, at the price of variance.
#
# Why is minirl.py the base file? Its objective is a weight times Â log π_θ, too. A clip of the
# ratio, as in icepop.py or grpo.py, would have to be centred itself.
#
# We read the paper's abstract, and its formulas as NeMo-RL's guide and vime's code state them. c
# and α equal those of vime's published function (its numbers are in checks/). NeMo-RL adds the term
# to any loss that is configured, with its clip. SkyRL has it on by default since 0.5.0, with DPPO
# (the release's page; we have not read that code). The mask as a part of w is prime-rl's, whose IPO
# masks both directions.
