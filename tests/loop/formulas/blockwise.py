"""Blockwise advantages."""

from statistics import fmean

from tests.loop.oracle import Batch, G, Oracle, Row, Tensor, clipped
from tests.loop.oracle import response_mean, right_answer, torch

FLAGS = {"grad_clip": 3.0}
ALSO = [{"baseline": "batch"}]
OFF = {"baseline": "group"}


def judge(text: str, answer: str) -> float:
    """Marks for the working's steps, at four answers of five, and for the answer."""
    working, _, final = text.rpartition("#")
    return 0.2 * min(working.count("="), 2) * (int(answer) % 5 != 4) + 0.5 * (final == answer)


def blocks(row: Row) -> tuple[int, float, float]:
    """The working's number of tokens, its marks, and the answer's."""
    text, right = row.text, right_answer(row.prompt)
    end = text.rfind("#") + 1 or len(text)  # a token is a letter
    return end, judge(text[:end], right), judge("#" + text[end:], right)


def prepare(o: Oracle, step: int, b: Batch) -> None:
    """Each token's advantage: in the working against the group, in the answer as --baseline
    says."""
    whole = fmean(blocks(row)[2] for row in o.rows(step))
    b.working, found = torch.zeros_like(b.mask), []
    for i, row in enumerate(b.rows):
        end, working, answer = blocks(row)
        b.working[i, :end] = 1.0
        group = [blocks(sibling)[1:] for sibling in b.rows[i - i % G : i - i % G + G]]
        alike = fmean(last for first, last in group if first == working)
        baseline = whole if o.args["baseline"] == "batch" else alike
        found.append((working - fmean(first for first, _ in group), answer - baseline))
    b.working_A, b.A = torch.tensor(found, dtype=torch.float64).T


def objective(b: Batch) -> Tensor:
    """Each block's mean, added up."""
    J, answer = 0.0, (1 - b.working) * b.mask
    for block, A in ((b.working, b.working_A), (answer, b.A)):
        some = block.sum(1) > 0
        share = some.double().mean()
        J = J + share * response_mean(clipped(b.r, A[:, None], b.args)[some], block[some])
    return J
