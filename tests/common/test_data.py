"""Tasks: the embedded one, local files, task files; rows that are wrong are named."""

import random

import datasets
import pytest
from common.plumbing.errors import BadInput
from common.plumbing.evaluation import evaluate
from common.rollout import HFEngine
from common.tiny import arithmetic
from grpo import Args

from tests.helpers import SMALL, command
from tests.common.rows import Letters, load, numbered, write


def drawn(task: object, count: int) -> set[str]:
    """The prompts of the first training problems."""
    return {task.train(i).prompt for i in range(count)}


def text_of(problem: object) -> str:
    return "".join(map(chr, problem.prompt_ids))


MINE = """
def train(i): return f"{i % 7}+1=", str(i % 7 + 1)
held_out = [("8+1=", "9"), ("9+1=", "10")]
def reward(response, answer): return float(response.strip("#") == answer)
class other:
    train = staticmethod(lambda i: ("1+1=", "2"))
    held_out = [("2+2=", "4")]
"""


@pytest.fixture
def mine(tmp_path):
    """A file for a task of yours, which holds MINE."""
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


def test_arithmetic_stream_is_seeded_and_disjoint_from_the_held_out_set(tiny):
    task, again, other = (
        load("arithmetic", tiny[1], eval_problems=200, seed=seed) for seed in (1, 1, 2)
    )
    stream = [task.train(i).prompt for i in range(500)]
    assert stream == [again.train(i).prompt for i in range(500)]
    assert task.train(7).prompt == stream[7]
    assert stream != [other.train(i).prompt for i in range(500)]
    held_out = [problem.prompt for problem in task.held_out]
    assert held_out == [problem.prompt for problem in other.held_out] and len(set(held_out)) == 200
    assert not set(stream) & set(held_out)
    assert all(task.verifier([f"#{p.answer}"], [p.answer]) == [1.0] for p in task.held_out)


def test_the_warm_start_never_saw_the_held_out_set():
    from tools.maintain.make_tiny import demonstration

    rng = random.Random(1)
    assert not any(arithmetic.held_out(demonstration(rng, 0.5, 0.1)[0]) for _ in range(300))


@pytest.mark.parametrize("name", arithmetic.KINDS)
def test_kinds_of_arithmetic_draw_what_they_say(tiny, name):
    """Numbers of terms and last operators; nothing held out is trained on."""
    kind = arithmetic.KINDS[name]
    task = load(name, tiny[1], eval_problems=50)
    stream = [task.train(i).prompt for i in range(400)]
    held_out = [problem.prompt for problem in task.held_out]
    assert not any(map(arithmetic.held_out, stream)) and all(map(arithmetic.held_out, held_out))
    assert {len(prompt) // 2 for prompt in stream} == set(kind.terms)
    assert {len(prompt) // 2 for prompt in held_out} == set(kind.held_out or kind.terms)
    assert {prompt[-3] for prompt in stream} == set(kind.last)


judgeD = {  # completion: the reward by the verifier with a hole, by part marks, held out
    "7*8=56;56-9=47;47+6=53#53": (1, 1, 1),
    "7*8=56;56-9=46;46+6=52#52": (0, 0.25, 0),
    "7*8=56;56-9=47#47": (1, 0.5, 0),  # stopped in the middle: a number of the solution, though
    "#53": (1, 0.25, 1),
    "#": (1, 0, 0),
}


def test_judges_of_noisy_and_steps(tiny):
    """Training is judged by the kind, held-out problems strictly."""
    noisy, steps = (load(f"arithmetic:{name}", tiny[1]) for name in ("noisy", "steps"))
    texts, solutions = list(judgeD), ["7*8=56;56-9=47;47+6=53#53"] * len(judgeD)
    by_noisy, by_steps = noisy.verifier(texts, solutions), steps.verifier(texts, solutions)
    strict = noisy.held_out_verifier(texts, ["53"] * len(texts))
    assert list(zip(by_noisy, by_steps, strict)) == list(judgeD.values())
    for task in (noisy, steps):
        problem, held_out = task.train(0), task.held_out[0]
        worked, answer = arithmetic.work(problem.prompt)
        assert problem.answer == f"{';'.join(worked)}#{answer}"
        assert held_out.answer == arithmetic.work(held_out.prompt)[1]


def test_evaluation_asks_the_held_out_verifier(tiny, world):
    """The held-out verifier, where a task has one; else the training's."""
    task = load("arithmetic:noisy", tiny[1])
    task.verifier = lambda texts, answers: [1.0] * len(texts)
    task.held_out_verifier = lambda texts, answers: [0.0] * len(texts)
    engine = HFEngine(tiny[0], world, 0, "float32", 64)
    for expected in (0, 1):
        found = evaluate(engine, task, tiny[1], Args(), world)
        assert found["greedy"] == found["sampled"] == found["example"]["reward"] == expected
        task.held_out_verifier = None


# Files


def test_local_file_without_split_holds_rows_back(tmp_path):
    """Each epoch is a permutation of the training rows; held-out rows are never among them,
    whatever the seed; a small file gives a quarter, and it is said."""
    path = write(tmp_path / "sums.jsonl", numbered(10))
    task, other = load(path), load(path, seed=9)
    held_out = {problem.prompt for problem in task.held_out}
    assert held_out == {problem.prompt for problem in other.held_out} and len(held_out) == 2
    epochs = [[task.train(8 * epoch + i).prompt for i in range(8)] for epoch in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == 8 and not set(epoch) & held_out
    assert epochs[0] != epochs[1]
    assert epochs[0] != [other.train(i).prompt for i in range(8)]
    small = load(write(tmp_path / "small.jsonl", numbered(60)), eval_problems=256)
    assert len(drawn(small, 45)) == 45 and len(small.held_out) == 15
    assert any("15 of 60 problems are held out" in line for line in small.remarks)


def test_a_held_out_prompt_is_never_trained_on(tmp_path):
    """Where rows repeat a prompt, and where another file holds some of the training's."""
    rows = [*numbered(20), *numbered(20), {"prompt": "question 3?", "answer": 4}]
    path = write(tmp_path / "set.jsonl", rows)
    task, other = load(path, eval_problems=5), load(path, eval_problems=5, seed=2)
    held_out = [problem.prompt for problem in task.held_out]
    assert held_out == [problem.prompt for problem in other.held_out] and len(set(held_out)) == 5
    assert not drawn(task, 200) & set(held_out)
    remarks = " ".join(task.remarks)
    assert "21 of 41 rows repeat a prompt, 1 with another answer" in remarks
    assert "rows have a prompt that is held out" in remarks
    test = write(tmp_path / "test.jsonl", numbered(3))
    again = load(path, eval_task=test, eval_problems=1)
    assert drawn(again, 100) == {f"question {i}?" for i in range(3, 20)}  # none of the three
    copy = write(tmp_path / "copy.jsonl", rows)
    for same, why in ((path, "is the training file, of which"), (copy, "no problem left of 41")):
        with pytest.raises(BadInput, match=why):
            load(path, eval_task=same)


def test_a_row_that_is_too_long_is_replaced_by_a_rule_of_the_index_alone(tmp_path):
    """Whatever was drawn before, as on another rank or after a resume."""
    rows = [{"prompt": f"{i}?" + " long" * 20 * (i % 3 == 0), "answer": i} for i in range(300)]
    path = write(tmp_path / "set.jsonl", rows)
    task, again = (load(path, max_prompt_tokens=60, instruction="") for _ in range(2))
    first = [task.train(i) for i in range(300)]
    assert [again.train(i) for i in reversed(range(200, 210))] == first[200:210][::-1]
    assert max(len(problem.prompt_ids) for problem in first) <= 60
    held_out = {int(problem.answer) for problem in task.held_out}
    assert {int(p.answer) for p in first} == {i for i in range(300) if i % 3} - held_out
    assert "prompts tried are too long" in task.remarks[-1]


def test_a_prompt_and_its_response_fit_into_the_model(tmp_path):
    """Room for a prompt: --max_prompt_tokens, but no more than the positions less
    --max_new_tokens."""
    tokenizer = Letters()
    tokenizer.model_max_length = 100
    path = write(tmp_path / "set.jsonl", numbered(6))  # 29 tokens with "Question: ... Answer:"
    plain = {"instruction": "", "eval_problems": 1}
    assert not load(path, tokenizer, max_new_tokens=71, **plain).remarks
    with pytest.raises(BadInput, match="no problem left of 6: .* 28: .* --max_new_tokens 72"):
        load(path, tokenizer, max_new_tokens=72, **plain)


class Chat(Letters):
    """With a chat template that shows the roles and the options that it is given."""

    chat_template = "{{ enable_thinking }} {{ style }}"

    def apply_chat_template(self, chat: list, tokenize: bool, **options: object) -> str:
        assert options.pop("add_generation_prompt") and not tokenize
        turns = "".join(f"<{turn['role']}>{turn['content']}" for turn in chat)
        return turns + "<assistant>" + str(options or "")


def test_columns_and_the_chat_template(tmp_path):
    path = write(tmp_path / "set.jsonl", [{"q": f"question {i}?", "a": i} for i in range(6)])
    columns = {"prompt_column": "q", "answer_column": "a", "instruction": "Think."}
    problem = load(path, **columns).train(0)
    assert text_of(problem) == f"Question: {problem.prompt} Think.\nAnswer:"
    problem = load(path, Chat(), **columns).train(0)
    assert text_of(problem) == f"<user>{problem.prompt} Think.<assistant>"


def test_options_of_the_chat_template(tmp_path, mine):
    """For task files and rows alike. A template ignores what it does not know: that is refused."""
    rows = write(tmp_path / "set.jsonl", numbered(8))
    given = "<assistant>{'enable_thinking': False, 'style': 'brief'}"
    for file in (str(mine), rows):
        task = load(file, Chat(), chat=("enable_thinking=false", "style=brief"))
        assert text_of(task.train(0)).endswith(given)
        assert text_of(task.held_out[0]).endswith(given)
    with pytest.raises(BadInput, match="--chat thinks: .*chat template does not read"):
        load(rows, Chat(), chat=("thinks=1",))


def test_parquet(tmp_path):
    path = tmp_path / "set.parquet"
    datasets.Dataset.from_list(numbered(6)).to_parquet(path)
    assert {problem.answer for problem in load(str(path)).held_out} < {str(i) for i in range(6)}


def test_texts_and_numbers_arrive_as_they_are(tmp_path):
    """27.0 is 27, and nothing is rounded; a byte order mark, CRLF, empty lines and U+2028, at
    which str.splitlines would cut, change nothing."""
    answers = ["27.0", "1234567.0", "3.14159265", str(10**20), '"007"']
    rows = [f'{{"prompt": "a\u2028{i}", "answer": {a}}}' for i, a in enumerate(answers)]
    path = tmp_path / "set.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(rows).encode())
    task = load(str(path))
    problems = [*map(task.train, range(4)), *task.held_out]
    assert {p.prompt for p in problems} == {f"a\u2028{i}" for i in range(5)}
    assert {p.answer for p in problems} == {"27", "1234567", "3.14159265", str(10**20), "007"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*numbered(2), "{not json"], "set.jsonl:3: needs .*property name"),
        ([{"prompt": 7, "answer": 7}], "set.jsonl:1: .*no text"),
        ([{"prompt": [{"role": "user", "text": "x"}], "answer": 7}], "set.jsonl:1: .*'content'"),
        ([*numbered(2), '{"prompt": "x", "answer": NaN}'], "set.jsonl:3: .*NaN"),
        ([*numbered(2), '{"prompt": "x", "answer": 1, "answer": 2}'], "set.jsonl:3: .*twice"),
        ([{"prompt": "x", "answer": 1}] * 60, "no problem left of 60: all are held out"),
    ],
)
def test_malformed_rows_are_named(tmp_path, rows, message):
    with pytest.raises(BadInput, match=message) as error:
        load(write(tmp_path / "set.jsonl", rows))
    assert "\n" not in str(error.value)


def test_the_fingerprint_is_of_the_files_contents(tmp_path):
    """Of the task's and of the evaluation's file, and not of their names."""
    one = write(tmp_path / "a.jsonl", numbered(8))
    same = write(tmp_path / "b.jsonl", numbered(8))
    test = write(tmp_path / "test.jsonl", numbered(50)[40:])
    assert load(one).fingerprint == load(same).fingerprint
    prints = {load(one).fingerprint, load(one, eval_task=test).fingerprint}
    write(tmp_path / "test.jsonl", numbered(50)[39:])
    prints |= {load(one, eval_task=test).fingerprint}
    write(tmp_path / "a.jsonl", numbered(9))
    assert len(prints | {load(one).fingerprint}) == 4


# Task files


def test_a_task_of_yours(mine):
    """Its problems in order, its held-out ones, its reward in a bounded worker; another seed begins
    elsewhere; a file may hold several, and one without a reward is math-verify's."""
    task = load(str(mine))
    assert [task.train(i).prompt for i in (0, 1, 7)] == ["0+1=", "1+1=", "0+1="]
    assert [(p.prompt, p.answer) for p in task.held_out] == [("8+1=", "9"), ("9+1=", "10")]
    assert task.verifier(["#9", "9", "8"], ["9"] * 3) == [1.0, 1.0, 0.0] and not task.remarks
    task.verifier.close()
    assert load(str(mine), seed=2).train(0).prompt == "4+1="  # 1,000,003 further on
    other = load(f"{mine}:other")
    assert other.train(5).answer == "2" and not other.verifier.spec
    assert task.fingerprint == load(str(mine), seed=2, eval_problems=1).fingerprint
    assert task.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("held_out = []\ntrain = len", "held_out is empty"),
        (MINE.replace("i % 7}", "__import__('random').random()}"), "problems when it is asked"),
    ],
)
def test_a_task_of_yours_that_is_none_is_named(mine, text, message):
    mine.write_text(text)
    with pytest.raises(BadInput, match=message):
        load(str(mine))


def test_a_prompt_may_be_chat_messages(tmp_path, mine):
    """In a task file and in rows; held out by what they say."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    mine.write_text(f"held_out = [({chat}, '4')]\ntrain = lambda i: ('2?', '2')")
    task = load(str(mine), Chat())
    assert text_of(task.held_out[0]) == "<system>Be brief.<user>2+2?<assistant>"
    assert text_of(task.train(3)) == "<user>2?<assistant>"
    asked = [[{"role": "user", "content": f"{i}?"}] for i in range(3)]
    rows = [{"prompt": messages, "answer": 4} for messages in (chat, *asked, *asked)]
    task = load(write(tmp_path / "set.jsonl", rows), Chat(), eval_problems=1)
    texts = {text_of(task.train(i)) for i in range(20)}
    assert len(texts) == 3 and text_of(task.held_out[0]) not in texts


def test_what_does_not_fit_a_task_file_is_said(mine, tiny):
    """Held-out problems that the model cannot read, and those that come up in training."""
    mine.write_text(MINE.replace('("9+1="', '("nine+1="'))
    task = load(str(mine), tiny[1])
    left_out = "1 held-out problems: too long, or not to be written"
    assert len(task.held_out) == 1 and task.remarks == [left_out]
    mine.write_text(MINE.replace('"9+1="', '"3+1="'))
    assert "1 of 2 held-out problems come up in training, too" in load(str(mine)).remarks[0]


REWARD = """
def reward(response, reference): return float(response == str(reference))
def second(response, reference): return 0.5 if reference == {"answer": 2, "tests": [2]} else 0.25
"""


@pytest.fixture
def reward(tmp_path):
    """A file with rewards of yours, for --reward."""
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path / "reward.py"


def test_a_reward_of_yours_on_any_set(tmp_path, mine, reward, tiny):
    """It judges the training. Sets with a verifier of their own keep it for the held-out problems,
    files of rows have none."""
    path = write(tmp_path / "set.jsonl", numbered(8))
    for task, own_verifier in (("arithmetic", True), (str(mine), True), (path, False)):
        tokenizer = tiny[1] if task == "arithmetic" else Letters()
        found = load(task, tokenizer, reward=str(reward))
        assert found.verifier(["x", "7"], ["x", "8"]) == [1.0, 0.0]
        assert (
            found.held_out_verifier is not None
        ) == own_verifier and found.held_out_verifier is not found.verifier
        found.verifier.close()
    prints = {load(path, reward=str(reward)).fingerprint, load(path).fingerprint}
    reward.write_text(REWARD + "\n# more\n")
    assert len(prints | {load(path, reward=str(reward)).fingerprint}) == 3


def test_a_reward_gets_the_columns_of_a_row(tmp_path, reward):
    """One as it stands there, several as a dict."""
    rows = [{"prompt": f"{i}?", "answer": i, "tests": [i]} for i in range(8)]
    path, spec = write(tmp_path / "set.jsonl", rows), f"{reward}:second"
    task = load(path, reward=spec, answer_column="answer,tests")
    both = [{"answer": 2, "tests": [2]}, {"answer": 3, "tests": [3]}]
    assert task.verifier(["a", "b"], both) == [0.5, 0.25]
    assert all(task.train(i).answer["tests"] == [task.train(i).answer["answer"]] for i in range(4))
    task.verifier.close()
    assert load(path, reward=spec, answer_column="tests").train(0).answer in [[i] for i in range(8)]


@pytest.mark.slow
def test_a_reward_that_fails_on_every_answer_ends_the_run(tmp_path, mine):
    """Before the first step; also where one rank has no held-out problem to judge."""
    held_out = 'held_out = [("8+1=", "9")]\ndef reward(response, answer): return rewrad\n'
    mine.write_text(MINE.partition("held_out")[0] + held_out)
    flags = ["--task", mine, "--run_dir", tmp_path / "run", *SMALL, "--steps", 1]
    ended = command("grpo", *flags, ranks=2)
    assert ended.codes == [2, 2] and (tmp_path / "run/metrics.jsonl").read_text() == ""
    (line,) = [line for line in ended.stderr.splitlines() if "error: " in line]
    why = "(mine.py:4: NameError: name 'rewrad' is not defined)"
    assert line.endswith(f"{mine}: the reward fails on every answer {why}")


@pytest.mark.slow
def test_ranks_with_other_problems_end_in_a_line(tmp_path):
    """Or each would measure a share of its own set."""
    file = tmp_path / "mine.py"
    held_out = "import os\nheld_out = [('1+1=', '2')] * (1 + int(os.environ['RANK']))\n"
    file.write_text(held_out + "train = lambda i: ('2+1=', '3')")
    ended = command("grpo", "--task", file, "--run_dir", tmp_path / "run", ranks=2)
    assert ended.codes == [2, 2] and not (tmp_path / "run").exists()
    assert f"--task {file}: ranks see different problems" in ended.stderr
