"""Metrics of a step, as sums and counts that are divided once; the two accuracies of a run."""

import math
from collections import defaultdict
from typing import Self

import torch
from torch import Tensor

from common.batch import Rollout
from common.cli import Flags, RunStopped
from common.clock import timed
from common.data import Task, texts_of
from common.distributed import World, global_sum
from common.rollout import Engine


class Means:
    """Metrics of a step as sums and counts: exact means over any micro-batches and ranks.

    With a count of None, the metric is the sum itself, or the maximum if its name ends in `_max`. A
    metric whose count is 0 has no mean and is left out of the step.
    """

    def __init__(self):
        self.sums = defaultdict(lambda: torch.tensor(0.0))
        self.counts, self.plain = defaultdict(float), set()

    def add(self, **pairs: tuple[Tensor | float, Tensor | float | None]) -> Self:
        for name, (total, count) in pairs.items():
            number = not isinstance(total, Tensor)
            value = torch.tensor(total, dtype=torch.float64) if number else total.detach().double()
            combine = torch.maximum if name.endswith("_max") else torch.add
            self.sums[name] = combine(self.sums[name], value)
            self.counts[name] = self.counts[name] + (0.0 if count is None else count)
            if count is None:
                self.plain.add(name)
        return self

    def reduce(self, world: World) -> dict[str, float]:
        """Compute every metric over all ranks."""
        sums, counts = global_sum(self.sums, world), global_sum(self.counts, world)
        means = {name: sums[name] / counts[name] for name in self.sums if counts[name]}
        return means | {name: sums[name] for name in self.plain}


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
        "tokens": (tokens, None),
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
