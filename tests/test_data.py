"""Tasks: the embedded one, local files, hub sets on local files of their schema; rows that are wrong are named."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import datasets
import pytest
from common.data import HUB, Task, load_task
from common.distributed import BadInput
from common.tiny import arithmetic
from grpo import Args


class Letters:
    """A stand-in for a text tokenizer without a chat template: one id per character."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
        return {"input_ids": [ord(character) for character in text]}


class Chat(Letters):
    chat_template = "yes"

    def apply_chat_template(self, chat: list, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return f"<user>{chat[0]['content']}<assistant>"


def load(task: str, tokenizer: object = None, **fields: object) -> Task:
    return load_task(replace(Args(task=task, eval_problems=2), **fields), tokenizer or Letters())


def write(path, rows: list) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def numbered(count: int) -> list[dict]:
    return [{"prompt": f"question {i}?", "answer": i} for i in range(count)]


def test_arithmetic_is_worked_left_to_right_modulo_100():
    assert arithmetic.work("7*8-9+6=") == (["7*8=56", "56-9=47", "47+6=53"], "53")
    assert arithmetic.work("3-9=")[1] == "94" and arithmetic.work("9*9*9=")[1] == "29"
    assert arithmetic.work("2+3*4=")[1] == "20"  # no precedence


def test_arithmetic_stream_is_seeded_and_disjoint_from_the_held_out_set(tiny):
    tokenizer = tiny[1]
    task, again, other = (load("arithmetic", tokenizer, eval_problems=200, seed=seed) for seed in (1, 1, 2))
    stream = [task.train(i).prompt for i in range(500)]
    assert stream == [again.train(i).prompt for i in range(500)] and task.train(7).prompt == stream[7]
    assert stream != [other.train(i).prompt for i in range(500)]
    held_out = [problem.prompt for problem in task.held_out]
    assert held_out == [problem.prompt for problem in other.held_out] and len(set(held_out)) == 200
    assert not any(arithmetic.held_out(prompt) for prompt in stream) and all(map(arithmetic.held_out, held_out))
    assert {len(prompt) // 2 for prompt in stream} == set(range(2, 8))
    assert all(task.judge([f"#{p.answer}"], [p.answer]) == [1.0] for p in task.held_out)


def test_warm_start_never_saw_the_held_out_set():
    """The script that makes the embedded model draws its demonstrations outside the held-out fifth."""
    import random

    from common.tiny.make import demonstration

    rng = random.Random(1)
    assert not any(arithmetic.held_out(demonstration(rng)[0]) for _ in range(300))


def test_local_file_without_split_holds_rows_back(tmp_path):
    """Each epoch is a permutation of the training rows; held-out rows are never among them, whatever the seed."""
    path = write(tmp_path / "sums.jsonl", numbered(10))
    task, other = load(path), load(path, seed=9)
    held_out = {problem.prompt for problem in task.held_out}
    assert held_out == {problem.prompt for problem in other.held_out} and len(held_out) == 2
    for epoch in range(3):
        seen = {task.train(epoch * 8 + i).prompt for i in range(8)}
        assert len(seen) == 8 and not seen & held_out
    assert [task.train(i).prompt for i in range(8)] != [task.train(8 + i).prompt for i in range(8)]
    assert [task.train(i).prompt for i in range(8)] != [other.train(i).prompt for i in range(8)]


def test_columns_templates_and_long_prompts(tmp_path):
    """Column flags; chat template or the plain prompt; over-long prompts are dropped and counted."""
    rows = [{"q": f"question {i}?", "a": i} for i in range(6)] + [{"q": "long " * 100, "a": 1}]
    path = write(tmp_path / "set.jsonl", rows)
    columns = {"prompt_column": "q", "answer_column": "a", "instruction": "Think.", "max_prompt_tokens": 60}
    task = load(path, **columns)
    assert task.dropped == 1
    text = "".join(map(chr, task.train(0).prompt_ids))
    assert text == f"Question: {task.train(0).prompt} Think.\nAnswer:"
    text = "".join(map(chr, load(path, Chat(), **columns).train(0).prompt_ids))
    assert text.startswith("<user>question") and text.endswith("? Think.<assistant>")


def test_parquet(tmp_path):
    path = tmp_path / "set.parquet"
    datasets.Dataset.from_list(numbered(6)).to_parquet(path)
    assert {problem.answer for problem in load(str(path)).held_out} < {str(i) for i in range(6)}


ROWS = {
    "gsm8k": ({"question": "How many?", "answer": "2 + 3 = <<2+3=5>>5,000.\n#### 5,000"}, "5000"),
    "math": ({"problem": "Find x.", "solution": r"\boxed{1} so $\boxed{\frac{1}{2}}$."}, r"\frac{1}{2}"),
    "dapo-math-17k": ({"prompt": "Find x.", "solution": "34"}, "34"),
    "aime24": ({"problem": "Find x.", "answer": "025"}, "25"),
    "aime25": ({"problem": "Find x.", "answer": "70"}, "70"),
    "amc23": ({"question": "Find x.", "answer": 27.0}, "27"),
    "math500": (
        {"problem": "Find x.", "answer": r"\left( 3, \frac{\pi}{2} \right)"},
        r"\left( 3, \frac{\pi}{2} \right)",
    ),
    "minerva": ({"question": "Find x.", "answer": "1.2e-3"}, "1.2e-3"),
    "olympiadbench": ({"question": "Find x.", "final_answer": ["$2$"]}, "2"),
}


@pytest.mark.parametrize("name", HUB)
def test_hub_sets_on_local_rows_of_their_schema(tmp_path, name):
    """Every named set reads its own columns, and the judge accepts the reference answer."""
    row, answer = ROWS[name]
    task = load(f"{name}:{write(tmp_path / 'local.jsonl', [row] * 5)}")
    assert task.train(0).answer == answer and task.train(0).prompt == next(iter(row.values()))
    assert task.judge([rf"Thus \boxed{{{answer}}}."], [answer]) == [1.0]


def test_hub_sets_load_by_name(monkeypatch):
    """The hub call itself: path, config and splits as declared; a test split is used for evaluation only."""
    calls = []

    def load_dataset(path: str, config: str | None, split: str) -> list[dict]:
        calls.append((path, config, split))
        return [{"question": f"{split} {i}", "answer": f"#### {i}"} for i in range(4)]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load("gsm8k")
    assert calls == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert {p.prompt[:5] for p in task.held_out} == {"test "} and {task.train(i).prompt[:6] for i in range(4)} == {
        "train "
    }


def test_eval_task_is_another_set(tmp_path):
    train, held_out = write(tmp_path / "a.jsonl", numbered(4)), write(tmp_path / "b.jsonl", numbered(50)[40:])
    task = load(train, eval_task=held_out, eval_problems=10)
    assert len({task.train(i).prompt for i in range(4)}) == 4 and len(task.held_out) == 10


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*numbered(2), "{not json"], "set.jsonl:3: not a JSON object"),
        ([*numbered(2), [1, 2]], "set.jsonl:3: needs the columns"),
        ([{"prompt": "x"}], "set.jsonl:1: needs the columns 'prompt' .* and 'answer'"),
        ([{"prompt": 7, "answer": 7}], "set.jsonl:1: 'prompt' must be a text"),
        ([{"prompt": " ", "answer": 7}], "set.jsonl:1: 'prompt' must be a text"),
        ([{"prompt": "x", "answer": None}], "set.jsonl:1: .*'answer' must not be empty"),
        ([], "no training problem left of 0"),
        (numbered(2), "no training problem left of 2"),
        ([*numbered(2), "\xff".encode("latin1").decode("latin1")], "set.jsonl:3"),
    ],
)
def test_malformed_rows_are_named(tmp_path, rows, message):
    with pytest.raises(BadInput, match=message):
        load(write(tmp_path / "set.jsonl", rows))


def test_unreadable_answers_are_named(tmp_path):
    with pytest.raises(BadInput, match="local.jsonl:1: 'solution' cannot be read.*boxed"):
        load("math:" + write(tmp_path / "local.jsonl", [{"problem": "Find x.", "solution": "it is 7"}]))
    with pytest.raises(BadInput, match="set.parquet: not a parquet file"):
        load(write(tmp_path / "set.parquet", ["text"]))


def test_unknown_tasks_and_missing_packages_are_named(monkeypatch, tiny):
    with pytest.raises(BadInput, match="--task aritmetic: unknown, use one of arithmetic"):
        load("aritmetic")
    with pytest.raises(BadInput, match="--task nowhere.jsonl: no such file"):
        load("nowhere.jsonl")
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(BadInput, match="pip install reasoning-gym"):
        load("reasoning_gym:chain_sum")


def test_a_model_that_cannot_read_the_task_is_named(tmp_path, tiny):
    """The embedded tokenizer knows no letters."""
    with pytest.raises(BadInput, match="--model.*cannot write the prompt"):
        load(write(tmp_path / "set.jsonl", numbered(5)), tiny[1])


def test_reasoning_gym(monkeypatch):
    """Its questions, its own score, indices as references, held-out indices apart (a stand-in with its interface)."""

    class Rows:
        def __getitem__(self, index: int) -> dict:
            return {"question": f"{index}?", "answer": str(index), "metadata": {}}

        def score_answer(self, answer: str | None, entry: dict) -> float:
            return 1.0 if answer == entry["answer"] else 0.01

    def extract_answer(text: str) -> str | None:
        return text.partition("<answer>")[2].partition("</answer>")[0] or None

    gym = SimpleNamespace(
        create_dataset=lambda name, size, seed: Rows(), utils=SimpleNamespace(extract_answer=extract_answer)
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    task = load("reasoning_gym:chain_sum")
    problem = task.train(3)
    assert task.judge([f"<answer>{problem.answer}</answer>", "no"], [problem.answer] * 2) == [1.0, 0.01]
    assert {p.answer for p in task.held_out} == {"999999", "999998"}
