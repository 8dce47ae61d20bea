"""Judge a loss that has another interface than ours: which of our losses has its numbers?

    python -m labs.grade mine.py:grpo_loss

`NAMES` says what each argument is. Value and gradient on one batch are compared with those of our
files, as they are and with known mistakes. If none agrees, there may be a KL term: what is left if
all Â are 0. A function of rewards is judged as advantages. The file runs here, without limits.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import ModuleType

import checks
import torch
from checks.files import PATHS
from checks.grpo import RATIOS
from checks.harness import busy_batch, loss_of, terms
from common.cli import BadInput, say
from torch import Tensor

from labs.handed_in import in_words, load

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
    "advantages": "adv|^a(_?hat|_[a-z]{1,2})?$",
    "entropy": "entrop(y|ies)$",
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
NUMBERS |= {"tau_p": 0.002, "entropy_quantile": 0.8, "group_ids": torch.arange(12) // 3}
CLIPS = [(0.2, 0.2), (0.2, 0.28), (0.2, 0.3), (0.1, 0.1), (0.3, 0.3)]  # if no argument is a clip
COLUMNS = "logp old_logp rollout_logp ref_logp entropy advantages mask".split()
# The correction that TRL makes by default
TRL = {"correction": "mis", "correction_level": "sequence", "w_low": 0.0, "w_high": 3.0}
WHITENED = "Â whitened again"
MEANS = ("token-mean", "sum over a response's tokens")  # named as means, not as changes
DIVIDED = "grpo gspo sapo vcpo icepop goldilocks signs".split()  # their sums divide by |y|
REWARDS = torch.tensor([[1.0, 0, 0], [1e-4, 0, 2e-4], [0.5, 2, -1], [1, 1, 0]]).double()  # [P, G]
UNKNOWN = """{name} is no argument that is known here: rename it, or give it a default. If it is not
a tensor of log-probs, put a function like this below yours, and judge it:
    def mine(logp, old_logp, advantages, mask, clip):
        logits = torch.stack([logp, (1 - logp.exp()).log()], dim=-1)  # its token is 0, of 2
        return yours(logits, {{"old": old_logp, "A": advantages, "mask": mask}}, Config(clip))"""
NO_GRADIENT = "no gradient reaches log π through Â: look for detach(), item(), no_grad, tensor(...)"
COUPLED = "no verdict: a weight depends on all Â, but not as with entropy20.py --tokens kl_cov"


@dataclass
class Ours:
    """One of our losses, or its KL term, with a known change or none. It is a sum, not a mean."""

    name: str
    args: object
    change: str
    divided: bool  # by |y|
    count: float  # by which the file divides the sum
    value: Tensor
    weights: Tensor  # -∂/∂ log π [N, T]


@dataclass
class Match:
    """How a judged loss compares with one of ours."""

    ours: Ours
    factor: float  # between the two
    weights: Tensor  # the judged ones, divided by the factor
    agree: int  # number of tokens
    exact: bool  # on all tokens but padding
    same_value: bool
    changes: list[str]


def meanings_of(function: Callable) -> dict[str, str]:
    """Return which of NAMES each argument of a function is. One with a default keeps it, unless the
    default is None, or a usual value of a number that is known here."""
    meanings = {}
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        fitting = [what for what, pattern in NAMES.items() if re.search(pattern, name.lower())]
        what = fitting[0] if fitting else ""
        number = what in NUMBERS and isinstance(default, int | float)
        usual = number and (default >= 0.01 or what == "beta")
        if what and (default is None or default is parameter.empty or usual):
            meanings[name] = what
        elif default is parameter.empty:
            raise BadInput(UNKNOWN.format(name=name))
    policies = [name for name, what in meanings.items() if what == "logp"]
    if len(policies) > 1:
        raise BadInput(f"{' and '.join(policies)} all look like log-probs of π_θ: rename some")
    return meanings


def batch_for(kinds: set[str]) -> dict[str, Tensor]:
    """Return nine responses with ratios on all sides of the clip for each sign of Â, and extreme
    values in the padding. A loss without a mask gets full rows. One without π_old gets π_θ."""
    columns = busy_batch()
    mask = (columns["mask"].flip(1).cumsum(1).flip(1) > 0).double()  # without holes
    columns["mask"] = mask = mask if "mask" in kinds else torch.ones_like(mask)
    for name in ("logp", "old_logp", "rollout_logp", "ref_logp"):
        columns[name] = columns[name].clamp(max=-0.01)
        columns[name][0, 2] -= 8  # stapo leaves this token out
    columns["entropy"][0, 2] = 0.01
    for sign in (-1, 0, 1):
        at = (columns["advantages"].sign()[:, None] == sign) & (mask > 0)
        ratios = torch.tensor(RATIOS * 9).double()[: int(at.sum())].log()
        columns["old_logp"][at] -= ratios.clamp(min=0)  # so no log-prob is above 0
        columns["logp"][at] = columns["old_logp"][at] + ratios
    if not kinds & {"old_logp", "ratio", "log_ratio"}:
        columns["old_logp"] = columns["rollout_logp" if "rollout_logp" in kinds else "logp"]
    if "rollout_logp" not in kinds:
        columns["rollout_logp"] = columns["old_logp"]
    return columns


def numbers_of(loss: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of a loss, and its tokens' weights -∂/∂ log π `[N, T]`."""
    (slope,) = torch.autograd.grad(loss.sum(), logp, allow_unused=True, materialize_grads=True)
    return loss.detach().double().sum(), -slope


def call(function: Callable, meanings: dict, shape: tuple, dtype: object, columns: dict) -> tuple:
    """Return the numbers of a judged loss. `shape` is that of Â, and `dtype` that of the mask."""
    A, mask = columns["advantages"], columns["mask"]
    logp = columns["logp"].clone().requires_grad_()
    values = NUMBERS | {name: x.clone() for name, x in columns.items()} | {"logp": logp.clone()}
    values["log_ratio"] = values["logp"] - values["old_logp"]
    values["ratio"] = values["log_ratio"].exp()
    values["tokens"] = mask.sum()
    values["lengths"] = mask.sum(1)
    values["mask"] = mask.to(dtype)
    values["advantages"] = (A if shape == (9,) else A[:, None]).expand(shape).clone()
    result = function(**{name: values[what] for name, what in meanings.items()})
    results = list(result.values()) if isinstance(result, dict) else result
    results = results if isinstance(results, list | tuple) else [results]
    losses = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    if not losses:
        raise BadInput(NO_GRADIENT)
    if losses[0].numel() != 1:
        raise BadInput(f"it returns {list(losses[0].shape)}: return one number, such as the mean")
    return numbers_of(losses[0], logp)


def working_call(function: Callable, meanings: dict, columns: dict, path: Path) -> Callable:
    """Return `call` for a function, with a shape and a dtype that it takes."""
    refused, failed = [], []
    for shape, dtype in product([(9,), (9, 1), (9, 7)], [torch.float64, torch.bool]):
        loss = partial(call, function, meanings, shape, dtype)
        try:
            loss(columns)
            return loss
        except BadInput as error:
            refused.append(str(error))
        except Exception as error:
            failed.append(in_words(error, path))
    raise BadInput([*refused, *failed][0])


@cache
def modules() -> list[tuple[str, str, ModuleType]]:
    """Load each file that has a loss of its own, and then each one with a known change."""
    loaded = []
    for name in dict.fromkeys(["grpo", "justrl", "dr_grpo", "cispo", *PATHS]):
        source = PATHS[name].read_text("utf-8")
        if "\ndef policy_loss(" in source:
            loaded.append((name, "", load(source, PATHS[name])))
    for name, path in PATHS.items():
        for change, (old, new) in checks.of(name)[1].items():
            if change not in MEANS:
                loaded.append((name, change, load(checks.replaced(path, old, new), path)))
    return loaded


def settings_for(kinds: set[str]) -> list[dict]:
    """Return flags for our losses without a KL term. CISPO's cap may be 1 + ε."""
    flags = {name: x for name, x in NUMBERS.items() if name in kinds} | {"beta": 0.0}
    if not kinds & {"clip", "clip_low", "clip_high"}:
        clips = [{"clip_low": low, "clip_high": high} for low, high in CLIPS]
        return [flags, *[flags | clip for clip in clips]]  # first each file's own clip
    high = NUMBERS["clip_high" if "clip_high" in kinds else "clip"]
    flags |= {"clip_low": NUMBERS["clip_low"], "clip_high": high}
    return [flags, {"is_cap": 1 + high} | flags]


def args_of(name: str, module: ModuleType, settings: list[dict]) -> list[object]:
    """Return a file's Args under the settings and the words of its CASES."""
    cases = [{}, TRL] if name == "icepop" else [{}]
    for case in importlib.import_module(f"checks.{name}").CASES:
        cases.append({key: x for key, x in case.items() if isinstance(x, str | bool)})
    distinct = []
    for case, setting in product(cases, settings):
        flags = {key: x for key, x in (case | setting).items() if hasattr(module.Args(), key)}
        args = replace(module.Args(), **flags)
        if args not in distinct:
            distinct.append(args)
    return distinct


def all_of_ours(columns: dict[str, Tensor], settings: list[dict]) -> list[Ours]:
    """Return our losses and their known changes: with the file's own mean, then with the other."""
    A, n = columns["advantages"], columns["mask"].sum(1)
    losses = []
    for own_mean, (name, change, module) in product((True, False), modules()):
        advantages = {change: A} if change else {"": A, WHITENED: (A - A.mean()) / A.std()}
        for args, words in product(args_of(name, module, settings), advantages):
            divided = getattr(args, "length_norm", name in DIVIDED)
            rows = columns | {"logp": columns["logp"].clone().requires_grad_()}
            rows["advantages"] = advantages[words]
            if not own_mean:
                rows["advantages"] = advantages[words] * (n if divided else 1 / n)
                divided = not divided
            total, count = terms(module, args, **rows)
            value, weights = numbers_of(total, rows["logp"])
            if weights.isfinite().all() and weights.any():
                losses.append(Ours(name, args, words, divided, float(count), value, weights))
    return losses


def compare(value: Tensor, weights: Tensor, ours: Ours, mask: Tensor) -> Match:
    """Compare judged numbers with ours, up to the factor under which most tokens agree."""
    both = (ours.weights != 0) & (weights.abs() > 1e-7 * weights.abs().max())
    quotients = (weights / ours.weights)[both]
    factor = 1.0
    if len(quotients):
        alike = (quotients[:, None] - quotients).abs() < 1e-4 * quotients.abs()
        factor = float(quotients[alike.sum(0).argmax()])
    weights = weights / factor
    scale = ours.weights.abs() + 0.1 / mask.sum(1, keepdim=True)
    agree = (weights - ours.weights).abs() < 1e-4 * scale
    exact = bool(agree[mask > 0].all())
    changes = [ours.change] if ours.change else []
    if exact and not agree.all():
        changes.append("mask forgotten")
    right = factor * ours.value
    same_value = bool((value - right).abs() < 1e-4 * (right.abs() + 0.001))
    return Match(ours, factor, weights, int(agree.sum()), exact, same_value, changes)


def nearest(value: Tensor, weights: Tensor, losses: list[Ours], mask: Tensor) -> Match:
    """Return the best match. A loss with a known change counts only if it explains all tokens."""
    matches = [compare(value, weights, ours, mask) for ours in losses]
    exact = [match for match in matches if match.exact]
    if exact:
        return min(exact, key=lambda x: (not x.same_value, len(x.changes), x.factor < 0))
    return max([match for match in matches if not match.changes], key=lambda x: x.agree)


def described(match: Match, columns: dict[str, Tensor]) -> str:
    """Write which of our losses a match is, with its unusual flags and the mean that it takes."""
    title, args = f"{match.ours.name}.py", match.ours.args
    mask = columns["mask"]
    N = len(mask)
    means = {"token mean": 1 / mask.sum(), "sum": 1, "sum / N": 1 / N}
    mean = f"sum / (N {1 / N / abs(match.factor):.4g})"
    if match.ours.divided:
        means = {"response mean": 1 / N}
        mean = f"response mean times {N * abs(match.factor):.4g}"
    means["its own mean"] = 1 / match.ours.count
    fitting = [name for name, x in means.items() if abs(abs(match.factor) / x - 1) < 1e-3]
    if title == "justrl.py" and not fitting:
        title = "dr_grpo.py"
    if title == "cispo.py" and torch.equal(columns["old_logp"], columns["logp"]):  # r is 1
        title = "REINFORCE, Â log π"
    for flag, x in vars(args).items():
        if flag != "beta" and x != getattr(type(args)(), flag):
            title += f" --{flag} {x}"
    return f"{title} ({[*fitting, mean][0]})" if match.exact else title


def table(match: Match, losses: list[Ours], columns: dict[str, Tensor]) -> Iterator[str]:
    """Yield a line for each kind of token of which some have another weight than in our loss."""
    ours, mask = match.ours, columns["mask"]
    alike = [x for x in losses if (x.name, x.change, x.divided) == (ours.name, "", ours.divided)]
    right = next((x.weights for x in alike if vars(x.args) == vars(ours.args)), ours.weights)
    size = mask.sum(1, keepdim=True).expand_as(mask)
    unit = size if ours.divided else torch.ones_like(size)
    weights, right = match.weights * unit + 0.0, right * unit + 0.0  # no -0
    A = columns["advantages"][:, None].expand_as(mask)
    r = (columns["logp"] - columns["old_logp"]).exp()
    low = 1 - getattr(ours.args, "clip_low", 0.2)
    high = 1 + getattr(ours.args, "clip_high", 0.2)
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
            token = [x.flatten()[gap.argmax()].item() for x in (r, A, size, weights, right)]
            example = "r {:.3g}, Â {:.3g}, |y| {:.0f}: its weight is {:.3g}, not {:.3g}"
            yield f"{kind:16} {differ.sum():2} of {at.sum():2}, such as {example.format(*token)}"


def changes_of_kl(kl: Match, objective: Match, beta_known: bool) -> list[str]:
    """Say what is changed in a KL term."""
    changes = [change if "KL" in change else f"KL: {change}" for change in kl.changes]
    beta = kl.factor / objective.factor
    if beta < 0:
        changes.append("KL of the wrong sign")
    if kl.ours.divided != objective.ours.divided:
        changes.append("KL with another mean than the objective")
    elif beta_known and abs(abs(beta) - NUMBERS["beta"]) > 1e-4:
        changes.append(f"β is not the {NUMBERS['beta']} that it was given")
    return changes


def judge(path: Path, source: str, name: str) -> int:
    """Print the verdict on a function, and return the exit code."""
    sys.path.insert(0, str(path.parent.resolve()))  # for what the file imports
    try:
        module = load(source, path)
        function = getattr(module, name)
    except Exception as error:
        raise BadInput(in_words(error, path)) from error
    if name == "policy_loss" and hasattr(module, "Args"):  # an exercise, with our interface
        function = partial(loss_of, module, module.Args())
        meanings = {name: name for name in COLUMNS}
    else:
        meanings = meanings_of(function)
    kinds = {*meanings.values()}
    if "logp" not in kinds and "rewards" in kinds:
        return judge_advantages(function, meanings)
    if "rewards" in kinds:
        raise BadInput("it takes rewards and log-probs: take advantages instead of rewards")
    return judge_loss(function, meanings, path)


def judge_loss(function: Callable, meanings: dict, path: Path) -> int:
    """Print which of our losses has the numbers of this one, and return the exit code."""
    kinds = {*meanings.values()}
    columns = batch_for(kinds)
    A, mask = columns["advantages"], columns["mask"]
    loss = working_call(function, meanings, columns, path)
    value, weights = loss(columns)
    if not (value.isfinite() and weights.isfinite().all()):
        raise BadInput("the loss or its gradient is NaN or infinite: look for 0/0 and log of 0")
    losses = all_of_ours(columns, settings_for(kinds))
    objective, kl = nearest(value, weights, losses, mask), None
    if not objective.exact:  # so it may have a KL term
        without_A = columns | {"advantages": 0 * A}
        kl_value, kl_weights = (x.nan_to_num(0.0) for x in loss(without_A))
        weights = weights - kl_weights
        if weights.abs().max() < 1e-9:
            raise BadInput(NO_GRADIENT)
        objective = nearest(value - kl_value, weights, losses, mask)
        if not objective.exact and weights[A == 0].abs().max() > 1e-9:
            raise BadInput(COUPLED)
        if kl_weights.abs().max() > 1e-9:
            kl_terms = all_of_ours(without_A, [{"beta": 1.0}])
            kl = nearest(kl_value, kl_weights, kl_terms, mask)
    what, changes = described(objective, columns), objective.changes
    if kl:
        term = "k3 times r" if getattr(kl.ours.args, "kl_ratio", False) else "k3"
        what += f" with {term}, β {abs(kl.factor / objective.factor):.4g}"
        changes = changes + changes_of_kl(kl, objective, "beta" in kinds)
    elif "ref_logp" in kinds and not (changes or objective.same_value):
        changes = ["KL without gradient"]
    if not (objective.exact and (kl is None or kl.exact)):
        lines = [f"NONE of our losses under the flags tried. The nearest is {what}."]
    elif changes:
        lines = [f"CHANGED: the loss of {what}, except for this: {'; '.join(changes)}."]
    elif objective.factor < 0:
        lines = [f"NEGATED: minus the loss of {what}. An optimiser minimises: return minus this."]
    elif objective.same_value and (kl is None or kl.same_value):
        lines = [f"RIGHT: the loss of {what}, in value and gradient."]
    else:
        lines = [f"RIGHT: the gradient is that of {what}. The value is another one."]
    lines += table(objective, losses, columns)
    if kl and not kl.exact:
        lines += ["The weights of the KL term:", *table(kl, kl_terms, columns)]
    if "mask" not in kinds:
        lines.append("It takes no mask: judged on full rows, for which all means agree.")
    if torch.equal(columns["old_logp"], columns["logp"]):
        lines.append("It takes no log-probs of π_old: judged at r = 1, where many losses agree.")
    say(*lines, f"Arguments: {', '.join(f'{name} = {what}' for name, what in meanings.items())}.")
    return int(not lines[0].startswith("RIGHT"))


def rules() -> Iterator[tuple[str, Tensor]]:
    """Yield the ways to make advantages `[P, G]` of REWARDS, each in words."""
    for of, where in {"group": 1, "batch": (0, 1), "column": 0}.items():
        mean = REWARDS.mean(where, keepdim=True)
        n = REWARDS.numel() // mean.numel()
        yield f"R - the {of}'s mean", REWARDS - mean
        yield f"R - the mean of the {of}'s others", (REWARDS - mean) * n / (n - 1)
        for correction, kind in enumerate(["population", "sample"]):
            std = REWARDS.std(where, keepdim=True, correction=correction)
            for added in (0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3):
                words = f"(R - the {of}'s mean) / (the {of}'s {kind} std + {added:g})"
                yield words, (REWARDS - mean) / (std + added)


def judge_advantages(function: Callable, meanings: dict) -> int:
    """Print by which rule a function makes advantages of rewards, for each form that it takes."""

    def advantages(rewards: Tensor) -> Tensor:
        values = NUMBERS | {"rewards": rewards, "mask": torch.ones_like(rewards)}
        result = function(**{name: values[what] for name, what in meanings.items()})
        result = result[0] if isinstance(result, tuple) else result
        return torch.as_tensor(result).flatten().double()

    lines = []
    forms = {"[P, G]": [REWARDS], "[N]": [REWARDS.flatten()], "of one group [G]": [*REWARDS]}
    for form, parts in forms.items():
        try:
            numbers = torch.cat([advantages(part) for part in parts]).view_as(REWARDS)
            of_equal = advantages(torch.ones_like(parts[0]))
        except Exception:  # it does not take this form
            continue
        fitting = [words for words, x in rules() if torch.allclose(x, numbers, 2e-5, 1e-6)]
        lines.append(f"Rewards {form}: {(fitting or ['no rule that is known here'])[0]}.")
        if not of_equal.isfinite().all():
            lines.append("Equal rewards give NaN or infinity: add 1e-6 to the std.")
    if not lines:
        raise BadInput("it takes rewards in no form that was tried: [P, G], [N] and [G]")
    say(*lines)
    return int("group" not in "".join(lines))
