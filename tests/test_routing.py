"""Routing replay on the embedded mixture of experts (minirl.py)."""

import copy

import minirl
import pytest
import torch
from common.model import Policy, load_model
from common.rollout import HFEngine, Rollout, all_logprobs, response_logprobs

PROMPTS = ["7*8-9+6=", "1+2=", "3*3*3*3*3*3*3=", "9-9="]


@pytest.fixture(scope="module")
def moe():
    return load_model("tiny-moe")


@pytest.fixture
def args():
    return minirl.Args(dtype="float32", micro_tokens=600)


def sample(moe: tuple, world: object, dtype: str = "float32") -> Rollout:
    engine = HFEngine(moe[0], world, 0, dtype, 1024)
    policy = Policy(copy.deepcopy(moe[0]))
    engine.sync(policy)  # rounds the weights where the dtype asks for it
    return engine.generate([moe[1](prompt)["input_ids"] for prompt in PROMPTS], 8, 64, 1.0)


def nudged(moe: tuple) -> Policy:
    """The same model after a large update."""
    policy = Policy(copy.deepcopy(moe[0]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return policy


def fed(batch: Rollout) -> torch.Tensor:
    """True [N, S] on the tokens that the sampler read: all but the last sampled one."""
    end = batch.prompt_len + batch.mask.sum(dim=1).long()
    return torch.arange(batch.sequences.shape[1]) < end[:, None] - 1


def test_sampler_and_trainer_record_the_same_experts(moe, world, args):
    """In float32 with the same weights, prompt and response, token by token and layer by layer."""
    rollout = sample(moe, world)
    all_logprobs(Policy(copy.deepcopy(moe[0])), rollout, args, world)
    assert rollout.sampler_experts.shape == (32, rollout.sequences.shape[1], 2, 2)
    assert torch.equal(
        rollout.sampler_experts[fed(rollout)].sort(-1)[0], rollout.trainer_experts[fed(rollout)].sort(-1)[0]
    )
    differing, tokens = minirl.experts_differ(rollout)
    assert differing == 0 and tokens == fed(rollout).sum()
    assert len(rollout.trainer_experts[fed(rollout)].unique()) == 8  # all experts are in use


def test_replay_with_unchanged_weights_is_the_identity(moe, world, args):
    """Values and gradients."""
    rollout, gradients, values = sample(moe, world), [], []
    for replay in (False, True):
        policy = Policy(copy.deepcopy(moe[0]))
        if replay:
            rollout.replayed_experts = rollout.sampler_experts
        logp, entropy = response_logprobs(policy, rollout, 1.0)
        logp.sum().backward()
        values.append(logp.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    assert torch.allclose(*values, atol=1e-5) and torch.allclose(*gradients, rtol=1e-3, atol=1e-3)


def test_replay_with_changed_weights_keeps_the_selection_and_the_router_learns(moe, world, args):
    """The selection is the recorded one, where the free router would choose others; the router gets a gradient."""
    rollout, policy = sample(moe, world), nudged(moe)
    free, _ = all_logprobs(policy, rollout, args, world)
    assert minirl.experts_differ(rollout)[0] > 20
    rollout.replayed_experts = rollout.sampler_experts
    fixed, _ = all_logprobs(policy, rollout, args, world)
    assert minirl.experts_differ(rollout)[0] == 0 and not torch.allclose(free, fixed, atol=1e-2)
    response_logprobs(policy, rollout, 1.0)[0].sum().backward()
    routers = [p for name, p in policy.named_parameters() if name.endswith("gate.weight")]
    assert len(routers) == 2 and all(router.grad.norm() > 0.1 for router in routers)


def test_replayed_weights_come_from_the_current_router(moe, world):
    """Replaying indices [i, j] weighs the experts by the current softmax at i and j, renormalised to 1."""
    policy = nudged(moe)
    router = policy.routing
    block = next(m for m in policy.modules() if type(m).__name__ == "Qwen3MoeTopKRouter")
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([[0, 1], [2, 7], [3, 4], [6, 5], [1, 0]])
    router.replay = torch.stack([chosen, chosen], dim=1)
    logits, scores, indices = block(hidden)
    expected = logits.softmax(-1).gather(1, chosen)
    assert torch.equal(indices, chosen) and torch.allclose(scores, expected / expected.sum(-1, keepdim=True))


def test_a_low_precision_sampler_routes_some_tokens_elsewhere(moe, world, args):
    """float8 weights change some choices; R3 replays them, and the difference is gone."""
    rollout = sample(moe, world, "float8")
    policy = Policy(copy.deepcopy(moe[0]))
    all_logprobs(policy, rollout, args, world)
    assert 0 < minirl.experts_differ(rollout)[0] < 0.3 * fed(rollout).sum()
    rollout.replayed_experts = rollout.sampler_experts
    all_logprobs(policy, rollout, args, world)
    assert minirl.experts_differ(rollout)[0] == 0


def test_float8_rounds_the_decoder_matrices_only(moe, world):
    """At most 254 values a row and sign, relative error below 2^-4; router, norms and embedding stay as they are."""
    engine = HFEngine(moe[0], world, 0, "float8", 1024)
    engine.sync(Policy(copy.deepcopy(moe[0])))
    for (name, ours), theirs in zip(engine.lm.named_parameters(), moe[0].parameters()):
        rounded = theirs.dim() >= 2 and ".layers." in name and not name.endswith("gate.weight")
        error = ((ours.float() - theirs).abs() / theirs.abs().amax(-1, keepdim=True)).max()
        assert (error > 1e-2) == rounded and error < 2**-4 + 2**-8, name
