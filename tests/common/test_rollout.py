"""The sampler's contract."""

import copy
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from common import logprobs as rollout_module
from common.batch import Rollout
from common.distributed import RunStopped
from common.logprobs import Policy, micro_batches, response_logprobs, sampler_gap
from common.plumbing.model import load_model
from common.rollout import HFEngine
from common.plumbing.tracking import Run
from grpo import Args

DENSE = SimpleNamespace(lm=torch.nn.Module())  # as a policy without experts
PROMPTS = ["7*8-9+6=", "1+2=", "3*3*3*3*3*3*3=", "9-9="]


@pytest.fixture
def engine(tiny, world):
    return HFEngine(tiny[0], world, seed=0, dtype="float32", max_rows=1024)


@pytest.fixture
def prompts(tiny):
    return [tiny[1](prompt)["input_ids"] for prompt in PROMPTS]


@pytest.fixture
def args():
    return Args(dtype="float32")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_and_trainer_agree(engine, tiny, prompts, temperature):
    """log μ of every sampled token, prompts of different lengths together, equals the trainer's at
    that temperature."""
    rollout = engine.generate(prompts, 16, 64, temperature)
    logp, _ = response_logprobs(Policy(tiny[0]), rollout, temperature)
    assert torch.allclose(logp, rollout.rollout_logp, atol=1e-4)
    other, _ = response_logprobs(Policy(tiny[0]), rollout, temperature + 0.3)
    assert not torch.allclose(other, rollout.rollout_logp, atol=1e-2)


def test_masks_end_with_the_eos(engine, tiny, prompts):
    """Row i answers prompt i // n; mask covers the EOS; nothing but padding follows; a cut response
    has no EOS."""
    lm, tokenizer = tiny
    rollout = engine.generate(prompts, 32, 12, 1.0)
    assert not rollout.finished.all() and rollout.finished.any()
    for i, row in enumerate(rollout.response_ids()):
        length = int(rollout.mask[i].sum())
        assert rollout.tokens[i, :length].tolist() == row
        assert (rollout.tokens[i, length:] == 0).all()
        assert (row[-1] == tokenizer.eos_token_id) == bool(rollout.finished[i])
        assert tokenizer.eos_token_id not in row[:-1] and (rollout.finished[i] or length == 12)
        start = int(rollout.prompt_len[i])
        assert rollout.sequences[i, :start].tolist() == prompts[i // 32]
        assert rollout.sequences[i, start : start + length].tolist() == row


def test_greedy_equals_generate(engine, tiny, prompts):
    """Temperature 0 gives what transformers' own greedy decoding gives, whichever rows finish
    first."""
    lm, tokenizer = tiny
    for prompt, row in zip(prompts, engine.generate(prompts, 1, 40, 0.0).response_ids()):
        expected = lm.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40)[
            0, len(prompt) :
        ]
        assert row == expected.tolist()


def test_samples_follow_the_distribution(engine, tiny, prompts):
    """The first token's frequencies over 4,000 samples are the model's probabilities."""
    rollout = engine.generate(prompts[:1], 4000, 1, 1.0)
    with torch.no_grad():
        probs = tiny[0](torch.tensor(prompts[:1])).logits[0, -1].softmax(-1)
    frequency = torch.bincount(rollout.tokens[:, 0], minlength=len(probs)) / 4000
    assert (frequency - probs).abs().max() < 5 * (0.25 / 4000) ** 0.5


def test_runs_repeat(tiny, world, prompts):
    """Same seed, same samples; another seed or rank, others; the state carries on where it was."""

    def make(seed: int) -> HFEngine:
        return HFEngine(tiny[0], world, seed, "float32", 1024)

    first, again, other = (make(seed).generate(prompts, 8, 40, 1.0).tokens for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not (first.shape == other.shape and torch.equal(first, other))
    engine, resumed = make(0), make(5)
    engine.generate(prompts, 8, 40, 1.0)
    resumed.load_state_dict(engine.state_dict())
    assert torch.equal(
        engine.generate(prompts, 8, 40, 1.0).tokens, resumed.generate(prompts, 8, 40, 1.0).tokens
    )
    second_rank = copy.copy(world)
    second_rank.rank = 1
    apart = HFEngine(tiny[0], second_rank, 0, "float32", 1024).generate(prompts, 8, 40, 1.0).tokens
    assert not (first.shape == apart.shape and torch.equal(first, apart))


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


def test_chunks_of_rows_give_one_rollout(tiny, world, prompts):
    """With a small max_rows the prompts are decoded in turns; the result is whole, in order and
    still exact."""
    engine = HFEngine(tiny[0], world, 0, "float32", max_rows=16)
    rollout = engine.generate(prompts, 8, 64, 1.0)
    assert len(rollout) == 32
    logp, _ = response_logprobs(Policy(tiny[0]), rollout, 1.0)
    assert torch.allclose(logp, rollout.rollout_logp, atol=1e-4)


def judge(args: Args) -> Callable[[float], dict]:
    """`Run.trusted` of a run that has just begun, as a function of the gap."""
    run = SimpleNamespace(args=args, apart=0, say=print)
    return lambda gap: Run.trusted(run, {"sampler_gap": gap})


def test_check_fires_when_the_sync_is_skipped(tiny, world, prompts, args):
    """Stale sampler weights stop the run after three steps; after the sync the same policy
    passes."""
    lm = copy.deepcopy(tiny[0])
    engine, policy = HFEngine(lm, world, 0, "float32", 1024), Policy(lm)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.02)

    def measure() -> dict:
        rollout = engine.generate(prompts, 16, 64, 1.0)
        with torch.no_grad():
            rollout.old_logp = response_logprobs(policy, rollout, 1.0)[0]
        return step(sampler_gap([rollout], world)["sampler_gap"])

    step = judge(args)
    measure(), measure()
    with pytest.raises(RunStopped, match="weights not synced"):
        measure()
    engine.sync(policy)
    assert measure()["sampler_gap"] < 1e-5


def test_check_fires_on_nan(world, args):
    """A NaN log-prob is a disagreement too."""
    one = torch.ones(1, 1)
    batch = Rollout(old_logp=one * float("nan"), rollout_logp=-one, mask=one)
    with pytest.raises(RunStopped):
        judge(args)(sampler_gap([batch], world)["sampler_gap"])


def test_check_fires_where_the_gap_stays(args):
    """One bad step of a healthy run (long degenerate answers) is forgiven, the third in a row is
    not, and ten times the tolerance never."""
    step = judge(args)
    for gap in (2e-3, 2e-3, 1e-4, 2e-3, 2e-3):
        step(gap)
    with pytest.raises(RunStopped, match="--sampler_tolerance"):
        step(2e-3)
    with pytest.raises(RunStopped):
        judge(args)(0.011)


def test_sampler_kl_is_the_k3_estimate(world, args):
    """Two tokens with known gaps, padding ignored."""
    gap = torch.tensor([[1e-4, -3e-4, 5.0]])
    batch = Rollout(
        old_logp=gap - 1, rollout_logp=-torch.ones(1, 3), mask=torch.tensor([[1.0, 1, 0]])
    )
    measured = sampler_gap([batch, batch], world)
    assert abs(measured["sampler_gap"] - 2e-4) < 1e-6
    assert abs(measured["sampler_kl"] - (1e-8 / 2 + 9e-8 / 2) / 2) < 1e-7


def test_micro_batches_cover_rows_within_the_budget(engine, prompts, world, monkeypatch):
    """Every row once, at most max_tokens padded tokens each (one longer row stands alone), similar
    lengths together."""
    rollout = engine.generate(prompts, 16, 64, 1.0)
    lengths = rollout.prompt_len + rollout.mask.sum(1).long()
    for budget in (1, 100, 400, 10**6):
        micros = micro_batches(DENSE, rollout, budget, world)
        assert sorted(torch.cat(micros).tolist()) == list(range(64))
        assert all(
            len(rows) == 1 or len(rows) * int(lengths[rows].max()) <= budget for rows in micros
        )
    padded = sum(
        len(rows) * int(lengths[rows].max()) for rows in micro_batches(DENSE, rollout, 400, world)
    )
    # Halfway between all padding and none
    assert padded < 0.5 * (64 * int(lengths.max()) + int(lengths.sum()))
    # A rank whose rows fit into fewer micro-batches splits them until it has as many as the others.
    monkeypatch.setattr(rollout_module, "global_sum", lambda values, world: {"micros_max": 9.0})
    micros = micro_batches(DENSE, rollout, 10**6, world)
    assert len(micros) == 9 and sorted(torch.cat(micros).tolist()) == list(range(64))


def test_long_rows_share_micro_batches(world):
    """Rows of equal length fill a micro-batch to the brim, whatever the length: none of it is
    padding."""
    for length in (50, 600, 2000):
        batch = of_lengths([length] * 40)
        micros = micro_batches(DENSE, batch, 16_384, world)
        assert max(map(len, micros)) == min(40, 16_384 // length)


def test_little_of_a_micro_batch_is_padding(world):
    """Lengths from 20 to 4000: every large micro-batch is mostly real tokens, small ones end soon,
    no row is lost."""
    lengths = [20 * (i + 1) for i in range(200)]
    micros = micro_batches(DENSE, of_lengths(lengths), 16_384, world)
    assert sorted(row for rows in micros for row in rows.tolist()) == list(range(200))
    padded = [len(rows) * max(lengths[row] for row in rows.tolist()) for rows in micros]
    assert sum(lengths) / sum(padded) > 0.8 and max(padded) <= 16_384 and len(micros) < 60


def test_a_pass_over_experts_is_dearer(tiny, world, monkeypatch):
    """Where a pass costs more, rows of several lengths share one."""
    monkeypatch.setitem(rollout_module.PASS_TOKENS, "cpu", (10, 10_000))
    batch = of_lengths([5, 5, 50, 50, 500, 500])
    policies = Policy(tiny[0]), Policy(load_model("tiny-moe")[0])
    passes = [len(micro_batches(policy, batch, 16_384, world)) for policy in policies]
    assert passes == [3, 1]


def test_no_division_into_micro_batches_costs_less(world, monkeypatch):
    """Against all divisions of the sorted rows: padded tokens, and a fixed price for each pass."""
    monkeypatch.setitem(rollout_module.PASS_TOKENS, "cpu", (30, 30))

    def cost(groups: list[list[int]]) -> int:
        return sum(30 + len(group) * max(group) for group in groups)

    for seed in range(20):
        rng = random.Random(seed)
        lengths = sorted(rng.randrange(1, 60) for _ in range(8))
        budget = rng.choice([50, 120, 1000])
        divisions = []
        for cuts in itertools.product([False, True], repeat=7):
            edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), 8]
            groups = [lengths[a:b] for a, b in itertools.pairwise(edges)]
            if all(len(group) == 1 or len(group) * max(group) <= budget for group in groups):
                divisions.append(groups)
        found = [
            [lengths[row] for row in rows.tolist()]
            for rows in micro_batches(DENSE, of_lengths(lengths), budget, world)
        ]
        assert sorted(itertools.chain(*found)) == lengths
        assert cost(found) == min(map(cost, divisions)), (lengths, budget, found)


def of_lengths(lengths: list[int]) -> Rollout:
    n = len(lengths)
    mask = torch.zeros(n, 1)
    return Rollout(tokens=mask, mask=mask, prompt_len=torch.tensor(lengths))


def test_an_empty_micro_batch_takes_part(world, tiny):
    """A rank that has no row left still makes its forward and backward passes: zeros, and gradients
    of exactly 0."""
    lm, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    rollout = HFEngine(lm, world, 0, "float32", 64).generate(
        [tokenizer("1+2=")["input_ids"]], 4, 16, 1.0
    )
    policy = Policy(lm)
    logp, entropy = response_logprobs(policy, rollout.rows(torch.tensor([], dtype=torch.long)), 1.0)
    assert logp.shape == entropy.shape == (0, rollout.mask.shape[1])
    logp.sum().backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in policy.parameters())
    assert any(p.grad is not None for p in policy.parameters())
