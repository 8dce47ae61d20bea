"""Metrics of a step, as sums and counts that are divided once; the two accuracies of a run."""

import math
from typing import Literal, Self

import torch
from torch import Tensor

from common.batch import Rollout
from common.cli import Flags, RunStopped
from common.clock import timed
from common.data import Task, texts_of
from common.distributed import World, global_max, global_sum
from common.rollout import Engine


class Means:
    """Metrics of a step, exact over any micro-batches and ranks.

    Each is added as a pair: (sum, count) of a mean, (value, "sum") of a total, or (value, "max") of
    a largest value. A mean whose count is 0 is left out of the step.
    """

    def __init__(self):
        self.sums: dict[str, Tensor] = {}  # of means and totals
        self.counts: dict[str, Tensor | float] = {}  # of means
        self.maxima: dict[str, Tensor] = {}

    def add(self, **pairs: tuple[Tensor | float, Tensor | float | Literal["sum", "max"]]) -> Self:
        for name, (value, count) in pairs.items():
            value = torch.as_tensor(value, dtype=torch.float64).detach()
            if count == "max":
                self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)
                continue
            self.sums[name] = self.sums.get(name, 0.0) + value
            if count != "sum":
                self.counts[name] = self.counts.get(name, 0.0) + count
        return self

    def reduce(self, world: World) -> dict[str, float]:
        """Compute every metric over all ranks."""
        sums, counts = global_sum(self.sums, world), global_sum(self.counts, world)
        totals = {name: total for name, total in sums.items() if name not in counts}
        means = {name: sums[name] / count for name, count in counts.items() if count}
        return means | totals | global_max(self.maxima, world)


def heat(rate: float, args: Flags) -> float:
    """Return the heat of an optimiser step with P prompts, on all ranks together, and G responses
    to each: rate √((1 + 13/G) / P).

    A step is mostly noise, which pushes the weights at random, while the signal pulls them back.
    The heat decides at which accuracy the two balance (labs/heat). The noise between prompts falls
    with P; that between responses to one prompt falls with P·G, and with one response it would be
    13 times as large. The 13 was measured on the embedded model.
    """
    prompts = args.prompts_per_step / args.minibatches
    return rate * math.sqrt((1 + 13 / args.group_size) / prompts)


def clip_shares(
    logp: Tensor,
    batch: Rollout,
    low: float,
    high: float,
    name: str = "clip",
    A: Tensor | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Measure the share of response tokens that lose their gradient to a clip of r = π_θ/π_old, and
    its two parts: r above 1 + high with Â > 0, and r below 1 - low with Â < 0. Pass the advantages
    as `A [n, T]` if they are not one for each response."""
    A = batch.advantages[:, None] if A is None else A  # [n, 1] or [n, T]
    ratio = (logp - batch.old_logp).exp()  # [n, T]
    above = (A > 0) & (ratio > 1 + high)  # [n, T]
    below = (A < 0) & (ratio < 1 - low)  # [n, T]
    sides = {"share": above | below, "above": above, "below": below}
    tokens = batch.mask.sum()
    return {f"{name}_{side}": ((cut * batch.mask).sum(), tokens) for side, cut in sides.items()}


def metrics_by_sign(batch: Rollout) -> dict[str, tuple[Tensor, Tensor]]:
    """Measure the entropy per token over all rows, and over those with Â > 0 (good) and Â < 0
    (bad), and the tokens per row of both. A mean over all rows would hide how a collapse begins:
    responses with a negative advantage grow longer.
    """
    entropy = batch.entropy  # [n, T]
    metrics = {"entropy": (entropy.sum(), batch.mask.sum())}
    by_row = entropy.sum(1)  # [n]
    lengths = batch.mask.sum(1)  # [n]
    for name, rows in (("good", batch.advantages > 0), ("bad", batch.advantages < 0)):
        # Not lengths[rows], for which the CPU would wait for the GPU to learn how many rows it has.
        tokens = lengths.where(rows, 0).sum()
        metrics[f"entropy_{name}"] = (by_row.where(rows, 0).sum(), tokens)
        metrics[f"len_{name}"] = (tokens, rows.sum())
    return metrics


def rollout_metrics(rollout: Rollout, G: int) -> dict[str, tuple]:
    """Measure the sampled responses, in groups of G, and their rewards."""
    rewards = rollout.rewards.view(-1, G)  # [P, G]
    tokens = rollout.mask.sum()
    N = len(rollout)
    return {
        "reward": (rewards.sum(), N),
        "distinct": (rollout.new_answer.sum(), len(rewards)),  # different answers in a group
        "zero_groups": ((rewards == rewards[:, :1]).all(dim=1).sum(), len(rewards)),
        "response_len": (tokens, N),
        "truncated": ((~rollout.finished).sum(), N),
        "tokens": (tokens, "sum"),
        "judge_failed": (rollout.judge_failed.sum(), N),
    }


@timed("evaluate")
def evaluate(engine: Engine, task: Task, args: Flags, world: World) -> dict:
    """Measure the accuracy on the held-out problems, over all ranks.

    `greedy` is the accuracy of one response at temperature 0, and `sampled` the mean accuracy of
    --eval_samples responses. `example` is the first problem with its greedy response, for
    samples.jsonl. Returns {} if a signal asks the run to stop.
    """
    problems = task.held_out[world.rank :: world.size]  # this rank's
    most = len(task.held_out[:: world.size])  # how many rank 0 has: no rank has more
    scored = {}  # sums of scores
    judged = 0  # responses on which the verifier did not fail
    example = {}
    state = engine.state_dict()
    ways = (("greedy", 1, 0.0), ("sampled", args.eval_samples, args.temperature))
    for name, n, temperature in ways:
        scored[name] = 0.0
        at_once = max(1, args.rollout_rows // n)  # problems
        for start in range(0, most, at_once):
            if world.stop.anywhere(world):
                engine.load_state_dict(state)
                return {}
            part = problems[start : start + at_once]
            prompts = [problem.prompt_ids for problem in part]
            rollout = engine.generate(prompts, n, args.max_new_tokens, temperature)
            texts = texts_of(rollout, task.tokenizer)
            answers = [problem.answer for problem in part for _ in range(n)]
            verdicts = task.verifier(texts, answers)
            scored[name] += sum(verdict.score for verdict in verdicts) / n
            judged += sum(not verdict.failure for verdict in verdicts)
            if name == "greedy" and world.rank == 0 and start == 0:
                shown = {"prompt": part[0].prompt, "answer": part[0].answer}
                example["example"] = shown | {"response": texts[0], "reward": verdicts[0].score}
    engine.load_state_dict(state)  # so how often a run evaluates does not change what it samples
    totals = global_sum(scored | {"judged": judged}, world)
    if totals.pop("judged") == 0:  # then all rewards in training would be 0, too
        raise RunStopped(f"--task {task.name}: fails on every answer")
    return {name: total / len(task.held_out) for name, total in totals.items()} | example
