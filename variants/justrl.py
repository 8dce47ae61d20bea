r"""JustRL: the plain recipe, with nothing added.

He et al., "JustRL: Scaling a 1.5B LLM with a Simple RL Recipe",
2025, arXiv 2512.16649.

The problem: recipes for RL collect additions, and it is hard to tell which of them help.

The idea: leave them out. The recipe has no KL term, no entropy bonus, no dynamic sampling, no
punishment for length, no stages and no schedule. The authors train two models of 1.5B parameters
for thousands of steps with one setting. They report that neither collapses, and that two usual
additions (DAPO's overlong punishment, a more lenient verifier) make them worse. Every addition in
this repository should be compared with this recipe.

Objective, over all response tokens y_t of a mini-batch, with r = π_θ(y_t) / π_old(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t min(r Â_i, clip(r, 1-ε_low, 1+ε_high) Â_i)
    Â_i = (R_i - mean R) / std R

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    M r Â
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

Two parts are from DAPO. With the token mean, every token counts the same in a long response and in
a short one. With ε_high > ε_low, a token at probability 0.01 may rise to 0.0128, not only to 0.012,
before its gradient is cut. DAPO's authors expect new behaviour from rare tokens.

What bounds a step: a clip of the token's ratio.

Base file: grpo.py. Differs from it in:
1. The mean over all tokens of the mini-batch instead of the mean of response means.
2. ε 0.2 / 0.28.
3. No KL term, no reference model.
Loop: sapo.py's, which is grpo.py's without π_ref.

Run it:
    torchrun -m variants.justrl                             # laptop, 2 to 4 minutes, no download
    # eight GPUs (not yet run on several), the paper's sizes (it has four GPUs)
    torchrun --nproc_per_node=8 -m variants.justrl --task dapo-math-17k --eval_task aime24 \
        --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --prompts_per_step 256 --group_size 8 \
        --max_new_tokens 15360 --lr 1e-6 --warmup 10 --weight_decay 0.1 --gradient_checkpointing
"""

from dataclasses import dataclass

from common.batch import Rollout
from common.cli import NonNegative
from common.launch import launch
from common.metrics import clip_shares
import torch
from torch import Tensor

import sapo
from variants import Trunk, loop_of


@dataclass
class Args(Trunk):
    clip_low: NonNegative = 0.2
    """ε of the lower clip (authors' script)."""
    clip_high: NonNegative = 0.28
    """ε of the upper clip (authors' script)."""
    acts_on_ratio = True  # not a flag: never acting is no fault if every ratio is 1


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r; 1 until the rollout's first optimiser step
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
    # Why min, and not the clip alone? A token that moved in the wrong direction must keep its
    # gradient, so that it can come back.
    objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    return -(objective * mask).sum(), mask.sum()  # the mean over all tokens


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    return clip_shares(logp, batch, args.clip_low, args.clip_high)


ACTED = {"clip_share": "tokens clipped (share)"}


advantages = sapo.advantages
main = loop_of(sapo, globals())


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. No bound on r if Â < 0. The authors' script passes `clip_ratio_c=10`, verl's bound.
# 2. The script has weight decay 0.1 and a warm-up of 10 steps; here these are flags.
#
# Formula, ε and sizes are from the authors' script. We read only the paper's abstract, so its other
# findings are second hand.
