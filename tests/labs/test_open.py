"""The programs behind docs/open.md: credit by step, a slope."""

import pytest
import torch
from common.batch import Rollout
from common.model import load_model
from labs.credit.steps import token_advantages
from labs.ladder.__main__ import PARAMETERS, slope
from labs.warning.rules import fell

# A group's responses to 7*8-9=, its rewards, and the credit of each block
GROUP = {
    "7*8=56;56-9=47#47": (1, [0.25, 0.5, 0.0]),
    "7*8=56;56-9=46#46": (0, [0.25, -0.5, 0.0]),
    "7*8=55;55-9=46#46": (0, [-0.25, 0.0, 0.0]),  # nothing after the first mistake
    "#12": (0, [-0.25]),
}


def test_a_step_has_the_change_of_the_mean_reward_as_its_credit():
    """On its own tokens, `;` and EOS included, over the group's std."""
    tokenizer = load_model("tiny")[1]
    rows = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in GROUP]
    blank = [[0.0] * len(row) for row in rows]
    prompts = [tokenizer("7*8-9=").input_ids]
    eos = [tokenizer.eos_token_id]
    batch = Rollout.pack(prompts=prompts, tokens=rows, logps=blank, eos=eos, device="cpu")
    batch.rewards = torch.tensor([float(reward) for reward, _ in GROUP.values()])
    letters = [t if len(t) == 1 else "." for t in tokenizer.convert_ids_to_tokens(range(18))]
    found = 0.5 * token_advantages(batch, ["7*8-9="], letters, None)  # std is 1/2
    for row, (text, (_, credits)) in zip(found, GROUP.items()):
        lengths = [4] if len(credits) == 1 else [7, 7, 4]
        expected = torch.tensor(credits).repeat_interleave(torch.tensor(lengths))
        assert row[: len(expected)].tolist() == pytest.approx(expected.tolist(), abs=1e-5), text
        assert not row[len(expected) :].any()


def test_a_slope_is_the_power_and_a_fall_stays():
    points = {size: [count**-0.5, 1.01 * count**-0.5] for size, count in PARAMETERS.items()}
    assert slope(points).startswith("-0.50 ± 0.0")
    ends = {0.63: True, 0.7: False}  # below 0.8 of 0.8, or back
    for end, falls in ends.items():
        assert fell({"sampled@": [0, 5, 10, 15], "sampled": [0.5, 0.8, 0.6, end]}) == falls
