"""The door by which numbers computed elsewhere are checked."""

import pytest
import torch

from tests import adapters
from checks import FIXTURE, toy_batch


def test_adapters_open_the_same_door():
    """tests/adapters.py gives the fixture's numbers, float64 throughout, and refuses a flag that is
    not there."""
    case, batch = FIXTURE["cases"]["grpo_eps0.2_seqmean"], toy_batch()
    extra = {"rollout_logp": batch["old_logp"], "entropy": torch.zeros_like(batch["mask"])}
    loss, stats = adapters.policy_loss("grpo", **batch, **extra)
    assert loss.dtype == torch.float64
    assert abs(loss.item() - case["loss"]) < 1e-8
    assert 0 < stats["clip_share"] < 1
    wide = adapters.policy_loss("grpo", **batch, **extra, clip_low=9.0, clip_high=9.0)[0]
    assert not torch.isclose(wide, loss)
    with pytest.raises(TypeError):
        adapters.policy_loss("grpo", **batch, **extra, clip_hihg=0.3)
    rewards = torch.tensor([[1.0, 0, 0, 0]])
    expected = torch.tensor([[1.5, -0.5, -0.5, -0.5]])
    assert torch.allclose(adapters.advantages("grpo", rewards), expected, atol=1e-5)
    assert adapters.reward("arithmetic", "7*8=56#56", "56") == 1.0
