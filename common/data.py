"""Tasks: where prompts come from, how they become tokens, and which judge scores the responses.

A task is a pure function of an index: `train(i)` is the i-th problem of this seed's endless stream.
The data cursor is therefore one integer, the same for any number of ranks, and a resumed run sees
what the uninterrupted one would have.
"""

import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.distributed import BadInput, blame
from common.plumbing.folder import checksum
from common.plumbing.sets import HUB, Row, local_file, read_set, remarks_on
from common.reward import Judge, arithmetic_reward, final_answer, loaded
from common.tiny import arithmetic

MOST_HELD_OUT = 100_000  # arithmetic problems: to draw and to measure more would take hours
PLAIN_PROMPT = "Question: {prompt}\nAnswer:"  # for tokenizers without a chat template
CHARACTERS = 100  # of a prompt to a token, at the most: a longer prompt is not even tokenised
TRIED = 1000  # prompts that are encoded to find some that fit


@dataclass
class Problem:
    """One prompt, as text and as the token ids the model is given, and its reference answer."""

    prompt: str
    answer: str
    prompt_ids: list[int]
    index: int = -1  # its number in the stream of training problems


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
    tokenizer: Tokenizer | None = None  # that of the prompts

    def distinct(self, texts: list[str], group: int) -> int:
        """How many different answers, added up over groups of `group` responses."""
        return len({(i // group, self.final(text)) for i, text in enumerate(texts)})

    def take_killed(self) -> int:
        """Answers since the last call that broke the judge's bounds, or a reward of yours."""
        killed, self.judge.killed = getattr(self.judge, "killed", 0), 0
        return killed


def load_task(args: object, tokenizer: Tokenizer) -> Task:
    """The task that `--task` names, with `--eval_problems` held-out problems."""
    file = args.task.partition(":")[0]
    if args.eval_task and (file.endswith(".py") or args.task in arithmetic.KINDS):
        raise BadInput(f"--eval_task: --task {args.task} has its own held-out problems and judge")
    read = file_task if file.endswith(".py") else dataset_task
    task = (arithmetic_task if args.task in arithmetic.KINDS else read)(args, tokenizer)
    numbered = lambda index: replace(task.train(index), index=index)  # noqa: E731
    return replace(task, train=numbered, tokenizer=tokenizer)


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
        raise BadInput(
            f"--task {args.task}: a prompt of {longest} tokens; {limits(args, tokenizer)}"
        )
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


def file_task(args: object, tokenizer: Tokenizer) -> Task:
    """A task of yours: FILE.py, or what is called NAME in it, FILE.py:NAME (see tools/gym.py).

    `train(i) -> (prompt, reference)` is a pure function of i (a seed begins at another i),
    `held_out` has such pairs; `reward(response, reference) -> float`, if there is one, judges in
    place of math-verify, in the same bounded workers. A prompt goes through the chat template if
    the model has one, else it is taken as it is.
    """
    flag, plain = f"--task {args.task}", None if not tokenizer.chat_template else ""
    with blame(f"{flag}: cannot be used"):
        given = loaded(args.task)
        rows = list(islice(given.held_out, args.eval_problems))
        given.train(0)
    judge = Judge(args.task if hasattr(given, "reward") else "")

    def problem(row: Row) -> Problem | None:
        if not isinstance(row, tuple | list) or [type(part) for part in row] != [str, str]:
            raise BadInput(f"{flag}: {str(row)[:40]} is no (prompt, reference), two texts")
        return fitting(row, plain, args, tokenizer)

    def train(index: int) -> Problem:
        rng = random.Random(f"instead/{args.seed}/{index}")
        index += (args.seed - 1) % 2**20 * 1_000_003
        for _ in range(TRIED):
            if found := problem(given.train(index)):
                return found
            index = rng.randrange(2**31)  # too long: another one, by a rule of the index alone
        raise BadInput(f"{flag}: hardly a prompt fits; {limits(args, tokenizer)}")

    held_out = [found for row in rows if (found := problem(row))]
    if not held_out:
        for prompt, _ in rows[:1]:
            encode(prompt, plain, tokenizer)  # raises, if that is why
        raise BadInput(f"{flag}: no held-out problem fits; {limits(args, tokenizer)}")
    train(0)
    return Task(args.task, train, held_out, judge, checksum(Path(args.task.partition(":")[0])))


def dataset_task(args: object, tokenizer: Tokenizer) -> Task:
    """A finite set as an endless stream of seeded shuffles; a prompt is encoded when it is drawn.

    Without a test split, up to a quarter of it is held back. A prompt that is held out is never
    trained on, in whatever row it stands.
    """
    rows, judge = read_set(args.task, args, "train"), Judge()
    own_split = args.eval_task or (args.task in HUB and HUB[args.task].test)
    spec = args.eval_task or args.task
    files = [path for path in map(local_file, (args.task, args.eval_task)) if path]
    if len({path.resolve() for path in files}) < len(files):
        raise BadInput(f"--eval_task {spec}: is the training file, of which a part is held back")
    test = read_set(spec, args, "test", "--eval_task") if own_split else rows
    remarks = remarks_on(args.task, rows, judge)
    remarks += remarks_on(spec, test, judge) if args.eval_task else []
    order, distinct = list(range(len(test))), {}
    random.Random("held-out").shuffle(order)  # the same for every seed
    for row in order:
        distinct.setdefault(test[row][0].strip(), test[row])
    most = min(args.eval_problems, len(distinct) if own_split else max(1, len(distinct) // 4))
    problem = partial(fitting, instruction=args.instruction, args=args, tokenizer=tokenizer)
    tried = map(problem, islice(distinct.values(), max(most, TRIED)))
    held_out = list(islice(filter(None, tried), most))
    never = distinct.keys() if own_split else {problem.prompt.strip() for problem in held_out}
    kept = np.array([i for i, row in enumerate(rows) if row[0].strip() not in never])
    sample = random.Random("tried").sample(list(kept), min(TRIED, len(kept)))
    idle = sum(problem(rows[i]) is None for i in sample)
    if not held_out or idle == len(sample):
        encode(rows[0][0], args.instruction, tokenizer)  # raises, if that is why
        why = f"all are held out or too long; {limits(args, tokenizer)}"
        raise BadInput(f"--task {args.task}: no problem left of {len(rows)}: {why}")
    if len(held_out) < args.eval_problems:
        remarks.append(f"{len(held_out)} of {len(distinct)} problems are held out")
    if (lost := len(rows) - len(kept)) > (0 if own_split else len(held_out)):
        remarks.append(f"{lost} rows have a prompt that is held out and are not trained on")
    if idle:
        what = "too long, or not to be written by the tokenizer: such are skipped"
        remarks.append(f"{idle} of {len(sample)} prompts tried are {what}")

    @lru_cache(2)
    def epoch(number: int) -> np.ndarray:
        return np.random.default_rng([args.seed, number]).permutation(kept)

    def train(index: int) -> Problem:
        number, place = divmod(index, len(kept))
        row, rng = epoch(number)[place], random.Random(f"instead/{args.seed}/{index}")
        while not (found := problem(rows[row])):
            row = rng.choice(kept)  # another row, by a rule of the index alone
        return found

    return Task(args.task, train, held_out, judge, "".join(map(checksum, files)), remarks)


# How a prompt becomes tokens


def room(args: object, tokenizer: Tokenizer) -> int:
    """Tokens that a prompt may have, so that its response fits too."""
    positions = min(getattr(tokenizer, "model_max_length", math.inf), 10**9)
    return min(args.max_prompt_tokens, positions - args.max_new_tokens)


def limits(args: object, tokenizer: Tokenizer) -> str:
    """`room` in words."""
    left = f"the model's positions less --max_new_tokens {args.max_new_tokens}"
    return f"room is for {room(args, tokenizer)}: --max_prompt_tokens, and {left}"


def fitting(
    row: Row, instruction: str | None, args: object, tokenizer: Tokenizer
) -> Problem | None:
    """(prompt, answer) as a problem, or None if the prompt is too long or cannot be written."""
    (prompt, answer), most = row, room(args, tokenizer)
    if len(prompt) <= CHARACTERS * most:
        with contextlib.suppress(BadInput):
            ids = encode(prompt, instruction, tokenizer)
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
            raise ValueError(f"no token left, or one without an embedding: {max(ids, default='')}")
        return ids
