"""What an algorithm file must do, without pytest: for tests, the labs' grader and the reader.

`checks/NAME.py` states the loss of NAME.py a second time, from the paper's formula, in float64:

- `objective(b)` returns J of a `Batch`, which is a mean, and the count that it is a mean over;
- `statistics(b)` returns the metrics of the loss as pairs (sum, count);
- `CASES` are the flags under which the file is compared with both;
- `READS` are the columns that the loss may use besides log π, advantages and mask. Without it,
  π_old is the only one;
- `CHECKS` are further functions of a module (the file, a damaged copy, or a student's file). They
  raise AssertionError if the module is wrong, and their docstring states the rule. They compare
  with numbers of other people's code, or with sums over all outcomes;
- `MUTANTS`, of some files, are damages: name -> (text that is in the file once, its replacement).
  At least one check must fail on each. They are also the mistakes that the grader can name.
"""

import functools
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import common  # noqa: F401  (before torch)
import torch
from common.batch import Rollout
from common.distributed import ALONE
from torch import Tensor

CHOSEN = {"spurious", "chosen", "kept", "rare", "masked"}  # what a `choose_tokens` writes
WORDS = {"old_logp": "π_old", "rollout_logp": "μ", "entropy": "the entropy"}
FIXTURE = json.loads(Path(__file__).with_name("losses.json").read_text(encoding="utf-8"))


@functools.cache  # so that a check is the same function every time
def of(algorithm: str) -> tuple[list[Callable], dict[str, tuple]]:
    """All checks and the mutants of an algorithm, by its file's stem."""
    module = importlib.import_module(f"checks.{algorithm}")
    shared = [*agree(module.objective, module.CASES), count_alike(module.statistics, module.CASES)]
    shared.append(check_padding_counts_for_nothing)
    unread = WORDS.keys() - getattr(module, "READS", ["old_logp"])
    if unread:
        shared.append(independent_of(sorted(unread)))
    return [*module.CHECKS, *shared], getattr(module, "MUTANTS", {})


def written_here(namespace: dict) -> list[Callable]:
    """Every `check_*` that a module defines, in order."""
    ours = [f for name, f in namespace.items() if name.startswith("check_")]
    return [f for f in ours if f.__module__ == namespace["__name__"]]


def replaced(path: Path, old: str, new: str) -> str:
    """A file's text with `old` replaced, which must be there once."""
    source = path.read_text(encoding="utf-8")
    if source.count(old) != 1:
        raise LookupError(f"{path.name} has {source.count(old)} times {old!r}")
    return source.replace(old, new)


def mutate(module: ModuleType, old: str, new: str) -> ModuleType:
    """The module with one piece of its source replaced."""
    source = replaced(Path(module.__file__), old, new)
    mutant = ModuleType(f"{module.__name__}_mutant")
    sys.modules[mutant.__name__] = mutant  # dataclasses look their module up
    mutant.__file__ = module.__file__
    exec(compile(source, module.__file__, "exec"), vars(mutant))
    return mutant


def red(module: ModuleType, checks: list[Callable]) -> Iterator[Callable]:
    """The checks that fail on the module, one by one."""
    for check in checks:
        try:
            check(module)
        except (AssertionError, RuntimeError):  # RuntimeError: backward finds no gradient
            yield check


# Formulas that objectives share


class Batch(SimpleNamespace):
    """What an objective is a function of, in float64.

    `logp` (with gradient), `old`, `mu`, `ref`: log-probs of π_θ, π_old, μ and π_ref; `entropy` and
    `mask`; all `[n, T]`. `A` `[n]`. `args`: the flags. Some files have more columns: `finished`,
    `branch`, `working_A` `[n]` and `working`, `tokens_A`, `proxy`, `teacher` `[n, T]`.
    """

    @property
    def r(self) -> Tensor:
        return (self.logp - self.old).exp()  # [n, T]


def z_score(R: Tensor) -> Tensor:
    """Advantages `[P, G]` of most files: with the sample standard deviation."""
    return (R - R.mean(-1, keepdim=True)) / (R.std(-1, keepdim=True) + 1e-6)


def centred(R: Tensor) -> Tensor:
    return R - R.mean(-1, keepdim=True)


def response_mean(x: Tensor, mask: Tensor) -> tuple[Tensor, int]:
    """The mean over responses of the means over their tokens, and the number of responses."""
    return ((x * mask).sum(1) / mask.sum(1)).mean(), len(mask)


def token_mean(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over all tokens, and their number."""
    return (x * mask).sum() / mask.sum(), mask.sum()


def clipped(r: Tensor, A: Tensor, args: object) -> Tensor:
    """PPO: min(r A, clip(r) A)."""
    return torch.minimum(r * A, r.clip(1 - args.clip_low, 1 + args.clip_high) * A)


def surrogate(b: Batch) -> Tensor:
    return clipped(b.r, b.A[:, None], b.args)


def k3(b: Batch) -> Tensor:
    """π_ref/π_θ - log(π_ref/π_θ) - 1; with `--kl_ratio` times r, through which gradients flow."""
    plain = (b.ref - b.logp).exp() - (b.ref - b.logp) - 1
    return b.r * plain if b.args.kl_ratio else plain


def both_streams(b: Batch, x: Tensor, mask: Tensor, mean: Callable) -> tuple[Tensor, Tensor]:
    """The mean over main rows and the mean over branches, added up; the count of the main rows."""
    is_branch = b.branch > 0
    J, count = mean(x[~is_branch], mask[~is_branch])
    return J + mean(x[is_branch], mask[is_branch])[0], count


def share(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over the tokens of the mask, as a pair (sum, count)."""
    return (x * mask).sum(), mask.sum()


def cut_shares(b: Batch, A: Tensor, name: str = "clip") -> dict[str, tuple]:
    """Of all response tokens: those that lose their gradient by PPO's clip, and these by the side
    on which r is: above 1 + ε for Â > 0, below 1 - ε for Â < 0."""
    above, below = (A > 0) & (b.r > 1 + b.args.clip_high), (A < 0) & (b.r < 1 - b.args.clip_low)
    sides = {"share": above | below, "above": above, "below": below}
    return {f"{name}_{side}": share(tokens, b.mask) for side, tokens in sides.items()}


def clip_statistics(b: Batch) -> dict[str, tuple]:
    """clip_share counts the response tokens that lose their gradient by the clip: Â > 0 and r > 1 +
    clip_high (clip_above), or Â < 0 and r < 1 - clip_low (clip_below). ref_kl is k3 itself, not
    times β."""
    found = cut_shares(b, b.A[:, None])
    if getattr(b.args, "beta", 0.0) > 0:
        found["ref_kl"] = share(k3(b), b.mask)
    return found


# The comparison with them


def busy_batch() -> dict[str, Tensor]:
    """The toy batch with its own μ, π_ref, entropies and all that some file reads: responses of 1
    to 6 tokens, one of them cut off; ratios on both sides of every bound; advantages of both signs
    and 0. Its padding has values that every count would include: ratios that moved outward, likely
    and rare tokens."""
    batch, generator = toy_batch(), torch.Generator().manual_seed(7)
    mask, A = batch["mask"], batch["advantages"][:, None]
    noise = torch.rand(7, *mask.shape, generator=generator, dtype=torch.float64)
    batch["rollout_logp"] = batch["old_logp"] + noise[0] - 0.4
    batch["ref_logp"] = batch["logp"] + noise[1] - 0.5
    batch["entropy"] = 2 * noise[2]
    batch["token_advantages"] = 4 * noise[3] - 2
    batch["proxy_logp"] = batch["logp"] + noise[4] - 0.3
    batch["teacher_logp"] = 3 * (batch["logp"] + noise[5] - 0.5)
    old = torch.tensor([-0.02, -4.0]).double().repeat(3).expand_as(mask)  # [6, 6]
    garbage = {"old_logp": old, "logp": old + torch.where(A < 0, -2.0, 2.0), "entropy": 3 + 0 * old}
    garbage |= {"rollout_logp": old - 3, "ref_logp": old + 3, "token_advantages": 9 * (A - 0.5)}
    garbage |= {"proxy_logp": old + 3, "teacher_logp": old - 9}
    for name, x in garbage.items():
        batch[name] = torch.where(mask > 0, batch[name], x)
    batch["finished"] = torch.tensor([True, True, False, True, True, True])
    batch["proxy_logp"][1, 1] = -torch.inf
    batch["branch"] = torch.tensor([0, 1, 0, 0, 1, 0]).double()
    batch["working"] = (noise[6] > 0.4).double() * mask
    batch["working_advantages"] = torch.tensor([-0.5, -1, 2, -0.7, 1, 0]).double()
    return batch


def reached(module: ModuleType, flags: dict) -> tuple[object, Tensor, Tensor, Rollout]:
    """Flags, log π_θ with gradient, entropy and columns of the busy batch: what `policy_loss` gets
    for a whole mini-batch."""
    args = replace(module.Args(), **flags)
    columns = busy_batch()
    columns["logp"].requires_grad_()
    logp, entropy, batch = mini_batch(module, args, **columns)
    # Branches have the size of the main rows, divided by their own: tokens, or responses
    kept = getattr(batch, "kept", batch.mask)
    size = kept.sum(1) if getattr(args, "token_mean", True) else torch.ones(len(kept)).double()
    is_branch = batch.branch > 0
    batch.branch = batch.branch * size[~is_branch].sum() / size[is_branch].sum()
    return args, logp, entropy, batch


def written(args: object, batch: Rollout) -> Batch:
    """A batch of the file as a `Batch` of its objective."""
    names = {"old": "old_logp", "mu": "rollout_logp", "ref": "ref_logp", "A": "advantages"}
    names |= {"tokens_A": "token_advantages", "working_A": "working_advantages"}
    names |= {"proxy": "proxy_logp", "teacher": "teacher_logp"}
    columns = {short: getattr(batch, name) for short, name in names.items()}
    return Batch(args=args, **vars(batch) | columns)


def agree(objective: Callable, cases: list[dict]) -> list[Callable]:
    """The checks that `policy_loss` is an objective."""

    def compare(module: ModuleType, divisions: list) -> None:
        for flags in cases:
            args, logp, entropy, batch = reached(module, flags)
            J, count = objective(written(args, batch))
            (slope,) = torch.autograd.grad(J, logp)
            for parts in divisions:
                total, number = 0.0, 0.0
                for rows in parts:
                    given = logp[rows], entropy[rows], batch.rows(rows)
                    added, counted, _ = module.policy_loss(args, *given)
                    total, number = total + added, number + counted
                (gradient,) = torch.autograd.grad(total / number, logp)
                told = "".join(f" --{name} {value}" for name, value in flags.items())
                near(total / number, -J, f"the loss{told}", 1e-9)
                near(gradient, -slope, f"∂ loss / ∂ log π{told}", 1e-9)
                near(number, count, f"the count{told}", 1e-9)

    def check_loss(module: ModuleType) -> None:
        """Value, gradient and count are those of J, which checks/ states a second time."""
        compare(module, [[[0, 1, 2, 3, 4, 5]]])

    def check_parts_add_up(module: ModuleType) -> None:
        """The sums of any micro-batches, divided once by their count, are the whole batch's J."""
        compare(module, [[[0, 3], [1, 4], [2, 5]], [[5], [2, 4], [0, 1, 3]]])

    return [check_loss, check_parts_add_up]


def count_alike(statistics: Callable, cases: list[dict]) -> Callable:
    """The check that the third result of `policy_loss` has these statistics."""

    def check_statistics(module: ModuleType) -> None:
        for flags in cases:
            args, logp, entropy, batch = reached(module, flags)
            _, _, found = module.policy_loss(args, logp, entropy, batch)
            told = "".join(f" --{name} {value}" for name, value in flags.items())
            counts(found, statistics(written(args, batch)), told)

    check_statistics.__doc__ = statistics.__doc__
    return check_statistics


# Tools of the checks


def number(x: float, other: float | None = None) -> str:
    """x with four digits, or with enough digits to differ from the other number."""
    texts = [[f"{float(value):.{digits}g}" for value in (x, other or 0)] for digits in (4, 8, 12)]
    return next((a for a, b in texts if a != b), texts[0][0])


def near(found: object, expected: object, what: str, tolerance: float = 1e-12) -> None:
    """Raises AssertionError with the name, the found and the expected number, if the two differ by
    more than the tolerance. For tensors, it names the place with the largest difference."""
    found, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (found, expected))
    assert found.shape == expected.shape, (
        f"{what}: of shape {list(found.shape)}, expected {list(expected.shape)}"
    )
    # Where both are the same infinity there is no distance
    apart = torch.where(found == expected, 0.0, (found - expected).abs()).nan_to_num(torch.inf)
    if found.numel() and apart.max() > tolerance:
        at = int(apart.argmax())
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), found.shape))
        where = f" at {list(place)}" if place else ""
        ours, theirs = found.flatten()[at].item(), expected.flatten()[at].item()
        told = f"{number(ours, theirs)}, expected {number(theirs, ours)}"
        raise AssertionError(f"{what}{where}: {told}")


def mini_batch(
    module: ModuleType, args: object, **columns: Tensor
) -> tuple[Tensor, Tensor, Rollout]:
    """log π_θ, entropy and the batch of a whole mini-batch with these columns.

    Of what is not given, μ is π_old, the entropy 0, no row is a branch and no token is working. The
    column that the file's `choose_tokens` writes is computed from these rows.
    """
    logp, A, mask = columns["logp"], columns["advantages"], columns["mask"]
    entropy = columns.get("entropy", torch.zeros_like(logp))
    usual = {
        "rollout_logp": columns["old_logp"],
        "token_advantages": A if A.dim() == 2 else A[:, None].expand_as(mask),  # ppo
        "finished": torch.ones(len(mask), dtype=torch.bool),  # dapo
        "branch": torch.zeros_like(mask[:, 0]),  # deep_grpo, recipe
        "working": torch.zeros_like(mask),  # blockwise
        "working_advantages": A,  # blockwise
        "proxy_logp": columns["old_logp"],  # lp_reg
        "teacher_logp": columns.get("ref_logp"),  # opd
    }
    batch = Rollout(**usual | columns)
    if hasattr(module, "choose_tokens") and not CHOSEN & columns.keys():
        module.choose_tokens(args, batch, logp.detach(), entropy, ALONE)
    return logp, entropy, batch


def terms(module: ModuleType, args: object, **columns: Tensor) -> tuple[Tensor, Tensor, dict]:
    """The result of `policy_loss` on a whole mini-batch, see `mini_batch`."""
    return module.policy_loss(args, *mini_batch(module, args, **columns))


def loss_of(module: ModuleType, args: object, **tensors: Tensor) -> tuple[Tensor, dict]:
    """The loss, a mean, and the statistics."""
    total, count, stats = terms(module, args, **tensors)
    return total / count, stats


def no_kl(module: ModuleType, **flags: object) -> object:
    """The file's Args, without a KL term if the file has one."""
    return replace(
        module.Args(), **({"beta": 0.0} if hasattr(module.Args(), "beta") else {}), **flags
    )


def one(*values: float) -> Tensor:
    """[1, n] in float64."""
    return torch.tensor([values], dtype=torch.float64)


def toy_batch() -> dict[str, Tensor]:
    """The fixture's batch: six responses, many of whose tokens are beyond every clip."""
    inputs = FIXTURE["inputs"]
    batch = {
        name: torch.tensor(inputs[name], dtype=torch.float64)
        for name in ("mask", "old_logp", "advantages")
    }
    batch["logp"] = batch["old_logp"] + torch.tensor(inputs["logratio"], dtype=torch.float64)
    return batch


def weighs(
    module: ModuleType,
    ratio: float,
    advantage: float,
    expected: float,
    tolerance: float = 1e-12,
    old: float = 1.0,
    **flags: object,
) -> None:
    """The gradient weight on ∇ log π of a one-token response with this ratio and π_old = `old` is
    as expected; otherwise the message has the numbers."""
    old_logp = one(old).log()
    logp = (old_logp + one(ratio).log()).requires_grad_()
    rest = {"old_logp": old_logp, "advantages": one(advantage)[0], "mask": one(1.0)}
    loss_of(module, no_kl(module, **flags), logp=logp, **rest)[0].backward()
    found = -logp.grad.item()
    places = [f"r = {number(ratio)}", f"Â = {advantage:+.4g}"]
    places += [f"{name} = {value}" for name, value in ({"π_old": old} | flags).items()]
    told = f"weight {number(found, expected)}, expected {number(expected, found)}"
    assert abs(found - expected) <= tolerance, f"{', '.join(places)}: {told}"


def matches(module: ModuleType, case: str, **flags: object) -> None:
    """Value and gradient on the toy batch equal the fixture's case, to 1e-8."""
    expected = FIXTURE["cases"][case]
    loss, gradient, _ = outcome(module, toy_batch(), no_kl(module, **flags))
    near(loss, expected["loss"], "the loss of the toy batch", 1e-8)
    near(gradient, expected["grad"], "∂ loss / ∂ log π on the toy batch", 1e-8)


def advantages_match(
    module: ModuleType, case: str, tolerance: float, rule: Callable[[Tensor], Tensor]
) -> None:
    """Advantages of the fixture's rewards equal those of its case. Those of a large group, where
    an advantage may be large, follow the rule."""
    numbers = FIXTURE["advantages"]
    rewards = torch.tensor(numbers["rewards"], dtype=torch.float64)
    found = module.advantages(rewards.clone())
    for group, ours, theirs in zip(rewards.tolist(), found, numbers[case]):
        near(ours, theirs, f"advantages of rewards {group}", tolerance)
    assert found.shape == rewards.shape, f"of rewards [P, G] they are {list(found.shape)}"
    one_right = torch.eye(64, dtype=torch.float64)[:1]
    near(module.advantages(one_right), rule(one_right), "of 1 right of 64", tolerance)


def gradient_law(module: ModuleType, power: float, **flags: object) -> None:
    """|∇J| = (p (1-p))^power · |E[∇ log π | right] - E[∇ log π | wrong]|, with the module's own
    advantages and loss.

    The "group" holds every outcome of a policy in exact proportion, so there is no sampling noise.
    """
    right = torch.tensor([1.0, 0, 0, 1, 0, 1], dtype=torch.float64)
    for counts in ([1, 7, 3, 4, 2, 3], [12, 2, 1, 1, 2, 2], [1, 1, 1, 15, 1, 1]):
        weights = torch.tensor(counts, dtype=torch.float64)
        outcomes, n = torch.repeat_interleave(torch.arange(6), weights.long()), int(weights.sum())
        theta = (weights / n).log().requires_grad_()
        logp, ones = theta.log_softmax(0)[outcomes][:, None], torch.ones(n, 1, dtype=torch.float64)
        batch = {"logp": logp, "old_logp": logp.detach(), "mask": ones}
        batch["advantages"] = module.advantages(right[outcomes][None])[0]
        loss_of(module, no_kl(module, **flags), **batch)[0].backward()
        pi = weights / n
        p = (pi * right).sum()
        scores = torch.eye(6, dtype=torch.float64) - pi  # ∇ log π of each outcome, a row each
        apart = (pi * right) @ scores / p - (pi * (1 - right)) @ scores / (1 - p)
        law = (p * (1 - p)) ** power * apart.norm()
        sample_std = ((n - 1) / n) ** 0.5 if power == 0.5 else 1.0  # by which the file divides
        found = theta.grad.norm() / (law * sample_std)
        near(found, 1, f"|∇J|, divided by the law's, at p = {number(p)}", 1e-4)


def every_answer() -> tuple[tuple[Tensor, ...], Tensor]:
    """All answers of up to three tokens of 0, 1, 2, where 0 ends an answer. Returns the index of
    every token in a table `[3, 4, 3]` (position, the token before, the token), and the mask,
    `[answers, 3]`."""
    every = [s for n in (1, 2, 3) for s in itertools.product(range(3), repeat=n)]
    answers = [s for s in every if 0 not in s[:-1] and (s[-1] == 0 or len(s) == 3)]
    places = torch.zeros(len(answers), 3, 3, dtype=torch.long)  # of padding: any
    mask = torch.zeros(len(answers), 3, dtype=torch.float64)
    for row, answer in enumerate(answers):
        for t, token in enumerate(answer):
            before = answer[t - 1] if t else 3
            places[row, t] = torch.tensor([t, before, token])
            mask[row, t] = 1
    return places.unbind(-1), mask


def counts(stats: dict, expected: dict[str, tuple], where: str = "") -> None:
    """The statistics equal these (sum, count) pairs. A count of None marks a maximum or a sum that
    is not divided."""
    for name, (total, count) in expected.items():
        assert name in stats, f"{name} is missing from the statistics, the third that is returned"
        pair = stats[name]
        assert isinstance(pair, tuple | list) and len(pair) == 2, f"{name} is no (sum, count) pair"
        near(pair[0], total, f"the sum of {name}{where}", 1e-9)
        assert (pair[1] is None) == (count is None), f"the count of {name} is {pair[1]}"
        near(pair[1] or 0, count or 0, f"the count of {name}{where}", 1e-9)


# Checks that files share


def check_advantages(module: ModuleType) -> None:
    """The z-score of the group with the sample standard deviation (divide by G - 1) plus 1e-6."""
    advantages_match(module, "ddof1_eps1e-6", 1e-8, z_score)


def check_centred_advantages(module: ModuleType) -> None:
    """The reward minus the group's mean, nothing else."""
    advantages_match(module, "mean_only", 1e-12, centred)


def check_equal_rewards(module: ModuleType) -> None:
    """Equal rewards (all right, all wrong, or all partly right) have advantages of exactly 0. The
    mean of eight 0.7 is not quite 0.7 in float32, and a std of the same rounding does not make the
    difference small. So subtract one of the group's rewards from all of them first. The given
    rewards are not changed."""
    for reward in (1.0, 0.0, 0.7, 0.3):
        rewards = torch.full((2, 8), reward)
        worst = module.advantages(rewards).abs().max().item()
        assert worst == 0, f"eight rewards of {reward:g} give {number(worst)}, expected 0"
        assert (rewards == reward).all(), "the rewards that it is given are changed in place"


def outcome(
    module: ModuleType, batch: dict[str, Tensor], args: object = None
) -> tuple[Tensor, Tensor, dict]:
    """Loss, gradient `[n, T]` and statistics of a batch (default: with the file's defaults)."""
    logp = batch["logp"].clone().requires_grad_()
    loss, stats = loss_of(module, args or module.Args(), **batch | {"logp": logp})
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.detach(), gradient, stats


def unchanged(module: ModuleType, batch: dict[str, Tensor], where: str) -> None:
    """Loss, gradient and statistics are those of the busy batch."""
    loss, gradient, stats = outcome(module, busy_batch())
    found = outcome(module, batch)
    near(found[0], loss, f"the loss {where}", 1e-9)
    near(found[1][:, : gradient.shape[1]], gradient, f"the gradient {where}", 1e-9)
    counts(found[2], stats, f" {where}")


def check_padding_counts_for_nothing(module: ModuleType) -> None:
    """For any values on padding, and any amount of it, loss, gradient and statistics are the
    same."""
    clean, wide = busy_batch(), busy_batch()
    for name, column in clean.items():
        if column.dim() == 2:
            clean[name] = column * clean["mask"]
            wide[name] = torch.nn.functional.pad(column, (0, 3))
    unchanged(module, clean, "with other numbers on padding")
    unchanged(module, wide, "with three more columns of padding")


def independent_of(columns: list[str]) -> Callable:
    """The check that a loss does not depend on columns that it must not read."""

    def check_what_plays_no_part(module: ModuleType) -> None:
        for name in columns:
            batch = busy_batch()
            batch[name] = batch[name] * 0.7 - 0.3 * batch["mask"]
            unchanged(module, batch, f"with another {WORDS[name]}")

    told = " and ".join(f"{WORDS[name]} (`{name}`)" for name in columns)
    check_what_plays_no_part.__doc__ = f"Loss, gradient and statistics do not depend on {told}."
    return check_what_plays_no_part


# What `CHECKS` of several files have: their advantages

ZSCORES = [check_advantages, check_equal_rewards]
CENTRED = [check_centred_advantages, check_equal_rewards]
