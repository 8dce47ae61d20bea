"""Tasks: prompts as text and tokens, answers and verifier. Rows and scoring come from `tasks/`."""

import json
import math
import random
import re
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.batch import Rollout
from common.cli import BadInput, Flags, blame, key_values
from common.clock import timed
from common.tasks.answers import OPENING, TAG
from common.tasks.rows import TOO_LONG, Prompt, Row, aside
from common.tasks.sources import Source, source_for

PLAIN_PROMPT = "Question: {prompt}\nAnswer:"  # for tokenizers without a chat template
TRIED = 1000  # how many prompts we tokenise, at most, to find one that fits
DATE = datetime(2024, 7, 26)  # instead of today, in chat templates that write it: Llama's default


@dataclass
class Problem:
    """A prompt, as text (or messages) and as the token ids that the model reads, and its answer."""

    prompt: Prompt
    answer: object  # a text, or for a task file's own `reward` anything that JSON can hold
    prompt_ids: list[int]
    index: int = -1  # the number of a training problem in the stream


@dataclass
class Task(Source):
    """A source whose rows are problems: `train(i)` and `held_out` have their prompts as tokens."""

    tokenizer: Tokenizer | None = None  # of the prompts

    @timed("reward")
    def score(self, rollout: Rollout, problems: list[Problem], G: int) -> Tensor:
        """Return the rewards `[P, G]` of G responses to each of P problems (P may be 0), and write
        the rollout's columns `problem`, `rewards`, `new_answer` and `judge_failed`."""
        texts = texts_of(rollout, self.tokenizer)
        verdicts = self.verifier(texts, [problem.answer for problem in problems for _ in range(G)])
        answers = [verdict.answer for verdict in verdicts]
        groups = [answers[row - row % G : row] for row in range(len(answers))]  # up to each row
        new = [answer not in earlier for answer, earlier in zip(answers, groups)]
        on = rollout.mask.device
        numbers = torch.tensor([problem.index for problem in problems], dtype=torch.long, device=on)
        rollout.problem = numbers.repeat_interleave(G)  # [N]
        columns = {
            "rewards": [verdict.score for verdict in verdicts],
            "new_answer": new,
            "judge_failed": [verdict.failure != "" for verdict in verdicts],
        }
        for name, values in columns.items():
            setattr(rollout, name, torch.tensor(values, dtype=torch.float32, device=on))  # [N]
        return rollout.rewards.view(len(problems), G)  # [P, G]


def texts_of(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """Return the N responses as verifiers read them: without special tokens, except tags of
    thoughts and answers (patterns.toml).

    If the prompt ends with a tag that opens a thought, the text begins with it: the template has
    opened the thought, and an answer inside a thought that never closes must not be rewarded.
    """
    if not len(rollout):
        return []  # of no rows, transformers would make one empty text
    added = tokenizer.added_tokens_decoder.items()
    unread = {n for n, token in added if token.special and not re.search(TAG, token.content, re.I)}
    rows = [[n for n in row if n not in unread] for row in rollout.response_ids()]
    starts = (rollout.prompt_len - rollout.prefix_len)[:, None]  # [N, 1]
    last = starts + torch.arange(-64, 0, device=starts.device)  # [N, 64]: the prompts' last tokens
    ends = tokenizer.batch_decode(rollout.sequences.gather(1, last.clamp(min=0)))
    opened = [re.search(rf"(?:{OPENING}|)\s*$", end, re.I)[0].strip() for end in ends]
    return [tag + text for tag, text in zip(opened, tokenizer.batch_decode(rows))]


def load_task(args: Flags, tokenizer: Tokenizer) -> Task:
    """Load the task that `--task` names, with up to `--eval_problems` held-out problems. Rows whose
    prompts are too long are left out."""
    options = {"args": args, "tokenizer": tokenizer}
    fits = partial(as_problem, instruction=args.instruction, **options)
    source = source_for(args, bool(tokenizer.chat_template), fits)
    wrong = f"--task {args.task}: all prompts are {TOO_LONG}"

    def train(index: int) -> Problem:
        """Return problem `index`, or one chosen by `index` alone if that prompt is too long."""
        rng = random.Random(f"instead/{args.seed}/{index}")
        place = index
        for _ in range(TRIED):
            problem = as_problem(source.train(place), "", source.instruction, **options)
            if problem:
                return replace(problem, index=index)
            place = rng.randrange(2**31)
        raise BadInput(wrong)

    first = (as_problem(row, "", source.instruction, **options) for row in source.held_out)
    held_out = list(islice(filter(None, first), args.eval_problems))
    if not held_out:
        raise BadInput(wrong if source.held_out else f"--task {args.task}: no held-out problems")
    train(0)  # fails now if no training prompt fits
    name_unknown_words(held_out, tokenizer)
    problems = {"train": train, "held_out": held_out, "tokenizer": tokenizer}
    return Task(**vars(source) | problems)


def name_unknown_words(problems: list[Problem], tokenizer: Tokenizer) -> None:
    """Say how many tokens of the prompts are the unknown token, unless it has another use, too."""
    token = getattr(tokenizer, "unk_token", None)
    ids = [token_id for problem in problems for token_id in problem.prompt_ids]
    if token and token not in (tokenizer.eos_token, tokenizer.bos_token):
        if unknown := ids.count(tokenizer.unk_token_id):
            aside(f"--model: of {len(ids)} tokens of prompts {unknown} are {token}, unknown words")


def as_problem(
    row: Row, where: str, instruction: str | None, args: Flags, tokenizer: Tokenizer
) -> Problem | None:
    """Tokenise a row's prompt; None if it is too long or leaves too few positions to respond."""
    prompt, answer = row
    ids = encode(prompt, instruction, tokenizer, f"{where}--model", args.chat)
    if max(ids) >= getattr(tokenizer, "embeddings", math.inf):
        token = tokenizer.decode(max(ids))
        raise BadInput(f"{where}--model: has no embedding for {token!r} in a prompt")
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
    """Return prompt and instruction as token ids, through the chat template or PLAIN_PROMPT.

    With the instruction None, the prompt is taken as it is, without a template. Messages ignore the
    instruction and need the chat template, which gets the options `chat`. `flag` names the model in
    error messages.
    """
    options = key_values("--chat", chat)
    for name in options:
        if name not in str(tokenizer.chat_template):
            raise BadInput(f"--chat {name}: the chat template of --model never reads it")
    text = str(prompt) if instruction is None else f"{prompt} {instruction}".strip()
    turns = None  # without a template
    if isinstance(prompt, list):
        turns = prompt
    elif instruction is not None and tokenizer.chat_template:
        turns = [{"role": "user", "content": text}]
    elif instruction is not None:
        text = PLAIN_PROMPT.format(prompt=text)
    with blame(f"{flag}: its tokenizer cannot write the prompt {text[:200]!r}"):
        if turns is not None:
            options = {"strftime_now": DATE.strftime} | options  # the same prompts tomorrow
            options |= {"tokenize": False, "add_generation_prompt": True}
            text = tokenizer.apply_chat_template(turns, **options)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ValueError("no token left")
        if turns is None:
            special = tokenizer(text)["input_ids"]  # BOS in front, but maybe an EOS at the end
            return special[: special.index(ids[0])] + ids
        for turn in turns:
            lost = [part for part in must_stay(turn) if part not in text]
            if any(json.dumps(part, ensure_ascii=False)[1:-1] not in text for part in lost):
                what = "message" if turn["role"] != "assistant" else f"call of {lost[0]}"
                raise ValueError(f"the chat template leaves out the {turn['role']}'s {what}")
        return ids  # the template has written the special tokens


def must_stay(turn: dict) -> list[str]:
    """List what a chat template must write of a message: its text, and the names of its calls. Of
    the assistant's text it may drop thoughts."""
    texts = [turn["content"].strip()] if turn["role"] != "assistant" else []
    return texts + [call.get("function", call)["name"] for call in turn.get("tool_calls", [])]
