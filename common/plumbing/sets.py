"""Sets of problems, on the hub or in a file, as (prompt, reference answer) rows in memory."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.plumbing.errors import BadInput, blame
from common.reward import final_answer

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
