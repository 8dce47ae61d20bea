"""Which groups of a mini-batch samples.jsonl keeps."""

import torch
from common.batch import Rollout
from common.distributed import ALONE
from common.records.samples import Samples


def test_three_groups_are_kept():
    """Of problems 4 to 8 three are kept, each once: the first with different rewards, the one with
    the largest |weight|, and the one with the lowest reward."""
    rewards = torch.tensor([1.0, 1, 0, 1, 0, 1, 0, 0, 1, 1])
    weight = torch.tensor([0.0, 0, 1, -1, 3, -3, 0, 0, 0, 0])[:, None].repeat(1, 2)  # [N, T]
    mask = torch.ones(10, 2)
    weight[8:, 1], mask[8:, 1] = 9.0, 0.0  # padding
    problem = torch.arange(4, 9).repeat_interleave(2)
    batch = Rollout(problem=problem, rewards=rewards, weight=weight, mask=mask)
    samples = Samples(task=None, args=None, world=ALONE)
    assert samples._chosen(batch) == [5, 6, 7]
    batch.rewards = torch.ones(10)
    assert samples._chosen(batch) == [4, 6]
