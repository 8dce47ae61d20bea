r"""Jet-RL: one 8-bit forward pass for sampler and trainer.

Xi et al. (NVIDIA, MIT), "Jet-RL: Enabling On-Policy FP8 Reinforcement Learning with Unified
Training and Rollout Precision Flow", 2026, arXiv 2601.14243.

The problem: float8 makes sampling faster, but usually a rounded copy samples while the trainer
stays in bfloat16. Then every sample comes from another policy than the trained one, even before the
first update. In long responses one token's error moves all tokens after it. The paper reports runs
that collapse beyond 8,000 tokens.

The idea: train with the sampler's rounded weights, so that there is only one policy. minirl.py
corrects for two policies with a weight. Here π_old/μ is 1 except for the order of sums
(`sampler_kl` in the first steps: 6e-4 in minirl.py, 1e-13 here).

Objective, MiniRL's, where ŵ, the weights rounded to 8 bits, both sample (μ) and are trained (π):

    J = E_y~μ [ Σ_t M_t sg[min(π_ŵ(y_t)/μ(y_t), 5)] Â log π_ŵ(y_t) ]
    ŵ = s e4m3(w / s) row by row,     s = max |w| / 448,     w: float32 master weights
    w <- w + lr ∇_ŵ J, as the optimiser makes it: rounding counts as the identity (straight through)

Gradient weight on ∇ log π_θ(y_t), summed over tokens, averaged over responses:

    M_t min(π_θ/μ, 5) Â          with π_old/μ = 1, so that π_θ/μ is r, the staleness alone

Why are the masters needed? Neighbouring e4m3 numbers are 6 to 12% apart, and an update is a small
part of that, so rounded weights alone would never move. In the float32 masters updates add up,
until a weight rounds to the next 8-bit number. The gradient is computed at the rounded weights.
Rounding itself has no useful gradient (it is flat, or jumps), so it counts as the identity.

Base file: minirl.py. Differs from it in:
1. The passes use the rounded weights. The masters replace them for the optimiser's step and for
   checkpoints. (`--save_hf` writes the rounded weights.)
2. The sampler gets the rounded weights and computes as the trainer does, with either engine.

Run it:
    torchrun -m variants.jet                                # laptop, 2 to 4 minutes, no download
    torchrun -m variants.jet --model tiny-moe --routing_replay r3
    # eight GPUs (not yet run on several); one of the paper's models, the sizes are ours
    torchrun --nproc_per_node=8 -m variants.jet --model Qwen/Qwen3-8B-Base --task dapo-math-17k \
        --eval_task aime24 --prompts_per_step 64 --group_size 16 --max_new_tokens 8192 --lr 1e-6 \
        --gradient_checkpointing --tensor_parallel 2
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from common.launch import launch
from common.logprobs import Policy
from common.rollout import LAYER, ROUTERS, float8
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import minirl
from variants import loop_of


@dataclass
class Args(minirl.Args):
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float8"] = "auto"
    """Precision of the sampler's weights (auto: as dtype; the weights are rounded already)."""


class EightBits:
    """The policy's weights, rounded to 8 bits in every pass, and float32 masters for the optimiser.

    As in the sampler's float8 copy, the layers' matrices are rounded, except routers. FSDP divides
    matrices by rows, and each row has its own scale, so each rank can round its own part.
    """

    def __init__(self, policy: Policy):
        self.parts = []
        for name, parameter in policy.lm.named_parameters():
            if not LAYER.search(name) or parameter.dim() < 2 or name.endswith(ROUTERS):
                continue
            weight = parameter.detach()
            self.parts.append(weight.to_local() if isinstance(weight, DTensor) else weight)
        self.round()

    def round(self) -> None:
        """Store the policy's weights as masters and replace them by their rounded values."""
        self.masters = [part.clone() for part in self.parts]
        for part in self.parts:
            part.copy_(float8(part))

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Give the policy its masters inside this context, and round them again afterwards."""
        for part, master in zip(self.parts, self.masters):
            part.copy_(master)
        yield
        self.round()

    def step(self, optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
        """Step the optimiser: apply the gradient, taken at the rounded weights, to the masters.

        Return the sums of |ŵ - w| and |w|: of rounded weights minus masters, and of masters.
        """
        with self.lifted():
            optimizer.step()
        pairs = list(zip(self.parts, self.masters))
        apart = sum((part - master).abs().sum() for part, master in pairs)  # []
        return apart, sum(master.abs().sum() for _, master in pairs)


ACTED = {
    "rounding": "8-bit weights: distance from their masters (share)",
    "sampler_gap": "mean |log π_old - log μ| (nats per token)",
    "weight_max": "largest weight π_θ/μ, before its cap",
}


# The diff of minirl.py's loop
LOOP = """
     done = load_checkpoint(run.checkpoint, policy, optimizer, parts, world)  # steps; 0: a new run
+    eight_bits = EightBits(policy)

-                optimizer.step()
+                means.add(rounding=eight_bits.step(optimizer))

-            save_checkpoint(run.folder, step, policy, optimizer, parts, world, args.keep)
+            with eight_bits.lifted():
+                save_checkpoint(run.folder, step, policy, optimizer, parts, world, args.keep)
"""
advantages = minirl.advantages
experts_differ = minirl.experts_differ
measures = minirl.measures
policy_loss = minirl.policy_loss
main = loop_of(minirl, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. Here is the arithmetic without the speed: the weights are numbers that 8 bits can hold, but
#    they are multiplied in `--dtype`. Real kernels also round activations, and multiply in 8 bits
#    in the backward pass. In the paper 128 activations or 128 x 128 weights share a scale; here a
#    row of weights does. vLLM's kernels, with `--rollout_dtype float8`, round only the sampler's
#    activations, so a gap returns.
# 2. The masters are float32, not bfloat16. The rounded weights need 4 bytes more each, divided over
#    the ranks.
# 3. The objective is minirl.py's; we do not know the paper's.
#
# We read only the paper's abstract. Which parts are rounded, and in which blocks, we know at second
# hand; we found no public code.
