"""The rows of samples.jsonl, which show what a step did to each token of some responses."""

import json
from collections.abc import Sequence

from common.batch import Rollout
from common.cli import Flags
from common.data import Task, texts_of
from common.distributed import World, from_all, gather, global_sum

LONGEST = 256  # tokens of a response that are kept; a longer response keeps half at each end
SCREEN = 400  # characters of a text that the screen shows, its last ones


class Samples:
    """Whole groups of a step, token by token: one of its first mini-batch, up to three of its last.
    In the first update of a rollout every ratio is 1. By the last one the ratios have moved.

    A token's weight is the factor on ∇ log π_θ(token) in the gradient of the optimiser step: minus
    the loss's derivative by the token's log-probability, divided by the count of all ranks. Because
    it comes from autograd, it contains the clip, mask, gate and KL term of any file, but not the
    clipping of the gradient norm, which comes later.
    """

    def __init__(self, task: Task, args: Flags, world: World):
        self.task = task
        self.args = args
        self.world = world

    def wanted(self, step: int) -> bool:
        """Tell whether samples of this step are kept."""
        args = self.args
        if args.sample_every == 0:
            return False
        first_or_last = step in (1, args.steps)
        return first_or_last or step % args.eval_every == 0 or step % args.sample_every == 0

    def collect(
        self, step: int, example: dict | None, minibatches: Sequence[Rollout]
    ) -> list[dict]:
        """Return a step's rows: the example of an evaluation, and groups of the first and the last
        mini-batch that was trained on. All ranks must call it."""
        rows = []
        if example and self.args.sample_every:
            rows.append({"step": step, "example": as_texts(example)})
        trained = [batch for batch in minibatches if hasattr(batch, "weight")]
        numbers = sorted({0, len(trained) - 1}) if trained and self.wanted(step) else []
        for number in numbers:
            row = {"step": step, "minibatch": number + 1, "minibatches": len(trained)}
            batch = trained[number]
            groups = self._chosen(batch)
            if number < len(trained) - 1:
                groups = groups[:1]
            rows += [row | self._group(batch, group) for group in groups]
        return rows

    def _chosen(self, batch: Rollout) -> list[int]:
        """Choose up to three problems of a mini-batch: the first with unequal rewards, so that two
        runs show the same one; the one with the largest sum of |weight|; and the lowest reward."""
        problems = gather(batch.problem, self.world)  # [N], of all ranks
        rewards = gather(batch.rewards, self.world)  # [N]
        pushes = gather((batch.weight.abs() * batch.mask).sum(dim=1), self.world)  # [N]
        numbers = problems.unique().tolist()
        different = [index for index in numbers if len(rewards[problems == index].unique()) > 1]
        push = {index: pushes[problems == index].sum().item() for index in numbers}
        reward = {index: rewards[problems == index].mean().item() for index in numbers}
        chosen = [min(different or numbers), max(push, key=push.get), min(reward, key=reward.get)]
        return list(dict.fromkeys(chosen))

    def _group(self, batch: Rollout, group: int) -> dict:
        """Make a group's row, with its responses from all ranks."""
        own = (batch.problem == group).nonzero()[:, 0].tolist()
        responses = from_all([self._response(batch.rows(slice(row, row + 1))) for row in own])
        problem = self.task.train(group)
        texts = as_texts({"prompt": problem.prompt, "answer": problem.answer})
        totals = global_sum({"tokens": batch.mask.sum(), "rows": len(batch)}, self.world)
        return {
            "group": group,
            "tokens": int(totals["tokens"]),
            "rows": int(totals["rows"]),
            **texts,
            "responses": [response for part in responses for response in part],
        }

    def _response(self, row: Rollout) -> dict:
        """Turn a batch of one row into plain numbers and texts."""
        length = int(row.ends - row.prompt_len)
        decode = self.task.tokenizer.decode
        columns = {name: getattr(row, name)[0] for name in ("logp", "entropy", "weight")}  # [T]
        for name, column in vars(row).items():
            if name.endswith("_logp"):  # log-probs under other policies: π_old, μ, π_ref, a teacher
                columns[name] = column[0]
        if hasattr(row, "token_advantages"):  # instead of the response's advantage
            columns["advantage"] = row.token_advantages[0]
        if row.mask.sum() < length:
            columns["mask"] = row.mask[0]  # it is 0 on what a tool wrote
        ids = row.tokens[0, :length].tolist()
        response = row.response_ids()[0]
        listed = {"ids": ids, "tokens": [decode([token]) for token in ids]}
        for name, column in columns.items():
            listed[name] = six_digits(column[:length].tolist())
        fields = {
            "text": texts_of(row, self.task.tokenizer)[0],
            "given": decode(response[: row.prefix_len]),
            "reward": six_digits(row.rewards.tolist())[0],
            "advantage": six_digits(row.advantages.tolist())[0],
            "finished": bool(row.finished),
        }
        if length > LONGEST:
            end = LONGEST // 2
            fields["left_out"] = [end, length - 2 * end]
            listed = {name: column[:end] + column[-end:] for name, column in listed.items()}
        return fields | listed


def as_texts(row: dict) -> dict:
    """Turn a row's prompt (a text or messages) and its answer (of any type) into texts."""
    texts = {}
    for name in ("prompt", "answer"):
        texts[name] = row[name] if isinstance(row[name], str) else json.dumps(row[name])
    return row | texts


def six_digits(values: list[float]) -> list[float]:
    """Round the values, because in float32 the seventh digit is rounding error."""
    return [float(f"{value:.6g}") for value in values]


def before_and_after(rows: list[dict]) -> list[str]:
    """Return lines for the screen: a held-out problem, its first response and its last one."""
    examples = [row["example"] for row in rows if "example" in row]
    if not examples:
        return []
    first, last = examples[0], examples[-1]
    return [
        f"\nprompt   {first['prompt'][-SCREEN:]!r}, right is {first['answer']!r}",
        f"before   {first['response'][-SCREEN:]!r}",
        f"after    {last['response'][-SCREEN:]!r}",
    ]
