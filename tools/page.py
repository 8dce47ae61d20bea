"""The responses of a run, token by token, with each token's weight in the update: one HTML page
that works offline.

    python -m tools.page RUN [OTHER] [--every N] [--variants] [--out FILE]

RUN and OTHER are run folders with a samples.jsonl (`--sample_every`); the page shows two runs side
by side. It shows the groups of each stored step: prompt, responses, reward, Â, and every token,
coloured by the factor on its ∇ log π in the update that trained it. The program also passes the
same tokens through the `policy_loss` of each of the nine files (`--variants`: of the variants as
well). So the page shows the weight that another file would have given them. It finds the variable
and line that clipped or masked a token by running the file's own function.
No formula of any file is repeated here.

The page's form and its program are tools/page.html and tools/look.*. Opened as page.html#check, the
page tests itself.
"""

import argparse
import ast
import base64
import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import common  # noqa: F401  (before torch)
from common.cli import BadInput, blame, in_one_line
import numpy
import torch
from common.curves import ROUNDING
from common.run import read_lines
from torch import Tensor

from tools.compare import NUMBER, config_of, fit, run_of
from tools.look import coloured, filled, module_of, short, write
from checks import terms
from checks.files import ROOT, algorithms

TEMPLATE = Path(__file__).with_suffix(".html")
LARGEST = 1_450_000  # bytes of a page; a run with more samples loses steps in between
# The columns that the page shows. Of ref_logp and teacher_logp a run has one, or neither.
COLUMNS = ("logp", "old_logp", "rollout_logp", "ref_logp", "teacher_logp", "entropy")
# Another file runs with its own defaults, except for these flags, which describe the run's batch
OF_THE_BATCH = {"max_new_tokens", "temperature", "group_size", "prompts_per_step", "minibatches"}
CURVES = "reward greedy entropy grad_norm response_len sampler_kl ess_ratio".split()
POINTS = 400  # of a curve
# Columns that only some losses read: their meaning in a run and on this page
HANDED = {
    "kept": "chosen in the whole mini-batch, here in this group alone",
    "chosen": "chosen in the whole mini-batch, here in this group alone",
    "spurious": "chosen in the whole mini-batch, here in this group alone",
    "masked": "chosen in the whole mini-batch, here in this group alone",
    "rare": "chosen in the whole mini-batch, here in this group alone",
    "branch": "which responses are branches; here no response is one",
    "proxy_logp": "π_old without its noise, here π_old itself",
    "working": "which tokens are working; here all tokens count as answer",
    "working_advantages": "of the working; here no token is working",
}
# The values of a row of samples.jsonl, and their types; JSON has null for NaN and infinity
VALUE = NUMBER | None
EXAMPLE = {"prompt": str, "answer": str, "response": str, "reward": VALUE}
GROUP = {name: int for name in ("step", "minibatch", "minibatches", "group", "rows", "tokens")}
GROUP |= {"prompt": str, "answer": str, "responses": list}
RESPONSE = {"text": str, "given": str, "finished": bool, "reward": VALUE, "ids": [int]}
RESPONSE |= {"tokens": [str], "weight": [VALUE]}
RESPONSE |= {name: [VALUE] for name in ("logp", "old_logp", "rollout_logp", "entropy")}


# One loss on one stored group


def group_of(row: dict) -> dict[str, Tensor]:
    """A row's columns `[n, T]` in float64, each by its name, and `mask` and `advantages`, which is
    `[n]` if a response has one for all its tokens."""
    responses = row["responses"]
    longest = max(len(one["ids"]) for one in responses)

    def tensor(values: list) -> Tensor:
        numbers = [math.nan if value is None else value for value in values]
        return torch.tensor(numbers, dtype=torch.float64)

    def padded(rows: list[list]) -> Tensor:
        return torch.stack([tensor(values + [0.0] * (longest - len(values))) for values in rows])

    names = [name for name in responses[0] if name in ("entropy", "weight") or "logp" in name]
    batch = {name: padded([one[name] for one in responses]) for name in names}
    batch["mask"] = padded([[1.0] * len(one["ids"]) for one in responses])
    batch["finished"] = torch.tensor([one["finished"] for one in responses])
    given = [one["advantage"] for one in responses]
    batch["advantages"] = padded(given) if isinstance(given[0], list) else tensor(given)
    return batch


class Pushed(NamedTuple):
    """The weights that a loss gives a group's tokens, `[n, T]`, before the division by `count`."""

    weight: Tensor  # on ∇ log π
    count: float  # the count that the loss returns for these rows
    live: Tensor  # True where there is an advantage, and the loss uses it
    stopped: Tensor  # True where it is live, but a clip or a mask removed the advantage
    kept: Tensor  # the advantage's part of the weight over its value at r = 1; NaN if not live
    values: dict[str, Tensor]  # the function's own variables


def pushed(module: ModuleType, args: object, given: dict[str, Tensor]) -> Pushed:
    """A file's own `policy_loss` on a group by autograd: as it is, without Â and at r = 1.

    Without advantages only a penalty such as a KL term has a gradient. A token whose weight is the
    same with and without its advantage was clipped, masked or silenced. But if no token's weight
    depends on an advantage, as in distillation without a reward, no token counts as stopped.
    """
    found = {}

    def weight(**other: Tensor) -> tuple[Tensor, float]:
        batch = given | other
        logp = batch["logp"].clone().requires_grad_()  # [n, T]
        columns = batch | {"logp": logp}
        with locals_of(module.policy_loss, found):
            total, count, _ = terms(module, args, **columns)
        (gradient,) = torch.autograd.grad(total, logp)
        return -gradient, float(count)

    A, old, mask = given["advantages"], given["old_logp"], given["mask"]
    none = torch.zeros_like(A)
    rest = weight(advantages=none)[0]  # [n, T]: a KL term's
    first = weight(logp=old)[0] - weight(logp=old, advantages=none)[0]  # [n, T]: at r = 1
    now, count = weight()  # last: its variables stay in `found`
    live = (mask > 0) & ((A if A.dim() == 2 else A[:, None]) != 0)  # [n, T]
    if not ((now != rest) | (first != 0)).any():
        live = torch.zeros_like(live)
    stopped = (now == rest) & live  # [n, T]
    kept = torch.where(first == 0, 0.0, (now - rest) / torch.where(first == 0, 1.0, first))
    kept = torch.where(live, kept, math.nan)  # [n, T]
    return Pushed(now, count, live, stopped, kept, variables(found, given))


@contextlib.contextmanager
def locals_of(function: Callable, found: dict) -> Iterator[None]:
    """The function's variables, as they are at the end of a call of it, go into `found`."""

    def note(frame: object, event: str, _: object) -> None:
        if event == "return" and frame.f_code is function.__code__:
            found.clear()
            found.update(frame.f_locals)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def variables(found: dict, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of one number for each token, or for each response: `[n, T]` or `[n, 1]`."""
    n, T = batch["logp"].shape
    tensors = {k: v for k, v in found.items() if isinstance(v, Tensor) and k not in batch}
    rows = {k: v[:, None] if v.shape == (n,) else v for k, v in tensors.items()}
    return {k: v for k, v in rows.items() if v.shape in ((n, T), (n, 1))}


def flags_of(module: ModuleType, config: dict, own: bool) -> object:
    """The run's flags for its own file; for another file its defaults, except for the flags that
    describe the batch."""
    named = {field.name: field.default for field in fields(module.Args)}
    taken = named.keys() & config.keys() & (named.keys() if own else OF_THE_BATCH)
    values = {
        name: tuple(config[name]) if isinstance(named[name], tuple) else config[name]
        for name in taken
    }
    return module.Args(**values)


# One file


class File:
    """An algorithm file: its loss, its lines, and its weights on the groups of a page."""

    def __init__(self, path: Path):
        self.path, self.module = path, module_of(path)
        source = path.read_text("utf-8")
        self.lines = coloured(source)
        named = {getattr(node, "name", ""): node for node in ast.parse(source).body}
        self.assigned: dict[str, list[int]] = {}  # variable -> the lines that give it a value
        for node in ast.walk(named["policy_loss"]):
            if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (one for target in targets for one in ast.walk(target)):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    self.assigned.setdefault(name.id, []).append(node.lineno)
        # The batch's columns that the loss reads, and those of them that no row stores
        self.reads = set()
        for node in ast.walk(named["policy_loss"]):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "batch":
                self.reads.add(node.attr)
        self.beside = sorted(self.reads & HANDED.keys())
        # Where a weight comes from when nothing stopped the token: all lines of one variable
        kept = [name for name in self.assigned if name in ("objective", "imbalance")]
        self.objective = (kept or ["per_response"])[-1]
        self.returns = [
            node.lineno for node in named["policy_loss"].body if isinstance(node, ast.Return)
        ]
        self.reasons: list[tuple[str, bool]] = []

    def push(self, batch: dict, args: object, own: bool) -> tuple[Pushed | None, list[str]]:
        """Its weights on a group, or None; and notes on the differences from a run of its own."""
        given = {name: column for name, column in batch.items() if name != "weight"}
        A = given["advantages"]  # [n], or [n, T]
        missing = [name for name in self.beside if name not in given]
        said = [f"`{name}` is not stored: {HANDED[name]}" for name in missing]
        if getattr(args, "beta", 0) and not own:
            if "teacher_logp" in self.reads and "teacher_logp" not in given:
                return None, [*said, "needs a teacher, whose log-probs this run does not have"]
            if "ref_logp" in self.reads and "ref_logp" not in given:
                args = replace(args, beta=0.0)
                said.append("no log π_ref is stored: without its KL term")
        by_token = "token_advantages" in self.reads
        if A.dim() == 1 and by_token:
            given["advantages"] = A[:, None] * batch["mask"]  # [n, T]
            said.append("each token has its response's Â")
        if A.dim() == 2 and not (by_token or own):
            lengths = batch["mask"].sum(1).clamp(min=1)  # [n]
            given["advantages"] = (A * batch["mask"]).sum(1) / lengths  # [n]
            said.append("Â is the mean over a response's tokens")
        try:
            return pushed(self.module, args, given), said
        except Exception as error:  # a loss that needs values which no other file's run stores
            return None, [*said, f"cannot: {in_one_line(error)}"]

    def explain(self, seen: list[Pushed]) -> None:
        """Find the variables that are always true, or always false, where a token is stopped, in
        all groups of the page: `reasons`, those that stop most tokens first."""
        stops: dict[tuple[str, bool], int] = {}
        for found in seen:
            for name, value in found.values.items():
                binary = name != "A" and ((value == 0) | (value == 1)).all()
                if name not in self.assigned or not binary:
                    continue
                for truth in (True, False):
                    here = ((value != 0) == truth) & found.live
                    wrong = (here & ~found.stopped).any()
                    known = stops.get((name, truth), 0)
                    many = math.nan if wrong or math.isnan(known) else known + int(here.sum())
                    stops[name, truth] = many
        held = [one for one, many in stops.items() if many > 0]
        self.reasons = sorted(held, key=lambda one: (stops[one], self.assigned[one[0]]))[::-1]

    def why(self, found: Pushed) -> Tensor:
        """For each token `[n, T]`: 0 if nothing stopped it, 1 + the number of the reason, or -1 if
        no variable explains why it was stopped."""
        answer = -found.stopped.long()
        for i, (name, truth) in list(enumerate(self.reasons))[::-1]:
            if name in found.values:
                here = ((found.values[name] != 0) == truth) & found.stopped
                answer = torch.where(here, 1 + i, answer)
        return answer

    def told(self, folder: Path) -> dict:
        """Its name, its link from `folder`, and the lines that the page shows: of the objective,
        and of each reason."""
        of = [self.assigned.get(self.objective, [])]
        if self.objective != "objective":  # the advantage enters in the line that returns
            of = [of[0] + self.returns]
        of += [self.assigned[name][-1:] for name, _ in self.reasons]
        return {
            "name": self.path.stem,
            "path": self.path.relative_to(ROOT).as_posix(),
            "link": Path(os.path.relpath(self.path, folder)).as_posix(),
            "objective": of[0],
            "reasons": [[name, truth, *line] for (name, truth), line in zip(self.reasons, of[1:])],
            "code": {line: self.lines[line - 1] for lines in of for line in lines},
        }


# The data of a page


class Table:
    """Columns of numbers as text, each stored once."""

    def __init__(self):
        self.known: dict[str, int] = {"": 0}

    def texts(self) -> list[str]:
        return list(self.known)

    def add(self, text: str) -> int:
        return self.known.setdefault(text, len(self.known))

    def numbers(self, values: Tensor) -> int:
        """Base64 of 24 bits for each number (four letters, five digits): a sign, seven bits of
        exponent (2^-62 to 2^63; a smaller number becomes the smallest) and 16 bits of fraction."""
        x = values.detach().double().numpy().reshape(-1)
        size = numpy.where(numpy.isfinite(x), numpy.abs(x), 1.0)
        part, exponent = numpy.frexp(size)  # part from a half to below 1
        behind = numpy.rint((2 * part - 1) * 2**16).astype(numpy.int64)  # 2^16: it carries
        bits = (exponent.astype(numpy.int64) + 62) * 2**16 + behind
        bits = numpy.where(x == 0, 0, bits.clip(2**16, 127 * 2**16 - 1))
        bits = numpy.where(numpy.isinf(x), 127 * 2**16, bits)
        bits = numpy.where(numpy.isnan(x), 127 * 2**16 + 1, bits) + numpy.signbit(x) * 2**23
        three = bits.astype(">u4").view(numpy.uint8).reshape(-1, 4)[:, 1:]
        return self.add(base64.b64encode(three.tobytes()).decode())


class Told(NamedTuple):
    """A run: what its page says about it, its groups, and the weights of every file on each."""

    about: dict
    own: File | None
    size: int  # of a group
    rows: list[dict]
    batches: list[dict]
    did: list[dict[str, tuple[Pushed | None, list[str]]]]
    units: dict[str, str]  # file -> the number in a row that divides its weights, or ""


def told(folder: Path, files: dict[str, File], every: int) -> Told:
    """Read a run, and compute the losses of every file on the groups of its first step, its last
    step and each step divisible by `every`."""
    config, metrics = run_of(folder)
    rows = samples(folder)
    stored = sorted({row["step"] for row in rows if "responses" in row})
    shown = {step for step in stored if step % every == 0} | {stored[0], stored[-1]}
    own = files.get(config["algorithm"])
    with blame(f"{folder}/config.json: are no flags of {config['algorithm']}"):
        args = {name: flags_of(one.module, config, one is own) for name, one in files.items()}
    names = [name for name in dict.fromkeys([*CURVES, *config["acted"]])]
    names = [name for name in names if any(row.get(name) is not None for row in metrics)]
    if all((row.get("sampler_kl") or 0) < ROUNDING for row in metrics):
        names = [name for name in names if name != "sampler_kl"]  # it would show rounding only
    thin = max(1, math.ceil(len(metrics) / POINTS))
    curves = {
        name: [
            [row["step"], short(row[name], 4)]
            for i, row in enumerate(metrics)
            if row.get(name) is not None and (i % thin == 0 or "greedy" in row)
        ]
        for name in names
    }
    about = {
        "name": folder.resolve().name,
        "algorithm": config["algorithm"],
        "flags": changed_flags(own, config),
        "curves": curves,
        "examples": [[row["step"], row["example"]] for row in rows if "example" in row],
        "stored": len(stored),
    }
    groups = [row for row in rows if "responses" in row and row["step"] in shown]
    batches = [group_of(row) for row in groups]
    did = [
        {name: file.push(batch, args[name], file is own) for name, file in files.items()}
        for batch in batches
    ]
    units = {name: unit([one[name][0] for one in did], batches) for name in files}
    for name, file in files.items():
        if file is own and not units[name]:
            units[name] = "count"  # which `drawn_group` estimates
    return Told(about, own, config.get("group_size", 0), groups, batches, did, units)


def unit(did: list[Pushed | None], batches: list[dict]) -> str:
    """The unit that a loss counts: the "rows" or the "tokens" of every group. "" if it counts
    something else, or if every response has one token."""
    pairs = [(one.count, batch["mask"]) for one, batch in zip(did, batches) if one]
    rows = all(count == len(mask) for count, mask in pairs)
    tokens = all(count == mask.sum() for count, mask in pairs)
    if rows == tokens:
        return ""
    return "rows" if rows else "tokens"


def samples(folder: Path) -> list[dict]:
    """The rows of samples.jsonl, with values of their types and columns of equal lengths."""
    path = folder / "samples.jsonl"
    if not path.is_file():
        raise BadInput(f"{folder}: no samples.jsonl (of an older run, or one of --sample_every 0)")
    rows = read_lines(path)
    for number, row in enumerate(rows, 1):
        if "responses" in row and not {"rows", "tokens"} <= row.keys():
            raise BadInput(f"{path}:{number}: has no rows and tokens: an older run, run it again")
        with blame(f"{path}:{number}: is no row of a run"):
            if "example" in row:
                fit(row["example"], EXAMPLE, "example")
            else:
                fit(row, GROUP)
                fit_responses(row["responses"])
    if not any("responses" in row for row in rows):
        raise BadInput(f"{path}: no group in it")
    return rows


def fit_responses(responses: list[dict]) -> None:
    """ValueError if a response has a value of a wrong type, or not the columns of the others."""
    if not responses:
        raise ValueError("no responses")
    for number, one in enumerate(responses, 1):
        name = f"response {number}"
        fit(one, RESPONSE, name)
        more = {column: [VALUE] for column in one if column.endswith("_logp")}
        by_token = isinstance(one.get("advantage"), list)
        fit(one, more | {"advantage": [VALUE] if by_token else VALUE}, name)
        if "left_out" in one:
            fit(one, {"left_out": [int]}, name)
        columns = {key for key, value in one.items() if isinstance(value, list)} - {"left_out"}
        first = {key for key, value in responses[0].items() if isinstance(value, list)}
        if columns != first - {"left_out"}:
            raise ValueError(f"{name} has other columns than response 1")
        if len({len(one[column]) for column in columns}) != 1:
            raise ValueError(f"{name} has columns of unequal lengths")


def changed_flags(file: File | None, config: dict) -> str:
    """The run's flags that are not its file's defaults."""
    if not file:
        return ""
    defaults = {field.name: field.default for field in fields(file.module.Args)}
    given = {k: v for k, v in config.items() if k in defaults and k != "run_dir"}
    changed = {k: v for k, v in given.items() if not same(v, defaults[k])}
    switches = {True: "--{}", False: "--no_{}"}
    return " ".join(
        switches[value].format(name) if isinstance(value, bool) else f"--{name} {value}"
        for name, value in changed.items()
        if value != ""
    )


def same(value: object, default: object) -> bool:
    """Equal in JSON."""
    listed = list(default) if isinstance(default, tuple) else default
    return value == listed or default in ("auto", "")


def drawn(run: Told, files: dict[str, File], table: Table, thin: int, others: bool) -> dict:
    """A run's data: one in `thin` of its steps and the last one. Without `others` only the weights
    of its own file."""
    steps = sorted({row["step"] for row in run.rows})
    chosen, rows = {*steps[::thin], *steps[-1:]}, []
    for row, batch, did in zip(run.rows, run.batches, run.did):
        if row["step"] in chosen:
            used = {n: one for n, one in did.items() if others or files[n] is run.own}
            rows.append(drawn_group(run, row, batch, used, files, table))
    return run.about | {"rows": rows}


def drawn_group(
    run: Told, row: dict, batch: dict, did: dict, files: dict[str, File], table: Table
) -> dict:
    """One group: its texts, the places of its columns in the table, and its weights by file."""
    there = batch["mask"] > 0  # [n, T]
    given = {name: batch[name] for name in (*COLUMNS, "weight") if name in batch}
    if batch["advantages"].dim() == 2:
        given["advantage"] = batch["advantages"]
    one = {key: row[key] for key in ("step", "minibatch", "minibatches", "group")}
    one |= {"prompt": row["prompt"], "answer": row["answer"]}
    mine = run.own and did[run.own.path.stem][0]
    if mine:
        estimate = divisor(mine.weight, batch["weight"])
        row = row | {"count": row.get(run.units[run.own.path.stem], estimate)}
        one["count"] = short(row["count"], 7)
    one["columns"] = {name: table.numbers(value[there]) for name, value in given.items()}
    one["responses"] = [response(answer) for answer in row["responses"]]
    if mine:
        one["kept"] = table.numbers(mine.kept[there])
        one["own"] = [
            [name, run.own.assigned[name], table.numbers(value.expand(there.shape)[there])]
            for name, value in mine.values.items()
            if name in run.own.assigned
        ]
        if row["count"]:
            weight = mine.weight / row["count"]  # [n, T]
            one["apart"] = far(weight[there], given["weight"][there])
    one["under"] = {}
    for name, (found, said) in did.items():
        if files[name] is not run.own:
            said = [*said, *own_advantages(files[name], row, batch, run.size)]
        one["under"][name] = under(files[name], found, said, run.units[name], row, table, there)
    return one


def divisor(weight: Tensor, stored: Tensor) -> float:
    """What a run has divided its loss's weights by, from them and from what it stored; 0 if that is
    nothing."""
    products = (weight * stored).sum().item()
    return weight.square().sum().item() / products if products > 0 else 0.0


def under(
    file: File,
    found: Pushed | None,
    said: list[str],
    unit: str,
    row: dict,
    table: Table,
    there: Tensor,
) -> dict:
    """One file's weights on a group, divided by the count of this mini-batch that the file would
    use."""
    if found is None:
        return {"said": [table.add(text) for text in said]}
    if unit:
        divisor = row[unit]
    else:
        divisor = found.count * row["tokens"] / max(1, there.sum().item())
        said = [*said, "what it is divided by is estimated from this group's share of the tokens"]
    if any("left_out" in one for one in row["responses"]):
        said = [*said, "of long responses only what is stored"]
    whys = file.why(found)[there].tolist()
    letters = "".join("." if w == 0 else "!" if w < 0 else chr(96 + w) for w in whys)
    weight = found.weight / divisor if divisor else found.weight * 0
    return {
        "weight": table.numbers(weight[there]),
        "why": table.add(letters if letters.strip(".") else ""),
        "count": short(divisor, 7),
        "said": [table.add(text) for text in said],
    }


def own_advantages(file: File, row: dict, batch: dict, size: int) -> list[str]:
    """A note with the file's own `advantages` of the group's rewards, if they differ."""
    rewards = torch.tensor([[one["reward"] or 0.0 for one in row["responses"]]])
    if rewards.numel() != size:  # not the whole group
        return []
    try:
        ours = file.module.advantages(rewards.double())[0]  # [n]
    except Exception:  # of another signature, or there is none
        return []
    A = batch["advantages"]
    if A.dim() == 2 or ours.shape != A.shape or torch.allclose(ours, A, rtol=1e-4, atol=1e-5):
        return []
    numbers = ", ".join(f"{value:.3g}" for value in ours.tolist()[:8])
    return [f"Â as stored; of these rewards {file.path.stem}'s own `advantages` make {numbers}"]


def far(found: Tensor, stored: Tensor) -> float | None:
    """The largest difference between the two, relative to their size."""
    largest = stored.abs().max().item() if len(stored) else 0.0
    apart = (found - stored).abs().max().item() / largest if largest else found.abs().sum().item()
    return short(apart, 2) if math.isfinite(apart) else None


def response(one: dict) -> dict:
    """A response without its columns of numbers."""
    names = ("text", "given", "reward", "finished", "tokens", "left_out")
    kept = {name: one[name] for name in names if name in one}
    if not isinstance(one["advantage"], list):
        kept["advantage"] = one["advantage"]
    return kept


def page_data(runs: list[Path], folder: Path, every: int = 1, variants: bool = False) -> dict:
    """All that the page shows, within LARGEST; links lead from `folder`."""
    own = {config_of(run).get("algorithm") for run in runs}
    shown = [path for path in algorithms() if variants or path.parent == ROOT or path.stem in own]
    files = {path.stem: File(path) for path in shown}
    read = [told(run, files, every) for run in runs]
    for name, file in files.items():
        seen = [did[name][0] for run in read for did in run.did]
        file.explain([found for found in seen if found])
    for others in (True, False):
        for thin in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 10**6):
            table = Table()
            data = {
                "runs": [drawn(run, files, table, thin, others) for run in read],
                "files": [file.told(folder) for file in files.values()],
                "table": table.texts(),
            }
            if len(filled(TEMPLATE, data).encode()) <= LARGEST:
                return data
    raise BadInput(f"no step of {runs[0]} fits into a page of {LARGEST} bytes")


def main(runs: list[Path], out: Path, every: int = 1, variants: bool = False) -> None:
    """Write the page and print where it is."""
    if len(runs) > 2:
        raise BadInput(f"{len(runs)} runs: the page shows two")
    if every < 1:
        raise BadInput(f"--every {every}: must be 1 or more")
    folder = out.parent.resolve()
    write(TEMPLATE, out, lambda: filled(TEMPLATE, page_data(runs, folder, every, variants)))


if __name__ == "__main__":
    # No usage: an error is one line
    parser = argparse.ArgumentParser(
        prog="tools.page",
        usage=argparse.SUPPRESS,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder, or two")
    parser.add_argument("--out", type=Path, help="the page to write (default: RUN/page.html)")
    steps = "show the first step, the last step and those divisible by N (default: all stored)"
    parser.add_argument("--every", type=int, default=1, metavar="N", help=steps)
    parser.add_argument("--variants", action="store_true", help="also compare with the variants")
    given = parser.parse_args()
    try:
        out = given.out or given.runs[0] / "page.html"
        main(given.runs, out, given.every, given.variants)
    except (BadInput, OSError) as error:
        parser.error(in_one_line(error))
