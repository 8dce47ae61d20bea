"""Tasks: where prompts come from, how they become tokens, and which judge scores the responses.

A task is a pure function of an index: `train(i)` is the i-th problem of this seed's endless stream. The data cursor is
therefore one integer, the same for any number of ranks, and a resumed run sees what the uninterrupted one would have.
"""

from __future__ import annotations

import json
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from common.distributed import BadInput, first_line
from common.reward import MathJudge, arithmetic_reward, final_answer
from common.tiny import arithmetic

PLAIN_PROMPT = "Question: {prompt}\nAnswer:"  # for tokenizers without a chat template
REASONING_GYM_SIZE = 1_000_000


@dataclass
class Problem:
    """One prompt, as text and as the token ids the model is given, and its reference answer."""

    prompt: str
    answer: str
    prompt_ids: list[int]


@dataclass
class Task:
    """`train(i)`: the i-th training problem; `held_out`: problems never trained on; `judge(completions, answers)`."""

    name: str
    train: Callable[[int], Problem]
    held_out: list[Problem]
    judge: Callable[[list[str], list[str]], list[float]]
    dropped: int = 0  # rows whose prompt is longer than --max_prompt_tokens
    sets: dict[str, list[Problem]] = field(default_factory=dict)  # what --eval_only measures
    fingerprint: str = ""  # of the local files it was read from: a resumed run must see the same
    remarks: list[str] = field(default_factory=list)  # what the user should know of the data, a line each


# Where a set lives on the Hugging Face hub and how its rows read; `test` is "" where there is only one split.
HubSet = namedtuple("HubSet", "path config train test prompt answer extract", defaults=[lambda answer: answer])


def after_hashes(solution: str) -> str:
    """GSM8K: the number after `####`, without thousands separators."""
    return solution.rpartition("####")[2].strip().replace(",", "")


def boxed(solution: str) -> str:
    """MATH: the content of the solution's last \\boxed{...}."""
    answer = final_answer(solution)
    if not answer.startswith("\\boxed{"):
        raise ValueError("the solution has no \\boxed{...}")
    return answer.removeprefix("\\boxed{").removesuffix("}")


def listed(answers: list[str]) -> str:
    """OlympiadBench: a list of final answers, often between dollar signs."""
    return ", ".join(answer.strip().strip("$") for answer in answers)


HUB = {
    "gsm8k": HubSet("openai/gsm8k", "main", "train", "test", "question", "answer", after_hashes),
    "math": HubSet("DigitalLearningGmbH/MATH-lighteval", None, "train", "test", "problem", "solution", boxed),
    "dapo-math-17k": HubSet("open-r1/DAPO-Math-17k-Processed", "en", "train", "", "prompt", "solution"),
    "aime24": HubSet("HuggingFaceH4/aime_2024", None, "train", "", "problem", "answer", int),  # "025" is 25
    "aime25": HubSet("math-ai/aime25", None, "test", "", "problem", "answer", int),
    "amc23": HubSet("math-ai/amc23", None, "test", "", "question", "answer"),
    "math500": HubSet("HuggingFaceH4/MATH-500", None, "test", "", "problem", "answer"),
    "minerva": HubSet("math-ai/minervamath", None, "test", "", "question", "answer"),
    "olympiadbench": HubSet("math-ai/olympiadbench", None, "test", "", "question", "final_answer", listed),
}


def load_task(args: object, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The task that `--task` names, with `--eval_problems` held-out problems (from `--eval_task` if given).

    With `--eval_only` it has nothing to train on, but all problems of every set in `--eval_task` (else the held-out).
    """
    if args.eval_only and args.eval_task:
        specs = args.eval_task.split(",")
        sets = {spec: problems(read_set(spec, args, "test", whole=True), args, tokenizer) for spec in specs}
        for spec, found in sets.items():
            if not found:
                raise BadInput(f"--eval_task {spec}: no problem left (--max_prompt_tokens {args.max_prompt_tokens})")
        return Task(args.eval_task, None, [], MathJudge(), sets=sets)
    task = training_task(args, tokenizer)
    return replace(task, sets={task.name: task.held_out})


def training_task(args: object, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The task to train on, by the kind of its name."""
    if args.eval_task and (args.task == "arithmetic" or args.task.startswith("reasoning_gym:")):
        raise BadInput(f"--eval_task {args.eval_task}: --task {args.task} has its own held-out problems and judge")
    if args.task == "arithmetic":
        return arithmetic_task(args, tokenizer)
    if args.task.startswith("reasoning_gym:"):
        return reasoning_gym_task(args, tokenizer)
    return dataset_task(args, tokenizer)


def arithmetic_task(args: object, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The embedded task. Its held-out problems are the same for every seed, so that runs can be compared."""

    def problem(prompt: str) -> Problem:
        return Problem(prompt, arithmetic.work(prompt)[1], tokenizer(prompt)["input_ids"])

    def train(index: int) -> Problem:
        rng = random.Random(f"train/{args.seed}/{index}")
        while arithmetic.held_out(prompt := arithmetic.draw(rng)):
            pass
        return problem(prompt)

    rng, chosen = random.Random("held-out"), {}
    while len(chosen) < args.eval_problems:
        if arithmetic.held_out(prompt := arithmetic.draw(rng)):
            chosen[prompt] = problem(prompt)  # a dict: no problem twice, and the order is kept
    return Task("arithmetic", train, list(chosen.values()), lambda c, a: list(map(arithmetic_reward, c, a)))


def reasoning_gym_task(args: object, tokenizer: PreTrainedTokenizerBase) -> Task:
    """A procedural set of the `reasoning-gym` package, scored by its own function (which may give part marks)."""
    name = args.task.removeprefix("reasoning_gym:")
    try:
        import reasoning_gym
    except ImportError as error:
        raise BadInput(f"--task {args.task}: needs the package (pip install reasoning-gym)") from error
    try:
        rows = reasoning_gym.create_dataset(name, size=REASONING_GYM_SIZE, seed=0)
    except ValueError as error:
        raise BadInput(f"--task {args.task}: {first_line(error)}") from error
    ask = "\nGive the final answer between <answer> and </answer>."

    def problem(index: int) -> Problem:
        question = rows[index]["question"] + ask
        return Problem(question, str(index), encode(question, "", tokenizer))

    def judge(completions: list[str], answers: list[str]) -> list[float]:
        found = [reasoning_gym.utils.extract_answer(completion) for completion in completions]
        return [float(rows.score_answer(answer=f, entry=rows[int(a)])) for f, a in zip(found, answers)]

    held_out = [problem(REASONING_GYM_SIZE - 1 - i) for i in range(args.eval_problems)]
    offset = random.Random(args.seed).randrange(REASONING_GYM_SIZE)
    train = lru_cache(1024)(lambda i: problem((offset + i) % (REASONING_GYM_SIZE - args.eval_problems)))
    return Task(args.task, train, held_out, judge)


def dataset_task(args: object, tokenizer: PreTrainedTokenizerBase) -> Task:
    """A finite set: an endless stream of seeded shuffles. Without a test split, the evaluation's rows are held back."""
    rows, test_rows = read_set(args.task, args, "train"), read_set(args.eval_task or args.task, args, "test")
    train_set, held_out = (problems(found or [], args, tokenizer) for found in (rows, test_rows))
    dropped = len(rows) - len(train_set)
    rng = random.Random("held-out")  # not the run's seed: every run is measured on the same problems
    if test_rows is None:
        rng.shuffle(train_set)
        held_out, train_set = train_set[: args.eval_problems], train_set[args.eval_problems :]
    held_out = rng.sample(held_out, min(args.eval_problems, len(held_out)))
    for kind, found in (("training", train_set), ("held-out", held_out)):
        if not found:
            raise BadInput(
                f"--task {args.task}: no {kind} problem left of {len(rows)} ({dropped} over --max_prompt_tokens)"
            )

    @lru_cache(2)
    def epoch(number: int) -> list[int]:
        return random.Random(f"epoch/{args.seed}/{number}").sample(range(len(train_set)), len(train_set))

    def train(index: int) -> Problem:
        number, place = divmod(index, len(train_set))
        return train_set[epoch(number)[place]]

    return Task(args.task, train, held_out, MathJudge(), dropped)


def problems(rows: list[tuple[str, str]], args: object, tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    """Rows as problems, without those whose prompt is too long."""
    encoded = (Problem(prompt, answer, encode(prompt, args.instruction, tokenizer)) for prompt, answer in rows)
    return [problem for problem in encoded if len(problem.prompt_ids) <= args.max_prompt_tokens]


def encode(prompt: str, instruction: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Prompt and instruction as token ids: through the chat template if the tokenizer has one, else PLAIN_PROMPT."""
    text = f"{prompt} {instruction}".strip()
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template wrote its special tokens already
    try:
        return tokenizer(PLAIN_PROMPT.format(prompt=text))["input_ids"]
    except Exception as error:  # `tokenizers` raises no narrower kind
        raise BadInput(f"--model: its tokenizer cannot write the prompt {text[:40]!r} ({first_line(error)})") from error


def read_set(spec: str, args: object, split: str, whole: bool = False) -> list[tuple[str, str]] | None:
    """(prompt, answer) of every row that `spec` names; None where it has no "test" split of its own and not `whole`.

    `spec` is a hub short name (`gsm8k`), a local file (`my.jsonl`, `my.parquet`; columns by flag), or a local file
    with a hub set's columns (`gsm8k:my.jsonl`).
    """
    name, _, path = spec.partition(":") if spec.partition(":")[0] in HUB else ("", "", spec)
    columns = HUB.get(name) or HubSet("", None, "", "", args.prompt_column, args.answer_column)
    if path and Path(path).suffix not in (".jsonl", ".parquet"):
        known = f"arithmetic, reasoning_gym:<name>, a .jsonl or .parquet file, {', '.join(HUB)}"
        raise BadInput(f"--task {spec}: unknown, use one of {known}")
    if split == "test" and spec == args.task and (path or not columns.test) and not whole:
        return None
    hub_split = columns.test or columns.train if split == "test" else columns.train
    pairs = []
    for where, row in file_rows(Path(path)) if path else hub_rows(name, columns, hub_split):
        if not isinstance(row, dict) or not {columns.prompt, columns.answer} <= row.keys():
            wanted = f"{columns.prompt!r} (--prompt_column) and {columns.answer!r} (--answer_column)"
            raise BadInput(f"{where}: needs the columns {wanted}")
        prompt, answer = row[columns.prompt], row[columns.answer]
        try:
            answer = columns.extract(answer) if answer is not None else ""
        except (ValueError, TypeError, AttributeError) as error:
            raise BadInput(f"{where}: {columns.answer!r} cannot be read as an answer ({first_line(error)})") from error
        answer = f"{answer:g}" if isinstance(answer, float) else str(answer).strip()  # AMC: 27.0 is 27
        if not isinstance(prompt, str) or not prompt.strip() or not answer:
            raise BadInput(f"{where}: {columns.prompt!r} must be a text and {columns.answer!r} must not be empty")
        pairs.append((prompt, answer))
    return pairs


def file_rows(path: Path) -> Iterator[tuple[str, object]]:
    """("file:line", row) of a local file."""
    if not path.is_file():
        raise BadInput(f"--task {path}: no such file")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: not a parquet file ({first_line(error)})") from error
        yield from ((f"{path}:row {number}", row) for number, row in enumerate(rows, 1))
        return
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise BadInput(f"{path}:{number}: not a JSON object ({first_line(error)})") from error


def hub_rows(name: str, columns: HubSet, split: str) -> Iterator[tuple[str, object]]:
    """("name:row n", row) of a hub set, downloaded or from the local cache."""
    import datasets

    try:
        rows = datasets.load_dataset(columns.path, columns.config, split=split)
    except Exception as error:  # offline, renamed, gated: `datasets` and its HTTP client raise many kinds
        local = f"for a local copy use --task {name}:<file>"
        raise BadInput(f"--task {name}: cannot load {columns.path} ({first_line(error)}); {local}") from error
    yield from ((f"{name}:row {number}", row) for number, row in enumerate(rows, 1))
