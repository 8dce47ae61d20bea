"""Blockwise advantages: one block has GRPO's mean, two blocks have one each. Also where the blocks
are cut, and the baseline of an answer."""

from types import ModuleType, SimpleNamespace

import torch
from common.cli import BadInput
from common.distributed import World
from torch import Tensor

from . import CENTRED, SIDES, check_clip_statistics, check_parts_add_up, loss_of, matches, no_kl
from . import written_here

ALONE = World(0, 1, torch.device("cpu"))


def check_fixture(module: ModuleType) -> None:
    """With one block it is GRPO without KL: value and gradient of TRL, OpenRLHF and others."""
    matches(module, "grpo_eps0.2_seqmean")


def two_blocks() -> dict[str, Tensor]:
    """Rows: three tokens of working and two of answer; no answer; one of each, and padding."""
    mask = torch.tensor([[1.0] * 5, [1.0] * 5, [1.0, 1, 0, 0, 0]]).double()
    working = torch.tensor([[1.0, 1, 1, 0, 0], [1.0] * 5, [1.0, 0, 0, 0, 0]]).double()
    advantages = torch.tensor([[0.5, -0.25, 1.0], [-1.0, 9.0, 0.0]]).double()
    logp = torch.full((3, 5), -0.5).double()
    return {"logp": logp, "old_logp": logp.clone(), "mask": mask, "working": working} | dict(
        zip(("working_advantages", "advantages"), advantages)
    )


def check_each_block_has_its_own(module: ModuleType) -> None:
    """Its tokens have the weight Â_k / |T_k|; padding and a missing answer have none."""
    batch = two_blocks()
    batch["logp"].requires_grad_()
    loss, stats = loss_of(module, module.Args(), **batch)
    loss.backward()
    rows = [[0.5 / 3] * 3 + [-0.5] * 2, [-0.05] * 5, [1.0, 0, 0, 0, 0]]
    assert torch.allclose(batch["logp"].grad, -torch.tensor(rows).double() / 3)
    assert abs(loss.item() + (0.5 - 1 - 0.25 + 1 + 0) / 3) < 1e-12
    assert stats["advantages_apart"] == (1.5 + 9.25 + 1.0, 3)


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

    eos_token_id = ord("$")

    def __call__(self, text: str, add_special_tokens: bool) -> dict:
        return {"input_ids": [ord(letter) for letter in text]}

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


def check_marker(module: ModuleType) -> None:
    """The marker is one token of the model; otherwise the error is one line."""
    assert module.marker_token(no_kl(module, marker="="), Letters()) == ord("=")
    for marker in ("</think>", "$"):  # eight tokens; the one that ends a response
        try:
            module.marker_token(no_kl(module, marker=marker), Letters())
        except BadInput as error:
            assert f"--marker {marker}" in str(error)
        else:
            raise AssertionError("such a marker is taken")


CHECKS = [*written_here(globals()), *CENTRED]
CHECKS += [check_parts_add_up, check_clip_statistics]
MEANS = "(objective * block).sum(1) / block.sum(1).clamp(min=1)"
A = "torch.where(working > 0, batch.working_advantages[:, None], batch.advantages[:, None])"
MUTANTS = SIDES | {
    "the answer's for both": (A, "batch.advantages[:, None] + 0 * working"),
    "one mean for both": (MEANS, "(objective * block).sum(1) / mask.sum(1)"),
    "padding in the answer": ("mask * (1 - working)", "(1 - working)"),
    "outcome is ignored": (
        "working[:, :, None] == working[:, None]",
        "working[:, :, None] == working[:, :, None]",
    ),
    "advantage the other way round": (
        "rewards[:, :, None] - rewards[:, None]",
        "rewards[:, None] - rewards[:, :, None]",
    ),
    "the first marker": (
        "found.flip(1).cumsum(1).flip(1) > 0",
        "found.cumsum(1) - found.int() == 0",
    ),
    "markers of the padding": (
        "(rollout.tokens == marker) & rollout.mask.bool()",
        "rollout.tokens == marker",
    ),
    "no marker, no working": ("(ahead | ~found.any(1, keepdim=True))", "ahead"),
    "sign": ("return -sum(means)", "return sum(means)"),
}
