"""Right answers are paid and wrong ones are not, in the many ways in which people write them."""

import json
import re

import pytest
from common.tasks.answers import final_answer
from common.tasks.reward import Verifier

from tests.helpers import ROOT, scored

ROWS = json.loads((ROOT / "tests/common/answers.json").read_text("utf-8"))
NAMED = {  # response: its final answer
    r"\boxed{7} no wait, \boxed {12}": "12",
    r"\boxed{12}. I put the final answer in \boxed{}.": "12",
    r"\boxed{12}? No: \boxed{}": "",
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


PARTS = r"""
-\boxed{5} | $2\boxed{5}$ | \boxed{5}^2 | \boxed{5} \times 10^3 | $\boxed{5}!$ | \frac{\boxed{5}}{2}
\sqrt{\boxed{5}} | $f(\boxed{5})$ | $(3, \boxed{5})$ | $x\boxed{5}$ | 3 - \boxed{5} | not \boxed{5}
\boxed{4}\boxed{5} | \boxed{5}\text{ million} | \begin{pmatrix}\boxed{5}\\2\end{pmatrix}
"""
WHOLE = r"""
$x = \boxed{5}$. | - \boxed{5} | **Answer - \boxed{5}** | $2 + 3 = 5$, so \boxed{5}! | (\boxed{5})
$\boxed{5}\%$ | $\boxed{5}^\circ$ | \boxed{5} \text{ cm}^2 | \$\boxed{5}$ | \text{\boxed{5}}
$\begin{aligned}x &= 2 + 3\\ &= \boxed{5}\end{aligned}$ | $\Rightarrow\boxed{5}$
2 + 3 = 5 \boxed{5} | \boxed{5} (since 2 + 3 = 5) | 答案是\boxed{5}。
"""
# A thought, as families of models mark it, and an answer after it
THOUGHTS = {
    "<think>": "</think>",
    "<Thought>": "</Thought>",
    "<seed:think>": "</seed:think>",
    "<my_reasoning>": "</my_reasoning>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought\n": "<channel|>",
    "<|channel|>analysis<|message|>": "<|end|><|start|>assistant<|channel|>final<|message|>",
}


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


def test_final_answer():
    """The final answer does not depend on the reference, so a response has only one."""
    assert {response: final_answer(response) for response in NAMED} == NAMED


def test_a_box_in_a_larger_expression_is_no_answer():
    """A box is one between words, relations and the ends of a formula, with at most a unit."""
    for texts, answer in ((PARTS, ""), (WHOLE, "5")):
        for text in re.split(r" \| |\n", texts.strip()):
            assert (text, final_answer(text)) == (text, answer)
    assert final_answer("\\[\n\\boxed{5}\n\\cdot 3\n\\]") == ""
    assert final_answer("2 + 3 = 5\n\\boxed{5}\n- checked") == "5"


@pytest.mark.parametrize("opening", THOUGHTS)
def test_thoughts_of_all_families_give_no_answer(opening):
    """It may be closed, opened by the prompt or never closed, and may hold another one."""
    closing = THOUGHTS[opening]
    closed = rf"so \boxed{{5}}{closing}"
    assert final_answer(rf"{opening}{closed}\boxed{{6}}") == "6"
    assert final_answer(rf"{closed}\boxed{{6}}") == "6"
    assert final_answer(rf"{opening}so <reflection>hm</reflection> \boxed{{5}}") == ""
