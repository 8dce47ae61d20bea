"""Where rows come from: the embedded arithmetic, a task file, or a data set, with its verifier.

`train` is a pure function: `train(i)` is the i-th row of this seed's endless stream. The position
in the data is therefore one integer, the same for any number of ranks, and a resumed run sees the
problems that the uninterrupted run would have seen.
"""

import inspect
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np

from common.cli import BadInput, Flags, blame
from common.tasks.reward import TASK_FILE, Verdict, Verifier, digest, fingerprint
from common.tasks.reward import is_gradable, load_task_file, read_task_file
from common.tasks.rows import HUB, UNANSWERED, Row, as_prompt, as_text, rows_of, tell
from common.tiny import arithmetic

Verify = Callable[[list[str], list], list[Verdict]]  # of (completions, answers)
# (responses so far, answers) -> (what the tool writes, or None; what failed, or "")
Tool = Callable[[list[str], list], list[tuple[str | None, str]]]


@dataclass
class Source:
    """Rows for training, `train(i)`, and for evaluation, never trained on, with their verifier."""

    name: str  # of --task
    train: Callable[[int], Row]
    held_out: list[Row]
    verifier: Verify
    fingerprint: str = ""  # a hash of the data, because a resumed run must see the same problems
    instruction: str | None = None  # appended to every text; None leaves prompts as they are
    reply: Tool | None = None  # a task file's tool
    reply_error: str = ""  # what the policy reads instead if a call fails


def source_for(args: Flags, has_template: bool, fits: Callable[[Row, str], object]) -> Source:
    """Make the source that `--task` names. `has_template`: the tokenizer has a chat template.
    Rows of data sets that do not fit (`fits`) are left out."""
    is_file = bool(TASK_FILE.fullmatch(args.task))
    if args.eval_task and (is_file or args.task in arithmetic.KINDS):
        raise BadInput(f"--eval_task: --task {args.task} has its own held-out problems")
    if is_file:
        return of_task_file(args, has_template)
    if args.task in arithmetic.KINDS:
        return of_arithmetic(args)
    return of_sets(args, fits)


def of_arithmetic(args: Flags) -> Source:
    """Make the embedded task, of any kind. Its held-out problems are the same for every seed."""
    kind = arithmetic.KINDS[args.task]

    def as_row(prompt: str) -> Row:
        _, answer = arithmetic.work(prompt)
        return prompt, answer

    def train(index: int) -> Row:
        return as_row(arithmetic.training_prompt(args.seed, index, kind))

    held_out_kind = kind._replace(terms=kind.held_out_terms or kind.terms)
    held_out = map(as_row, arithmetic.held_out_prompts(args.eval_problems, held_out_kind))
    return Source(args.task, train, list(held_out), arithmetic_verdicts)


def arithmetic_verdicts(completions: list[str], answers: list[str]) -> list[Verdict]:
    """Judge responses to the embedded task."""
    scores = map(arithmetic.arithmetic_reward, completions, answers)
    return list(map(Verdict, scores, map(arithmetic.final_number, completions)))


def of_task_file(args: Flags, has_template: bool) -> Source:
    """Load a custom task, FILE.py or an object in it, FILE.py:NAME (docs/yours.md).

    `train(i) -> (prompt, reference)` is a pure function of i, where each seed begins at its own i,
    and `held_out` is a list of such pairs. A `reward(response, reference)` in the file replaces
    math-verify and runs in the same bounded workers. A text prompt goes through the model's chat
    template, or is taken as it is if there is no template.
    """
    text = read_task_file(args.task)
    custom = load_task_file(args.task, text)
    own_reward = hasattr(custom, "reward")
    if own_reward and callable(custom.reward):
        names = list(inspect.signature(custom.reward).parameters)
        if names and re.match("prompt|completions|data_source|label|ground", names[0]):
            gets = f"its reward gets (response, answer), not ({', '.join(names)})"
            raise BadInput(f"--task {args.task}: {gets}")
    begin = ((args.seed - 1) % 2**20) * 1_000_003  # where this seed's stream starts
    last = begin + getattr(args, "steps", 1) * getattr(args, "prompts_per_step", 1) - 1
    problems = fingerprint(args.task, text, custom, last)

    def as_row(pair: tuple, where: str) -> Row:
        with blame(f"--task {args.task}: {where} gives no (prompt, answer) that can be used"):
            if not isinstance(pair, tuple | list):
                raise TypeError(f"a {type(pair).__name__}")  # a dict's keys would be two texts
            prompt, answer = pair
            answer = answer if own_reward else as_text(answer)
            if json.loads(json.dumps(answer)) != answer:  # the worker will get it as JSON
                needs = "lists, keys that are texts, and no NaN"
                raise ValueError(f"{answer!r} changes on its way to the worker: use {needs}")
            return as_prompt(prompt, bare=not has_template), answer

    def train(index: int) -> Row:
        return as_row(custom.train(begin + index), f"train({begin + index})")

    first = custom.held_out[: args.eval_problems]
    held_out = [as_row(pair, f"held_out[{number}]") for number, pair in enumerate(first)]
    if not own_reward:
        answers = [answer for _, answer in [*held_out, *map(train, range(8))]]
        lost = [answer for answer in answers if not is_gradable(answer)]
        every = len(lost) == len(answers)
        tell(f"--task {args.task}", "may use", lost, len(answers), UNANSWERED, every)
    how = getattr(custom, "bounds", {}) | {"problems": problems}
    verifier = Verifier(args.task, **how) if own_reward else Verifier()
    source = Source(args.task, train, held_out, verifier, problems)
    source.instruction = "" if has_template else None
    if hasattr(custom, "reply"):
        tool = Verifier(args.task, **how, function="reply")
        source.reply = lambda *calls: [(verdict.score, verdict.failure) for verdict in tool(*calls)]
        source.reply_error = getattr(custom, "reply_error", "")
    return source


def of_sets(args: Flags, fits: Callable[[Row, str], object]) -> Source:
    """Turn a finite data set into an endless stream of seeded shuffles of its training rows.

    Without a test split, up to a quarter of it is held out. A held-out prompt is never trained on,
    even if other rows repeat it.
    """
    columns = (args.prompt_column, args.answer_column)
    rows = rows_of(args.task, "train", *columns, judged=True, fits=fits)
    own_test = bool(args.eval_task) or (args.task in HUB and HUB[args.task].test)
    test = rows
    if own_test:
        test = rows_of(args.eval_task or args.task, "test", *columns, judged=True, fits=fits)
    shuffled = list(test)
    random.Random("held-out").shuffle(shuffled)  # the same for every seed
    held_out = {}  # prompt text -> the first row with it
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

    source = Source(args.task, train, list(held_out.values()), Verifier())
    source.fingerprint = digest([rows, test])
    source.instruction = args.instruction
    return source


def text_of(row: Row) -> str:
    """Return a row's prompt as text, to compare it with others."""
    prompt, _ = row
    return str(prompt).strip()
