"""Memory per GPU of the commands in the files' headers, estimated: `python docs/memory.py [FILE
...]`, GB.

What is counted, with N parameters over R ranks:
    states       float32 master copy, AdamW's two moments, float32 gradient: 16 N / R bytes (goldilocks: twice;
                 vcpo: 24, with its two buffers)
    reference    float32 shards, 4 N / R (0 without a KL term, or with --offload_reference)
    gathered     bfloat16 copies of what FSDP gathers at once, the root (embedding and head) and two layers; and of the
                 root and a layer the gradient before it is scattered, in bfloat16 and in float32
    activations  what one micro-batch of --micro_tokens keeps for the backward pass, or with --gradient_checkpointing
                 a layer's input for each layer and one layer whole; and one block of logits
    vLLM         weights (bfloat16; minirl: 8 bits) / --tensor_parallel; its KV cache is what --vllm_memory, a share of
                 80 GB, leaves beside them and some 3 GB for its activations and CUDA graphs
The peak is the sum; with --vllm_sleep it is the larger of the trainer's part and of vLLM's beside
the resident weights. These are the terms that grow; allocator slack, CUDA graphs and NCCL buffers
come on top (some 3 to 6 GB).
"""

import argparse
import ast
import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from common.logprobs import BLOCK_ELEMENTS  # noqa: E402

FILES = "grpo gspo sapo stapo maspo minirl vcpo goldilocks deep_grpo".split()
GPU, PROMPT = 80.0, 512  # GB; tokens of a prompt
VLLM_WORK = 3e9  # bytes of vLLM's activations and CUDA graphs


@dataclass
class Shape:
    """What a model's memory depends on."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int  # of one expert, where there are several
    tied: bool
    vocabulary: int = 151_936
    head_dim: int = 128
    experts: int = 1
    active: int = 1

    def layer(self) -> int:
        """Parameters of a decoder layer."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return (
            attention
            + 3 * self.hidden * self.intermediate * self.experts
            + router
            + 2 * self.hidden
        )

    def root(self) -> int:
        """Parameters outside the layers: embedding, head, final norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    def parameters(self) -> int:
        return self.layers * self.layer() + self.root()

    def kept(self) -> float:
        """Bytes that a layer keeps for each token: bfloat16, norms in float32, attention without
        its score matrix."""
        norms = 2 * 10 * self.hidden  # input, its float32 copy, the normalised one
        attention = (
            self.head_dim * (self.heads + 2 * self.kv_heads) * 2 * 3
            + 2 * self.heads * self.head_dim * 2
        )
        return norms + attention + 4 * 2 * self.intermediate * self.active + 2 * 2 * self.hidden

    def cache(self) -> int:
        """Bytes of KV cache for each token, bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {  # from the models' config.json
    "Qwen/Qwen3-1.7B-Base": Shape(2048, 28, 16, 8, 6144, True),
    "Qwen/Qwen3-8B-Base": Shape(4096, 36, 32, 8, 12288, False),
    "Qwen/Qwen3-30B-A3B-Base": Shape(2048, 48, 32, 4, 768, False, experts=128, active=8),
    "Qwen/Qwen2.5-1.5B": Shape(1536, 28, 12, 2, 8960, True),
    "Qwen/Qwen2.5-Math-1.5B": Shape(1536, 28, 12, 2, 8960, True),
    "Qwen/Qwen2.5-7B": Shape(3584, 28, 28, 4, 18944, False, vocabulary=152_064),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Shape(1536, 28, 12, 2, 8960, False),
}


def commands(name: str) -> list[list[str]]:
    """The words of each torchrun command in the file's header that names a model."""
    header = ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text())).replace("\\\n", " ")
    lines = [
        line.strip()
        for line in header.splitlines()
        if line.strip().startswith("torchrun") and "Qwen" in line
    ]
    return [re.sub(r"\s#\s.*", "", line).split() for line in lines if " ..." not in line]


def estimate(name: str, words: list[str]) -> dict[str, float]:
    """GB per GPU, by part."""
    ranks = 1
    for word in words:
        if word.startswith(("--nproc_per_node=", "--nnodes=")):
            ranks *= int(word.partition("=")[2])
    flags = {w: v for w, v in zip(words, [*words[1:], ""]) if w.startswith("--")}
    args = importlib.import_module(name).Args()

    def number(field: str) -> float:
        return float(flags.get(f"--{field}", getattr(args, field, 0)))

    shape = SHAPES[flags["--model"]]
    # The longest response is never split
    tokens = max(number("micro_tokens"), number("max_new_tokens") + PROMPT)
    n = shape.parameters()
    layer = shape.kept() * tokens
    held = (
        2 * shape.hidden * tokens * shape.layers + layer
        if "--gradient_checkpointing" in flags
        else layer * shape.layers
    )
    parts = {
        "states": 16 * n / ranks * {"goldilocks": 2, "vcpo": 1.5}.get(name, 1),
        "reference": 4 * n / ranks
        if number("beta") > 0 and "--offload_reference" not in flags
        else 0,
        "gathered": 2 * (shape.root() + 2 * shape.layer()) + 6 * (shape.root() + shape.layer()),
        "activations": held + 4 * 4 * BLOCK_ELEMENTS,
        "vLLM weights": (1 if args.rollout_dtype == "float8" else 2)
        * n
        / number("tensor_parallel"),
    }
    parts = {part: size / 1e9 for part, size in parts.items()}
    trainer = sum(parts.values()) - parts["vLLM weights"]
    share = number("vllm_memory") * GPU
    parts["KV cache"] = max(0.0, share - parts["vLLM weights"] - VLLM_WORK / 1e9)
    rows = (
        parts["KV cache"]
        * 1e9
        * number("tensor_parallel")
        / (shape.cache() * (number("max_new_tokens") + PROMPT))
    )
    sleeping = "--vllm_sleep" in flags
    resident = parts["states"] + parts["reference"]
    parts["peak"] = max(trainer, resident + share) if sleeping else trainer + share
    return parts | {"parameters": n / 1e9, "ranks": ranks, "responses in cache": rows}


if __name__ == "__main__":
    # No usage: an error is one line
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help=f"of {', '.join(FILES)} (default: all)"
    )
    files = parser.parse_args().files or FILES
    if unknown := [name for name in files if name not in FILES]:
        parser.error(f"{unknown[0]}: unknown, use some of {', '.join(FILES)}")
    shown = "parameters ranks states reference gathered activations".split() + [
        "vLLM weights",
        "KV cache",
        "peak",
    ]
    print(
        f"| file | model | {' | '.join(shown)} | responses in cache |\n|{'---|' * (len(shown) + 3)}"
    )
    for name in files:
        for words in commands(name):
            found = estimate(name, words)
            model = words[words.index("--model") + 1].partition("/")[2]
            cells = [
                f"{found[part]:.0f}" if part == "ranks" else f"{found[part]:.1f}" for part in shown
            ]
            print(f"| {name} | {model} | {' | '.join(cells)} | {found['responses in cache']:.0f} |")
