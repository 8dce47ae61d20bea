"""DEEP-GRPO: the loss of two streams, pivots and their distribution, the regression, a run's
branches; mutants."""

import math
import random
from dataclasses import replace
from types import ModuleType

import deep_grpo
import pytest
import torch
from common.batch import Rollout
from common.logprobs import Policy, response_logprobs
from common.model import load_model
from common.rollout import HFEngine
from test_exactness import PROMPTS, gradients, stored_rollout
from test_losses import FIXTURE, caught, loss_of, mutate, no_kl, toy_batch
from test_run import SMALL, metrics, run_here


def check_fixture(module: ModuleType) -> None:
    """Without branches: the token-mean of PPO's clipped objective, by TRL and others (their ε
    0.2)."""
    case, batch = FIXTURE["cases"]["bnpo_eps0.2_tokenmean"], toy_batch()
    batch["logp"].requires_grad_()
    loss, _ = loss_of(module, no_kl(module), **batch)
    loss.backward()
    assert abs(loss.item() - case["loss"]) < 1e-8
    assert torch.allclose(
        batch["logp"].grad, torch.tensor(case["grad"], dtype=torch.float64), rtol=0, atol=1e-8
    )


def check_streams(module: ModuleType) -> None:
    """Each stream is averaged over its own tokens; λ weighs the branches' policy term and not their
    KL."""
    batch, branch = toy_batch(), torch.tensor([0.0, 1, 0, 0, 1, 0], dtype=torch.float64)
    batch["logp"].requires_grad_()
    batch["ref_logp"] = batch["logp"].detach() - 0.3 * batch["mask"]
    args, mask, logp = (
        replace(module.Args(), beta=0.1, branch_weight=0.7),
        batch["mask"],
        batch["logp"],
    )
    loss, _ = loss_of(module, args, **batch, branch=branch)
    loss.backward()
    A, ratio = batch["advantages"][:, None], (logp.detach() - batch["old_logp"]).exp()
    alive = ~(((A > 0) & (ratio > 1.2)) | ((A < 0) & (ratio < 0.8)))
    stream = 1 - 0.3 * branch[:, None]
    tokens = torch.where(branch.bool()[:, None], mask[branch == 1].sum(), mask[branch == 0].sum())
    weight = stream * alive * ratio * A + 0.1 * (math.exp(-0.3) - 1)
    assert torch.allclose(-logp.grad, weight * mask / tokens, rtol=1e-9, atol=1e-15)


def check_parts_add_up(module: ModuleType) -> None:
    """Micro-batches, one of them branches only, with the mini-batch's T_main / T_branch: the
    whole's loss."""
    batch, branch = toy_batch(), torch.tensor([0.0, 1, 0, 0, 1, 0], dtype=torch.float64)
    whole = loss_of(module, no_kl(module), **batch, branch=branch)[0]
    tokens = batch["mask"].sum(1)
    batch |= {"branch": branch, "rollout_logp": batch["old_logp"], "entropy": 0 * batch["mask"]}
    balance = (tokens * (1 - branch)).sum() / (tokens * branch).sum()
    parts = [
        module.policy_loss(no_kl(module), **{k: v[rows] for k, v in batch.items()}, balance=balance)
        for rows in ([0, 2], [1, 4], [3, 5])
    ]
    assert torch.isclose(sum(p[0] for p in parts) / sum(p[1] for p in parts), whole, rtol=1e-12)


def check_advantages(module: ModuleType) -> None:
    """Reward minus the mean of the row, nothing else."""
    numbers = FIXTURE["advantages"]
    rewards, expected = (
        torch.tensor(numbers[name], dtype=torch.float64) for name in ("rewards", "mean_only")
    )
    assert torch.allclose(module.advantages(rewards), expected, rtol=0, atol=1e-12)


def check_pivots(module: ModuleType) -> None:
    """The root and every boundary but the response's last token."""
    assert module.pivots([1, 2, 9, 3, 9, 4], {9}) == [0, 3, 5]
    assert module.pivots([1, 9, 2, 9], {9}) == [0, 2]
    assert module.pivots([1, 8, 2, 9, 3], {8, 9}) == [0, 2, 4] and module.pivots([4], {9}) == [0]


def check_pivot_distribution(module: ModuleType) -> None:
    """Q ∝ σ(u d + v) d^γ with d = (i+1)/(M+1), summing to 1; γ and the fit each matter."""
    depth, q = module.pivot_distribution(3, -4.0, 1.0, 2.0)
    d = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    expected = d**2 / (1 + torch.exp(4 * d - 1))
    assert (
        torch.allclose(depth, d)
        and torch.allclose(q, expected / expected.sum())
        and abs(q.sum() - 1) < 1e-12
    )
    assert torch.allclose(
        module.pivot_distribution(4, 0.0, math.inf, 0.0)[1], torch.full((4,), 0.25).double()
    )
    assert module.pivot_distribution(1, -50.0, -50.0, 2.0)[1].item() == 1


def check_choice_is_in_proportion(module: ModuleType) -> None:
    """6000 draws for a response of four segments: counts within four standard deviations of Q."""
    response, rng = [1, 9, 1, 1, 9, 1, 9, 2], random.Random(0)
    _, q = module.pivot_distribution(4, -3.0, 2.0, 2.0)
    draws = [module.choose_pivot(response, {9}, -3.0, 2.0, 2.0, rng) for _ in range(6000)]
    for i, kept in enumerate((0, 2, 5, 7)):
        count = sum(draw == (kept, (i + 1) / 5) for draw in draws)
        assert abs(count - 6000 * q[i]) < 4 * (6000 * q[i] * (1 - q[i])) ** 0.5


def simulated(n: int, u: float, v: float, seed: int = 0) -> list[tuple[float, float]]:
    generator = torch.Generator().manual_seed(seed)
    depth = torch.rand(n, generator=generator, dtype=torch.float64)
    return list(
        zip(
            depth.tolist(),
            torch.bernoulli(torch.sigmoid(u * depth + v), generator=generator).tolist(),
        )
    )


def check_fit(module: ModuleType) -> None:
    """Recovers known (u, v) from 10,000 pairs; equals LBFGS on the same objective; P = 1 before it
    can be fitted."""
    u, v = module.fit_success(simulated(10_000, -5.0, 3.0))
    assert abs(u + 5) < 0.35 and abs(v - 3) < 0.25
    for pairs in (
        simulated(40, -5.0, 3.0),
        simulated(400, 2.0, -1.0, 1),
        [(0.5, 1.0)] * 3000 + [(0.4, 0.0)],
    ):
        depth, success = torch.tensor(pairs, dtype=torch.float64).T
        found = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        lbfgs = torch.optim.LBFGS(
            [found], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
        )

        def objective(depth=depth, success=success, found=found, lbfgs=lbfgs) -> torch.Tensor:
            lbfgs.zero_grad()
            logits = found[0] * depth + found[1]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                logits, success, reduction="sum"
            )
            (loss := loss + found[0] ** 2 / 2).backward()
            return loss

        lbfgs.step(objective)
        assert torch.allclose(
            torch.tensor(module.fit_success(pairs)).double(), found.detach(), rtol=1e-4, atol=1e-4
        )
    assert module.fit_success(simulated(10, -5.0, 3.0)) == (0.0, math.inf)
    assert module.fit_success([(0.5, 1.0)] * 50) == (0.0, math.inf)


CHECKS = (
    *(check_fixture, check_streams, check_parts_add_up, check_advantages),
    *(check_pivots, check_pivot_distribution, check_choice_is_in_proportion, check_fit),
)
MUTANTS = {
    "sign": ("return -per_response.sum(), main_tokens", "return per_response.sum(), main_tokens"),
    "one stream": ("(1 + (balance - 1) * branch)", "1.0"),
    "branches in the main average": (
        "return -per_response.sum(), main_tokens",
        "return -per_response.sum(), mask.sum()",
    ),
    "λ ignored": ("(1 + (args.branch_weight - 1) * branch)", "(1 + 0 * branch)"),
    "λ on main": (
        "(1 + (args.branch_weight - 1) * branch)",
        "(1 + (args.branch_weight - 1) * (1 - branch))",
    ),
    "λ on the KL": (
        "args.beta * k3",
        "args.beta * k3 * (1 + (args.branch_weight - 1) * branch)[:, None]",
    ),
    "sequence mean": (
        "(objective * mask).sum(dim=1) *",
        "(objective * mask).sum(dim=1) / mask.sum(dim=1) * main_tokens / len(mask) *",
    ),
    "no clip": ("torch.minimum(ratio * A, clipped * A)", "ratio * A"),
    "std": ("return centred  #", "return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)  #"),
    "mean of the batch": ("rewards.mean(dim=1, keepdim=True)", "rewards.mean()"),
    "the last segment too": (" and i < len(response)]", "]"),
    "no root": ("return [0] + [i", "return [i"),
    "boundary belongs to the next segment": (
        "enumerate(response, 1) if",
        "enumerate(response, 0) if",
    ),
    "root of depth 0": ("torch.arange(1, count + 1)", "torch.arange(count)"),
    "depth of the wrong length": ("/ (count + 1)", "/ count"),
    "no depth": ("* depth**depth_power", "* depth**0"),
    "no estimate": ("torch.sigmoid(u * depth + v) *", "1.0 *"),
    "always the likeliest": (
        "rng.choices(range(len(cuts)), chances.tolist())[0]",
        "int(chances.argmax())",
    ),
    "uniform pivot": (
        "rng.choices(range(len(cuts)), chances.tolist())[0]",
        "rng.randrange(len(cuts))",
    ),
    "penalty on the intercept": (
        "torch.tensor([1.0, 0.0], dtype",
        "torch.tensor([1.0, 1.0], dtype",
    ),
    "no penalty": ("torch.tensor([1.0, 0.0], dtype", "torch.tensor([0.0, 0.0], dtype"),
    "one Newton step": ("range(30)", "range(1)"),
    "fitted at once": ("len(feedback) <= 10", "len(feedback) <= 2"),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_deep_grpo(check):
    check(deep_grpo)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    assert caught(mutate(deep_grpo, *MUTANTS[name]), CHECKS)


def test_the_prefix_gets_no_gradient(world):
    """At the hidden states that predict prefix tokens the loss has gradient exactly 0; at the
    suffix's it has some."""
    lm, tokenizer = load_model("tiny")
    prompt, prefix = tokenizer("7*8-9+6=")["input_ids"], tokenizer("7*8=56;")["input_ids"]
    rollout = HFEngine(lm, world, 0, "float32", 64).generate([prompt], 4, 64, 1.0, [prefix])
    policy, seen = Policy(lm), []
    lm.base_model.register_forward_hook(
        lambda module, inputs, output: seen.append(output.last_hidden_state)
    )
    logp, entropy = response_logprobs(policy, rollout, 1.0)
    seen[0].retain_grad()
    rollout.advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    columns = {name: getattr(rollout, name) for name in ("rollout_logp", "advantages", "mask")}
    tensors = {
        "logp": logp,
        "entropy": entropy,
        "old_logp": rollout.rollout_logp,
        "ref_logp": logp.detach() - 0.1,
    }
    loss_of(
        deep_grpo,
        deep_grpo.Args(beta=0.1),
        branch=torch.tensor([0.0, 1, 1, 1]),
        **columns,
        **tensors,
    )[0].backward()
    start = len(prompt) + len(prefix)
    assert (
        rollout.prompt_len.tolist() == [start] * 4
        and rollout.prefix_len.tolist() == [len(prefix)] * 4
    )
    assert (seen[0].grad[:, : start - 1] == 0).all()
    for row, length in enumerate(rollout.mask.sum(1).int().tolist()):
        assert (seen[0].grad[row, start - 1 : start - 1 + length].norm(dim=1) > 0).all()
        assert (seen[0].grad[row, start - 1 + length :] == 0).all()


def test_branches_of_a_run(tmp_path, monkeypatch):
    """Groups of K siblings from failed parents, all with a prefix of the parent's, centred among
    themselves."""
    joined, G, K = [], 4, 6
    join = Rollout.join

    def spy(main: Rollout, grown: Rollout) -> Rollout:
        joined.append((main, grown))
        return join(main, grown)

    monkeypatch.setattr(Rollout, "join", spy)
    monkeypatch.setattr(deep_grpo, "fit_success", lambda feedback: (0.0, math.inf))
    flags = [*SMALL, "--steps", 3, "--branches", K, "--run_dir", tmp_path / "run"]
    assert run_here(monkeypatch, deep_grpo.main, *flags) == 0
    semicolon, prefixed = load_model("tiny")[1](";")["input_ids"][0], 0
    for main, grown in joined:
        assert len(grown) % K == 0 and len(grown) > 0
        responses, siblings = main.response_ids(), grown.response_ids()
        for first in range(0, len(grown), K):
            rows, parent = slice(first, first + K), int(grown.origin[first])
            assert (grown.origin[rows] == parent).all() and abs(grown.advantages[rows].sum()) < 1e-5
            group = main.advantages[parent // G * G : parent // G * G + G]
            assert main.advantages[parent] == group.min()  # a failed one
            kept = int(grown.prefix_len[first])
            assert all(sibling[:kept] == responses[parent][:kept] for sibling in siblings[rows])
            assert kept == 0 or responses[parent][kept - 1] == semicolon
            assert kept < len(responses[parent]) and len({tuple(s) for s in siblings[rows]}) > 1
            prefixed += kept > 0
    assert prefixed
    assert all(line["extra_tokens"] > 0 for line in metrics(tmp_path / "run")[1:])
    state = torch.load(tmp_path / "run/checkpoints/step_000003/rank0.pt")["state"]
    pivots = state["feedback"]
    assert len(pivots) == sum(round(line["failed"] * 16) for line in metrics(tmp_path / "run")[1:])
    assert all(0 < depth < 1 and success in (0.0, 1.0) for depth, success in pivots)


def test_without_weight_branches_change_nothing(world, tmp_path, monkeypatch):
    """λ = 0 and β = 0: the gradient is that of a run which discards its branches, and that of λ = 1
    is another."""
    rollout, flags = stored_rollout(world), {"beta": 0.0, "branch_weight": 0.0}
    weightless = gradients(rollout, PROMPTS, world, tmp_path, monkeypatch, "deep_grpo", **flags)
    discarded = gradients(
        rollout, PROMPTS, world, tmp_path, monkeypatch, "deep_grpo", beta=0.0, min_branches=10**6
    )
    both = gradients(rollout, PROMPTS, world, tmp_path, monkeypatch, "deep_grpo", beta=0.0)
    assert ((weightless - discarded).norm(dim=1) < 2e-6 * discarded.norm(dim=1)).all()
    assert ((both - discarded).norm(dim=1) > 0.1 * discarded.norm(dim=1)).all()


def test_no_failures_no_branches(tmp_path, monkeypatch, capsys):
    """A judge that passes everything: no branch is sampled, nothing breaks, and the run says that
    it did nothing."""
    load_task = deep_grpo.load_task

    def lenient(*arguments: object) -> object:
        task = load_task(*arguments)
        task.judge = lambda completions, answers: [1.0] * len(answers)
        return task

    monkeypatch.setattr(deep_grpo, "load_task", lenient)
    assert (
        run_here(monkeypatch, deep_grpo.main, *SMALL, "--steps", 2, "--run_dir", tmp_path / "run")
        == 0
    )
    assert "branches_used was 0 at every step" in capsys.readouterr().out
    line = metrics(tmp_path / "run")[-1]
    assert (
        line["failed"] == line["branches_used"] == line["extra_tokens"] == 0
        and "branch_reward" not in line
    )


def test_too_few_branches_are_discarded(tmp_path, monkeypatch):
    flags = [*SMALL, "--steps", 2, "--min_branches", 10_000, "--run_dir", tmp_path / "run"]
    assert run_here(monkeypatch, deep_grpo.main, *flags) == 0
    assert all(
        line["branches_used"] == 0 and line["extra_tokens"] > 0
        for line in metrics(tmp_path / "run")[1:]
    )


def test_a_rank_without_failures_waits_for_the_other(tmp_path, command):
    """Two gloo ranks, of which the second fails nowhere: collectives still match, the fit is the
    same on both."""
    script = tmp_path / "lenient.py"
    script.write_text(
        "import os, sys\nsys.path.insert(0, os.getcwd())\nimport deep_grpo\nfrom common.launch import launch\n"
        "load = deep_grpo.load_task\n"
        "def lenient(*arguments):\n    task = load(*arguments)\n    judge = task.judge\n"
        "    task.judge = lambda c, a: [1.0] * len(a) if os.environ['RANK'] == '1' else judge(c, a)\n    return task\n"
        "deep_grpo.load_task = lenient\nlaunch(deep_grpo.main, deep_grpo.Args)\n"
    )
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, *SMALL]
    run = command(*ranks, "--steps", 2, "--run_dir", tmp_path / "run")
    assert run.returncode == 0, run.stderr[-3000:]
    states = [
        torch.load(tmp_path / f"run/checkpoints/step_000002/rank{r}.pt")["state"] for r in (0, 1)
    ]
    assert states[0]["feedback"] == states[1]["feedback"] and len(states[0]["feedback"]) > 0


def test_a_mixture_of_experts_branches_too(tmp_path, monkeypatch):
    """The experts' column of main rows and branches is joined, though it has two more
    dimensions."""
    flags = [*SMALL, "--steps", 1, "--model", "tiny-moe", "--run_dir", tmp_path / "run"]
    assert run_here(monkeypatch, deep_grpo.main, *flags) == 0
    assert metrics(tmp_path / "run")[-1]["branches_used"] > 0


@pytest.mark.parametrize("flags", [("--boundary", "@"), ("--branches", 1)])
def test_impossible_settings_are_refused(tmp_path, monkeypatch, capsys, flags):
    assert run_here(monkeypatch, deep_grpo.main, *flags, "--run_dir", tmp_path / "run") == 2
    assert flags[0] in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_restarts_are_counted_apart(tmp_path, monkeypatch):
    """Of all pivots those at the bare prompt; the four quarters hold each of the others once; both
    kinds' successes."""
    choose, drawn = deep_grpo.choose_pivot, []

    def spy(*arguments: object) -> tuple[int, float]:
        drawn.append(choose(*arguments))
        return drawn[-1]

    monkeypatch.setattr(deep_grpo, "choose_pivot", spy)
    flags = [*SMALL, "--steps", 2, "--prompts_per_step", 32, "--run_dir", tmp_path / "run"]
    assert run_here(monkeypatch, deep_grpo.main, *flags) == 0
    lines, saved, quarters = (
        metrics(tmp_path / "run")[1:],
        0.0,
        [f"pivots_quarter_{i}" for i in (1, 2, 3, 4)],
    )
    counts = [round(line["failed"] * 128) for line in lines]
    for line, pivots in zip(lines, (drawn[: counts[0]], drawn[counts[0] :])):
        depths = [depth for kept, depth in pivots if kept]
        assert 0 < len(depths) < len(pivots)
        roots = len(pivots) - len(depths)
        assert abs(line["pivots_root"] - roots / len(pivots)) < 1e-9
        expected = [sum(i < 4 * depth <= i + 1 for depth in depths) / len(depths) for i in range(4)]
        assert all(abs(line[name] - share) < 1e-9 for name, share in zip(quarters, expected))
        saved += line["pivots_saved"] * len(depths) + line["pivots_saved_root"] * roots
        assert all(
            0 <= line[f"branch_reward{where}"] <= line[f"pivots_saved{where}"]
            for where in ("", "_root")
        )
    feedback = torch.load(tmp_path / "run/checkpoints/step_000002/rank0.pt")["state"]["feedback"]
    assert (
        len(feedback) == len(drawn) and abs(saved - sum(success for _, success in feedback)) < 1e-6
    )
