"""PPO: GAE as a double sum, and the critic that main's second optimiser was given."""

from tests.loop.oracle import Batch, M, Oracle, Row, Tensor, clipped, flat, log_probs, padded
from tests.loop.oracle import token_mean, tokens_of, torch

FLAGS = {"critic_warmup": 0, "critic_lr": 3e-3, "gamma": 0.95, "lam": 0.8, "lam_critic": 0.9}
FLAGS |= {"beta": 0.1, "value_clip": 0.05, "grad_clip": 4.0}
ALSO = [{"lam_length": 0.3}]
STORED = {"critic_lr": 1e-12, "critic_warmup": 0}  # the policy learns in the one step
SMALL = ["--critic_warmup", "1"]
OFF = {"lam": 1.0}


def values(o: Oracle, update: int, rows: list[Row]) -> tuple[Tensor, list[Tensor]]:
    """V `[n, T]` of the critic before its update, and the parameters that it depends on."""
    *backbone, head = o.records[0].lessons[update]["parameters"]
    lm, head = o.lm(backbone).model, head.double().requires_grad_()
    hidden = lm(padded([row.ids for row in rows], 0)).last_hidden_state  # [n, S, H]
    found = []
    for i, row in enumerate(rows):
        found.append(hidden[i, len(row.context) - 1 : len(row.ids) - 1] @ head[0])
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True), [*lm.parameters(), head]


def paid(o: Oracle, step: int, rows: list[Row]) -> Tensor:
    """ρ `[n, T]`: the KL to the reference at every token, the reward at the last."""
    with torch.no_grad():
        old, ref = (log_probs(o.lm(o.updates[at]["parameters"]), rows)[0] for at in (step * M, 0))
    found = -o.args["beta"] * (old - ref)
    for i, row in enumerate(rows):
        found[i, len(row.tokens) - 1] += row.reward
    return found


def gae(o: Oracle, rho: Tensor, V: Tensor, rows: list[Row], lam: float) -> Tensor:
    """Â_t = Σ_l (γλ)^l δ_{t+l} `[n, T]`; λ of the length for 0."""
    gamma, found = o.args["gamma"], torch.zeros_like(V)
    for i, row in enumerate(rows):
        n = len(row.tokens)
        mine = lam or max(0.0, 1 - 1 / (o.args["lam_length"] * n))
        after = [*V[i, 1:n].tolist(), 0.0]
        delta = [float(rho[i, t]) + gamma * after[t] - float(V[i, t]) for t in range(n)]
        for t in range(n):
            found[i, t] = sum((gamma * mine) ** k * delta[t + k] for k in range(n - t))
    return found


def judged(o: Oracle, step: int) -> list[dict]:
    """Of each mini-batch: its rows, V_old, V̂, Â (whitened over all), and the mask."""
    known = vars(o).setdefault("judged", {})
    if step in known:
        return known[step]
    parts = []
    for number in range(M):
        rows = [row for group in o.groups(step, number) for row in group]
        V, rho = values(o, step * M, rows)[0].detach(), paid(o, step, rows)
        mask = padded([[1.0] * len(row.tokens) for row in rows]).double()
        A = gae(o, rho, V, rows, 0 if o.args["lam_length"] else o.args["lam"])
        target = (V + gae(o, rho, V, rows, o.args["lam_critic"])) * mask
        parts.append({"rows": rows, "V": V, "mask": mask, "A": A, "target": target})
    every = torch.cat([part["A"][part["mask"] > 0] for part in parts])
    for part in parts:
        part["A"] = (part["A"] - every.mean()) / every.std() * part["mask"]
    known[step] = parts
    return parts


def prepare(o: Oracle, step: int, b: Batch) -> None:
    (part,) = (part for part in judged(o, step) if part["rows"] == b.rows)
    b.A, b.tokens_A = part["A"][:, 0], part["A"]


def objective(b: Batch) -> Tensor:
    return token_mean(clipped(b.r, b.tokens_A, b.args), tokens_of(b, b.mask))


def lesson(o: Oracle, update: int) -> Tensor:
    """The flat gradient of the mean value loss."""
    step, part = divmod(update, M)
    known = judged(o, step)[part]
    V, parameters = values(o, update, known["rows"])
    reach = o.args["value_clip"]
    near = known["V"] + (V - known["V"]).clip(-reach, reach)
    error = torch.maximum((V - known["target"]) ** 2, (near - known["target"]) ** 2) / 2
    return flat(torch.autograd.grad(token_mean(error, known["mask"]), parameters))
