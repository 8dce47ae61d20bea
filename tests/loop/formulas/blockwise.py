"""Blockwise advantages."""

from tests.loop.oracle import EOS, VOCABULARY, Batch, G, M, Oracle, Row, Tensor, clipped_surrogate
from tests.loop.oracle import right_answer, share, torch

FLAGS = {"grad_clip": 3.0}
OFF = {"baseline": "group"}


def judge(text: str, answer: str) -> float:
    """Marks for the working's steps, at four answers of five, and for the answer."""
    working, _, final = text.rpartition("#")
    return 0.2 * min(working.count("="), 2) * (int(answer) % 5 != 4) + 0.5 * (final == answer)


def blocks(row: Row) -> tuple[int, float, float]:
    """The working's number of tokens, its marks, and the answer's."""
    symbols = [VOCABULARY[token] for token in row.tokens if token != EOS]
    end = max([i for i, symbol in enumerate(symbols, 1) if symbol == "#"], default=len(row.tokens))
    right = right_answer(row.prompt)
    texts = "".join(symbols[:end]), "#" + "".join(symbols[end:])
    return end, *(judge(text, right) for text in texts)


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def prepare(o: Oracle, step: int, b: Batch) -> None:
    """Each block's advantage: the working's against its group, the answer's as --baseline says."""
    rollout = [row for part in range(M) for _, group in o.groups(step, part) for row in group]
    batch, found, b.marks, b.alone = mean([blocks(row)[2] for row in rollout]), [], [], []
    b.working = torch.zeros_like(b.mask)
    for i, row in enumerate(b.rows):
        end, first, second = blocks(row)
        b.working[i, :end] = 1.0
        group = [blocks(sibling)[1:] for sibling in b.rows[i - i % G : i - i % G + G]]
        alike = [answer for working, answer in group if working == first]
        baselines = {"none": 0.0, "batch": batch, "group": mean([x for _, x in group])}
        baselines["outcome"] = mean(alike)
        found.append((first - mean([x for x, _ in group]), second - baselines[o.args["baseline"]]))
        b.marks.append((first, second))
        b.alone.append(len(alike) == 1)
    b.working_A, b.A = torch.tensor(found, dtype=torch.float64).T


def objective(b: Batch) -> tuple[Tensor, dict]:
    J, beyond = 0.0, torch.zeros_like(b.mask).bool()
    tokens_A = b.working * b.working_A[:, None] + (1 - b.working) * b.A[:, None]
    for block, A in ((b.working, b.working_A), ((1 - b.working) * b.mask, b.A)):
        part = Batch(**(vars(b) | {"A": A}))
        surrogate, out = clipped_surrogate(part, b.args["clip_low"], b.args["clip_high"])
        beyond |= out & (block > 0)
        J = J + ((surrogate * block).sum(1) / block.sum(1).clip(min=1)).mean()
    stats = {
        "clip_share": share(beyond, b.mask),
        "clip_above": share(beyond & (tokens_A > 0), b.mask),
    }
    stats["clip_below"] = share(beyond & (tokens_A < 0), b.mask)
    n, (first, second) = len(b.rows), zip(*b.marks)
    stats["advantages_apart"] = float((b.working_A - b.A).abs().sum()), n
    stats |= {"working_reward": (sum(first), n), "answer_reward": (sum(second), n)}
    return J, stats | {"alone": (sum(b.alone), n)}
