"""TRL 1.16.0: `PortTrainer(..., token_loss=stapo)` is a GRPOTrainer with a loss of losses.py.

The loss replaces TRL's whole `_compute_loss`: loss_type, beta and entropy_coef have no effect.
"""

import torch
from torch import Tensor
from trl import GRPOTrainer

from tools.port.losses import AVERAGE, Tokens


class PortTrainer(GRPOTrainer):
    def __init__(self, *given: object, token_loss: object, **named: object):
        super().__init__(*given, **named)
        self.token_loss = token_loss

    def _compute_loss(self, model: object, inputs: dict) -> Tensor:
        mask = inputs["completion_mask"]  # [N, T]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], mask], dim=1)
        logp, entropy, _ = self._get_per_token_logps_and_entropies(
            model, ids, attention, mask.shape[1], compute_entropy=True
        )
        old_logp = inputs.get("old_per_token_logps", logp.detach())  # absent: π_old is π_θ
        sampler_logp = inputs.get("sampling_per_token_logps", old_logp)  # absent without vLLM
        gap = (old_logp - sampler_logp).nan_to_num(0.0).exp()
        A = inputs["advantages"][:, None]
        loss, acted = self.token_loss(Tokens(logp, old_logp, gap, A, mask, entropy.detach()))
        steps = self.current_gradient_accumulation_steps
        count = len(mask) * steps
        if AVERAGE[self.token_loss] == "token-mean":  # TRL's count: the rollout's mean per update
            count = inputs["num_items_in_batch"] / self.accelerator.num_processes
            count = count * steps / self.args.steps_per_generation
        for name, column in ("entropy", entropy), (self.token_loss.__name__, acted):
            self._metrics["train"][name].append(((column * mask).sum() / mask.sum()).item())
        return (loss * mask).sum() / count
