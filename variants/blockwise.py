r"""Blockwise advantages: working and answer each have a reward.

Pavlenko et al. (Nebius), "Blockwise Advantage Estimation for Multi-Objective RL with Verifiable
Rewards", 2026, arXiv 2602.10231.

The problem: GRPO gives all tokens of a response one advantage. A right working with a mistake in
its last line is punished from its first token, and a lucky answer rewards the mistakes before it.

The idea: give each block of a response its own reward and advantage. Here the blocks are the
working and the answer. No weights are needed to add their rewards up.

Objective, for G responses y_i to one prompt, with r = π_θ(y_t) / π_old(y_t) for each token y_t:

    J = 1/G Σ_i Σ_k 1/|T_ik| Σ_{t in T_ik} min(r Â_ik, clip(r, 1-ε, 1+ε) Â_ik)
    Â_ik = R_ik - b_ik:    the reward of block k, less its baseline; no std
    b_i1 = mean of R_j1 over the group
    b_i2 = mean of R_j2 over those of the group with R_j1 = R_i1

T_i1 are the tokens of the working, up to and including the marker (`--marker`, here the last `#`).
T_i2 are the tokens of the answer after it.

Gradient weight on ∇ log π_θ(y_t), for t in block k, before the three averages:

    M r Â_k
    M = 0 if (Â_k > 0 and r > 1+ε) or (Â_k < 0 and r < 1-ε), else 1

The difficulty is the baseline of the later block, because the reward that an answer can get depends
on the working before it. Compared with the group's mean, every answer to a good working looks good,
so the working's reward counts twice. The right baseline is the mean reward of answers to this very
working, but it would need more samples from there. The outcome-conditioned baseline uses the group
instead: it compares an answer with the answers that follow a working of the same reward. If the
group has no other such answer, the advantage is 0 (`alone`).

The task's verifier gives a block's reward. It sees that block alone: the working up to the marker,
or the marker and the answer. `variants/steps.py` has a reward for every right step.

What bounds a step: a clip of the token's ratio.

Base file: grpo.py. Differs from it in:
1. Rewards, advantages and token means by block; their sum.
2. Advantages without std. No KL term, no reference model.
3. The default task. (With `arithmetic` the working has no reward, and nothing is learnt from it.)
Loop: sapo.py's, which is grpo.py's without π_ref, with the diff below.

Run it:
    torchrun -m variants.blockwise                          # laptop, 2 to 4 minutes, no download
    # eight GPUs (not yet run on several), the paper's batch; blocks: the thinking and the rest
    torchrun --nproc_per_node=8 -m variants.blockwise --task dapo-math-17k --marker "</think>" \
        --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --eval_task math500 \
        --prompts_per_step 64 --group_size 32 --max_new_tokens 8192 --lr 1e-6 --warmup 64 \
        --weight_decay 0.1 --micro_tokens 8192
"""

from dataclasses import dataclass
from typing import Literal

from common.batch import Rollout
from common.cli import BadInput, blame, NonNegative
from common.clock import timed
from common.data import Task
from common.distributed import global_sum, World
from common.launch import launch
from common.metrics import clip_shares
import torch
from torch import Tensor

from minirl import advantages  # noqa: F401  (for LOOP: R minus the mean)
import sapo
from variants import Trunk, loop_of


@dataclass
class Args(Trunk):
    clip_low: NonNegative = 0.2
    """ε of the lower clip, which is at 1 - ε (PPO's value; DeepSeekMath gives none)."""
    clip_high: NonNegative = 0.2
    """ε of the upper clip, which is at 1 + ε (our choice; DAPO, STAPO: 0.28; DeepSeek-R1: 10)."""
    task: str = "variants/steps.py"
    """The task, as in every file; this one's verifier gives partial rewards for the working."""
    marker: str = "#"
    """A token that ends the working; in a response the last one counts."""
    baseline: Literal["none", "batch", "group", "outcome"] = "outcome"
    """Baseline of an answer's reward: none; the mean of the batch or of the group; or (outcome) the
    mean of the answers in the group whose working has the same reward."""


def compared(args: Args, working: Tensor) -> Tensor:
    """Return True `[P, G, G]` where answer j is in the baseline of answer i. `working [P, G]` are
    the workings' rewards."""
    return (working[:, :, None] == working[:, None]) | (args.baseline == "group")


def answer_advantages(args: Args, rewards: Tensor, working: Tensor, world: World) -> Tensor:
    """Return the answers' advantages, from their and their workings' rewards: all `[P, G]`."""
    if args.baseline == "none":
        return rewards
    if args.baseline == "batch":
        total = global_sum({"reward": rewards.sum(), "count": rewards.numel()}, world)
        return rewards - total["reward"] / total["count"]
    alike = compared(args, working)  # [P, G, G]
    # The mean of the differences is exactly 0 for equal rewards.
    apart = rewards[:, :, None] - rewards[:, None]  # [P, G, G]
    return (apart * alike).sum(dim=2) / alike.sum(dim=2)  # [P, G]


def marker_token(args: Args, tokenizer: object) -> int:
    """Return the marker's token id. The marker must be one token, and not EOS (else BadInput)."""
    with blame(f"--marker {args.marker}: this model's tokenizer cannot write it"):
        ids = tokenizer(args.marker, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] == tokenizer.eos_token_id:
        raise BadInput(f"--marker {args.marker}: must be one token of this model, and not its last")
    return ids[0]


def working_mask(rollout: Rollout, marker: int) -> Tensor:
    """Return 1.0 on the working's tokens `[N, T]`: up to the last marker, or all without one."""
    marked = (rollout.tokens == marker) & rollout.mask.bool()  # [N, T]
    ahead = marked.flip(1).cumsum(1).flip(1) > 0  # [N, T]: a marker is here or later
    return rollout.mask * (ahead | ~marked.any(1, keepdim=True))


def block_texts(rollout: Rollout, marker: int, tokenizer: object) -> tuple[list[str], list[str]]:
    """Return every response's working, up to the marker, and its answer, from the marker on."""
    rows, ends = rollout.response_ids(), rollout.working.sum(1).long().tolist()
    blocks = [row[:end] for row, end in zip(rows, ends)]
    blocks += [[marker, *row[end:]] for row, end in zip(rows, ends)]
    texts = tokenizer.batch_decode(blocks, skip_special_tokens=True)
    return texts[: len(rows)], texts[len(rows) :]


@timed("reward")
def block_rewards(task: Task, rollout: Rollout, answers: list[str], marker: int) -> list[Tensor]:
    """Return the rewards of the workings and the rewards of the answers, `[N]` each."""
    rewards = []
    for texts in block_texts(rollout, marker, task.tokenizer):
        rewards.append(torch.tensor(task.verifier(texts, answers), device=rollout.mask.device))
    return rewards


def token_advantages(batch: Rollout) -> Tensor:
    """Return Â_k `[n, T]`: each token has the advantage of its block. The loop writes the working's
    into `working_advantages [n]`, and the answer's into `advantages [n]`."""
    working, answer = batch.working_advantages[:, None], batch.advantages[:, None]  # [n, 1]
    return torch.where(batch.working > 0, working, answer)  # [n, T]


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = token_advantages(batch)  # [n, T]
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r; 1 until the rollout's first optimiser step
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
    # Why min, and not the clip alone? A token that moved in the wrong direction must keep its
    # gradient, so that it can come back.
    objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    # 1/|T_ik|: a block's mean, so three tokens of answer count as much as thirty of working.
    per_response = 0.0
    for block in (mask * batch.working, mask * (1 - batch.working)):  # [n, T]
        mean = (objective * block).sum(dim=1) / block.sum(dim=1).clamp(min=1)  # [n]
        per_response = per_response + mean  # [n]
    return -per_response.sum(), mask.new_tensor(len(mask))  # sum, count


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    apart = (batch.working_advantages - batch.advantages).abs()  # [n]
    A = token_advantages(batch)  # [n, T]
    return {
        **clip_shares(logp, batch, args.clip_low, args.clip_high, A=A),
        "advantages_apart": (apart.sum(), len(apart)),
    }


ACTED = {
    "advantages_apart": "|Â of the working - Â of the answer|",
    "alone": "answers without a sibling to compare with (share)",
    "working_reward": "reward of the working",
}


# The diff of sapo.py's loop
LOOP = """
     task = load_task(args, tokenizer)
+    marker = marker_token(args, tokenizer)

-        rewards = task.score(rollout, problems, G)  # [P, G]
-        rollout.advantages = advantages(rewards).flatten()  # [N]
+        task.score(rollout, problems, G)  # the whole responses' rewards, for metrics
+        rollout.working = working_mask(rollout, marker)  # [N, T]
+        answers = [p.answer for p in problems for _ in range(G)]
+        working, answer = block_rewards(task, rollout, answers, marker)  # [N], [N]
+        working, answer = working.view(P, G), answer.view(P, G)
+        rollout.working_advantages = advantages(working).flatten()  # [N]
+        rollout.advantages = answer_advantages(args, answer, working, world).flatten()  # [N]
+        alone = compared(args, working).sum(dim=2) == 1  # [P, G]
+        means.add(working_reward=(working.sum(), P * G), answer_reward=(answer.sum(), P * G))
+        means.add(alone=(alone.sum(), P * G))
"""
main = loop_of(sapo, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. The paper's blocks are a solution and the confidence in it. Its second reward is Brier's score.
# 2. The paper's outcome is right or wrong; ours is the working's reward.
# 3. We do not know the paper's ε; 0.2 is ours. The paper also steers the entropy to a target, and
#    has weight decay 0.1.
#
# The working gets no signal from its answer. Here the policy learns to write a step too many, which
# costs the working nothing, and accuracy falls again. With `variants/steps.py` the rewards of the
# two blocks add up to the reward of the whole. `entropy_good`, `len_good` and the like go by the
# sign of the answer's advantage.
#
# Loss, baselines and sizes are as read in the paper; the authors published no code. We do not know
# how the paper treats a response without its last block; ours counts as 0.
