"""Small data sets, and a tokenizer that can read them."""

import json
from dataclasses import replace
from pathlib import Path

from common.data import Task, load_task
from grpo import Args


class Letters:
    """A stand-in for a text tokenizer without a chat template: one id per character."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
        return {"input_ids": [ord(character) for character in text]}


def load(task: str, tokenizer: object = None, **fields: object) -> Task:
    return load_task(replace(Args(task=task, eval_problems=2), **fields), tokenizer or Letters())


def write(path: Path, rows: list) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def numbered(count: int) -> list[dict]:
    return [{"prompt": f"question {i}?", "answer": i} for i in range(count)]


# A row of each named set, with its columns, and the answer in it
ROWS = {
    "gsm8k": ({"question": "How many?", "answer": "2 + 3 = <<2+3=5>>5,000.\n#### 5,000"}, "5000"),
    "math": ({"problem": "x?", "solution": r"\boxed1 so $\boxed{\frac{1}{2}}$."}, r"\frac{1}{2}"),
    "dapo-math-17k": ({"prompt": "Find x.", "solution": "34"}, "34"),
    "aime24": ({"problem": "Find x.", "answer": "025"}, "25"),
    "aime25": ({"problem": "Find x.", "answer": "70"}, "70"),
    "hmmt25": ({"problem": "Find x.", "answer": "103"}, "103"),
    "amc23": ({"question": "Find x.", "answer": 27.0}, "27"),
    "math500": ({"problem": "x?", "answer": r"\left( 3, \pi \right)"}, r"\left( 3, \pi \right)"),
    "minerva": ({"question": "Find x.", "answer": "1.2e-3"}, "1.2e-3"),
    "olympiadbench": ({"question": "Find x.", "final_answer": ["$2$"]}, "2"),
}
