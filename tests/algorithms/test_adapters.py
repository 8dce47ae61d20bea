"""The door by which numbers computed elsewhere are checked."""

import pytest
import torch

from tests import adapters
from checks import FIXTURE, toy_batch


def test_adapters_open_the_same_door():
    """The fixture's loss, float64 throughout; flags reach it, and one that is not there is
    refused."""
    batch = toy_batch() | {"entropy": torch.zeros(6, 6)}
    batch["rollout_logp"] = batch["old_logp"]
    loss, stats = adapters.policy_loss("grpo", **batch)
    assert abs(loss.item() - FIXTURE["cases"]["grpo_eps0.2_seqmean"]["loss"]) < 1e-8
    assert 0 < stats["clip_share"] < 1
    assert adapters.policy_loss("grpo", **batch, clip_low=9.0, clip_high=9.0)[0] != loss
    with pytest.raises(TypeError):
        adapters.policy_loss("grpo", **batch, clip_hihg=0.3)
    expected = torch.tensor([[1.5, -0.5, -0.5, -0.5]])
    found = adapters.advantages("grpo", torch.tensor([[1.0, 0, 0, 0]]))
    assert torch.allclose(found, expected, atol=1e-5)
