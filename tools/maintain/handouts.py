"""Write the questions of docs/questions.md on one sheet of paper, for a class.

    python -m tools.maintain.handouts    writes docs/questions-sheet.html

The questions are on its front, the first sentences of their answers on its back.
"""

import html
import re

from checks.files import ROOT
from tools import arguments

ANSWERED = re.compile(
    r"^### \d+\. (.+?)\n\n<details>.*?\n\n\*\*(.+?)\*\*", re.MULTILINE | re.DOTALL
)
SHEET = """\
<!doctype html><html lang="en"><meta charset="utf-8"><title>Questions: one sheet</title>
<style>
@page {{ size: A4; margin: 13mm 15mm; }}
body {{ font: 10.5pt/1.3 Georgia, serif; max-width: 180mm; margin: 1em auto; }}
h1 {{ font-size: 14pt; margin: 0 0 0.4em; }}
li {{ margin: 0 0 0.29em; padding-left: 0.3em; }}
#questions li {{ margin-bottom: 4.4mm; }}
#answers {{ break-before: page; font-size: 9.2pt; line-height: 1.22; }}
@media screen {{ body {{ padding: 0 1em; }} #answers {{ margin-top: 3em; }} }}
</style>
<h1>Twenty-eight questions on reinforcement learning of language models</h1>
<ol id="questions">{questions}</ol>
<section id="answers"><h1>The first sentence of each answer (docs/questions.md has the rest)</h1>
<ol>{answers}</ol></section></html>
"""


def sheet() -> str:
    """The page that prints on both sides of one sheet."""
    found = ANSWERED.findall((ROOT / "docs" / "questions.md").read_text("utf-8"))
    questions = "\n".join(f"<li>{html.escape(question)}" for question, _ in found)
    answers = "\n".join(f"<li>{html.escape(answer)}" for _, answer in found)
    return SHEET.format(questions=questions, answers=answers)


def main() -> None:
    (ROOT / "docs" / "questions-sheet.html").write_text(sheet(), encoding="utf-8")


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    main()
