"""Routing replay (minirl.py): on the embedded mixture of experts, and on the routers of other
families."""

import copy

import minirl
import pytest
import torch
from common.batch import Rollout
from common.distributed import shard
from common.logprobs import Policy, all_logprobs
from common.model import load_model
from common.rollout import HFEngine
from common.scale.routing import Routing, routers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PROMPTS = ["7*8-9+6=", "1+2=", "3*3*3*3*3*3*3=", "9-9="]


@pytest.fixture(scope="module")
def moe():
    return load_model("tiny-moe")


def sample(moe: tuple, world: object, dtype: str = "float32") -> Rollout:
    engine = HFEngine(moe[0], world, 0, dtype, 1024, experts=True)
    policy = Policy(copy.deepcopy(moe[0]))
    engine.sync(policy)  # rounds the weights where the dtype asks for it
    return engine.generate([moe[1](prompt)["input_ids"] for prompt in PROMPTS], 8, 64, 1.0)


def fed(batch: Rollout) -> torch.Tensor:
    """Return True [N, S] on the tokens that the sampler read: all but the last sampled one."""
    end = batch.prompt_len + batch.mask.sum(dim=1).long()
    return torch.arange(batch.sequences.shape[1]) < end[:, None] - 1


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float8", marks=pytest.mark.slow)])
def test_sampler_and_trainer_record_the_same_experts(moe, world, dtype):
    """With the same weights they agree, in prompt and response, token by token and layer by layer.
    If weights are rounded to float8, some tokens go elsewhere until their experts are replayed."""
    rollout, policy = sample(moe, world, dtype), Policy(copy.deepcopy(moe[0]))
    args = minirl.Args(dtype="float32", micro_tokens=600)
    experts = all_logprobs(policy, rollout, args, world, experts=True).experts
    assert rollout.sampler_experts.shape == (32, rollout.sequences.shape[1], 2, 2)
    differing, tokens = minirl.experts_differ(rollout, experts)
    assert tokens == fed(rollout).sum()
    assert differing == 0 if dtype == "float32" else 0 < differing < 0.3 * tokens
    assert len(experts[fed(rollout)].unique()) == 8  # all experts are in use
    rollout.replayed_experts = rollout.sampler_experts
    experts = all_logprobs(policy, rollout, args, world, experts=True).experts
    assert minirl.experts_differ(rollout, experts)[0] == 0


SHAPE = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 16}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
SHAPE |= {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
SHAPE |= {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1}
SHAPE |= {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "qk_rope_head_dim": 16}


def untrained(family: str) -> PreTrainedModel:
    """Return a random model with weights so large that experts differ."""
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in lm.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return lm


@pytest.mark.parametrize("family", ["olmoe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
@torch.no_grad()
def test_other_families_replay(family):
    """One family has its softmax before the top k, one after it. Recording changes nothing. The
    recorded choice gives the same logits; another choice gives others, so it is obeyed."""
    lm, tokens = untrained(family), torch.arange(2, 16).view(2, 7)
    free = lm(tokens, use_cache=False).logits
    routing = Routing(lm)
    assert routing.active and torch.equal(lm(tokens, use_cache=False).logits, free)
    recorded = routing.recorded()
    assert recorded.shape == (14, len(routers(lm)), 2)
    routing.replay = recorded
    assert torch.equal(lm(tokens, use_cache=False).logits, free)
    routing.replay = recorded.roll(1, dims=0)
    assert not torch.allclose(lm(tokens, use_cache=False).logits, free, atol=1e-2)
    assert torch.equal(routing.recorded(), routing.replay)


@pytest.mark.slow
@torch.no_grad()
def test_a_router_that_cannot_be_replayed_is_left_alone():
    """Nothing is recorded, and the model's outputs are what they were."""
    lm, tokens = untrained("deepseek_v3"), torch.arange(2, 16).view(2, 7)
    free = lm(tokens, use_cache=False).logits
    routing = Routing(lm)
    assert not routing.active and type(routers(lm)[0]).__name__ in routing.why_not
    assert torch.equal(lm(tokens, use_cache=False).logits, free)


@pytest.mark.slow
def test_replay_in_a_sharded_bfloat16_policy_with_recomputation(moe, world):
    """Replaying what was just recorded changes neither value nor gradient."""
    sequences = torch.tensor([moe[1]("7*8-9=7*8=56;56-9=47#47")["input_ids"]])
    args = minirl.Args(dtype="bfloat16", gradient_checkpointing=True)
    policy, results, replay = shard(Policy(copy.deepcopy(moe[0])), args, world), [], None
    for _ in range(2):
        logp, _ = policy(sequences, torch.arange(23)[None] < 22, 1.0, replay=replay)
        logp.sum().backward()
        replay = policy.routing.recorded()
        gradients = [parameter.grad.full_tensor().clone() for parameter in policy.parameters()]
        results.append([logp.detach(), *gradients])
        policy.zero_grad()
    assert all(map(torch.equal, *results))
