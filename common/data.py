"""Tasks: where prompts come from, how they become tokens, and which judge scores the responses.

A task is a pure function of an index: `train(i)` is the i-th problem of this seed's endless stream.
The data cursor is therefore one integer, the same for any number of ranks, and a resumed run sees
what the uninterrupted one would have.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.distributed import BadInput, RunStopped, blame, first_line
from common.folder import checksum
from common.reward import GYM_SIZE, MathJudge, arithmetic_reward, final_answer, gym_rows
from common.tiny import arithmetic

MOST_HELD_OUT = 100_000  # arithmetic problems: to draw and measure more would take hours
PLAIN_PROMPT = "Question: {prompt}\nAnswer:"  # for tokenizers without a chat template
GYM_PROMPT = "{question}\nGive the final answer between <answer> and </answer>."
CHARACTERS = 100  # of a prompt to a token, at the most: a longer prompt is not even tokenised
CHECKED = 32  # references that the judge is tried on before the run
TRIED = 1000  # rows whose prompts are encoded before the run, to see that some fit
PLAIN_NUMBER = re.compile(r"-?\d{1,100}([./]\d{1,100})?")  # a reference that needs no trying


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
    dropped: set[int] = field(default_factory=set)  # rows met so far whose prompt is too long
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
    """The task that `--task` names, by its kind, with `--eval_problems` held-out problems."""
    gym = args.task.startswith("reasoning_gym:")
    if args.eval_task and (gym or args.task in arithmetic.KINDS):
        raise BadInput(f"--eval_task: --task {args.task} has its own held-out problems and judge")
    if "," in args.eval_task:
        raise BadInput(f"--eval_task {args.eval_task}: one set, several are for tools.evaluate")
    if args.task in arithmetic.KINDS:
        return arithmetic_task(args, tokenizer)
    return reasoning_gym_task(args, tokenizer) if gym else dataset_task(args, tokenizer)


# Where the prompts come from


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

    most, limits = room(args, tokenizer)
    longest = len(problem("9" + "*9" * (max(kind.terms) - 1) + "=").prompt_ids)
    if longest > most:
        raise BadInput(f"--task {args.task}: its longest prompt has {longest} tokens; {limits}")
    if args.eval_problems > MOST_HELD_OUT:
        raise BadInput(f"--eval_problems {args.eval_problems}: at most {MOST_HELD_OUT}")
    rng, chosen = random.Random("held-out"), {}
    for _ in slowly(range(args.eval_problems), "drawing held-out problems"):
        while not arithmetic.held_out(prompt := arithmetic.draw(rng, test)) or prompt in chosen:
            pass
        chosen[prompt] = problem(prompt)  # a dict: no problem twice, and the order is kept
    exam = judged(arithmetic_reward) if kind.reward else None
    judge = judged(kind.reward or arithmetic_reward)
    problems, final = list(chosen.values()), lambda text: text.rpartition("#")[2]
    return Task(args.task, train, problems, judge, exam=exam, final=final)


def reasoning_gym_task(args: object, tokenizer: Tokenizer) -> Task:
    """A procedural set of the `reasoning-gym` package, scored by its own function.

    Held out is its second half, from the end; where a prompt is too long, another one of the same
    half takes its place.
    """
    name, half = args.task.removeprefix("reasoning_gym:"), GYM_SIZE // 2
    most, limits = room(args, tokenizer)
    if args.eval_problems > half:
        raise BadInput(f"--eval_problems {args.eval_problems}: --task {args.task} has {half}")
    try:
        rows = gym_rows(name)
        rows[0]
    except Exception as error:  # each set checks its configuration in its own way
        missing = "needs the package (pip install reasoning-gym)"
        why = missing if isinstance(error, ImportError) else first_line(error)
        raise BadInput(f"--task {args.task}: {why}") from error

    @lru_cache(1024)
    def problem(index: int) -> Problem:
        start, rng, place = index // half * half, random.Random(index), index
        for _ in range(100):
            question = GYM_PROMPT.format(question=rows[place]["question"])
            if len(ids := encode(question, "", tokenizer)) <= most:
                return Problem(question, str(place), ids)
            place = start + rng.randrange(half)
        raise BadInput(f"--task {args.task}: hardly a prompt fits; {limits}")

    numbers = slowly(range(args.eval_problems), "drawing held-out problems")
    held_out = [problem(GYM_SIZE - 1 - i) for i in numbers]
    offset = random.Random(args.seed).randrange(half)
    train = lambda i: problem((offset + i) % half)  # noqa: E731
    return Task(args.task, train, held_out, MathJudge(gym=name))


def dataset_task(args: object, tokenizer: Tokenizer) -> Task:
    """A finite set as an endless stream of seeded shuffles; a prompt is encoded when it is drawn.

    Without a test split, up to a quarter of it is held back. A prompt that is held out is never
    trained on, in whatever row it stands.
    """
    spec, judge = args.eval_task or args.task, MathJudge()
    files = [path for path in map(local_file, (args.task, args.eval_task)) if path]
    if len(files) == 2 and len(set(map(os.path.realpath, files))) == 1:
        raise BadInput(f"--eval_task {spec}: is the training file, of which a part is held back")
    rows = read_set(args.task, args, "train")
    remarks = remarks_on(args.task, rows, judge)
    own_split = spec != args.task or bool(spec in HUB and HUB[spec].test)
    if own_split:
        test = read_set(spec, args, "test", "--eval_task")
        remarks += remarks_on(spec, test, judge) if args.eval_task else []
        held_out = hold_out(test, 1, args, tokenizer, f"--eval_task {spec}")
        never = test.prompts
    else:
        held_out = hold_out(rows, 4, args, tokenizer, f"--task {spec}")
        never = rows.prompts[list(held_out)]
        if len(held_out) < args.eval_problems:
            total = len(np.unique(rows.prompts))
            remarks.append(f"{len(held_out)} of {total} problems are held out (a quarter)")
    kept, dropped = np.flatnonzero(~np.isin(rows.prompts, never)).astype(np.uint32), set()
    lost = len(rows) - len(kept)
    if lost > (0 if own_split else len(held_out)):
        remarks.append(f"{lost} rows have a prompt that is held out and are not trained on")

    def problem(row: int) -> Problem | None:
        found = None if row in dropped else fitting(rows[row], args, tokenizer)
        dropped.update(() if found else (row,))
        return found

    @lru_cache(2)
    def epoch(number: int) -> np.ndarray:
        return np.random.default_rng([args.seed, number]).permutation(kept)

    def train(index: int) -> Problem:
        number, place = divmod(index, len(kept))
        row, rng = int(epoch(number)[place]), random.Random(f"instead/{args.seed}/{index}")
        while not (found := problem(row)):  # too long: another row, by a rule of the index alone
            row = int(rng.choice(kept))
        return found

    tried = random.Random("tried").sample(range(len(kept)), min(TRIED, len(kept)))
    if not any([problem(int(kept[place])) for place in tried]):  # all of them, to count
        left = f"no training problem left of {len(rows)}: the prompts are all held out"
        left += f" or too long; {room(args, tokenizer)[1]}" if tried else ""
        raise BadInput(f"--task {args.task}: {left}")
    fingerprint = "".join(map(checksum, files))
    problems = list(held_out.values())
    return Task(args.task, train, problems, judge, dropped, fingerprint, remarks)


def hold_out(
    rows: Rows, part: int, args: object, tokenizer: Tokenizer, flag: str
) -> dict[int, Problem]:
    """--eval_problems of the set by their rows, no prompt twice, the same for every seed.

    They come from the first 1/`part` of a fixed shuffle, or are the first one that fits.
    """
    order, chosen = np.arange(len(rows)), {}
    random.Random("held-out").shuffle(order)
    order = order[np.sort(np.unique(rows.prompts[order], return_index=True)[1])]
    for number, row in enumerate(map(int, slowly(order, "tokenising"))):
        most = max(1, len(order) // part) if chosen else TRIED
        if number == most or len(chosen) == args.eval_problems:
            break
        if problem := fitting(rows[row], args, tokenizer):
            chosen[row] = problem
    if not chosen:
        left = f"no problem left of {min(len(order), TRIED)}; {room(args, tokenizer)[1]}"
        raise BadInput(f"{flag}: {left}")
    return chosen


def remarks_on(spec: str, rows: Rows, judge: MathJudge) -> list[str]:
    """What to say of prompts that come again, and of references that no response can match.

    The judge is tried on a sample of those references that are no plain numbers: all could take
    hours.
    """
    remarks, pairs = [], 3 * rows.prompts + rows.answers
    if again := len(rows) - len(np.unique(rows.prompts)):
        answers = rows.prompts[np.unique(pairs, return_index=True)[1]]  # a prompt for each of its
        several = (np.unique(answers, return_counts=True)[1] > 1).sum()
        several = f"{several} prompts have several answers"
        remarks.append(f"{spec}: {again} of {len(rows)} rows repeat a prompt; {several}")
    if own := (rows.prompts == rows.answers).sum():
        remarks.append(f"{spec}: {own} rows have their own prompt as the answer")
    odd = rows.odd[np.unique(rows.answers[rows.odd], return_index=True)[1]]  # sorted by hash
    tried = [rows[int(row)][1] for row in odd[:CHECKED]]
    scores = judge([rf"\boxed{{{answer}}}" for answer in tried], tried)
    judge.killed = 0  # it counts the model's answers
    if wrong := [answer for answer, score in zip(tried, scores) if score < 1]:
        sample = f"{len(tried)} references tried (of {len(odd)} that are no plain numbers)"
        what = f"cannot be matched by any response, {wrong[0][:40]!r} for one"
        remarks.append(f"{spec}: {len(wrong)} of {sample} {what}")
    return remarks


# How a prompt becomes tokens


def fitting(row: tuple[str, str], args: object, tokenizer: Tokenizer) -> Problem | None:
    """(prompt, answer) as a problem, or None if the prompt is too long."""
    (prompt, answer), (most, _) = row, room(args, tokenizer)
    if len(prompt) <= CHARACTERS * most:
        ids = encode(prompt, args.instruction, tokenizer)
        return Problem(prompt, answer, ids) if len(ids) <= most else None


def room(args: object, tokenizer: Tokenizer) -> tuple[int, str]:
    """Tokens that a prompt may have, so that its response fits too; and that in words."""
    positions = min(getattr(tokenizer, "model_max_length", math.inf), 10**9)
    words = f"a prompt may have --max_prompt_tokens {args.max_prompt_tokens} tokens, and the "
    words += f"model's {positions} positions less --max_new_tokens {args.max_new_tokens}"
    return min(args.max_prompt_tokens, positions - args.max_new_tokens), words


def encode(
    prompt: str, instruction: str | None, tokenizer: Tokenizer, flag: str = "--model"
) -> list[int]:
    """Prompt and instruction as token ids, through the tokenizer's chat template or PLAIN_PROMPT.

    With `instruction` None the bare prompt. `flag` names the model in messages.
    """
    text, options = f"{prompt} {instruction or ''}".strip(), {}
    with blame(f"{flag}: its tokenizer cannot write the prompt {text[:40]!r}"):
        if instruction is not None and tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            options = {"add_special_tokens": False}  # the template wrote its special tokens already
        elif instruction is not None:
            text = PLAIN_PROMPT.format(prompt=text)
        ids = tokenizer(text, **options)["input_ids"]
        if not ids:
            raise ValueError("no token left")
        if max(ids) >= getattr(tokenizer, "embedded", math.inf):
            raise ValueError(f"it has tokens of which the model has no embedding: {max(ids)}")
        return ids


def slowly(things: Iterable, what: str) -> Iterable:
    """The same things, behind a progress bar on rank 0 if it takes more than some seconds."""
    return tqdm(things, what, leave=False, delay=3, disable=os.environ.get("RANK", "0") != "0")


# Sets of problems: on the hub, or in a file


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


class HubSet(NamedTuple):
    """Where a set lives on the hub, and its columns; a split that it has not is ""."""

    path: str
    prompt: str
    answer: str
    train: str = ""
    test: str = "test"
    config: str | None = None
    extract: Callable[[object], object] = lambda answer: answer


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


class Rows:
    """A set: `rows[i]` is the (prompt, answer) of its i-th row, read when it is asked for.

    The pass over all rows at the start, which finds the broken ones, keeps 20 bytes of each.
    """

    def __init__(self, source: object, columns: HubSet, name: str, where: str):
        self.source, self.columns, self.where = source, columns, where
        places, prompts, answers, odd = array("I"), array("Q"), array("Q"), array("I")
        for place, row in enumerate(slowly(source, f"reading {name}")):
            if row is not None:  # an empty line
                prompt, answer = pair(row, columns, f"{where}{place + 1}")
                if not PLAIN_NUMBER.fullmatch(answer):
                    odd.append(len(places))
                places.append(place)
                prompts.append(key(prompt))
                answers.append(key(answer))
        self.places, self.odd = np.asarray(places), np.asarray(odd)
        self.prompts, self.answers = np.asarray(prompts), np.asarray(answers)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, row: int) -> tuple[str, str]:
        place = int(self.places[row])  # past the last row: IndexError, which ends a for loop
        with contextlib.suppress(BadInput):  # it was none at the start
            found = pair(self.source[place], self.columns, "")
            if (*map(key, found),) == (self.prompts[row], self.answers[row]):
                return found
        raise RunStopped(f"{self.where}{place + 1}: changed under the run")


def key(text: str) -> int:
    """8 bytes that stand for a text: among millions no two are likely to be the same."""
    text = text.strip().encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def without_repeats(pairs: list[tuple[str, object]]) -> dict:
    """A JSON object; a key that stands there twice is refused: json would take the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key stands there twice")
    return row


PARSER = json.JSONDecoder(object_pairs_hook=without_repeats)


class Lines:
    """The rows of a .jsonl file: 8 bytes for each line's start, the lines stay in the file."""

    def __init__(self, file: BinaryIO):
        self.file, self.starts = file, array("Q", accumulate(map(len, file), initial=0))
        self.starts.pop()  # the file's end

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, place: int) -> object:
        where = f"{self.file.name}:{place + 1}"
        self.file.seek(self.starts[place])
        line = self.file.readline()
        with blame(f"{where}: not text in UTF-8, save it as such"):
            if b"\0" in line:
                raise ValueError("a zero byte: UTF-16 has one in each letter")
            text = line.decode("utf-8-sig")
        with blame(f"{where}: not a JSON object"):
            return PARSER.decode(text) if text.strip() else None


@dataclass
class Table:
    """The rows of an Arrow table: in memory, or (hub sets) a map of a file on disk."""

    table: object

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, place: int) -> dict:
        return self.table.slice(place, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[dict]:
        for batch in self.table.to_batches(max_chunksize=1000):
            yield from batch.to_pylist()


def read_set(spec: str, args: object, split: str, flag: str = "--task") -> Rows:
    """The rows of `spec`: a hub name (`gsm8k`) or a file (columns by flag).

    Of a set without a split of its own for tests, "test" takes all rows.
    """
    path, name = local_file(spec), spec.partition(":")[0]
    columns = HUB.get(name) or HubSet("", args.prompt_column, args.answer_column)
    if path is None and spec not in HUB:
        made = (*arithmetic.KINDS, "reasoning_gym:<name>, ") if flag == "--task" else ()
        known = f"{', '.join(made)}a .jsonl or .parquet file, {', '.join(HUB)}"
        raise BadInput(f"{flag} {spec}: unknown, use one of {known}")
    if path is None and split == "train" and not columns.train:
        raise BadInput(f"--task {spec}: has no training split, use it as --eval_task")
    if columns.prompt == columns.answer:
        raise BadInput(f"--answer_column {columns.answer}: is the --prompt_column, too")
    split = columns.test or columns.train if split == "test" else columns.train
    source = file_rows(path, columns, flag) if path else hub_rows(name, columns, split, flag)
    where = f"{path or name}:{'row ' if isinstance(source, Table) else ''}"
    if not len(rows := Rows(source, columns, spec, where)):
        raise BadInput(f"{flag} {spec}: holds no problem")
    return rows


def pair(row: object, columns: HubSet, where: str) -> tuple[str, str]:
    """A row's prompt and reference answer; `where` it stands, for messages."""
    if not isinstance(row, dict) or not {columns.prompt, columns.answer} <= row.keys():
        flags = ("", "") if columns.path else (" (--prompt_column)", " (--answer_column)")
        wanted = f"{columns.prompt!r}{flags[0]} and {columns.answer!r}{flags[1]}"
        raise BadInput(f"{where}: needs the columns {wanted}")
    prompt, answer = row[columns.prompt], row[columns.answer]
    with blame(f"{where}: {columns.answer!r} cannot be read as an answer"):
        answer = "" if answer is None else as_text(columns.extract(answer))
    if not isinstance(prompt, str) or not prompt.strip() or not answer:
        wrong = f"{columns.prompt!r} must be a text and {columns.answer!r} must not be empty"
        raise BadInput(f"{where}: {wrong}")
    return prompt, answer


def as_text(answer: object) -> str:
    """A reference as text: AMC's 27.0 is 27; what no response could equal is refused."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer != answer:
        raise TypeError(f"{str(answer)[:40]} is neither a text nor a number")
    whole = isinstance(answer, float) and answer == int(answer)
    return str(int(answer) if whole else answer).strip()


def file_rows(path: Path, columns: HubSet, flag: str) -> Lines | Table:
    """The rows of a local file, which stays open."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise OSError(0, "is no plain file")  # a pipe would be waited for
        file = path.open("rb")
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise BadInput(f"{flag} {path}: {reason}") from error
    if path.suffix == ".jsonl":
        return Lines(file)
    import pyarrow.parquet

    with blame(f"{path}: not a parquet file"):
        parquet = pyarrow.parquet.ParquetFile(file)
        names = {columns.prompt, columns.answer}.intersection(parquet.schema_arrow.names)
        return Table(parquet.read(list(names) or None))


def hub_rows(name: str, columns: HubSet, split: str, flag: str) -> Table:
    """The rows of a hub set, downloaded or from the local cache."""
    import datasets

    # Offline, renamed, gated: the library and its HTTP client raise many kinds.
    what = f"{flag} {name}: cannot load {columns.path}, use a local copy, {name}:<file>"
    with blame(what):  # it locks: of several ranks on a node one downloads
        return Table(datasets.load_dataset(columns.path, columns.config, split=split).data)
