"""The sampler's contract."""

from collections.abc import Callable
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


@pytest.mark.parametrize(("temperature", "max_rows"), [(1.0, 1024), (0.6, 16)])
def test_sampler_and_trainer_agree(world, tiny, prompts, temperature, max_rows):
    """log μ of every sampled token equals the trainer's at that temperature, with prompts of
    different lengths together, and if prompts are decoded in turns."""
    engine = HFEngine(tiny[0], world, 0, "float32", max_rows)
    rollout = engine.generate(prompts, 8, 64, temperature)
    assert len(rollout) == 32
    logp, _ = response_logprobs(Policy(tiny[0]), rollout, temperature)
    assert torch.allclose(logp, rollout.rollout_logp, atol=1e-4)


def test_the_most_likely_tokens(world, tiny, prompts):
    """On request the sampler reports them with their log-probs, at most the whole vocabulary. The
    trainer's log-probs of the same ids equal them, in the same order, and are 0 on padding."""
    for asked, given in ((3, 3), (99, 18)):
        engine = HFEngine(tiny[0], world, 0, "float32", 16, top=asked)
        rollout = engine.generate(prompts, 8, 64, 0.6)
        assert rollout.sampler_top.shape == (*rollout.mask.shape, given)
        assert (rollout.sampler_top.diff(dim=-1) <= 0).all()
        response_logprobs(Policy(tiny[0]), rollout, 0.6)
        assert torch.allclose(rollout.top_logp, rollout.sampler_top, atol=1e-4)
        assert (rollout.top_logp[rollout.mask == 0] == 0).all() and rollout.top_logp.requires_grad
    places = rollout.mask.bool()
    assert torch.allclose(rollout.sampler_top[places].exp().sum(-1), torch.tensor(1.0), atol=1e-5)
    here = rollout.sampler_top_ids[places] == rollout.tokens[places][:, None]
    assert torch.equal(rollout.sampler_top[places][here], rollout.rollout_logp[places])


def test_masks_end_with_the_eos(engine, tiny, prompts):
    """Row i answers prompt i // n; mask covers the EOS; nothing but padding follows; a cut response
    has no EOS."""
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


def test_greedy_equals_generate(engine, tiny, prompts):
    """Temperature 0 gives what transformers' own greedy decoding gives, whichever rows finish
    first."""
    for prompt, row in zip(prompts, engine.generate(prompts, 1, 40, 0.0).response_ids()):
        given = torch.tensor([prompt])
        expected = tiny[0].generate(given, do_sample=False, max_new_tokens=40)[0, len(prompt) :]
        assert row == expected.tolist()


def test_samples_follow_the_distribution(engine, tiny, prompts):
    """The first token's frequencies over 4,000 samples are the model's probabilities."""
    rollout = engine.generate(prompts[:1], 4000, 1, 1.0)
    with torch.no_grad():
        probs = tiny[0](torch.tensor(prompts[:1])).logits[0, -1].softmax(-1)
    frequency = torch.bincount(rollout.tokens[:, 0], minlength=len(probs)) / 4000
    assert (frequency - probs).abs().max() < 5 * (0.25 / 4000) ** 0.5


def test_top_p_keeps_the_smallest_set_that_reaches_it(engine, tiny, prompts):
    """At temperature 3 the first tokens drawn are the most likely ones that together have
    probability 0.9, and all of these."""
    with torch.no_grad():
        probs = (tiny[0](torch.tensor(prompts[:1])).logits[0, -1] / 3).softmax(-1)
    mass, order = probs.sort(descending=True)
    smallest = order[: int((mass.cumsum(0) < 0.9).sum()) + 1]
    rollout = engine.generate(prompts[:1], 4000, 1, 3.0, top_p=0.9)
    assert set(rollout.tokens[:, 0].tolist()) == set(smallest.tolist())
    assert 1 < len(smallest) < (probs > 0.005).sum()  # others are cut, which would be drawn


def test_runs_repeat(tiny, world, prompts):
    """The same seed gives the same samples; another seed or rank gives others. The state carries on
    from where it was."""

    def make(seed: int, rank: int = 0) -> HFEngine:
        return HFEngine(tiny[0], World(rank, 1, world.device), seed, "float32", 1024)

    def sampled(engine: HFEngine) -> list[list[int]]:
        return engine.generate(prompts, 4, 20, 1.0).response_ids()

    engine, resumed = make(0), make(5)
    first = sampled(engine)
    assert first == sampled(make(0)) != sampled(make(1))
    assert first != sampled(make(0, rank=1))
    resumed.load_state_dict(engine.state_dict())
    assert sampled(engine) == sampled(resumed)


def test_prefixes_are_continued_in_one_batch(engine, tiny, prompts):
    """A prefix stands before the sample, is part of the response, counts towards the limit, and is
    not in the mask."""
    lm, tokenizer = tiny
    texts = ["7*8=56;", "", "3*3=9;9*3=27;", "#"]
    prefixes = [tokenizer(text)["input_ids"] if text else [] for text in texts]
    rollout = engine.generate(prompts, 8, 20, 1.0, prefixes)
    for i, row in enumerate(rollout.response_ids()):
        prefix = prefixes[i // 8]
        assert row[: len(prefix)] == prefix and len(row) <= 20
        assert int(rollout.mask[i].sum()) == len(row) - len(prefix)
        assert int(rollout.prefix_len[i]) == len(prefix)
    logp, _ = response_logprobs(Policy(lm), rollout, 1.0)
    assert torch.allclose(logp, rollout.rollout_logp, atol=1e-4)


def verifier(args: Args) -> Callable[[float], dict]:
    """Return `Run.check_sampler` of a run that has just begun, as a function of the gap."""
    run, one = SimpleNamespace(args=args, apart=0, world=ALONE), torch.ones(1, 1)

    def check(gap: float) -> dict:
        return Run.check_sampler(run, [Rollout(old_logp=gap * one, rollout_logp=0 * one, mask=one)])

    return check


def test_check_fires_where_the_gap_stays(world):
    """One bad step of a healthy run (long degenerate answers) is forgiven, but not the third in a
    row. Ten times the tolerance, or NaN, is never forgiven."""
    step = verifier(Args(dtype="float32"))
    for gap in (2e-3, 2e-3, 1e-4, 2e-3, 2e-3):
        step(gap)
    with pytest.raises(RunStopped, match="--sampler_tolerance"):
        step(2e-3)
    for gap in (0.011, float("nan")):
        with pytest.raises(RunStopped):
            verifier(Args(dtype="float32"))(gap)


def test_micro_batches_stay_within_the_budget(world):
    """Each has at most max_tokens padded tokens; a longer row stands alone. (tests/loop checks that
    every row is in one, also if another rank needs more.)"""
    lengths = torch.randint(5, 80, (64,), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(64, 1)
    batch = Rollout(tokens=mask, mask=mask, prompt_len=lengths)
    for budget in (1, 100, 400, 10**6):
        for rows in micro_batches(DENSE, batch, budget, world):
            assert len(rows) == 1 or len(rows) * lengths[rows].max() <= budget
