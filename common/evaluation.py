"""Measuring a policy: the two accuracies of a training run, and the papers' benchmark with
`--eval_only`."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from common.data import Task
from common.distributed import RunStopped, World, global_sum, together
from common.folder import as_lines, whole

DECODING = ((1.0, 1.0), (0.7, 0.9))  # (temperature, top-p), the two settings that papers report
RESAMPLES = 2000


def evaluate(
    engine: object, task: Task, tokenizer: PreTrainedTokenizerBase, args: object, world: World
) -> dict[str, float]:
    """Accuracy on the held-out problems: `greedy` (one response) and `sampled` (mean of
    --eval_samples responses)."""
    problems, state, right = task.held_out[world.rank :: world.size], engine.state_dict(), {}
    for name, n, temperature in (
        ("greedy", 1, 0.0),
        ("sampled", args.eval_samples, args.temperature),
    ):
        rollout = engine.generate(
            [p.prompt_ids for p in problems], n, args.max_new_tokens, temperature
        )
        texts = tokenizer.batch_decode(rollout.response_ids(), skip_special_tokens=True)
        right[name] = sum(task.judge(texts, [p.answer for p in problems for _ in range(n)])) / n
    engine.load_state_dict(state)  # training's samples do not depend on how often one looks
    return {name: total / len(task.held_out) for name, total in global_sum(right, world).items()}


def benchmark(
    engine: object,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    args: object,
    world: World,
    folder: Path,
    step: int,
) -> str:
    """avg@n and pass@k of every set in `task.sets`, for both decoding settings, each with a 95%
    interval, as a table.

    Writes `folder/evaluation-step<n>.jsonl`, a line for each problem and setting with its responses
    and their scores; n is `step`, the optimised steps of what is measured.
    """
    n, rows = args.eval_samples, []
    for name, problems in task.sets.items():
        mine = list(enumerate(problems))[world.rank :: world.size]
        for temperature, top_p in DECODING:
            prompts = [p.prompt_ids for _, p in mine]
            rollout = engine.generate(prompts, n, args.max_new_tokens, temperature, top_p=top_p)
            texts = tokenizer.batch_decode(rollout.response_ids(), skip_special_tokens=True)
            scores = task.judge(texts, [p.answer for _, p in mine for _ in range(n)])
            lengths, finished = rollout.mask.sum(1).int().tolist(), rollout.finished.tolist()
            for i, (number, p) in enumerate(mine):
                own = slice(i * n, (i + 1) * n)
                row = {
                    "set": name,
                    "temperature": temperature,
                    "top_p": top_p,
                    "problem": number,
                    "prompt": p.prompt,
                }
                row |= {
                    "answer": p.answer,
                    "scores": scores[own],
                    "lengths": lengths[own],
                    "finished": finished[own],
                }
                rows.append(row | {"responses": texts[own]})
    parts = [None] * world.size
    dist.all_gather_object(parts, rows)
    rows = sorted((row for part in parts for row in part), key=lambda row: row["problem"])
    killed = global_sum({"killed": task.killed}, world)["killed"]
    text = table(rows, n) + (
        f"\n{killed:.0f} answers broke the judge's bounds: scored 0" if killed else ""
    )
    path = folder / f"evaluation-step{step}.jsonl"
    with together(world, RunStopped, f"cannot write {path}: the table is all that is left"):
        if world.rank == 0:
            try:
                with whole(path) as partial:
                    partial.write_text(as_lines(rows))
            except OSError:
                print(text, flush=True)
                raise
    return text


def table(rows: list[dict], n: int) -> str:
    """The results as a Markdown table, a line for each set and decoding setting."""
    ks = [2**i for i in range(1, n.bit_length())]
    head = [
        "set",
        "T",
        "top-p",
        "problems",
        f"avg@{n} [95%]",
        *(f"pass@{k} [95%]" for k in ks),
        "length",
        "cut",
    ]
    lines = [" | ".join(["", *head, ""]).strip(), "|".join(["", *["---"] * len(head), ""])]
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["set"], row["temperature"], row["top_p"]), []).append(row)
    for (name, temperature, top_p), own in groups.items():
        scores = torch.tensor([row["scores"] for row in own], dtype=torch.float64)  # [problems, n]
        right = (scores >= 1).sum(dim=1)  # [problems]: part marks count for avg, not for pass
        measures = [scores.mean(dim=1), *(pass_at_k(right, n, k) for k in ks)]
        shown = ["{:.3f} [{:.3f}, {:.3f}]".format(m.mean(), *bootstrap(m)) for m in measures]
        tokens = torch.tensor([row["lengths"] for row in own]).double().mean()
        cut = 1 - torch.tensor([row["finished"] for row in own]).double().mean()
        cells = [name, temperature, top_p, len(own), *shown, f"{tokens:.0f}", f"{cut:.3f}"]
        lines.append(" | ".join(["", *map(str, cells), ""]).strip())
    return "\n".join(lines)


def pass_at_k(right: Tensor, n: int, k: int) -> Tensor:
    """Unbiased estimate `[problems]` of the chance that one of k responses is right, from `right`
    of n (2107.03374): 1 - C(n - right, k) / C(n, k)."""
    return torch.tensor(
        [1 - math.comb(n - c, k) / math.comb(n, k) for c in right.tolist()], dtype=torch.float64
    )


def bootstrap(values: Tensor) -> tuple[float, float]:
    """95% interval of the mean, by resampling the problems: AIME's 30 leave it wide."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    means = values[draws].mean(dim=1)  # [RESAMPLES]
    return tuple(means.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist())
