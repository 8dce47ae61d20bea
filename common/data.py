"""Tasks: where prompts come from, how they become tokens, and which verifier scores the responses.

`train` is a pure function: `train(i)` is the i-th problem of this seed's endless stream.
The data cursor is therefore one integer, the same for any number of ranks, and a resumed run sees
the problems that the uninterrupted one would have seen.
"""

import contextlib
import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.batch import Rollout
from common.cli import BadInput, blame, key_values
from common.clock import timed
from common.distributed import same_everywhere
from common.metrics import Means
from common.reward import Verifier, final_answer, load_task_file, source_of
from common.tiny import arithmetic


Prompt = str | list[dict]  # a text, or chat messages
Row = tuple[Prompt, object]  # prompt, reference answer


class Columns(NamedTuple):
    """Where a set is on the hub ("": in a file), its columns, and its splits ("": it has none)."""

    path: str
    prompt: str
    answer: str
    extract: str = ""  # how the reference is read out of the answer's column
    train: str = ""
    test: str = ""
    config: str | None = None


HUB = json.loads(Path(__file__).with_name("hub.json").read_text())
HUB = {name: Columns(**row) for name, row in HUB.items()}


def boxed(solution: str) -> str:
    """MATH: the content of the solution's last \\boxed{...}."""
    return re.fullmatch(r"\\boxed\{(.*)\}", final_answer(solution), re.DOTALL)[1]


def after_hashes(solution: str) -> str:
    """GSM8K: the number after `####`, without thousands separators."""
    return re.search("####(.*)", solution)[1].replace(",", "")


def listed(answers: list[str]) -> str:
    """OlympiadBench: a list of final answers, often between dollar signs."""
    return ", ".join(answer.strip().strip("$") for answer in answers)


EXTRACT = {"": lambda answer: answer, "number": int}  # "025" is 25
EXTRACT |= {"boxed": boxed, "after_hashes": after_hashes, "listed": listed}


def rows_of(
    spec: str, split: str = "train", prompt_column: str = "prompt", answer_column: str = "answer"
) -> list[Row]:
    """The rows of `spec`: a hub set (`gsm8k`), a .jsonl or .parquet file (`my.jsonl`), or a file
    with the columns of a hub set (`gsm8k:my.jsonl`).

    `split` is "train" or "test"; a set without a test split, and a file, give all rows for both.
    """
    name, _, file = spec.partition(":")
    columns = HUB.get(name)
    if columns is None:
        file, columns = spec, Columns("", prompt_column, answer_column)
    if (file or not columns.path) and Path(file).suffix not in (".jsonl", ".parquet"):
        known = f"arithmetic, a .py, .jsonl or .parquet file, or one of {', '.join(HUB)}"
        raise BadInput(f"{spec or repr(spec)}: unknown, use {known}")
    if file and not Path(file).is_file():  # reading a pipe could wait for ever
        raise BadInput(f"{file}: no such file")
    if not file and split == "train" and not columns.train:
        raise BadInput(f"{spec}: has no training split, use it as --eval_task")
    rows = []
    # Offline, renamed, gated, damaged: libraries and HTTP clients raise many kinds of errors.
    with blame(f"{spec}: cannot be read"):
        numbered = file_rows(Path(file)) if file else hub_rows(columns, split)
        for number, row in numbered:
            wanted = f"needs {columns.prompt!r}, a text, and {columns.answer!r}"
            with blame(f"{file or name}:{number}: {wanted} (--prompt_column, --answer_column)"):
                answer = EXTRACT[columns.extract](row[columns.answer])
                rows.append(checked(row[columns.prompt], as_text(answer)))
    if not rows:
        raise BadInput(f"{spec}: holds no problem")
    return rows


def file_rows(path: Path) -> Iterator[tuple[int, dict]]:
    """The rows of a .jsonl or .parquet file, each with its number from 1.

    Not by `datasets.load_dataset("json")`: it takes seconds, counts from 0 without empty lines,
    and makes 7 of "007" where another row of the column has a number.
    """
    if path.suffix == ".parquet":
        import pyarrow.parquet

        yield from enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            with blame(f"{path}:{number}: no JSON"):
                row = json.loads(line)
            yield number, row


def hub_rows(columns: Columns, split: str) -> Iterator[tuple[int, dict]]:
    """The rows of a set on the hub, each with its number from 1."""
    import datasets

    of_hub = columns.train
    if split == "test" and columns.test:
        of_hub = columns.test
    yield from enumerate(datasets.load_dataset(columns.path, columns.config, split=of_hub), 1)


def checked(prompt: object, reference: object) -> Row:
    """Both as a row, if the prompt is a text or chat messages ({"role": ..., "content": ...}) and
    neither is empty; else an error."""
    turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    for turn in turns:
        if not isinstance(turn["role"], str) or not isinstance(turn["content"], str):
            raise TypeError("no text, and no chat messages")
    if not "".join(turn["content"] for turn in turns).strip() or reference == "":
        raise ValueError("empty")
    return json.loads(json.dumps(prompt)), reference  # a copy, and plain: the task keeps its own


def as_text(answer: object) -> str:
    """A reference as text: AMC's 27.0 is 27; NaN and true, which no response equals, are errors."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TypeError(f"{str(answer)[:40]} is neither a text nor a number")
    if isinstance(answer, float) and answer == int(answer):  # int raises for NaN and infinities
        answer = int(answer)
    return str(answer).strip()


PLAIN_PROMPT = "Question: {prompt}\nAnswer:"  # for tokenizers without a chat template
TRIED = 1000  # prompts that are tokenised to find one that fits
PURE = "they must not depend on chance, the time or a set's order (draw with random.Random(i))"
DRAWS = 300_000  # of the embedded task's held-out problems: some seconds
DATE = datetime(2024, 7, 26)  # for chat templates that write today's: Llama's own default
ASKED = 64  # training problems that a digest covers, at most
SEEN = 4  # problems of a task file, training and held-out, that its fingerprint covers
Score = Callable[[list[str], list], list[float]]  # (completions, answers) -> rewards


@dataclass
class Problem:
    """One prompt, as text (or messages) and as the token ids the model is given, and its answer."""

    prompt: Prompt
    answer: object  # a text; for the `reward` of a task file anything that JSON can hold
    prompt_ids: list[int]
    index: int = -1  # its number in the stream of training problems


@dataclass
class Task:
    """`train(i)`: the i-th training problem; `held_out`: problems that are never trained on."""

    name: str
    train: Callable[[int], Problem]
    held_out: list[Problem]
    verifier: Score
    fingerprint: str = ""  # of what was read: a resumed run must see the same problems
    held_out_verifier: Score | None = None  # where it is not `verifier`
    final: Callable[[str], str] = final_answer  # a response's answer, without its working
    tokenizer: Tokenizer | None = None  # of the prompts

    @timed("reward")
    def score(
        self, rollout: Rollout, problems: list[Problem], G: int, means: Means | None = None
    ) -> Tensor:
        """The rewards `[P, G]` of G responses to each of P problems (on some ranks 0). They are
        also written into the rollout's columns `rewards` and `problem`."""
        texts = self.tokenizer.batch_decode(rollout.response_ids(), skip_special_tokens=True)
        scores = self.verifier(texts, [problem.answer for problem in problems for _ in range(G)])
        rewards = torch.tensor(scores, device=rollout.mask.device).view(len(problems), G)  # [P, G]
        rollout.record_rewards(problems, rewards)
        if means:
            means.add(distinct=(self.distinct(texts, G), len(problems)))
        return rewards

    def distinct(self, texts: list[str], group: int) -> int:
        """How many different answers, added up over groups of `group` responses."""
        answers = [(i // group, self.final(text)) for i, text in enumerate(texts)]
        return len(set(answers))

    def seen(self, begin: int, number: int) -> int:
        """A number that stands for the held-out problems, as token ids, and for the `number`
        training problems from `begin` on, of which the first ASKED are asked for.

        All ranks together. BadInput if another rank, or the same one when it asks again, would be
        given others.
        """

        def asked() -> list:
            problems = [self.train(begin + i) for i in range(min(number, ASKED))]
            return [(problem.prompt_ids, problem.answer) for problem in problems]

        given = asked()
        held_out = [(problem.prompt_ids, problem.answer) for problem in self.held_out]
        found = digest([self.fingerprint, held_out, given])
        same = same_everywhere(found)  # by itself: all ranks must take part in it
        if given != asked() or not same:
            others = "gives other problems when it is asked again, or on another rank"
            raise BadInput(f"--task {self.name}: {others}; {PURE}")
        return int(found[:12], 16)


def load_task(args: object, tokenizer: Tokenizer) -> Task:
    """The task that `--task` names, with `--eval_problems` held-out problems."""
    chat_options(args.chat, tokenizer)  # an error now, if one of them is wrong
    if args.task in arithmetic.KINDS:
        make = arithmetic_task
    elif args.task.partition(":")[0].endswith(".py"):
        make = file_task
    else:
        make = dataset_task
    if args.eval_task and make != dataset_task:
        raise BadInput(f"--eval_task: --task {args.task} has its own held-out problems")
    task = make(args, tokenizer)
    task.seen(0, ASKED)  # an error now, if no training prompt fits, or they are not the same ones
    return task


# Where rows come from


def arithmetic_task(args: object, tokenizer: Tokenizer) -> Task:
    """The embedded task, of any kind; its held-out problems are the same for every seed."""
    kind = arithmetic.KINDS[args.task]

    def train(index: int) -> Row:
        rng = random.Random(f"train/{args.seed}/{index}")
        prompt = arithmetic.draw(rng, kind)
        while arithmetic.held_out(prompt):
            prompt = arithmetic.draw(rng, kind)
        steps, answer = arithmetic.work(prompt)
        if kind.reward:  # its rewards look at the steps, too
            return prompt, ";".join(steps) + "#" + answer
        return prompt, answer

    held_out_kind = kind._replace(terms=kind.held_out or kind.terms)
    rng = random.Random("held-out")
    held_out = {}  # prompt: answer, in the order in which they are drawn
    for _ in range(DRAWS):
        prompt = arithmetic.draw(rng, held_out_kind)
        if arithmetic.held_out(prompt):
            _, answer = arithmetic.work(prompt)
            held_out[prompt] = answer
        if len(held_out) == args.eval_problems:
            break
    else:
        most = f"--task {args.task} has {len(held_out)} that are quickly drawn"
        raise BadInput(f"--eval_problems {args.eval_problems}: {most}")
    exact = score_each(arithmetic.arithmetic_reward)
    task = tokenised(train, list(held_out.items()), exact, None, args, tokenizer)
    if kind.reward:
        task.verifier, task.held_out_verifier = score_each(kind.reward), exact
    task.final = arithmetic.final_number
    return task


def unreadable(task: Task) -> str:
    """How many of some answers math-verify cannot read, with an example, or "".

    No response equals such an answer, not even the answer itself. BadInput if all are like that.
    """
    verifier = task.verifier
    if not isinstance(verifier, Verifier) or verifier.spec:
        return ""
    problems = [*map(task.train, range(ASKED)), *task.held_out[:ASKED]]
    answers = list({problem.answer: None for problem in problems})
    scores = verifier([f"\\boxed{{{answer}}}" for answer in answers], answers)
    unread = [answer for answer, score in zip(answers, scores) if score == 0]
    if not unread:
        return ""
    example = f"such as {unread[0][:80]!r}: no response to them earns anything"
    found = f"math-verify cannot read {len(unread)} of {len(answers)} answers, {example}"
    if len(unread) == len(answers):
        raise BadInput(f"--task {task.name}: {found}")
    return f"WARNING: {found}"


def score_each(reward: Callable[[str, str], float]) -> Score:
    """A verifier of many responses from the reward of one."""
    return lambda completions, answers: list(map(reward, completions, answers))


def file_task(args: object, tokenizer: Tokenizer) -> Task:
    """A custom task: FILE.py, or FILE.py:NAME for an object of that name in it (docs/yours.md).

    `train(i) -> (prompt, reference)` is a pure function of i (every seed begins at its own i), and
    `held_out` has such pairs. `reward(response, reference)`, if there is one, runs in the same
    bounded workers as math-verify and replaces it. A text prompt goes through the model's chat
    template, if it has one; else it is taken as it is.
    """
    flag = f"--task {args.task}"
    with blame(f"{flag}: cannot be used"):
        given = load_task_file(args.task)
        # At least SEEN, which the fingerprint covers
        pairs = list(islice(given.held_out, max(SEEN, args.eval_problems)))
        own_reward = hasattr(given, "reward")
        bounds = getattr(given, "bounds", {})
        verifier = Verifier(args.task, **bounds) if own_reward else Verifier()

    def as_row(pair: object) -> Row:
        with blame(f"{flag}: {str(pair)[:40]} is no (prompt, reference)"):
            if not isinstance(pair, tuple | list):  # of a dict its two keys would be taken
                raise TypeError("neither a tuple nor a list")
            prompt, reference = pair
            if own_reward:  # it is sent its reference as JSON: hold that, and fail now
                reference = json.loads(json.dumps(reference))
            else:
                reference = as_text(reference)
            return checked(prompt, reference)

    def train(index: int) -> Row:
        with blame(f"{flag}: train({index}) fails"):
            return as_row(given.train(index))

    held_out = [as_row(pair) for pair in pairs]
    first = [train(index) for index in range(SEEN)]
    begin = ((args.seed - 1) % 2**20) * 1_000_003  # where this seed's stream starts
    instruction = "" if tokenizer.chat_template else None
    task = tokenised(
        lambda index: train(begin + index), held_out, verifier, instruction, args, tokenizer
    )
    # Of the first held-out problems: it is the same for any --eval_problems, and any --seed.
    task.fingerprint = digest([source_of(args.task), first, held_out[:SEEN]])
    return task


def dataset_task(args: object, tokenizer: Tokenizer) -> Task:
    """A finite set as an endless stream of shuffles; each covers all training rows and is seeded.

    Without a test split, up to a quarter of it is held out. A prompt that is held out is never
    trained on, in whatever row it stands.
    """
    columns = (args.prompt_column, args.answer_column)
    rows = rows_of(args.task, "train", *columns)
    own_test = bool(args.eval_task) or (args.task in HUB and HUB[args.task].test)
    test = rows
    if own_test:
        test = rows_of(args.eval_task or args.task, "test", *columns)
    shuffled = list(test)
    random.Random("held-out").shuffle(shuffled)  # the same for every seed
    held_out = {}  # a prompt's text: its first row
    for row in shuffled:
        held_out.setdefault(text_of(row), row)
    if not own_test:
        most = min(args.eval_problems, max(1, len(held_out) // 4))
        held_out = dict(islice(held_out.items(), most))
    kept = [row for row in rows if text_of(row) not in held_out]
    if not kept:
        raise BadInput(f"--task {args.task}: all of its {len(rows)} problems are held out")

    @lru_cache(2)
    def epoch(number: int) -> np.ndarray:
        return np.random.default_rng([args.seed, number]).permutation(len(kept))

    def train(index: int) -> Row:
        number, place = divmod(index, len(kept))
        return kept[epoch(number)[place]]

    held_out_rows = list(held_out.values())
    task = tokenised(train, held_out_rows, Verifier(), args.instruction, args, tokenizer)
    task.fingerprint = digest([rows, test])
    return task


def text_of(row: Row) -> str:
    """A row's prompt, to compare it with others."""
    prompt, _ = row
    return str(prompt).strip()


def digest(rows: list) -> str:
    """SHA-256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()


# How prompts become tokens


def tokenised(
    row: Callable[[int], Row],
    held_out_rows: list[Row],
    verifier: Score,
    instruction: str | None,
    args: object,
    tokenizer: Tokenizer,
) -> Task:
    """The task whose i-th training row is `row(i)`. Held-out rows that do not fit are left out."""

    def train(index: int) -> Problem:
        """Problem `index`; if it does not fit, another one by a rule of the index alone."""
        rng = random.Random(f"instead/{args.seed}/{index}")
        place = index
        for _ in range(TRIED):
            problem = as_problem(row(place), instruction, args, tokenizer)
            if problem:
                return replace(problem, index=index)
            place = rng.randrange(2**31)
        raise BadInput(f"--task {args.task}: hardly a prompt {limit_in_words(args, tokenizer)}")

    if not held_out_rows:
        raise BadInput(f"--task {args.task}: no held-out problems")
    tried = (as_problem(one, instruction, args, tokenizer) for one in held_out_rows)
    held_out = list(islice(filter(None, tried), args.eval_problems))
    if not held_out:
        prompt, _ = held_out_rows[0]
        encode(prompt, instruction, tokenizer, chat=args.chat)  # raises, if that is the reason
        wrong = f"no held-out prompt {limit_in_words(args, tokenizer)}"
        raise BadInput(f"--task {args.task}: {wrong}")
    return Task(args.task, train, held_out, verifier, tokenizer=tokenizer)


def longest_prompt(args: object, tokenizer: Tokenizer) -> int:
    """The most tokens of a prompt that leave enough positions for its response."""
    positions = min(getattr(tokenizer, "model_max_length", math.inf), 10**9)
    return min(args.max_prompt_tokens, positions - args.max_new_tokens)


def limit_in_words(args: object, tokenizer: Tokenizer) -> str:
    """`longest_prompt` in words."""
    most = f"fits into {max(0, longest_prompt(args, tokenizer))} tokens"
    return f"{most}: --max_prompt_tokens, or the model's positions less --max_new_tokens"


def as_problem(
    row: Row, instruction: str | None, args: object, tokenizer: Tokenizer
) -> Problem | None:
    """A row and its prompt's tokens; None if these are too many, or the tokenizer lacks one."""
    prompt, answer = row
    with contextlib.suppress(BadInput):
        ids = encode(prompt, instruction, tokenizer, chat=args.chat)
        if len(ids) <= longest_prompt(args, tokenizer):
            return Problem(prompt, answer, ids)
    return None


def chat_options(words: tuple[str, ...], tokenizer: Tokenizer) -> dict:
    """`--chat KEY=VALUE ...` as options of the chat template.

    A template ignores a key that it does not read, so a misspelt one is an error here.
    """
    given = key_values("--chat", words)
    for key in given:
        if not tokenizer.chat_template:
            raise BadInput(f"--chat {key}: the model's tokenizer has no chat template")
        if key not in str(tokenizer.chat_template):
            raise BadInput(f"--chat {key}: the model's chat template does not read it")
    if "strftime_now" in str(tokenizer.chat_template):  # prompts must not change at midnight
        given["strftime_now"] = DATE.strftime
    return given


def encode(
    prompt: Prompt,
    instruction: str | None,
    tokenizer: Tokenizer,
    flag: str = "--model",
    chat: tuple[str, ...] = (),
) -> list[int]:
    """Prompt and instruction as token ids, through the tokenizer's chat template or PLAIN_PROMPT.

    With `instruction` None the bare prompt; messages take none, and need the template, which gets
    the options `chat`. `flag` names the model in errors.
    """
    text = f"{prompt} {instruction or ''}".strip()
    messages = isinstance(prompt, list)
    templated = messages or (instruction is not None and bool(tokenizer.chat_template))
    if templated:
        turns = prompt if messages else [{"role": "user", "content": text}]
        options = chat_options(chat, tokenizer)
        with blame(f"{flag}: its chat template cannot write the prompt {text[:40]!r}"):
            text = tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, **options
            )
    elif instruction is not None:
        text = PLAIN_PROMPT.format(prompt=text)
    knows = getattr(tokenizer, "letters", "")  # of the embedded models, which know 16
    with blame(f"{flag}: its tokenizer cannot write the prompt {text[:200]!r}{knows}"):
        # A template has written its special tokens already.
        ids = tokenizer(text, add_special_tokens=not templated)["input_ids"]
        if not ids or max(ids) >= getattr(tokenizer, "embedded", math.inf):
            raise ValueError(f"no token left, or one without an embedding: {max(ids, default='')}")
        return ids
