"""The loops against an oracle: what `main` hands to loss, optimiser, engine and log, on one rank and on two; mutants.

Each `check_*` compares the records of one run with `oracle.Oracle`, which computed the same without `common`. The
mutants damage `main` or `common` and must turn the check that they name red.
"""

import importlib
import itertools
from dataclasses import replace

import common.evaluation
import common.rollout
import oracle
import pytest
import torch
from adapters import ALGORITHMS
from common.distributed import setup
from common.model import load_model
from oracle import HELD_OUT, LIMIT, SAMPLES, TRAIN, G, K, M, Oracle, P, T, damaged, on_two_ranks, record, respond
from test_run import SMALL, metrics, run_here

import grpo

STEPS = {"deep_grpo": 3}  # its regression needs more than ten pivots


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for main's float32: 5e-5 of the norm was the most seen."""
    return bool((found - expected).norm() < 2e-4 * expected.norm())


def trained(o: Oracle) -> int:
    """The batches that are trained on: vcpo's first ones only fill its queue."""
    return o.args["steps"] - o.args.get("lag", 0)


def check_gradients(o: Oracle) -> None:
    """Every gradient that reaches the optimiser, scaled down where its norm is above grad_clip."""
    assert len(o.updates) == M * trained(o)
    for update in range(len(o.updates)):
        gradient, *_ = o.gradient(update)
        scale = min(1.0, o.args["grad_clip"] / float(gradient.norm()))
        assert close(o.applied(update), scale * gradient), f"update {update}"


def check_rates(o: Oracle) -> None:
    """lr rises over the warm-up, in vcpo times the root of the ESS ratio; the same on all ranks; AdamW has its flags."""
    for update, (seen, *others) in enumerate(zip(*(one.updates for one in o.records), strict=True)):
        lr = o.args["lr"] * min(1.0, (update // M + 1) / o.args["warmup"])
        if o.name == "vcpo":
            lr *= min(1.0, o.gradient(update)[1].rho / o.args["rho_on"]) ** 0.5
        assert seen["lr"] == pytest.approx([lr], rel=1e-4)
        assert all(other["lr"] == seen["lr"] for other in others)
        assert seen["betas"] == [o.args["betas"]] and seen["weight_decay"] == [o.args["weight_decay"]]
        assert len(seen["parameters"]) == len(list(oracle.untrained(o.model).parameters()))


def check_prompts(o: Oracle) -> None:
    """Step s trains on problems (s-1)P to sP-1 in order, each rank on its share; sampled as the flags say."""
    assert len(o.records[0].training) == o.args["steps"]
    for step in range(o.args["steps"]):
        calls = [one.training[step] for one in o.records]
        prompts = [prompt for call in calls for prompt in call["prompts"]]
        assert all(call["temperature"] == T and call["limit"] == LIMIT and call["top_p"] == 1 for call in calls)
        assert len(prompts) == P and all(len(call["prompts"]) == P // o.size for call in calls)
        if o.name == "goldilocks":
            slots = range(step * P, (step + 1) * P)
            pool = [[TRAIN[(slot * 5 + k) % len(TRAIN)] for k in range(5)] for slot in slots]
            assert all(prompt in candidates for prompt, candidates in zip(prompts, pool))
        else:
            assert prompts == [TRAIN[i % len(TRAIN)] for i in range(step * P, (step + 1) * P)]


def check_evaluation(o: Oracle) -> None:
    """Before the first step and after the last: all held-out problems, once greedily and SAMPLES times at temperature
    T, dealt to the ranks; the accuracies are exact."""
    for one in o.records:
        calls = [call for call in one.calls if call["n"] != G and call["prefixes"] is None]
        mine = HELD_OUT[one.rank :: o.size]
        asked = [(call["prompts"], call["n"], call["temperature"], call["limit"], call["top_p"]) for call in calls]
        assert asked == 2 * [(mine, 1, 0.0, LIMIT, 1.0), (mine, SAMPLES, T, LIMIT, 1.0)]
    for line in (o.records[0].metrics[0], o.records[0].metrics[-1]):
        for name, n in (("greedy", 1), ("sampled", SAMPLES)):
            right = [row.reward for prompt in HELD_OUT for row in respond(prompt, n)]
            assert 0 < sum(right) < len(right) and line[name] == pytest.approx(sum(right) / len(right))


def check_sync(o: Oracle) -> None:
    """The engine is given the weights before the first rollout and after every step: what the next one starts from."""
    for one in o.records:
        steps = len(one.training)
        assert len(one.synced) == 1 + steps
        filling = steps - len(one.updates) // M  # vcpo: the queue fills before the first update
        for step, update in enumerate(one.updates[::M]):
            given = one.synced[step + filling]
            assert all(torch.equal(a, b) for a, b in zip(given, update["parameters"]))
        assert not any(torch.equal(a, b) for a, b in zip(one.synced[-1], one.updates[-1]["parameters"]))


def check_metrics(o: Oracle) -> None:
    """The logged numbers are exact means over all rows, mini-batches and ranks."""
    lines = [line for line in o.records[0].metrics[1:] if "grad_norm" in line]
    for step, line in enumerate(lines):
        rows = [row for part in range(M) for _, group in o.groups(step, part) for row in group]
        groups = [rows[i : i + G] for i in range(0, len(rows), G)]
        lengths = [len(row.tokens) for row in rows]
        expected = {
            "reward": sum(row.reward for row in rows) / len(rows),
            "zero_groups": sum(len({row.reward for row in group}) == 1 for group in groups) / len(groups),
            "response_len": sum(lengths) / len(rows),
            "truncated": sum(not row.finished for row in rows) / len(rows),
            "tokens": sum(lengths),
            "skipped": 0,
        }
        assert 0 < expected["zero_groups"] < 1 and 0 < expected["truncated"] and 0 < expected["reward"] < 1
        sums = {name: [0.0, 0.0] for name in ("loss", "entropy", "grad_norm", "sampler_gap")}
        for update in range(step * M, step * M + M):
            gradient, b, stats = o.gradient(update)
            stats |= {"loss": (-b.J * b.count, b.count), "grad_norm": (float(gradient.norm()), 1)}
            stats["entropy"] = (float((b.entropy * b.mask).sum()), float(b.mask.sum()))
            stats["sampler_gap"] = (float(((b.old - b.mu) * b.mask).abs().sum()), float(b.mask.sum()))
            for name, (total, count) in stats.items():
                old = sums.setdefault(name, [0.0, 0.0])
                sums[name] = [old[0] + total, old[1] + count]
        expected |= {name: total / count for name, (total, count) in sums.items()}
        if o.name == "vcpo":  # the sampler's metrics are of the batch just sampled
            del expected["sampler_gap"]
            assert line["lag"] == (0, M)[step]
        if o.name == "deep_grpo":
            grown = [g for one in o.records for g in branch_groups(one, step)]
            extra = sum(len(row.tokens) for g in grown for row in g)
            expected["tokens"] += extra
            expected["extra_tokens"] = extra / sum(lengths)
            expected["failed"] = sum(row.reward == 0 for row in rows) / len(rows)
            expected["branches_used"] = sum(len(g) for g in grown if len({row.reward for row in g}) > 1)
        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-7)


def branch_groups(one: oracle.Record, step: int) -> list[list[oracle.Row]]:
    """The siblings of every pivot of a step."""
    call = [call for call in one.calls if call["prefixes"] is not None][step]
    return [respond(prompt, K, prefix) for prompt, prefix in zip(call["prompts"], call["prefixes"])]


def check_pivots(o: Oracle) -> None:
    """Pivots are drawn by the regression of "some branch succeeded" on depth, fitted to all ranks' pivots so far."""
    if o.name != "deep_grpo":
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
    assert len(pairs) > 10 and fit != (0.0, float("inf")) and 0 < sum(y for _, y in pairs) < len(pairs)


def fitted(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """argmin of Σ log-loss + slope²/2, by a library's optimiser; P = 1 everywhere with few pairs."""
    if len(pairs) <= 10 or len({y for _, y in pairs}) == 1:
        return 0.0, float("inf")
    x, y = torch.tensor(pairs, dtype=torch.float64).T
    parameters = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = parameters[0] * x + parameters[1]
        total = torch.nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="sum")
        (total + parameters[0] ** 2 / 2).backward()
        return total + parameters[0] ** 2 / 2

    optimizer.step(loss)
    return tuple(parameters.tolist())


def check_teacher(o: Oracle) -> None:
    """goldilocks: every slot takes its candidate of the largest f (none twice), every rank its own slots' in order; the
    teacher's gradient is that of the mean squared error on what the students' groups showed."""
    if o.name != "goldilocks":
        return
    for step in range(o.args["steps"]):
        lm, head = taught(o, step)
        prompts = [prompt for one in o.records for prompt in one.training[step]["prompts"]]
        pool = [[TRAIN[(slot * 5 + k) % len(TRAIN)] for k in range(5)] for slot in range(step * P, step * P + P)]
        if step:  # in the first step nothing is known and the choice is by chance
            taken = []
            for candidates in pool:
                free = [prompt for prompt in candidates if prompt not in taken] or candidates
                taken.append(max(free, key=lambda prompt: value(lm, head, prompt).item()))
            assert prompts == taken and prompts != [candidates[0] for candidates in pool]
        targets = torch.tensor([[row.reward for row in respond(p, G)] for p in prompts]).double().std(1, correction=0)
        f = torch.stack([value(lm, head, prompt) for prompt in prompts])
        parameters = [*lm.parameters(), *head]
        gradient = torch.cat([x.flatten() for x in torch.autograd.grad((f - targets).square().mean(), parameters)])
        found = torch.cat([x.flatten() for x in o.records[0].lessons[step]["gradients"]]).double()
        assert close(found, gradient) and gradient.norm() < o.args["grad_clip"]
        assert o.records[0].lessons[step]["lr"] == [o.args["teacher_lr"], 10 * o.args["teacher_lr"]]
        assert o.records[0].metrics[step + 1]["zero_groups_chosen" if step else "zero_groups_uniform"] == pytest.approx(
            float((targets == 0).double().mean())
        )


def taught(o: Oracle, step: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The teacher before a step's lesson: its backbone, and weight and bias of its head."""
    *backbone, weight, bias = o.records[0].lessons[step]["parameters"]
    lm = o.lm(backbone).model
    return lm, [x.double().requires_grad_() for x in (weight, bias)]


def value(lm: torch.nn.Module, head: list[torch.Tensor], prompt: str) -> torch.Tensor:
    """f(q) = 1/2 σ(w · mean h + b)."""
    hidden = lm(torch.tensor([[oracle.VOCABULARY.index(c) for c in prompt]])).last_hidden_state[0]
    return 0.5 / (1 + (-(hidden.mean(0) @ head[0][0] + head[1][0])).exp())


CHECKS = (
    *(check_gradients, check_rates, check_prompts, check_evaluation, check_sync, check_metrics),
    *(check_pivots, check_teacher),
)
SPECIAL = {check_pivots: ["deep_grpo"], check_teacher: ["goldilocks"]}
CASES = [(name, check) for check in CHECKS for name in SPECIAL.get(check, ALGORITHMS)]


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
                    found = record(module, world, folder, **({"steps": STEPS.get(name, 2)} | flags))
            finally:
                torch.distributed.destroy_process_group()
            known[key] = Oracle(name, [found], flags.get("model", "model"))
        return known[key]

    return run


@pytest.mark.parametrize(("name", "check"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_one_rank(alone, name, check):
    check(alone(name))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_stored_answers_ask_enough(alone, name):
    """π_θ, π_old, μ and the reference all differ; advantages of both signs and 0; gradients on both sides of grad_clip;
    the mechanism acts. Else a mistake could hide."""
    o = alone(name)
    norms = [float(o.gradient(update)[0].norm()) for update in range(len(o.updates))]
    assert any(norm > o.args["grad_clip"] for norm in norms)
    assert any(norm < o.args["grad_clip"] for norm in norms[1::2])  # where π_θ has left π_old
    _, b, _ = o.gradient(3)
    columns = [b.logp.detach(), b.old, b.mu, b.ref]
    for one, other in itertools.combinations(columns, 2):
        assert ((one - other) * b.mask).abs().mean() > 0.01
    before = torch.cat([o.gradient(update)[1].A for update in range(4)])
    assert (before > 0).any() and (before < 0).any() and (name == "vcpo" or (before == 0).any())
    lengths = b.mask.sum(1)
    assert len(lengths.unique()) > 4
    stats = [o.gradient(update)[2] for update in range(4)]
    acted = [total for one in stats for key, (total, _) in one.items() if key in ACTED]
    assert sum(acted) > 0
    if name == "vcpo":
        assert (((b.logp - b.mu) * b.mask).sum(1) > torch.tensor(8.0).log()).any() and b.rho < 0.5


ACTED = "clip_share gate_closed silenced_share masked_share ess_ratio".split()


def check_acts(o: Oracle) -> None:
    """Routing replay reaches the update: without it the oracle's gradient is another one."""
    free = Oracle(o.name, o.records, o.model)
    free.args = o.args | {"routing_replay": "none"}
    for update in range(len(o.updates)):
        if o.args["routing_replay"] == "r3" or update % M:  # r2 changes nothing until the first optimiser step
            assert not close(o.gradient(update)[0], free.gradient(update)[0])


REPLAY = {"model": "model-moe", "grad_clip": 1e9}


@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_routing_replay(alone, replay):
    """Both routings are replayed in π_θ's evaluation and in π_old's; the router has its gradient."""
    o = alone("minirl", routing_replay=replay, **REPLAY)
    check_gradients(o)
    check_acts(o)
    check_metrics(o)


def test_stapos_other_rule(alone):
    """The threshold over the rare tokens of right responses."""
    check_gradients(alone("stapo", entropy_over="rare", entropy_quantile=0.6))


def check_lr_after_resume(name: str, module: object, folder: object) -> None:
    """Steps 1 to 6 in one go, and 1 to 2 with a resume to 6: the same lr at every update, rising over the warm-up."""
    world = setup()
    try:
        rates = []
        for steps, resume in ((2, False), (6, True)):
            flags = {"save_every": 2, "resume": resume, "warmup": 4}
            updates = record(module, world, folder, steps=steps, save=True, **flags).updates
            rates += [update["lr"] for update in updates if update["lr"] != [0.0]]  # loading takes an empty step
    finally:
        torch.distributed.destroy_process_group()
    expected = [1e-3 * min(1.0, step / 4) for step in (1, 2, 3, 4, 5, 6) for _ in range(M)]
    assert rates == [pytest.approx([lr]) for lr in expected]


def test_lr_after_a_resume(tmp_path):
    check_lr_after_resume("grpo", grpo, tmp_path / "run")


@pytest.mark.parametrize("name", ["grpo", "vcpo"])
def test_training_does_not_depend_on_how_often_one_evaluates(name, tmp_path, monkeypatch):
    check_evaluation_is_beside_training(name, tmp_path, monkeypatch)


def check_evaluation_is_beside_training(name: str, folder: object, monkeypatch: object) -> None:
    """With the real engine, whose random state an evaluation uses: the same samples, gradients and metrics."""
    lines = []
    for every in (1, 100):
        flags = [*SMALL, "--eval_every", every, "--steps", 3, "--run_dir", folder / f"every-{every}"]
        flags += ["--lag", 1] if name == "vcpo" else []
        with monkeypatch.context() as patch:
            patch.setattr("common.tracking.draw_curves", lambda *arguments: "")
            assert run_here(patch, importlib.import_module(name).main, *flags) == 0
        rows = metrics(folder / f"every-{every}")
        assert sum("greedy" in row for row in rows) == (4 if every == 1 else 2)
        lines.append([{k: v for k, v in row.items() if k not in ("greedy", "sampled")} for row in rows])
    assert lines[0] == lines[1]


def check_benchmark(tmp_path: object) -> None:
    """--eval_only: every problem of every set, `eval_samples` times, at T 1.0 / top-p 1.0 and at T 0.7 / top-p 0.9."""
    world = setup()
    try:
        engine, (problems, _) = oracle.Stored(world, "model"), oracle.task()
        args = grpo.Args(max_new_tokens=LIMIT, eval_samples=SAMPLES)
        sets = replace(problems, sets={"one": problems.held_out, "two": problems.held_out[:2]})
        common.evaluation.benchmark(engine, sets, oracle.tokenizer(), args, world, tmp_path, 0)
    finally:
        torch.distributed.destroy_process_group()
    asked = [(call["prompts"], call["n"], call["temperature"], call["top_p"], call["limit"]) for call in engine.calls]
    how = [(SAMPLES, 1.0, 1.0, LIMIT), (SAMPLES, 0.7, 0.9, LIMIT)]
    assert asked == [(HELD_OUT, *h) for h in how] + [(HELD_OUT[:2], *h) for h in how]


def test_benchmark(tmp_path):
    check_benchmark(tmp_path)


def check_top_p() -> None:
    """top-p acts in the engine: a nucleus of next to nothing is the greedy token; half of it leaves the likelier ones
    alone; 1 leaves all."""
    lm, tokenizer = load_model("tiny")
    world = setup()
    try:
        engine = common.rollout.HFEngine(lm, world, 0, "float32", 1024)
        ids = [tokenizer(prompt)["input_ids"] for prompt in TRAIN[:4]]
        draws = {p: engine.generate(ids, 16, 1, 1.0, top_p=p).tokens[:, 0].view(4, 16) for p in (1e-6, 0.5, 1.0)}
        greedy = engine.generate(ids, 1, 1, 0.0).tokens
    finally:
        torch.distributed.destroy_process_group()
    with torch.no_grad():
        first = [oracle.untrained()(torch.tensor([prompt])).logits[0, -1].softmax(-1) for prompt in ids]
    for i, p in enumerate(first):
        order = p.sort(descending=True)
        nucleus = order.indices[: int((order.values.cumsum(0) < 0.5).sum()) + 1]
        assert (draws[1e-6][i] == greedy[i]).all() and torch.isin(draws[0.5][i], nucleus).all()
    assert any(len(draws[1.0][i].unique()) > len(draws[0.5][i].unique()) for i in range(4))


def test_top_p():
    check_top_p()


# Damage to `main` and to `common`: (algorithm, the check that sees it, file, what stands there, what it becomes).
COUNT = 'scale_gradients(policy, world.size / global_sum({"count": denominator}, world)["count"])'
SAME = "range(0, N, N // args.minibatches)"
MUTANTS = {
    "update at temperature 1": ("grpo", check_gradients, "", "micro, args.temperature)", "micro, 1.0)"),
    "π_old at temperature 1": ("grpo", check_gradients, "common.rollout", "batch.rows(rows), args.temperature)", "batch.rows(rows), 1.0)"),
    "rollout at temperature 1": ("grpo", check_prompts, "", "args.max_new_tokens, args.temperature)", "args.max_new_tokens, 1.0)"),
    "π_old is μ": ("grpo", check_gradients, "", "old_logp=micro.old_logp", "old_logp=micro.rollout_logp"),
    "π_old is π_θ": ("grpo", check_gradients, "", "old_logp=micro.old_logp", "old_logp=logp.detach()"),
    "μ is π_old": ("minirl", check_gradients, "", "rollout_logp=micro.rollout_logp", "rollout_logp=micro.old_logp"),
    "reference is the policy (grpo)": ("grpo", check_gradients, "", "all_logprobs(reference, rollout", "all_logprobs(policy, rollout", {"steps": 2}),
    "reference is the policy (goldilocks)": ("goldilocks", check_gradients, "", "all_logprobs(reference, rollout", "all_logprobs(policy, rollout", {"steps": 2}),
    "reference is the policy (deep_grpo)": ("deep_grpo", check_gradients, "", "all_logprobs(reference, rollout", "all_logprobs(policy, rollout", {"steps": 2}),
    "answers of the next row": ("grpo", check_metrics, "", "scores = task.judge(texts,", "scores = task.judge(texts[1:] + texts[:1],"),
    "rewards as [G, P]": ("grpo", check_gradients, "", "device=world.device).view(P, G)  #", "device=world.device).view(G, P).T  #"),
    "advantages as [G, P]": ("grpo", check_gradients, "", "advantages(rewards).flatten()", "advantages(rewards).T.flatten()"),
    "first mini-batch only": ("grpo", check_gradients, "", SAME, "range(0, N // args.minibatches, N // args.minibatches)"),
    "the first mini-batch again and again": ("grpo", check_gradients, "", "rollout.rows(slice(first, first + N // args.minibatches))", "rollout.rows(slice(0, N // args.minibatches))"),
    "mini-batches overlap": ("grpo", check_gradients, "", "rollout.rows(slice(first, first + N // args.minibatches))", "rollout.rows(slice(first, N))"),
    "gradients of the last mini-batch stay": ("grpo", check_gradients, "", "                optimizer.zero_grad()\n", ""),
    "last micro-batch's count": ("grpo", check_gradients, "", "denominator = denominator + count", "denominator = count"),
    "mean of all tokens": ("grpo", check_gradients, "", "denominator = denominator + count", "denominator = denominator + micro.mask.sum()"),
    "last micro-batch left out": ("grpo", check_gradients, "", "in micro_batches(minibatch, args.micro_tokens, world):", "in micro_batches(minibatch, args.micro_tokens, world)[:-1]:"),
    "no gradient clipping": ("grpo", check_gradients, "", "clip_gradients(policy, args.grad_clip)", 'clip_gradients(policy, float("inf"))', {"steps": 2}),
    "clipped to twice the norm": ("grpo", check_gradients, "common.distributed", "clip_grad_norm_(policy.parameters(), max_norm)", "clip_grad_norm_(policy.parameters(), 2 * max_norm)", {"steps": 2}),
    "clipped before it is scaled": ("grpo", check_gradients, "", COUNT, f"clip_gradients(policy, args.grad_clip); {COUNT}"),
    "no warm-up": ("grpo", check_rates, "", "args.lr * min(1.0, step / max(1, args.warmup))", "args.lr"),
    "warm-up starts at 0": ("grpo", check_rates, "", "args.lr * min(1.0, step /", "args.lr * min(1.0, (step - 1) /"),
    "warm-up never ends": ("grpo", check_lr_after_resume, "", "args.lr * min(1.0, step / max(1, args.warmup))", "args.lr * step / max(1, args.warmup)"),
    "warm-up begins anew on resume": ("grpo", check_lr_after_resume, "", "min(1.0, step / max(1", "min(1.0, (run.bar.n - run.bar.initial + 1) / max(1"),
    "betas not handed on": ("grpo", check_rates, "", "args.betas, ", ""),
    "weight decay not handed on": ("grpo", check_rates, "", "weight_decay=args.weight_decay", "weight_decay=0.0"),
    "the same prompts in every step": ("grpo", check_prompts, "", "cursor = (step - 1) * args.prompts_per_step", "cursor = 0 * args.prompts_per_step"),
    "prompts begin at the second step's": ("grpo", check_prompts, "", "cursor = (step - 1) * args.prompts_per_step", "cursor = step * args.prompts_per_step"),
    "one sampled prompt for all": ("grpo", check_prompts, "", "[p.prompt_ids for p in problems], G", "[problems[0].prompt_ids for p in problems], G"),
    "engine not synced": ("grpo", check_sync, "", '        with run.clock("sync"):\n            engine.sync(policy)\n', ""),
    "engine synced before the update": ("grpo", check_sync, "", '        with run.clock("update"):\n', '        engine.sync(policy)\n        with run.clock("update"):\n'),
    "engine given nothing at the start": ("grpo", check_sync, "", "    engine.sync(policy)\n    if args.eval_only", "    if args.eval_only"),
    "evaluated on training problems": ("grpo", check_evaluation, "common.evaluation", "problems, state, right = task.held_out[world.rank :: world.size]", "problems, state, right = [task.train(i) for i in range(len(task.held_out))]"),
    "evaluated on half of the problems": ("grpo", check_evaluation, "common.evaluation", "task.held_out[world.rank :: world.size], engine", "task.held_out[::2], engine"),
    "greedy at the sampling temperature": ("grpo", check_evaluation, "common.evaluation", '("greedy", 1, 0.0)', '("greedy", 1, args.temperature)'),
    "sampled at temperature 1": ("grpo", check_evaluation, "common.evaluation", '("sampled", args.eval_samples, args.temperature)', '("sampled", args.eval_samples, 1.0)'),
    "one sample": ("grpo", check_evaluation, "common.evaluation", '("sampled", args.eval_samples, args', '("sampled", 1, args'),
    "sampled accuracy not divided": ("grpo", check_evaluation, "common.evaluation", "for _ in range(n)])) / n", "for _ in range(n)]))"),
    "evaluation's random numbers stay": ("grpo", check_evaluation_is_beside_training, "common.evaluation", "    engine.load_state_dict(state)  #", "    pass  #"),
    "no top-p in the benchmark": ("grpo", check_benchmark, "common.evaluation", "args.max_new_tokens, temperature, top_p=top_p)", "args.max_new_tokens, temperature)"),
    "benchmark of the first set": ("grpo", check_benchmark, "common.evaluation", "in task.sets.items():", "in list(task.sets.items())[:1]:"),
    "top-p without effect": ("grpo", check_top_p, "common.rollout", "if top_p < 1:", "if False:"),
    "top-p keeps the least likely": ("grpo", check_top_p, "common.rollout", ".sort(dim=-1, descending=True)", ".sort(dim=-1)"),
    "length counts padding": ("grpo", check_metrics, "", "response_len=(tokens, N)", "response_len=(rollout.mask.numel(), N)"),
    "groups without gradient counted by row": ("grpo", check_metrics, "", ".all(dim=1).sum(), P),", ".all(dim=1).sum(), N),"),
    "mean of micro-batch means": ("grpo", check_metrics, "common.tracking", "self.counts[name] = self.counts[name] + (0.0 if count is None else count)", "self.counts[name] = count or 1.0"),
    "entropy per response": ("grpo", check_metrics, "", "entropy=(entropy.sum(), micro.mask.sum())", "entropy=(entropy.sum(), len(entropy))"),
    "stapo: threshold of the micro-batch": ("stapo", check_gradients, "", "                        threshold=threshold,  # <stapo>\n", ""),
    "stapo: threshold of the whole rollout": ("stapo", check_gradients, "", "now = all_logprobs(policy, minibatch, args, world)", "minibatch = rollout; now = all_logprobs(policy, minibatch, args, world)"),
    "r2 replays nothing": ("minirl", check_gradients, "", "rollout.replayed_experts = rollout.trainer_experts", "pass", {"routing_replay": "r2"} | REPLAY),
    "r2 replays the sampler's": ("minirl", check_gradients, "", "rollout.replayed_experts = rollout.trainer_experts", "rollout.replayed_experts = rollout.sampler_experts", {"routing_replay": "r2"} | REPLAY),
    "r3 replays nothing": ("minirl", check_gradients, "", "rollout.replayed_experts = rollout.sampler_experts", "pass", {"routing_replay": "r3"} | REPLAY),
    "r3 replays after π_old": ("minirl", check_gradients, "", 'if args.routing_replay == "r3":\n                rollout.replayed', 'if hasattr(rollout, "old_logp"):\n                rollout.replayed', {"routing_replay": "r3"} | REPLAY),
    "no replay in the update": ("minirl", check_gradients, "common.rollout", 'replayed = getattr(batch, "replayed_experts", None)', 'replayed = None if torch.is_grad_enabled() else getattr(batch, "replayed_experts", None)', {"routing_replay": "r3"} | REPLAY),
    "vcpo: ESS of truncated weights": ("vcpo", check_rates, "", "ess_ratio(torch.cat(log_w))", "ess_ratio(torch.cat(log_w).clamp(max=2.08))"),
    "vcpo: lr not scaled": ("vcpo", check_rates, "", "warm_lr * scale", "warm_lr"),
    "vcpo: lr scaled by ρ": ("vcpo", check_rates, "", "** 0.5 if args.ess_scaling", "if args.ess_scaling"),
    "vcpo: ρ_on ignored": ("vcpo", check_rates, "", "min(1.0, rho / args.rho_on)", "min(1.0, rho)"),
    "vcpo: μ is π_old": ("vcpo", check_gradients, "", '"rollout_logp": row.rollout_logp', '"rollout_logp": row.old_logp'),
    "vcpo: norms of the weighted gradient": ("vcpo", check_gradients, "", "row.mask.sum() / truncated(args, log_w[-1])", "row.mask.sum()[None]"),
    "vcpo: norms of the mean": ("vcpo", check_gradients, "", "row.mask.sum() / truncated(args, log_w[-1])", "1 / truncated(args, log_w[-1])"),
    "vcpo: advantages of the batch just sampled": ("vcpo", check_gradients, "", "rollout, ahead = queue.popleft(), None", "fresh, (rollout, ahead) = rollout, (queue.popleft(), None); rollout.advantages = fresh.advantages"),
    "vcpo: the newest batch first": ("vcpo", check_metrics, "", "queue.popleft()", "queue.pop()"),
    "vcpo: gradient of one group": ("vcpo", check_gradients, "", "parameter.grad = summed", "parameter.grad = summed / 2"),
    "goldilocks: the least valuable": ("goldilocks", check_teacher, "", "key=lambda k: -scores[k]", "key=lambda k: scores[k]"),
    "goldilocks: always by chance": ("goldilocks", check_teacher, "", "explore = args.explore if", "explore = 1.0 if"),
    "goldilocks: taken twice": ("goldilocks", check_teacher, "", "        taken.add(prompts[k])\n", ""),
    "goldilocks: the wrong targets": ("goldilocks", check_teacher, "", "learning_value(rewards), world).cpu()", "0.5 - learning_value(rewards), world).cpu()"),
    "goldilocks: the teacher's sum": ("goldilocks", check_teacher, "", "scale_gradients(teacher, world.size / args.teacher_batch)", "pass"),
    "goldilocks: the teacher's prompts shifted": ("goldilocks", check_teacher, "", "ids = [teacher_tokenizer(prompt)", "ids = [teacher_tokenizer(prompts[0])"),
    "goldilocks: one lr for the head": ("goldilocks", check_teacher, "", '"lr": 10 * args.teacher_lr', '"lr": args.teacher_lr'),
    "goldilocks: one pool for all steps": ("goldilocks", check_prompts, "", "range((step - 1) * B, step * B)", "range(0, B)"),
    "deep_grpo: the fit is not used": ("deep_grpo", check_pivots, "", "fit_success(list(feedback))", 'fit_success([])'),
    "deep_grpo: saved is all": ("deep_grpo", check_pivots, "", "(outcome > 0).any(dim=1)  #", "(outcome > 0).all(dim=1)  #"),
    "deep_grpo: branches in the wrong mini-batch": ("deep_grpo", check_gradients, "", "failed.repeat_interleave(K), torch.ones_like", "failed.flip(0).repeat_interleave(K), torch.ones_like"),
    "deep_grpo: branches as main rows": ("deep_grpo", check_gradients, "", "torch.ones_like(grown.advantages)", "torch.zeros_like(grown.advantages)"),
    "deep_grpo: branches compared across pivots": ("deep_grpo", check_gradients, "", "advantages(outcome).flatten()", "(outcome - outcome.mean()).flatten()"),
    "deep_grpo: no balance": ("deep_grpo", check_gradients, "", 'balance=streams["main"] / max(1.0, streams["branch"])', "balance=1.0"),
    "deep_grpo: λ ignored": ("deep_grpo", check_gradients, "", "(1 + (args.branch_weight - 1) * branch)", "(1 + 0 * branch)"),
    "deep_grpo: branches of the first failures' prompts": ("deep_grpo", check_gradients, "", "grown = engine.generate(starts, K", "grown = engine.generate(starts[:1] * len(starts), K"),
    "deep_grpo: idle branches kept": ("deep_grpo", check_metrics, "", "grown.rows(grown.advantages.abs() > 1e-8)", "grown.rows(grown.advantages.abs() > -1)"),
}  # fmt: skip


ENOUGH = {check_rates: 2, check_prompts: 2, check_sync: 2, check_teacher: 2, check_pivots: 3}  # steps, else 1


@pytest.mark.parametrize("name", MUTANTS)
def test_damage_is_seen(alone, tmp_path, monkeypatch, name):
    algorithm, check, where, old, new, *flags = MUTANTS[name]
    damage = (where or algorithm, old, new)
    if check in (check_lr_after_resume, check_evaluation_is_beside_training, check_benchmark, check_top_p):
        with damaged(algorithm, *damage) as module, pytest.raises(AssertionError):
            if check is check_lr_after_resume:
                check(algorithm, module, tmp_path / "run")
            elif check is check_evaluation_is_beside_training:
                check(algorithm, tmp_path, monkeypatch)
            else:
                check(*[tmp_path] * (check is check_benchmark))
        return
    o = alone(algorithm, *damage, **({"steps": ENOUGH.get(check, 1)} | (flags[0] if flags else {})))
    with pytest.raises(AssertionError):
        check(o)


# The same on two ranks: each has half of every batch, and its own micro-batches.
TWO_RANK_MUTANTS = {
    "the same prompts on every rank": ("grpo", check_prompts, "", "args.prompts_per_step + world.rank * P", "args.prompts_per_step"),
    "the ranks' shares swapped": ("grpo", check_prompts, "", "+ world.rank * P", "+ (1 - world.rank) * P"),
    "gradient divided by the ranks": ("grpo", check_gradients, "", "world.size / global_sum(", "1 / global_sum("),
    "the own rank's count": ("maspo", check_gradients, "", COUNT, "scale_gradients(policy, 1 / denominator)"),
    "metrics of one rank": ("grpo", check_metrics, "common.tracking", "sums, counts = global_sum(self.sums, world), global_sum(self.counts, world)", "sums, counts = ({k: float(v) for k, v in x.items()} for x in (self.sums, self.counts))"),
    "all held-out problems on every rank": ("grpo", check_evaluation, "common.evaluation", "problems, state, right = task.held_out[world.rank :: world.size]", "problems, state, right = task.held_out"),
    "accuracy of one rank": ("grpo", check_evaluation, "common.evaluation", "global_sum(right, world).items()", "right.items()"),
    "stapo: threshold of one rank": ("stapo", check_gradients, "", "gather(population, world)", "population", {"steps": 2}),
    "vcpo: ESS of one rank": ("vcpo", check_rates, "", "ess_ratio(torch.cat(log_w))", "ess_ratio(torch.cat(log_w[world.rank :: 2]))"),
    "vcpo: gradient of the ranks' mean": ("vcpo", check_gradients, "", "(loss * (world.size * turn))", "(loss * turn)"),
    "vcpo: mean over one rank": ("vcpo", check_gradients, "", "1 / (len(minibatch) * world.size)", "1 / len(minibatch)"),
    "goldilocks: every rank the first slots": ("goldilocks", check_teacher, "", "zip(pool[mine], choice[mine])", "zip(pool[:P], choice[:P])"),
    "goldilocks: observations of one rank": ("goldilocks", check_teacher, "", "gather(learning_value(rewards), world).cpu()", "learning_value(rewards).repeat(world.size)"),
    "goldilocks: the teacher's mean over one rank": ("goldilocks", check_teacher, "", "scale_gradients(teacher, world.size / args", "scale_gradients(teacher, 1 / args"),
    "deep_grpo: pivots of one rank": ("deep_grpo", check_pivots, "", "zip(gather(torch.tensor(depths), world).tolist(), gather(saved.float(), world).tolist())", "zip(depths, saved.float().tolist())"),
    "deep_grpo: balance of one rank": ("deep_grpo", check_gradients, "", "streams = global_sum(streams, world)", "pass"),
}  # fmt: skip


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The oracles of all files on two ranks, and of the damaged copies, by name."""
    jobs = {name: (name, (), {"steps": STEPS.get(name, 2)}) for name in ALGORITHMS}
    for name, (algorithm, check, where, old, new, *flags) in TWO_RANK_MUTANTS.items():
        flags = {"steps": ENOUGH.get(check, 1)} | (flags[0] if flags else {})
        jobs[name] = (algorithm, (where or algorithm, old, new), flags)
    found = on_two_ranks(list(jobs.values()), tmp_path_factory.mktemp("ranks"))
    return {name: Oracle(job[0], records) for (name, job), records in zip(jobs.items(), found)}


@pytest.mark.parametrize(("name", "check"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_two_ranks(together, name, check):
    check(together[name])


@pytest.mark.parametrize("name", TWO_RANK_MUTANTS)
def test_damage_on_two_ranks_is_seen(together, name):
    with pytest.raises(AssertionError):
        TWO_RANK_MUTANTS[name][1](together[name])
