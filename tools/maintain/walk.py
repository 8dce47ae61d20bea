"""Fill docs/walk.md with the code of grpo.py and the numbers of one real step.

    python -m tools.maintain.walk

It runs the first step of a default run and records the arguments and results of some functions. On
the page, a block of Python goes from its first line, as in grpo.py, to the line with which the next
block begins. `1.23<!--name-->` is a number, and `<!--block: name-->` comes before a table.
"""

import contextlib
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import grpo
import torch
from common.batch import Rollout
from common.launch import launch
from common.records.files import write
from common.run import Run
from torch import Tensor

from tools import arguments
from checks.files import ROOT

PAGE = ROOT / "docs" / "walk.md"
KEPT = "load_task advantages balance_tokens policy_loss micro_batches".split()
KEPT += ["clip_gradients", "rollout_metrics"]
SEEN = 0, 15  # problems on the page: one of the first mini-batch, one of the last
CODE = re.compile(r"(?<=```python\n).+?(?=\n```)", re.DOTALL)


@contextlib.contextmanager
def watched() -> Iterator[tuple[list[str], dict[str, list[tuple]]]]:
    """Yield a command line for grpo.py, and (arguments, keywords, result) of the calls it makes."""
    calls: dict[str, list[tuple]] = {name: [] for name in [*KEPT, "log"]}

    def keeping(name: str, real: object) -> object:
        def call(*args: object, **named: object) -> object:
            result = real(*args, **named)
            calls[name].append((args, named, result))
            return result

        return call

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        for name in KEPT:
            stack.enter_context(mock.patch.object(grpo, name, keeping(name, getattr(grpo, name))))
        stack.enter_context(mock.patch.object(Run, "log", keeping("log", Run.log)))
        stack.enter_context(mock.patch.object(Run, "finish", lambda run: None))  # draws no curves
        # Fewer problems do not change the step, because evaluation has a generator of its own.
        words = f"--steps 1 --eval_problems 8 --eval_samples 1 --sample_every 0 --run_dir {folder}"
        yield words.split(), calls


def table(head: str, rows: list[list[object]]) -> str:
    """Write aligned columns under the names in `head`, the last one aligned to the left."""
    rows = [head.split(), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows]
    return "\n".join(lines)


def fixed(number: float, digits: int = 2) -> str:
    """Round a number, without a minus before 0."""
    text = f"{float(torch.as_tensor(number).detach()):.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


@dataclass
class Micro:
    """One call of the loss: these rows of the mini-batch."""

    rows: list[int]
    logp: Tensor  # [n, T]
    batch: Rollout
    loss: Tensor
    count: Tensor

    @property
    def ratio(self) -> Tensor:
        return (self.logp - self.batch.old_logp).exp()  # [n, T]


class Step:
    """The step as its calls tell it. `words` are the tokens of each response as text, `updates` the
    micro-batches of each optimiser step, and `norms` these steps' gradient norms."""

    def __init__(self, calls: dict[str, list[tuple]]):
        self.tokenizer, self.task = calls["load_task"][0][0][1], calls["load_task"][0][2]
        (self.rewards,), _, self.advantages = calls["advantages"][0]  # [P, G] both
        self.rollout = calls["rollout_metrics"][0][0][0]
        self.parts = [part for _, _, part in calls["balance_tokens"]]
        self.metrics = calls["log"][-1][0][2]
        self.norms = [norm for _, _, norm in calls["clip_gradients"]]
        self.words = []
        for row in self.rollout.response_ids():
            self.words.append([self.tokenizer.decode(token) for token in row])
        self.updates, losses = [], iter(calls["policy_loss"])
        for _, _, micros in calls["micro_batches"][-len(self.parts) :]:
            update = []
            for rows in micros:
                (_, logp, batch), _, (loss, count) = next(losses)
                update.append(Micro(rows.tolist(), logp, batch, loss, count))
            self.updates.append(update)

    def words_of(self, problem: int) -> list[list[str]]:
        """Return the words of each response to a problem."""
        G = self.rewards.shape[1]
        return self.words[problem * G : problem * G + G]


def numbers_of(step: Step) -> dict[str, object]:
    """Return sizes, metrics, the problems, and the rewards of the first one."""
    rollout, rewards, metrics = step.rollout, step.rewards, step.metrics
    P, G = rewards.shape
    N, T = rollout.tokens.shape
    numbers = {"P": P, "G": G, "N": N, "T": T, "S": rollout.sequences.shape[1]}
    numbers |= {"n": len(step.parts[0]), "V": len(step.tokenizer), "real": int(rollout.mask.sum())}
    numbers["padding"] = f"{100 - 100 * rollout.mask.mean():.0f}%"
    numbers["idle"] = int((step.advantages == 0).all(dim=1).sum())
    for name in ("reward", "entropy", "entropy_good", "entropy_bad", "zero_groups", "len_good"):
        numbers[name] = fixed(metrics[name])
    numbers |= {"distinct": fixed(metrics["distinct"], 1), "len_bad": fixed(metrics["len_bad"])}
    numbers["loss"] = fixed(metrics["loss"], 4)
    numbers["lr"] = f"{metrics['lr']:.0e}".replace("e-0", "e-")
    numbers["ref_kl"] = fixed(metrics["ref_kl"], 5)
    numbers["gap"] = "below 1e-5" if metrics["sampler_gap"] < 1e-5 else "above 1e-5"
    numbers["mean_norm"] = fixed(metrics["grad_norm"])
    first, last = (step.task.train(i) for i in SEEN)
    numbers["prompt"] = f"`{step.tokenizer.decode(first.prompt_ids)}`"
    numbers["answer"] = first.answer
    numbers["last prompt"] = f"`{step.tokenizer.decode(last.prompt_ids)}`"
    numbers["mean 0"] = fixed(rewards[0].mean())
    numbers["std 0"] = fixed(rewards[0].std(), 4)
    return numbers


def group_of(step: Step) -> dict[str, object]:
    """Return the table of the first problem's responses."""
    lines = []
    for r, a, words in zip(step.rewards[0].tolist(), step.advantages[0], step.words_of(SEEN[0])):
        lines.append([r, fixed(a, 4), "".join(words)])
    return {"group": table("reward Â response", lines)}


def row_of(step: Step) -> dict[str, object]:
    """Return the table of the first problem's shortest wrong response, as the tensors have it."""
    rollout, G = step.rollout, step.rewards.shape[1]
    row = min(range(G), key=lambda i: (step.rewards[0, i].item(), len(step.words[i])))
    before, size = int(rollout.prompt_len[row]), len(step.words[row])
    lines = []
    for column, token in enumerate(rollout.sequences[row].tolist()[: before + size + 2]):
        t = column - before
        own = 0 <= t < rollout.tokens.shape[1] and rollout.mask[row, t] > 0
        shown = step.tokenizer.decode(token) if t < size else "(padding)"
        columns = rollout.rollout_logp, step.parts[0].old_logp
        logs = [fixed(x[row, t], 3) if own else "" for x in columns]
        mask = f"{rollout.mask[row, t]:.0f}" if t >= 0 else ""
        lines.append([column, t if t >= 0 else "", token, mask, *logs, shown])
    return {"short row": row, "row": table("column t id mask log_μ log_π_old token", lines)}


def steps_of(step: Step) -> dict[str, object]:
    """Return the table of the optimiser steps, each with the sums of its micro-batches."""
    lines = []
    for k, micros in enumerate(step.updates):
        ratios = torch.cat([micro.ratio[micro.batch.mask > 0] for micro in micros])
        sums = " + ".join(fixed(micro.loss, 3) for micro in micros).replace("+ -", "- ")
        total = sum(micro.loss.item() for micro in micros)
        count = sum(int(micro.count) for micro in micros)
        spread = [fixed(ratios.min(), 3), fixed(ratios.max(), 3)]
        rows = "+".join(str(len(micro.rows)) for micro in micros)
        mean = fixed(total / count, 4)
        lines.append([k + 1, rows, *spread, fixed(step.norms[k]), mean, f"({sums})/{count}"])
    return {"steps": table("step rows r_min r_max norm loss sums", lines)}


def ratios_of(step: Step) -> dict[str, object]:
    """Return the table of a wrong response of the last mini-batch, whose ratios are no longer 1."""
    rewards, responses = step.rewards[SEEN[1]], step.words_of(SEEN[1])
    G = len(responses)
    index = max(range(G), key=lambda i: (-rewards[i].item(), len(responses[i])))
    place = SEEN[1] * G + index - (len(step.words) - len(step.parts[-1]))  # in the mini-batch
    micro = next(micro for micro in step.updates[-1] if place in micro.rows)
    at = micro.rows.index(place)
    r, A = micro.ratio[at], micro.batch.advantages[at].item()
    columns = zip(micro.batch.old_logp[at], micro.logp[at], r, r * A, responses[index])
    lines = [[*(fixed(number, 3) for number in numbers), word] for *numbers, word in columns]
    ratios = table("log_π_old log_π_θ r r·Â token", lines)
    return {"last row": index, "last Â": fixed(A, 4), "ratio": ratios}


def facts(calls: dict[str, list[tuple]]) -> dict[str, str]:
    """Map each name on the page to its number or table."""
    step = Step(calls)
    values = numbers_of(step) | group_of(step) | row_of(step) | steps_of(step) | ratios_of(step)
    return {name: str(value) for name, value in values.items()}


def filled(page: str, source: str, values: dict[str, str]) -> str:
    """Return the page with the code of `source` and `values` inserted."""
    lines = source.splitlines()
    stripped = [line.strip() for line in lines]
    anchors = [block.splitlines()[0].strip() for block in CODE.findall(page)]
    for anchor in anchors:
        if stripped.count(anchor) != 1:
            print(f"tools.maintain.walk: error: not one line of grpo.py: {anchor}", file=sys.stderr)
            sys.exit(2)
    starts = sorted(map(stripped.index, anchors))
    ends = [*starts[1:], lines.index('if __name__ == "__main__":')]
    code = {}
    for a, b in zip(starts, ends):
        block = textwrap.dedent("\n".join(lines[a:b])).rstrip()
        # Drop a mark around a whole function, which is between two blocks.
        code[stripped[a]] = re.sub(r"\n\n+# </?own>$", "", block)
    page = CODE.sub(lambda block: code[block[0].splitlines()[0].strip()], page)
    block = r"(<!--block: (\w+)-->\n```text\n).*?(^```)"
    page = re.sub(block, lambda m: f"{m[1]}{values[m[2]]}\n{m[3]}", page, flags=re.DOTALL | re.M)
    number = r"(?:`[^`\n]*`|below [^\s(]+|[^\s(`]+)<!--([^:>]+)-->"
    return re.sub(number, lambda m: f"{values[m[1]]}<!--{m[1]}-->", page)


def main() -> None:
    """Run the step and write the page."""
    with watched() as (words, calls):
        sys.argv = ["grpo.py", *words]
        launch(grpo.main, grpo.Args)
        page = filled(PAGE.read_text("utf-8"), Path(grpo.__file__).read_text("utf-8"), facts(calls))
    write(PAGE, page)
    print(f"written: {PAGE}")


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    main()
