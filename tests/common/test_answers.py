"""Right answers are paid and wrong ones are not, in the many ways in which people write them."""

import json

import pytest
from common.tasks.answers import final_answer
from common.tasks.reward import Verifier

from tests.helpers import ROOT

ROWS = json.loads((ROOT / "tests/common/answers.json").read_text("utf-8"))
NAMED = {  # response: its final answer
    r"\boxed{7} no wait, \boxed {12}": "12",
    r"\boxed{12}. I put the final answer in \boxed{}.": "12",
    r"7 is it. \boxed{8": "",
    r"so $\boxed 9$.": "9",
    r"<think>\boxed{5}</think> The answer is 7.": "7",
    r"<think>\boxed{5}": "",
    "<think>5</think><answer> 12.5 </answer>": "12.5",
    "The answer is 12, since 5 + 7 = 12.": "12",
    "I think 7. No: 8": "8",
    "Final answer: **C**": "C",
    r"\boxed{" + "7" * 10**6 + "}": "",
}


@pytest.mark.parametrize("whose", ["public", pytest.param("ours", marks=pytest.mark.slow)])
def test_every_answer(whose):
    """Each line of answers.json is judged as it says; lines with a `known` are judged wrongly.
    Lines whose source begins with "ours" were made up along with the rules, the others are from
    public threads."""
    rows = [row for row in ROWS if row["source"].startswith("ours") == (whose == "ours")]
    verifier = Verifier(workers=2)
    scores = verifier([row["response"] for row in rows], [row["reference"] for row in rows])
    surprises = []
    for row, score in zip(rows, scores):
        if score != (row["right"] ^ row.get("known", 0)):
            surprises.append(row)
    assert surprises == [] and verifier.killed == 0


def test_final_answer():
    """The final answer does not depend on the reference, so a response has only one."""
    assert {response: final_answer(response) for response in NAMED} == NAMED
