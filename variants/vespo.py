r"""VESPO: Variational sEquence-level Soft Policy Optimization.

Shen et al., "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM
Training", 2026, arXiv 2602.10693.

The problem: responses were sampled from π_old, so the gradient of the expected reward has the
weight W, the product of all token ratios. This is unbiased. But a product of hundreds of factors is
near 0 or huge, and one response can dominate the batch. GSPO takes the |y|-th root, which is no
longer an importance weight. vcpo.py caps W, so responses far above the cap keep the whole cap.

The idea: replace W by φ(W), which is small if W is small, and almost 0 if W is large. It follows
from a proposal distribution near both π_old and π_θ, with a budget for its mean weight, which leads
to W^k e^{-λW}.

Objective, over all response tokens y_t, with W = π_θ(y) / π_old(y) for a whole response y:

    J = 1/(Σ_i |y_i|) Σ_i Σ_t sg[φ(W_i)] Â_i log π_θ(y_t)
    φ(W) = W^k e^{λ(1-W)},     (k, λ) = (2, 3) if Â >= 0 else (3, 2)
    Â_i = (R_i - mean R) / std R

sg[x] is x without gradient.

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    φ(W) Â

φ(1) = 1, so an on-policy response has the plain policy gradient. The maximum is at W = k/λ and
depends on the sign of Â. For Â > 0 it is at W = 2/3, where other updates have lowered the
response's probability; as the response rises, φ falls: φ(2) = 0.20. For Â < 0 the maximum is at
W = 1.5, where the response has become more likely (φ(2) = 1.08); as the response falls, φ falls:
φ(0.5) = 0.34.

What bounds a step: the response's ratio.

Base file: justrl.py. Differs from it in:
1. -log π with the detached weight φ(W) of the whole response instead of min and clip.

Run it:
    torchrun -m variants.vespo                              # laptop, 2 to 4 minutes, no download
    # eight GPUs (not yet run on several); the authors: the same, but 2048 prompts,
    # Qwen3-30B-A3B-Base and eight nodes
    torchrun --nproc_per_node=8 -m variants.vespo --model Qwen/Qwen3-8B-Base --task dapo-math-17k \
        --eval_task aime25 --prompts_per_step 256 --group_size 8 --minibatches 8 --lr 1e-6 \
        --max_new_tokens 15360 --gradient_checkpointing --vllm_sleep --vllm_memory 0.7
"""

from dataclasses import dataclass

from common.batch import Rollout
from common.cli import Exponent
from common.launch import launch
import torch
from torch import Tensor

from variants import justrl, loop_of, Trunk


@dataclass
class Args(Trunk):
    k_pos: Exponent = 2.0
    """k if Â >= 0 (authors' code)."""
    lambda_pos: Exponent = 3.0
    """λ if Â >= 0: φ is largest at W = k / λ (authors' code)."""
    k_neg: Exponent = 3.0
    """k if Â < 0 (authors' code)."""
    lambda_neg: Exponent = 2.0
    """λ if Â < 0 (authors' code)."""
    acts_on_ratio = True  # not a flag: never acting is no fault if every ratio is 1


def log_weight(logp: Tensor, batch: Rollout) -> Tensor:
    """Return log W of whole responses `[n, 1]`, without gradient. There is no 1/|y|, because W is
    the product of the ratios. The authors' clamps keep it finite; φ is 0 at them."""
    log_ratio = (logp.detach() - batch.old_logp).clamp(-20, 20)  # [n, T]: log r
    return (log_ratio * batch.mask).sum(dim=1, keepdim=True).clamp(-20, 20)  # [n, 1]


def phi(args: Args, log_W: Tensor, A: Tensor) -> Tensor:
    """Return φ(W) = W^k e^{λ(1-W)} `[n, 1]`, with k and λ by the sign of Â `[n, 1]`."""
    k = torch.where(A >= 0, args.k_pos, args.k_neg)  # [n, 1]
    lam = torch.where(A >= 0, args.lambda_pos, args.lambda_neg)  # [n, 1]
    return (lam + k * log_W - lam * log_W.exp()).exp()  # [n, 1]


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    weight = phi(args, log_weight(logp, batch), A)  # [n, 1]: one for all tokens of a response
    objective = weight * A * logp  # [n, T]
    return -(objective * mask).sum(), mask.sum()  # the mean over all tokens


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    A = batch.advantages[:, None]  # [n, 1]
    log_W = log_weight(logp, batch)  # [n, 1]
    weight = phi(args, log_W, A)  # [n, 1]
    W = log_W.exp()[:, 0]  # [n]
    return {
        "reshaped": ((weight - 1).abs().sum(), len(A)),
        "gate_pos": ((weight * (A > 0)).sum(), (A > 0).sum()),
        "gate_neg": ((weight * (A < 0)).sum(), (A < 0).sum()),
        "weight_max": (torch.cat([W.new_zeros(1), W]).max(), None),
    }


ACTED = {
    "reshaped": "mean |φ - 1|, φ the weight of a response",
    "weight_max": "largest W, before φ",
}


advantages = justrl.advantages
main = loop_of(justrl, globals())


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. The paper's W compares π_θ with the sampler. The released runs without asynchrony take the
#    trainer's π_old, as here, and can multiply the sampler's π_old/μ into W.
# 2. Title, φ and constants here are those of versions 1 and 2. Version 3 (May 2026) drops "Stable"
#    from its title, keeps φ and both pairs, has Â without the std, and bounds the variance: E[φ²]
#    is finite only if k >= 1, and φ is at most 1.21 (Â >= 0) and 1.24.
#
# φ, constants, clamps and sizes are from the authors' code and scripts, the proposal from their
# README. (The docstring of that code has other constants, which nothing uses.) The paper's runs
# take 4 to 64 optimiser steps per rollout, the released scripts without asynchrony 8 to 64.
