"""The baselines."""

from tests.loop.oracle import (
    Batch,
    Oracle,
    Tensor,
    clipped_surrogate,
    sides,
    token_mean,
    tokens,
    torch,
)

FLAGS = {"grad_clip": 6.0}
ALSO = [{"baseline": how} for how in ("none", "batch", "group", "maxrl", "scalerl")]


def advantages(R: Tensor) -> Tensor:
    """RLOO: each minus the mean of the others, as a matrix."""
    n = len(R)
    return R - (torch.ones(n, n) - torch.eye(n)).double() @ R / (n - 1)


def prepare(o: Oracle, step: int, b: Batch) -> None:
    """The batch's statistics are those of all mini-batches of all ranks."""
    how = o.args["baseline"]
    parts = range(o.args["minibatches"])
    batch = [row for part in parts for _, group in o.groups(step, part) for row in group]
    R = torch.tensor([o.reward(row) for row in b.rows]).double()
    mean = {}
    for row in batch:
        mean.setdefault(row.prompt, []).append(o.reward(row))
    mean = {prompt: sum(values) / len(values) for prompt, values in mean.items()}
    own = R - torch.tensor([mean[row.prompt] for row in b.rows]).double()
    lengths = torch.tensor([len(row.tokens) for row in batch])
    every = torch.tensor([o.reward(row) for row in batch]).double()
    left = every - torch.tensor([mean[row.prompt] for row in batch]).double()
    if how in ("batch", "group"):
        values, mine = (every, R) if how == "batch" else (left, own)
        each = values.repeat_interleave(lengths)
        b.A = (mine - each.mean()) / each.std()
    p = R - own
    b.A = {"none": R, "maxrl": torch.where(p > 0, own / p, 0.0), "scalerl": own / left.std()}.get(
        how, b.A
    )


def metrics(o: Oracle, step: int) -> dict[str, float]:
    """Of RLOO: Â is G/(G-1) times what is left of the group's mean; idle groups are not pushed."""
    if o.args["baseline"] != "rloo":
        return {}
    parts = range(o.args["minibatches"])
    groups = [rows for part in parts for _, rows in o.groups(step, part)]
    found = []
    for rows in groups:
        R = torch.tensor([o.reward(row) for row in rows]).double()
        found += ((R - R.mean()) / (len(R) - 1)).abs().tolist()
    return {"apart": sum(found) / len(found), "idle_push": 0.0}


def objective(b: Batch) -> tuple[Tensor, dict]:
    surrogate, beyond = clipped_surrogate(b, b.args["clip_low"], b.args["clip_high"])
    b.count = tokens(b.mask)
    return token_mean(surrogate, b.mask), sides("clip", beyond, b)
