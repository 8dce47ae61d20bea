"""The sampler's contract."""

import math
from types import SimpleNamespace

import pytest
import torch
from common.batch import Rollout
from common.cli import RunStopped
from common.distributed import ALONE, World
from common.logprobs import Policy, micro_batches, response_logprobs
from common.rollout import HFEngine
from common.run import Run
from grpo import Args

DENSE = SimpleNamespace(lm=torch.nn.Module())  # as a policy without experts
PROMPTS = ["7*8-9+6=", "1+2=", "3*3*3*3*3*3*3=", "9-9="]


@pytest.fixture
def engine(tiny, world):
    return HFEngine(tiny[0], world, seed=0, dtype="float32", max_rows=1024)


@pytest.fixture
def prompts(tiny):
    return [tiny[1](prompt)["input_ids"] for prompt in PROMPTS]


def test_masks_end_with_the_eos(engine, tiny, prompts):
    """Row i answers prompt i // n. After the EOS is padding. A cut response has no EOS."""
    eos = tiny[1].eos_token_id
    rollout = engine.generate(prompts, 16, 12, 1.0)
    assert not rollout.finished.all() and rollout.finished.any()
    for i, row in enumerate(rollout.response_ids()):
        length = int(rollout.mask[i].sum())
        assert rollout.tokens[i, :length].tolist() == row
        assert (rollout.tokens[i, length:] == 0).all()
        assert (row[-1] == eos) == bool(rollout.finished[i])
        assert eos not in row[:-1] and (rollout.finished[i] or length == 12)
        start = int(rollout.prompt_len[i])
        assert rollout.sequences[i, :start].tolist() == prompts[i // 16]
        assert rollout.sequences[i, start : start + length].tolist() == row


def test_samples_follow_the_distribution(engine, tiny, prompts):
    """The first token's frequencies over 4,000 samples are the model's probabilities."""
    rollout = engine.generate(prompts[:1], 4000, 1, 1.0)
    with torch.no_grad():
        probs = tiny[0](torch.tensor(prompts[:1])).logits[0, -1].softmax(-1)
    frequency = torch.bincount(rollout.tokens[:, 0], minlength=len(probs)) / 4000
    assert (frequency - probs).abs().max() < 5 * (0.25 / 4000) ** 0.5


def test_top_p_keeps_the_smallest_set_that_reaches_it(engine, tiny, prompts):
    """All of the set's tokens are drawn at temperature 3, and no other."""
    with torch.no_grad():
        probs = (tiny[0](torch.tensor(prompts[:1])).logits[0, -1] / 3).softmax(-1)
    mass, order = probs.sort(descending=True)
    smallest = order[: int((mass.cumsum(0) < 0.9).sum()) + 1]
    rollout = engine.generate(prompts[:1], 4000, 1, 3.0, top_p=0.9)
    assert set(rollout.tokens[:, 0].tolist()) == set(smallest.tolist())
    assert 1 < len(smallest) < (probs > 0.005).sum()  # others are cut, which would be drawn


def test_runs_repeat(tiny, world, prompts):
    """The same seed gives the same samples; another seed or rank gives others."""

    def sampled(seed: int, rank: int) -> list[list[int]]:
        engine = HFEngine(tiny[0], World(rank, 1, world.device), seed, "float32", 1024)
        return engine.generate(prompts, 4, 20, 1.0).response_ids()

    first = sampled(0, 0)
    assert first == sampled(0, 0) and first not in (sampled(1, 0), sampled(0, 1))


@pytest.mark.parametrize("max_rows", [1024, 16])
def test_prefixes_are_continued(engine, tiny, prompts, max_rows):
    """A prefix is part of the response and counts towards the limit, but is not in the mask. log μ
    of every sampled token is the trainer's at that temperature, also if prompts take turns."""
    lm, tokenizer = tiny
    engine.max_rows = max_rows
    texts = ["7*8=56;", "", "3*3=9;9*3=27;", "#"]
    prefixes = [tokenizer(text)["input_ids"] if text else [] for text in texts]
    rollout = engine.generate(prompts, 8, 20, 0.6, prefixes)
    for i, row in enumerate(rollout.response_ids()):
        prefix = prefixes[i // 8]
        assert row[: len(prefix)] == prefix and len(row) <= 20
        assert int(rollout.mask[i].sum()) == len(row) - len(prefix)
        assert int(rollout.prefix_len[i]) == len(prefix)
    logp, _ = response_logprobs(Policy(lm), rollout, 0.6)
    assert torch.allclose(logp, rollout.rollout_logp, atol=1e-4)


@pytest.mark.parametrize("gaps", [(2e-3, 2e-3, 1e-4, 2e-3, 2e-3, 2e-3), (0.011,), (math.nan,)])
def test_check_fires_where_the_gap_stays(gaps):
    """One bad step of a healthy run (long degenerate answers) is forgiven, but not the third in a
    row. Ten times the tolerance, or NaN, is never forgiven."""
    run = SimpleNamespace(args=Args(dtype="float32"), gaps_in_a_row=0, world=ALONE)
    ones = torch.ones(1, 1)
    steps = [Rollout(old_logp=gap * ones, rollout_logp=0 * ones, mask=ones) for gap in gaps]
    for step in steps[:-1]:
        Run.check_sampler(run, [step])
    with pytest.raises(RunStopped, match="--sampler_tolerance"):
        Run.check_sampler(run, [steps[-1]])


def test_micro_batches_stay_within_the_budget(world):
    """A longer row stands alone. (tests/loop checks that every row is in one.)"""
    lengths = torch.randint(5, 80, (64,), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(64, 1)
    batch = Rollout(tokens=mask, mask=mask, prompt_len=lengths)
    for budget in (1, 100, 400, 10**6):
        for rows in micro_batches(DENSE, batch, budget, world):
            assert len(rows) == 1 or len(rows) * lengths[rows].max() <= budget
