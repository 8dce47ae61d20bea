"""What a step did to each token of some responses: the rows of samples.jsonl."""

import json
from collections import defaultdict

import torch.distributed as dist
from torch import Tensor

from common.batch import Rollout

LONGEST = 256  # tokens of a response that are kept; of a longer one half of them at each end
SCREEN = 400  # the last characters of a text, shown on the screen


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

    def wanted(self) -> bool:
        """Whether something is kept of this step."""
        args, step = self.args, self.step
        if args.sample_every == 0:
            return False
        first_or_last = step in (1, args.steps)
        return first_or_last or step % args.eval_every == 0 or step % args.sample_every == 0

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
        if not self.wanted():
            return
        if minibatch is not self.batch:
            self.batch, self.number = minibatch, self.number + 1
            group = {"minibatch": self.number, "group": self._choose_group(minibatch)}
            tokens = int(minibatch.mask.sum())
            sums = {"count": 0.0, "tokens": tokens, "rows": len(minibatch)}  # of this rank
            del self.kept[1:]  # of a step the first mini-batch is kept, and the latest
            self.kept.append((group, sums, []))
        group, sums, responses = self.kept[-1]
        sums["count"] += float(count)
        columns = {"logp": logp, "entropy": entropy, "weight": -logp.grad}  # [n, T]
        if token_advantages is not None:
            columns["advantage"] = token_advantages  # [n, T], instead of the response's
        shown = (minibatch.problem[rows] == group["group"]).nonzero()[:, 0]
        for i, row in zip(shown.tolist(), rows[shown].tolist()):
            one = minibatch.rows(slice(row, row + 1))
            own = {name: column[i] for name, column in columns.items()}  # [T]
            responses.append((row, self._response(one, own)))

    def _choose_group(self, minibatch: Rollout) -> int:
        """The lowest number of a problem with different rewards, or else of any problem."""
        parts = [None] * dist.get_world_size()
        pairs = list(zip(minibatch.problem.tolist(), minibatch.rewards.tolist()))
        dist.all_gather_object(parts, pairs)
        rewards = defaultdict(set)  # problem -> its different rewards
        for part in parts:
            for problem, reward in part:
                rewards[problem].add(reward)
        different = [problem for problem in rewards if len(rewards[problem]) > 1]
        return min(different) if different else min(rewards)

    def _response(self, one: Rollout, columns: dict[str, Tensor]) -> dict:
        """The batch of one row, as plain numbers and texts."""
        length, decode = int(one.mask.sum()), self.task.tokenizer.decode
        for name, column in vars(one).items():
            if name.endswith("_logp"):  # by every policy that was asked: π_old, μ, π_ref, a teacher
                columns[name] = column[0]
        ids, response = one.tokens[0, :length].tolist(), one.response_ids()[0]
        listed = {"ids": ids, "tokens": [decode([token]) for token in ids]}
        for name, column in columns.items():
            listed[name] = six_digits(column[:length].tolist())
        found = {
            "text": decode(response, skip_special_tokens=True),
            "given": decode(response[: one.prefix_len]),
            "reward": six_digits(one.rewards.tolist())[0],
            "advantage": six_digits(one.advantages.tolist())[0],
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
        kept, minibatches, rows = self.kept, self.number, []
        self.batch, self.number, self.kept = None, 0, []
        if example:
            rows.append({"step": step, "example": as_texts(example)})
        for group, sums, responses in kept:
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, (sums, responses))
            total = {name: sum(part[name] for part, _ in parts) for name in sums}
            shown = []
            for _, part in parts:
                for _, response in sorted(part, key=lambda pair: pair[0]):
                    weights = [value / total["count"] for value in response["weight"]]
                    shown.append(response | {"weight": six_digits(weights)})
            problem = self.task.train(group["group"])
            asked = as_texts({"prompt": problem.prompt, "answer": problem.answer})
            row = group | {"step": step, "minibatches": minibatches} | total | asked
            rows.append(row | {"responses": shown})
        return rows


def as_texts(row: dict) -> dict:
    """The row with its prompt, perhaps messages, and its answer, of any shape, as texts."""
    texts = {}
    for name in ("prompt", "answer"):
        texts[name] = row[name] if isinstance(row[name], str) else json.dumps(row[name])
    return row | texts


def six_digits(values: list[float]) -> list[float]:
    """The values rounded: the seventh digit of float32 is rounding."""
    return [float(f"{value:.6g}") for value in values]


def before_and_after(rows: list[dict]) -> list[str]:
    """One held-out problem with its first and last answer, for the screen."""
    examples = [row["example"] for row in rows if "example" in row]
    if not examples:
        return []
    first, last = examples[0], examples[-1]
    return [
        f"\nprompt   {first['prompt'][-SCREEN:]!r}, right is {first['answer']!r}",
        f"before   {first['response'][-SCREEN:]!r}",
        f"after    {last['response'][-SCREEN:]!r}",
    ]
