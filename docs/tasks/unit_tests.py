"""Python functions that must pass unit tests, each in a process of its own. A row of code.jsonl, in
the folder of this file, is

    {"prompt": "Write a Python function add(a, b).", "tests": ["assert add(1, 2) == 3"]}
"""

import json
import subprocess
import sys
from pathlib import Path

bounds = {"seconds": 30}  # for all tests of an answer
file = Path(__file__).with_name("code.jsonl")  # in the folder of this file
lines = [json.loads(line) for line in file.open()]
rows = [(line["prompt"], line["tests"]) for line in lines]
held_out, trained = rows[:100], rows[100:]


def train(i):
    return trained[i % len(trained)]


def passes(program):
    words = [sys.executable, "-I", "-c", program]
    try:
        return subprocess.run(words, timeout=5, capture_output=True, cwd="/").returncode == 0
    except subprocess.TimeoutExpired:
        return False


def reward(response, tests):
    code = response.partition("```python")[2].partition("```")[0] or response
    return sum(passes(f"{code}\n{test}") for test in tests) / len(tests)
