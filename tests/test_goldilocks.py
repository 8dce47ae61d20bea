"""Goldilocks: the choice of prompts, the teacher, and the law that says which prompts teach most;
mutants."""

import random
from types import ModuleType, SimpleNamespace

import deep_grpo
import goldilocks
import pytest
import torch
from common.distributed import World
from common.model import load_model
from common.tiny import arithmetic
from test_losses import GRPO_CHECKS, caught, loss_of, mutate, no_kl
from test_run import MORE, SMALL, metrics, run_here


def check_learning_value(module: ModuleType) -> None:
    """sqrt(p̂ (1-p̂)) with p̂ over the group; 0 for all right and all wrong, and for equal part
    marks."""
    rewards = torch.tensor(
        [[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0.5, 0.3, 0.2, 0.2]]
    )
    # Part marks: their standard deviation
    expected = torch.tensor([3**0.5 / 4, 0.5, 0, 0, 0.015**0.5])
    assert torch.allclose(module.learning_value(rewards), expected)
    assert (module.learning_value(torch.full((1, 8), 0.7)) == 0).all()


def check_select(module: ModuleType) -> None:
    """ε = 0: the best candidate of each slot, but no prompt twice; where all are taken, the best
    again."""
    values = torch.tensor([[0.1, 0.4, 0.3], [0.5, 0.2, 0.1], [0.2, 0.3, 0.4], [0.3, 0.2, 0.1]])
    prompts = [["a", "b", "c"], ["b", "c", "d"], ["e", "d", "c"], ["b", "b", "b"]]
    chosen = module.select(values, prompts, 0.0, random.Random(0))
    # B; c, since b is gone; d, since c is gone; b
    assert chosen == [(1, False), (1, False), (1, False), (0, False)]


def check_select_is_uniform_at_explore_1(module: ModuleType) -> None:
    """ε = 1: every candidate equally often, whatever the values; ε in between: as large a share of
    the slots."""
    rng, values = random.Random(0), torch.arange(8.0).repeat(4000, 1)
    prompts = [[f"{i}.{k}" for k in range(8)] for i in range(4000)]
    counts = torch.bincount(
        torch.tensor([k for k, _ in module.select(values, prompts, 1.0, rng)]), minlength=8
    )
    assert (counts - 500).abs().max() < 4 * (4000 / 8 * 7 / 8) ** 0.5  # four standard deviations
    some = module.select(values, prompts, 0.25, rng)
    share = sum(chance for _, chance in some) / 4000
    assert abs(share - 0.25) < 0.03 and all(k == 7 for k, chance in some if not chance)


def check_teacher_range_and_padding(module: ModuleType) -> None:
    """Before it has learned every prompt is worth 1/4; with a trained head, padding changes
    nothing, range (0, 1/2)."""
    lm, tokenizer = load_model("tiny")
    teacher = module.Teacher(lm.base_model)
    ids = torch.tensor(
        [tokenizer("1+2=")["input_ids"] + [5, 5, 5], tokenizer("1+2=3;9")["input_ids"]]
    )
    assert torch.equal(teacher(ids, torch.tensor([4, 7])), torch.full((2,), 0.25))
    torch.nn.init.normal_(teacher.head.weight, generator=torch.Generator().manual_seed(0))
    padded, alone = (
        teacher(ids, torch.tensor([4, 7]))[0],
        teacher(ids[:1, :4], torch.tensor([4]))[0],
    )
    assert torch.allclose(padded, alone, atol=1e-6) and abs(alone - 0.25) > 0.01
    torch.nn.init.constant_(teacher.head.bias, 100.0)
    assert torch.allclose(teacher(ids, torch.tensor([4, 7])), torch.tensor(0.5))


def check_rank_correlation(module: ModuleType) -> None:
    """Spearman's by hand: with ties, order alone counts; 0 where a side is constant."""
    a = torch.tensor([1.0, 2, 3, 4, 5])
    assert (
        abs(module.rank_correlation(a, a.exp()) - 1) < 1e-12
        and abs(module.rank_correlation(a, -a) + 1) < 1e-12
    )
    # Ranks 1.5, 1.5, 3.5, 3.5, 5 against 1 to 5: covariance 9, variances 9 and 10
    b = torch.tensor([0.0, 0, 1, 1, 2])
    assert abs(module.rank_correlation(a, b) - 9 / 90**0.5) < 1e-12
    assert module.rank_correlation(a, torch.ones(5)) == 0


CHECKS = (
    *(check_learning_value, check_select, check_select_is_uniform_at_explore_1),
    *(check_teacher_range_and_padding, check_rank_correlation),
)
MUTANTS = {
    "p (1-p)": ("std(dim=1, correction=0)", "var(dim=1, correction=0)"),
    "sample std": ("std(dim=1, correction=0)", "std(dim=1)"),
    "p": ("(rewards - rewards[:, :1]).std(dim=1, correction=0)", "rewards.mean(dim=1)"),
    "over the batch": ("std(dim=1, correction=0)", "std(correction=0).expand(len(rewards))"),
    "rounding for a difference": ("(rewards - rewards[:, :1]).std", "rewards.std"),
    "the worst candidate": ("key=lambda k: -scores[k]", "key=lambda k: scores[k]"),
    "no exploration": ("rng.random() < explore", "rng.random() < 0"),
    "exploration among the best": ("rng.shuffle(order)", "order[:2] = rng.sample(order[:2], 2)"),
    "a prompt twice": ("if prompts[k] not in taken", "if True"),
    "mean over padding": ("(hidden * real[..., None])", "hidden"),
    "mean over the padded length": (
        ".sum(dim=1) / lengths[:, None]",
        ".sum(dim=1) / sequences.shape[1]",
    ),
    "range (0, 1)": ("return 0.5 * self.head", "return self.head"),
    "random head": ("nn.init.zeros_(self.head.weight), ", ""),
    "ties broken by place": (
        " + (x[:, None] == x).double().sum(dim=1) / 2",
        " + torch.arange(len(x)) / len(x)",
    ),
}


@pytest.mark.parametrize("check", GRPO_CHECKS + CHECKS, ids=lambda check: check.__name__)
def test_goldilocks(check):
    check(goldilocks)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    assert caught(mutate(goldilocks, *MUTANTS[name]), CHECKS)


@pytest.mark.parametrize(
    ("module", "power"), [(goldilocks, 0.5), (deep_grpo, 1.0)], ids=["with std", "mean-centred"]
)
def test_the_gradient_law(module, power):
    """|∇J| = (p (1-p))^power · |E[∇ log π | right] - E[∇ log π | wrong]|, from the file's own
    advantages and loss.

    The "group" holds every outcome of a policy in exact proportion: sampling noise has no part in
    it.
    """
    for counts in ([1, 7, 3, 4, 2, 3], [12, 2, 1, 1, 2, 2], [1, 1, 1, 15, 1, 1]):
        weights, right = (
            torch.tensor(counts, dtype=torch.float64),
            torch.tensor([1.0, 0, 0, 1, 0, 1]).double(),
        )
        outcomes, n = torch.repeat_interleave(torch.arange(6), weights.long()), int(weights.sum())
        theta = (weights / n).log().requires_grad_()
        logp, one = theta.log_softmax(0)[outcomes][:, None], torch.ones(n, 1, dtype=torch.float64)
        advantages = module.advantages(right[outcomes][None])[0]
        loss, _ = loss_of(
            module,
            no_kl(module),
            logp=logp,
            old_logp=logp.detach(),
            advantages=advantages,
            mask=one,
        )
        loss.backward()
        pi = weights / n
        p = (pi * right).sum()
        scores = torch.eye(6, dtype=torch.float64) - pi  # ∇ log π of each outcome, a row each
        apart = (pi * right) @ scores / p - (pi * (1 - right)) @ scores / (1 - p)
        law = (p * (1 - p)) ** power * apart.norm()
        # The file divides by the sample's std
        sample_std = ((n - 1) / n) ** 0.5 if power == 0.5 else 1.0
        assert torch.isclose(theta.grad.norm(), law * sample_std, rtol=1e-4)


def untaught(world: World, **flags: object) -> goldilocks.Curriculum:
    """A curriculum whose teacher knows nothing yet."""
    args = goldilocks.Args(dtype="float32", **flags)
    return goldilocks.Curriculum(args, SimpleNamespace(held_out=[]), world)


def test_the_teacher_ranks_prompts_by_what_they_teach(world):
    """A student that solves prompts of 2 to 7 terms with known p; f then orders unseen prompts by
    sqrt(p (1-p))."""
    chance = {2: 1.0, 3: 0.97, 4: 0.85, 5: 0.5, 6: 0.12, 7: 0.02}
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    curriculum = untaught(world)
    curriculum.rng = rng
    prompts = [arithmetic.draw(rng) for _ in range(1100)]
    p = torch.tensor([chance[len(prompt) // 2] for prompt in prompts])
    observed = goldilocks.learning_value(
        torch.bernoulli(p[:, None].expand(-1, 8), generator=generator)
    )  # [1100]
    ids = [curriculum.tokenizer(prompt)["input_ids"] for prompt in prompts]
    curriculum.window.extend(list(zip(ids, observed.tolist()))[:1000])
    for _ in range(120):
        curriculum.teach()
    values, true = curriculum.predict(ids[1000:]), (p * (1 - p)).sqrt()[1000:]
    assert goldilocks.rank_correlation(values, true) > 0.85
    slots = [(row.tolist(), prompts[1000:]) for row in values.expand(1, -1)]
    best = goldilocks.select(torch.tensor(slots[0][0])[None], [slots[0][1]], 0.0, rng)[0][0]
    assert true[best] >= 0.35


def test_micro_batches_do_not_change_the_teacher(world):
    """One prompt at a time or all at once: the same values and the same summed gradient."""
    prompts, targets = ("1+2=", "3*4-5=", "9-9+9*9="), torch.rand(3) / 2
    found = []
    for tokens in (1, 10_000):
        curriculum = untaught(world, micro_tokens=tokens)
        teacher, generator = curriculum.teacher, torch.Generator().manual_seed(0)
        torch.nn.init.normal_(teacher.head.weight, generator=generator)
        ids = [curriculum.tokenizer(prompt)["input_ids"] for prompt in prompts]
        values = curriculum.predict(ids, targets)
        found.append((values, torch.cat([p.grad.flatten() for p in teacher.parameters()])))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


def test_it_chooses_only_when_it_has_learned(tmp_path, monkeypatch):
    """Uniform until the window holds a batch; then every slot but the ε ones is the teacher's, and
    it is measured."""
    flags = [
        *SMALL,
        *MORE["goldilocks"],
        "--steps",
        6,
        "--explore",
        0,
        "--run_dir",
        tmp_path / "run",
    ]
    assert run_here(monkeypatch, goldilocks.main, *flags) == 0
    lines = metrics(tmp_path / "run")[1:]
    assert ["zero_groups_uniform" in line for line in lines] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert all(line["chosen_over_mean"] > 0 for line in lines[2:])
    assert (
        abs(lines[0]["teacher_mean"] - 0.25) < 1e-6 and abs(lines[5]["teacher_mean"] - 0.25) > 1e-3
    )


def test_explore_1_says_that_it_did_nothing(tmp_path, monkeypatch, capsys):
    flags = [
        *SMALL,
        *MORE["goldilocks"],
        "--steps",
        3,
        "--explore",
        1,
        "--run_dir",
        tmp_path / "run",
    ]
    assert run_here(monkeypatch, goldilocks.main, *flags) == 0
    assert "chosen_over_mean was 0 at every step" in capsys.readouterr().out


def test_two_ranks_share_one_teacher(tmp_path, command):
    """Two gloo ranks: the same window on both, no prompt twice in a step, and the run resumes."""
    ranks = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "goldilocks.py",
        *SMALL,
    ]
    for extra in (["--steps", 4], ["--steps", 6, "--resume"]):
        run = command(*ranks, *MORE["goldilocks"], *extra, "--run_dir", tmp_path / "run")
        assert run.returncode == 0, run.stderr[-3000:]
    states = [
        torch.load(tmp_path / f"run/checkpoints/step_000006/rank{r}.pt")["state"]["window"]
        for r in (0, 1)
    ]
    assert states[0] == states[1] and len(states[0]) == 20
    prompts = [tuple(ids) for ids, *_ in states[0]]
    assert all(len(set(prompts[i : i + 4])) == 4 for i in range(0, 20, 4))


def test_saving_does_not_change_training(tmp_path, monkeypatch):
    """Saved before the teacher's first update, after every step or never: the same run."""
    flags = [*SMALL, *MORE["goldilocks"], "--steps", 4]
    for every in (1, 100):
        words = [*flags, "--save_every", every, "--run_dir", tmp_path / f"every{every}"]
        assert run_here(monkeypatch, goldilocks.main, *words) == 0
    assert metrics(tmp_path / "every1") == metrics(tmp_path / "every100")


@pytest.mark.parametrize("flags", [("--candidates", 0), ("--teacher_batch", 64, "--window", 32)])
def test_impossible_settings_are_refused(tmp_path, monkeypatch, capsys, flags):
    assert run_here(monkeypatch, goldilocks.main, *flags, "--run_dir", tmp_path / "run") == 2
    assert flags[0] in capsys.readouterr().err and not (tmp_path / "run").exists()
