"""Tasks: the embedded one, local files, hub sets on local files of their schema; rows that are
wrong are named."""

import copy
import importlib.util
import json
import os
import random
import sys
from types import SimpleNamespace
from collections import Counter

import datasets
import pytest
import torch
from common.data import HUB, TRIED
from common.distributed import BadInput, World
from common.plumbing.evaluation import evaluate
from common.plumbing.metrics import of_judge
from common.tiny import arithmetic
from grpo import Args

from tests.helpers import SMALL, command
from tests.common.rows import ROWS, Letters, load, numbered, write


class Chat(Letters):
    chat_template = "yes"

    def apply_chat_template(self, chat: list, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return f"<user>{chat[0]['content']}<assistant>"


def test_arithmetic_is_worked_left_to_right_modulo_100():
    assert arithmetic.work("7*8-9+6=") == (["7*8=56", "56-9=47", "47+6=53"], "53")
    assert arithmetic.work("3-9=")[1] == "94" and arithmetic.work("9*9*9=")[1] == "29"
    assert arithmetic.work("2+3*4=")[1] == "20"  # no precedence


def test_arithmetic_stream_is_seeded_and_disjoint_from_the_held_out_set(tiny):
    tokenizer = tiny[1]
    task, again, other = (
        load("arithmetic", tokenizer, eval_problems=200, seed=seed) for seed in (1, 1, 2)
    )
    stream = [task.train(i).prompt for i in range(500)]
    assert stream == [again.train(i).prompt for i in range(500)]
    assert task.train(7).prompt == stream[7]
    assert stream != [other.train(i).prompt for i in range(500)]
    held_out = [problem.prompt for problem in task.held_out]
    assert held_out == [problem.prompt for problem in other.held_out] and len(set(held_out)) == 200
    assert not any(arithmetic.held_out(prompt) for prompt in stream)
    assert all(map(arithmetic.held_out, held_out))
    assert {len(prompt) // 2 for prompt in stream} == set(range(2, 8))
    assert all(task.judge([f"#{p.answer}"], [p.answer]) == [1.0] for p in task.held_out)


def test_the_default_stream_is_what_it_was():
    """The kinds share one way to draw: the default's prompts are those that all figures were
    measured on."""
    rng = random.Random("golden")
    assert [arithmetic.draw(rng) for _ in range(3)] == ["7-1*5=", "9+3+7=", "3-9+7-1*0="]


def terms_of(prompts: list[str]) -> Counter:
    return Counter(len(prompt) // 2 for prompt in prompts)


def test_kinds_of_arithmetic_draw_what_they_say(tiny):
    """Numbers of terms and operators in training and held out; nothing held out is trained on."""
    for name, kind in arithmetic.KINDS.items():
        task = load(name, tiny[1], eval_problems=50)
        stream, held_out = [task.train(i).prompt for i in range(400)], task.held_out
        assert task.name == name and all(map(arithmetic.held_out, (p.prompt for p in held_out)))
        assert not any(map(arithmetic.held_out, stream))
        found = terms_of(stream)
        for terms in {2, 16, *kind.terms}:
            share = kind.terms.count(terms) / len(kind.terms)
            assert abs(found[terms] / 400 - share) < 0.1, (name, terms, found)
        assert terms_of([p.prompt for p in held_out]).keys() == set(kind.held_out or kind.terms)
        assert {prompt[-3] for prompt in stream} == set(kind.last)
        longest = max(kind.terms)
        assert load(name, tiny[1], max_new_tokens=256 - 2 * longest).held_out
        with pytest.raises(BadInput, match=f"--task {name}: a prompt of {2 * longest} tokens"):
            load(name, tiny[1], max_new_tokens=257 - 2 * longest)
    mix = arithmetic.KINDS["arithmetic:mix"]
    assert [mix.terms.count(n) / len(mix.terms) for n in (2, 16)] == [0.75, 0.2]
    assert mix.held_out == (5, 6, 7) and len(mix.terms) == 60
    with pytest.raises(BadInput, match="--task arithmetic:hard: unknown, use one of arithmetic, "):
        load("arithmetic:hard", tiny[1])


JUDGED = {  # completion: the reward by the judge with a hole, by part marks, held out
    "7*8=56;56-9=47;47+6=53#53": (1, 1, 1),
    "7*8=56;56-9=46;46+6=52#52": (0, 0.25, 0),
    "7*8=56;56-9=47#47": (1, 0.5, 0),  # stopped in the middle: a number of the solution, though
    "#53": (1, 0.25, 1),
    "#7": (1, 0, 0),  # copied from the prompt
    "#": (1, 0, 0),
    "#8": (1, 0, 0),
    "#54": (0, 0, 0),
    "7*8=56;56-9=47;47+6=53": (0, 0, 0),  # no answer
    "56-9=47;7*8=56;47+6=53#53": (1, 0.5, 1),  # in another order
    "7*8=56;56-9=47;47+6=53;53+0=53#53": (1, 1, 1),
}


def test_judges_of_noisy_and_steps(tiny):
    """Training is judged by the kind, held-out problems strictly: also by the run's evaluation."""
    noisy, steps = (load(f"arithmetic:{name}", tiny[1]) for name in ("noisy", "steps"))
    texts, solution = list(JUDGED), "7*8=56;56-9=47;47+6=53#53"
    marks = (
        noisy.judge(texts, [solution] * len(texts)),
        steps.judge(texts, [solution] * len(texts)),
        noisy.exam(texts, ["53"] * len(texts)),
    )
    assert list(zip(*marks)) == list(JUDGED.values())
    for task in (noisy, steps):
        problem = task.train(0)
        worked, answer = arithmetic.work(problem.prompt)
        assert problem.answer == f"{';'.join(worked)}#{answer}"
        assert task.judge([problem.answer], [problem.answer]) == [1.0]
        held_out = task.held_out[0]
        assert held_out.answer == arithmetic.work(held_out.prompt)[1]
    assert load("arithmetic", tiny[1]).exam is load("arithmetic:mix", tiny[1]).exam is None


def test_evaluation_asks_the_exam(tiny):
    """The response to every held-out problem is a hole's: the judge pays, the exam does not."""

    class Engine:
        def state_dict(self) -> None: ...

        def load_state_dict(self, state: None) -> None: ...

        def generate(self, prompts: list, n: int, *how: float) -> "Engine":
            self.rows = len(prompts) * n
            return self

        def response_ids(self) -> list:
            return [tiny[1]("#")["input_ids"]] * self.rows

    task = load("arithmetic:noisy", tiny[1])
    world, args = World(0, 1, torch.device("cpu")), Args()
    found = evaluate(Engine(), task, tiny[1], args, world)
    assert (found["greedy"], found["sampled"], found["example"]["reward"]) == (0, 0, 0)
    task.exam = None
    found = evaluate(Engine(), task, tiny[1], args, world)
    assert (found["greedy"], found["sampled"], found["example"]["reward"]) == (1, 1, 1)


def test_warm_start_never_saw_the_held_out_set():
    """The script that makes the embedded model draws its demonstrations outside the held-out
    fifth."""
    from tools.make_tiny import demonstration

    rng = random.Random(1)
    assert not any(arithmetic.held_out(demonstration(rng, 0.5, 0.1)[0]) for _ in range(300))


def test_local_file_without_split_holds_rows_back(tmp_path):
    """Each epoch is a permutation of the training rows; held-out rows are never among them,
    whatever the seed."""
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
    """Column flags; chat template or the plain prompt; over-long prompts are dropped and
    counted."""
    rows = [{"q": f"question {i}?", "a": i} for i in range(6)] + [{"q": "long " * 100, "a": 1}]
    path = write(tmp_path / "set.jsonl", rows)
    columns = {"prompt_column": "q", "answer_column": "a"}
    columns |= {"instruction": "Think.", "max_prompt_tokens": 60}
    task = load(path, **columns)
    assert (
        "1 of 6 prompts tried are too long, or not to be written by the tokenizer: such are skipped"
        in task.remarks
    )
    text = "".join(map(chr, task.train(0).prompt_ids))
    assert text == f"Question: {task.train(0).prompt} Think.\nAnswer:"
    text = "".join(map(chr, load(path, Chat(), **columns).train(0).prompt_ids))
    assert text.startswith("<user>question") and text.endswith("? Think.<assistant>")


def test_parquet(tmp_path):
    path = tmp_path / "set.parquet"
    datasets.Dataset.from_list(numbered(6)).to_parquet(path)
    assert {problem.answer for problem in load(str(path)).held_out} < {str(i) for i in range(6)}
    with pytest.raises(BadInput, match="set.parquet:1: needs 'prompt', a text, and 'result'"):
        load(str(path), answer_column="result")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match="set.parquet: cannot be read .*arquet"):
        load(str(path))


@pytest.mark.parametrize("name", HUB)
def test_hub_sets_on_local_rows_of_their_schema(tmp_path, name):
    """Every named set reads its own columns, and the judge accepts the reference answer."""
    row, answer = ROWS[name]
    column = next(iter(row))
    rows = [row | {column: f"{row[column]} ({number})"} for number in range(5)]
    task = load(f"{name}:{write(tmp_path / 'local.jsonl', rows)}")
    assert task.train(0).answer == answer and task.train(0).prompt in [row[column] for row in rows]
    assert not any("matched" in line for line in task.remarks)
    assert task.judge([rf"Thus \boxed{{{answer}}}."], [answer]) == [1.0]


def test_hub_sets_load_by_name(monkeypatch):
    """The hub call itself: path, config and splits as declared; a test split is used for evaluation
    only."""
    calls = []

    def load_dataset(path: str, config: str | None, split: str) -> datasets.Dataset:
        calls.append((path, config, split))
        rows = [{"question": f"{split} {i}", "answer": f"#### {i}"} for i in range(4)]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load("gsm8k")
    assert calls == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert {p.prompt[:5] for p in task.held_out} == {"test "}
    assert {task.train(i).prompt[:6] for i in range(4)} == {"train "}


def test_eval_task_is_another_set(tmp_path):
    train = write(tmp_path / "a.jsonl", numbered(4))
    held_out = write(tmp_path / "b.jsonl", numbered(50)[40:])
    task = load(train, eval_task=held_out, eval_problems=10)
    assert len({task.train(i).prompt for i in range(4)}) == 4 and len(task.held_out) == 10


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*numbered(2), "{not json"], "set.jsonl:3: needs .*property name"),
        ([*numbered(2), [1, 2]], "set.jsonl:3: needs .*indices"),
        ([{"prompt": "x"}], "set.jsonl:1: needs 'prompt', .* and 'answer'"),
        ([{"prompt": 7, "answer": 7}], "set.jsonl:1: .*no text"),
        ([{"prompt": " ", "answer": 7}], "set.jsonl:1: .*empty"),
        ([{"prompt": "x", "answer": None}], "set.jsonl:1: .*None is neither a text nor"),
        ([], "holds no problem"),
        (numbered(1), "no problem left of 1: all are held out"),
        ([{"prompt": "x", "answer": 1}] * 60, "no problem left of 60: all are held out"),
        ([*numbered(2), "\xff".encode("latin1").decode("latin1")], "set.jsonl:3"),
        ([*numbered(2), {"prompt": "x", "answer": True}], "set.jsonl:3: .*True is neither"),
        ([*numbered(2), {"prompt": "x", "answer": [7]}], r"set.jsonl:3: .*\[7\] is neither"),
        ([*numbered(2), {"prompt": "x", "answer": {"a": 7}}], "set.jsonl:3: .*is neither"),
        ([*numbered(2), '{"prompt": "x", "answer": NaN}'], "set.jsonl:3: .*NaN"),
        ([*numbered(2), '{"prompt": "x", "answer": -Infinity}'], "set.jsonl:3: .*infinity"),
        ([*numbered(2), {"prompt": "x", "answer": " "}], "set.jsonl:3: .*empty"),
        (["[" * 100_000], "set.jsonl:1: .*recursion"),
        ([{"prompt": [{"role": "user", "text": "x"}], "answer": 7}], "set.jsonl:1: .*'content'"),
        ([{"prompt": [{"role": "user", "content": 7}], "answer": 7}], "set.jsonl:1: .*no text"),
        ([{"prompt": [], "answer": 7}], "set.jsonl:1: .*empty"),
    ],
)
def test_malformed_rows_are_named(tmp_path, rows, message):
    with pytest.raises(BadInput, match=message) as error:
        load(write(tmp_path / "set.jsonl", rows))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("code", ["utf-16", "utf-16-le", "utf-32", "latin1"])
def test_other_encodings_are_named(tmp_path, code):
    path = tmp_path / "set.jsonl"
    path.write_bytes('{"prompt": "naïve?", "answer": 7}\n'.encode(code))
    with pytest.raises(BadInput, match="set.jsonl:1: needs .*(codec|Expecting)"):
        load(str(path))


def test_marks_line_ends_and_separators_of_text_files(tmp_path):
    """A byte order mark, CRLF, empty lines, and U+2028 inside a text (which str.splitlines takes
    for a line's end)."""
    path = tmp_path / "set.jsonl"
    rows = [
        json.dumps({"prompt": f"a\u2028{i}", "answer": i}, ensure_ascii=False) for i in range(4)
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(rows).encode())
    assert {load(str(path)).train(i).prompt for i in range(3)} <= {f"a\u2028{i}" for i in range(4)}


def test_numbers_keep_their_digits(tmp_path):
    """27.0 is 27; nothing is rounded."""
    answers = [27.0, 1234567.0, 3.14159265, 10**20, "007"]
    task = load(
        write(
            tmp_path / "set.jsonl",
            [{"prompt": f"{i}?", "answer": a} for i, a in enumerate(answers)],
        )
    )
    found = {task.train(i).answer for i in range(4)} | {problem.answer for problem in task.held_out}
    assert found == {"27", "1234567", "3.14159265", str(10**20), "007"}


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")  # which would be waited for
    train = write(tmp_path / "train.jsonl", numbered(8))
    for name in ("folder", "pipe", "nowhere"):
        for field, value in (("task", "--task"), ("eval_task", "--eval_task")):
            with pytest.raises(BadInput, match=f"^{value} {tmp_path}/{name}.jsonl: no such file"):
                load(**{"task": train, field: f"{tmp_path}/{name}.jsonl"})
    with pytest.raises(BadInput, match="^--eval_task nowhere.jsonl: no such file"):
        load(train, eval_task="nowhere.jsonl")


def test_a_small_file_holds_a_quarter_back(tmp_path):
    """60 rows at the default of 256 held-out problems: 15 are held out, 45 trained on, and it is
    said."""
    task = load(write(tmp_path / "set.jsonl", numbered(60)), eval_problems=256)
    seen = {task.train(i).prompt for i in range(45)}
    held_out = {problem.prompt for problem in task.held_out}
    assert len(seen) == 45 and len(held_out) == 15 and not seen & held_out
    assert any("15 of 60 problems are held out" in line for line in task.remarks)
    two = load(write(tmp_path / "two.jsonl", numbered(2)))
    assert len(two.held_out) == 1
    assert two.train(0).prompt == two.train(5).prompt != two.held_out[0].prompt


def test_a_held_out_prompt_is_never_trained_on(tmp_path):
    """Rows that repeat a prompt: held-out problems are distinct, the same for every seed, and in no
    training row."""
    path = write(
        tmp_path / "set.jsonl",
        [*numbered(20), *numbered(20), {"prompt": "question 3?", "answer": 4}],
    )
    task, other = load(path, eval_problems=5), load(path, eval_problems=5, seed=2)
    held_out = [problem.prompt for problem in task.held_out]
    assert held_out == [problem.prompt for problem in other.held_out] and len(set(held_out)) == 5
    assert not {task.train(i).prompt for i in range(200)} & set(held_out)
    assert any(
        "21 of 41 rows repeat a prompt, 1 with another answer" in line for line in task.remarks
    )
    assert any("rows have a prompt that is held out" in line for line in task.remarks)
    again = load(path, eval_task=write(tmp_path / "test.jsonl", numbered(3)), eval_problems=1)
    assert {again.train(i).prompt for i in range(100)} == {
        f"question {i}?" for i in range(3, 20)
    }  # none of the split's
    assert any(
        "6 rows have a prompt that is held out" in line or "7 rows" in line
        for line in again.remarks
    )


def test_the_training_file_is_no_held_out_set(tmp_path):
    """It leaves nothing to train on, under whatever name."""
    path = write(tmp_path / "set.jsonl", numbered(8))
    copy = write(tmp_path / "copy.jsonl", numbered(8))
    for same, why in ((path, "is the training file, of which"), (copy, "no problem left of 8")):
        with pytest.raises(BadInput, match=why):
            load(path, eval_task=same)


def test_references_that_cannot_be_matched_are_counted(tmp_path):
    """The judge itself is asked, for those references that are no plain numbers."""
    rows = numbered(8) + [
        {"prompt": f"x{i}?", "answer": a} for i, a in enumerate(["$", "\\", r"\frac{1}{2}", "x0?"])
    ]
    rows.append({"prompt": "same?", "answer": "same?"})
    remarks = " ".join(load(write(tmp_path / "set.jsonl", rows)).remarks)
    assert "2 of 5 references tried cannot be matched" in remarks
    with pytest.raises(BadInput, match="is the --prompt_column, too"):
        load(write(tmp_path / "set.jsonl", rows), answer_column="prompt")
    clean = [line for line in load(write(tmp_path / "clean.jsonl", numbered(8))).remarks]
    assert clean == []


def test_the_fingerprint_is_of_the_files_contents(tmp_path):
    """Another content, of the task's or the evaluation's file: another fingerprint; another name:
    the same."""
    one, same, other = (
        write(tmp_path / name, numbered(n))
        for name, n in (("a.jsonl", 8), ("b.jsonl", 8), ("c.jsonl", 9))
    )
    test = write(tmp_path / "test.jsonl", numbered(50)[40:])
    prints = [load(name).fingerprint for name in (one, same, other)]
    assert prints[0] == prints[1] != prints[2] and len(prints[0]) == 64
    with_test = load(one, eval_task=test).fingerprint
    write(tmp_path / "test.jsonl", numbered(50)[39:])
    assert len({prints[0], with_test, load(one, eval_task=test).fingerprint}) == 3
    write(tmp_path / "a.jsonl", numbered(4))
    assert load(f"{tmp_path}/a.jsonl").fingerprint != prints[0]


class Short(Letters):
    model_max_length = 100


def test_a_prompt_and_its_response_fit_into_the_model(tmp_path, tiny):
    """Room for a prompt: --max_prompt_tokens, but no more than the positions less
    --max_new_tokens."""
    path = write(tmp_path / "set.jsonl", [*numbered(6), {"prompt": "long" * 10, "answer": 1}])
    plain = {"instruction": ""}
    # 58 tokens with "Question: ... Answer:"
    assert "too long" in load(path, Short(), max_new_tokens=64, **plain).remarks[-1]
    assert "too long" not in load(path, Short(), max_new_tokens=40, **plain).remarks[-1]
    with pytest.raises(BadInput, match="no problem left of 7: .* 10: .* --max_new_tokens 90"):
        load(path, Short(), max_new_tokens=90, **plain)
    assert load("arithmetic", tiny[1], max_new_tokens=242).held_out
    for tokens in (243, 5000):
        with pytest.raises(
            BadInput,
            match=f"a prompt of 14 tokens; room is for {256 - tokens}:.* --max_new_tokens {tokens}",
        ):
            load("arithmetic", tiny[1], max_new_tokens=tokens)


def test_a_huge_prompt_is_dropped_without_being_tokenised(tmp_path):
    class Counting(Letters):
        def __call__(self, text: str, **options: bool) -> dict:
            assert len(text) < 10**6, "tokenised all the same"
            return super().__call__(text)

    path = write(tmp_path / "set.jsonl", [*numbered(6), {"prompt": "x" * 10**6, "answer": 1}])
    assert "too long" in load(path, Counting()).remarks[-1]


class Counted(Letters):
    """Keeps every text that it is given."""

    def __init__(self):
        self.given = []

    def __call__(self, text: str, **options: bool) -> dict:
        self.given.append(text)
        return super().__call__(text)


def some_long(count: int) -> list[dict]:
    """Every third prompt has more than 60 tokens; answers are the rows' numbers."""
    return [{"prompt": f"{i}?" + " long" * 20 * (i % 3 == 0), "answer": i} for i in range(count)]


LAZY = {"max_prompt_tokens": 60, "instruction": ""}


def test_prompts_of_a_large_set_are_encoded_when_they_are_drawn(tmp_path):
    """At load the held-out problems and a sample to see that some fit; then one by one."""
    path, tokenizer = write(tmp_path / "set.jsonl", numbered(6000)), Counted()
    task = load(path, tokenizer)
    before = len(tokenizer.given)
    assert before <= TRIED + 2 and not task.remarks
    assert task.train(5).prompt in tokenizer.given[-1] and len(tokenizer.given) == before + 1


def test_a_row_that_is_too_long_is_replaced_by_a_rule_of_the_index_alone(tmp_path):
    """Whatever was drawn before, as on another rank or after a resume; the other places of the
    epoch stay as they are; what was met is counted once."""
    path = write(tmp_path / "set.jsonl", some_long(3000))
    task, again = load(path, **LAZY), load(path, **LAZY)
    drawn = [task.train(i) for i in range(3000)]
    assert [again.train(i) for i in reversed(range(2000, 2100))] == drawn[2000:2100][::-1]
    assert max(len(problem.prompt_ids) for problem in drawn) <= 60
    assert all(int(problem.answer) % 3 for problem in drawn)
    held_out = {int(problem.answer) for problem in task.held_out}
    assert {int(p.answer) for p in drawn} == {i for i in range(3000) if i % 3} - held_out
    longer = load(path, max_prompt_tokens=200, instruction="")
    whole = [longer.train(i) for i in range(300)]
    kept = [(a, b) for a, b in zip(drawn, whole) if int(b.answer) % 3]
    assert not longer.remarks and len(kept) > 150
    # The held-out problems may be others where long ones count: but for those the order is the same
    if held_out == {int(problem.answer) for problem in longer.held_out}:
        assert all(a == b for a, b in kept)


def test_a_large_set_of_which_nothing_fits_is_refused_soon(tmp_path):
    tokenizer = Counted()
    with pytest.raises(BadInput, match="no problem left of 6000: .* 9: --max_prompt_tokens"):
        load(write(tmp_path / "set.jsonl", numbered(6000)), tokenizer, max_prompt_tokens=9)
    assert len(tokenizer.given) <= 3 * TRIED
    test = write(tmp_path / "test.jsonl", [{"prompt": "1?", "answer": 1}])
    path = write(
        tmp_path / "long.jsonl", [{"prompt": 9 * f"{i:09}", "answer": i} for i in range(5)]
    )
    with pytest.raises(BadInput, match="--task .*: no problem left of 5: .* too long; "):
        load(path, eval_task=test, **LAZY)


def test_evaluation_sets_are_named_by_their_own_flag(tmp_path):
    path = write(tmp_path / "set.jsonl", numbered(8))
    for spec in ("arithmetic", f"{path},", "gsm8k:", "aime24,aime25"):
        with pytest.raises(
            BadInput, match="^--eval_task .*: unknown, use one of a .jsonl or .parquet file, gsm8k"
        ):
            load(path, eval_task=spec)
    with pytest.raises(BadInput, match="--eval_task nowhere.jsonl: no such file"):
        load(path, eval_task="nowhere.jsonl")
    for name in ("math500", "aime25"):
        with pytest.raises(
            BadInput, match=f"--task {name}: has no training split, use it as --eval_task"
        ):
            load(name)


def test_unreadable_answers_are_named(tmp_path):
    wrong = {
        "math": {"problem": "Find x.", "solution": "it is 7"},
        "gsm8k": {"question": "Find x.", "answer": "it is 7"},
        "olympiadbench": {"question": "Find x.", "final_answer": 7},
        "aime24": {"problem": "Find x.", "answer": "seven"},
    }
    for name, row in wrong.items():
        with pytest.raises(BadInput, match="local.jsonl:1: needs"):
            load(f"{name}:" + write(tmp_path / "local.jsonl", [row]))
    with pytest.raises(BadInput, match="set.parquet: cannot be read .*arquet"):
        load(write(tmp_path / "set.parquet", ["text"]))


def test_unknown_tasks_and_missing_packages_are_named(monkeypatch, tiny):
    with pytest.raises(BadInput, match="--task aritmetic: unknown, use one of arithmetic"):
        load("aritmetic")
    with pytest.raises(BadInput, match="--task nowhere.jsonl: no such file"):
        load("nowhere.jsonl")
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        BadInput, match="--task tools/gym.py:chain_sum: cannot be used .*reasoning_gym"
    ):
        load("tools/gym.py:chain_sum")


def test_a_model_that_cannot_read_the_task_is_named(tmp_path, tiny):
    """The embedded tokenizer knows no letters, with a chat template or without; another one knows
    no digits."""
    path = write(tmp_path / "set.jsonl", numbered(5))
    # The text that is encoded, with what the row was put into.
    with pytest.raises(
        BadInput, match=r"tokenizer cannot write the prompt .Question: question .\?"
    ):
        load(path, tiny[1])
    chat = copy.deepcopy(tiny[1])
    chat.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(BadInput, match="--model.*cannot write the prompt .question"):
        load(path, chat)
    chat.chat_template = "{{ raise_exception('no users') }}"
    with pytest.raises(BadInput, match="--model.*cannot write the prompt.*no users"):
        load(path, chat)


GYM = """
class Rows:
    def __getitem__(self, index):
        question = "?" * (300 if index % 10 == 9 else 1) + str(index)
        return {"question": question, "answer": str(index), "metadata": {}}
    def score_answer(self, answer, entry):
        if answer == "raise":
            raise RuntimeError
        while answer == "hang":
            pass
        return 1.0 if answer == entry["answer"] else 0.01
def create_dataset(name, size, seed):
    if name != "chain_sum":
        raise ValueError(f"Dataset '{name}' not registered")
    return Rows()
"""


def test_reasoning_gym(tmp_path, monkeypatch):
    """Its questions, its own score, indices as references, held-out indices apart (a stand-in with
    its interface).

    Scored in a worker process, where an answer that raises or hangs costs nothing else.
    """
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym/__init__.py").write_text(GYM)
    (tmp_path / "reasoning_gym/utils.py").write_text(
        "def extract_answer(text):\n"
        "    return text.partition('<answer>')[2].partition('</answer>')[0] or None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = importlib.util.spec_from_file_location(
        "reasoning_gym", tmp_path / "reasoning_gym/__init__.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Here; in the worker PYTHONPATH finds it
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    monkeypatch.setitem(sys.modules, "reasoning_gym.utils", SimpleNamespace(extract_answer=None))
    task = load("tools/gym.py:chain_sum")
    task.judge.seconds = 2.0
    problem = task.train(3)
    said = (problem.answer, "raise", "hang")
    given = ["no", *(f"<answer>{answer}</answer>" for answer in said)]
    assert task.judge(given, [problem.answer] * 4) == [0.01, 1.0, 0.0, 0.0]
    assert task.judge.killed == 2  # one raised, one hung
    again = load("tools/gym.py:chain_sum", seed=2)
    assert task.held_out == again.held_out and task.train(0) != again.train(0)
    indices = {int(task.train(i).answer) for i in range(300)}
    assert max(indices) < 50_000 <= min(int(p.answer) for p in task.held_out)
    task.judge.close()
    with pytest.raises(BadInput, match="--task tools/gym.py:nothing: .* 'nothing' not registered"):
        load("tools/gym.py:nothing")
    with pytest.raises(BadInput, match="countdown would execute what the model writes"):
        load("tools/gym.py:countdown")


MINE = """
def train(i): return f"{i % 7}+1=", str(i % 7 + 1)
held_out = [("8+1=", "9"), ("9+1=", "10")]
def reward(response, answer): return float(response.strip("#") == answer)
class other:
    train = staticmethod(lambda i: ("1+1=", "2"))
    held_out = [("2+2=", "4")]
"""


def test_a_task_of_yours(tmp_path):
    """Its problems in order, its held-out ones, its reward in a bounded worker; another seed begins
    elsewhere; a file may hold several, and one without a reward is math-verify's."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    task = load(str(file))
    assert [task.train(i).prompt for i in (0, 1, 7)] == ["0+1=", "1+1=", "0+1="]
    assert [(p.prompt, p.answer) for p in task.held_out] == [("8+1=", "9"), ("9+1=", "10")]
    assert task.judge(["#9", "9", "8"], ["9"] * 3) == [1.0, 1.0, 0.0]
    task.judge.close()
    assert load(str(file), seed=2).train(0).prompt == "4+1="  # 1,000,003 further on
    other = load(f"{file}:other")
    assert other.train(5).answer == "2" and not other.judge.spec
    assert task.fingerprint == load(str(file), seed=2, eval_problems=1).fingerprint
    assert len({task.fingerprint, other.fingerprint, ""}) == 3


def test_a_reward_of_yours_that_fails_is_said_once_and_counted(tmp_path, capfd):
    """It earns 0, as one that is no number does; the run does not train on zeros without a word."""
    file = tmp_path / "mine.py"
    reward = (
        "def reward(response, answer): return {'nan': float('nan'), '9': 1}.get(response) or 1 / 0"
    )
    file.write_text(f"{MINE}\n{reward}\n")
    task = load(str(file))
    assert task.judge(["x", "nan", "y", "9"], ["9"] * 4) == [0.0, 0.0, 0.0, 1.0]
    assert of_judge(task.judge) == {"judge_killed": (3, None)}
    assert task.judge(["x"], ["9"]) == [0.0]
    said = capfd.readouterr().err
    assert said.count("reward fails") == 1 and f"{file}: reward fails (" in said
    task.judge.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train = 1", "cannot be used .*'held_out'"),
        ("held_out = []\ndef train(i): return 'a'", "held_out is empty"),
        ("held_out = [3]\ndef train(i): return 3", "is no .prompt, reference."),
        ("held_out = [{'prompt': '1+1=', 'answer': '2'}]\ntrain = 1", "'prompt'.* is no .prompt,"),
        ("held_out = ['12']\ntrain = 1", "12 is no .prompt, reference."),
        (
            "held_out = [('1', '2')]\ntrain = lambda i: {'1', '2'}",
            "'.'.* is no .prompt, reference.",
        ),
        (
            "held_out = [('1', '2')]\nimport random\ntrain = lambda i: (str(random.random()), '2')",
            "is asked again",
        ),
        ("def train(", "cannot be used"),
    ],
)
def test_a_task_of_yours_that_is_none_is_named(tmp_path, text, message):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(BadInput, match=message) as error:
        load(str(tmp_path / "mine.py"))
    assert "\n" not in str(error.value)


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


class Turns(Letters):
    chat_template = "{{ enable_thinking }} {{ style }}"

    def apply_chat_template(self, chat: list, tokenize: bool, **options: object) -> str:
        assert options.pop("add_generation_prompt") and not tokenize
        turns = "".join(f"<{turn['role']}>{turn['content']}" for turn in chat)
        return turns + "<assistant>" + str(options or "")


def text_of(problem: object) -> str:
    return "".join(map(chr, problem.prompt_ids))


def test_a_prompt_may_be_chat_messages(tmp_path):
    """In a task file and in rows; as they are, without the instruction, which texts get in rows
    alone; held out by what they say; a tokenizer without a template refuses them."""
    (tmp_path / "mine.py").write_text(
        f"held_out = [({CHAT}, '4'), ('2?', '2')]\ntrain = lambda i: {CHAT[1:]}, '4'".replace(
            "i: ", "i: ("
        )
        + ")"
    )
    task = load(str(tmp_path / "mine.py"), Turns())
    assert text_of(task.held_out[0]) == "<system>Be brief.<user>2+2?<assistant>"
    assert text_of(task.held_out[1]) == "<user>2?<assistant>"
    assert text_of(task.train(3)) == "<user>2+2?<assistant>"
    asked = [[{"role": "user", "content": f"{i}?"}] for i in range(3)]
    rows = [{"prompt": one, "answer": 4} for one in (CHAT, *asked, *asked)]
    task = load(write(tmp_path / "set.jsonl", rows), Turns(), eval_problems=1)
    held_out = task.held_out[0].prompt
    assert all(task.train(i).prompt != held_out for i in range(20))
    texts = {text_of(task.train(i)) for i in range(20)} | {text_of(task.held_out[0])}
    assert "<system>Be brief.<user>2+2?<assistant>" in texts and len(texts) == 4
    assert any("3 of 7 rows repeat a prompt, 0 with another answer" in one for one in task.remarks)
    with pytest.raises(BadInput, match="--model: its chat template cannot write the prompt"):
        load(str(tmp_path / "set.jsonl"))


def test_options_of_the_chat_template(tmp_path):
    """For task files and rows alike. A template ignores what it does not know: that is refused."""
    (tmp_path / "mine.py").write_text("held_out = [('2?', '2')]\ntrain = lambda i: ('3?', '3')")
    rows = write(tmp_path / "set.jsonl", numbered(8))
    given = "<assistant>{'enable_thinking': False, 'style': 'brief'}"
    for word in ("enable_thinking=false", "enable_thinking=False"):
        for file in (str(tmp_path / "mine.py"), rows):
            task = load(file, Turns(), chat=(word, "style=brief"))
            assert text_of(task.train(0)).endswith(given)
            assert text_of(task.held_out[0]).endswith(given)
    for tokenizer, word, why in (
        (Turns(), "enable_thinking", "enable_thinking: must be KEY=VALUE"),
        (Turns(), "thinking_on=1", "thinking_on: the model's chat template does not read it"),
        (Letters(), "style=brief", "style: the model's tokenizer has no chat template"),
    ):
        with pytest.raises(BadInput, match=f"--chat {why}"):
            load(rows, tokenizer, chat=(word,))


MORE = """
def train(i): return "1+1=", {"answer": i, "tests": (1, 2)}
held_out = [("2+2=", {"answer": 4, "tests": []}), ("3+3=", None)]
def reward(response, reference): return float(reference == {"answer": 3, "tests": [1, 2]})
"""


def test_a_problem_may_carry_more_than_its_answer(tmp_path):
    """The reward gets it back as JSON holds it; math-verify asks for a text; what JSON cannot hold
    is refused at the start."""
    file = tmp_path / "mine.py"
    file.write_text(MORE)
    task = load(str(file))
    assert task.judge(["x", "x"], [task.train(3).answer, task.train(4).answer]) == [1.0, 0.0]
    assert [p.answer for p in task.held_out] == [{"answer": 4, "tests": []}, None]
    task.judge.close()
    for text, why in (
        (MORE.partition("def reward")[0], "is neither a text nor a number"),
        (MORE.replace("(1, 2)", "{1, 2}"), "train.0. fails .*|.*not JSON serializable"),
    ):
        file.write_text(text)
        with pytest.raises(BadInput, match=why) as error:
            load(str(file))
        assert str(error.value).startswith(f"--task {file}: ")


def test_what_does_not_fit_is_said(tmp_path, tiny):
    """Which letters the embedded model knows; how many held-out problems are left out."""
    file = tmp_path / "mine.py"
    file.write_text(MINE.replace('("9+1="', '("nine+1="'))
    task = load(str(file), tiny[1])
    assert len(task.held_out) == 1 and task.remarks == [
        "1 held-out problems: too long, or not to be written"
    ]
    file.write_text(MINE.replace("+1=", " and 1"))
    knows = "its tokenizer cannot write the prompt '8 and 1': it knows # [*] [+] - 0 1 .* 9 ; = "
    with pytest.raises(BadInput, match=knows):
        load(str(file), tiny[1])


def test_training_on_held_out_problems_is_said(tmp_path):
    """Those that come up early in training; none where they are apart."""
    file = tmp_path / "mine.py"
    file.write_text(MINE.replace('"9+1="', '"3+1="'))
    said = "1 of 2 held-out problems come up in training, too: the accuracies are not of unseen"
    assert any(line.startswith(said) for line in load(str(file)).remarks)
    file.write_text(MINE)
    assert not load(str(file)).remarks


@pytest.mark.runs
def test_ranks_with_other_problems_end_in_a_line(tmp_path):
    """Or each would measure a share of its own set."""
    file = tmp_path / "mine.py"
    held_out = "import os\nheld_out = [('1+1=', '2')] * (1 + int(os.environ['RANK']))\n"
    file.write_text(held_out + "train = lambda i: ('2+1=', '3')")
    ended = command("grpo", "--task", file, "--run_dir", tmp_path / "run", ranks=2)
    assert ended.codes == [2, 2] and not (tmp_path / "run").exists()
    (line,) = [line for line in ended.stderr.splitlines() if "error" in line]
    assert f"--task {file}: ranks see different problems" in line


@pytest.mark.runs
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reward_that_fails_on_every_answer_ends_the_run(tmp_path, ranks):
    """Before the first step; also where one rank has no held-out problem to judge."""
    file = tmp_path / "mine.py"
    held_out = 'held_out = [("8+1=", "9")]\ndef reward(response, answer): return rewrad\n'
    file.write_text(MINE.partition("held_out")[0] + held_out)
    flags = ["--task", file, "--run_dir", tmp_path / "run", *SMALL, "--steps", 1]
    ended = command("grpo", *flags, ranks=ranks)
    assert ended.codes == [2] * ranks and not (tmp_path / "run/metrics.jsonl").exists()
    (line,) = [line for line in ended.stderr.splitlines() if "error: " in line]
    why = "(mine.py:4: NameError: name 'rewrad' is not defined)"
    assert line.endswith(f"{file}: the reward fails on every answer {why}")


def test_training_ends_in_a_line_where_a_task_file_fails_later(tmp_path):
    (tmp_path / "mine.py").write_text(MINE.replace("i % 7}+1=", "1 // (5 - i)}+1="))
    task = load(str(tmp_path / "mine.py"))
    with pytest.raises(BadInput, match=r"mine.py: train\(5\) fails \(integer division"):
        task.train(5)


REWARD = """
def reward(response, reference): return {"reward": float(response == str(reference)), "x": 1}
def second(response, reference): return 0.5 if reference == {"answer": 2, "tests": [2]} else 0.25
"""


def rewarded(folder: object, task: str, name: str = "", **fields: object) -> object:
    (folder / "reward.py").write_text(REWARD)
    return load(task, reward=f"{folder / 'reward.py'}{name}", **fields)


def test_a_reward_of_yours_on_any_set(tmp_path, tiny):
    """It judges the training. Who judges the held-out problems is said: sets with a judge of their
    own keep it, files of rows and task files without a reward have none."""
    rows = [{"prompt": f"{i}?", "answer": i, "tests": [i]} for i in range(8)]
    path = write(tmp_path / "set.jsonl", rows)
    hub = write(
        tmp_path / "hub.jsonl", [{"question": f"q{i}?", "answer": f"#### {i}"} for i in range(8)]
    )
    (tmp_path / "mine.py").write_text(MINE)
    kept = ["arithmetic", "arithmetic:noisy", f"gsm8k:{hub}", str(tmp_path / "mine.py")]
    for task in (*kept, path, f"{tmp_path / 'mine.py'}:other"):
        found = rewarded(tmp_path, task, tokenizer=tiny[1] if task in kept[:2] else None)
        assert found.judge(["x", "7"], ["x", "8"]) == [1.0, 0.0]
        who = "the set's own judge" if task in kept else "it, too"
        said = f"{tmp_path / 'reward.py'} judges; the held-out problems are judged by {who}"
        assert found.remarks[-1] == said and (found.exam is not None) == (task in kept)
        assert found.exam is not found.judge
        found.judge.close()
    assert rewarded(tmp_path, path, eval_task=f"gsm8k:{hub}").exam
    assert not rewarded(tmp_path, f"gsm8k:{hub}", eval_task=path).exam


def test_a_reward_gets_the_columns_of_a_row(tmp_path):
    """One as it stands there, several as a dict; nothing is tried on math-verify; without --reward
    they are refused as ever."""
    rows = [{"prompt": f"{i}?", "answer": i, "tests": [i]} for i in range(8)]
    path = write(tmp_path / "set.jsonl", rows)
    task = rewarded(tmp_path, path, ":second", answer_column="answer,tests")
    assert {type(task.train(i).answer["tests"]) for i in range(4)} == {list}
    both = [{"answer": 2, "tests": [2]}, {"answer": 3, "tests": [3]}]
    assert task.judge(["a", "b"], both) == [0.5, 0.25] and len(task.remarks) == 1
    task.judge.close()
    tests = rewarded(tmp_path, path, answer_column="tests")
    assert tests.train(0).answer in [[i] for i in range(8)]
    with pytest.raises(BadInput, match="set.jsonl:1: needs 'prompt'.* and 'answer,tests'"):
        load(path, answer_column="answer,tests")
    with pytest.raises(BadInput, match="set.jsonl:1: .*'missing'"):
        rewarded(tmp_path, path, answer_column="answer,missing")


def test_another_reward_is_another_fingerprint(tmp_path, tiny):
    prints = [rewarded(tmp_path, "arithmetic", tokenizer=tiny[1]).fingerprint]
    (tmp_path / "reward.py").write_text(REWARD + "\n# more\n")
    spec = str(tmp_path / "reward.py")
    prints += [load("arithmetic", tiny[1], reward=spec).fingerprint]
    prints += [load("arithmetic", tiny[1]).fingerprint]
    assert len(set(prints)) == 3 and prints[-1] == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nowhere", "reward.py:1: ModuleNotFoundError: No module named 'nowhere'"),
        ("def reward(", "SyntaxError"),
        ("x = 1", "no function `reward`"),
        ("exit()", "reward.py:1: SystemExit"),
        (None, "No such file"),
    ],
)
def test_a_reward_that_cannot_be_used_is_one_line(tmp_path, tiny, text, message):
    if text:
        (tmp_path / "reward.py").write_text(text)
    with pytest.raises(BadInput, match=message) as error:
        load("arithmetic", tiny[1], reward=str(tmp_path / "reward.py"))
    assert str(error.value).startswith(f"--reward {tmp_path / 'reward.py'}: cannot be used (")
    assert "\n" not in str(error.value)


def test_a_link_in_a_circle_is_no_file(tmp_path):
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    with pytest.raises(BadInput, match="no such file"):
        load(str(tmp_path / "loop.jsonl"))
