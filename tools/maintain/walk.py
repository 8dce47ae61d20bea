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
from pathlib import Path
from unittest import mock

import grpo
import torch
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
        def call(*given: object, **named: object) -> object:
            found = real(*given, **named)
            calls[name].append((given, named, found))
            return found

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


def said(number: float, digits: int = 2) -> str:
    """Round a number, without a minus before 0."""
    text = f"{float(torch.as_tensor(number).detach()):.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def found(calls: dict[str, list[tuple]]) -> dict[str, str]:
    """Map each name on the page to its number or table."""
    tokenizer, task = calls["load_task"][0][0][1], calls["load_task"][0][2]
    (rewards,), _, A = calls["advantages"][0]
    rollout = calls["rollout_metrics"][0][0][0]
    parts = [part for _, _, part in calls["balance_tokens"]]
    metrics = calls["log"][-1][0][2]
    P, G = rewards.shape
    N, T = rollout.tokens.shape
    words = [[tokenizer.decode(token) for token in row] for row in rollout.response_ids()]
    numbers = {"P": P, "G": G, "N": N, "T": T, "S": rollout.sequences.shape[1]}
    numbers |= {"n": len(parts[0]), "V": len(tokenizer), "real": int(rollout.mask.sum())}
    numbers["padding"] = f"{100 - 100 * rollout.mask.mean():.0f}%"
    numbers["idle"] = int((A == 0).all(dim=1).sum())
    for name in ("reward", "entropy", "entropy_good", "entropy_bad", "zero_groups", "len_good"):
        numbers[name] = said(metrics[name])
    numbers |= {"distinct": said(metrics["distinct"], 1), "len_bad": said(metrics["len_bad"])}
    numbers["loss"] = said(metrics["loss"], 4)
    numbers["lr"] = f"{metrics['lr']:.0e}".replace("e-0", "e-")
    numbers["ref_kl"] = said(metrics["ref_kl"], 5)
    numbers["gap"] = "below 1e-5" if metrics["sampler_gap"] < 1e-5 else "above 1e-5"
    numbers["mean_norm"] = said(metrics["grad_norm"])
    first, last = ([task.train(i), words[i * G : i * G + G]] for i in SEEN)
    numbers |= {"prompt": f"`{tokenizer.decode(first[0].prompt_ids)}`", "answer": first[0].answer}
    numbers |= {"last prompt": f"`{tokenizer.decode(last[0].prompt_ids)}`"}
    numbers["mean 0"] = said(rewards[0].mean())
    numbers["std 0"] = said(rewards[0].std(), 4)
    rows = zip(rewards[0].tolist(), A[0].tolist(), first[1])
    blocks = {
        "group": table("reward Â response", [[r, said(a, 4), "".join(w)] for r, a, w in rows])
    }

    # One row of the first problem, as the tensors have it
    row = min(range(G), key=lambda i: (rewards[0, i].item(), len(words[i])))
    numbers["short row"] = row
    before, size = int(rollout.prompt_len[row]), len(words[row])
    part = parts[0]
    lines = []
    for column, token in enumerate(rollout.sequences[row].tolist()[: before + size + 2]):
        t = column - before
        own = 0 <= t < T and rollout.mask[row, t] > 0
        shown = tokenizer.decode(token) if t < size else "(padding)"
        logs = [said(x[row, t], 3) if own else "" for x in (rollout.rollout_logp, part.old_logp)]
        mask = f"{rollout.mask[row, t]:.0f}" if t >= 0 else ""
        lines.append([column, t if t >= 0 else "", token, mask, *logs, shown])
    blocks["row"] = table("column t id mask log_μ log_π_old token", lines)

    # The four optimiser steps, each in its micro-batches
    losses, lines, start = calls["policy_loss"], [], 0
    for k, (_, _, micros) in enumerate(calls["micro_batches"][-len(parts) :]):
        now, start = losses[start : start + len(micros)], start + len(micros)
        ratios = []
        for (_, logp, batch), _, _ in now:
            ratios.append((logp - batch.old_logp).exp()[batch.mask > 0])
        sums = " + ".join(said(loss, 3) for _, _, (loss, _) in now).replace("+ -", "- ")
        total = sum(loss.item() for _, _, (loss, _) in now)
        count = sum(int(count) for _, _, (_, count) in now)
        spread = [said(min(map(Tensor.min, ratios)), 3), said(max(map(Tensor.max, ratios)), 3)]
        norm = said(calls["clip_gradients"][k][2])
        rows = "+".join(str(len(rows)) for rows in micros)
        lines.append([k + 1, rows, *spread, norm, said(total / count, 4), f"({sums})/{count}"])
    blocks["steps"] = table("step rows r_min r_max norm loss sums", lines)

    # A wrong response of the last mini-batch, whose ratios are no longer 1
    index = max(range(G), key=lambda i: (-rewards[SEEN[1], i].item(), len(last[1][i])))
    place = SEEN[1] * G + index - (N - len(parts[-1]))
    for ((_, logp, batch), _, _), rows in zip(losses[-len(micros) :], micros):
        if place in rows.tolist():
            at = rows.tolist().index(place)
            a = batch.advantages[at].item()
            r = (logp - batch.old_logp)[at].exp()
            columns = zip(batch.old_logp[at], logp[at], r, r * a, last[1][index])
            lines = [[*(said(number, 3) for number in row), word] for *row, word in columns]
    numbers |= {"last row": index, "last Â": said(a, 4)}
    blocks["ratio"] = table("log_π_old log_π_θ r r·Â token", lines)
    return {name: str(value) for name, value in (numbers | blocks).items()}


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
        page = filled(PAGE.read_text("utf-8"), Path(grpo.__file__).read_text("utf-8"), found(calls))
    write(PAGE, page)
    print(f"written: {PAGE}")


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    main()
