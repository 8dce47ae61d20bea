"""Sets of problems, on the hub or in a file, as (prompt, reference answer) rows in memory."""

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from common.plumbing.errors import BadInput, blame
from common.reward import Verifier, final_answer

CHECKED = 32  # references that the verifier is tried on before the run
PLAIN_NUMBER = re.compile(r"-?\d{1,100}([./]\d{1,100})?")  # a reference that needs no trying
Prompt = str | list[dict]  # a text, or chat messages
Row = tuple[Prompt, object]  # prompt, reference answer: a text, but for a reward of yours


class Columns(NamedTuple):
    """Where a set lives on the hub ("": a file), and its columns; a split that it has not is ""."""

    path: str
    prompt: str
    answer: str
    extract: str = ""  # how the answer is read out of its column
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
    columns = HUB.get(name) or Columns("", args.prompt_column, args.answer_column)
    if path is None and spec not in HUB:
        made = "arithmetic, a .py file, " if flag == "--task" else ""
        known = f"{made}a .jsonl or .parquet file, {', '.join(HUB)}"
        raise BadInput(f"{flag} {spec}: unknown, use one of {known}")
    if path is None and split == "train" and not columns.train:
        raise BadInput(f"--task {spec}: has no training split, use it as --eval_task")
    if path and not path.is_file():  # a pipe would be waited for
        raise BadInput(f"{flag} {path}: no such file")
    if columns.prompt == columns.answer:
        raise BadInput(f"--answer_column {columns.answer}: is the --prompt_column, too")
    split = columns.test or columns.train if split == "test" else columns.train
    # Offline, renamed, gated, no parquet: libraries and HTTP clients raise many kinds.
    with blame(f"{flag} {spec}: cannot be read"):
        given = source(path, columns, split)
        rows = list(pairs(given, columns, str(path or name)))
    if not rows:
        raise BadInput(f"{flag} {spec}: holds no problem")
    return rows


def source(path: Path | None, columns: Columns, split: str) -> Iterable[bytes | dict]:
    """What a file or a hub set holds: lines of JSON, or rows."""
    if path is None:
        import datasets

        return datasets.load_dataset(columns.path, columns.config, split=split)
    if path.suffix == ".jsonl":
        return path.open("rb")
    import pyarrow.parquet

    parquet = pyarrow.parquet.ParquetFile(path)
    once([(name, None) for name in parquet.schema_arrow.names])
    return (row for batch in parquet.iter_batches() for row in batch.to_pylist())


def once(pairs: list[tuple[str, object]]) -> dict:
    """A row; a column that stands there twice is refused: json and pyarrow would take the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a column stands there twice")
    return row


def pairs(rows: Iterable[bytes | dict], columns: Columns, where: str) -> Iterator[Row]:
    """Prompt and reference answer of each row; the first that has none is named."""
    for number, row in enumerate(rows, 1):
        if isinstance(row, bytes) and not row.strip():
            continue
        flags = "" if columns.path else " (--prompt_column, --answer_column)"
        wanted = f"needs {columns.prompt!r}, a text, and {columns.answer!r}{flags}"
        with blame(f"{where}:{number}: {wanted}"):
            if isinstance(row, bytes):
                row = json.loads(row.decode("utf-8-sig"), object_pairs_hook=once)
            answer = EXTRACT[columns.extract](row[columns.answer])
            row = as_row(row[columns.prompt], as_text(answer))
        yield row


def as_row(prompt: object, reference: object) -> Row:
    """A prompt, a text or chat messages ({"role": ..., "content": ...}), and its reference, after
    a check that neither is empty."""
    turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if not all(isinstance(turn[key], str) for turn in turns for key in ("role", "content")):
        raise TypeError("no text, and no chat messages")
    if not "".join(turn["content"] for turn in turns).strip() or reference == "":
        raise ValueError("empty")
    return prompt, reference


def as_text(answer: object) -> str:
    """A reference as text: AMC's 27.0 is 27; what no response could equal is refused."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TypeError(f"{str(answer)[:40]} is neither a text nor a number")
    whole = isinstance(answer, float) and answer == int(answer)  # raises for NaN and infinities
    return str(int(answer) if whole else answer).strip()


def remarks_on(spec: str, rows: list[Row], verifier: Verifier) -> list[str]:
    """What to say of prompts that come again, and of references that no response can match."""
    remarks, prompts = [], {str(prompt).strip() for prompt, _ in rows}
    if again := len(rows) - len(prompts):
        other = len({(str(prompt).strip(), str(answer)) for prompt, answer in rows}) - len(prompts)
        how = f"{again} of {len(rows)} rows repeat a prompt, {other} with another answer"
        remarks.append(f"{spec}: {how}")
    odd = {one for _, one in rows if not PLAIN_NUMBER.fullmatch(one)}
    # All could take hours.
    tried = random.Random("tried").sample(sorted(odd), min(CHECKED, len(odd)))
    scores = verifier([rf"\boxed{{{answer}}}" for answer in tried], tried)
    verifier.killed = 0  # it counts the model's answers
    if wrong := [answer for answer, score in zip(tried, scores) if score < 1]:
        what = f"cannot be matched by any response, {wrong[0][:40]!r} for one"
        remarks.append(f"{spec}: {len(wrong)} of {len(tried)} references tried {what}")
    return remarks
