"""DAPO."""

from tests.loop.oracle import (
    LIMIT,
    TRAIN,
    Batch,
    G,
    Oracle,
    P,
    Row,
    Tensor,
    clipped_surrogate,
    respond,
)
from tests.loop.oracle import sides, token_mean, tokens

FLAGS = {"max_draws": 2, "overlong_buffer": 20, "overlong_penalty": 0.7, "grad_clip": 11.0}
ALSO = [{"max_draws": 1}]  # where most groups that are idle stay so
STORED = {"max_draws": 1}  # a stored rollout cannot be drawn again


def rounds(o: Oracle) -> list[list[dict[int, str]]]:
    """The next prompts of one stream, first for all slots, then for those of idle groups."""
    drawn, steps = 0, []
    for _ in range(o.args["steps"]):
        slots, found = list(range(P)), []
        while slots and len(found) < o.args["max_draws"]:
            found.append({slot: TRAIN[(drawn + i) % len(TRAIN)] for i, slot in enumerate(slots)})
            drawn += len(slots)
            slots = [slot for slot in slots if idle(respond(found[-1][slot], G))]
        steps.append(found)
    return steps


def idle(rows: list[Row]) -> bool:
    return len({row.reward for row in rows}) == 1


def punishment(o: Oracle, row: Row) -> float:
    buffer = o.args["overlong_buffer"]
    inside = len(row.tokens) - (LIMIT - buffer)
    return o.args["overlong_penalty"] * min(1.0, max(0.0, inside / buffer))


def rewards(o: Oracle, step: int, rows: list[Row]) -> list[float]:
    """An idle group that is left over is not judged by its lengths alone."""
    return [row.reward - (0 if idle(rows) else punishment(o, row)) for row in rows]


def objective(b: Batch) -> tuple[Tensor, dict]:
    surrogate, beyond = clipped_surrogate(b, b.args["clip_low"], b.args["clip_high"])
    mask = b.mask
    if b.args["mask_truncated"]:
        mask = mask * Tensor([[row.finished] for row in b.rows])
    b.count = tokens(mask)
    return token_mean(surrogate, mask), sides("clip", beyond, b)


def metrics(o: Oracle, step: int) -> dict[str, float]:
    """What the rounds cost."""
    used = [
        row for part in range(o.args["minibatches"]) for _, g in o.groups(step, part) for row in g
    ]
    drawn = [row for found in o.rounds[step] for p in found.values() for row in respond(p, G)]
    all_tokens, kept = (sum(len(row.tokens) for row in rows) for rows in (drawn, used))
    return {
        "rounds": len(o.rounds[step]),
        "drawn_per_used": len(drawn) / len(used),
        "extra_tokens": (all_tokens - kept) / kept,
        "tokens": all_tokens,
        "reward_drawn": sum(row.reward for row in drawn) / len(drawn),
        "overlong": sum(punishment(o, row) for row in used) / len(used),
    }
