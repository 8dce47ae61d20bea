"""Blockwise advantages: where the blocks are cut, and the baseline of an answer."""

from types import ModuleType, SimpleNamespace

import torch
from common.distributed import ALONE
from torch import Tensor

from . import CENTRED, Batch, clipped, cut_shares, no_kl, written_here


def token_advantages(b: Batch) -> Tensor:
    """`[n, T]`: those of the working on its tokens, those of the answer on the rest."""
    return b.working * b.working_A[:, None] + (1 - b.working) * b.A[:, None]


def objective(b: Batch) -> tuple[Tensor, int]:
    """A mean over the working plus a mean over the answer, if there is one."""
    x, J = clipped(b.r, token_advantages(b), b.args), 0.0
    for block in (b.mask * b.working, b.mask * (1 - b.working)):
        J = J + (x * block).sum(1) / block.sum(1).clip(min=1)
    return J.mean(), len(b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """clip_share and its sides; advantages_apart is the mean distance of the two advantages."""
    found = cut_shares(b, token_advantages(b))
    return found | {"advantages_apart": ((b.working_A - b.A).abs().sum(), len(b.A))}


CASES = [{}, {"clip_high": 0.28}]

WORKING = torch.tensor([[0.4, 0.4, 0.4, 0.0, 0.0, 0.2]])
ANSWER = torch.tensor([[1.0, 1.0, 0.0, 0.0, 1.0, 1.0]])
EXPECTED = {"none": [1, 1, 0, 0, 1, 1], "group": [1 / 3, 1 / 3, -2 / 3, -2 / 3, 1 / 3, 1 / 3]}
EXPECTED["outcome"] = [1 / 3, 1 / 3, -2 / 3, -0.5, 0.5, 0]


def check_baselines(module: ModuleType) -> None:
    """By hand: no baseline, the group, the answers whose working has the same reward (the last one
    is alone), and, over two groups, the batch."""
    for name, expected in EXPECTED.items():
        args = no_kl(module, baseline=name)
        found = module.answer_advantages(args, ANSWER, WORKING, ALONE)
        assert torch.allclose(found, torch.tensor([expected]).float(), atol=1e-6), name
    two = torch.cat([ANSWER, torch.zeros(1, 6)])
    found = module.answer_advantages(no_kl(module, baseline="batch"), two, two, ALONE)
    assert torch.allclose(found, two - 1 / 3)


class Letters:
    """A tokenizer with one token per letter."""

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return ["".join(map(chr, row)) for row in rows]


def responses(texts: tuple[str, ...]) -> SimpleNamespace:
    """A rollout of these texts, padded with the marker."""
    width = max(map(len, texts))
    tokens = torch.tensor([[ord(letter) for letter in text.ljust(width, "#")] for text in texts])
    mask = torch.tensor([[float(i < len(text)) for i in range(width)] for text in texts])
    ids = [[ord(letter) for letter in text] for text in texts]
    return SimpleNamespace(tokens=tokens, mask=mask, response_ids=lambda: ids)


def check_cuts(module: ModuleType) -> None:
    """The working ends with the last marker; without a marker there is no answer; padding is
    neither. The verifier sees the marker in both parts."""
    rollout = responses(("a;b#12", "a#b#3", "#7", "a;b;c", "ab#"))
    rollout.working = module.working_mask(rollout, ord("#"))
    assert rollout.working.sum(1).tolist() == [4, 4, 1, 5, 3]
    assert (rollout.working <= rollout.mask).all() and rollout.working[0].tolist() == [1] * 4 + [
        0
    ] * 2
    first, second = module.block_texts(rollout, ord("#"), Letters())
    assert first == ["a;b#", "a#b#", "#", "a;b;c", "ab#"]
    assert second == ["#12", "#3", "#7", "#", "#"]


CHECKS = [*written_here(globals()), *CENTRED]
