"""Tasks: where prompts come from, how they become tokens, and which judge scores the responses.

A task is a pure function of an index: `train(i)` is the i-th problem of this seed's endless stream.
The data cursor is therefore one integer, the same for any number of ranks, and a resumed run sees
what the uninterrupted one would have.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from common.distributed import BadInput, first_line
from common.reward import GYM_SIZE, MathJudge, arithmetic_reward, final_answer, gym_rows
from common.tiny import arithmetic

MOST_HELD_OUT = 100_000  # arithmetic problems: to draw and measure more would take hours
PLAIN_PROMPT = "Question: {prompt}\nAnswer:"  # for tokenizers without a chat template
# Of a prompt to a token at the most: a longer one is too long without being tokenised
CHARACTERS = 100
CHECKED = 32  # references that the judge is tried on before the run
PLAIN_NUMBER = re.compile(r"-?\d{1,100}([./]\d{1,100})?")  # a reference that needs no trying


@dataclass
class Problem:
    """One prompt, as text and as the token ids the model is given, and its reference answer."""

    prompt: str
    answer: str
    prompt_ids: list[int]


@dataclass
class Task:
    """`train(i)`: the i-th training problem; `held_out`: problems never trained on;
    `judge(completions, answers)`."""

    name: str
    train: Callable[[int], Problem]
    held_out: list[Problem]
    judge: Callable[[list[str], list[str]], list[float]]
    dropped: int = 0  # rows whose prompt is longer than --max_prompt_tokens
    fingerprint: str = ""  # of the local files it was read from: a resumed run must see the same
    # What the user should know of the data, a line each
    remarks: list[str] = field(default_factory=list)

    @property
    def killed(self) -> int:
        """Answers so far that broke the judge's bounds; 0 for judges that count none."""
        return getattr(self.judge, "killed", 0)


# Where a set lives on the Hugging Face hub and how its rows read; `train` or `test` is "" where
# there is no such split.
HubSet = namedtuple(
    "HubSet", "path config train test prompt answer extract", defaults=[lambda answer: answer]
)


def after_hashes(solution: str) -> str:
    """GSM8K: the number after `####`, without thousands separators."""
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise ValueError("the solution has no ####")
    return answer.strip().replace(",", "")


def boxed(solution: str) -> str:
    """MATH: the content of the solution's last \\boxed{...}."""
    answer = final_answer(solution)
    if not answer.startswith("\\boxed{"):
        raise ValueError("the solution has no \\boxed{...}")
    return answer.removeprefix("\\boxed{").removesuffix("}")


def listed(answers: list[str]) -> str:
    """OlympiadBench: a list of final answers, often between dollar signs."""
    if not isinstance(answers, list):
        raise TypeError("not a list of answers")
    return ", ".join(answer.strip().strip("$") for answer in answers)


HUB = {
    "gsm8k": HubSet("openai/gsm8k", "main", "train", "test", "question", "answer", after_hashes),
    "math": HubSet(
        "DigitalLearningGmbH/MATH-lighteval", None, "train", "test", "problem", "solution", boxed
    ),
    "dapo-math-17k": HubSet(
        "open-r1/DAPO-Math-17k-Processed", "en", "train", "", "prompt", "solution"
    ),
    # "025" is 25
    "aime24": HubSet("HuggingFaceH4/aime_2024", None, "train", "", "problem", "answer", int),
    "aime25": HubSet("math-ai/aime25", None, "", "test", "problem", "answer", int),
    "amc23": HubSet("math-ai/amc23", None, "", "test", "question", "answer"),
    "math500": HubSet("HuggingFaceH4/MATH-500", None, "", "test", "problem", "answer"),
    "minerva": HubSet("math-ai/minervamath", None, "", "test", "question", "answer"),
    "olympiadbench": HubSet(
        "math-ai/olympiadbench", None, "", "test", "question", "final_answer", listed
    ),
}


def load_task(args: object, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The task that `--task` names, by its kind, with `--eval_problems` held-out problems."""
    own_judge = args.task == "arithmetic" or args.task.startswith("reasoning_gym:")
    if args.eval_task and own_judge:
        raise BadInput(
            f"--eval_task {args.eval_task}: --task {args.task} has its own held-out problems and judge"
        )
    if "," in args.eval_task:
        raise BadInput(
            f"--eval_task {args.eval_task}: a run takes one set (tools.evaluate: several)"
        )
    if args.task == "arithmetic":
        task = arithmetic_task(args, tokenizer)
    elif own_judge:
        task = reasoning_gym_task(args, tokenizer)
    else:
        task = dataset_task(args, tokenizer)
    specs = (args.task, args.eval_task)
    contents = [path.read_bytes() for spec in specs if (path := local_file(spec))]
    task.fingerprint = hashlib.sha256(b"".join(contents)).hexdigest() if contents else ""
    return task


def room(args: object, tokenizer: PreTrainedTokenizerBase) -> tuple[int, str]:
    """Tokens that a prompt may have, so that the response fits into the model's positions too; and
    that in words."""
    positions = min(getattr(tokenizer, "model_max_length", math.inf), 10**9)
    words = f"{positions} positions less --max_new_tokens {args.max_new_tokens}"
    words = f"a prompt may have --max_prompt_tokens {args.max_prompt_tokens} tokens, and the model's {words}"
    return min(args.max_prompt_tokens, positions - args.max_new_tokens), words


def slowly(things: Iterable, what: str) -> Iterable:
    """The same things, behind a progress bar on rank 0 if it takes more than some seconds."""
    return tqdm(things, what, leave=False, delay=3, disable=os.environ.get("RANK", "0") != "0")


def arithmetic_task(args: object, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The embedded task. Its held-out problems are the same for every seed, so that runs can be
    compared."""

    def problem(prompt: str) -> Problem:
        return Problem(prompt, arithmetic.work(prompt)[1], encode(prompt, None, tokenizer))

    def train(index: int) -> Problem:
        rng = random.Random(f"train/{args.seed}/{index}")
        while arithmetic.held_out(prompt := arithmetic.draw(rng)):
            pass
        return problem(prompt)

    (most, limits), longest = room(args, tokenizer), len(problem(arithmetic.LONGEST).prompt_ids)
    if longest > most:
        raise BadInput(f"--task arithmetic: its longest prompt has {longest} tokens; {limits}")
    if args.eval_problems > MOST_HELD_OUT:
        raise BadInput(
            f"--eval_problems {args.eval_problems}: at most {MOST_HELD_OUT}, more would take hours"
        )
    rng, chosen = random.Random("held-out"), {}
    for _ in slowly(range(args.eval_problems), "drawing held-out problems"):
        while not arithmetic.held_out(prompt := arithmetic.draw(rng)) or prompt in chosen:
            pass
        chosen[prompt] = problem(prompt)  # a dict: no problem twice, and the order is kept
    return Task(
        "arithmetic", train, list(chosen.values()), lambda c, a: list(map(arithmetic_reward, c, a))
    )


def reasoning_gym_task(args: object, tokenizer: PreTrainedTokenizerBase) -> Task:
    """A procedural set of the `reasoning-gym` package, scored by its own function (which may give
    part marks).

    Held out is its second half, from the end; where a prompt is too long, another one of the same
    half takes its place.
    """
    name, half, (most, limits) = (
        args.task.removeprefix("reasoning_gym:"),
        GYM_SIZE // 2,
        room(args, tokenizer),
    )
    if args.eval_problems > half:
        raise BadInput(f"--eval_problems {args.eval_problems}: --task {args.task} has {half}")
    try:
        rows = gym_rows(name)
        rows[0]
    except ImportError as error:
        raise BadInput(
            f"--task {args.task}: needs the package (pip install reasoning-gym)"
        ) from error
    except Exception as error:  # each set checks its configuration in its own way
        raise BadInput(f"--task {args.task}: {first_line(error)}") from error

    def problem(index: int) -> Problem:
        start, rng = index // half * half, random.Random(index)
        for _ in range(100):
            question = (
                rows[index]["question"] + "\nGive the final answer between <answer> and </answer>."
            )
            if len(ids := encode(question, "", tokenizer)) <= most:
                return Problem(question, str(index), ids)
            index = start + rng.randrange(half)
        raise BadInput(f"--task {args.task}: hardly a prompt fits; {limits}")

    held_out = [
        problem(GYM_SIZE - 1 - i)
        for i in slowly(range(args.eval_problems), "drawing held-out problems")
    ]
    offset = random.Random(args.seed).randrange(half)
    return Task(
        args.task,
        lru_cache(1024)(lambda i: problem((offset + i) % half)),
        held_out,
        MathJudge(gym=name),
    )


def dataset_task(args: object, tokenizer: PreTrainedTokenizerBase) -> Task:
    """A finite set: an endless stream of seeded shuffles. Without a test split, up to a quarter of
    it is held back.

    A prompt that is held out is never trained on, in whatever row it stands.
    """
    # The same for every seed
    spec, judge, rng = args.eval_task or args.task, MathJudge(), random.Random("held-out")
    train_file, eval_file = (
        path and os.path.realpath(path) for path in map(local_file, (args.task, args.eval_task))
    )
    if train_file and train_file == eval_file:
        raise BadInput(
            f"--eval_task {spec}: is the training file; left out, a part of that is held back"
        )
    rows = read_set(args.task, args, "train")
    train_set = problems(rows, args, tokenizer, "--task " + args.task)
    remarks = remarks_on(args.task, train_set, judge)
    own_split = spec != args.task or (spec in HUB and HUB[spec].test)
    if own_split:
        held_out = problems(
            read_set(spec, args, "test", "--eval_task"), args, tokenizer, "--eval_task " + spec
        )
        remarks += remarks_on(spec, held_out, judge) if args.eval_task else []
        never = {problem.prompt for problem in held_out}
        held_out = rng.sample(held_out, min(args.eval_problems, len(held_out)))
    else:
        rng.shuffle(train_set)
        distinct = list({problem.prompt: problem for problem in train_set}.values())
        held_out = distinct[: min(args.eval_problems, max(1, len(distinct) // 4))]
        never = {problem.prompt for problem in held_out}
        if len(held_out) < args.eval_problems:
            remarks.append(
                f"{len(held_out)} of {len(distinct)} problems are held out (a quarter), not --eval_problems"
            )
    kept = [problem for problem in train_set if problem.prompt not in never]
    if not kept:
        raise BadInput(
            f"--task {args.task}: no training problem left of {len(rows)}: the prompts are all held out"
        )
    if len(train_set) - len(kept) > (0 if own_split else len(held_out)):
        remarks.append(
            f"{len(train_set) - len(kept)} rows have a prompt that is held out and are not trained on"
        )

    @lru_cache(2)
    def epoch(number: int) -> list[int]:
        return random.Random(f"epoch/{args.seed}/{number}").sample(range(len(kept)), len(kept))

    def train(index: int) -> Problem:
        number, place = divmod(index, len(kept))
        return kept[epoch(number)[place]]

    return Task(args.task, train, held_out, judge, len(rows) - len(train_set), remarks=remarks)


def remarks_on(spec: str, found: list[Problem], judge: MathJudge) -> list[str]:
    """What to say of prompts that come again, and of references that no response can match.

    The judge is tried on a sample of those references that are no plain numbers: all could take
    hours.
    """
    answers = {}
    for problem in found:
        answers.setdefault(problem.prompt, set()).add(problem.answer)
    remarks, several = [], sum(len(given) > 1 for given in answers.values())
    if again := len(found) - len(answers):
        remarks.append(
            f"{spec}: {again} of {len(found)} rows repeat a prompt; {several} prompts have several answers"
        )
    if own := sum(problem.answer == problem.prompt.strip() for problem in found):
        remarks.append(f"{spec}: {own} rows have their own prompt as the answer")
    odd = sorted(
        {problem.answer for problem in found if not PLAIN_NUMBER.fullmatch(problem.answer)}
    )
    tried = random.Random("tried").sample(odd, min(CHECKED, len(odd)))
    scores = judge([rf"\boxed{{{answer}}}" for answer in tried], tried)
    judge.killed = 0  # it counts the model's answers
    if wrong := [answer for answer, score in zip(tried, scores) if score < 1]:
        sample = f"{len(wrong)} of {len(tried)} references tried (of {len(odd)} that are no plain numbers)"
        remarks.append(
            f"{spec}: {sample} cannot be matched by any response, {wrong[0][:40]!r} for one"
        )
    return remarks


def problems(
    rows: list[tuple], args: object, tokenizer: PreTrainedTokenizerBase, flag: str
) -> list[Problem]:
    """Rows as problems, without those whose prompt is too long."""
    (most, limits), found = room(args, tokenizer), []
    for prompt, answer in slowly(rows, "tokenising"):
        if len(prompt) <= CHARACTERS * most:
            ids = encode(prompt, args.instruction, tokenizer)
            found += [Problem(prompt, answer, ids)] if len(ids) <= most else []
    if not found:
        raise BadInput(
            f"{flag}: {f'no problem left of {len(rows)}; {limits}' if rows else 'holds no problem'}"
        )
    return found


def encode(
    prompt: str, instruction: str | None, tokenizer: PreTrainedTokenizerBase, flag: str = "--model"
) -> list[int]:
    """Prompt and instruction as token ids: through the chat template if the tokenizer has one, else
    PLAIN_PROMPT.

    With `instruction` None the bare prompt. `flag` names the model in messages.
    """
    text, options = f"{prompt} {instruction or ''}".strip(), {}
    try:
        if instruction is not None and tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            options = {"add_special_tokens": False}  # the template wrote its special tokens already
        elif instruction is not None:
            text = PLAIN_PROMPT.format(prompt=text)
        ids = tokenizer(text, **options)["input_ids"]
        if not ids or max(ids) >= getattr(tokenizer, "embedded", math.inf):
            raise ValueError(
                f"it has tokens of which the model has no embedding: {max(ids)}"
                if ids
                else "no token left"
            )
        return ids
    except Exception as error:  # `tokenizers` and chat templates raise no narrower kind
        raise BadInput(
            f"{flag}: its tokenizer cannot write the prompt {text[:40]!r} ({first_line(error)})"
        ) from error


def local_file(spec: str) -> Path | None:
    """The file that `spec` names, alone (`my.jsonl`) or after a hub set whose columns it has
    (`gsm8k:my.jsonl`)."""
    name, _, path = spec.partition(":")
    file = Path(path if name in HUB else spec)
    return file if file.suffix in (".jsonl", ".parquet") else None


def read_set(spec: str, args: object, split: str, flag: str = "--task") -> list[tuple[str, str]]:
    """(prompt, answer) of every row that `spec` names: a hub short name (`gsm8k`) or a local file
    (columns by flag).

    Of a set without a split of its own for tests, "test" takes all rows.
    """
    path, name = local_file(spec), spec.partition(":")[0]
    columns = HUB.get(name) or HubSet("", None, "", "", args.prompt_column, args.answer_column)
    if path is None and spec not in HUB:
        more = "arithmetic, reasoning_gym:<name>, " if flag == "--task" else ""
        raise BadInput(
            f"{flag} {spec}: unknown, use one of {more}a .jsonl or .parquet file, {', '.join(HUB)}"
        )
    if path is None and split == "train" and not columns.train:
        raise BadInput(f"--task {spec}: has no training split, use it as --eval_task")
    if columns.prompt == columns.answer:
        raise BadInput(f"--answer_column {columns.answer}: is the --prompt_column, too")
    rows = hub_rows(
        name, columns, columns.test or columns.train if split == "test" else columns.train, flag
    )
    pairs = []
    for where, row in slowly(file_rows(path, flag) if path else rows, f"reading {spec}"):
        if not isinstance(row, dict) or not {columns.prompt, columns.answer} <= row.keys():
            flags = ("", "") if name in HUB else (" (--prompt_column)", " (--answer_column)")
            wanted = f"{columns.prompt!r}{flags[0]} and {columns.answer!r}{flags[1]}"
            raise BadInput(f"{where}: needs the columns {wanted}")
        prompt, answer = row[columns.prompt], row[columns.answer]
        try:
            answer = as_text(columns.extract(answer)) if answer is not None else ""
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise BadInput(
                f"{where}: {columns.answer!r} cannot be read as an answer ({first_line(error)})"
            ) from error
        if not isinstance(prompt, str) or not prompt.strip() or not answer:
            raise BadInput(
                f"{where}: {columns.prompt!r} must be a text and {columns.answer!r} must not be empty"
            )
        pairs.append((prompt, answer))
    return pairs


def as_text(answer: object) -> str:
    """A reference as text: AMC's 27.0 is 27; what no response could equal is refused."""
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)) or answer != answer:
        raise TypeError(f"{str(answer)[:40]} is neither a text nor a number")
    return str(
        int(answer) if isinstance(answer, float) and answer == int(answer) else answer
    ).strip()


def file_rows(path: Path, flag: str) -> Iterator[tuple[str, object]]:
    """("file:line", row) of a local file."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise OSError(0, "is no plain file")  # a pipe would be waited for
        data = path.read_bytes()
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise BadInput(f"{flag} {path}: {reason}") from error
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(pyarrow.BufferReader(data)).to_pylist()
        except Exception as error:  # pyarrow's own kinds
            raise BadInput(f"{path}: not a parquet file ({first_line(error)})") from error
        yield from ((f"{path}:row {number}", row) for number, row in enumerate(rows, 1))
        return
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            try:
                yield (
                    f"{path}:{number}",
                    json.loads(line.decode("utf-8-sig"), object_pairs_hook=without_repeats),
                )
            except (ValueError, RecursionError) as error:
                # UTF-16 has a zero byte in each letter
                coded = isinstance(error, UnicodeDecodeError) or b"\0" in line
                wrong = "not text in UTF-8, save it as such" if coded else "not a JSON object"
                raise BadInput(f"{path}:{number}: {wrong} ({first_line(error)})") from error


def without_repeats(pairs: list[tuple[str, object]]) -> dict:
    """A JSON object's keys and values; of a key that stands there twice json would silently take
    the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key stands there twice")
    return row


def hub_rows(name: str, columns: HubSet, split: str, flag: str) -> Iterator[tuple[str, object]]:
    """("name:row n", row) of a hub set, downloaded or from the local cache."""
    import datasets

    try:
        rows = datasets.load_dataset(columns.path, columns.config, split=split)
    # Offline, renamed, gated: `datasets` and its HTTP client raise many kinds
    except Exception as error:
        local = f"for a local copy use {flag} {name}:<file>"
        raise BadInput(
            f"{flag} {name}: cannot load {columns.path} ({first_line(error)}); {local}"
        ) from error
    yield from ((f"{name}:row {number}", row) for number, row in enumerate(rows, 1))
