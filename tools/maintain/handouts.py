"""Write what a class is given: the notebook, and the questions on one sheet of paper.

    python -m tools.maintain.handouts    writes labs/class.ipynb and docs/questions-sheet.html

The sheet is made of docs/questions.md: the questions on its front, the first sentences of their
answers on its back.
"""

import html
import json
import re

from checks.files import ROOT
from tools import arguments

INTRODUCTION = """\
# Reinforcement learning of a language model, in five cells

Run the cells from top to bottom; a machine without a GPU is enough. While cell 3 runs, read
`nano.py`: GRPO on one page. Outside of Colab, install requirements-cpu.txt instead of cell 2.
Nothing can be installed? Then download `docs/explorer.html`, `docs/page-healthy.html` and
`docs/page-collapse.html` and open them in a browser."""
CELLS = [
    """\
# 1. The repository. Write the address where you found this notebook.
ADDRESS = "https://github.com/OWNER/REPOSITORY"
!git clone -q --depth 1 {ADDRESS} rl
%cd rl""",
    """\
# 2. Two packages (Colab has the others; transformers only if it is of another version)
%pip install -q tyro math-verify "transformers>=5.16.1,<5.20" """.rstrip(),
    """\
# 3. A run: 40 training steps, about two minutes
!python grpo.py --steps 40 --run_dir runs/class""",
    """\
# 4. Its page: every token, coloured by its weight on the gradient
!python -m tools.page runs/class
from html import escape
from IPython.display import HTML
page = escape(open("runs/class/page.html", encoding="utf-8").read())
HTML(f'<p><iframe srcdoc="{page}" width="100%" height="800"></iframe>')""",
    """\
# 5. An exercise: open rl/mine/grpo.py in the list of files on the left. Write `advantages` and
# `policy_loss`, save the file, and run this cell again.
!mkdir -p mine; [ -e mine/grpo.py ] || python -m labs.blank grpo > mine/grpo.py
!python -m labs.grade mine/grpo.py --hint""",
]
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


def notebook() -> str:
    """The notebook as JSON: an introduction and five cells."""
    cells = [{"cell_type": "markdown", "id": "0", "metadata": {}, "source": INTRODUCTION}]
    for number, source in enumerate(CELLS, 1):
        cell = {"cell_type": "code", "id": str(number), "metadata": {}, "source": source}
        cells.append(cell | {"execution_count": None, "outputs": []})
    kernel = {"name": "python3", "display_name": "Python 3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def sheet() -> str:
    """The page that prints on both sides of one sheet."""
    found = ANSWERED.findall((ROOT / "docs" / "questions.md").read_text("utf-8"))
    questions = "\n".join(f"<li>{html.escape(question)}" for question, _ in found)
    answers = "\n".join(f"<li>{html.escape(answer)}" for _, answer in found)
    return SHEET.format(questions=questions, answers=answers)


def main() -> None:
    """Write both files."""
    (ROOT / "labs" / "class.ipynb").write_text(notebook(), encoding="utf-8")
    (ROOT / "docs" / "questions-sheet.html").write_text(sheet(), encoding="utf-8")


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    main()
