"""Lab bound: its exact variances."""

from types import SimpleNamespace

import pytest
import torch
from labs.bound.__main__ import G, in_groups, random_prompt, rloo


@pytest.mark.parametrize("stale, as_written", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_the_variance_of_rloo_is_that_of_all_groups(stale, as_written, monkeypatch):
    """The U-statistic against the enumeration of every group of eight."""
    others = SimpleNamespace(advantages=lambda r: r - (r.sum(1, keepdim=True) - r) / (G - 1))
    draw = torch.Generator().manual_seed(1)
    theta = torch.randn(6, 3, generator=draw, dtype=torch.float64)
    one = random_prompt(2, bool(stale), bool(as_written), draw, theta)
    monkeypatch.setattr("labs.bound.__main__.toy.load", lambda name: others)
    mean, variance = rloo(one)
    every_mean, every_variance = in_groups(one, "others")
    assert torch.allclose(mean, every_mean) and torch.allclose(variance, every_variance)
