"""DAPO: groups without a difference are drawn again; long responses are punished."""

from tests.loop.oracle import LIMIT, TRAIN, Batch, G, Oracle, P, Row, Tensor, respond, surrogate
from tests.loop.oracle import token_mean, tokens_of

FLAGS = {"max_draws": 2, "overlong_buffer": 20, "overlong_penalty": 0.7, "grad_clip": 11.0}
ALSO = [{"max_draws": 1}, {"mask_truncated": True}]  # with one draw most idle groups stay so
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


def objective(b: Batch) -> Tensor:
    """Truncated responses stay out of loss and denominator, not out of their group's mean."""
    finished = Tensor([[row.finished or not b.args["mask_truncated"]] for row in b.rows])
    return token_mean(surrogate(b), tokens_of(b, b.mask * finished))
