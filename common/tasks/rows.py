"""Prompts and reference answers, as rows of local files and of the data sets in hub.json.

A row that would silently be trained on wrongly is refused, with its file and number.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.cli import BadInput, blame, say
from common.tasks.answers import PATTERN, content_of, in_one_spelling
from common.tasks.reward import is_gradable

Prompt = str | list[dict]  # a text, or chat messages
Row = tuple[Prompt, object]  # prompt, reference answer
ROLES = ("system", "developer", "user", "assistant", "tool")


class Columns(NamedTuple):
    """Where a data set is on the hub ("" for a file), its columns, and its splits ("" for none)."""

    path: str
    prompt: str
    answer: str
    extract: str = ""  # how to read the reference out of the answer column
    train: str = ""
    test: str = ""
    config: str | None = None


HUB = json.loads(Path(__file__).with_name("hub.json").read_text("utf-8"))
HUB = {name: Columns(**row) for name, row in HUB.items()}


def boxed(solution: str) -> str:
    """Read the last \\boxed of a MATH solution; "" if it is empty, as in one row."""
    boxes = list(PATTERN.BOX.finditer(solution))  # an earlier one would be a wrong reference
    return (boxes and content_of(boxes[-1])[0]) or ""


def after_hashes(solution: str) -> str:
    """Read the number after `####` of a GSM8K solution, without thousands separators."""
    return solution.partition("####")[2].partition("\n")[0].replace(",", "")


def listed(answers: str | list[str]) -> str:
    """Join OlympiadBench's final answer, or list of them, without the usual dollar signs."""
    text = answers if isinstance(answers, str) else ", ".join(answers)
    return re.sub(r"(?<!\\)\$", "", text)


def without_zeros(answer: object) -> str:
    """Drop the zeros before an AIME answer: 025 becomes 25. One answer is 336^\\circ."""
    return as_text(answer).lstrip("0") or "0"


EXTRACT = {
    "boxed": boxed,
    "after_hashes": after_hashes,
    "listed": listed,
    "number": without_zeros,
    "": lambda answer: answer,
}


def rows_of(
    spec: str,
    split: str = "train",
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    judged: bool = False,
    fits: Callable[[Row, str], object] = lambda *_: True,
) -> list[Row]:
    """Read the rows of `spec`: a hub set (`gsm8k`), a .jsonl or .parquet file (`my.jsonl`), or a
    file with the columns of a hub set (`gsm8k:my.jsonl`).

    `split` is "train" or "test". A file, and a set without a test split, give all rows for both.
    Rows are left out, and counted, if a hub set's solution has no answer, if math-verify will judge
    (`judged`) and no response can earn the answer, and if the prompt does not fit, by `fits` of the
    row and its place. Prose for an answer, and columns that nobody reads, are named.
    """
    name, _, file = spec.partition(":")
    columns = HUB.get(name, Columns("", prompt_column, answer_column))
    path = Path(file if name in HUB else spec)
    rows, names, prose = [], set(), []
    left_out = {UNANSWERED: [], TOO_LONG: []}  # row numbers
    for number, row in hub_rows(name, split) if spec in HUB else file_rows(path):
        entries = flat(row)
        names |= row.keys()
        if {columns.prompt, columns.answer} - entries.keys():
            needs = f"needs {columns.prompt!r} and {columns.answer!r}, has {', '.join(entries)}"
            raise BadInput(f"{spec}:{number}: {needs} (--prompt_column, --answer_column)")
        with blame(f"{spec}:{number}: cannot be used"):
            answer = EXTRACT[columns.extract](entries[columns.answer])
            if columns.extract and not answer.strip():
                left_out[UNANSWERED].append(number)
                continue
            row = as_prompt(entries[columns.prompt]), as_text(answer)
            if judged and not is_gradable(row[1]):
                left_out[UNANSWERED].append(number)
            elif not fits(row, f"{spec}:{number}: "):
                left_out[TOO_LONG].append(number)
            else:
                rows.append(row)
                if judged and is_prose(row[1]):
                    prose.append(number)
    total = len(rows) + sum(map(len, left_out.values()))
    for reason, numbers in left_out.items():
        tell(spec, "left out", numbers, total, reason, len(numbers) == total)
    tell(spec, "compares word for word", prose, total, "with prose for an answer")
    read = f" {columns.prompt}. {columns.answer}."
    unread = [name for name in names if f" {name}." not in read]
    if unread and not columns.path:
        aside(f"{spec}: not read: {', '.join(sorted(unread))} (the model reads the prompt alone)")
    return rows


UNANSWERED = "without an answer that a response can earn"
TOO_LONG = "too long for --max_prompt_tokens or, with --max_new_tokens, for the model's positions"


def aside(line: str) -> None:
    """Print a line on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        say(line)


def tell(spec: str, what: str, rows: list, number: int, why: str, refuse: bool = False) -> None:
    """Say what happens to rows, of `number`, and name the first three; or `refuse` them all."""
    if refuse:
        raise BadInput(f"{spec}: {number} of {number} rows are {why}")
    if rows:
        first = ", ".join(map(str, rows[:3]))
        aside(f"{spec}: {what} {len(rows)} of {number} rows, {why}; the first: {first}")


def is_prose(answer: str) -> bool:
    """Tell whether a reference begins with a word and has others."""
    answer = in_one_spelling(answer)
    return bool(re.match(r"\W*[^\W\d_]{3}", answer)) and len(PATTERN.WORD.findall(answer)) > 1


def flat(row: dict, path: str = "") -> dict[str, object]:
    """Collect a row's entries that are not null; nested ones as in `reward_model.ground_truth`."""
    entries = {}
    for name, value in row.items():
        if isinstance(value, dict):
            entries |= flat(value, f"{path}{name}.")
        elif value is not None:
            entries[path + name] = value
    return entries


def as_prompt(prompt: object, bare: bool = False) -> Prompt:
    """Check that a prompt is a text or chat messages that ask something; else raise ValueError.
    Only a text that the model reads without a template (`bare`) may have a template's tags."""
    prompt = without_nulls(prompt)
    turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    for turn in turns:
        known = isinstance(turn, dict) and turn.get("role") in ROLES
        if not known or not isinstance(turn.get("content"), str):
            needs = f"a message needs a content (a text) and a role ({', '.join(ROLES)})"
            needs += "; rename ShareGPT's from, value and human"
            raise ValueError(f"its prompt has {str(turn)[:80]}: {needs}")
        refuse_control(turn["content"])
        tag = PATTERN.TEMPLATE_TAGS.search(turn["content"])
        if tag and not bare:
            raise ValueError(f"its prompt has a chat template's {tag[0]}: store the question alone")
        if PATTERN.MESSAGES_AS_TEXT.fullmatch(turn["content"]):
            raise ValueError("its prompt is a text that holds messages: store them as a list")
    if not turns or turns[-1]["role"] == "assistant" or not turns[-1]["content"].strip():
        raise ValueError("its prompt must end with a question, not with nothing or an answer")
    return prompt


def without_nulls(value: object) -> object:
    """Drop the null entries of dicts: Parquet gives each message the keys of all the others."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def refuse_control(text: str) -> None:
    """Raise ValueError if LaTeX has become control characters."""
    if match := PATTERN.CONTROL.search(text):
        raise ValueError(f"it has {match[0]!r}: LaTeX written with one backslash? JSON needs two")


def as_text(answer: object) -> str:
    """Write a reference as text, AMC's 27.0 as 27 and 0.00001 not as 1e-05; else ValueError."""
    if isinstance(answer, float | np.floating) and math.isfinite(answer):
        answer = np.format_float_positional(answer, trim="-")
    elif isinstance(answer, int | np.integer | Decimal):
        answer = str(answer)
    text = answer.strip() if isinstance(answer, str) else ""
    if not text or text.startswith(('{"', "{'")):  # CSV files write a dict with single quotes
        raise ValueError(f"its answer must be one text or number (of a list '1, 2'): {answer!r}")
    refuse_control(str(answer))  # strip() drops some
    return text


def file_rows(path: Path) -> Iterator[tuple[int, dict]]:
    """Yield the rows of a .jsonl or .parquet file, each with its number from 1.

    Why not `datasets.load_dataset("json")`? It takes seconds, counts from 0 without empty lines,
    and turns "007" into 7 if another row of the column has a number.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        known = f"arithmetic, a .py, .jsonl or .parquet file, or one of {', '.join(HUB)}"
        raise BadInput(f"{str(path)!r}: unknown, use {known}")
    if not path.is_file():  # reading a pipe could wait for ever
        raise BadInput(f"{path}: no such file")
    with blame(f"{path}: cannot be read"):
        if path.suffix == ".parquet":
            import datasets
            import pyarrow.parquet

            # `datasets` decodes its own types, such as JSON stored as texts
            yield from enumerate(datasets.Dataset(pyarrow.parquet.read_table(path)), 1)
            return
        lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            # iconv converts the encoding, and jq writes the rows of an array as lines.
            with blame(f"{path}:{number}: no JSON object in UTF-8: try iconv, or jq -c '.[]'"):
                row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=without_repeats)
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__}")
            yield number, row


def without_repeats(pairs: list[tuple[str, object]]) -> dict:
    """Make a JSON object; a key twice in it raises ValueError, and else the last would count."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError(f"a key twice among {', '.join(name for name, _ in pairs)}")
    return entries


def hub_rows(name: str, split: str) -> Iterator[tuple[int, dict]]:
    """Yield the rows of a data set on the hub, each with its number from 1."""
    import datasets

    columns = HUB[name]
    of_hub = columns.test if split == "test" and columns.test else columns.train
    if not of_hub:
        raise BadInput(f"{name}: has no training split, use it as --eval_task")
    with blame(f"{name}: cannot be read"):  # offline, renamed, gated, damaged
        rows = datasets.load_dataset(columns.path, columns.config, split=of_hub)
    yield from enumerate(rows, 1)
