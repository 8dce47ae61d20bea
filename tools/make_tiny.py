"""Make the embedded models and their tokenizer.

    python -m tools.make_tiny tiny|tiny-teacher|tiny-moe FOLDER
    python -m tools.make_tiny tiny FOLDER --task arithmetic:100

A Qwen3 of 124k parameters (or a Qwen3-MoE of 248k: 8 experts, 2 for each token) learns by
supervised training to imitate an imperfect teacher: 55% of its demonstrations guess the answer
without working, and 3% of worked steps are wrong. The resulting model guesses when greedy, and
shows its working nearly half the time when sampled. Reinforcement learning can make this the rule.
Training takes 6 to 11 minutes on one thread, and three times as long for the mixture of experts.
tiny-teacher (variants/opd.py) is tiny after 2,000 more steps on demonstrations without guesses and
slips. With `--task`, tiny learns longer chains in 2,000 more steps; a chain slips as often as
before. FOLDER must be new or empty: to replace an embedded model, delete it first.
"""

import math
import random
from pathlib import Path
from statistics import mean

from common.model import load_model
from common.model_files import EMBEDDED
from common.tiny import arithmetic
from tools import arguments, empty_folder
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

# Pad and EOS must differ, or the mask would remove EOS from the loss.
VOCABULARY = ["<pad>", "<eos>", *"0123456789+-*=;#"]
STEPS, BATCH, LR, GUESS, SLIP = 6000, 64, 3e-3, 0.55, 0.03


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character. A character outside the vocabulary is an
    error, not an unknown token."""
    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def demonstration(
    rng: random.Random, guess: float, slip: float, kind: arithmetic.Kind
) -> tuple[str, str]:
    """Draw a training prompt and a teacher's response, with these shares of guesses and slips."""
    prompt = arithmetic.draw(rng, kind)
    while arithmetic.is_held_out(prompt):
        prompt = arithmetic.draw(rng, kind)
    if rng.random() < guess:
        return prompt, "#" + arithmetic.work(prompt)[1]
    steps, answer = arithmetic.work(prompt, rng, slip)
    return prompt, ";".join(steps) + "#" + answer


def untrained(kind: str, task: str) -> PreTrainedModel:
    """Make the model before training; for tiny-teacher and long chains, load the trained tiny."""
    if kind == "tiny-teacher" or task != "arithmetic":
        model = load_model("tiny")[0].train()
        if task != "arithmetic":
            model.config.max_position_embeddings = 1024  # tiny's chains have fewer than 256 tokens
        return model
    shape = {"vocab_size": len(VOCABULARY), "max_position_embeddings": 256}
    shape |= {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 192}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    shape |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    shape |= {"tie_word_embeddings": True}
    if kind != "tiny-moe":
        return Qwen3ForCausalLM(Qwen3Config(**shape))
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts |= {"norm_topk_prob": True, "output_router_logits": True}  # for the balancing loss
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))


def imitate(
    model: PreTrainedModel,
    tok: PreTrainedTokenizerFast,
    steps: int,
    lr: float,
    batch: int,
    guess: float,
    slip: float,
    kind: arithmetic.Kind,
) -> None:
    """Train the model on demonstrations with these shares of guesses and slips."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    for step in range(steps):
        inputs, labels = [], []
        for prompt, response in (demonstration(rng, guess, slip, kind) for _ in range(batch)):
            ids = tok(prompt + response)["input_ids"] + [tok.eos_token_id]
            inputs.append(torch.tensor(ids))
            # The loss sees only the response.
            labels.append(torch.tensor([-100] * len(prompt) + ids[len(prompt) :]))
        inputs = pad_sequence(inputs, batch_first=True, padding_value=tok.pad_token_id)  # [B, L]
        labels = pad_sequence(labels, batch_first=True, padding_value=-100)  # [B, L]
        # Next-token cross-entropy (and, with experts, the balancing loss)
        loss = model(inputs, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.step()
        optimizer.zero_grad()
        if step % 200 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)


def main(kind: str, folder: Path, most: int | None = None, task: str = "arithmetic") -> None:
    """Train the model on demonstrations and write it with its tokenizer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tok = tokenizer()
    model, chains = untrained(kind, task), arithmetic.KINDS[task]
    # How long, how fast, and with how many guesses and slips?
    steps, lr, batch, guess, slip = STEPS, LR, BATCH, GUESS, SLIP
    if kind == "tiny-teacher":
        steps, lr, guess, slip = 2000, 1e-3, 0.0, 0.0
    elif task != "arithmetic":
        steps, lr, batch = 2000, 1e-3, int(15 * BATCH / mean(chains.terms))
        slip *= mean(arithmetic.KINDS["arithmetic"].terms) / mean(chains.terms)
    imitate(model, tok, min(steps, most or steps), lr, batch, guess, slip, chains)
    if kind == "tiny-moe":
        model.config.output_router_logits = False
    model.save_pretrained(folder)
    tok.save_pretrained(folder)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("kind", choices=list(EMBEDDED))
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--steps", type=int, metavar="N", help="stop after N (a test: no model)")
    kinds = {"choices": arithmetic.KINDS, "metavar": "TASK", "default": "arithmetic"}
    parser.add_argument("--task", **kinds, help="its chains (default: arithmetic)")
    chosen = parser.parse_args()
    try:
        folder = empty_folder(chosen.folder)
    except OSError as error:
        parser.error(str(error))
    main(chosen.kind, folder, chosen.steps, chosen.task)
