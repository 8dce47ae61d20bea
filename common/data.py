"""Tasks: where prompts come from, how they become tokens, and which verifier scores the responses.

A task is a pure function of an index: `train(i)` is the i-th problem of this seed's endless stream.
The data cursor is therefore one integer, the same for any number of ranks, and a resumed run sees
what the uninterrupted one would have.
"""

import contextlib
import hashlib
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.distributed import everywhere
from common.plumbing.errors import BadInput, blame
from common.plumbing.flags import key_values
from common.plumbing.folder import checksum
from common.plumbing.sets import HUB, Prompt, Row, as_row, as_text, local_file
from common.plumbing.sets import read_set, remarks_on
from common.reward import Verifier, final_answer, load_task_file
from common.tiny import arithmetic

MOST_HELD_OUT = 100_000  # arithmetic problems: to draw and to measure more would take hours
PLAIN_PROMPT = "Question: {prompt}\nAnswer:"  # for tokenizers without a chat template
CHARACTERS = 100  # of a prompt to a token, at the most: a longer prompt is not even tokenised
TRIED = 1000  # prompts that are encoded to find some that fit
PURE = "they must not depend on chance, the time or a set's order (draw with random.Random(i))"
SEEN = 4  # problems of a task file, training and held-out, that its fingerprint covers


@dataclass
class Problem:
    """One prompt, as text (or messages) and as the token ids the model is given, and its answer."""

    prompt: Prompt
    answer: object  # a text; for a reward of yours whatever JSON can hold
    prompt_ids: list[int]
    index: int = -1  # its number in the stream of training problems


@dataclass
class Task:
    """`train(i)`: the i-th training problem; `held_out`: problems that are never trained on."""

    name: str
    train: Callable[[int], Problem]
    held_out: list[Problem]
    verifier: Callable[[list[str], list], list[float]]  # (completions, answers) -> rewards
    fingerprint: str = ""  # of the local files it was read from: a resumed run must see the same
    remarks: list[str] = field(default_factory=list)  # on the data, for the user, a line each
    held_out_verifier: Callable | None = (
        None  # the verifier of the held-out problems, where it is another
    )
    final: Callable[[str], str] = final_answer  # a response's answer, without its working
    tokenizer: Tokenizer | None = None  # that of the prompts

    def distinct(self, texts: list[str], group: int) -> int:
        """How many different answers, added up over groups of `group` responses."""
        return len({(i // group, self.final(text)) for i, text in enumerate(texts)})


def load_task(args: object, tokenizer: Tokenizer) -> Task:
    """The task that `--task` names, with `--eval_problems` held-out problems."""
    file = args.task.partition(":")[0].endswith(".py")
    if args.eval_task and (file or args.task in arithmetic.KINDS):
        raise BadInput(
            f"--eval_task: --task {args.task} has its own held-out problems and verifier"
        )
    chat_options(args.chat, tokenizer)  # refuses wrong ones
    read = file_task if file else dataset_task
    task = (arithmetic_task if args.task in arithmetic.KINDS else read)(args, tokenizer)
    # Each rank measures its share of the held-out problems: they have to be the same ones.
    held_out = digest([(problem.prompt, problem.answer) for problem in task.held_out])
    if len(everywhere([task.fingerprint + held_out])) > 1:
        raise BadInput(f"--task {args.task}: ranks see different problems; {PURE}")
    numbered = lambda index: replace(task.train(index), index=index)  # noqa: E731
    return replace(task, train=numbered, tokenizer=tokenizer)


def digest(rows: list) -> str:
    """SHA-256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()


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
    held_out_verifier = judged(arithmetic.arithmetic_reward) if kind.reward else None
    verifier, held_out = judged(kind.reward or arithmetic.arithmetic_reward), list(chosen.values())
    final = lambda text: text.rpartition("#")[2]  # noqa: E731
    return Task(
        args.task, train, held_out, verifier, held_out_verifier=held_out_verifier, final=final
    )


def file_task(args: object, tokenizer: Tokenizer) -> Task:
    """A task of yours: FILE.py, or what is called NAME in it, FILE.py:NAME (see tools/gym.py).

    `train(i) -> (prompt, reference)` is a pure function of i (a seed begins at another i),
    `held_out` has such pairs; `reward(response, reference)`, if there is one, judges in place of
    math-verify, in the same bounded workers. A text goes through the chat template if the model has
    one, else it is taken as it is; docs/yours.md has examples.
    """
    flag, plain = f"--task {args.task}", None if not tokenizer.chat_template else ""
    with blame(f"{flag}: cannot be used"):
        given = load_task_file(args.task)
        rows = list(islice(given.held_out, max(SEEN, args.eval_problems)))
        verifier = Verifier()
        if hasattr(given, "reward"):
            verifier = Verifier(args.task, **getattr(given, "bounds", {}))
    first = (args.seed - 1) % 2**20 * 1_000_003  # where this seed begins

    def checked(row: object) -> Row:
        with blame(f"{flag}: {str(row)[:40]} is no (prompt, reference)"):
            if not isinstance(row, tuple | list) or len(row) != 2:  # a dict would give its keys
                raise TypeError("neither a tuple nor a list of two")
            prompt, reference = row
            # Workers read references as JSON: the run should hold what the reward will be given.
            as_given = json.loads(json.dumps(reference)) if verifier.spec else as_text(reference)
            return as_row(prompt, as_given)

    def drawn(index: int) -> Row:
        with blame(f"{flag}: train({index}) fails"):
            return checked(given.train(index))

    def train(index: int) -> Problem:
        index += first
        for _ in range(TRIED):
            if found := fitting(drawn(index), plain, args, tokenizer):
                return found
            # Too long: another one, by a rule of the index alone.
            index = random.Random(f"instead/{args.seed}/{index}").randrange(2**31)
        raise BadInput(f"{flag}: hardly a prompt fits; {limits(args, tokenizer)}")

    rows = [checked(row) for row in rows]
    if not rows:
        raise BadInput(f"{flag}: held_out is empty")
    seen, again = ([drawn(index) for index in range(SEEN)] for _ in range(2))
    if seen != again:
        raise BadInput(f"{flag}: train(i) gives other problems when it is asked again; {PURE}")
    # A resumed run must see the same problems, of whatever --seed and --eval_problems.
    fingerprint = checksum(Path(args.task.partition(":")[0])) + digest([seen, rows[:SEEN]])
    rows = rows[: args.eval_problems]
    held_out = [found for row in rows if (found := fitting(row, plain, args, tokenizer))]
    if not held_out:
        encode(rows[0][0], plain, tokenizer, chat=args.chat)  # raises, if that is why
        raise BadInput(f"{flag}: no held-out problem fits; {limits(args, tokenizer)}")
    train(0)
    remarks = []
    if left_out := len(rows) - len(held_out):
        remarks.append(f"{left_out} held-out problems: too long, or not to be written")
    trained, until = set(), time.monotonic() + 1
    with contextlib.suppress(BadInput):  # a problem that fails is the training's to report
        for index in range(TRIED):
            trained.add(str(drawn(first + index)[0]).strip())
            if time.monotonic() > until:
                break
    if known := sum(str(problem.prompt).strip() in trained for problem in held_out):
        what = "come up in training, too: the accuracies are not of unseen problems"
        remarks.append(f"{known} of {len(held_out)} held-out problems {what}")
    return Task(args.task, train, held_out, verifier, fingerprint, remarks)


def dataset_task(args: object, tokenizer: Tokenizer) -> Task:
    """A finite set as an endless stream of seeded shuffles; a prompt is encoded when it is drawn.

    Without a test split, up to a quarter of it is held back. A prompt that is held out is never
    trained on, in whatever row it stands.
    """
    rows, verifier = read_set(args.task, args, "train"), Verifier()
    own_split = args.eval_task or (args.task in HUB and HUB[args.task].test)
    spec = args.eval_task or args.task
    files = [path for path in map(local_file, (args.task, args.eval_task)) if path]
    if len({path.resolve() for path in files}) < len(files):
        raise BadInput(f"--eval_task {spec}: is the training file, of which a part is held back")
    test = read_set(spec, args, "test", "--eval_task") if own_split else rows
    remarks = remarks_on(args.task, rows, verifier)
    remarks += remarks_on(spec, test, verifier) if args.eval_task else []
    order, distinct = list(range(len(test))), {}
    random.Random("held-out").shuffle(order)  # the same for every seed
    for row in order:
        distinct.setdefault(str(test[row][0]).strip(), test[row])
    most = min(args.eval_problems, len(distinct) if own_split else max(1, len(distinct) // 4))
    problem = partial(fitting, instruction=args.instruction, args=args, tokenizer=tokenizer)
    tried = map(problem, islice(distinct.values(), max(most, TRIED)))
    held_out = list(islice(filter(None, tried), most))
    never = distinct.keys() if own_split else {str(one.prompt).strip() for one in held_out}
    kept = np.array([i for i, row in enumerate(rows) if str(row[0]).strip() not in never])
    sample = random.Random("tried").sample(list(kept), min(TRIED, len(kept)))
    idle = sum(problem(rows[i]) is None for i in sample)
    if not held_out or idle == len(sample):
        encode(rows[0][0], args.instruction, tokenizer, chat=args.chat)  # raises, if that is why
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

    return Task(args.task, train, held_out, verifier, "".join(map(checksum, files)), remarks)


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
    if len(str(prompt)) <= CHARACTERS * most:
        with contextlib.suppress(BadInput):
            ids = encode(prompt, instruction, tokenizer, chat=args.chat)
            return Problem(prompt, answer, ids) if len(ids) <= most else None


def chat_options(words: tuple[str, ...], tokenizer: Tokenizer) -> dict:
    """`--chat KEY=VALUE ...` as options of the chat template.

    A template ignores what it does not know, so that a misspelt key would do nothing.
    """
    given = key_values("--chat", words)
    for key in given:
        if not tokenizer.chat_template:
            raise BadInput(f"--chat {key}: the model's tokenizer has no chat template")
        if key not in str(tokenizer.chat_template):
            raise BadInput(f"--chat {key}: the model's chat template does not read it")
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
    text, messages = f"{prompt} {instruction or ''}".strip(), isinstance(prompt, list)
    templated = messages or instruction is not None and bool(tokenizer.chat_template)
    if templated:
        turns = prompt if messages else [{"role": "user", "content": text}]
        how = {"tokenize": False, "add_generation_prompt": True}
        with blame(f"{flag}: its chat template cannot write the prompt {text[:40]!r}"):
            text = tokenizer.apply_chat_template(turns, **how, **chat_options(chat, tokenizer))
    elif instruction is not None:
        text = PLAIN_PROMPT.format(prompt=text)
    knows = getattr(tokenizer, "letters", "")
    with blame(f"{flag}: its tokenizer cannot write the prompt {text[:200]!r}{knows}"):
        # The template wrote its special tokens already.
        ids = tokenizer(text, add_special_tokens=not templated)["input_ids"]
        if not ids or max(ids) >= getattr(tokenizer, "embedded", math.inf):
            raise ValueError(f"no token left, or one without an embedding: {max(ids, default='')}")
        return ids
