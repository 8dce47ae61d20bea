"""Judge a loss that has another interface than ours: which of our losses has its numbers?

    python -m labs.grade mine.py:grpo_loss

`grpo_loss` is a function of tensors. `NAMES` says what each argument is, by its name. The function
gets one batch, and the same batch with Â = 0, which leaves its KL term alone. Both parts are
compared with those of our files, as they are and with each known mistake, in value and gradient. A
function of rewards and no log-probs is judged as advantages. The file runs in this process, without
limits.
"""

import functools
import importlib
import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import checks
import torch
from checks.files import PATHS
from checks.grpo import RATIO, RATIOS, SURROGATE
from checks.harness import busy_batch, mini_batch, terms
from common.cli import BadInput, say
from torch import Tensor

from labs.grade import damages, in_words, load

LOGP = r"(?=.*(log_?p|log_?lik|(^|_)lps?(_|$)))"  # somewhere in the name
# What an argument is: the first whose pattern is found in its name, in lower case
NAMES = {
    "ref_logp": LOGP + "(?=.*(ref|base|init|sft))|^ref$",
    "rollout_logp": LOGP + "(?=.*(rollout|sampl|vllm|infer|behav|(^|_)mu(_|$)))|^mu$",
    "old_logp": LOGP + "(?=.*(old|prev|gen))|^(old|prev)$",
    "log_ratio": "log_?r",
    "logp": LOGP + "|^(new|cur|current)$",
    "ratio": "^(importance_|prob_)?ratios?$",
    "mask": "mask|^(m|valid|keep|(non|not)_?pad)$",
    "advantages": "adv|^a(_hat|hat|_i|_t)?$",
    "entropy": "entrop(y|ies)$",
    "branch_weight": "branch.*(w|coef|scale|lam)",
    "is_branch": "branch",
    "is_cap": r"(^|_)cap(_|$)|((is|tis|ratio|weight)_?(max|thres)|max_?(is|ratio|weight))",
    "clip_high": "(clip|eps).*(hi|up|plus|_h$)|eps.*max",
    "clip_low": "(clip|eps).*(lo(w|_|$)|_l$)|eps.*min",
    "clip": "^(?!.*(dual|val|_c$|norm|grad|kl|std|adv|min|max)).*(clip|eps)",
    "beta": "^(beta|lam(bda)?_?)$|kl_?.*(be|co|we|pen|lam)|(be|co|we|lam|alpha).*_kl",
    "tau_pos": "(tau|temp).*pos",
    "tau_neg": "(tau|temp).*neg",
    "tau_p": "tau_?p$|(p|prob)_?thr",
    "entropy_quantile": "(ent|h)_?(q|thr|perc|rho)",
    "tokens": "items|total|num.*tok|n_tok",
    "lengths": "^((seq|resp|response|completion)_)?(lens?|lengths?)$",
    "max_new_tokens": "max.*(len|tok)",
    "group": "group_?size|^group$|num_?(gen|sam|ch|ro|re)|^[gkn]$",
    "group_ids": "(^|_)(index|uids?|group_?ids?|groups)$",
    "rewards": "reward|score|return|^rs?$",
}
# Numbers for the flags. Few of them are a usual default, so an argument that is ignored shows.
NUMBERS = {"clip": 0.15, "clip_low": 0.15, "clip_high": 0.3, "is_cap": 1.3, "beta": 0.1}
NUMBERS |= {"tau_pos": 1.0, "tau_neg": 1.05, "max_new_tokens": 7, "group": 3}
NUMBERS |= {"branch_weight": 0.7, "tau_p": 0.002, "entropy_quantile": 0.8}
WRAPPER = """{name} is no argument that is known here: rename it, or give it a default. If it is not
a tensor of log-probs, put a function like this below yours, and judge it:
    def mine(logp, old_logp, advantages, mask, clip):
        logits = torch.stack([logp, (1 - logp.exp()).log()], dim=-1)  # its token is 0, of 2
        return yours(logits, {{"old": old_logp, "A": advantages, "mask": mask}}, Config(clip))"""
# Known changes of grpo.py, beside those of checks/grpo.py
BACK = f"torch.where(A < 0, (ratio * A).maximum(clipped * A), {SURROGATE})"
MORE = {
    "log r for r": (RATIO, "ratio = logp - batch.old_logp"),
    "max for min where Â < 0": (SURROGATE, BACK),
    "a dual clip at 3": (SURROGATE, f"torch.where(A < 0, {SURROGATE}.maximum(3 * A), {SURROGATE})"),
    "KL to π_old": ("batch.ref_logp - logp", "batch.old_logp - logp"),
}
MEANS = ("token-mean", "sum over a response's tokens")  # no changes here, as each mean is named
# The correction that TRL makes by default
TRL = {"correction": "mis", "correction_level": "sequence", "w_low": 0.0, "w_high": 3.0}
NO_CAP = 1e9
TOKEN = "r {:.3g}, Â {:.3g}, |y| {:.0f}: its weight is {:.3g}, not {:.3g}"
NO_GRADIENT = "no gradient reaches log π through Â: look for detach(), item(), no_grad, tensor(...)"
DIVIDED = "grpo gspo sapo vcpo icepop goldilocks signs".split()  # their sums divide by |y|
SHAPES = {"[N]": (9,), "[N, 1]": (9, 1), "[N, T]": (9, 7)}
REWARDS = torch.tensor([[1.0, 0, 0], [1e-4, 0, 2e-4], [0.5, 2, -1], [1, 1, 0]]).double()  # [P, G]


class Part(NamedTuple):
    """A part of a loss: its value, and its tokens' weights -∂/∂ log π `[N, T]`."""

    value: Tensor
    weights: Tensor


class Ours(NamedTuple):
    """A part of one of our losses, with no change or a known one. It is a sum, not a mean."""

    name: str
    flags: dict
    change: str
    part: Part
    by_length: bool  # divided by |y|
    count: float  # by which the file divides the sum


class Match(NamedTuple):
    """How a judged part compares with one of ours. The best match has the smallest rank."""

    rank: tuple
    ours: Ours
    exact: bool  # on all tokens but padding
    same_value: bool
    changes: list[str]
    factor: float
    mean: str  # that the factor stands for
    times: float  # the rest of the factor
    weights: Tensor  # the judged ones, divided by the factor


def meaning(name: str) -> str:
    """Return which of NAMES an argument is, or ""."""
    return next((what for what, words in NAMES.items() if re.search(words, name.lower())), "")


def arguments(function: Callable) -> dict[str, str]:
    """Return which of NAMES each argument of a function gets. One that has a default keeps it, if
    the default is neither None nor a usual value of a number that is known here."""
    read = {}
    for name, parameter in inspect.signature(function).parameters.items():
        what, default = meaning(name), parameter.default
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        number = isinstance(default, int | float) and not isinstance(default, bool)
        usual = number and (0.01 <= default <= 0.5 or what in ("beta", "group", "max_new_tokens"))
        free = default is None or default is parameter.empty
        if what and (free or what in NUMBERS and usual):
            read[name] = what
        elif default is parameter.empty:
            raise BadInput(WRAPPER.format(name=name))
    alike = [name for name, what in read.items() if what == "logp"]
    if len(alike) > 1:
        raise BadInput(f"{' and '.join(alike)} all look like log-probs of π_θ: rename some")
    return read


def batch(padded: bool, from_rewards: bool) -> dict[str, Tensor]:
    """Return nine responses in three groups. For each sign of Â there are ratios on all sides of
    the clip. Padding has extreme values; if not `padded`, all rows are full. Â are the z-scores of
    rewards, or any numbers."""
    columns = {name: x for name, x in busy_batch().items() if "top" not in name}
    mask = (columns["mask"].flip(1).cumsum(1).flip(1) > 0).double()  # without holes
    columns["mask"] = mask = mask if padded else torch.ones_like(mask)
    third = 3**-0.5
    scores = torch.tensor([1, 0, -1, 0, -1, 1, third, -2 * third, third]).double()
    A = scores if from_rewards else torch.tensor([1.2, 0, -1, 0, -1.5, 0.8, 0.5, -0.4, 6]).double()
    for sign in (-1, 0, 1):
        at = (A.sign()[:, None] == sign) & (mask > 0)
        ratios = torch.tensor(RATIOS * 9).double()[: int(at.sum())].log()
        columns["old_logp"][at] -= ratios.clamp(min=0)  # so no log-prob is above 0
        columns["logp"][at] = columns["old_logp"][at] + ratios
    for name in ("logp", "old_logp", "rollout_logp", "ref_logp"):
        columns[name][0, 2] -= 8  # stapo leaves this token out
    columns["entropy"][0, 2] = 0.01
    return columns | {"advantages": A, "is_branch": columns["branch"], "branch": 0 * A}


def answer(function: Callable, read: dict[str, str], kinds: tuple, columns: dict) -> Part:
    """Call a function with what its arguments mean, and return its loss. `kinds` are the shape of
    Â and the type of the mask."""
    shape, kind = kinds
    A, mask = columns["advantages"], columns["mask"]
    leaf = columns["logp"].clone().requires_grad_()
    filled = NUMBERS | {name: x.clone() for name, x in columns.items()} | {"logp": leaf.clone()}
    filled["log_ratio"] = filled["logp"] - filled["old_logp"]
    filled["ratio"] = filled["log_ratio"].exp()
    filled["tokens"] = mask.sum()
    filled["lengths"] = mask.sum(1)
    filled["mask"] = mask.to(kind)
    filled["is_branch"] = columns["is_branch"].to(kind)
    filled["rewards"] = 0.5 + A * torch.tensor([1, 1, 1, 2, 2, 2, 0.5, 0.5, 0.5])
    filled["advantages"] = A.view(9, *[1] * (len(shape) - 1)).expand(shape).clone()
    found = function(**{name: filled[what] for name, what in read.items()})
    if isinstance(found, dict):
        found = [found["loss"]] if "loss" in found else [*found.values()]
    found = found if isinstance(found, list | tuple) else [found]
    tensors = [x for x in found if isinstance(x, Tensor)] or [torch.tensor(0.0)]
    loss = next((x for x in tensors if x.requires_grad), tensors[0])
    if loss.numel() != 1:
        advice = "return one number, such as the mean over all tokens"
        raise BadInput(f"it returns a tensor of shape {list(loss.shape)}: {advice}")
    slope = None
    if loss.requires_grad:
        (slope,) = torch.autograd.grad(loss.sum(), leaf, allow_unused=True)
    weights = torch.zeros_like(leaf) if slope is None else -slope
    return Part(loss.detach().double().sum(), weights)


def of_columns(module: ModuleType) -> tuple[Callable, dict[str, str]]:
    """Return a file's `policy_loss`, which has our interface, as one of columns and flags."""
    columns = "logp old_logp rollout_logp ref_logp entropy advantages mask".split()
    flags = {name: x for name, x in NUMBERS.items() if hasattr(module.Args(), name)}

    def loss(**given: Tensor) -> Tensor:
        args = replace(module.Args(), **flags)
        logp, rows = mini_batch(module, args, **{name: given[name] for name in columns})
        total, count = module.policy_loss(args, logp, rows)
        return total / count

    return loss, {name: name for name in [*columns, *flags]}


def tried(function: Callable, read: dict[str, str], path: Path) -> tuple[dict, tuple]:
    """Return the batch, and the kinds (see `answer`) with which a function runs. Raise BadInput if
    there are none, or if what it returns cannot be judged."""
    columns, errors = batch("mask" in read.values(), "advantages" not in read.values()), []
    for kinds in itertools.product(SHAPES.values(), (torch.float64, torch.bool, torch.long)):
        try:
            value, weights = answer(function, read, kinds, columns)
        except Exception as error:
            errors.append(error if isinstance(error, BadInput) else in_words(error, path))
            continue
        if not (value.isfinite() and weights.isfinite().all()):
            raise BadInput("the loss or its gradient is NaN or infinite: look for 0/0 and log of 0")
        if not weights.any():
            raise BadInput(NO_GRADIENT)
        return columns, kinds
    raise BadInput(next((e for e in errors if isinstance(e, BadInput)), errors[0]))


def without_advantages(loss: Callable[[dict], Part], columns: dict) -> tuple[Part, Part]:
    """Split a loss into the part that Â causes, and the rest: a KL term, or nothing."""
    whole = loss(columns)
    rest = loss(columns | {"advantages": 0 * columns["advantages"]})
    if not (rest.value.isfinite().all() and rest.weights.isfinite().all()):  # 0/0 of Â's std
        rest = Part(0 * whole.value, 0 * whole.weights)
    return Part(whole.value - rest.value, whole.weights - rest.weights), rest


def bounds(loss: Callable[[dict], Part], columns: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Measure the smallest and the largest ratio that count where the clip acts, and the largest
    that counts with Â < 0. All tokens have the same ratio, so the mean over them does not matter.
    NaN says that it cannot be measured."""

    def value(sign: float, ratio: float) -> Tensor:
        old = columns["logp"] - math.log(ratio)
        A = torch.full_like(columns["advantages"], sign)
        moved = columns | {"old_logp": old, "rollout_logp": old, "advantages": A}
        return without_advantages(loss, moved)[0].value

    good = {ratio: value(1.0, ratio) / value(1.0, 1.0) for ratio in (0.01, 100.0)}
    bad = {ratio: value(-1.0, ratio) / value(-1.0, 1.0) for ratio in (0.01, 100.0)}
    low = bad[0.01] if bad[0.01] > 0.02 else good[0.01]
    high = good[100.0] if 0 < good[100.0] < 50 else bad[100.0]
    return low, high, bad[100.0]


def house(module: ModuleType, args: object, columns: dict[str, Tensor]) -> Part:
    """Return what one of our losses gives: sums over the batch, as the file divides them."""
    leaf = columns["logp"].clone().requires_grad_()
    logp, rows = mini_batch(module, args, **columns | {"logp": leaf})
    total, _ = module.policy_loss(args, logp, rows)
    (slope,) = torch.autograd.grad(total, leaf)
    return Part(total.detach(), -slope)


@functools.cache
def modules() -> list[tuple[str, str, ModuleType]]:
    """Return each file that has a loss of its own, and then those with a known change: the file's
    name, the change or "", and the module."""
    found = []
    for name in dict.fromkeys(["grpo", "justrl", "dr_grpo", "centred", *PATHS]):
        source = PATHS[name].read_text("utf-8")
        if "\ndef policy_loss(" in source:
            found.append((name, "", load(source, PATHS[name])))
    for name in PATHS:
        found += [(name, change, module) for change, module in damages(name) if change not in MEANS]
    for change, (old, new) in MORE.items():
        source = checks.replaced(PATHS["grpo"], old, new)
        found.append(("grpo", change, load(source, PATHS["grpo"])))
    return found


def parts_of_ours(columns: dict, settings: list[dict]) -> tuple[list[Ours], list[Ours]]:
    """Return the objectives and the KL terms of our losses, under each of the settings and the
    words of CASES: as they are, with each known change, and with the other mean (over responses or
    over tokens)."""
    A, n = columns["advantages"], columns["mask"].sum(1)
    objectives, others = [], []
    rests = []
    for setting, one in itertools.product(settings, modules()):
        name, change, module = one
        cases, batches = [{}], {change: A}
        if not change:
            for case in importlib.import_module(f"checks.{name}").CASES:
                cases.append({key: x for key, x in case.items() if isinstance(x, str | bool)})
            cases += [TRL] if name == "icepop" else []
            batches["Â whitened again"] = (A - A.mean()) / A.std()
        for case, what in itertools.product(cases, batches):
            known = vars(module.Args())
            flags = {key: x for key, x in (case | setting).items() if key in known}
            args = replace(module.Args(), **flags)
            loss = functools.partial(house, module, args)
            moved = columns | {"advantages": batches[what]}
            objective, rest = without_advantages(loss, moved)
            by_length = getattr(args, "length_norm", name in DIVIDED)
            _, count = terms(module, args, **moved)
            ours = Ours(name, flags, what, objective, by_length, float(count))
            (others if case else objectives).append(ours)
            rests.append(ours._replace(part=rest))
            moved["advantages"] = batches[what] * (n if by_length else 1 / n)
            objective, _ = without_advantages(loss, moved)
            others.append(ours._replace(part=objective, by_length=not by_length))
    return objectives + others, rests


def mean_of(factor: float, ours: Ours, mask: Tensor) -> tuple[str, float]:
    """Name the mean that a factor of a sum over tokens stands for, and return the rest of it."""
    N, T = mask.shape
    if ours.by_length:
        means = {"response mean": N}
    else:
        means = {"token mean": float(mask.sum()), "sum": 1, "sum / N": N, "sum / (N T)": N * T}
        L = max(1, round(1 / N / abs(factor)))
        means[f"sum / (N {L})"] = N * L
    means["its own mean"] = ours.count
    rest = {mean: abs(factor) * count for mean, count in means.items()}
    mean = min(rest, key=lambda name: abs(math.log(rest[name])))
    return mean, rest[mean]


def compare(part: Part, ours: Ours, mask: Tensor) -> Match | None:
    """Compare a judged part with one of ours, up to the factor under which most tokens agree."""
    there = ours.part.weights
    both = (there != 0) & (part.weights.abs() > 1e-7 * part.weights.abs().max())
    if not both.any() or not there.isfinite().all():
        return None
    quotients = (part.weights / there)[both]
    alike = (quotients[:, None] - quotients).abs() < 1e-4 * quotients.abs()
    factor = float(quotients[alike.sum(0).argmax()])
    weights = part.weights / factor
    agree = (weights - there).abs() < 1e-4 * (there.abs() + 0.1 / mask.sum(1, keepdim=True))
    exact = bool(agree[mask > 0].all())
    changes = [ours.change] if ours.change else []
    if exact and not agree.all():
        changes.append("mask forgotten")
    value = factor * ours.part.value
    same_value = bool((part.value - value).abs() < 1e-4 * (value.abs() + 0.001))
    mean, times = mean_of(factor, ours, mask)
    odd = abs(times - 1) > 1e-3
    rank = (not exact, exact and not same_value, len(changes), odd, -int(agree.sum()), factor < 0)
    return Match(rank, ours, exact, same_value, changes, factor, mean, times, weights)


def nearest(part: Part, candidates: list[Ours], mask: Tensor) -> Match:
    """Return the best match. A loss with a known change counts only if it explains all tokens."""
    matches = [compare(part, ours, mask) for ours in candidates]
    matches = [match for match in matches if match and (match.exact or not match.ours.change)]
    return min(matches, key=lambda match: match.rank)


def table(match: Match, right: Tensor, columns: dict[str, Tensor]) -> Iterator[str]:
    """Yield a line for each kind of token of which some have another weight than the right one."""
    mask, flags, weights = columns["mask"], match.ours.flags, match.weights
    size = mask.sum(1, keepdim=True).expand_as(mask)
    if match.ours.by_length:
        weights, right = weights * size, right * size
    A = columns["advantages"][:, None].expand_as(mask)
    r = (columns["logp"] - columns["old_logp"]).exp()
    low, high = 1 - flags.get("clip_low", 0.2), 1 + flags.get("clip_high", 0.2)
    real = mask > 0
    kinds = {"padding": ~real, "|y| up to 3": real & (size <= 3), "|y| above 3": real & (size > 3)}
    for sign, of_sign in {"Â > 0": A > 0, "Â = 0": A == 0, "Â < 0": A < 0}.items():
        kinds[f"{sign}, r < {low:g}"] = real & of_sign & (r < low)
        kinds[f"{sign}, r inside"] = real & of_sign & (r >= low) & (r <= high)
        kinds[f"{sign}, r > {high:g}"] = real & of_sign & (r > high)
    for kind, at in kinds.items():
        gap = (weights - right).abs() * at
        differ = gap > 1e-4 * (right.abs() + 0.1)
        if differ.any():
            count = f"{int(differ.sum()):2} of {int(at.sum()):2}"
            numbers = [float(x.flatten()[gap.argmax()]) for x in (r, A, size, weights, right)]
            yield f"{kind:16} {count}, such as {TOKEN.format(*numbers)}"


def described(match: Match, words: list[str]) -> str:
    """Write which of our losses a match is, with its mean and flags."""
    name, flags = match.ours.name, dict(match.ours.flags)
    if name == "justrl" and match.mean.startswith("sum / (N"):
        name = "dr_grpo"
    for flag in ("beta", "log_square"):  # of the KL term
        flags.pop(flag, None)
    if flags.get("is_cap") == NO_CAP:
        flags["is_cap"] = "none"
    if "clip_low" in flags:
        words.append(f"clip {flags.pop('clip_low'):g}/{flags.pop('clip_high'):g}")
    words += [f"{key} {x}" for key, x in flags.items()]
    return f"{name}.py ({', '.join(words)})".replace("centred.py", "REINFORCE, Â log π,")


def verdict(objective: Match, kl: Match | None, changes: list[str]) -> str:
    """Say in one line which of our losses it is."""
    times = [f"times {objective.times:.4g}"] if abs(objective.times - 1) > 1e-3 else []
    what = described(objective, [objective.mean, *times] if objective.exact else [])
    if kl:
        term = "the KL term k3" if "grpo" in kl.ours.name else f"the term of {kl.ours.name}.py"
        term += " times r" if kl.ours.flags.get("kl_ratio") else ""
        beta = kl.times * kl.ours.flags.get("beta", 1.0)
        what += f" with {term} ({kl.mean}, β {beta:.4g})"
    if not (objective.exact and (kl is None or kl.exact)):
        return f"NONE of our losses. The nearest is {what}."
    if changes:
        return f"CHANGED: the loss of {what}, except for this: {'; '.join(changes)}."
    if objective.factor < 0:
        return f"NEGATED: minus the loss of {what}. An optimiser minimises, so return minus this."
    if objective.same_value and (kl is None or kl.same_value):
        return f"RIGHT: the loss of {what}, in value and gradient."
    return f"RIGHT: the gradient is that of {what}. The value is another one."


def settings_of(loss: Callable[[dict], Part], columns: dict, asked: set[str]) -> list[dict]:
    """Return flags for our losses: those that a loss was given, or usual ones, and its own clip."""
    low, high, cap = bounds(loss, columns)
    flags = {"beta": 1.0, "log_square": 1.0}
    if cap > 0:
        flags["is_cap"] = round(float(cap), 6) if cap < 50 else NO_CAP
    flags |= {what: NUMBERS[what] for what in asked & NUMBERS.keys()}
    clips = [(0.2, 0.2), (0.2, 0.28)]
    if asked & {"clip", "clip_low", "clip_high"}:
        clips = [(NUMBERS["clip"], NUMBERS["clip_high" if "clip_high" in asked else "clip"])]
    if low > 0.02 or high < 50:  # a clip was found
        clips.append((round(1 - float(low), 6), round(float(high) - 1, 6)))
    return [flags | {"clip_low": below, "clip_high": above} for below, above in clips]


def kl_changes(kl: Match, objective: Match, asked: set[str]) -> list[str]:
    """Say what is unusual about a KL term."""
    changes = [change if "KL" in change else f"KL: {change}" for change in kl.changes]
    if kl.factor * objective.factor < 0:
        changes.append("KL of the wrong sign")
    if kl.ours.by_length != objective.ours.by_length:
        changes.append("KL with another mean than the objective")
    elif "beta" in asked and round(kl.times, 3) not in (1.0, round(objective.times, 3)):
        changes.append(f"KL with another β than the {NUMBERS['beta']} that it was given")
    return changes


def judge(path: Path, source: str, name: str) -> int:
    """Print the verdict on a function, and return the exit code."""
    sys.path.insert(0, str(path.parent.resolve()))  # for what the file imports
    try:
        module = load(source, path)
        function = getattr(module, name)
    except Exception as error:
        raise BadInput(in_words(error, path)) from error
    if name == "policy_loss" and hasattr(module, "Args"):
        function, read = of_columns(module)
    else:
        read = arguments(function)
    asked, notes = {*read.values()}, []
    if "rewards" in asked and "logp" not in asked:
        return judge_advantages(function, read, path)
    columns, kinds = tried(function, read, path)
    mask = columns["mask"]
    if "mask" not in asked:
        notes.append("It takes no mask: judged on full rows, for which all means agree.")
    if not asked & {"old_logp", "rollout_logp", "ratio", "log_ratio"}:
        columns["old_logp"] = columns["logp"]
        notes.append("It takes no log-probs of π_old: judged at r = 1, where many losses agree.")
    elif "rollout_logp" in asked and "old_logp" not in asked:
        columns["old_logp"] = columns["rollout_logp"]
    if "rollout_logp" not in asked:
        columns["rollout_logp"] = columns["old_logp"]
    if "is_branch" in asked:  # deep_grpo.py: T_main / T_branch on branches
        branch, n = columns["is_branch"], mask.sum(1)
        columns["branch"] = branch * ((1 - branch) @ n) / (branch @ n)
    loss = functools.partial(answer, function, read, kinds)
    objective, rest = without_advantages(loss, columns)
    if objective.weights.abs().max() < 1e-9:
        raise BadInput(NO_GRADIENT)
    settings = settings_of(loss, columns, asked)
    objectives, rests = parts_of_ours(columns, settings)
    best, kl = nearest(objective, objectives, mask), None
    changes = [*best.changes]
    clip = [settings[0]["clip_low"], settings[0]["clip_high"]]
    own = [best.ours.flags.get(flag) for flag in ("clip_low", "clip_high")]
    if "clip" in str(asked) and own not in (clip, [None, None]):
        changes.append(f"it was given the clip {clip[0]}/{clip[1]}")
    if rest.weights.abs().max() > 1e-9:
        kl = nearest(rest, rests, mask)
        changes += kl_changes(kl, best, asked)
    elif "ref_logp" in asked:
        notes.append("π_ref is an argument, but no KL term has a gradient.")
        if rest.value.abs() > 1e-9:
            changes.append("KL without gradient")
    line = verdict(best, kl, changes)
    say(line)
    if not best.exact or best.changes:
        unchanged = [x for x in objectives if x[:3] == (*best.ours[:2], "")]
        unchanged = [x for x in unchanged if x.by_length == best.ours.by_length]
        say(*table(best, (unchanged or [best.ours])[0].part.weights, columns))
    if kl and (not kl.exact or "mask forgotten" in kl.changes):
        say("The weights of the KL term:", *table(kl, kl.ours.part.weights, columns))
    say(*notes, f"Arguments: {', '.join(f'{name} = {what}' for name, what in read.items())}.")
    return int(not line.startswith("RIGHT"))


def rules() -> Iterator[tuple[str, Tensor]]:
    """Yield the ways to make advantages `[P, G]` of REWARDS, each in words."""
    R = REWARDS
    for of, where in {"group": 1, "batch": (0, 1), "column": 0}.items():
        mean = R.mean(where, keepdim=True)
        n = R.numel() // mean.numel()
        others = (n * mean - R) / (n - 1)
        stds = {"sample": R.std(where, keepdim=True)}
        stds["population"] = R.std(where, keepdim=True, correction=0)
        for base, b in {f"the {of}'s mean": mean, f"the mean of the {of}'s others": others}.items():
            yield f"R - {base}", R - b
            for kind, added in itertools.product(stds, (0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)):
                words = f"(R - {base}) / (the {of}'s {kind} std + {added:g})"
                yield words, (R - b) / (stds[kind] + added)


def judge_advantages(function: Callable, read: dict[str, str], path: Path) -> int:
    """Print by which rule a function makes advantages of rewards, for each form that it takes."""
    said, errors = [], []
    values = NUMBERS | {"group_ids": torch.arange(4).repeat_interleave(3), "mask": torch.ones(12)}

    def of(rewards: object) -> Tensor:
        given = values | {"rewards": rewards}
        found = function(**{name: given[what] for name, what in read.items()})
        return torch.as_tensor(found[0] if isinstance(found, tuple) else found).flatten().double()

    rows = [*REWARDS]
    forms = {"[P, G]": [REWARDS], "[N]": [REWARDS.flatten()], "of one group [G]": rows}
    forms["of one group, a list"] = [row.tolist() for row in rows]
    for form, parts in forms.items():
        try:
            found = torch.cat([of(part) for part in parts]).view_as(REWARDS)
            alike = [words for words, x in rules() if torch.allclose(x, found, 2e-5, 1e-6)]
            said.append(f"Rewards {form}: {(alike or ['no rule that is known here'])[0]}.")
            if not of(torch.ones_like(torch.as_tensor(parts[0]))).isfinite().all():
                said.append("Equal rewards give NaN or infinity: add 1e-6 to the std.")
        except Exception as error:
            errors.append(in_words(error, path))
    if not said:
        raise BadInput(f"it takes rewards in no form that was tried: {errors[0]}")
    say(*said)
    return int("group" not in "".join(said))
