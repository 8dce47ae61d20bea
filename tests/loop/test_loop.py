"""The loops against an oracle: what `main` hands to loss, optimiser, engine and log, on one rank
and on two; mutants.

Each `check_*` compares the records of one run with `oracle.Oracle`, which computed the same without
`main` and `common`. The mutants damage these and must turn the check that they name red.
"""

import itertools
from random import Random

import deep_grpo
import pytest
import torch
from checks.files import NINE
from checks.loop_mutants import DAMAGES
from common.distributed import setup

from tests.helpers import module_of
from tests.loop import oracle
from tests.loop.oracle import HELD_OUT, LIMIT, SAMPLES, TRAIN, VOCABULARY, G, K, M, Oracle, P, T
from tests.loop.oracle import damaged, flat, on_ranks, record, respond, teaches


def check_clipped(o: Oracle, seen: dict, gradient: torch.Tensor) -> None:
    """An optimiser was given this gradient, scaled down if its norm is above grad_clip. (The most
    that main's float32 made of difference was 5e-5 of the norm.)"""
    expected = gradient * min(1.0, o.args.grad_clip / float(gradient.norm()))
    assert (flat(seen["gradients"]) - expected).norm() < 2e-4 * expected.norm()


def waited(o: Oracle) -> int:
    """The steps without an update: vcpo's queue fills, or ppo's critic warms up."""
    return getattr(o.args, "lag", 0) + o.warmup


def check_gradients(o: Oracle) -> None:
    """Every gradient that reaches the optimiser."""
    assert len(o.updates) == M * (o.args.steps - waited(o))
    for update, seen in enumerate(o.updates):
        check_clipped(o, seen, o.gradient(update)[0])


def check_rates(o: Oracle) -> None:
    """lr rises over the warm-up, in vcpo times the root of the ESS ratio; alike on all ranks; AdamW
    has its flags."""
    for update, (seen, *others) in enumerate(zip(*(one.updates for one in o.records), strict=True)):
        # In ppo from the end of the critic's warm-up on: there the policy has no update
        lr = o.args.lr * min(1.0, (update // M + 1) / o.args.warmup)
        if o.has("lag") and o.args.ess_scaling:
            lr *= min(1.0, o.gradient(update)[1].rho / o.args.rho_on) ** 0.5
        assert seen["lr"] == pytest.approx([lr], rel=1e-4)
        assert all(other["lr"] == seen["lr"] for other in others)
        assert seen["betas"] == [o.args.betas]
        assert seen["weight_decay"] == [o.args.weight_decay]


def check_prompts(o: Oracle) -> None:
    """Each round of sampling asks for the prompts that it should, in most files step s for problems
    (s-1)P to sP-1; each rank for its share, in order; sampled as the flags say."""
    for one in o.records:
        mine = range(one.rank * P // o.size, (one.rank + 1) * P // o.size)  # slots
        rounds = [prompts for step in o.rounds for prompts in step]
        for prompts, call in zip(rounds, one.training, strict=True):
            assert call["prompts"] == [prompts[slot] for slot in sorted(prompts) if slot in mine]
            assert call["temperature"] == T and call["limit"] == LIMIT and call["top_p"] == 1
    if o.has("teacher_lr"):  # of five candidates a slot
        for step, (chosen,) in enumerate(o.rounds):
            assert len(chosen) == P
            for slot, prompt in chosen.items():
                assert prompt in candidates(step * P + slot)


def candidates(slot: int) -> list[str]:
    return [TRAIN[(slot * 5 + k) % len(TRAIN)] for k in range(5)]


def check_evaluation(o: Oracle) -> None:
    """Before the first step and after the last: all held-out problems, once greedily and SAMPLES
    times at temperature T, dealt to the ranks; the accuracies are exact."""
    for one in o.records:
        mine = HELD_OUT[one.rank :: o.size]
        asked = []
        for call in one.calls:
            if call["n"] != G and call["prefixes"] is None:
                how = (call["n"], call["temperature"], call["limit"], call["top_p"])
                asked.append((call["prompts"], *how))
        assert asked == 2 * [(mine, 1, 0.0, LIMIT, 1.0), (mine, SAMPLES, T, LIMIT, 1.0)]
    for name, n in (("greedy", 1), ("sampled", SAMPLES)):
        right = [row.reward for prompt in HELD_OUT for row in respond(prompt, n)]
        for line in (o.records[0].metrics[0], o.records[0].metrics[-1]):
            assert line[name] == pytest.approx(sum(right) / len(right))


def check_sync(o: Oracle) -> None:
    """The engine is given the weights before the first rollout and after every step: what the next
    one starts from."""
    for one in o.records:
        assert len(one.synced) == 1 + o.args.steps
        for step, update in enumerate(one.updates[::M]):
            given = one.synced[step + waited(o)]
            assert all(map(torch.equal, given, update["parameters"]))
        assert not any(map(torch.equal, one.synced[-1], one.updates[-1]["parameters"]))


def check_metrics(o: Oracle) -> None:
    """A line for every step, in it exact means over all rows, mini-batches and ranks, also of what
    the loss counts, and the last lr."""
    assert [line["step"] for line in o.records[0].metrics] == list(range(o.args.steps + 1))
    for step, line in enumerate(o.records[0].metrics[1 + waited(o) :]):
        expected = expected_metrics(o, step)
        now = step + waited(o)  # when this step's batch was sampled
        fresh = [respond(prompt, G) for prompt in o.prompts(now)]
        rows = o.rows(step)
        groups = [rows[i : i + G] for i in range(0, len(rows), G)]
        answers = [{row.text.split("#")[-1] for row in group} for group in groups]
        expected["distinct"] = sum(map(len, answers)) / P
        for part in range(M) if o.has("branches") else ():
            fresh += o.branches(now, part)
        expected["tokens"] = sum(len(row.tokens) for group in fresh for row in group)
        if waited(o):
            expected["lag"] = (0, M)[step]
        for name, value in expected.items():
            # A loss is a difference of good and bad tokens that may nearly cancel
            least = 1e-4 if name == "loss" else 1e-7
            assert line.get(name) == pytest.approx(value, rel=1e-3, abs=least), (step, name)


def expected_metrics(o: Oracle, step: int) -> dict[str, float]:
    """Metrics of a step's batch and of all its mini-batches, from (sum, count) pairs, sums without
    a count, and maxima."""
    rows = o.rows(step)
    R = oracle.rewards_of(rows).view(P, G)
    pairs: dict[str, list[tuple]] = {
        "reward": [(R.sum(), P * G)],
        "zero_groups": [((R == R[:, :1]).all(1).sum(), P)],
        "response_len": [(sum(len(row.tokens) for row in rows), P * G)],
        "truncated": [(sum(not row.finished for row in rows), P * G)],
    }
    for update in range(step * M, step * M + M):
        gradient, b = o.gradient(update)
        entropy, sizes = (b.entropy * b.mask).sum(1), b.mask.sum(1)
        stats = b.stats | {
            "grad_norm": (gradient.norm(), 1),
            "entropy": (entropy.sum(), sizes.sum()),
        }
        for sign, some in (("good", b.advantages > 0), ("bad", b.advantages < 0)):
            stats[f"entropy_{sign}"] = entropy[some].sum(), sizes[some].sum()
            stats[f"len_{sign}"] = sizes[some].sum(), some.sum()
        if waited(o):  # the sampler's metrics are of another batch, the one just sampled
            stats |= {"ess_ratio": (b.rho, 1), "baseline_shift": (b.shifts.abs().mean(), 1)}
        else:
            gap = (b.old_logp - b.rollout_logp) * b.mask
            stats["sampler_gap"] = gap.abs().sum(), sizes.sum()
            stats["sampler_kl"] = (gap.exp() - 1 - gap).sum(), sizes.sum()
            stats["sampler_gap_max"] = gap.abs().max(), None
        for name, pair in stats.items():
            pairs.setdefault(name, []).append(pair)
    found = {"skipped": 0, "lr": o.updates[step * M + M - 1]["lr"][0]}
    for name, every in pairs.items():
        totals, counts = zip(*every)
        if name.endswith("_max"):
            found[name] = float(max(totals))
        elif counts[0] is None:
            found[name] = float(sum(totals))
        elif sum(counts):
            found[name] = float(sum(totals) / sum(counts))
    return found


# deep_grpo's branches


def check_pivots(o: Oracle) -> None:
    """Each failed response is cut where the file's `choose_pivot` cuts it, by the regression of
    "some branch succeeded" on depth over all ranks' pivots so far. (checks/deep_grpo.py holds both
    functions.)"""
    feedback = []
    for step in range(o.args.steps):
        fit, fresh = deep_grpo.fit_success(feedback), []
        for one in o.records:
            assert one.fits[step] == pytest.approx(fit, rel=1e-4, abs=1e-4)
            prefixes = one.branching[step]["prefixes"]
            for (place, number, row), prefix in zip(o.failed(one, step), prefixes, strict=True):
                slot = problem = step * P + one.rank * P // o.size + place
                if o.has("teacher_lr"):
                    problem = 5 * slot + candidates(slot).index(row.prompt)
                rng = Random(f"{o.args.seed}/{problem * G + number}")
                given = list(row.tokens), {VOCABULARY.index(";")}, *fit, o.args.depth_power, rng
                kept, depth = deep_grpo.choose_pivot(*given)
                assert prefix == row.text[:kept]
                branches = respond(row.prompt, K, prefix)
                fresh.append((depth, float(any(branch.reward for branch in branches))))
        feedback += fresh
    assert fit != (0.0, float("inf"))


# Second optimisers


def check_teacher(o: Oracle) -> None:
    """Every slot takes its best candidate (none twice): in goldilocks that of the largest f, in
    paced the nearest to τ. Every rank has its own slots' in order. The teacher's gradient is that
    of the mean squared error on what the students' groups showed."""
    paced = o.name == "paced"
    most = 1.0 if paced else 0.5
    for step in range(o.args.steps):
        lm, head = o.taught(step)
        prompts = o.prompts(step)
        pool = [candidates(slot) for slot in range(step * P, step * P + P)]
        merits = {}
        for prompt in {prompt for slot in pool for prompt in slot}:
            f = teaches(lm, head, prompt, most).item()
            merits[prompt] = -abs(f - o.args.target) if paced else f
        if step:  # in the first step nothing is known and the choice is by chance
            taken = []
            for slot in pool:
                free = [prompt for prompt in slot if prompt not in taken] or slot
                taken.append(max(free, key=merits.get))
            assert prompts == taken and prompts != [slot[0] for slot in pool]
            above = [merits[p] - sum(map(merits.get, slot)) / 5 for p, slot in zip(prompts, pool)]
            logged = o.records[0].metrics[step + 1]["chosen_over_mean"]
            assert logged == pytest.approx(sum(above) / P, rel=1e-3, abs=1e-6)
        students = [row for prompt in prompts for row in respond(prompt, G)]
        rewards = oracle.rewards_of(students).view(P, G)
        targets = rewards.mean(dim=1) if paced else rewards.std(dim=1, correction=0)  # [P]
        f = torch.stack([teaches(lm, head, prompt, most) for prompt in prompts])
        error = (f - targets).square().mean()
        gradient = flat(torch.autograd.grad(error, [*lm.parameters(), *head]))
        lesson = o.records[0].lessons[step]
        check_clipped(o, lesson, gradient)
        assert lesson["lr"] == [o.args.teacher_lr, 10 * o.args.teacher_lr]


def check_critic(o: Oracle) -> None:
    """Every gradient that reaches the critic's optimiser is that of its own mean over the tokens;
    its lr is constant."""
    lessons = o.records[0].lessons
    assert len(lessons) == M * o.args.steps
    for update, seen in enumerate(lessons):
        check_clipped(o, seen, o.lesson(update))
        assert seen["lr"] == [o.args.critic_lr]


# dapo's rounds


def check_draws(o: Oracle) -> None:
    """The metrics count every group that was drawn, also the replaced ones."""
    for step, line in enumerate(o.records[0].metrics[1:]):
        drawn = []
        for prompts in o.rounds[step]:
            drawn += [row for prompt in prompts.values() for row in respond(prompt, G)]
        tokens, used = (sum(len(row.tokens) for row in rows) for rows in (drawn, o.rows(step)))
        expected = {"rounds": len(o.rounds[step]), "drawn_per_used": len(drawn) / (P * G)}
        expected |= {"tokens": tokens, "extra_tokens": (tokens - used) / used}
        expected["reward_drawn"] = sum(row.reward for row in drawn) / len(drawn)
        for name, value in expected.items():
            assert line[name] == pytest.approx(value), (step, name)


# One rank

EVERYWHERE = [check_gradients, check_rates, check_prompts, check_sync]
OF_THE_NINE = [check_evaluation, check_metrics]  # the variants' lines are theirs
SPECIAL = {"branches": check_pivots, "teacher_lr": check_teacher, "critic_lr": check_critic}
SPECIAL["max_draws"] = check_draws
# Variants with lines of their own in `main`
VARIANTS = [name for name in oracle.FLAGS if name not in NINE]
slow = pytest.mark.slow
FILES = [*NINE, *(pytest.param(name, marks=slow) for name in VARIANTS)]


def checks_of(name: str) -> list:
    own = [check for flag, check in SPECIAL.items() if hasattr(module_of(name).Args, flag)]
    return [*EVERYWHERE, *(OF_THE_NINE if name in NINE else ()), *own]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Run an algorithm (or a damaged copy) on one rank and return its oracle."""
    known = {}

    def run(name: str, *damage: str, **flags: object) -> Oracle:
        key = (name, damage, tuple(flags.items()))
        if key not in known:
            world = setup()
            try:
                with damaged(name, *damage) as module:
                    folder = tmp_path_factory.mktemp("run") / "run"
                    found = record(module, world, folder, **flags)
            finally:
                torch.distributed.destroy_process_group()
            known[key] = Oracle(name, [found], flags.get("model", "model"))
        return known[key]

    return run


@pytest.mark.parametrize("name", FILES)
def test_one_rank(alone, name):
    """All checks, and that the stored answers ask enough."""
    o = alone(name)
    for check in [*checks_of(name), check_the_answers_ask_enough]:
        check(o)


def check_the_answers_ask_enough(o: Oracle) -> None:
    """π_θ, π_old, μ and the reference all differ; advantages have both signs; gradients are on both
    sides of grad_clip; every mechanism acts. Else a mistake could hide."""
    norms = [float(o.gradient(update)[0].norm()) for update in range(len(o.updates))]
    assert min(norms[1::2]) < o.args.grad_clip < max(norms)  # [1::2]: π_θ has left π_old
    _, b = o.gradient(3)
    for one, other in itertools.combinations([b.logp, b.old_logp, b.rollout_logp, b.ref_logp], 2):
        assert ((one - other) * b.mask).abs().mean() > 0.01
    assert b.advantages.min() < 0 < b.advantages.max() and len(b.mask.sum(1).unique()) > 4
    acted = next(iter(o.module.ACTED))
    assert any(line.get(acted) for line in o.records[0].metrics)


REPLAY = {"model": "model-moe", "grad_clip": 1e9}
ALSO = [("stapo", {"entropy_rule": "candidates"}), ("baselines", {"baseline": "batch"})]
ALSO += [("dapo", {"max_draws": 1}), ("dapo", {"mask_truncated": True})]
ALSO += [("entropy20", {"tokens": "kl_cov"}), ("ppo", {"lam_length": 0.3})]
ALSO += [("recipe", {"tokens": "maspo"}), ("grpo", {"beta": 0.0})]
ALSO += [("minirl", {"routing_replay": rule} | REPLAY) for rule in ("r2", "r3")]


@slow
@pytest.mark.parametrize(("name", "flags"), ALSO, ids=str)
def test_other_rules(alone, name, flags):
    """Under other flags than the file's own."""
    o = alone(name, **flags)
    for check in checks_of(name):
        check(o)


EMPTY = ("common.logprobs", "micros = micros[::-1] or [[]]", "micros = [*micros[::-1], []]")
# A mean of means, a mini-batch's quantile, whole responses, branches; passes of their own
SMALLEST = ["grpo", "stapo", "vcpo", "deep_grpo"]
SMALLEST += [pytest.param(n, marks=slow) for n in "minirl goldilocks ppo recipe".split()]


@pytest.mark.parametrize("name", SMALLEST)
def test_smallest_micro_batches(alone, name):
    """Of single rows, and a last one of none, as where another rank has more. (Prompts of a teacher
    are equally many on all ranks.)"""
    empty = () if hasattr(module_of(name).Args, "teacher_lr") else EMPTY
    o = alone(name, *empty, micro_tokens=1)
    for check in checks_of(name):
        check(o)


# Mutants


@slow
@pytest.mark.parametrize("name", [name for name, one in DAMAGES.items() if one.ranks == 1])
def test_damage_is_seen(alone, name):
    damage = DAMAGES[name]
    o = alone(damage.algorithm, *damage.place, **damage.flags)
    with pytest.raises(AssertionError):
        globals()[f"check_{damage.check}"](o)


# Two ranks

CLIP = "clip_gradients(policy, args.grad_clip)"
SKIP = (CLIP, f'float("nan") if minibatch is minibatches[0] else {CLIP}')


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The oracles of all files on two ranks, each with half of every batch, and of the damaged
    copies, by name. The two processes are started once."""
    jobs = {name: (name, (), {}) for name in (*NINE, *VARIANTS)}
    for name, damage in DAMAGES.items():
        if damage.ranks == 2:
            # One micro-batch is enough to see a damage
            jobs[name] = (damage.algorithm, damage.place, {"micro_tokens": 1000} | damage.flags)
    jobs["whole models"] = ("grpo", (), {"shard_ranks": 1})
    jobs["candidates"] = ("stapo", (), {"entropy_rule": "candidates"})
    jobs["single rows"] = ("vcpo", (), {"micro_tokens": 1})
    jobs["skipped"] = ("grpo", ("grpo", *SKIP), {"steps": 1})
    found = on_ranks(2, list(jobs.values()), tmp_path_factory.mktemp("ranks"))
    return {name: Oracle(job[0], records) for (name, job), records in zip(jobs.items(), found)}


@slow
@pytest.mark.parametrize("name", [*NINE, *VARIANTS, "whole models", "candidates", "single rows"])
def test_two_ranks(together, name):
    o = together[name]
    for check in checks_of(o.name):
        check(o)


@slow
@pytest.mark.parametrize("name", [name for name, one in DAMAGES.items() if one.ranks == 2])
def test_damage_on_two_ranks_is_seen(together, name):
    with pytest.raises(AssertionError):
        globals()[f"check_{DAMAGES[name].check}"](together[name])


@slow
def test_a_skipped_update_is_counted_once_and_changes_nothing(together):
    """The first of two updates has no number for a norm: on both ranks together it is one, and
    weights stay."""
    o = together["skipped"]
    line = o.records[0].metrics[1]
    assert line["skipped"] == 1 and len(o.updates) == 1 and 0 < line["grad_norm"] < 100
    assert all(map(torch.equal, o.updates[0]["parameters"], o.records[0].synced[0]))
