"""verl 0.9.1: VERL_USE_EXTERNAL_MODULES=tools.port.verl_plugin registers the losses of losses.py,
for actor_rollout_ref.actor.policy_loss.loss_mode=stapo (or maspo, or minirl)."""

import verl.workers.utils.losses as worker
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

from tools.port.losses import AVERAGE, Tokens

seen = {"entropy": None}  # [N, T] of this micro-batch: verl passes it to no policy loss
their_ppo_loss = worker.ppo_loss


def ppo_loss(config: object, model_output: dict, data: object, dp_group: object = None) -> tuple:
    if model_output.get("entropy") is not None:  # with actor.calculate_entropy=True
        seen["entropy"] = worker.no_padding_2_padding(model_output["entropy"], data).detach()
    return their_ppo_loss(config, model_output, data, dp_group)


worker.ppo_loss = ppo_loss  # the workers import it later


def register(token_loss: object) -> None:
    name = token_loss.__name__

    @register_policy_loss(name)
    def policy_loss(
        old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, **rest
    ) -> tuple[Tensor, dict]:
        gap = rest.get("rollout_is_weights")  # None: algorithm.rollout_correction is off
        gap = 1.0 if gap is None else gap
        given = (log_prob, old_log_prob, gap, advantages, response_mask, seen["entropy"])
        loss, acted = token_loss(Tokens(*given))
        batch = rest["config"].global_batch_info  # counts of the mini-batch on all ranks
        share = (acted * response_mask).sum() / response_mask.sum()
        average = AVERAGE[token_loss]
        return agg_loss(loss, response_mask, average, **batch), {f"actor/{name}": share.item()}


for token_loss in AVERAGE:
    register(token_loss)
