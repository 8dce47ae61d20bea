"""What a step did to each token of some responses: the rows of samples.jsonl."""

import json

import torch.distributed as dist
from torch import Tensor

from common.batch import Rollout

LONGEST = 256  # tokens of a response that are kept; of a longer one half as many at each end
SCREEN = 400  # characters of a text on the screen, the last ones


class Samples:
    """One whole group of the first and of the last mini-batch of a step, token by token.

    A token's weight is what the optimiser step's gradient has in front of ∇ log π_θ(token): minus
    the loss's derivative by its log-probability, over what all ranks have counted. Autograd has
    been through the loss, so clip, mask, gate and KL term of any file are in it; that the
    gradient's norm is clipped afterwards is not. In the first update of a rollout every ratio is 1,
    in the last one they have moved.
    """

    def __init__(self, task: object, args: object):
        self.task, self.args, self.step = task, args, 0
        self.batch, self.number, self.kept = None, 0, []

    def due(self) -> bool:
        """Whether this step is one of which something is kept."""
        args, step = self.args, self.step
        turns = step in (1, args.steps), step % args.eval_every == 0
        return args.sample_every > 0 and (any(turns) or step % args.sample_every == 0)

    def watch(
        self,
        minibatch: Rollout,
        rows: Tensor,
        logp: Tensor,
        entropy: Tensor,
        count: Tensor,
        token_advantages: Tensor | None = None,
    ) -> None:
        """Keep what is shown of these rows `[n]`, after their backward pass; all ranks together.

        `token_advantages [n, T]`: where a response has more than one advantage.
        """
        if not self.due():
            return
        if minibatch is not self.batch:
            self.batch, self.number = minibatch, self.number + 1
            group = {"minibatch": self.number, "group": self._choose(minibatch)}
            tokens = int(minibatch.mask.sum())
            sums = {"count": 0.0, "tokens": tokens, "rows": len(minibatch)}  # of this rank
            self.kept = [*self.kept[:1], (group, sums, [])]  # the first, the latest
        group, sums, responses = self.kept[-1]
        sums["count"] += float(count)
        columns = {"logp": logp, "entropy": entropy, "weight": -logp.grad}  # [n, T]
        if token_advantages is not None:
            columns["advantage"] = token_advantages  # [n, T], instead of the response's
        shown = (minibatch.problem[rows] == group["group"]).nonzero()[:, 0]
        for i, row in zip(shown.tolist(), rows[shown].tolist()):
            own = {name: column[i] for name, column in columns.items()}  # [T]
            responses.append((row, self._response(minibatch.rows(slice(row, row + 1)), own)))

    def _choose(self, minibatch: Rollout) -> int:
        """The first problem with different rewards, or else the first: no random number drawn."""
        own = zip(minibatch.problem.tolist(), minibatch.rewards.tolist())
        dist.all_gather_object(found := [None] * dist.get_world_size(), list(own))
        different = sorted({pair for part in found for pair in part})
        problems = [problem for problem, _ in different]  # as often as it has different rewards
        return next((a for a, b in zip(problems, problems[1:]) if a == b), problems[0])

    def _response(self, one: Rollout, columns: dict[str, Tensor]) -> dict:
        """The batch of one row, as plain numbers and texts."""
        length, decode = int(one.mask.sum()), self.task.tokenizer.decode
        for name, column in vars(one).items():
            if name.endswith("_logp"):  # by every policy that was asked: π_old, μ, π_ref, a teacher
                columns[name] = column[0]
        ids, (whole,) = one.tokens[0, :length].tolist(), one.response_ids()
        listed = {"ids": ids, "tokens": [decode([token]) for token in ids]}
        listed |= {name: numbers(column[:length]) for name, column in columns.items()}
        found = {
            "text": decode(whole, skip_special_tokens=True),
            "given": decode(whole[: one.prefix_len]),
            "reward": numbers(one.rewards)[0],
            "advantage": numbers(one.advantages)[0],
            "finished": bool(one.finished),
        }
        if length > LONGEST:
            end = LONGEST // 2
            found["left_out"] = [end, length - 2 * end]
            listed = {name: column[:end] + column[-end:] for name, column in listed.items()}
        return found | listed

    def collect(self, step: int, example: dict | None) -> list[dict]:
        """The kept groups of all ranks and an evaluation's example, as rows; then they are gone."""
        if not self.args.sample_every:
            return []
        kept, total, rows = self.kept, self.number, []
        self.batch, self.number, self.kept = None, 0, []
        if example:
            rows.append({"step": step, "example": example})
        found = [()] * dist.get_world_size()
        if kept:
            dist.all_gather_object(found, [own[1:] for own in kept])
        for (group, _, _), *parts in zip(kept, *found):
            problem = self.task.train(group["group"])
            responses = [one for _, part in parts for _, one in sorted(part, key=lambda x: x[0])]
            whole = {name: sum(sums[name] for sums, _ in parts) for name in parts[0][0]}
            for values in (one["weight"] for one in responses):
                values[:] = [float(f"{value / whole['count']:.6g}") for value in values]
            group |= {"step": step, "minibatches": total, **whole}
            group |= {"prompt": problem.prompt, "answer": problem.answer, "responses": responses}
            rows.append(group)
        for asked in (row.get("example", row) for row in rows):
            for name in ("prompt", "answer"):  # messages, and references of any shape
                given = asked[name]
                asked[name] = given if isinstance(given, str) else json.dumps(given)
        return rows


def numbers(column: Tensor) -> list[float]:
    """With six digits: the seventh of float32 is rounding."""
    return [float(f"{value:.6g}") for value in column.tolist()]


def before_and_after(rows: list[dict]) -> list[str]:
    """One held-out problem and its first and last answer, for the screen."""
    examples = [row["example"] for row in rows if "example" in row]
    if not examples:
        return []
    first, last = examples[0], examples[-1]
    asked = f"\nprompt   {first['prompt'][-SCREEN:]!r}, right is {first['answer']!r}"
    answers = (("before", first["response"]), ("after", last["response"]))
    return [asked, *(f"{when:8} {text[-SCREEN:]!r}" for when, text in answers)]


def as_table(rows: list[dict]) -> dict:
    """The responses as a table of Weights & Biases; nothing where there are none."""
    columns = ["prompt", "answer", "text", "reward", "advantage"]
    flat = [row | one for row in rows for one in row.get("responses", ())]
    if not flat:
        return {}
    from wandb import Table

    return {"samples": Table(columns, [[one[name] for name in columns] for one in flat])}
