"""Tasks: where prompts come from, how they become tokens, and which verifier scores the responses.

`train` is a pure function: `train(i)` is the i-th problem of this seed's endless stream.
The data cursor is therefore one integer, the same for any number of ranks, and a resumed run sees
the problems that the uninterrupted one would have seen.
"""

import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.answers import last_box
from common.batch import Rollout
from common.cli import BadInput, Flags, blame, key_values, say
from common.clock import timed
from common.reward import Verifier, digest, fingerprint, load_task_file, source_of
from common.tiny import arithmetic


Prompt = str | list[dict]  # a text, or chat messages
Row = tuple[Prompt, object]  # prompt, reference answer
ROLES = ("system", "developer", "user", "assistant", "tool")
A_MESSAGE = f"a message needs a content (a text) and a role ({', '.join(ROLES)}); "
A_MESSAGE += "rename ShareGPT's from, value and human"


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
    """MATH: what the solution's last \\boxed holds; "" where it holds nothing, as in one row."""
    _, box, rest = solution.rpartition("\\boxed")
    return last_box(box + rest) or ""  # not of an earlier box, which would be a wrong reference


def after_hashes(solution: str) -> str:
    """GSM8K: the number after `####`, without thousands separators."""
    return solution.partition("####")[2].partition("\n")[0].replace(",", "")


def listed(answers: str | list[str]) -> str:
    """OlympiadBench: a final answer or a list of them, often between dollar signs."""
    text = answers if isinstance(answers, str) else ", ".join(answers)
    return re.sub(r"(?<!\\)\$", "", text)


def without_zeros(answer: object) -> str:
    """AIME: 25 for 025; one answer is 336^\\circ."""
    return as_text(answer).lstrip("0") or "0"


EXTRACT = {"": lambda answer: answer, "boxed": boxed, "after_hashes": after_hashes}
EXTRACT |= {"listed": listed, "number": without_zeros}


def rows_of(
    spec: str, split: str = "train", prompt_column: str = "prompt", answer_column: str = "answer"
) -> list[Row]:
    """The rows of `spec`: a hub set (`gsm8k`), a .jsonl or .parquet file (`my.jsonl`), or a file
    with the columns of a hub set (`gsm8k:my.jsonl`).

    `split` is "train" or "test"; a set without a test split, and a file, give all rows for both.
    A row that cannot be used is refused; a set's row whose solution has no answer is left out.
    """
    name, _, file = spec.partition(":")
    columns = HUB.get(name, Columns("", prompt_column, answer_column))
    path = Path(file if name in HUB else spec)
    numbered = hub_rows(name, split) if spec in HUB else file_rows(path)
    rows = []
    unanswered = []  # numbers of rows
    for number, row in numbered:
        entries = flat(row)
        if {columns.prompt, columns.answer} - entries.keys():
            needs = f"needs {columns.prompt!r} and {columns.answer!r}, has {', '.join(entries)}"
            raise BadInput(f"{spec}:{number}: {needs} (--prompt_column, --answer_column)")
        with blame(f"{spec}:{number}: cannot be used"):
            answer = EXTRACT[columns.extract](entries[columns.answer])
            if columns.extract and not answer.strip():
                unanswered.append(number)
            else:
                rows.append((as_prompt(entries[columns.prompt]), as_text(answer)))
    if not rows:
        raise BadInput(f"{spec}: holds no problem with an answer")
    if unanswered and os.environ.get("RANK", "0") == "0":
        left_out = f"{len(unanswered)} of {len(unanswered) + len(rows)} rows"
        say(f"{spec}: left out {left_out}, without an answer; the first is row {unanswered[0]}")
    return rows


def flat(row: dict, path: str = "") -> dict[str, object]:
    """A row's entries that are not null; those of a dict in it by `reward_model.ground_truth`."""
    entries = {}
    for name, value in row.items():
        if isinstance(value, dict):
            entries |= flat(value, f"{path}{name}.")
        elif value is not None:
            entries[path + name] = value
    return entries


def as_prompt(prompt: object) -> Prompt:
    """A text or chat messages, in which something is asked; else a ValueError."""
    turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    for turn in turns:
        known = isinstance(turn, dict) and turn.get("role") in ROLES
        if not known or not isinstance(turn.get("content"), str):
            raise ValueError(f"its prompt has {str(turn)[:80]}: {A_MESSAGE}")
        turn["content"].encode()  # half an emoji: no tokenizer can read it
    if not turns or turns[-1]["role"] == "assistant" or not turns[-1]["content"].strip():
        raise ValueError("its prompt must end with a question, not with nothing or an answer")
    return prompt


def as_text(answer: object) -> str:
    """A reference as text: AMC's 27.0 is 27, and 0.00001 is not 1e-05. Else a ValueError."""
    if isinstance(answer, float | np.floating) and math.isfinite(answer):
        answer = np.format_float_positional(answer, trim="-")
    elif isinstance(answer, int | np.integer | Decimal):
        answer = str(answer)
    text = answer.strip() if isinstance(answer, str) else ""
    if not text or text.startswith(('{"', "{'")):  # the second: a dict, as CSV files have it
        raise ValueError(f"its answer must be one text or number (of a list '1, 2'): {answer!r}")
    return text


def file_rows(path: Path) -> Iterator[tuple[int, dict]]:
    """The rows of a .jsonl or .parquet file, each with its number from 1.

    Not by `datasets.load_dataset("json")`: it takes seconds, counts from 0 without empty lines,
    and makes 7 of "007" where another row of the column has a number.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        known = f"arithmetic, a .py, .jsonl or .parquet file, or one of {', '.join(HUB)}"
        raise BadInput(f"{str(path)!r}: unknown, use {known}")
    if not path.is_file():  # reading a pipe could wait for ever
        raise BadInput(f"{path}: no such file")
    with blame(f"{path}: cannot be read"):
        if path.suffix == ".parquet":
            import pyarrow.parquet

            yield from enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1)
            return
        lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            # iconv converts the encoding, jq writes the rows of an array as lines.
            with blame(f"{path}:{number}: no JSON object in UTF-8: try iconv, or jq -c '.[]'"):
                row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=unique)
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__}")
            yield number, row


def unique(pairs: list[tuple[str, object]]) -> dict:
    """A JSON object's dict; of a key that stands there twice json would keep the last value."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands there twice")
    return dict(pairs)


def hub_rows(name: str, split: str) -> Iterator[tuple[int, dict]]:
    """The rows of a set on the hub, each with its number from 1."""
    import datasets

    columns = HUB[name]
    of_hub = columns.train
    if split == "test" and columns.test:
        of_hub = columns.test
    if not of_hub:
        raise BadInput(f"{name}: has no training split, use it as --eval_task")
    with blame(f"{name}: cannot be read"):  # offline, renamed, gated, damaged
        rows = datasets.load_dataset(columns.path, columns.config, split=of_hub)
    yield from enumerate(rows, 1)


PLAIN_PROMPT = "Question: {prompt}\nAnswer:"  # for tokenizers without a chat template
TRIED = 1000  # prompts that are tokenised to find one that fits
TAGS = ("<think>", "</think>", "<answer>", "</answer>")  # `final_answer` reads them
DATE = datetime(2024, 7, 26)  # for chat templates that write today's: Llama's own default
Score = Callable[[list[str], list], list[float]]  # (completions, answers) -> rewards
# (responses so far, answers) -> (what the tool writes, or None; what failed, or "")
Tool = Callable[[list[str], list], list[tuple[str | None, str]]]


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
    final: Callable[[list[str]], list[str]] | None = None  # responses -> their final answers
    tokenizer: Tokenizer | None = None  # of the prompts
    reply: Tool | None = None  # of variants/tool.py
    reply_error: str = ""  # what the policy reads instead, where a call fails

    @timed("reward")
    def score(self, rollout: Rollout, problems: list[Problem], G: int) -> Tensor:
        """The rewards `[P, G]` of G responses to each of P problems (on some ranks 0). It also
        writes the rollout's columns `problem`, `rewards` and `new_answer`."""
        texts = texts_of(rollout, self.tokenizer)
        scores = self.verifier(texts, [problem.answer for problem in problems for _ in range(G)])
        answers = self.final(texts)
        groups = [answers[row - row % G : row] for row in range(len(answers))]  # up to each row
        new = [answer not in earlier for answer, earlier in zip(answers, groups)]
        on = rollout.mask.device
        numbers = torch.tensor([problem.index for problem in problems], dtype=torch.long, device=on)
        rollout.problem = numbers.repeat_interleave(G)  # [N]
        rollout.rewards = torch.tensor(scores, dtype=torch.float32, device=on)  # [N]
        rollout.new_answer = torch.tensor(new, dtype=torch.float32, device=on)  # [N]
        return rollout.rewards.view(len(problems), G)  # [P, G]


def texts_of(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """The responses as verifiers read them, `[N]`: without special tokens, except TAGS.

    A response begins with <think> where its prompt ends with that: the template has opened the
    thought, and an answer in a thought that is never closed must not be paid.
    """
    if not len(rollout):
        return []  # transformers would make one empty text
    added = tokenizer.added_tokens_decoder.items()
    unread = {n for n, token in added if token.special and token.content not in TAGS}
    rows = [[n for n in row if n not in unread] for row in rollout.response_ids()]
    starts = (rollout.prompt_len - rollout.prefix_len)[:, None]  # [N, 1]
    last = starts + torch.arange(-16, 0, device=starts.device)  # [N, 16]: where prompts end
    ends = tokenizer.batch_decode(rollout.sequences.gather(1, last.clamp(min=0)))
    opened = ["<think>" if end.rstrip().endswith("<think>") else "" for end in ends]
    return [think + text for think, text in zip(opened, tokenizer.batch_decode(rows))]


def load_task(args: Flags, tokenizer: Tokenizer) -> Task:
    """The task that `--task` names, with `--eval_problems` held-out problems."""
    if args.task in arithmetic.KINDS:
        make = arithmetic_task
    elif args.task.partition(":")[0].endswith(".py"):
        make = file_task
    else:
        make = dataset_task
    if args.eval_task and make != dataset_task:
        raise BadInput(f"--eval_task: --task {args.task} has its own held-out problems")
    task = make(args, tokenizer)
    task.train(0)  # an error now, if no training prompt fits
    return task


# Where rows come from


def arithmetic_task(args: Flags, tokenizer: Tokenizer) -> Task:
    """The embedded task, of any kind; its held-out problems are the same for every seed."""
    kind = arithmetic.KINDS[args.task]

    def train(index: int) -> Row:
        rng = random.Random(f"train/{args.seed}/{index}")
        prompt = arithmetic.draw(rng, kind)
        while arithmetic.is_held_out(prompt):
            prompt = arithmetic.draw(rng, kind)
        _, answer = arithmetic.work(prompt)
        return prompt, answer

    held_out_kind = kind._replace(terms=kind.held_out_terms or kind.terms)
    rng = random.Random("held-out")
    answers = {}  # of the held-out prompts, in the order in which they are drawn
    while len(answers) < args.eval_problems:
        prompt = arithmetic.draw(rng, held_out_kind)
        if arithmetic.is_held_out(prompt):
            _, answers[prompt] = arithmetic.work(prompt)

    def verifier(completions: list[str], answers: list[str]) -> list[float]:
        return list(map(arithmetic.arithmetic_reward, completions, answers))

    rows = list(answers.items())
    task = tokenised(train, rows, verifier, args, tokenizer, instruction=None)
    task.final = lambda texts: list(map(arithmetic.final_number, texts))
    task.reply = lambda texts, answers: [(arithmetic.calculator(text), "") for text in texts]
    return task


def file_task(args: Flags, tokenizer: Tokenizer) -> Task:
    """A custom task: FILE.py, or FILE.py:NAME for an object of that name in it (docs/yours.md).

    `train(i) -> (prompt, reference)` is a pure function of i (every seed begins at its own i), and
    `held_out` has such pairs. `reward(response, reference)`, if there is one, runs in the same
    bounded workers as math-verify and replaces it. A text prompt goes through the model's chat
    template, if it has one; else it is taken as it is.
    """
    source = source_of(args.task)
    custom = load_task_file(args.task, source)
    own_reward = hasattr(custom, "reward")
    begin = ((args.seed - 1) % 2**20) * 1_000_003  # where this seed's stream starts
    last = begin + getattr(args, "steps", 1) * getattr(args, "prompts_per_step", 1) - 1
    problems = fingerprint(args.task, source, custom, last)

    def as_row(pair: tuple, where: str) -> Row:
        with blame(f"--task {args.task}: {where} gives no (prompt, answer) that can be used"):
            if not isinstance(pair, tuple | list):
                raise TypeError(f"a {type(pair).__name__}")  # a dict's keys would be two texts
            prompt, answer = pair
            answer = answer if own_reward else as_text(answer)
            json.dumps(answer)  # as it goes to the process that scores
            return as_prompt(prompt), answer

    def train(index: int) -> Row:
        return as_row(custom.train(begin + index), f"train({begin + index})")

    first = custom.held_out[: args.eval_problems]
    held_out = [as_row(pair, f"held_out[{number}]") for number, pair in enumerate(first)]
    how = getattr(custom, "bounds", {}) | {"problems": problems}
    verifier = Verifier(args.task, **how) if own_reward else Verifier()
    instruction = "" if tokenizer.chat_template else None  # see `encode`
    task = tokenised(train, held_out, verifier, args, tokenizer, instruction)
    task.fingerprint = problems
    if hasattr(custom, "reply"):
        task.reply = Verifier(args.task, **how, function="reply").ask
        task.reply_error = getattr(custom, "reply_error", "")
    return task


def dataset_task(args: Flags, tokenizer: Tokenizer) -> Task:
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
    task = tokenised(train, held_out_rows, Verifier(), args, tokenizer, args.instruction)
    task.fingerprint = digest([rows, test])
    return task


def text_of(row: Row) -> str:
    """A row's prompt, to compare it with others."""
    prompt, _ = row
    return str(prompt).strip()


# How prompts become tokens


def tokenised(
    row: Callable[[int], Row],
    held_out_rows: list[Row],
    verifier: Score,
    args: Flags,
    tokenizer: Tokenizer,
    instruction: str | None,
) -> Task:
    """The task whose i-th training row is `row(i)`. Held-out rows that do not fit are left out."""
    wrong = f"--task {args.task}: no prompt fits into --max_prompt_tokens {args.max_prompt_tokens}"
    wrong += " and, with --max_new_tokens, into the model's positions"

    def train(index: int) -> Problem:
        """Problem `index`; if it does not fit, another one by a rule of the index alone."""
        rng = random.Random(f"instead/{args.seed}/{index}")
        place = index
        for _ in range(TRIED):
            problem = as_problem(row(place), instruction, args, tokenizer)
            if problem:
                return replace(problem, index=index)
            place = rng.randrange(2**31)
        raise BadInput(wrong)

    problems = (as_problem(one, instruction, args, tokenizer) for one in held_out_rows)
    held_out = list(islice(filter(None, problems), args.eval_problems))
    if not held_out:
        raise BadInput(wrong if held_out_rows else f"--task {args.task}: no held-out problems")
    final = getattr(verifier, "final_answers", None)
    return Task(args.task, train, held_out, verifier, final=final, tokenizer=tokenizer)


def as_problem(
    row: Row, instruction: str | None, args: Flags, tokenizer: Tokenizer
) -> Problem | None:
    """A row and its prompt's tokens; None if these leave too few positions for a response."""
    prompt, answer = row
    ids = encode(prompt, instruction, tokenizer, chat=args.chat)
    if max(ids) >= getattr(tokenizer, "embeddings", math.inf):
        raise BadInput(f"--model: has no embedding for {tokenizer.decode(max(ids))!r} in a prompt")
    positions = getattr(tokenizer, "model_max_length", math.inf)
    if len(ids) > min(args.max_prompt_tokens, positions - args.max_new_tokens):
        return None
    return Problem(prompt, answer, ids)


def encode(
    prompt: Prompt,
    instruction: str | None,
    tokenizer: Tokenizer,
    flag: str = "--model",
    chat: tuple[str, ...] = (),
) -> list[int]:
    """Prompt and instruction as token ids, through the tokenizer's chat template or PLAIN_PROMPT.

    `instruction` None: the prompt as it is, without a template; "": nothing is appended. Messages
    take none, and need the template, which gets the options `chat`. `flag` names the model in
    errors.
    """
    for name in key_values("--chat", chat):
        if name not in str(tokenizer.chat_template):
            raise BadInput(f"--chat {name}: the chat template of {flag} never reads it")
    text = str(prompt) if instruction is None else f"{prompt} {instruction}".strip()
    messages = isinstance(prompt, list)
    templated = messages or (instruction is not None and bool(tokenizer.chat_template))
    with blame(f"{flag}: its tokenizer cannot write the prompt {text[:200]!r}"):
        if templated:
            turns = prompt if messages else [{"role": "user", "content": text}]
            # Prompts must not change at midnight.
            options = {"strftime_now": DATE.strftime} | key_values("--chat", chat)
            text = tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, **options
            )
        elif instruction is not None:
            text = PLAIN_PROMPT.format(prompt=text)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ValueError("no token left")
        if not templated:  # a template has written its special tokens already
            special = tokenizer(text)["input_ids"]  # in front BOS, but at the end maybe EOS
            return special[: special.index(ids[0])] + ids
        for turn in turns:  # of other roles templates leave out thoughts, and write calls as JSON
            if turn["role"] in ROLES[:3] and turn["content"].strip() not in text:
                raise ValueError(f"the chat template leaves out the {turn['role']}'s message")
        return ids
