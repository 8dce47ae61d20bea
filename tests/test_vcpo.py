"""VCPO: the loss, the baseline, ESS in log space, the queue, exact per-response gradients;
mutants."""

import itertools
import json
import signal
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import vcpo
from common.distributed import gather
from common.logprobs import Policy, response_logprobs
from common.model import load_model
from common.rollout import HFEngine
from common.tracking import Means
from test_losses import FIXTURE, caught, loss_of, mutate
from test_run import SMALL, assert_same_run, metrics, run_here


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.float64)
    logp, rollout_logp = (
        -torch.rand(3, 4, generator=generator, dtype=torch.float64) * mask for _ in range(2)
    )
    advantages = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    return {
        "logp": logp,
        "old_logp": 0 * logp,
        "rollout_logp": rollout_logp,
        "advantages": advantages,
        "mask": mask,
    }


def check_weights(module: ModuleType) -> None:
    """min(w, 8) Â / |y| / B with w of the whole response against μ, for small, large and absurd
    weights."""
    for shift in (0.0, 0.3, 2.0, 300.0, -300.0):
        tensors = batch()
        tensors["rollout_logp"] = tensors["rollout_logp"] - shift * tensors["mask"]
        logp = tensors["logp"].requires_grad_()
        loss, stats = loss_of(module, module.Args(), **tensors)
        loss.backward()
        log_w = ((logp.detach() - tensors["rollout_logp"]) * tensors["mask"]).sum(1).clamp(-20, 20)
        weight = log_w.exp().clamp(max=8.0) * tensors["advantages"] / tensors["mask"].sum(1) / 3
        assert torch.allclose(-logp.grad, weight[:, None] * tensors["mask"], rtol=1e-9, atol=0)
        assert torch.isclose(stats["weight_max"][0], log_w.exp().max())


def check_advantages(module: ModuleType) -> None:
    """z-scores with the population's standard deviation, 0 for a group of equal rewards."""
    numbers = FIXTURE["advantages"]
    rewards, expected = (
        torch.tensor(numbers[name], dtype=torch.float64) for name in ("rewards", "ddof0_eps1e-6")
    )
    # The fixture adds 1e-6 to the std
    assert torch.allclose(module.advantages(rewards), expected, rtol=0, atol=2e-5)


def check_baseline(module: ModuleType) -> None:
    """Equal weights and norms: the group mean, a shift of 0. Otherwise Σ w²|g|² Â / Σ w²|g|², at
    any magnitude."""
    advantages = module.advantages(torch.tensor([[1.0, 0, 0, 1, 0]], dtype=torch.float64))[0]
    same = torch.full((5,), 3.7, dtype=torch.float64)
    assert abs(module.baseline_shift(same, same, advantages)) < 1e-12
    log_w, norms = torch.tensor(
        [[0.1, -0.5, 0.3, 0.0, 1.0], [1.0, 2.0, 0.5, 3.0, 1.5]], dtype=torch.float64
    )
    weight = log_w.exp() ** 2 * norms**2
    assert torch.isclose(
        module.baseline_shift(log_w, norms, advantages), (weight * advantages).sum() / weight.sum()
    )
    assert module.baseline_shift(400 * log_w, norms, advantages).isfinite()


def check_baseline_has_the_least_variance(module: ModuleType) -> None:
    """One-token answers, enumerated, and uncapped weights: the variance of w g (R - b) over μ is
    least at b, compared with a grid of others. (The loss's own estimate is another:
    test_what_the_baseline_is_best_for.)"""
    generator = torch.Generator().manual_seed(1)
    theta, moved = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(2))
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 1], dtype=torch.float64)
    mu, pi = theta.log_softmax(0), (theta + 0.5 * moved).log_softmax(0)
    gradients = torch.eye(6, dtype=torch.float64) - pi.exp()  # ∇_θ log π(a), a row each
    norms, w = gradients.norm(dim=1), (pi - mu).exp()
    # Each outcome stands in the "group" as often as μ draws it: fold the probability into the
    # weight.
    best = module.baseline_shift(pi - mu + mu / 2, norms, rewards)

    def variance(b: torch.Tensor) -> float:
        estimate = (w * (rewards - b))[:, None] * gradients
        mean = mu.exp() @ estimate
        return float(mu.exp() @ estimate.square().sum(1) - mean.square().sum())

    others = [variance(best + delta) for delta in (-0.3, -0.1, -0.03, 0.03, 0.1, 0.3)]
    assert variance(best) < min(others) and variance(best) < variance(mu.exp() @ rewards)


def check_ess(module: ModuleType) -> None:
    """1 on-policy, (Σw)²/(B Σw²) in general, finite for log weights of ±500, where the plain
    formula gives NaN."""
    assert torch.isclose(module.ess_ratio(torch.zeros(64)), torch.tensor(1.0))
    log_w = torch.tensor([0.5, -1.0, 0.1, 2.0], dtype=torch.float64)
    w = log_w.exp()
    assert torch.isclose(module.ess_ratio(log_w), w.sum() ** 2 / (w**2).sum() / 4)
    extreme = torch.tensor([500.0, -500.0, 0.0, 499.0])
    assert 0.25 < module.ess_ratio(extreme) < 0.5
    assert torch.isclose(module.ess_ratio(extreme - 700), module.ess_ratio(extreme), rtol=1e-4)
    released = extreme.exp().sum() ** 2 / (extreme.exp().square().sum() + 1e-8) / 4
    # No damping at all, exactly when it is needed
    assert released.isnan() and min(1.0, released.item()) == 1.0


CHECKS = (
    check_weights,
    check_advantages,
    check_baseline,
    check_baseline_has_the_least_variance,
    check_ess,
)
MUTANTS = {
    "mean for sum in the weight": (
        "((logp.detach() - rollout_logp) * mask).sum(dim=1)",
        "((logp.detach() - rollout_logp) * mask).mean(dim=1)",
    ),
    "π_old for μ": (
        "log_w = log_weight(logp, rollout_logp, mask)  # [n]",
        "log_w = log_weight(logp, old_logp, mask)  # [n]",
    ),
    "no cap": (".exp().clamp(max=args.is_cap)", ".exp()"),
    "no clamp of the log": ("log_w.clamp(-20, 20)", "log_w"),
    "weight not detached": (
        "((logp.detach() - rollout_logp) * mask)",
        "((logp - rollout_logp) * mask)",
    ),
    "sum over tokens": (
        "(logp * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)",
        "(logp * mask).sum(dim=1)",
    ),
    "sign": ("return -(weight", "return (weight"),
    "sample std": (", correction=0)", ")"),
    "w⁴, near to what was released": ("2 * log_w + 2 * norms", "4 * log_w + 2 * norms"),
    "norms ignored": ("2 * log_w + 2 * norms.clamp(min=1e-30).log()", "2 * log_w + 0 * norms"),
    "weights ignored": ("2 * log_w + 2 * norms", "0 * log_w + 2 * norms"),
    "ESS in plain space": (
        "(2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0)).exp()",
        "(log_w.exp().sum() ** 2 / log_w.exp().square().sum())",
    ),
    "ESS not divided by B": (".exp() / len(log_w)", ".exp()"),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_vcpo(check):
    check(vcpo)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    assert caught(mutate(vcpo, *MUTANTS[name]), CHECKS)


def test_what_the_baseline_is_best_for():
    """All answers of up to three tokens, enumerated; 40 random tasks. b is the best baseline of w
    g, whose mean is 0, not of the loss's min(w, 8) g/|y|: there it is worse than the group mean in
    27 of 40 on-policy, in 16 off-policy."""
    V, T = 3, 3
    answers = [
        s for n in (1, 2, 3) for s in itertools.product(range(V), repeat=n) if 0 not in s[:-1]
    ]
    answers = [s for s in answers if s[-1] == 0 or len(s) == T]  # 0 ends one
    lengths = torch.tensor([[float(len(s))] for s in answers], dtype=torch.float64)

    def logps(theta: torch.Tensor) -> torch.Tensor:
        table = theta.log_softmax(-1)
        return torch.stack(
            [sum(table[t, s[t - 1] if t else V, x] for t, x in enumerate(s)) for s in answers]
        )

    def excess(seed: int, distance: float) -> tuple[float, float, float]:
        """Variance over the least one possible: of w g with b, of the loss's gradient with b and
        with the mean."""
        generator = torch.Generator().manual_seed(seed)
        base, moved = (
            torch.randn(T, V + 1, V, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        rewards = torch.bernoulli(
            torch.full((len(answers),), 0.5, dtype=torch.float64), generator=generator
        )
        theta = base + distance * moved
        log_mu, log_w = logps(base), logps(theta) - logps(base)
        mu, g = (
            log_mu.exp(),
            torch.autograd.functional.jacobian(logps, theta).flatten(1),
        )  # [answers], [answers, V²..]
        b, found = vcpo.baseline_shift(log_w + log_mu / 2, g.norm(dim=1), rewards), []
        for h in (
            log_w.exp()[:, None] * g,
            vcpo.truncated(vcpo.Args(), log_w)[:, None] * g / lengths,
        ):

            def variance(baseline: torch.Tensor, h: torch.Tensor = h) -> torch.Tensor:
                estimate = (rewards - baseline)[:, None] * h
                return mu @ estimate.square().sum(1) - (mu @ estimate).square().sum()

            mean, square = mu @ h, mu * h.square().sum(1)
            best = (square @ rewards - (mu * rewards) @ h @ mean) / (square.sum() - mean @ mean)
            found += [float(variance(baseline) / variance(best)) for baseline in (b, mu @ rewards)]
        return found[0], found[2], found[3]

    for distance, worse in ((0.0, 20), (0.5, 10)):
        plain, ours, mean = torch.tensor([excess(seed, distance) for seed in range(40)]).T
        assert (
            (plain - 1).abs().max() < 1e-6 and ours.median() > 1.1 and (ours > mean).sum() > worse
        )


def test_group_gradient_is_what_autograd_gives_the_slow_way(world):
    """Per-response gradients one by one, the baseline by its formula, the loss written out: the
    same sum."""
    lm, tokenizer = load_model("tiny")
    group = HFEngine(lm, world, 0, "float32", 64).generate(
        [tokenizer("7*8-9+6=")["input_ids"]], 6, 64, 1.0
    )
    generator = torch.Generator().manual_seed(2)
    group.old_logp = group.rollout_logp
    group.rollout_logp = (
        group.rollout_logp + 0.1 * torch.randn(group.mask.shape, generator=generator) * group.mask
    )
    group.advantages = vcpo.advantages(torch.tensor([[1.0, 0, 0, 1, 1, 0]]))[0]
    policy, args = Policy(lm), vcpo.Args()
    parameters = list(policy.parameters())
    found = [torch.zeros_like(p) for p in parameters]
    log_w = vcpo.add_group_gradient(args, policy, group, True, parameters, found, Means(), world)

    logp, _ = response_logprobs(policy, group, 1.0)
    slow_w = ((logp.detach() - group.rollout_logp) * group.mask).sum(1)
    assert torch.allclose(log_w, slow_w, atol=1e-4) and slow_w.abs().max() > 0.1
    rows = [torch.autograd.grad(row.sum(), parameters, retain_graph=True) for row in logp]
    norms = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in rows])
    weights = slow_w.exp() ** 2 * norms**2
    shift = (weights * group.advantages).sum() / weights.sum()
    assert shift.abs() > 0.05
    factor = -slow_w.exp().clamp(max=8) * (group.advantages - shift) / group.mask.sum(1)
    for i, ours in enumerate(found):
        expected = sum(f * row[i] for f, row in zip(factor, rows))
        assert torch.allclose(ours, expected, rtol=1e-3, atol=1e-4 * expected.abs().max())
    plain, off = [torch.zeros_like(p) for p in parameters], replace(args, optimal_baseline=False)
    vcpo.add_group_gradient(off, policy, group, True, parameters, plain, Means(), world)
    assert not torch.allclose(plain[0], found[0], rtol=1e-2)


def test_gather_keeps_rank_order(world):
    assert (
        gather(torch.tensor([1.0, 2.0]), world).tolist() == [1.0, 2.0]
        and len(gather(torch.zeros(0), world)) == 0
    )


@pytest.mark.parametrize("lag", [0, 2])
def test_the_lag_is_exactly_k_after_warm_up(tmp_path, monkeypatch, lag):
    """The first `lag` steps only fill the queue (and log what they sampled); then it climbs 0, 1,
    ..., k and stays. ESS is 1 while it is 0."""
    flags = [*SMALL, "--minibatches", 1, "--steps", 6, "--lag", lag, "--run_dir", tmp_path / "run"]
    assert run_here(monkeypatch, vcpo.main, *flags) == 0
    lines = metrics(tmp_path / "run")[1:]
    assert [line["step"] for line in lines] == list(range(1, 7)) and all(
        "reward" in line for line in lines
    )
    assert [line["step"] for line in lines if "lag" in line] == list(range(1 + lag, 7))
    lines = lines[lag:]
    assert [line["lag"] for line in lines] == [min(i, lag) for i in range(6 - lag)]
    assert all(line["ess_ratio"] > 1 - 1e-6 for line in lines if line["lag"] == 0)
    assert (lines[-1]["ess_ratio"] < 1 - 1e-5) == (lag > 0)
    assert all(abs(line["lr_scale"] - line["ess_ratio"] ** 0.5) < 1e-6 for line in lines)


def test_switches(tmp_path, monkeypatch):
    """Both halves off: the step keeps its length and the baseline is the group's mean; warm-up
    counts batches."""
    flags = [*SMALL, "--minibatches", 1, "--steps", 4, "--lag", 2, "--run_dir", tmp_path / "run"]
    assert (
        run_here(
            monkeypatch,
            vcpo.main,
            *flags,
            "--warmup",
            5,
            "--no_ess_scaling",
            "--no_optimal_baseline",
        )
        == 0
    )
    lines = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ][3:]
    assert all(line["lr_scale"] == 1 and line["baseline_shift"] == 0 for line in lines)
    assert [line["lr"] for line in lines] == [3e-4 * 1 / 5, 3e-4 * 2 / 5]


def test_lag_is_counted_in_updates(tmp_path, monkeypatch):
    """Two mini-batches a batch: a batch that waited for two others is four updates old."""
    flags = [*SMALL, "--minibatches", 2, "--steps", 6, "--lag", 2, "--run_dir", tmp_path / "run"]
    assert run_here(monkeypatch, vcpo.main, *flags) == 0
    assert [line["lag"] for line in metrics(tmp_path / "run")[3:]] == [0, 2, 4, 4]


def test_a_signal_while_the_queue_fills(tmp_path, command):
    """The step is finished and saved, queue and all, as later ones are; the resumed run is the
    uninterrupted one."""
    flags = [*SMALL, "--minibatches", 1, "--lag", 4, "--steps", 6]
    stopped = command("tests/driver.py", "vcpo", "term", 2, *flags, "--run_dir", tmp_path / "parts")
    assert stopped.returncode == 0, stopped.stderr[-2000:]
    assert [line["step"] for line in metrics(tmp_path / "parts")] == [0, 1, 2]
    assert command("vcpo.py", *flags, "--run_dir", tmp_path / "parts", "--resume").returncode == 0
    assert command("vcpo.py", *flags, "--run_dir", tmp_path / "whole").returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6, tmp_path)


ASYNC = [*SMALL, "--minibatches", 1, "--lag", 2, "--async", "--eval_every", 4]


def test_async_keeps_the_lag_and_leaves_evaluated_steps_in_turn(tmp_path, monkeypatch, capsys):
    """The overlap is one of the k updates: k - 1 batches wait. After an evaluation one is sampled
    in turn, checked."""
    assert (
        run_here(monkeypatch, vcpo.main, *ASYNC, "--steps", 9, "--run_dir", tmp_path / "run") == 0
    )
    assert "not the speed-up" in capsys.readouterr().out
    lines = metrics(tmp_path / "run")[1:]
    assert [line["step"] for line in lines if "lag" in line] == list(range(2, 10))
    # Sampled for steps 1 to 9 with the weights of 0 0 0 1 3 3 4 5 7 updates; trained on a step
    # later: 0 to 7.
    assert [line["lag"] for line in lines[1:]] == [0, 1, 2, 2, 1, 2, 2, 2]
    assert [line["step"] for line in lines if "sampler_gap" in line] == [1, 2, 5, 9]


def test_async_samples_with_the_weights_it_says(tmp_path, monkeypatch):
    """No update reaches the sampler while it samples: every rollout's μ is the trainer's log-prob
    of that version."""
    weights, versions, generate, sync = [], [], HFEngine.generate, HFEngine.sync

    def synced(self: HFEngine, policy: torch.nn.Module) -> None:
        sync(self, policy)
        new = [p.clone() for p in self.lm.parameters()]
        if not weights or not all(map(torch.equal, new, weights[-1])):
            weights.append(new)

    def sampled(self: HFEngine, *arguments: object, **keywords: object) -> object:
        before = [p.clone() for p in self.lm.parameters()]
        rollout = generate(self, *arguments, **keywords)
        same = [all(map(torch.equal, before, known)) for known in weights]
        assert all(map(torch.equal, before, self.lm.parameters()))
        versions.append(same.index(True))
        return rollout

    monkeypatch.setattr(HFEngine, "sync", synced)
    monkeypatch.setattr(HFEngine, "generate", sampled)
    flags = [*ASYNC[:-1], 100, "--steps", 6, "--run_dir", tmp_path / "run"]
    assert run_here(monkeypatch, vcpo.main, *flags) == 0
    assert versions[2:-2] == [0, 0, 0, 1, 2, 3]  # between the evaluations: two calls each


def test_async_resumes_to_the_bit(tmp_path, command, monkeypatch):
    """The batch sampled ahead is in the checkpoint."""
    flags = [*ASYNC, "--steps", 7, "--save_every", 3]
    assert run_here(monkeypatch, vcpo.main, *flags, "--run_dir", tmp_path / "whole") == 0
    killed = command("tests/driver.py", "vcpo", "log", 5, *flags, "--run_dir", tmp_path / "parts")
    assert killed.returncode == -signal.SIGKILL
    state = torch.load(tmp_path / "parts/checkpoints/step_000003/rank0.pt")["state"]
    assert state["ahead"] and len(state["queue"]) == 1
    assert (
        run_here(monkeypatch, vcpo.main, *flags, "--run_dir", tmp_path / "parts", "--resume") == 0
    )
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 7, tmp_path)


@pytest.mark.parametrize("flag", ["--vllm_sleep", "--tensor_parallel=2"])
def test_what_does_not_go_with_async_is_refused(tmp_path, monkeypatch, capsys, flag):
    assert (
        run_here(monkeypatch, vcpo.main, *ASYNC, flag, "--steps", 9, "--run_dir", tmp_path / "run")
        == 2
    )
    assert "--async: not together" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("lag", [-1, 8])
def test_an_impossible_lag_is_refused(tmp_path, monkeypatch, capsys, lag):
    assert (
        run_here(monkeypatch, vcpo.main, "--lag", lag, "--steps", 8, "--run_dir", tmp_path / "run")
        == 2
    )
    assert f"--lag {lag}: must be" in capsys.readouterr().err and not (tmp_path / "run").exists()
