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
# Nouns behind a number, and texts whose value is not the number in them
COUNTED = (
    "apples|students|marbles|sheep|women|children|geese|fish|slices of pizza|pairs of socks|"
    "boxes of pencils|toy cars|bus stops|red balls|positive integers|ordered pairs|real solutions|"
    "distinct ways|diagonals|prime numbers|lattice points|games|days of rain|gallons of milk|"
    "nickels|tickets sold|cookies left|people|manzanas|libros|pommes|élèves|Äpfel|Bücher|maçãs|"
    "яблок|个苹果|名学生|개|人"
)
CHANGED = (
    "42 hundred|42 thousand|42 million dollars|42 billion|42 lakh|42 crore rupees|42 dozen|"
    "42 dozen eggs|42 squared|42 cubed|42 factorial|42 halves|42 thirds|42 hundredths|"
    "42 and a half|42 or more|42 or fewer students|at least 42|at most 42|more than 42|"
    "fewer than 42 apples|up to 42|not 42|minus 42|negative 42|half of 42|twice 42|"
    "the square root of 42|42 less than x|42 below zero|42 mil|42 millones|42 Millionen|42 mille|"
    "42 тысяч|42万|42亿元|42以上|al menos 42|mindestens 42"
)


@pytest.mark.parametrize("paid", [1, 0])
def test_a_noun_is_dropped_and_what_changes_the_value_is_not(paid):
    """In a box and in a sentence."""
    texts = [f"42 {noun}" for noun in COUNTED.split("|")] if paid else CHANGED.split("|")
    responses = [f"The answer is {text}." for text in texts]
    responses += [rf"\boxed{{\text{{{text}}}}}" for text in texts]
    scores = Verifier(workers=2)(responses, ["42"] * 80)
    assert [text for text, score in zip(responses, scores) if score != paid] == []


@pytest.mark.parametrize("whose", ["public", pytest.param("ours", marks=pytest.mark.slow)])
def test_every_answer(whose):
    """Each line of answers.json is judged as it says, those with a `known` wrongly. Those whose
    source begins with "ours" were made up beside the rules, the others are of public threads."""
    rows = [row for row in ROWS if row["source"].startswith("ours") == (whose == "ours")]
    verifier = Verifier(workers=2)
    scores = verifier([row["response"] for row in rows], [row["reference"] for row in rows])
    surprises = []
    for row, score in zip(rows, scores):
        if score != (row["right"] ^ row.get("known", 0)):
            surprises.append(row)
    assert surprises == [] and verifier.killed == 0


def test_final_answer():
    """It does not depend on the reference, so a response has one answer."""
    assert {response: final_answer(response) for response in NAMED} == NAMED
