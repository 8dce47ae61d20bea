"""Right answers are paid and wrong ones are not, in the many ways in which people write them."""

import json

import pytest
from common.tasks.reward import Verifier

from tests.helpers import ROOT, scored

ROWS = json.loads((ROOT / "tests/common/answers.json").read_text("utf-8"))


@pytest.mark.parametrize("whose", ["public", pytest.param("ours", marks=pytest.mark.slow)])
def test_every_answer(whose):
    """Lines of answers.json with a `known` are judged wrongly. Those with a source that begins with
    "ours" were made up along with the rules, the others are from public threads."""
    rows = [row for row in ROWS if row["source"].startswith("ours") == (whose == "ours")]
    texts, references = ([row[name] for row in rows] for name in ("response", "reference"))
    verdicts = Verifier(workers=2)(texts, references)
    surprises = []
    for row, score in zip(rows, scored(verdicts)):
        if score != (row["right"] ^ row.get("known", 0)):
            surprises.append(row)
    assert surprises == [] and not any(verdict.failure for verdict in verdicts)
