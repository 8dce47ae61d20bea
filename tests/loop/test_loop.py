"""The loops against an oracle: what `main` hands to loss, optimiser, engine and log, on one rank
and on two; mutants.

Each `check_*` compares the records of one run with `oracle.Oracle`, which computed the same without
`common`. The mutants damage `main` or `common` and must turn the check that they name red.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import common.plumbing.evaluation
import common.rollout
import grpo
import pytest
import torch
import vcpo
from common.distributed import setup
from common.plumbing.model import load_model
from transformers import PreTrainedModel

from tests.loop import formulas, oracle
from checks.files import ALGORITHMS, NINE, VARIANTS
from checks.recipe import OFF, off
from tests.helpers import ROOT, SMALL, metrics, module_of, run_here
from tests.loop.oracle import (
    HELD_OUT,
    LIMIT,
    SAMPLES,
    TRAIN,
    G,
    K,
    M,
    Oracle,
    P,
    T,
    damaged,
    on_two_ranks,
    record,
    respond,
    teaches,
)

pytestmark = pytest.mark.runs

# In the second π_old has left the reference, the teacher chooses, pivots are drawn by the fit
STEPS = 2


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for main's float32: 5e-5 of the norm was the most seen."""
    return bool((found - expected).norm() < 2e-4 * expected.norm())


def trained(o: Oracle) -> int:
    """The batches that are trained on: vcpo's first ones only fill its queue."""
    return o.args["steps"] - filling(o)


def filling(o: Oracle) -> int:
    """vcpo: the steps that only fill its queue (with --async the rollout under way is one of the
    `lag`)."""
    return o.args.get("lag", 0) - o.args.get("asynchronous", 0)


def chooses(o: Oracle) -> bool:
    """Whether a teacher chooses the prompts."""
    return o.args.get("curriculum", "teacher_lr" in o.args)


def check_gradients(o: Oracle) -> None:
    """Every gradient that reaches the optimiser, scaled down where its norm is above grad_clip."""
    assert len(o.updates) == M * trained(o)
    for update in range(len(o.updates)):
        gradient, *_ = o.gradient(update)
        scale = min(1.0, o.args["grad_clip"] / float(gradient.norm()))
        same = close(o.applied(update), scale * gradient)
        assert same, f"update {update}"


def check_rates(o: Oracle) -> None:
    """lr rises over the warm-up, in vcpo times the root of the ESS ratio; alike on all ranks; AdamW
    has its flags."""
    for update, (seen, *others) in enumerate(zip(*(one.updates for one in o.records), strict=True)):
        # In ppo from the end of the critic's warm-up on: there the policy has no update
        lr = o.args["lr"] * min(1.0, (update // M + 1) / o.args["warmup"])
        if o.args.get("lag") and o.args["ess_scaling"]:
            lr *= min(1.0, o.gradient(update)[1].rho / o.args["rho_on"]) ** 0.5
        assert seen["lr"] == pytest.approx([lr], rel=1e-4)
        assert all(other["lr"] == seen["lr"] for other in others)
        assert seen["betas"] == [o.args["betas"]]
        assert seen["weight_decay"] == [o.args["weight_decay"]]
        assert len(seen["parameters"]) == len(list(oracle.untrained(o.model).parameters()))


def check_prompts(o: Oracle) -> None:
    """Each round of sampling asks for the prompts that it should, in most files step s for problems
    (s-1)P to sP-1; each rank for its share, in order; sampled as the flags say."""
    for one in o.records:
        mine = range(one.rank * P // o.size, (one.rank + 1) * P // o.size)  # slots
        assert [call["prompts"] for call in one.training] == [
            [drawn[slot] for slot in sorted(drawn) if slot in mine]
            for step in o.rounds
            for drawn in step
        ]
        for call in one.training:
            assert call["temperature"] == T and call["limit"] == LIMIT and call["top_p"] == 1
    for step in range(o.args["steps"]) if chooses(o) else ():
        (chosen,) = o.rounds[step]
        for slot, prompt in chosen.items():
            first = (step * P + slot) * 5
            assert prompt in [TRAIN[(first + k) % len(TRAIN)] for k in range(5)]
        assert len(chosen) == P


def check_evaluation(o: Oracle) -> None:
    """Before the first step and after the last: all held-out problems, once greedily and SAMPLES
    times at temperature T, dealt to the ranks; the accuracies are exact."""
    for one in o.records:
        calls = [call for call in one.calls if call["n"] != G and call["prefixes"] is None]
        mine = HELD_OUT[one.rank :: o.size]
        asked = [
            (call["prompts"], call["n"], call["temperature"], call["limit"], call["top_p"])
            for call in calls
        ]
        assert asked == 2 * [(mine, 1, 0.0, LIMIT, 1.0), (mine, SAMPLES, T, LIMIT, 1.0)]
    for line in (o.records[0].metrics[0], o.records[0].metrics[-1]):
        for name, n in (("greedy", 1), ("sampled", SAMPLES)):
            right = [row.reward for prompt in HELD_OUT for row in respond(prompt, n)]
            assert 0 < sum(right) < len(right)
            assert line[name] == pytest.approx(sum(right) / len(right))


def check_sync(o: Oracle) -> None:
    """The engine is given the weights before the first rollout and after every step: what the next
    one starts from."""
    for one in o.records:
        assert len(one.synced) == 1 + o.args["steps"]
        for step, update in enumerate(one.updates[::M]):
            given = one.synced[step + filling(o)]
            assert all(map(torch.equal, given, o.used(update["parameters"])))
        assert not any(map(torch.equal, one.synced[-1], o.used(one.updates[-1]["parameters"])))


def check_metrics(o: Oracle) -> None:
    """A line for every step, in it exact means over all rows, mini-batches and ranks, and the last
    lr."""
    assert [line["step"] for line in o.records[0].metrics] == list(range(o.args["steps"] + 1))
    for step, line in enumerate(o.records[0].metrics[1 + o.args.get("lag", 0) :]):
        rows = [row for part in range(M) for _, group in o.groups(step, part) for row in group]
        groups = [rows[i : i + G] for i in range(0, len(rows), G)]
        lengths = [len(row.tokens) for row in rows]
        expected = {
            "reward": sum(map(o.reward, rows)) / len(rows),
            "zero_groups": sum(len(set(map(o.reward, group))) == 1 for group in groups)
            / len(groups),
            "distinct": sum(len({r.text.split("#")[-1] for r in group}) for group in groups) / P,
            "response_len": sum(lengths) / len(rows),
            "truncated": sum(not row.finished for row in rows) / len(rows),
            "tokens": sum(lengths),
            "skipped": 0,
            "lr": o.updates[step * M + M - 1]["lr"][0],
        }
        assert 0 < expected["truncated"]
        assert 0 < expected["reward"] < 1
        sums: dict[str, list[float]] = {}
        for update in range(step * M, step * M + M):
            gradient, b, stats = o.gradient(update)
            stats |= {"loss": (-b.J * b.count, b.count), "grad_norm": (float(gradient.norm()), 1)}
            entropy, sizes = (b.entropy * b.mask).sum(1), b.mask.sum(1)
            for ending, some in (("", b.A == b.A), ("_good", b.A > 0), ("_bad", b.A < 0)):
                stats[f"entropy{ending}"] = float(entropy[some].sum()), float(sizes[some].sum())
                if ending:
                    stats[f"len{ending}"] = float(sizes[some].sum()), int(some.sum())
            gap = (b.old - b.mu) * b.mask
            stats["sampler_gap"] = (float(gap.abs().sum()), float(b.mask.sum()))
            stats["sampler_gap_max"] = (float(gap.abs().max()), 1)
            stats["sampler_kl"] = (float((gap.exp() - 1 - gap).sum()), float(b.mask.sum()))
            for name, (total, count) in stats.items():
                old = sums.setdefault(name, [0.0, 0.0])
                largest = name.endswith("_max")
                sums[name] = (
                    [max(old[0], total), 1.0] if largest else [old[0] + total, old[1] + count]
                )
        expected |= {name: total / count for name, (total, count) in sums.items() if count}
        now = step + filling(o)  # when this step's batch was sampled
        prompts = [prompt for one in o.records for prompt in one.training[now]["prompts"]]
        fresh = [row for prompt in prompts for row in respond(prompt, G)]
        if "lag" in o.args:  # the sampler's metrics are of the batch just sampled
            expected |= sampler_metrics(o, now)
            finals = [{r.text.split("#")[-1] for r in respond(prompt, G)} for prompt in prompts]
            expected["distinct"] = sum(map(len, finals)) / P
            expected["lag"] = (0, M * (o.args["lag"] > 0))[step]
            expected["tokens"] = sum(len(row.tokens) for row in fresh)
        if o.args.get("branches"):
            grown = [g for one in o.records for g in branch_groups(one, now)]
            extra = sum(len(row.tokens) for g in grown for row in g)
            expected["tokens"] += extra
            expected["extra_tokens"] = extra / sum(len(row.tokens) for row in fresh)
            expected["failed"] = sum(row.reward == 0 for row in fresh) / len(fresh)
            expected["branches_used"] = sum(len(g) for g in map(telling, grown))
            expected |= branch_metrics(o, now)
        expected |= formulas.of(o.name, "metrics", lambda o, step: {})(o, step)
        off = [
            name
            for name, x in expected.items()
            # A loss is a difference of good and bad tokens that may nearly cancel
            if line.get(name) != pytest.approx(x, rel=1e-3, abs=1e-4 if name == "loss" else 1e-7)
        ]
        assert not off, f"step {step}: {off}"


def check_samples(o: Oracle) -> None:
    """samples.jsonl has one whole group of the first and of the last mini-batch of a step, and its
    numbers are the oracle's: each token's weight above all."""
    lines = [line for line in o.records[0].samples if "example" not in line]
    trains = range(1 + filling(o), 1 + o.args["steps"])
    assert [(line["step"], line["minibatch"]) for line in lines] == [
        (step, part) for step in trains if step in (1, o.args["steps"]) for part in (1, M)
    ]
    for line in lines:
        step, part = line["step"] - 1 - filling(o), line["minibatch"] - 1
        _, b, _ = o.gradient(step * M + part)
        shown = [i for i, row in enumerate(b.rows) if row.prompt == line["prompt"]]
        assert len(line["responses"]) == len(shown) >= G and line["minibatches"] == M
        assert (line["rows"], line["tokens"]) == (len(b.rows), b.mask.sum())
        rewards = {row.prompt: set() for row in b.rows}
        for row in b.rows:
            rewards[row.prompt].add(o.reward(row))
        assert len(rewards[line["prompt"]]) > 1 or max(map(len, rewards.values())) == 1
        assert line["prompt"] == TRAIN[line["group"] % len(TRAIN)]
        assert line["answer"] == oracle.right_answer(line["prompt"])
        for one in line["responses"]:
            # A branch from the bare prompt may repeat a main row, but for log μ
            n, same = len(one["ids"]), (one["given"], tuple(one["ids"]))
            alike = [i for i in shown if (b.rows[i].prefix, b.rows[i].tokens) == same]
            mu = torch.tensor(one["rollout_logp"])  # [T]
            i = min(alike, key=lambda i: float((b.mu[i, :n] - mu).abs().sum()))
            row = b.rows[i]
            assert one["text"] == row.text and one["finished"] == row.finished
            assert one["reward"] == o.reward(row)
            if not isinstance(one["advantage"], list):  # ppo's weights hold its own
                assert one["advantage"] == pytest.approx(float(b.A[i]), rel=1e-4, abs=1e-6)
            columns = {"logp": b.logp, "rollout_logp": b.mu, "weight": b.weight}
            # vcpo's is of the weights that sampled, `lag` steps before the oracle's
            columns |= {"old_logp": b.old} if o.name != "vcpo" else {}
            columns |= {name: b.ref for name in ("ref_logp", "teacher_logp") if name in one}
            assert ("teacher_logp" in one) == (o.name == "opd")
            assert not ("teacher_logp" in one and "ref_logp" in one)
            for name, column in columns.items():
                found, right = torch.tensor(one[name]).double(), column[i, :n]  # [T]
                # main's float32: 4e-5 was the most seen, in signs
                assert (found - right).abs().max() <= 5e-5 * column.abs().max(), name


def telling(siblings: list[oracle.Row]) -> list[oracle.Row]:
    """Branches from one pivot, if they differ: the others are left out."""
    return siblings if len({row.reward for row in siblings}) > 1 else []


def sampler_metrics(o: Oracle, step: int) -> dict[str, float]:
    """How far μ is from the weights that the engine had when it sampled this step's batch."""
    prompts = [prompt for one in o.records for prompt in one.training[step]["prompts"]]
    rows = [row for prompt in prompts for row in respond(prompt, G)]
    for one in o.records if o.args.get("branches") else ():
        rows += [row for siblings in branch_groups(one, step) for row in telling(siblings)]
    with torch.no_grad():
        logp, _, mask = oracle.log_probs(o.lm(o.records[0].synced[step]), rows)
    gap = (logp - oracle.padded([oracle.sampler_logp(row, o.model) for row in rows])) * mask
    means = {"sampler_gap": gap.abs(), "sampler_kl": gap.exp() - 1 - gap}
    means = {name: float(x.sum() / mask.sum()) for name, x in means.items()}
    return means | {"sampler_gap_max": float(gap.abs().max())}


def branch_metrics(o: Oracle, step: int) -> dict[str, float]:
    """Of the pivots at the bare prompt and of those inside a response: how many, what became of
    them, how deep."""
    found, wrong, rescued = [], 0, 0  # (depth, at the root, siblings' rewards) of every pivot
    for one in o.records:
        groups = branch_groups(one, step)
        start = sum(len(branch_groups(one, s)) for s in range(step))
        depths = [pivot["depth"] for pivot in one.pivots[start : start + len(groups)]]
        outcomes = [[row.reward for row in group] for group in groups]
        found += [
            (d, not g[0].prefix, rewards)
            for d, g, rewards in zip(depths, groups, outcomes, strict=True)
        ]
        for prompt in one.training[step]["prompts"]:
            if not any(row.reward for row in respond(prompt, G)):
                wrong += 1
                rescued += any(
                    any(rewards) for g, rewards in zip(groups, outcomes) if g[0].prompt == prompt
                )
    expected = {
        "pivots_root": (sum(root for _, root, _ in found), len(found)),
        "groups_rescued": (rescued, wrong),
    }
    for ending, kind in (("", False), ("_root", True)):
        rewards = [rewards for _, root, rewards in found if root == kind]
        expected[f"branch_reward{ending}"] = (sum(map(sum, rewards)), K * len(rewards))
        expected[f"pivots_saved{ending}"] = (sum(map(any, rewards)), len(rewards))
    inside = [depth for depth, root, _ in found if not root]
    for quarter in (1, 2, 3, 4):
        hit = [(quarter - 1) / 4 < depth <= quarter / 4 for depth in inside]
        expected[f"pivots_quarter_{quarter}"] = (sum(hit), len(hit))
    means = {name: total / count for name, (total, count) in expected.items() if count}
    fit = o.records[0].pivots[sum(len(branch_groups(o.records[0], s)) for s in range(step))]["fit"]
    return means | (dict(zip(("fit_u", "fit_v"), fit)) if fit[1] < float("inf") else {})


def branch_groups(one: oracle.Record, step: int) -> list[list[oracle.Row]]:
    """The siblings of every pivot of a step."""
    call = one.branching[step]
    return [respond(prompt, K, prefix) for prompt, prefix in zip(call["prompts"], call["prefixes"])]


def check_pivots(o: Oracle) -> None:
    """Pivots are drawn by the regression of "some branch succeeded" on depth, fitted to all ranks'
    pivots so far."""
    if not o.args.get("branches"):
        return
    pairs = []
    for step in range(o.args["steps"]):
        fit = fitted(pairs)
        fresh = []
        for one in o.records:
            groups = branch_groups(one, step)
            start = sum(len(branch_groups(one, s)) for s in range(step))
            for pivot, group in zip(one.pivots[start : start + len(groups)], groups):
                assert pivot["fit"] == pytest.approx(fit, rel=1e-4, abs=1e-4)
                cuts = [0, *(i for i, c in enumerate(pivot["response"], 1) if c == ";")]
                assert group[0].prefix == pivot["response"][: pivot["kept"]]
                depth = (cuts.index(pivot["kept"]) + 1) / (len(cuts) + 1)
                assert depth == pytest.approx(pivot["depth"])
                fresh.append((depth, float(any(row.reward for row in group))))
        pairs += fresh
    assert len(pairs) > 10
    assert fit != (0.0, float("inf"))
    assert 0 < sum(y for _, y in pairs) < len(pairs)


def fitted(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """argmin of Σ log-loss + slope²/2, by a library's optimiser; P = 1 everywhere with few
    pairs."""
    if len(pairs) <= 10 or len({y for _, y in pairs}) == 1:
        return 0.0, float("inf")
    x, y = torch.tensor(pairs, dtype=torch.float64).T
    parameters = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = parameters[0] * x + parameters[1]
        total = torch.nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="sum")
        (total + parameters[0] ** 2 / 2).backward()
        return total + parameters[0] ** 2 / 2

    optimizer.step(loss)
    return tuple(parameters.tolist())


def check_teacher(o: Oracle) -> None:
    """Every slot takes its candidate of the largest f (none twice), every rank its own
    slots' in order; the teacher's gradient is that of the mean squared error on what the students'
    groups showed."""
    if not chooses(o):
        return
    teacher = formulas.of(o.name, "teacher", GOLDILOCKS)
    for step in range(o.args["steps"]):
        lm, head = o.taught(step)
        value = lambda prompt: teaches(lm, head, prompt, teacher.top)  # noqa: B023, E731
        merit = lambda prompt: teacher.merit(value(prompt).item())  # noqa: B023, E731
        prompts = [prompt for one in o.records for prompt in one.training[step]["prompts"]]
        pool = [
            [TRAIN[(slot * 5 + k) % len(TRAIN)] for k in range(5)]
            for slot in range(step * P, step * P + P)
        ]
        if step:  # in the first step nothing is known and the choice is by chance
            taken = []
            for candidates in pool:
                free = [prompt for prompt in candidates if prompt not in taken] or candidates
                taken.append(max(free, key=merit))
            assert prompts == taken and prompts != [candidates[0] for candidates in pool]
        rewards = torch.tensor([[row.reward for row in respond(p, G)] for p in prompts]).double()
        targets = teacher.target(rewards)
        f = torch.stack([value(prompt) for prompt in prompts])
        parameters = [*lm.parameters(), *head]
        gradient = torch.cat(
            [x.flatten() for x in torch.autograd.grad((f - targets).square().mean(), parameters)]
        )
        found = torch.cat([x.flatten() for x in o.records[0].lessons[step]["gradients"]]).double()
        assert close(found, gradient) and gradient.norm() < o.args["grad_clip"]
        assert o.records[0].lessons[step]["lr"] == [o.args["teacher_lr"], 10 * o.args["teacher_lr"]]
        scores = [value(prompt).item() for row in pool for prompt in row]  # B·K
        merits = torch.tensor([[merit(prompt) for prompt in row] for row in pool])  # [B, K]
        chosen = torch.tensor([merit(prompt) for prompt in prompts])  # [B]
        idle = float((rewards == rewards[:, :1]).all(dim=1).double().mean())
        expected = {
            "teacher_mean": sum(scores) / len(scores),
            "terms": sum(len(p) // 2 for p in prompts) / P,
        }
        if step:
            expected |= {
                "chosen_over_mean": float((chosen - merits.mean(dim=1)).mean()),
                "zero_groups_chosen": idle,
            }
        else:  # before its first lesson the teacher says the same to everything
            expected |= {
                "teacher_mse": float((teacher.top / 2 - targets).square().mean()),
                "teacher_rank_corr": 0,
            }
            expected["zero_groups_uniform"] = idle
        line = o.records[0].metrics[step + 1]
        own = {
            name: line[name]
            for name in line
            if name.startswith(("teacher", "terms", "chosen", "zero_groups_"))
        }
        assert own == pytest.approx(expected, rel=1e-3, abs=1e-6)


def check_critic(o: Oracle) -> None:
    """Every gradient that reaches the critic's optimiser is that of its own mean over the tokens,
    scaled down where its norm is above grad_clip; its lr is constant."""
    if "critic_lr" not in o.args:
        return
    lessons = o.records[0].lessons
    assert len(lessons) == len(o.updates)
    for update, seen in enumerate(lessons):
        gradient, _ = formulas.of(o.name, "lesson", None)(o, update)
        found = torch.cat([x.flatten() for x in seen["gradients"]]).double()
        scale = min(1.0, o.args["grad_clip"] / float(gradient.norm()))
        assert close(found, scale * gradient), f"update {update}"
        assert seen["lr"] == [o.args["critic_lr"]]


# A teacher's range is (0, top); it chooses by a merit of f and learns a target of [P, G] rewards
GOLDILOCKS = SimpleNamespace(
    top=0.5, merit=lambda f: f, target=lambda R: R.std(dim=1, correction=0)
)
CHECKS = (
    *(check_gradients, check_rates, check_prompts, check_evaluation, check_sync, check_metrics),
    *(check_pivots, check_teacher, check_critic, check_samples),
)
SPECIAL = {
    check: [name for name in ALGORITHMS if hasattr(module_of(name).Args, flag)]
    for check, flag in (
        (check_pivots, "branches"),
        (check_teacher, "teacher_lr"),
        (check_critic, "critic_lr"),
    )
}
CASES = [(name, check) for check in CHECKS for name in SPECIAL.get(check, ALGORITHMS)]


def named(value: object) -> str:
    return value if isinstance(value, str) else value.__name__


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
                    found = record(module, world, folder, **({"steps": STEPS} | flags))
            finally:
                torch.distributed.destroy_process_group()
            o = Oracle(name, [found], flags.get("model", "model"))
            if damage:
                return o
            known[key] = o
        return known[key]

    return run


@pytest.mark.parametrize(("name", "check"), CASES, ids=named)
def test_one_rank(alone, name, check):
    check(alone(name))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_stored_answers_ask_enough(alone, name):
    """π_θ, π_old, μ and the reference all differ; advantages of both signs and 0; gradients on both
    sides of grad_clip; the mechanism acts. Else a mistake could hide."""
    o = alone(name)
    norms = [float(o.gradient(update)[0].norm()) for update in range(len(o.updates))]
    assert any(norm > o.args["grad_clip"] for norm in norms)
    assert any(norm < o.args["grad_clip"] for norm in norms[1::2])  # where π_θ has left π_old
    _, b, _ = o.gradient(3)
    columns = [b.logp.detach(), b.old, b.mu, b.ref]
    for one, other in itertools.combinations(columns, 2):
        assert ((one - other) * b.mask).abs().mean() > 0.01
    before = torch.cat([o.gradient(update)[1].A for update in range(4)])
    assert (before > 0).any() and (before < 0).any()
    # Where length is paid for, groups of equal verdicts have advantages, too
    shaped = name == "vcpo" or formulas.of(name, "rewards", None)
    assert shaped or (before == 0).any()
    lengths = b.mask.sum(1)
    assert len(lengths.unique()) > 4
    assert any(0 < line.get("zero_groups", 0) < 1 for line in o.records[0].metrics)
    acts = next(iter(module_of(name).ACTED))
    assert any(line.get(acts) for line in o.records[0].metrics)
    if "lag" in o.args:
        assert (((b.logp - b.mu) * b.mask).sum(1) > torch.tensor(8.0).log()).any() and b.rho < 0.5


def check_acts(o: Oracle) -> None:
    """Routing replay reaches the update: without it the oracle's gradient is another one."""
    free = Oracle(o.name, o.records, o.model)
    free.args = o.args | {"routing_replay": "none"}
    for update in range(len(o.updates)):
        # R2 changes nothing until the first optimiser step
        if o.args["routing_replay"] == "r3" or update % M:
            assert not close(o.gradient(update)[0], free.gradient(update)[0])


REPLAY = {"model": "model-moe", "grad_clip": 1e9}


@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_routing_replay(alone, replay):
    """Both routings are replayed in π_θ's evaluation and in π_old's; the router has its
    gradient."""
    o = alone("minirl", routing_replay=replay, **REPLAY)
    check_gradients(o)
    check_acts(o)
    check_metrics(o)


def test_stapos_other_rule(alone):
    """The threshold over the rare tokens of right responses."""
    check_gradients(alone("stapo", entropy_over="rare", entropy_quantile=0.75))


CHOICES = [(), *((name,) for name in OFF), *(tuple(OFF.keys() - {name}) for name in OFF)]


@pytest.mark.variants
@pytest.mark.parametrize("layers", CHOICES, ids=lambda layers: "+".join(sorted(layers)) or "none")
@pytest.mark.parametrize("tokens", ["stapo", "maspo"])
def test_any_choice_of_the_recipes_layers(alone, layers, tokens):
    """Each alone, each left out, none (all together: with the other files): gradients, rates,
    prompts, metrics."""
    if tokens == "maspo" and "tokens" not in layers:
        pytest.skip("the same as with stapo")
    o = alone("recipe", **off(*layers) | ({"tokens": tokens} if "tokens" in layers else {}))
    for check in CHECKS:
        check(o)


def test_dapos_truncated_responses_masked(alone):
    """They stay out of loss and denominator, not out of their group's mean."""
    check_gradients(alone("dapo", mask_truncated=True))


ALSO = [(name, flags) for name in VARIANTS for flags in formulas.of(name, "ALSO", [])]


@pytest.mark.parametrize(("name", "flags"), ALSO, ids=lambda x: x if x in VARIANTS else str(x))
def test_a_variants_other_rules(alone, name, flags):
    """Every gradient under other flags than the formula's own, which make another gradient."""
    o = alone(name, **flags)
    check_gradients(o)
    assert not close(o.gradient(0)[0], alone(name).gradient(0)[0])


def test_asynchronous(alone):
    """Sampling the next batch beside the update changes neither which problems come nor what is
    done with them."""
    o = alone("vcpo", asynchronous=True, lag=2)
    for check in (check_prompts, check_gradients, check_rates):
        check(o)


def test_without_a_reference(alone):
    """β = 0 loads no reference model and logs no KL."""
    o = alone("grpo", beta=0.0)
    check_gradients(o)
    assert not any("ref_kl" in line for line in o.records[0].metrics)


def test_gradient_checkpointing_changes_no_gradient(alone, monkeypatch):
    """Every decoder layer is run again in the backward pass, and the gradient is the same; the
    reference, which has none, is not in training."""
    asked, enable = [], PreTrainedModel.gradient_checkpointing_enable
    spy = lambda *how: asked.append(how) or enable(*how)  # noqa: E731
    monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", spy)
    o = alone("grpo", gradient_checkpointing=True)
    check_gradients(o)
    reference, policy = (lm for lm, *_ in asked)
    assert policy.is_gradient_checkpointing and policy.training and not reference.training


def check_lr_after_resume(module: ModuleType, folder: Path) -> None:
    """Steps 1 to 6 in one go, and 1 to 2 with a resume to 6: the same lr at every update, rising
    over the warm-up."""
    world = setup()
    try:
        rates = []
        for steps, resume in ((2, False), (6, True)):
            flags = {"save_every": 2, "resume": resume, "warmup": 4}
            updates = record(module, world, folder, steps=steps, save=True, **flags).updates
            # Loading takes an empty step
            rates += [update["lr"] for update in updates if update["lr"] != [0.0]]
    finally:
        torch.distributed.destroy_process_group()
    expected = [1e-3 * min(1.0, step / 4) for step in (1, 2, 3, 4, 5, 6) for _ in range(M)]
    assert rates == [pytest.approx([lr]) for lr in expected]


def check_evaluation_is_beside_training(module: ModuleType, folder: Path) -> None:
    """Training does not depend on how often one evaluates: with the real engine, whose random state
    an evaluation uses, the same samples, gradients and metrics."""
    lines = []
    for every in (1, 100):
        flags = [
            *SMALL,
            "--eval_every",
            every,
            "--steps",
            3,
            "--run_dir",
            folder / f"every-{every}",
        ]
        flags += ["--lag", 1] if module.__name__ == "vcpo" else []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("common.plumbing.tracking.draw_curves", lambda *arguments: "")
            assert run_here(module.main, *flags) == 0
        rows = metrics(folder / f"every-{every}")
        assert sum("greedy" in row for row in rows) == (4 if every == 1 else 2)
        lines.append(
            [{k: v for k, v in row.items() if k not in ("greedy", "sampled")} for row in rows]
        )
    assert lines[0] == lines[1]


def check_top_p(module: ModuleType, folder: Path) -> None:
    """top-p acts in the engine: a nucleus of next to nothing is the greedy token; half of it leaves
    the likelier ones alone; 1 leaves all."""
    lm, tokenizer = load_model("tiny")
    world = setup()
    try:
        engine = common.rollout.HFEngine(lm, world, 0, "float32", 1024)
        ids = [tokenizer(prompt)["input_ids"] for prompt in TRAIN[:4]]
        draws = {
            p: engine.generate(ids, 16, 1, 1.0, top_p=p).tokens[:, 0].view(4, 16)
            for p in (1e-6, 0.5, 1.0)
        }
        greedy = engine.generate(ids, 1, 1, 0.0).tokens
    finally:
        torch.distributed.destroy_process_group()
    with torch.no_grad():
        first = [
            oracle.untrained()(torch.tensor([prompt])).logits[0, -1].softmax(-1) for prompt in ids
        ]
    for i, p in enumerate(first):
        order = p.sort(descending=True)
        nucleus = order.indices[: int((order.values.cumsum(0) < 0.5).sum()) + 1]
        assert (draws[1e-6][i] == greedy[i]).all() and torch.isin(draws[0.5][i], nucleus).all()
    assert any(len(draws[1.0][i].unique()) > len(draws[0.5][i].unique()) for i in range(4))


# Of their own
RUNS = (check_lr_after_resume, check_evaluation_is_beside_training, check_top_p)


@pytest.mark.parametrize("check", RUNS, ids=lambda check: check.__name__)
def test_runs(tmp_path, check):
    check(grpo, tmp_path / "run")


def test_vcpos_training_does_not_depend_on_how_often_one_evaluates(tmp_path):
    check_evaluation_is_beside_training(vcpo, tmp_path)


def mutants(text: str) -> Iterator[tuple]:
    """(name, algorithm, check, damage, flags) of every block of loop_mutants.txt."""
    block = r"^(\w+) (\w+)(?: in (\S+))?(?: with (.*?))?: (.*)\n- (.*)\n\+ (.*)$"
    for algorithm, check, where, flags, name, *pieces in re.findall(block, text, re.MULTILINE):
        check = globals()[f"check_{check}"]
        old, new = (piece.replace("\\n", "\n") for piece in pieces)
        given = {
            n: int(v) if v.isdecimal() else v == "True" or v
            for n, v in re.findall(r"(\w+)=(\w+)", flags)
        }
        given = {"steps": ENOUGH.get(check, 1)} | given
        yield (
            name,
            algorithm,
            check,
            (where or algorithm, old, new),
            given | (REPLAY if "routing_replay" in given else {}),
        )


# Steps; else 1
ENOUGH = {check_rates: 2, check_prompts: 2, check_sync: 2, check_teacher: 2, check_pivots: 2}
ENOUGH |= {check_critic: 2}
ON_ONE, ON_TWO = map(
    list, map(mutants, (ROOT / "checks/loop_mutants.txt").read_text().split("\ntwo ranks\n"))
)


@pytest.mark.parametrize("mutant", ON_ONE, ids=lambda mutant: mutant[0])
def test_damage_is_seen(alone, tmp_path, mutant):
    _, algorithm, check, damage, flags = mutant
    if check in RUNS:
        with damaged(algorithm, *damage) as module, pytest.raises(AssertionError):
            check(module, tmp_path / "run")
        return
    o = alone(algorithm, *damage, **flags)
    with pytest.raises(AssertionError):
        check(o)


SKIP = """(
                    float("nan")
                    if minibatch is minibatches[0]
                    else clip_gradients(policy, args.grad_clip)
                )"""


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The oracles of all files on two ranks, each with half of every batch, and of the damaged
    copies, by name."""
    jobs = {name: (name, (), {"steps": STEPS}) for name in NINE}
    large = {"micro_tokens": 1000}  # one micro-batch is enough to see a damage
    jobs |= {
        name: (algorithm, damage, large | flags) for name, algorithm, _, damage, flags in ON_TWO
    }
    jobs["whole models"] = ("grpo", (), {"steps": STEPS, "shard_ranks": 1})
    jobs["skipped"] = (
        "grpo",
        ("grpo", "clip_gradients(policy, args.grad_clip)", SKIP),
        {"steps": 1},
    )
    found = on_two_ranks(list(jobs.values()), tmp_path_factory.mktemp("ranks"))
    return {name: Oracle(job[0], records) for (name, job), records in zip(jobs.items(), found)}


@pytest.fixture(scope="module")
def others_together(tmp_path_factory):
    """The variants' oracles on two ranks."""
    jobs = [(name, (), {"steps": STEPS}) for name in VARIANTS]
    found = on_two_ranks(jobs, tmp_path_factory.mktemp("ranks"))
    return {name: Oracle(name, records) for name, records in zip(VARIANTS, found)}


@pytest.mark.parametrize(("name", "check"), [c for c in CASES if c[0] in NINE], ids=named)
def test_two_ranks(together, name, check):
    check(together[name])


@pytest.mark.parametrize("check", [check_gradients, check_sync, check_metrics], ids=named)
def test_two_ranks_with_a_whole_model_each(together, check):
    check(together["whole models"])


@pytest.mark.variants
@pytest.mark.parametrize(("name", "check"), [c for c in CASES if c[0] in VARIANTS], ids=named)
def test_two_ranks_of_a_variant(others_together, name, check):
    check(others_together[name])


@pytest.mark.parametrize("mutant", ON_TWO, ids=lambda mutant: mutant[0])
def test_damage_on_two_ranks_is_seen(together, mutant):
    name, _, check, *_ = mutant
    with pytest.raises(AssertionError):
        check(together[name])


def test_a_skipped_update_is_counted_once_and_changes_nothing(together):
    """The first of two updates has no number for a norm: on both ranks together it is one, and
    weights stay."""
    o = together["skipped"]
    assert o.records[0].metrics[1]["skipped"] == 1 and len(o.updates) == 1
    assert all(
        torch.equal(a, b) for a, b in zip(o.updates[0]["parameters"], o.records[0].synced[0])
    )
    assert 0 < o.records[0].metrics[1]["grad_norm"] < 100
