r"""Stack: five methods as layers of one loop, each with a flag that switches it off.

Parts of STAPO, MASPO, Goldilocks, DEEP-GRPO and VCPO (their files name the papers), on the loss of
He et al., "JustRL: Scaling a 1.5B LLM with a Simple RL Recipe", 2025, arXiv 2512.16649.

The problem: each paper tests its method alone. Surveys of 2026 sort the methods into layers (token,
sample, exploration, system) and advise to stack them, but we know no paper that tests the stack.

The idea: build the stack, so that one flag takes a layer out.

Objective, over the tokens of main responses and of branches, with r = π_θ(y_t) / π_old(y_t):

    J = 1/T (Σ_main I sg[F] r Â + N_main/N_branch Σ_branch I sg[F] r Â)
    Â = (R - mean R) / std R in a prompt's group, R - mean R among the siblings of a branch

Gradient weight on ∇ log π_θ(y_t), before the average (a branch's times N_main/N_branch):

    I F r Â

T counts the main tokens with I = 1, N_main and N_branch all tokens of each kind in the mini-batch.
sg[x] is x without gradient. The layers are:

    layer        what it does                                          its file    off
    token        I = 0: silences rare tokens at sure places            stapo       --tau_p 0
    token        F: a soft gate where PPO's clip would cut             maspo       --no_gate
    sample       a teacher chooses each prompt among K                 goldilocks  --candidates 1
    exploration  new endings of failed responses                       deep_grpo   --branches 0
    system       the rate times sqrt(ESS/B), B responses per update    vcpo        --no_ess_scaling

Without the gate F r Â is min(r Â, clip(r) Â). Without layers this is justrl.py. The teacher learns
from main responses only. STAPO's quantile and ESS are over main rows and branches. No batch waits
here, so the weights π_θ(y)/μ(y) of ESS leave 1 by the updates since the rollout.

What bounds a step: a smooth gate on the token's ratio.

Base file: stapo.py. Differs from it in:
1. MASPO's gate instead of the clip; curriculum, branches, and the factor on the rate.

Run it:
    torchrun -m variants.stack                              # laptop, some minutes, no download
    # eight GPUs (not yet run on several); sizes are ours
    torchrun --nproc_per_node=8 -m variants.stack --model Qwen/Qwen2.5-Math-1.5B --task math \
        --boundary . --prompts_per_step 64 --max_new_tokens 3072 --lr 1e-6 --teacher_lr 1e-5
"""

from dataclasses import dataclass

from common.batch import Rollout
from common.cli import BadInput, Count, CountOrZero, Fraction, Positive  # noqa: F401  (for LOOP)
from common.distributed import World
from common.launch import launch
import torch
from torch import Tensor

from deep_grpo import Branches  # noqa: F401  (for LOOP)
from goldilocks import Curriculum  # noqa: F401  (for LOOP)
import maspo
import stapo
from variants import Trunk, justrl, loop_of
from vcpo import ess_ratio, log_weight  # noqa: F401  (for LOOP)


@dataclass
class Args(Trunk):
    tau_p: Fraction = 0.002
    """A token below this probability may be spurious; 0: no mask (STAPO's paper)."""
    gate: bool = True
    """MASPO's gate; False: PPO's clip."""
    candidates: Count = 16
    """K: prompts that compete for each slot of the batch; 1: no curriculum (goldilocks.py)."""
    teacher_batch: Count = 64
    """Prompts in one update of the teacher; before it has them, choice is random (goldilocks.py)."""
    teacher_lr: Positive = 1e-3
    """The teacher's learning rate (goldilocks.py; real models: 1e-5)."""
    branches: CountOrZero = 8
    """New endings of each failed response; 0: none (DEEP-GRPO's paper)."""
    boundary: str = ";"
    """Text that ends a segment; a token that ends in it allows a branch (DEEP-GRPO's paper: `.`)."""
    ess_scaling: bool = True
    """Multiply the learning rate by sqrt(ESS/B) of the mini-batch (VCPO's paper)."""

    # No flags: what else the parts read, as in their own files
    explore = 0.1
    window = 2048
    teacher_updates = 2
    depth_power = 2.0


CLIP, GATE = justrl.Args(), maspo.Args()  # their flags, at the defaults


def choose_tokens(args: Args, batch: Rollout, world: World) -> None:
    """Write the column `kept` `[m, T]`: I, the mask without STAPO's spurious tokens."""
    stapo.choose_tokens(stapo.Args(tau_p=args.tau_p), batch, world)
    batch.kept = batch.mask * ~batch.spurious  # [m, T]


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    A = batch.advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r; 1 until the rollout's first optimiser step
    if args.gate:
        objective = maspo.gates(GATE, ratio.detach(), batch) * ratio * A  # [n, T]: F r Â
    else:
        clipped = ratio.clamp(1 - CLIP.clip_low, 1 + CLIP.clip_high)  # [n, T]
        objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    main = batch.branch == 0  # [n]
    stream = torch.where(main, 1.0, batch.branch)  # [n]: N_main / N_branch, from deep_grpo.py
    return -(objective * batch.kept * stream[:, None]).sum(), batch.kept[main].sum()


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    mask = batch.mask  # [n, T]
    stats = {"silenced_share": ((mask - batch.kept).sum(), mask.sum())}
    if args.gate:
        closed = 1 - maspo.gates(GATE, (logp - batch.old_logp).exp(), batch)  # [n, T]
        return stats | {"gate_closed": ((closed * mask).sum(), mask.sum())}
    return stats | justrl.measures(CLIP, logp, batch)


ACTED = {
    "layers_acted": "how many layers acted in the step",
    "branches_used": "branches in the batch",
    "lr_damping": "reduction of the learning rate (share)",
}
# A metric for each layer, above 0 if it acted
LAYERS = "silenced_share gate_closed chosen_over_mean branches_used lr_damping".split()


# The diff of stapo.py's loop
LOOP = """
     engine = make_engine(args, lm, world)
+    if args.branches == 1:
+        raise BadInput("--branches 1: must be 0, or 2 or more: its siblings judge a branch")
+    branches = Branches(args, engine, task, world) if args.branches else None
+    curriculum = Curriculum(args, lm, task, world) if args.candidates > 1 else None

     run = Run(args, task, world, Path(__file__).stem, ACTED)
-    parts = {"engine": engine}  # other objects to save in a checkpoint (each has a state_dict)
-    done = load_checkpoint(run.checkpoint, policy, optimizer, parts, world)  # steps; 0: a new run
+    both, optimizers, parts = policy, optimizer, {"engine": engine}
+    if branches:
+        parts["branches"] = branches
+    if curriculum:
+        parts["curriculum"] = curriculum
+        both = torch.nn.ModuleList([policy, curriculum.teacher])
+        optimizers = [optimizer, curriculum.optimizer]
+    done = load_checkpoint(run.checkpoint, both, optimizers, parts, world)

         problems = [task.train(cursor + i) for i in range(P)]
+        if curriculum:
+            chosen = curriculum.choose(step)
+            problems = [pick.problem for pick in chosen[world.rank * P : (world.rank + 1) * P]]

         rollout.advantages = advantages(rewards).flatten()  # [N]
+        if curriculum:
+            means.add(**curriculum.learn(chosen, rewards))
+        rollout.branch = torch.zeros_like(rollout.advantages)  # [N]
+        shares = rollout.split(args.minibatches)
+        if branches:
+            grown, stats = branches.grow(rollout, rewards, problems)
+            means.add(**stats)
+            shares = branches.join(rollout, grown)

-        minibatches = [balance_tokens(part, world) for part in rollout.split(args.minibatches)]
+        minibatches = [balance_tokens(part, world) for part in shares]

-        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / max(1, args.warmup))
+        warm_lr = args.lr * min(1.0, step / max(1, args.warmup))

                 means.add(**run.check_sampler(minibatches))
+            log_w = log_weight(minibatch.logp, minibatch.rollout_logp, minibatch.mask)  # [m]
+            scale = ess_ratio(gather(log_w, world)).item() ** 0.5 if args.ess_scaling else 1.0
+            optimizer.param_groups[0]["lr"] = warm_lr * scale
+            means.add(lr_damping=(1 - scale, 1))

         metrics = means.reduce(world) | {"lr": optimizer.param_groups[0]["lr"]}
+        metrics["layers_acted"] = sum(bool(metrics.get(name)) for name in LAYERS)

-            save_checkpoint(run.folder, step, policy, optimizer, parts, world, args.keep)
+            save_checkpoint(run.folder, step, both, optimizers, parts, world, args.keep)
"""
advantages = stapo.advantages
main = loop_of(stapo, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the papers in:
# 1. Of VCPO only the rate is left, without its queue of stale batches, its weights and its baseline.
# 2. Branches are only centred, as in deep_grpo.py.
# The row `recipe` of docs/stability.md is an earlier form (`git show ed71d389^:variants/recipe.py`).
