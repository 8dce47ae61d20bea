"""Tasks: the embedded one, local files, task files; rows that are wrong are named."""

import json
import random

import datasets
import pytest
import torch
from common.cli import BadInput, RunStopped
from common.data import texts_of
from common.metrics import evaluate
from common.model import load_model
from common.rollout import HFEngine
from common.tasks.reward import Verdict
from common.tasks.rows import HUB, rows_of
from common.tiny import arithmetic
from grpo import Args

from tests.helpers import SMALL, command, packed, scored
from tests.common.rows import Letters, load, numbered, write


def drawn(task: object, count: int) -> set[str]:
    """Return the prompts of the first training problems."""
    return {task.train(i).prompt for i in range(count)}


def text_of(problem: object) -> str:
    return "".join(map(chr, problem.prompt_ids))


MINE = """
def train(i): return f"{i % 7}+1=", str(i % 7 + 1)
held_out = [("8+1=", "9"), ("9+1=", "10")]
def reward(response, answer): return float(response.strip("#") == answer)
import numpy as np
class other:
    train = staticmethod(lambda i: ("1+1=", np.int64(2)))
    held_out = [("2+.5=", np.float32(2.5))]
"""


@pytest.fixture
def mine(tmp_path):
    """Write a task file that holds MINE."""
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


# The embedded task


def test_arithmetic_is_worked_left_to_right_modulo_100():
    assert arithmetic.work("7*8-9+6=") == (["7*8=56", "56-9=47", "47+6=53"], "53")
    assert arithmetic.work("3-9=")[1] == "94" and arithmetic.work("9*9*9=")[1] == "29"
    assert arithmetic.work("2+3*4=")[1] == "20"  # no precedence
    # The prompts that all published figures were measured on
    rng = random.Random("golden")
    assert [arithmetic.draw(rng) for _ in range(3)] == ["7-1*5=", "9+3+7=", "3-9+7-1*0="]


def test_arithmetic_stream_is_seeded_and_the_held_out_set_is_not(tiny):
    how = {"tokenizer": tiny[1], "eval_problems": 200}
    task, again, other = (load("arithmetic", seed=seed, **how) for seed in (1, 1, 2))
    stream = [task.train(i) for i in range(500)]
    assert [again.train(i) for i in reversed(range(500))] == stream[::-1]
    assert [other.train(i).prompt for i in range(500)] != [problem.prompt for problem in stream]
    assert task.held_out == other.held_out
    assert len({problem.prompt for problem in task.held_out}) == 200


def test_the_warm_start_never_saw_the_held_out_set():
    from tools.make_tiny import demonstration

    rng = random.Random(1)
    kind = arithmetic.KINDS["arithmetic"]
    shown = [demonstration(rng, 0.5, 0.1, kind)[0] for _ in range(300)]
    assert not any(map(arithmetic.is_held_out, shown))


@pytest.mark.parametrize("name", arithmetic.KINDS)
def test_kinds_of_arithmetic_draw_what_they_say(tiny, name):
    """No held-out prompt is trained on. Numbers of terms and last operators are the kind's."""
    kind = arithmetic.KINDS[name]
    task = load(name, tiny[1], eval_problems=50)
    stream = [task.train(i).prompt for i in range(400)]
    held_out = [problem.prompt for problem in task.held_out]
    assert not any(map(arithmetic.is_held_out, stream))
    assert all(map(arithmetic.is_held_out, held_out))
    assert {len(prompt) // 2 for prompt in stream} == set(kind.terms)
    assert {len(prompt) // 2 for prompt in held_out} == set(kind.held_out_terms or kind.terms)
    assert {prompt[-3] for prompt in stream} == set(kind.last)


REWARDS = {  # completion: its reward in training, and of a held-out problem
    "7*8=56;56-9=47;47+6=53#53": (1, 1),
    "7*8=56;56-9=46;46+6=52#52": (0, 0),
    "7*8=56;56-9=47#47": (1, 0),  # stopped in the middle: a number of the solution, though
    "#53": (1, 1),
    "#": (1, 0),
}


def test_the_noisy_verifier_is_for_training(tiny):
    """Problems are those of `arithmetic`, and held-out answers are right or wrong."""
    task = load("labs/verifier/noisy.py", tiny[1], seed=3)
    plain = load("arithmetic", tiny[1], seed=3)
    texts, rewards = list(REWARDS), list(REWARDS.values())
    for place, answer in enumerate(("7*8=56;56-9=47;47+6=53#53", "53")):
        assert scored(task.verifier(texts, [answer] * 5)) == [row[place] for row in rewards]
    for index in range(20):
        problem, other = task.train(index), plain.train(index)
        assert problem.prompt == other.prompt and problem.answer.endswith(f"#{other.answer}")
    assert task.held_out == plain.held_out


def test_a_signal_ends_an_evaluation_between_two_batches(tiny, world):
    """The evaluation then measures nothing, and the sampler goes on as if it had not begun."""
    task, sizes = load("arithmetic", tiny[1], eval_problems=9), []

    def signalled(texts: list[str], answers: list) -> list[Verdict]:
        world.stop.raised = len(sizes) == 1
        sizes.append(len(texts))
        return [Verdict(0.0)] * len(texts)

    task.verifier = signalled
    engine = HFEngine(tiny[0], world, 0, "float32", 64)
    before = engine.state_dict()["generator"]
    assert evaluate(engine, task, Args(rollout_rows=4), world) == {} and sizes == [4, 4]
    assert torch.equal(engine.state_dict()["generator"], before)


# Files


def test_local_file_without_split_holds_rows_back(tmp_path):
    """Each epoch is another permutation of the rest. A small file gives a quarter of its rows."""
    path = write(tmp_path / "sums.jsonl", numbered(10))
    task, other = load(path), load(path, seed=9)
    first, second = ([task.train(8 * epoch + i).prompt for i in range(8)] for epoch in range(2))
    assert len(set(first)) == 8 and sorted(first) == sorted(second) and first != second
    assert first != [other.train(i).prompt for i in range(8)]
    small = load(write(tmp_path / "small.jsonl", numbered(60)), eval_problems=256)
    assert len(drawn(small, 45)) == 45 and len(small.held_out) == 15


def test_a_held_out_prompt_is_never_trained_on(tmp_path):
    """Rows may repeat a prompt, and another file may have prompts of the training."""
    rows = [*numbered(20), *numbered(20), {"prompt": "question 3?", "answer": 4}]
    path = write(tmp_path / "set.jsonl", rows)
    task, other = load(path, eval_problems=5), load(path, eval_problems=5, seed=2)
    held_out = [problem.prompt for problem in task.held_out]
    assert held_out == [problem.prompt for problem in other.held_out] and len(set(held_out)) == 5
    assert not drawn(task, 200) & set(held_out)
    test = write(tmp_path / "test.jsonl", numbered(3))
    again = load(path, eval_task=test, eval_problems=1)
    assert drawn(again, 100) == {f"question {i}?" for i in range(3, 20)}  # none of the three
    for same in (path, write(tmp_path / "copy.jsonl", rows)):
        with pytest.raises(BadInput, match="all of its 41 problems are held out"):
            load(path, eval_task=same)


def test_a_row_that_is_too_long_is_replaced_by_a_rule_of_the_index_alone(tmp_path):
    """What was drawn before, on another rank or before a resume, makes no difference."""
    rows = [{"prompt": f"{i}?" + " long" * 20 * (i % 3 == 0), "answer": i} for i in range(300)]
    path = write(tmp_path / "set.jsonl", rows)
    task, again = (load(path, max_prompt_tokens=60, instruction="") for _ in range(2))
    first = [task.train(i) for i in range(300)]
    assert [again.train(i) for i in reversed(range(200, 210))] == first[200:210][::-1]
    assert max(len(problem.prompt_ids) for problem in first) <= 60
    held_out = {int(problem.answer) for problem in task.held_out}
    assert {int(p.answer) for p in first} == {i for i in range(300) if i % 3} - held_out


def test_a_prompt_and_its_response_fit_into_the_model(tmp_path):
    """A prompt may have --max_prompt_tokens, but no more than the model's positions less
    --max_new_tokens, and only tokens for which the model has an embedding."""
    tokenizer = Letters()
    tokenizer.model_max_length = 100
    path = write(tmp_path / "set.jsonl", numbered(6))  # 29 tokens with "Question: ... Answer:"
    plain = {"instruction": "", "eval_problems": 1}
    assert len(load(path, tokenizer, max_new_tokens=71, **plain).train(0).prompt_ids) == 29
    with pytest.raises(BadInput, match="6 of 6 rows are too long for .*--max_new_tokens"):
        load(path, tokenizer, max_new_tokens=72, **plain)
    tokenizer.embeddings, tokenizer.decode = ord("w"), chr
    with pytest.raises(BadInput, match="no embedding for 'w' in a prompt"):
        load(path, tokenizer, **plain)


class Chat(Letters):
    """A tokenizer with a chat template that shows the roles and the options it is given."""

    chat_template = "{{ enable_thinking }} {{ style }}"

    def apply_chat_template(self, chat: list, tokenize: bool, **options: object) -> str:
        assert options.pop("add_generation_prompt") and not tokenize
        options.pop("strftime_now")
        turns = "".join(f"<{turn['role']}>{turn['content']}" for turn in chat)
        return turns + "<assistant>" + str(options or "")


@pytest.mark.parametrize(("file", "instruction"), [("mine.py", ""), ("set.jsonl", " Think.")])
def test_instruction_and_options_of_the_chat_template(tmp_path, mine, file, instruction):
    """The options reach task files and rows alike, the instruction only rows."""
    write(tmp_path / "set.jsonl", numbered(8))
    path, how = str(tmp_path / file), {"instruction": "Think."}
    task = load(path, Chat(), chat=("enable_thinking=false", "style=brief"), **how)
    options = "{'enable_thinking': False, 'style': 'brief'}"
    for problem in (task.train(0), task.held_out[0]):
        assert text_of(problem) == f"<user>{problem.prompt}{instruction}<assistant>{options}"
    with pytest.raises(BadInput, match="--chat enable_thinkng: .* never reads it"):
        load(path, Chat(), chat=("enable_thinkng=false",))


def test_texts_and_numbers_arrive_as_they_are(tmp_path):
    """27.0 is 27, and nothing is rounded. A byte order mark, CRLF, empty lines and U+2028, at which
    str.splitlines would cut, change nothing."""
    answers = ["27.0", "1234567.0", "3.14159265", str(10**20), '"007"', "0.00001", "true"]
    rows = [f'{{"prompt": "a\u2028{i}", "answer": {a}}}' for i, a in enumerate(answers)]
    path = tmp_path / "set.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(rows).encode())
    task = load(str(path))
    problems = [*map(task.train, range(6)), *task.held_out]
    assert {p.prompt for p in problems} == {f"a\u2028{i}" for i in range(7)}
    plain = {"27", "1234567", "3.14159265", str(10**20), "007", "0.00001", "True"}
    assert {p.answer for p in problems} == plain


READ = [  # prompt, response, the response as a verifier reads it
    ("2+2?", "<think>5?</think>It is 4.<end><eos>", "<think>5?</think>It is 4."),
    ("2+2?<think>\n", "5? Wait", "<think>5? Wait"),  # the template opens the thought
    ("2+2?<think>\n\n</think>\n\n", "4", "4"),
    ("2+2?[THINK]", "5?[/THINK]4", "[THINK]5?[/THINK]4"),
    ("2+2?<|channel|>final<|message|>", "4", "4"),
    ("2+2?<|channel|>a<|message|>", "5?<|channel|>", "<|channel|>a<|message|>5?<|channel|>"),
]


@pytest.mark.parametrize(("prompt", "response", "text"), READ)
def test_a_verifier_sees_where_thoughts_begin_and_end(words, prompt, response, text):
    """This holds if the tags are special tokens, too, and if the prompt has the first tag."""
    _, tokenizer = load_model(str(words))
    tags = ["<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>", "<|message|>", "<end>"]
    tokenizer.add_tokens(tags, special_tokens=True)
    prompt_ids, response_ids = tokenizer([prompt, response])["input_ids"]
    assert texts_of(packed([prompt_ids], [response_ids]), tokenizer) == [text]


USER = {"role": "user", "content": "2+2?"}
AS_TEXT = "its prompt is a text that holds messages"
DEEP = f'{{"prompt": "x", "answer": {"[" * 50_000}{"]" * 50_000}}}'
JSON = "no JSON object in UTF-8"
EITHER = "must be one text or number .*:"
TURNS = "its prompt has .*: a message needs a content"
QUESTION = "must end with a question"


def of(answer: object) -> dict:
    """Return a row with this answer."""
    return {"prompt": "x", "answer": answer}


def row_with(*prompt: object) -> dict:
    """Return a row with these messages."""
    return {"prompt": list(prompt), "answer": 1}


MALFORMED = [  # the third row, and what is said of it
    ("{not json", f"{JSON}.*property name"),
    (json.dumps(numbered(3)), f"{JSON}.*a list"),
    ('{"prompt": "caf\xe9", "answer": 1}', f"{JSON}.*'utf-8' codec"),
    (DEEP, f"{JSON}.*recursion"),
    ({"prompt": "x", "solution": 1}, "needs 'prompt' and 'answer', has prompt, solution"),
    (of(None), "needs 'prompt' and 'answer', has prompt "),
    (of({"value": "3", "why": {"a": 1}}), "has prompt, answer.value, answer.why.a"),
    (of(" \n"), EITHER),
    (of([3]), EITHER),
    (of("{'ground_truth': '34', 'style': 'rule'}"), EITHER),
    (of('{"ground_truth": "34"}'), EITHER),
    (of(float("nan")), f"{EITHER} nan"),
    ({"prompt": "\u2028 \t", "answer": 1}, QUESTION),
    (of("\frac{1}{2}"), "LaTeX written with one backslash"),
    ({"prompt": "x \times 2?", "answer": 1}, "LaTeX written with one backslash"),
    ('{"prompt": "x", "answer": 1, "answer": 2}', "a key twice"),
    ({"prompt": 7, "answer": 1}, TURNS),
    (row_with(), QUESTION),
    (row_with("2+2?"), TURNS),
    (row_with({"from": "human", "value": "2+2?"}), "ShareGPT"),
    (row_with({"role": "human", "content": "2+2?"}), TURNS),
    (row_with(USER, {"role": "assistant", "content": "4"}), QUESTION),
    ({"prompt": json.dumps([USER]), "answer": 1}, AS_TEXT),
    ({"prompt": str(USER), "answer": 1}, AS_TEXT),
    ({"prompt": "<|im_start|>user\n2+2?", "answer": 1}, "a chat template's <|im_start|>"),
    (row_with(USER | {"content": "[INST] 2+2? [/INST]"}), "a chat template's .INST."),
    (row_with(USER), "its tokenizer cannot write the prompt"),  # before any row is drawn
]


def test_answers_that_no_response_can_earn(tmp_path, mine, capsys):
    """Rows with such answers are left out and counted. A run that has no others ends before it
    begins; but a task file's own reward may find them right."""
    lost = ["N/A", "None", "see solution", r"\frac{1}{2", "x" * 2000]
    rows = [{"prompt": f"{i}?", "answer": answer} for i, answer in enumerate([*lost, "5"] * 2)]
    task = load(write(tmp_path / "set.jsonl", rows))
    assert {task.train(0).answer, task.held_out[0].answer} == {"5"}
    assert "left out 10 of 12 rows" in (output := capsys.readouterr().out) and "1, 2, 3" in output
    with pytest.raises(BadInput, match="set.jsonl: 5 of 5 rows are without an answer"):
        load(write(tmp_path / "set.jsonl", rows[:5]))
    text = "train = lambda i: ('1', 'N/A')\nheld_out = [('2', 'N/A')]\n"
    mine.write_text(text)
    with pytest.raises(BadInput, match="9 of 9 rows are without an answer"):
        load(str(mine))
    mine.write_text(text + "reward = lambda *both: 1.0")
    assert load(str(mine)).train(0).answer == "N/A"


@pytest.mark.parametrize(("row", "message"), MALFORMED)
def test_malformed_rows_are_named(tmp_path, row, message):
    """What could be read in another way is not guessed at."""
    text = row if isinstance(row, str) else json.dumps(row)
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n\n' + text, "latin-1")
    with pytest.raises(BadInput, match=f"^{path}:3: .*{message}") as error:
        load(str(path))
    assert "\n" not in str(error.value)


def test_a_column_inside_a_dict(tmp_path):
    """verl's files have such columns. A refusal of the dict itself names the paths into it."""
    model = {"ground_truth": "34", "style": "rule"}
    rows = [{"q": [USER | {"content": f"{i}?"}], "reward_model": model} for i in range(5)]
    path, how = tmp_path / "verl.parquet", {"prompt_column": "q"}
    datasets.Dataset.from_list(rows).to_parquet(path)
    task = load(str(path), Chat(), answer_column="reward_model.ground_truth", **how)
    assert {task.train(0).answer, task.held_out[0].answer} == {"34"}
    with pytest.raises(BadInput, match="verl.parquet:1: .*has .*reward_model.ground_truth, rew"):
        load(str(path), Chat(), answer_column="reward_model", **how)
    plain = [{"prompt": f"{i}?", "a.b": i} for i in range(5)]  # a column of that name
    assert load(write(tmp_path / "dots.jsonl", plain), answer_column="a.b").held_out


AS_PUBLISHED = {  # the answer's column in rows of public copies: the reference
    "math": {
        r"It follows that $x^2 + y^2 = \boxed 9$.": "9",
        r"first \boxed{1}, our answer is $\boxed 2$.": "2",
        r"Since none is prime, there are $\boxed{}$ primes in that range.": None,
    },
    "gsm8k": {"5 * 200 = 1,000\n#### 1,000": "1000", "#### -3\n": "-3", "####": None},
    "aime25": {r"336^\circ": r"336^\circ", "070": "70", "000": "0", 25: "25"},
    "minerva": {"4.49e33": "4.49e33", "1e-05": "1e-05", 0.00001: "0.00001", 1e22: f"1{'0' * 22}"},
    "olympiadbench": {
        "12": "12",
        "$3$ and $-3$": "3 and -3",
        ("$2$", r"$\frac{1}{2}$"): r"2, \frac{1}{2}",
    },
}


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_rows_of_named_sets_as_published(tmp_path, name, capsys):
    """Rows whose solution has no answer are left out and counted. (The rows are copied from pages
    and issues about these sets, not from the hub.)"""
    columns = HUB[name]
    rows = [{columns.prompt: "x", columns.answer: answer} for answer in AS_PUBLISHED[name]]
    file = write(tmp_path / "set.jsonl", rows)
    answers = [reference for reference in AS_PUBLISHED[name].values() if reference]
    assert [answer for _, answer in rows_of(f"{name}:{file}")] == answers
    output = capsys.readouterr().out
    assert (f"left out 1 of {len(rows)} rows" in output) == (len(answers) < len(rows))


def test_the_fingerprint_is_of_the_files_contents(tmp_path):
    """It depends on the task's and the evaluation's file, but on no name."""
    path = write(tmp_path / "a.jsonl", numbered(8))
    same = write(tmp_path / "b.jsonl", numbered(8))
    test = write(tmp_path / "test.jsonl", numbered(50)[40:])
    assert load(path).fingerprint == load(same).fingerprint
    prints = {load(path).fingerprint, load(path, eval_task=test).fingerprint}
    write(tmp_path / "test.jsonl", numbered(50)[39:])
    prints |= {load(path, eval_task=test).fingerprint}
    write(tmp_path / "a.jsonl", numbered(9))
    assert len(prints | {load(path).fingerprint}) == 4


# Task files


def test_a_custom_task(mine):
    """Another seed begins elsewhere. A task without a reward uses math-verify, and its answers may
    be numbers of numpy."""
    task = load(str(mine))
    assert [task.train(i).prompt for i in (0, 1, 7)] == ["0+1=", "1+1=", "0+1="]
    assert [(p.prompt, p.answer) for p in task.held_out] == [("8+1=", "9"), ("9+1=", "10")]
    assert scored(task.verifier(["#9", "9", "8"], ["9"] * 3)) == [1.0, 1.0, 0.0]
    assert load(str(mine), seed=2).train(0).prompt == "4+1="  # 1,000,003 further on
    other = load(f"{mine}:other")
    assert not other.verifier.spec
    assert (other.train(5).answer, other.held_out[0].answer) == ("2", "2.5")
    assert task.fingerprint == load(str(mine), seed=2, eval_problems=1).fingerprint


def test_problems_by_chance_are_found(mine):
    """A resumed run, and the process that scores, would have other problems."""
    mine.write_text(MINE.replace('"8+1="', "str(__import__('random').random())"))
    task, resumed = load(str(mine)), load(str(mine))
    assert task.fingerprint != resumed.fingerprint
    with pytest.raises(RunStopped, match="other problems than in the trainer"):
        task.verifier(["9"], ["9"])


PAIRS = "held_out = [('8+1=', '9')]\n"
UNUSABLE = {  # a task file: what is said
    "held_out = []\ntrain = lambda i: ('1+1=', '2')": "no held-out problems",
    "train = lambda i: ('1+1=', '2')": "needs train.* no attribute 'held_out'",
    "train = 1\nheld_out = 1": "needs train.i. .*and a list held_out .*not callable",
    "train = lambda i: 1\nheld_out = iter([1])": "a list held_out .*not subscriptable",
    PAIRS + "train = lambda i: ('1+1=', 7 / i)": "needs .*mine.py:2: ZeroDivisionError",
    PAIRS + "train = lambda i: [('1+1=', '2')][i]": "needs .*mine.py:2: IndexError",
    PAIRS + "train = lambda i: {'prompt': '1+1=', 'answer': 2}": "train.0. gives no .*a dict",
    PAIRS + "train = lambda i: ('1+1=', [2])": "train.0. .* one text or number",
    PAIRS + "train = lambda i: (i, '2')": "train.0. .* a message needs a content",
    PAIRS + "train = lambda i: ('1', {2})\nreward = 1": "train.0. .* not JSON serializable",
    PAIRS + "train = lambda i: ('1', {1: 2})\nreward = 1": "train.0. .*1: 2.* changes on its way",
    PAIRS + "train = lambda i: ('1', float('nan'))\nreward = 1": "train.0. .* changes on its way",
    "held_out = ['8+1=']\ntrain = lambda i: ('1+1=', '2')": "held_out.0. gives no",
    "x = 'caf\xe9'": "cannot be read .*'utf-8' codec",
}


@pytest.mark.parametrize("text", UNUSABLE)
def test_a_custom_task_that_cannot_be_used_is_named(mine, text):
    mine.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadInput, match=f"^--task {mine}: .*{UNUSABLE[text]}") as error:
        load(str(mine))
    assert "\n" not in str(error.value)
    mine.write_text(MINE)
    with pytest.raises(BadInput, match=f"^--task {mine}:none: none is not in the file"):
        load(f"{mine}:none")


def test_a_template_with_the_date_gives_the_same_prompts_every_day(words, tmp_path):
    _, tokenizer = load_model(words)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y %f') }}: {{ messages[0]['content'] }}"
    path = write(tmp_path / "set.jsonl", numbered(8))
    problem, other = (load(path, tokenizer, instruction="").train(0) for _ in range(2))
    assert problem.prompt_ids == other.prompt_ids
    assert "26 Jul 2024 000000: question" in tokenizer.decode(problem.prompt_ids)


def test_a_prompt_may_be_chat_messages(tmp_path):
    """What they say decides whether a prompt is held out."""
    chat = [{"role": "system", "content": "Be brief."}, USER]
    questions = [[USER | {"content": f"{i}?"}] for i in range(3)]
    rows = [{"prompt": messages, "answer": 4} for messages in (chat, *questions, *questions)]
    task = load(write(tmp_path / "set.jsonl", rows), Chat(), eval_problems=1)
    texts, held_out = {text_of(task.train(i)) for i in range(20)}, text_of(task.held_out[0])
    assert len(texts) == 3 and held_out not in texts
    plain = {f"<user>{i}?<assistant>" for i in range(3)}
    assert texts | {held_out} == plain | {"<system>Be brief.<user>2+2?<assistant>"}


@pytest.mark.slow
def test_a_reward_that_fails_on_every_answer_ends_the_run(tmp_path, mine):
    """It ends before the first step, also if one rank has no held-out problem."""
    held_out = 'held_out = [("8+1=", "9")]\ndef reward(response, answer): return rewrad\n'
    mine.write_text(MINE.partition("held_out")[0] + held_out)
    flags = ["--task", mine, "--run_dir", tmp_path / "run", *SMALL, "--steps", 1]
    ended = command("grpo", *flags, ranks=2)
    assert ended.codes == [1, 1]
    (line,) = [line for line in ended.stderr.splitlines() if "error: " in line]
    assert f"{mine}: fails on every answer" in line
    assert "mine.py:4: NameError: name 'rewrad' is not defined" in ended.stderr
