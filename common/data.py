"""Tasks: where prompts come from, how they become tokens, and which judge scores the responses.

A task is a pure function of an index: `train(i)` is the i-th problem of this seed's endless stream.
The data cursor is therefore one integer, the same for any number of ranks, and a resumed run sees
what the uninterrupted one would have.
"""

import json
import math
import random
import re
import runpy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.distributed import BadInput, blame
from common.folder import checksum
from common.reward import Judge, arithmetic_reward, final_answer
from common.tiny import arithmetic

MOST_HELD_OUT = 100_000  # arithmetic problems: there are not many more
PLAIN_PROMPT = "Question: {prompt}\nAnswer:"  # for tokenizers without a chat template
CHARACTERS = 100  # of a prompt to a token, at the most: a longer prompt is not even tokenised
CHECKED = 32  # references that the judge is tried on before the run
TRIED = 1000  # rows whose prompts are encoded before the run, to see that some fit
PLAIN_NUMBER = re.compile(r"-?\d{1,100}([./]\d{1,100})?")  # a reference that needs no trying
Row = tuple[str, str]  # prompt, reference answer


@dataclass
class Problem:
    """One prompt, as text and as the token ids the model is given, and its reference answer."""

    prompt: str
    answer: str
    prompt_ids: list[int]


@dataclass
class Task:
    """`train(i)`: the i-th training problem; `held_out`: problems that are never trained on."""

    name: str
    train: Callable[[int], Problem]
    held_out: list[Problem]
    judge: Callable[[list[str], list[str]], list[float]]  # (completions, answers) -> rewards
    fingerprint: str = ""  # of the local files it was read from: a resumed run must see the same
    remarks: list[str] = field(default_factory=list)  # on the data, for the user, a line each
    exam: Callable | None = None  # the judge of the held-out problems, where it is another
    final: Callable[[str], str] = final_answer  # a response's answer, without its working

    def distinct(self, texts: list[str], group: int) -> int:
        """How many different answers, added up over groups of `group` responses."""
        return len({(i // group, self.final(text)) for i, text in enumerate(texts)})

    @property
    def killed(self) -> int:
        """Answers so far that broke the judge's bounds; 0 for judges that count none."""
        return getattr(self.judge, "killed", 0)


def load_task(args: object, tokenizer: Tokenizer) -> Task:
    """The task that `--task` names, with `--eval_problems` held-out problems."""
    file = args.task.partition(":")[0]
    if args.eval_task and (file.endswith(".py") or args.task in arithmetic.KINDS):
        raise BadInput(f"--eval_task: --task {args.task} has its own held-out problems and judge")
    if file.endswith(".py"):  # anybody's: it defines a function like this one
        with blame(f"--task {args.task}: cannot be used"):
            return runpy.run_path(file)["load_task"](args, tokenizer)
    if args.task in arithmetic.KINDS:
        return arithmetic_task(args, tokenizer)
    return dataset_task(args, tokenizer)


def arithmetic_task(args: object, tokenizer: Tokenizer) -> Task:
    """The embedded task, of any kind; held-out problems are the same for every seed."""
    kind = arithmetic.KINDS[args.task]
    test = kind._replace(terms=kind.held_out or kind.terms)

    def problem(prompt: str, worked: bool = False) -> Problem:
        steps, answer = arithmetic.work(prompt)
        answer = f"{';'.join(steps)}#{answer}" if worked else answer
        return Problem(prompt, answer, encode(prompt, None, tokenizer))

    def train(index: int) -> Problem:
        rng = random.Random(f"train/{args.seed}/{index}")
        while arithmetic.held_out(prompt := arithmetic.draw(rng, kind)):
            pass
        return problem(prompt, worked=kind.reward is not None)

    def judged(reward: Callable[[str, str], float]) -> Callable:
        return lambda completions, answers: list(map(reward, completions, answers))

    longest = len(problem("9" + "*9" * (max(kind.terms) - 1) + "=").prompt_ids)
    if longest > room(args, tokenizer):
        raise BadInput(f"--task {args.task}: a prompt of {longest} tokens; {limits(args, tokenizer)}")
    if args.eval_problems > MOST_HELD_OUT:
        raise BadInput(f"--eval_problems {args.eval_problems}: at most {MOST_HELD_OUT}")
    rng, chosen = random.Random("held-out"), {}  # a dict: no problem twice, and the order is kept
    while len(chosen) < args.eval_problems:
        if arithmetic.held_out(prompt := arithmetic.draw(rng, test)) and prompt not in chosen:
            chosen[prompt] = problem(prompt)
    exam = judged(arithmetic_reward) if kind.reward else None
    judge, held_out = judged(kind.reward or arithmetic_reward), list(chosen.values())
    final = lambda text: text.rpartition("#")[2]  # noqa: E731
    return Task(args.task, train, held_out, judge, exam=exam, final=final)


def dataset_task(args: object, tokenizer: Tokenizer) -> Task:
    """A finite set as an endless stream of seeded shuffles; a prompt is encoded when it is drawn.

    Without a test split, up to a quarter of it is held back. A prompt that is held out is never
    trained on, in whatever row it stands.
    """
    rows, judge = read_set(args.task, args, "train"), Judge()
    own_split = args.eval_task or (args.task in HUB and HUB[args.task].test)
    spec = args.eval_task or args.task
    test = read_set(spec, args, "test", "--eval_task") if own_split else rows
    remarks = remarks_on(args.task, rows, judge)
    remarks += remarks_on(spec, test, judge) if args.eval_task else []
    order, distinct = list(range(len(test))), {}
    random.Random("held-out").shuffle(order)  # the same for every seed
    for row in order:
        distinct.setdefault(test[row][0].strip(), test[row])
    most = min(args.eval_problems, len(distinct) if own_split else max(1, len(distinct) // 4))
    tried = (fitting(row, args, tokenizer) for row in islice(distinct.values(), max(most, TRIED)))
    held_out = list(islice(filter(None, tried), most))
    never = distinct.keys() if own_split else {problem.prompt.strip() for problem in held_out}
    kept = np.array([i for i, row in enumerate(rows) if row[0].strip() not in never])
    sample = random.Random("tried").sample(list(kept), min(TRIED, len(kept)))
    long = sum(fitting(rows[i], args, tokenizer) is None for i in sample)
    if not held_out or long == len(sample):
        why = f"all are held out or too long; {limits(args, tokenizer)}"
        raise BadInput(f"--task {args.task}: no problem left of {len(rows)}: {why}")
    if len(held_out) < args.eval_problems:
        remarks.append(f"{len(held_out)} of {len(distinct)} problems are held out")
    if (lost := len(rows) - len(kept)) > (0 if own_split else len(held_out)):
        remarks.append(f"{lost} rows have a prompt that is held out and are not trained on")
    if long:
        remarks.append(f"{long} of {len(sample)} prompts tried are too long: such are skipped")

    @lru_cache(2)
    def epoch(number: int) -> np.ndarray:
        return np.random.default_rng([args.seed, number]).permutation(kept)

    def train(index: int) -> Problem:
        number, place = divmod(index, len(kept))
        row, rng = epoch(number)[place], random.Random(f"instead/{args.seed}/{index}")
        while not (found := fitting(rows[row], args, tokenizer)):
            row = rng.choice(kept)  # too long: another row, by a rule of the index alone
        return found

    files = [path for path in map(local_file, (args.task, args.eval_task)) if path]
    return Task(args.task, train, held_out, judge, "".join(map(checksum, files)), remarks)


def remarks_on(spec: str, rows: list[Row], judge: Judge) -> list[str]:
    """What to say of prompts that come again, and of references that no response can match."""
    remarks, prompts = [], {prompt.strip() for prompt, _ in rows}
    if again := len(rows) - len(prompts):
        other = len({(prompt.strip(), answer) for prompt, answer in rows}) - len(prompts)
        how = f"{again} of {len(rows)} rows repeat a prompt, {other} with another answer"
        remarks.append(f"{spec}: {how}")
    odd = sorted({answer for _, answer in rows if not PLAIN_NUMBER.fullmatch(answer)})
    tried = random.Random("tried").sample(odd, min(CHECKED, len(odd)))  # all could take hours
    scores = judge([rf"\boxed{{{answer}}}" for answer in tried], tried)
    judge.killed = 0  # it counts the model's answers
    if wrong := [answer for answer, score in zip(tried, scores) if score < 1]:
        what = f"cannot be matched by any response, {wrong[0][:40]!r} for one"
        remarks.append(f"{spec}: {len(wrong)} of {len(tried)} references tried {what}")
    return remarks


# How a prompt becomes tokens


def room(args: object, tokenizer: Tokenizer) -> int:
    """Tokens that a prompt may have, so that its response fits too."""
    positions = getattr(tokenizer, "model_max_length", math.inf)
    return min(args.max_prompt_tokens, positions - args.max_new_tokens)


def limits(args: object, tokenizer: Tokenizer) -> str:
    """`room` in words."""
    left = f"the model's positions less --max_new_tokens {args.max_new_tokens}"
    return f"room is for {room(args, tokenizer)}: --max_prompt_tokens, and {left}"


def fitting(row: Row, args: object, tokenizer: Tokenizer) -> Problem | None:
    """(prompt, answer) as a problem, or None if the prompt is too long."""
    (prompt, answer), most = row, room(args, tokenizer)
    if len(prompt) <= CHARACTERS * most:
        ids = encode(prompt, args.instruction, tokenizer)
        return Problem(prompt, answer, ids) if len(ids) <= most else None


def encode(
    prompt: str, instruction: str | None, tokenizer: Tokenizer, flag: str = "--model"
) -> list[int]:
    """Prompt and instruction as token ids, through the tokenizer's chat template or PLAIN_PROMPT.

    With `instruction` None the bare prompt. `flag` names the model in messages.
    """
    text, chat = f"{prompt} {instruction or ''}".strip(), False
    with blame(f"{flag}: its tokenizer cannot write the prompt {text[:40]!r}"):
        if instruction is not None and (chat := bool(tokenizer.chat_template)):
            turn = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        elif instruction is not None:
            text = PLAIN_PROMPT.format(prompt=text)
        # The template wrote its special tokens already.
        ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        if not ids or max(ids) >= getattr(tokenizer, "embedded", math.inf):
            raise ValueError("no token, or one of which the model has no embedding")
        return ids


# Sets of problems: on the hub, or in a file


class HubSet(NamedTuple):
    """Where a set lives on the hub, and its columns; a split that it has not is ""."""

    path: str
    prompt: str
    answer: str
    train: str = ""
    test: str = "test"
    config: str | None = None
    extract: Callable[[object], object] = lambda answer: answer


def boxed(solution: str) -> str:
    """MATH: the content of the solution's last \\boxed{...}."""
    return re.fullmatch(r"\\boxed\{(.*)\}", final_answer(solution), re.DOTALL)[1]


def after_hashes(solution: str) -> str:
    """GSM8K: the number after `####`, without thousands separators."""
    return re.search("####(.*)", solution)[1].replace(",", "")


def listed(answers: list[str]) -> str:
    """OlympiadBench: a list of final answers, often between dollar signs."""
    return ", ".join(answer.strip().strip("$") for answer in answers)


MATH, DAPO = "DigitalLearningGmbH/MATH-lighteval", "open-r1/DAPO-Math-17k-Processed"
OLYMPIAD = "math-ai/olympiadbench"
HUB = {
    "gsm8k": HubSet("openai/gsm8k", "question", "answer", "train", "test", "main", after_hashes),
    "math": HubSet(MATH, "problem", "solution", "train", extract=boxed),
    "dapo-math-17k": HubSet(DAPO, "prompt", "solution", "train", "", "en"),
    # "025" is 25.
    "aime24": HubSet("HuggingFaceH4/aime_2024", "problem", "answer", "train", "", extract=int),
    "aime25": HubSet("math-ai/aime25", "problem", "answer", extract=int),
    "amc23": HubSet("math-ai/amc23", "question", "answer"),
    "math500": HubSet("HuggingFaceH4/MATH-500", "problem", "answer"),
    "minerva": HubSet("math-ai/minervamath", "question", "answer"),
    "olympiadbench": HubSet(OLYMPIAD, "question", "final_answer", extract=listed),
}


def local_file(spec: str) -> Path | None:
    """The file that `spec` names, alone (`my.jsonl`) or after the hub set whose columns it has."""
    name, _, path = spec.partition(":")
    file = Path(path if name in HUB else spec)
    return file if file.suffix in (".jsonl", ".parquet") else None


def read_set(spec: str, args: object, split: str, flag: str = "--task") -> list[Row]:
    """The rows of `spec`: a hub name (`gsm8k`) or a file (columns by flag).

    Of a set without a split of its own for tests, "test" takes all rows.
    """
    path, name = local_file(spec), spec.partition(":")[0]
    columns = HUB.get(name) or HubSet("", args.prompt_column, args.answer_column)
    if path is None and spec not in HUB:
        made = f"{', '.join(arithmetic.KINDS)}, a .py file, " if flag == "--task" else ""
        known = f"{made}a .jsonl or .parquet file, {', '.join(HUB)}"
        raise BadInput(f"{flag} {spec}: unknown, use one of {known}")
    if path is None and split == "train" and not columns.train:
        raise BadInput(f"--task {spec}: has no training split, use it as --eval_task")
    split = columns.test or columns.train if split == "test" else columns.train
    with blame(f"{flag} {spec}: cannot be read"):
        rows = list(pairs(source(path, columns, split), columns, str(path or name)))
        if not rows or columns.prompt == columns.answer:
            raise BadInput(f"{flag} {spec}: holds no problem with an answer")
        return rows


def source(path: Path | None, columns: HubSet, split: str) -> Iterable[bytes | dict]:
    """What a file or a hub set holds: lines of JSON, or rows."""
    if path is None:
        import datasets

        return datasets.load_dataset(columns.path, columns.config, split=split)
    if path.suffix == ".jsonl":
        return path.open("rb")
    import pyarrow.parquet

    batches = pyarrow.parquet.ParquetFile(path).iter_batches()
    return (row for batch in batches for row in batch.to_pylist())


def pairs(rows: Iterable[bytes | dict], columns: HubSet, where: str) -> Iterator[Row]:
    """Prompt and reference answer of each row; the first that has none is named."""
    for number, row in enumerate(rows, 1):
        if isinstance(row, bytes) and not row.strip():
            continue
        try:
            row = json.loads(row.decode("utf-8-sig")) if isinstance(row, bytes) else row
            prompt, answer = row[columns.prompt], as_text(columns.extract(row[columns.answer]))
            if not isinstance(prompt, str) or not prompt.strip() or not answer:
                raise ValueError("empty, or no text")
        except Exception as error:  # another's data: no JSON, no UTF-8, no column, ...
            flags = "" if columns.path else " (--prompt_column, --answer_column)"
            wanted = f"{columns.prompt!r}, a text, and {columns.answer!r}{flags}"
            raise BadInput(f"{where}:{number}: needs {wanted}: {error!r}") from error
        yield prompt, answer


def as_text(answer: object) -> str:
    """A reference as text: AMC's 27.0 is 27; what no response could equal is refused."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TypeError(f"{str(answer)[:40]} is neither a text nor a number")
    whole = isinstance(answer, float) and answer == int(answer)  # raises for NaN and infinities
    return str(int(answer) if whole else answer).strip()
