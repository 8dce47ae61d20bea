"""What compares a file with its check: batches that reach every case, and comparisons."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from common.batch import Rollout
from common.distributed import ALONE
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .formulas import Batch, without_mean, z_score

NO_MEASURES = "measures returns nothing"
CHOSEN_COLUMNS = {"spurious", "chosen", "kept", "rare", "masked"}  # what a `choose_tokens` writes
FIXTURE = json.loads(Path(__file__).with_name("losses.json").read_text(encoding="utf-8"))


def busy_batch() -> dict[str, Tensor]:
    """Return nine responses of 1 to 6 tokens, two of them cut off, with every column that any file
    reads. They hold rare and sure tokens, ratios on both sides of every bound and far beyond, and a
    large Â; Â is > 0 in four, < 0 in three and 0 in two. A file that forgets the mask is found,
    because the padding has values that every count would include: ratios that moved outward, likely
    and rare tokens. The last column has zeros, as in a batch of a run."""
    generator = torch.Generator().manual_seed(3532)
    lengths, padding = torch.tensor([6, 3, 4, 2, 5, 3, 4, 6, 1]), torch.arange(7) == 6
    mask = (torch.arange(7) < lengths[:, None]).double()
    mask[0, 2] = mask[4, 2:4] = 0.0  # holes, as the replies of a tool leave them
    A = torch.tensor([1.2, -1.0, 0.5, -1.5, 0.0, 0.0, 0.8, -0.4, 6.0]).double()[:, None]
    odds, *moved, entropy, own = torch.rand(7, *mask.shape, generator=generator).double()
    batch = {"old_logp": logsigmoid(8 * odds - 4), "entropy": 2 * entropy}
    for name, noise in zip("logp rollout_logp ref_logp teacher_logp".split(), moved):
        batch[name] = logsigmoid(8 * odds - 4 + 3 * noise - 1.5)
    batch["teacher_logp"] = 2.5 * batch["teacher_logp"]
    batch["token_advantages"] = 4 * own - 2
    old = torch.tensor([-0.02, -4.0]).double().repeat(4)[:7].expand_as(mask)
    garbage = {"old_logp": old, "logp": old + torch.where(A < 0, -2.0, 2.0), "entropy": 3 + 0 * old}
    garbage |= {"rollout_logp": old + torch.where(A < 0, 0.01, -3.0), "ref_logp": old + 3}
    garbage |= {"teacher_logp": old - 9, "token_advantages": 9 * (A - 0.5)}
    for name, x in garbage.items():
        batch[name] = torch.where(mask > 0, batch[name], x).masked_fill(padding, 0.0)
    batch["token_advantages"][:, 1] = 0.0
    batch["rollout_logp"][7, 1], batch["logp"][7, 1] = 0.0, -0.03  # μ = 1, and δ is not reached
    batch["old_logp"][3, 0], batch["logp"][3, 0] = -4.0, -1.0  # r = 20, although Â < 0
    batch |= {"mask": mask, "advantages": A[:, 0]}
    proxy = torch.rand(mask.shape, generator=generator, dtype=torch.float64)  # lp_reg
    batch["proxy_logp"] = logsigmoid(8 * odds - 4 + 3 * proxy - 1.5)
    batch["proxy_logp"][:4, 1] = -torch.inf  # filtered out
    batch["proxy_logp"] = torch.where(mask > 0, batch["proxy_logp"], old + 3)
    batch["finished"] = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1]).bool()
    batch["branch"] = torch.tensor([0, 1, 0, 0, 1, 0, 0, 0, 1]).double()
    return batch


def busy_mini_batch(module: ModuleType, flags: dict) -> tuple[object, Tensor, Rollout]:
    """Return what `policy_loss` gets for a whole mini-batch, here the busy batch: the flags, log
    π_θ with gradient, and the columns."""
    args = replace(module.Args(), **flags)
    columns = busy_batch()
    columns["logp"].requires_grad_()
    logp, batch = mini_batch(module, args, **columns)
    # Branches have the tokens of the main rows, divided by their own
    size, is_branch = batch.mask.sum(1), batch.branch > 0
    batch.branch = batch.branch * size[~is_branch].sum() / size[is_branch].sum()
    return args, logp, batch


def as_batch(args: object, batch: Rollout) -> Batch:
    """Return a batch of the file as a `Batch` of its objective."""
    names = {"old": "old_logp", "mu": "rollout_logp", "ref": "ref_logp", "A": "advantages"}
    columns = {short: getattr(batch, name) for short, name in names.items()}
    return Batch(args=args, **vars(batch) | columns)


def agree(spec: ModuleType) -> list[Callable]:
    """Return the checks that the file agrees with checks/NAME.py, under each of its CASES."""

    def cases(module: ModuleType) -> Iterator[tuple]:
        for flags in spec.CASES:
            told = "".join(f" --{name} {value}" for name, value in flags.items())
            yield told, *busy_mini_batch(module, flags)

    def compare(module: ModuleType, divisions: list) -> None:
        for told, args, logp, batch in cases(module):
            J, count = spec.objective(as_batch(args, batch))
            (slope,) = torch.autograd.grad(J, logp)
            for parts in divisions:
                total, number = 0.0, 0.0
                for rows in parts:
                    added, counted = module.policy_loss(args, logp[rows], batch.rows(rows))
                    total, number = total + added, number + counted
                (gradient,) = torch.autograd.grad(total / number, logp)
                near(gradient, -slope, f"∂ loss / ∂ log π{told}")
                near(total / number, -J, f"the loss, whose gradient is right{told}")
                near(number, count, f"the count{told}")

    def check_loss(module: ModuleType) -> None:
        """Value, gradient and count are those of J, under several flags, on a batch in which every
        column differs and padding is not 0."""
        compare(module, [[[*range(9)]]])

    def check_parts_add_up(module: ModuleType) -> None:
        """The sums of any micro-batches, divided once by their count, are the whole batch's J. One
        of them may have no rows, because another rank has more."""
        compare(module, [[[0, 3, 6], [1, 4, 7], [2, 5, 8]], [[5], [], [2, 4, 7], [0, 1, 3, 6, 8]]])

    def check_statistics(module: ModuleType) -> None:
        for told, args, logp, batch in cases(module):
            pairs = module.measures(args, logp.detach(), batch)
            assert pairs, NO_MEASURES
            expected = spec.statistics(as_batch(args, batch))
            assert_statistics(pairs, expected, told)
            more = pairs.keys() - expected.keys()
            assert not more, f"{told} measures returns more than is stated: {sorted(more)}"
            none = batch.rows(slice(0))
            if hasattr(module, "choose_tokens"):
                module.choose_tokens(args, none, ALONE)
            for name, pair in module.measures(args, logp[:0].detach(), none).items():
                numbers = [float(x) for x in pair if not isinstance(x, str)]
                near(numbers, [0.0] * len(numbers), f"{name} of no rows{told}")

    check_statistics.__doc__ = spec.statistics.__doc__
    return [check_loss, check_parts_add_up, check_statistics]


def matches(spec: ModuleType) -> Callable:
    """Return the check that `policy_loss` gives the same numbers as other people's code."""

    def check_fixture(module: ModuleType) -> None:
        """On a batch of six responses of 1 to 6 tokens, value and gradient are those of J, here
        computed by other people's code."""
        for case, flags in spec.FIXTURES.items():
            expected, batch, args = FIXTURE["cases"][case], toy_batch(), no_kl(module, **flags)
            loss, gradient = loss_and_gradient(module, args, **batch)
            scale = 1.0
            if hasattr(spec, "PER_TOKEN"):
                scale = terms(module, args, **batch)[1] / batch["mask"].sum()
            near(scale * gradient, expected["grad"], f"∂ loss / ∂ log π, {case}")
            near(scale * loss, expected["loss"], f"the loss, whose gradient is right, {case}")

    return check_fixture


# Tools of the checks

ROUNDING = 0.0  # the grader allows what float32 rounds off, relative and absolute


def near(value: object, expected: object, what: str, tolerance: float = 1e-12) -> None:
    """Raise AssertionError if value and expected differ by more than the tolerance and ROUNDING.
    The message has the name, both numbers and, for tensors, the place with the largest
    difference."""
    value, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (value, expected))
    assert value.shape == expected.shape, (
        f"{what}: of shape {list(value.shape)}, expected {list(expected.shape)}"
    )
    distance = (value - expected).abs() - ROUNDING * (1 + expected.abs())
    # Where both are the same infinity there is no distance
    apart = torch.where(value == expected, 0.0, distance).nan_to_num(torch.inf)
    if value.numel() and apart.max() > tolerance:
        at = int(apart.argmax())
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), value.shape))
        where = f" at {list(place)}" if place else ""
        ours, theirs = value.flatten()[at].item() + 0.0, expected.flatten()[at].item()  # no -0
        raise AssertionError(f"{what}{where}: {ours:.8g}, expected {theirs:.8g}")


def mini_batch(module: ModuleType, args: object, **columns: Tensor) -> tuple[Tensor, Rollout]:
    """Return log π_θ and the batch of a whole mini-batch with these columns.

    If nothing else is given, μ is π_old, the entropy is 0, and no row is a branch. The column that
    the file's `choose_tokens` writes is computed from these rows.
    """
    logp, A, mask = columns["logp"], columns["advantages"], columns["mask"]
    usual = {
        "entropy": torch.zeros_like(logp),
        "rollout_logp": columns["old_logp"],
        "token_advantages": A if A.dim() == 2 else A[:, None].expand_as(mask),  # ppo
        "finished": torch.ones(len(mask), dtype=torch.bool),  # dapo
        "branch": torch.zeros_like(mask[:, 0]),  # deep_grpo
        "teacher_logp": columns.get("ref_logp"),  # opd
        "proxy_logp": columns["old_logp"],  # lp_reg
    }
    batch = Rollout(**usual | columns)
    if hasattr(module, "choose_tokens") and not CHOSEN_COLUMNS & columns.keys():
        with torch.no_grad():
            module.choose_tokens(args, batch, ALONE)
    return logp, batch


def terms(module: ModuleType, args: object, **columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum and count of `policy_loss` on a whole mini-batch (see `mini_batch`)."""
    return module.policy_loss(args, *mini_batch(module, args, **columns))


def measured(module: ModuleType, args: object, **columns: Tensor) -> dict[str, tuple]:
    """Return the pairs of `measures` on a whole mini-batch (see `mini_batch`)."""
    logp, batch = mini_batch(module, args, **columns)
    return module.measures(args, logp.detach(), batch)


def loss_of(module: ModuleType, args: object, **tensors: Tensor) -> Tensor:
    """Return the loss, which is a mean."""
    total, count = terms(module, args, **tensors)
    return total / count


def loss_and_gradient(module: ModuleType, args: object, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient with respect to log π `[n, T]`."""
    logp = tensors["logp"].detach().requires_grad_()
    loss = loss_of(module, args, **tensors | {"logp": logp})
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


def no_kl(module: ModuleType, **flags: object) -> object:
    """Return the file's Args with these flags. If the file has a KL term, β is 0."""
    return replace(
        module.Args(), **({"beta": 0.0} if hasattr(module.Args(), "beta") else {}), **flags
    )


def as_row(*values: float) -> Tensor:
    """Return a row `[1, n]` in float64."""
    return torch.tensor([values], dtype=torch.float64)


def toy_batch() -> dict[str, Tensor]:
    """Return the fixture's batch: six responses with many tokens beyond every clip. The entropies
    fall from 3.6 to 0.1."""
    inputs = FIXTURE["inputs"]
    batch = {
        name: torch.tensor(inputs[name], dtype=torch.float64)
        for name in ("mask", "old_logp", "advantages")
    }
    batch["logp"] = batch["old_logp"] + torch.tensor(inputs["logratio"], dtype=torch.float64)
    batch["entropy"] = (36 - torch.arange(36).double()).view(6, 6) / 10
    return batch


def weight(
    module: ModuleType, ratio: float, advantage: float, old: float = 1.0, **flags: object
) -> Tensor:
    """Return the gradient weight on ∇ log π of a one-token response with this ratio and π_old."""
    old_logp = as_row(old).log()
    columns = {"logp": old_logp + as_row(ratio).log(), "old_logp": old_logp}
    columns |= {"advantages": as_row(advantage)[0], "mask": as_row(1.0)}
    return -loss_and_gradient(module, no_kl(module, **flags), **columns)[1][0, 0]


def advantages_match(module: ModuleType, case: str, rule: Callable[[Tensor], Tensor]) -> None:
    """Compare the advantages of the fixture's rewards with its case, and the advantages of a large
    group, in which one of them is large, with the rule. The tolerance allows for any number up to
    1e-4 that is added to std."""
    numbers = FIXTURE["advantages"]
    rewards = torch.tensor(numbers["rewards"], dtype=torch.float64)
    A = module.advantages(rewards.clone())
    for group, ours, theirs in zip(rewards.tolist(), A, numbers[case]):
        near(ours, theirs, f"advantages of rewards {group}", 1e-3)
    assert A.shape == rewards.shape, f"of rewards [P, G] they are {list(A.shape)}"
    one_right = 8 * torch.eye(64, dtype=torch.float64)[:1]  # std is 1
    near(module.advantages(one_right.clone()), rule(one_right), "of a reward 8 and 63 of 0", 1e-3)


RIGHT = torch.tensor([1.0, 0, 0, 1, 0, 1], dtype=torch.float64)  # rewards of six outcomes
POLICIES = ([1, 7, 3, 4, 2, 3], [12, 2, 1, 1, 2, 2], [1, 1, 1, 15, 1, 1])  # how often each is drawn


def every_sample(draws: list[int]) -> tuple[Tensor, Tensor]:
    """Return a "group" without sampling noise, which holds every outcome of a policy in exact
    proportion: the outcome of each row `[n]`; and log π of each outcome."""
    probabilities = torch.tensor(draws).double() / sum(draws)
    return torch.arange(len(draws)).repeat_interleave(torch.tensor(draws)), probabilities.log()


def assert_statistics(stats: dict, expected: dict[str, tuple], where: str = "") -> None:
    """Compare the statistics with these pairs (see common/metrics.py: Means)."""
    for name, (total, count) in expected.items():
        assert name in stats, f"{name} is missing from what measures returns"
        pair = stats[name]
        assert isinstance(pair, tuple | list) and len(pair) == 2, f"{name} is no (sum, count) pair"
        near(pair[0], total, f"the sum of {name}{where}")
        if isinstance(count, str):
            assert pair[1] == count, f"{name} is paired with {pair[1]!r}, not {count!r}"
        else:
            near(pair[1], count, f"the count of {name}{where}")


# Checks that files share


def check_advantages(module: ModuleType) -> None:
    """The advantage is the z-score in its group, with the sample standard deviation (divide by G -
    1). At most 1e-4 is added to it, against 0/0."""
    advantages_match(module, "ddof1_eps1e-6", z_score)


def check_centred_advantages(module: ModuleType) -> None:
    """The advantage is the reward minus the group's mean, and nothing else."""
    advantages_match(module, "mean_only", without_mean)


def check_equal_rewards(module: ModuleType) -> None:
    """Equal rewards (all right, all wrong, or all partly right) have advantages of exactly 0. The
    mean of eight 0.7 is not quite 0.7 in float32, and a std of the same rounding does not make the
    difference small. So subtract one of the group's rewards from all of them first. The given
    rewards are not changed."""
    for reward in (1.0, 0.0, 0.7, 0.3):
        rewards = torch.full((2, 8), reward)
        worst = module.advantages(rewards).abs().max().item()
        assert worst == 0, f"eight rewards of {reward:g} give {worst:g}, expected 0"
        assert (rewards == reward).all(), "the rewards that it is given are changed in place"


# What `SHARED` is in most files: the checks of their advantages

ZSCORES = [check_advantages, check_equal_rewards]
CENTRED = [check_centred_advantages, check_equal_rewards]
