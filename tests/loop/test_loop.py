"""The loops, in two ways. Six files whose loss needs no columns of its own: what reaches optimiser,
engine and log is computed a second time, in float64, without `main` and `common`. All files that
change the loop (tool has checks/tool.py): any micro-batches and any number of ranks give the same
gradients and metrics. Mutants turn one red."""

import copy
from functools import partial
from types import ModuleType, SimpleNamespace

import checks
import pytest
import torch
from checks.files import ALGORITHMS, NINE
from checks.loop_mutants import DAMAGES
from common.distributed import ALONE, setup
from torch import Tensor

from tests.helpers import module_of
from tests.loop.answers import HELD_OUT, LIMIT, SAMPLES, TRAIN, G, M, P, TEMPERATURE, distributions
from tests.loop.answers import log_probs, padded, respond, rewards_of, sampled, sampler_logp
from tests.loop.answers import untrained
from tests.loop.ranks import damaged, on_ranks
from tests.loop.record import Record, flat, record

PLAIN = ["grpo", "gspo", "sapo", "maspo", "stapo", "minirl"]
OTHERS = [name for name in ALGORITHMS if name not in NINE and checks.run_of(name).stored]
slow = pytest.mark.slow


# A second loop


def model(parameters: list[Tensor]) -> torch.nn.Module:
    lm = copy.deepcopy(untrained())
    for own, value in zip(lm.parameters(), parameters, strict=True):
        own.data.copy_(value)
    return lm


def prompts_of(step: int) -> list[str]:
    return [TRAIN[(step * P + i) % len(TRAIN)] for i in range(P)]


def minibatch(module: ModuleType, records: list[Record], update: int) -> SimpleNamespace:
    """Return all columns of a whole mini-batch, by the weights that each policy had then, the
    file's own loss of them, and its gradient."""
    (step, part), weights = divmod(update, M), [seen["parameters"] for seen in records[0].updates]
    share = P // len(records) // M  # prompts of a rank
    rows = []
    for rank in range(len(records)):
        start = (rank * M + part) * share
        for prompt in prompts_of(step)[start : start + share]:
            rows += respond(prompt, G)
    A = module.advantages(rewards_of(rows).view(-1, G)).flatten()
    lm, old, reference = model(weights[update]), model(weights[step * M]), model(weights[0])
    every = distributions(lm, rows)
    b = SimpleNamespace(
        rows=rows,
        advantages=A,
        logp=sampled(every, rows),
        entropy=-(every.exp() * every).sum(-1).detach(),
        mask=padded([[1.0] * len(row.tokens) for row in rows]).double(),
        old_logp=log_probs(old, rows),
        ref_logp=log_probs(reference, rows),
        rollout_logp=padded([sampler_logp(row, "model") for row in rows]).double(),
    )
    args = SimpleNamespace(**records[0].flags)
    if hasattr(module, "choose_tokens"):
        with torch.no_grad():
            module.choose_tokens(args, b, ALONE)
    total, count = module.policy_loss(args, b.logp, b)
    b.stats = module.measures(args, b.logp.detach(), b)
    b.gradient = flat(torch.autograd.grad(total / count, list(lm.parameters()), retain_graph=True))
    entropy, tokens, gap = b.entropy * b.mask, b.mask.sum(1), (b.old_logp - b.rollout_logp) * b.mask
    good, bad = A > 0, A < 0
    b.stats |= {
        "loss": (total.detach(), count),
        "grad_norm": (b.gradient.norm(), 1),
        "entropy": (entropy.sum(), tokens.sum()),
        "entropy_bad": (entropy[bad].sum(), tokens[bad].sum()),
        "len_good": (tokens[good].sum(), good.sum()),
        "sampler_gap": (gap.abs().sum(), tokens.sum()),
        "sampler_gap_max": (gap.abs().max(), "max"),
        "reward": (rewards_of(rows).sum(), len(rows)),
        "response_len": (tokens.sum(), len(rows)),
        "truncated": (sum(not row.finished for row in rows), len(rows)),
        "tokens": (tokens.sum(), "sum"),
    }
    return b


def check_loop(name: str, records: list[Record]) -> None:
    """Check gradients, rates, prompts, syncs, evaluations and metrics of a run of two steps."""
    module, first, size = module_of(name), records[0], len(records)
    flags = SimpleNamespace(**first.flags)
    assert all(len(run.updates) == 2 * M and len(run.synced) == 3 for run in records)
    for step in range(2):
        pairs: dict[str, list] = {}
        for update in range(step * M, step * M + M):
            b, seen = minibatch(module, records, update), first.updates[update]
            cut = b.gradient * min(1.0, flags.grad_clip / float(b.gradient.norm()))
            assert (flat(seen["gradients"]) - cut).norm() < 2e-4 * cut.norm(), update
            assert seen["lr"] == pytest.approx([flags.lr * (step + 1) / flags.warmup])
            assert seen["betas"] == [flags.betas] and seen["weight_decay"] == [0.01]
            for metric, pair in b.stats.items():
                pairs.setdefault(metric, []).append(pair)
        assert all(map(torch.equal, first.synced[step], first.updates[step * M]["parameters"]))
        line = first.metrics[1 + step]
        prompts = P / M  # of a mini-batch, on all ranks
        assert line["heat"] == pytest.approx(seen["lr"][0] * ((1 + 13 / G) / prompts) ** 0.5)
        for metric, every in pairs.items():
            values, counts = zip(*every)
            values = [float(value) for value in values]
            expected = max(values) if counts[0] == "max" else sum(values)
            if not isinstance(counts[0], str):
                if not sum(counts):
                    continue  # nothing to average
                expected /= float(sum(counts))
            assert line[metric] == pytest.approx(expected, rel=1e-3, abs=1e-4), (step, metric)
    assert not any(map(torch.equal, first.synced[2], first.updates[-1]["parameters"]))
    for run in records:
        mine, some = (
            HELD_OUT[run.rank :: size],
            slice(run.rank * P // size, (run.rank + 1) * P // size),
        )
        tested = [(mine, 1, 0.0, LIMIT, 1.0), (mine, SAMPLES, TEMPERATURE, LIMIT, 1.0)]
        trained = [(prompts_of(step)[some], G, TEMPERATURE, LIMIT, 1.0) for step in range(2)]
        how = "prompts n temperature limit top_p".split()
        calls = [tuple(call[key] for key in how) for call in run.calls]
        assert calls == [*tested, *trained, *tested]
    right = [row.reward for prompt in HELD_OUT for row in respond(prompt, SAMPLES)]
    assert first.metrics[-1]["sampled"] == pytest.approx(sum(right) / len(right))


# Micro-batches and ranks


def same_run(records: list[Record], other: list[Record]) -> None:
    """Compare each gradient and each metric, to float32's rounding, which AdamW's first steps
    magnify."""
    first, second = records[0], other[0]
    for kind in ("updates", "lessons"):
        for update, (seen, again) in enumerate(
            zip(getattr(first, kind), getattr(second, kind), strict=True)
        ):
            apart = flat(seen["gradients"]) - flat(again["gradients"])
            assert apart.norm() < 1e-3 * flat(seen["gradients"]).norm(), (kind, update)
            assert seen["lr"] == pytest.approx(again["lr"], rel=1e-3)
    for line, again in zip(first.metrics, second.metrics, strict=True):
        for name, value in line.items():
            if "second" not in name and name not in ("loss", "tokens_per_s", "greedy", "sampled"):
                assert again[name] == pytest.approx(value, rel=5e-3, abs=1e-5), (line["step"], name)
    prompts, again = (
        [sum((call["prompts"] for call in calls), []) for calls in zip(*(r.training for r in run))]
        for run in (records, other)
    )
    assert prompts == again
    assert [len(r.synced) for r in other] == [len(first.synced)] * len(other)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the record of an algorithm (or a damaged copy) on one rank."""
    known = {}

    def run(name: str, *damage: str, **flags: object) -> Record:
        key = (name, damage, tuple(flags.items()))
        if key not in known:
            world = setup()
            try:
                with damaged(name, *damage) as module:
                    folder = tmp_path_factory.mktemp("run") / "run"
                    known[key] = record(module, world, folder, **flags)
            finally:
                torch.distributed.destroy_process_group()
        return known[key]

    return run


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Return the records of all files on two ranks, and of the damaged copies, by name."""
    jobs = {name: (name, (), {} if name in PLAIN else ONE) for name in (*NINE, *OTHERS)}
    jobs["whole models"] = ("grpo", (), {"shard_ranks": 1})
    for name, damage in DAMAGES.items():
        flags = damage.flags if damage.algorithm in PLAIN else damage.flags | ONE
        jobs[name] = (damage.algorithm, damage.place, flags)
    records = on_ranks(2, list(jobs.values()), tmp_path_factory.mktemp("ranks"))
    return dict(zip(jobs, records))


ONE = {"minibatches": 1}  # of more, each would have other rows on two ranks
# Of single rows, and a last one of none, as where another rank has more
EMPTY = ("common.logprobs", "micros = micros[::-1] or [[]]", "micros = [*micros[::-1], []]")


@pytest.mark.parametrize("name", PLAIN)
def test_a_second_loop(alone, name):
    check_loop(name, [alone(name)])


@pytest.mark.parametrize("name", [*NINE, *(pytest.param(name, marks=slow) for name in OTHERS)])
def test_smallest_micro_batches(alone, name):
    same_run([alone(name)], [alone(name, *EMPTY, micro_tokens=1)])


def test_vcpo_lowers_its_rate(alone):
    """It is multiplied by what is logged, the root of the ESS ratio over rho_on."""
    result = alone("vcpo", **ONE)
    for line in result.metrics[2:]:
        scale = min(1.0, line["ess_ratio"] / result.flags["rho_on"]) ** 0.5
        warm = min(1.0, (line["step"] - 1) / result.flags["warmup"])
        assert scale < 1 and line["lr"] == pytest.approx(result.flags["lr"] * warm * scale)


LAYERS_OFF = {"tau_p": 0.0, "gate": False, "candidates": 1, "branches": 0, "ess_scaling": False}
LAYERS = [("silenced_share", "tau_p", 0.9), ("gate_closed", "gate", True)]  # metric, flag, value
LAYERS += [("branches_used", "branches", 2), ("lr_damping", "ess_scaling", True)]
LAYERS += [("chosen_over_mean", "candidates", 5)]


@slow
def test_the_stack_is_its_layers(alone):
    """Without layers its weights are justrl.py's, to the bit. A layer alone changes them, and shows
    in its own metric only."""
    flags = LAYERS_OFF | {"lr": 3e-4, "grad_clip": 12.0}
    plain = alone("justrl", lr=3e-4, grad_clip=12.0).synced[-1]
    assert all(map(torch.equal, alone("stack", **flags).synced[-1], plain))
    for metric, flag, value in LAYERS:
        result = alone("stack", **flags | {flag: value})
        assert result.metrics[-1]["layers_acted"] == 1 and result.metrics[-1][metric] > 0, metric
        assert not any(map(torch.equal, result.synced[-1], plain)), metric


@slow
@pytest.mark.parametrize("name", [*NINE, *OTHERS, "whole models"])
def test_two_ranks(alone, together, name):
    if name in (*PLAIN, "whole models"):
        check_loop("grpo" if name == "whole models" else name, together[name])
    else:
        same_run([alone(name, **ONE)], together[name])


@slow
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_seen(alone, together, name):
    """Each damage shows on one rank or on two: in the second statement of the loop, or as a
    difference that no rank should make."""
    damage = DAMAGES[name]
    who, plain = damage.algorithm, damage.algorithm in PLAIN and damage.flags.get("model") is None
    whole = alone(who, *damage.place, **damage.flags | ({} if plain else ONE))
    tests = [lambda: check_loop(who, [whole]), lambda: check_loop(who, together[name])]
    if damage.where == "":
        mutant = checks.mutate(module_of(who), damage.old, damage.new)
        tests += [partial(check, mutant) for check in checks.of(who)[0]]
    if not plain:
        tests[:2] = [lambda: same_run([whole], together[name])]
        if damage.where == "":
            tests += [lambda: same_run([whole], [alone(who, *damage.place, micro_tokens=1, **ONE)])]
    seen = []
    for test in tests:
        try:
            test()
        except (AssertionError, LookupError) as error:
            seen.append(error)
    assert seen
