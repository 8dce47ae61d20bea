"""A tool between the turns of a response: calls that fail, and a whole run. (checks/ tests the
losses on a batch with the holes that replies leave: `busy_batch`.)"""

import json
import sys
from dataclasses import replace

import pytest
from common.data import load_task
from common.launch import launch
from common.tasks.sources import source_for
from tools import evaluate
from variants import tool

from tests.helpers import SMALL, metrics, run_here

TASK = """
from common.tiny import arithmetic
from variants import tool
PROMPTS = [f"{a}*{b}-{c}=" for a in range(2, 9) for b in range(2, 9) for c in range(2, 9)]
held_out = [(prompt, arithmetic.work(prompt)[1]) for prompt in PROMPTS[::9]]
bounds = {"seconds": 1, "workers": 1}
reward = arithmetic.arithmetic_reward
def train(i):
    prompt = PROMPTS[i * 101 % len(PROMPTS)]
    return prompt, arithmetic.work(prompt)[1]
def reply(response, answer):
    if response == "loop":
        while True: pass
    if "6" in response and response.endswith("="): return 7  # no text: the call fails
    return tool.calculator(response)
"""


@pytest.fixture
def task_file(tmp_path):
    (tmp_path / "calls.py").write_text(TASK)
    return str(tmp_path / "calls.py")


def test_a_reply_that_fails_costs_its_own_call_alone(task_file):
    """A reply runs in the bounded worker of a reward. If it returns no text or takes too long, the
    next one is asked as always."""
    reply = source_for(tool.Args(task=task_file), False, bool).reply
    replies = reply(["1+2=", "6=", "1+2=#3", "loop", "2*8="], ["3"] * 5)
    assert [text for text, _ in replies] == ["3", 0.0, None, 0.0, "16"]
    assert "7 is no text" in replies[1][1] and "out of time" in replies[3][1]
    assert not any(replies[i][1] for i in (0, 2, 4))


def test_held_out_problems_with_equal_prompts_keep_their_answers(tiny, world):
    args = tool.Args(rollout="hf", dtype="float32", eval_problems=2)
    task = load_task(args, tiny[1])
    first, second = task.held_out
    task.held_out[1] = replace(second, prompt_ids=list(first.prompt_ids))
    received = []
    task.reply = lambda texts, answers: received.extend(answers) or [(None, "") for _ in texts]
    tool.Turns(args, tiny[0], task, world).generate([p.prompt_ids for p in task.held_out], 1, 64, 0)
    assert first.answer != second.answer and received == [first.answer, second.answer]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["reply", "end", "drop"])
def test_a_run_with_failing_calls(task_file, tmp_path, rule, monkeypatch):
    """Calls fail, and the run still ends. samples.jsonl says which tokens the tool wrote, and
    tools.evaluate measures what the run did."""
    folder = tmp_path / "run"
    flags = [*SMALL, "--task", task_file, "--failed_call", rule, "--steps", 2]
    assert run_here(tool.main, *flags, "--run_dir", folder) == 0
    lines = metrics(folder)
    assert all(line["calls"] > line["called"] * line["failed"] > 0 for line in lines[1:])
    rows = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    responses = [response for row in rows for response in row.get("responses", [])]
    some = [response for response in responses if "mask" in response]
    assert some and len(some) < len(responses)
    for response in some:
        mask, weight = response["mask"], response["weight"]
        assert len(mask) == len(weight) == len(response["ids"]) and mask[-1] == 1
        assert not any(w for w, sampled in zip(weight, mask) if not sampled)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(folder)])
    launch(evaluate.main, evaluate.Args, evaluate.prepare)
    (measured,) = folder.glob("evaluation-*")
    scores = [json.loads(line) for line in measured.read_text().splitlines()]
    greedy = [row["scores"][0] for row in scores if not row["temperature"]]
    assert sum(greedy) / len(greedy) == lines[-1]["greedy"]


def test_a_task_without_a_reply_is_one_line(capsys, tmp_path):
    (tmp_path / "plain.py").write_text(TASK.replace("def reply", "def other"))
    assert run_here(tool.main, "--task", tmp_path / "plain.py") == 2
    assert "has no reply(response, answer)" in capsys.readouterr().err
