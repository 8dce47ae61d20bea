r"""Signs: separate weights for right and wrong responses, and outliers left out.

Zhu et al., "The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning",
2025, arXiv 2506.01347.

The problem: two pieces of advice for stability need a test. One is to give right and wrong
responses different weights, but it is disputed which of them should weigh more. The other is to
leave outliers out, but no source gives numbers.

The idea: give each piece a flag, to test it. λ weighs positive advantages. A response of an unusual
length or mean log-probability is an outlier and gets the advantage 0.

Objective, for G responses y_i to one prompt, with r = π_θ(y_t) / π_old(y_t) for each token y_t:

    J = 1/G Σ_i 1/|y_i| Σ_t { min(r u_i Â_i, clip(r, 1-ε, 1+ε) u_i Â_i) - β k3 }
    Â_i = (R_i - mean R) / std R
    u_i = λ if Â_i > 0, else 1;    0 if y_i is an outlier
    k3 = π_ref/π_θ - log(π_ref/π_θ) - 1     (the KL term of grpo.py)

Gradient weight on ∇ log π_θ(y_t), before the two averages:

    M r u Â + β (π_ref/π_θ - 1)        (with `--kl_ratio` the second term is β r log(π_ref/π_θ))
    M = 0 if (Â > 0 and r > 1+ε) or (Â < 0 and r < 1-ε), else 1

Which responses should weigh more? The usual advice gives wrong ones a small weight: pushing a
sampled token down lifts all others, most of all the most likely one, whether it is good or not.
arXiv 2505.18830 finds that right tokens fall together with the wrong response they are in. This
paper finds the opposite. A response that is pushed up is sampled more and pushed up again, until
only one is left, so pass@1 rises and pass@k falls. Pushing wrong responses down spreads their
probability over the rest. Wrong ones alone (λ = 0) often match PPO and GRPO, and λ = 0.1, the
authors' choice, improves pass@k on the whole. Adam cancels a common scale, so λ only sets a ratio:
10 is the usual advice, 0.1 the paper, 1 grpo.py. The study signs (docs/results.md) shows both sides
on one prompt.

Should outliers be left out? An outlier need not be noise. Here 94% of them were wrong responses,
which the paper found most useful.

What bounds a step: a clip of the token's ratio.

Base file: grpo.py. Differs from it in:
1. Positive advantages times λ.
2. Outliers get the advantage 0. They stay in the baseline, in the mean and in the KL term.
3. `--baseline none`, the paper's: Â = 1 for a right response and -1 for a wrong one.

Run it:
    torchrun -m variants.signs                              # laptop, 2 to 4 minutes, no download
    torchrun -m variants.signs --baseline none --outliers 0 --beta 0    # W-REINFORCE; NSR with
    #                                                                     --positive_weight 0
    # eight GPUs (not yet run on several), the authors' sizes (they have 7B)
    torchrun --nproc_per_node=8 -m variants.signs --model Qwen/Qwen2.5-Math-1.5B --task math \
        --eval_task math500 --prompts_per_step 1024 --group_size 8 --max_new_tokens 3072 \
        --lr 1e-6 --warmup 0 --beta 0 --outliers 0 --baseline none --micro_tokens 8192
"""

from dataclasses import dataclass
from typing import Literal

from common.batch import Rollout
from common.cli import NonNegative
from common.distributed import gather  # noqa: F401  (for LOOP)
from common.launch import launch
import torch
from torch import Tensor

import grpo
from variants import loop_of


@dataclass
class Args(grpo.Args):
    positive_weight: NonNegative = 0.1
    """λ: weight of right responses; 0: learn only from wrong ones (paper)."""
    baseline: Literal["group", "none"] = "group"
    """group: Â is the group's z-score; none: 1 for a right response, -1 for a wrong one (paper)."""
    outliers: NonNegative = 3.0
    """k: a response is an outlier if its length or its mean log μ is more than k standard
    deviations from the rollout's mean; 0: off (our choice)."""


def signs(rewards: Tensor) -> Tensor:
    """Return advantages `[P, G]` without a baseline. Rewards [1, 0, 0, 0] give [1, -1, -1, -1]."""
    return 2 * rewards - 1  # with λ: R - 1 + λ R, whose mean gradient is (1 + λ) ∇p


def length_and_logp(rollout: Rollout) -> Tensor:
    """Return the length and the mean log μ of each response: `[N, 2]`."""
    lengths = rollout.mask.sum(1)  # [N]
    return torch.stack([lengths, rollout.rollout_logp.sum(1) / lengths], dim=1).double()


def outliers(args: Args, values: Tensor, every: Tensor) -> Tensor:
    """Return True `[N]` where one of the two `values [N, 2]` is more than k standard deviations
    from the mean of `every [M, 2]`, the values of all ranks."""
    # 1e-5: if all are alike, rounding must not make outliers.
    limit = args.outliers * every.std(0, correction=0) + 1e-5  # [2]
    return ((values - every.mean(0)).abs() > limit).any(1) & (args.outliers > 0)


def weighted(args: Args, batch: Rollout) -> Rollout:
    """Return the batch with u Â for Â. (The loop has set the outliers' advantages to 0.)"""
    A = batch.advantages  # [n]
    A = torch.where(A > 0, args.positive_weight * A, A)  # [n]
    return Rollout(**vars(batch) | {"advantages": A})


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return grpo.py's loss of u Â, as sum and count."""
    return grpo.policy_loss(args, logp, weighted(args, batch))


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    size = batch.advantages.abs()  # [n]
    batch = weighted(args, batch)
    damped = size - batch.advantages.abs()  # [n]
    return grpo.measures(args, logp, batch) | {"damped": (damped.sum(), size.sum())}


ACTED = {
    "damped": "advantages taken away (share of Σ |Â|)",
    "outlier_share": "outliers (share of responses)",
    "outlier_reward": "their reward",
}


# The diff of grpo.py's loop
LOOP = """
         rollout.advantages = advantages(rewards).flatten()  # [N]
+        if args.baseline == "none":
+            rollout.advantages = signs(rewards).flatten()  # [N]
+        values = length_and_logp(rollout)  # [N, 2]
+        odd = outliers(args, values, gather(values, world))  # [N]
+        rollout.advantages[odd] = 0.0  # after the baseline, which counts them
+        means.add(outlier_share=(odd.sum(), len(odd)))
+        means.add(outlier_reward=(rewards.flatten()[odd].sum(), odd.sum()))
"""
advantages = grpo.advantages
main = loop_of(grpo, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. The paper has no baseline: the advantage is λ for a right response and -1 for a wrong one, so a
#    group without any right response is pushed down. By default ours weights the group's z-scores,
#    which are 0 in such a group.
# 2. The paper leaves no outliers out.
# 3. The paper has the mean over tokens, no KL term, and an entropy bonus of 0.001. Its scripts keep
#    this default of verl, and ε 0.2. It also makes four updates per rollout, but PSR (right
#    responses alone) and NSR (λ = 0) first drop the responses without weight, and so make fewer
#    updates.
#
# In 30 default steps (seed 1) 3% of the responses were outliers, and 94% of those were wrong: once
# most responses are right, a wrong one is unusual. We do not filter by reward, because the one
# right answer to a hard prompt would be an outlier, too. The study also shows that half of a
# z-score is not the paper's half: it does not find rare right answers.
#
# λ, sizes and settings are from the authors' code, the findings from the abstracts. The filter is
# ours.
