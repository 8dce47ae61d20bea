"""PPO: GAE as a double sum, and the critic that main's second optimiser was given."""

from tests.loop.oracle import Batch, M, Oracle, Row, Tensor, log_probs, padded, share, token_mean
from tests.loop.oracle import tokens, torch

FLAGS = {"critic_warmup": 0, "critic_lr": 3e-3, "gamma": 0.95, "lam": 0.8, "lam_critic": 0.9}
FLAGS |= {"beta": 0.1, "value_clip": 0.05, "grad_clip": 4.0}
ALSO = [{"lam_length": 0.3}, {"lam": 1.0, "gamma": 1.0}]
STORED = {"critic_lr": 1e-12, "critic_warmup": 0}
SMALL = ["--critic_warmup", "1"]
OFF = {"lam": 1.0}


def rollout(o: Oracle, step: int) -> list[list[Row]]:
    """The rows of each mini-batch."""
    return [[row for _, group in o.groups(step, part) for row in group] for part in range(M)]


def values(o: Oracle, update: int, rows: list[Row]) -> tuple[Tensor, list[Tensor]]:
    """V `[n, T]` of the critic before its update, and the parameters that it depends on."""
    *backbone, head = o.records[0].lessons[update]["parameters"]
    lm, head = o.lm(backbone).model, head.double().requires_grad_()
    hidden = lm(padded([row.ids for row in rows], 0)).last_hidden_state  # [n, S, H]
    found = [
        hidden[i, len(row.context) - 1 : len(row.ids) - 1] @ head[0] for i, row in enumerate(rows)
    ]
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True), [*lm.parameters(), head]


def paid(o: Oracle, step: int, rows: list[Row]) -> Tensor:
    """ρ `[n, T]`."""
    with torch.no_grad():
        old, ref = (log_probs(o.lm(o.updates[at]["parameters"]), rows)[0] for at in (step * M, 0))
    found = -o.args["beta"] * (old - ref)
    for i, row in enumerate(rows):
        found[i, len(row.tokens) - 1] += row.reward
    return found


def gae(o: Oracle, rho: Tensor, V: Tensor, rows: list[Row], lam: float | None) -> Tensor:
    """Â_t = Σ_l (γλ)^l δ_{t+l} `[n, T]`; λ of the length for None."""
    gamma, found = o.args["gamma"], torch.zeros_like(V)
    for i, row in enumerate(rows):
        n = len(row.tokens)
        mine = max(0.0, 1 - 1 / (o.args["lam_length"] * n)) if lam is None else lam
        after = [*V[i, 1:n].tolist(), 0.0]
        delta = [float(rho[i, t]) + gamma * after[t] - float(V[i, t]) for t in range(n)]
        for t in range(n):
            found[i, t] = sum((gamma * mine) ** k * delta[t + k] for k in range(n - t))
    return found


def judged(o: Oracle, step: int) -> list[dict[str, Tensor]]:
    """Of each mini-batch: V_old, V̂, what came, Â (whitened over all), and the mask."""
    if (known := vars(o).setdefault("judged", {})).get(step):
        return known[step]
    parts = []
    for rows in rollout(o, step):
        V, rho = values(o, step * M, rows)[0].detach(), paid(o, step, rows)
        mask = padded([[1.0] * len(row.tokens) for row in rows]).double()
        lam = None if o.args["lam_length"] else o.args["lam"]
        part = {"V": V, "mask": mask, "A": gae(o, rho, V, rows, lam), "rho": rho}
        part["came"] = (V + gae(o, rho, V, rows, 1.0)) * mask
        part["target"] = (V + gae(o, rho, V, rows, o.args["lam_critic"])) * mask
        parts.append(part)
    every = torch.cat([part["A"][part["mask"] > 0] for part in parts])
    for part in parts:
        part["A"] = (part["A"] - every.mean()) / every.std() * part["mask"]
    known[step] = parts
    return parts


def prepare(o: Oracle, step: int, b: Batch) -> None:
    part = judged(o, step)[next(i for i, rows in enumerate(rollout(o, step)) if rows == b.rows)]
    b.A, b.tokens_A = (part["came"] - part["V"])[:, 0], part["A"]


def objective(b: Batch) -> tuple[Tensor, dict]:
    r, A, low, high = (b.logp - b.old).exp(), b.tokens_A, b.args["clip_low"], b.args["clip_high"]
    beyond = ((A > 0) & (r > 1 + high)) | ((A < 0) & (r < 1 - low))
    J = token_mean(torch.where(beyond, r.clip(1 - low, 1 + high).detach() * A, r * A), b.mask)
    b.count = tokens(b.mask)
    stats = {"clip_share": share(beyond, b.mask), "clip_above": share(beyond & (A > 0), b.mask)}
    return J, stats | {"clip_below": share(beyond & (A < 0), b.mask)}


def lesson(o: Oracle, update: int) -> tuple[Tensor, dict]:
    """The flat gradient of the mean value loss, and what it logs as (sum, count)."""
    step, part = divmod(update, M)
    known, rows = judged(o, step)[part], rollout(o, step)[part]
    V, parameters = values(o, update, rows)
    reach = o.args["value_clip"]
    far = (V - known["V"]).abs() > reach
    near = known["V"] + (V - known["V"]).clip(-reach, reach)
    worse = far & ((near - known["target"]).abs() > (V - known["target"]).abs())
    # Where the clipped error is the larger it is a constant
    error = torch.where(worse, (near - known["target"]).detach(), V - known["target"]) ** 2 / 2
    loss = token_mean(error, known["mask"])
    gradient = torch.cat([x.flatten() for x in torch.autograd.grad(loss, parameters)])
    n = tokens(known["mask"])
    stats = {
        "value_loss": (float(loss.detach()) * n, n),
        "value_clipped": share(worse, known["mask"]),
    }
    return gradient, stats | {"critic_norm": (float(gradient.norm()), 1)}


def metrics(o: Oracle, step: int) -> dict[str, float]:
    parts, sums = judged(o, step), {}
    for update in range(step * M, step * M + M):
        for name, (total, count) in lesson(o, update)[1].items():
            old = sums.get(name, (0.0, 0.0))
            sums[name] = old[0] + total, old[1] + count
    flat = {n: torch.cat([p[n][p["mask"] > 0] for p in parts]) for n in ("V", "came")}
    rows = [row for part in rollout(o, step) for row in part]
    earned = sum(row.reward for row in rows) - sum(
        float((p["rho"] * p["mask"]).sum()) for p in parts
    )
    found = {name: total / count for name, (total, count) in sums.items()}
    found["value"], found["kl_paid"] = float(flat["V"].mean()), earned / len(rows)
    found["explained_variance"] = 1 - float((flat["came"] - flat["V"]).var() / flat["came"].var())
    return found
