"""Sums with a calculator as a tool (variants/tool.py), for models whose chat template is ChatML."""

import random
import re

ASK = "What is {} {} {}? Call the calculator, then answer."
EXAMPLE = [
    {"role": "user", "content": ASK.format(17, "*", 23)},
    {"role": "assistant", "content": "<calc>17 * 23</calc>"},
    {"role": "tool", "content": "391"},
    {"role": "assistant", "content": "The answer is 391"},
]
REPLY = "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"  # ChatML: Qwen, SmolLM2
reply_error = REPLY.format("error")  # what the model reads if the tool fails


def calculate(a, sign, b):
    return {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]


def train(i):
    rng = random.Random(i)
    terms = rng.randrange(10, 100), rng.choice("+-*"), rng.randrange(10, 100)
    return [*EXAMPLE, {"role": "user", "content": ASK.format(*terms)}], str(calculate(*terms))


held_out = [train(-i) for i in range(1, 65)]


def reply(response, answer):  # what the tool writes after the response so far; None: it is over
    call = re.search(r"<calc>\s*(\d+) *([-+*]) *(\d+)\s*</calc>\s*$", response)
    return REPLY.format(calculate(*call.groups())) if call else None


def reward(response, answer):
    return float(response.rpartition("The answer is ")[2].strip(" .\n") == answer)
