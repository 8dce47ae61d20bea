"""The rules that an algorithm file must follow, without pytest: for tests, the labs' grader and the
reader.

`checks/<algorithm>.py` has two lists. `CHECKS` are functions of a module (the file, a damaged copy,
or a student's file). They raise AssertionError if the module is wrong, and their docstring states
the rule. `MUTANTS` are damages: name -> (text that is in the file once, its replacement). At least
one check must fail on each; a third entry names the check that must fail. `READS` names the columns
that the loss may use besides log π, advantages and mask. Without it, π_old is the only one.
"""

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
FIXTURE = json.loads(Path(__file__).with_name("losses.json").read_text(encoding="utf-8"))


def of(algorithm: str) -> tuple[list[Callable], dict[str, tuple]]:
    """CHECKS and MUTANTS of an algorithm, by its file's stem. After its own CHECKS come those for
    every `policy_loss`."""
    module = importlib.import_module(f"checks.{algorithm}")
    reads = getattr(module, "READS", ("old_logp",))
    return [*module.CHECKS, check_padding_counts_for_nothing, unread(reads)], module.MUTANTS


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


def add_up(
    module: ModuleType, args: object, batch: dict[str, Tensor], parts: list, **known: Tensor
) -> None:
    """The sums of these parts of the rows, divided once, are the whole batch's loss. `known` is
    what only the whole batch knows: a number, or a column of the rows. Without it the parts give
    another loss."""

    def mean(columns: dict[str, Tensor]) -> Tensor:
        total, count = 0.0, 0.0
        for rows in parts:
            part = {name: x[rows] if x.dim() else x for name, x in columns.items()}
            found = terms(module, args, **part)
            total, count = total + found[0], count + found[1]
        return total / count

    whole = loss_of(module, args, **batch)[0]
    near(mean(batch | known), whole, "sums of the parts, divided once")
    if known:
        assert (mean(batch) - whole).abs() > 1e-4 * whole.abs(), "the parts decide alone"


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


def two_responses() -> dict[str, Tensor]:
    """For checks by hand: log-ratios [.1, -.2, .3] with Â = 1, [-.05, .02] with Â = -1."""
    logp = torch.tensor([[0.1, -0.2, 0.3], [-0.05, 0.02, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1], dtype=torch.float64)
    return {"logp": logp, "old_logp": 0 * logp, "mask": mask, "advantages": advantages}


def weight(
    module: ModuleType,
    ratio: float,
    advantage: float,
    old: float = 1.0,
    mu: float | None = None,
    **flags: object,
) -> float:
    """The gradient weight on ∇ log π of a one-token response with this ratio and π_old = `old`."""
    old_logp = one(old).log()
    logp = (old_logp + one(ratio).log()).requires_grad_()
    tensors = {"advantages": one(advantage)[0], "mask": one(1.0)}
    tensors["rollout_logp"] = old_logp if mu is None else one(mu).log()
    tensors["entropy"] = torch.full_like(old_logp, 9.0)
    loss_of(module, no_kl(module, **flags), logp=logp, old_logp=old_logp, **tensors)[0].backward()
    return -logp.grad.item()


def weighs(
    module: ModuleType,
    ratio: float,
    advantage: float,
    expected: float,
    tolerance: float = 1e-12,
    **rest: object,
) -> None:
    """The gradient weight is as expected; otherwise the message has the numbers."""
    names = {"old": "π_old", "mu": "μ"}
    places = [f"r = {number(ratio)}", f"Â = {advantage:+.4g}"]
    places += [f"{names.get(name, name)} = {value}" for name, value in rest.items()]
    found = weight(module, ratio, advantage, **rest)
    told = f"weight {number(found, expected)}, expected {number(expected, found)}"
    assert abs(found - expected) <= tolerance, f"{', '.join(places)}: {told}"


def matches(module: ModuleType, case: str, **flags: object) -> None:
    """Value and gradient on the toy batch equal the fixture's case, to 1e-8."""
    expected = FIXTURE["cases"][case]
    loss, gradient, _ = outcome(module, toy_batch(), no_kl(module, **flags))
    near(loss, expected["loss"], "the loss of the toy batch", 1e-8)
    near(gradient, expected["grad"], "∂ loss / ∂ log π on the toy batch", 1e-8)


def advantages_match(module: ModuleType, case: str, tolerance: float) -> None:
    """Advantages of the fixture's rewards equal those of its case."""
    numbers = FIXTURE["advantages"]
    rewards, expected = (
        torch.tensor(numbers[name], dtype=torch.float64) for name in ("rewards", case)
    )
    found = module.advantages(rewards.clone())
    for group, ours, theirs in zip(rewards.tolist(), found, expected):
        near(ours, theirs, f"advantages of rewards {group}", tolerance)
    assert found.shape == expected.shape, f"of rewards [P, G] they are {list(found.shape)}"


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
        assert torch.isclose(theta.grad.norm(), law * sample_std, rtol=1e-4)


def busy_batch() -> dict[str, Tensor]:
    """The toy batch with its own μ, π_ref and entropies. Its padding has values that every count
    would include: ratios that moved outward, likely and rare tokens."""
    batch, generator = toy_batch(), torch.Generator().manual_seed(7)
    mask, A = batch["mask"], batch["advantages"][:, None]
    noise = torch.rand(3, *mask.shape, generator=generator, dtype=torch.float64)
    batch["rollout_logp"] = batch["old_logp"] + noise[0] - 0.4
    batch["ref_logp"] = batch["logp"] + noise[1] - 0.5
    batch["entropy"] = 2 * noise[2]
    old = torch.tensor([-0.02, -4.0]).double().repeat(3).expand_as(mask)  # [6, 6]
    garbage = {"old_logp": old, "logp": old + torch.where(A < 0, -2.0, 2.0), "entropy": 3 + 0 * old}
    garbage |= {"rollout_logp": old - 3, "ref_logp": old + 3}
    return batch | {name: torch.where(mask > 0, batch[name], x) for name, x in garbage.items()}


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


def response_tokens(batch: dict[str, Tensor]) -> SimpleNamespace:
    """r, Â, π_old, π_θ/μ, log(π_ref/π_θ) and H of every response token, in one row `[M]`, and their
    number."""
    on = batch["mask"] > 0
    A, old = batch["advantages"][:, None].expand_as(on), batch["old_logp"]
    columns = {"A": A, "old": old.exp(), "r": (batch["logp"] - old).exp(), "H": batch["entropy"]}
    columns["w"] = (batch["logp"] - batch["rollout_logp"]).exp()
    columns["ref"] = batch["ref_logp"] - batch["logp"]
    return SimpleNamespace(**{name: x.detach()[on] for name, x in columns.items()}, M=on.sum())


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


def clipped(t: SimpleNamespace, low: float, high: float) -> dict[str, tuple]:
    """The number of tokens (of `response_tokens`) that lose their gradient by PPO's clip, in all
    and on each side."""
    above, below = (t.A > 0) & (t.r > 1 + high), (t.A < 0) & (t.r < 1 - low)
    shares = {"share": above | below, "above": above, "below": below}
    return {name: (tokens.sum(), t.M) for name, tokens in shares.items()}


# Checks that files share


def check_advantages(module: ModuleType) -> None:
    """The z-score of the group with the sample standard deviation (divide by G - 1) plus 1e-6."""
    advantages_match(module, "ddof1_eps1e-6", 1e-8)
    one_right = torch.zeros(2, 64, dtype=torch.float64)  # a large group has large ones
    one_right[1, 5] = 1.0
    expected = (one_right - 1 / 64) / (0.125 + 1e-6) * one_right.sum(1, keepdim=True)
    near(module.advantages(one_right), expected, "of 0 and of 1 right of 64", 1e-8)


def check_centred_advantages(module: ModuleType) -> None:
    """The reward minus the group's mean, nothing else."""
    advantages_match(module, "mean_only", 1e-12)


def check_parts_add_up(module: ModuleType) -> None:
    """Summing before dividing gives the whole batch's loss for any split."""
    add_up(module, module.Args(), busy_batch(), [slice(0, 1), slice(1, 4), slice(4, 6)])


def check_clip_statistics(module: ModuleType) -> None:
    """clip_share counts the response tokens that lose their gradient by the clip (Â > 0 and r > 1 +
    clip_high, or Â < 0 and r < 1 - clip_low). clip_above counts the first kind, clip_below the
    second, each as a share of all response tokens. ref_kl is k3 itself, not times β."""
    batch, flags = busy_batch(), {"clip_low": 0.2, "clip_high": 0.28}
    t = response_tokens(batch)
    expected = {f"clip_{name}": pair for name, pair in clipped(t, 0.2, 0.28).items()}
    if hasattr(module.Args(), "beta"):
        flags["beta"] = 0.3
        expected["ref_kl"] = ((t.ref.exp() - t.ref - 1).sum(), t.M)
    counts(loss_of(module, replace(module.Args(), **flags), **batch)[1], expected)


def check_kl_ratio(module: ModuleType) -> None:
    """With kl_ratio, over all samples of π_old, the KL term is KL(π_θ ‖ π_ref), and its gradient is
    that of this KL, although π_θ is another policy. Without the flag, it is neither."""
    counts = torch.tensor([1, 7, 3, 4, 2, 3])
    outcomes, old = torch.repeat_interleave(torch.arange(6), counts), counts.double() / counts.sum()
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(2, 6, generator=generator, dtype=torch.float64) / 2
    theta, ref = (old.log() + noise[0]).requires_grad_(), (old.log() + noise[1]).log_softmax(0)
    logp = theta.log_softmax(0)
    kl = (logp.exp() * (logp - ref)).sum()
    (truth,) = torch.autograd.grad(kl, theta, retain_graph=True)
    rows = {"logp": logp, "old_logp": old.log(), "ref_logp": ref}
    batch = {name: x[outcomes][:, None] for name, x in rows.items()}  # in exact proportion
    ones = torch.ones(len(outcomes), 1, dtype=torch.float64)
    batch |= {"mask": ones, "advantages": 0 * ones[:, 0]}
    found = {}
    for weighed in (True, False):
        args = replace(module.Args(), beta=1.0, kl_ratio=weighed)
        loss, stats = loss_of(module, args, **batch)
        found[weighed] = loss, torch.autograd.grad(loss, theta, retain_graph=True)[0]
    near(found[True][0], kl, "with kl_ratio the KL term, over all samples of π_old")
    near(found[True][1], truth, "its gradient by the logits, against that of KL(π_θ ‖ π_ref)")
    assert abs(found[False][0] - kl) > 1e-3, "without kl_ratio k3 is weighed by r, too"
    assert not torch.allclose(found[False][1], truth, rtol=1e-2)


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
    batch = {name: x.clone() for name, x in batch.items()}
    given = {name: x.clone() for name, x in batch.items()}
    logp = batch["logp"].requires_grad_()
    loss, stats = loss_of(module, args or module.Args(), **batch)
    (grad,) = torch.autograd.grad(loss, logp)
    for name, x in batch.items():
        assert torch.equal(x.detach(), given[name]), f"{name} is changed in place"
    return loss.detach(), grad, stats


def same_outcome(found: tuple, expected: tuple, where: str) -> None:
    """Loss, gradient and statistics are the same, except on padding."""
    width = expected[1].shape[1]
    near(found[0], expected[0], f"the loss {where}", 1e-9)
    near(found[1][:, :width], expected[1], f"the gradient {where}", 1e-9)
    counts(found[2], expected[2], f" {where}")


def check_padding_counts_for_nothing(module: ModuleType) -> None:
    """For any values on padding, and any amount of it, loss, gradient and statistics are the same.
    Padding has no gradient, and no tensor is changed in place."""
    batch = busy_batch()
    on = batch["mask"] > 0
    clean = batch | {n: x * batch["mask"] for n, x in batch.items() if x.dim() == 2}
    reference = outcome(module, clean)
    near(reference[1] * ~on, 0 * reference[1], "the gradient on padding")
    same_outcome(outcome(module, batch), reference, "with other numbers on padding")
    wide = {n: torch.nn.functional.pad(x, (0, 3)) if x.dim() == 2 else x for n, x in clean.items()}
    same_outcome(outcome(module, wide), reference, "with three more columns of padding")


def unread(reads: tuple[str, ...]) -> Callable:
    """The check that a loss does not depend on a column that it must not read."""
    words = {"old_logp": "π_old", "rollout_logp": "μ", "entropy": "the entropy"}
    names = [name for name in words if name not in reads]

    def check_what_plays_no_part(module: ModuleType) -> None:
        batch = busy_batch()
        reference = outcome(module, batch)
        for name in names:
            other = batch | {name: batch[name] * 0.7 - 0.3 * batch["mask"]}
            same_outcome(outcome(module, other), reference, f"with another {name}")

    told = " and ".join(f"{words[name]} (`{name}`)" for name in names)
    check_what_plays_no_part.__doc__ = (
        f"Loss, gradient and statistics do not depend on {told}."
        if names
        else "The same tensors give the same loss, gradient and statistics twice."
    )
    return check_what_plays_no_part


# What `CHECKS` of several files have: their advantages

ZSCORES = [check_advantages, check_equal_rewards]
CENTRED = [check_centred_advantages, check_equal_rewards]

# Damages that files share: what `MUTANTS` of several have

EQUAL = {
    "equal rewards not made 0": ("rewards = rewards - rewards[:, :1]", "rewards = 1.0 * rewards")
}
CENTRE = EQUAL | {
    "std": ("return centred", "return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)")
}
ZSCORE = EQUAL | {
    "epsilon inside the root": (
        "(rewards.std(dim=1, keepdim=True) + 1e-6)",
        "(rewards.var(dim=1, keepdim=True) + 1e-6).sqrt()",
    )
}
BY_TOKEN = "return -(objective * mask).sum(), mask.sum()"
MEANS = "((objective * mask).sum(1) / mask.sum(1)).sum()"
TOKEN_MEAN = {
    "sign": (BY_TOKEN, BY_TOKEN.replace("-(", "(")),
    "no mask": (BY_TOKEN, BY_TOKEN.replace("(objective * mask)", "objective")),
    "mean of responses": (BY_TOKEN, f"return -{MEANS}, mask.new_tensor(len(mask))"),
}
BY_RESPONSE = "return -per_response.sum(), mask.new_tensor(len(mask))"
RESPONSE_MEAN = {
    "sign": (BY_RESPONSE, BY_RESPONSE.replace("-per", "per")),
    "token-mean": (BY_RESPONSE, "return -(objective * mask).sum(), mask.sum()"),
}
SURROGATE = "torch.minimum(ratio * A, clipped * A)"
SHARE = '"clip_share": ((cut * mask).sum(), mask.sum())'
CLIP = {
    "no clip": (SURROGATE, "ratio * A"),
    "max for min": (SURROGATE, SURROGATE.replace("minimum", "maximum")),
    "clip without min": (SURROGATE, "clipped * A"),
    "clip_share as a mean": (
        SHARE,
        '"clip_share": ((cut * mask).sum() / mask.sum(), mask.new_tensor(1.0))',
    ),
}
ABOVE = 'stats["clip_above"] = ((cut & out_above) * mask).sum(), mask.sum()'
BELOW = 'stats["clip_below"] = ((cut & out_below) * mask).sum(), mask.sum()'
SIDES = CLIP | {
    "clip_above and clip_below swapped": (
        f"{ABOVE}\n    {BELOW}",
        f"{ABOVE.replace('out_above', 'out_below')}\n    {BELOW.replace('out_below', 'out_above')}",
    ),
    "μ for π_old": ("(logp - batch.old_logp).exp()", "(logp - batch.rollout_logp).exp()"),
}
KL = {
    "KL of π_old": ("ref_logp - logp", "ref_logp - batch.old_logp"),
    "KL times r": ("- args.beta * k3", "- args.beta * ratio * k3"),
    "k3 times r, a number": ("k3 = ratio * k3", "k3 = ratio.detach() * k3"),
    "ref_kl times β": ('"ref_kl"] = ((k3 *', '"ref_kl"] = ((args.beta * k3 *'),
}
