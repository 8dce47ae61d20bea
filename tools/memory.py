"""Memory per GPU of the commands in the files' headers, estimated, in GB; and per host.

    python -m tools.memory [FILE ...]

What is counted, with N parameters over R ranks (or --shard_ranks):
    states       float32 master copy, AdamW's two moments, float32 gradient: 16 N / R bytes
                 (goldilocks, recipe: and as much for the teacher, the same model without its head;
                 jet: and the 8-bit numbers as float32, 4 N / R)
    reference    float32 shards, 4 N / R (0 without a KL term, or with --offload_reference); of opd
                 the teacher's, by its own N
    gathered     bfloat16 copies of what FSDP gathers at once, the root (embedding and head) and
                 two layers; and of the root and a layer the gradient before it is scattered, in
                 bfloat16 and in float32 (vcpo, recipe: and one response's gradient of the head,
                 float32)
    activations  what one micro-batch of --micro_tokens keeps for the backward pass, or with
                 --gradient_checkpointing a layer's input for each layer and one layer whole; and
                 one block of logits
    vLLM         weights (bfloat16; minirl: 8 bits) / --tensor_parallel; its KV cache is what
                 --vllm_memory, a share of 80 GB, leaves beside them and some 5 GB for its
                 activations and CUDA graphs
The peak is the largest phase's: in an update all of the trainer's parts beside vLLM's share, or
with --vllm_sleep beside the graphs, which stay (2 GB); in a sampling states, reference and vLLM's
share; in a push also the two largest tensors, whole, in vLLM's precision. Allocator slack and
NCCL's buffers come on top (some 3 to 6 GB).

host: GB on the node of rank 0, which alone loads the float32 weights (and, for a reference, copies
them); with --vllm_sleep each rank's sleeping weights, every tensor in a pinned block of the next
power of two; an offloaded reference; minirl's columns of experts, sampler's and trainer's.
"""

import importlib
import math
import re
from dataclasses import dataclass

from common.logprobs import BLOCK_ELEMENTS
from tools import arguments
from tools.marks import ROOT, algorithms

# Name of each algorithm file -> its module
FILES = {p.stem: ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in algorithms()}
GPU, PROMPT = 80.0, 512  # GB; tokens of a prompt
VLLM_WORK = 5e9  # bytes of vLLM's activations and CUDA graphs
GRAPHS = 2e9  # of these the graphs


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

    def matrices(self) -> list[int]:
        """Parameters of each matrix of a layer, as vLLM fuses them."""
        qkv = self.head_dim * (self.heads + 2 * self.kv_heads)
        router = self.experts if self.experts > 1 else 0
        mlp = self.intermediate * self.experts
        return [self.hidden * n for n in (qkv, self.head_dim * self.heads, 2 * mlp, mlp, router)]

    def layer(self) -> int:
        """Parameters of a decoder layer."""
        return sum(self.matrices()) + 2 * self.hidden

    def head(self) -> int:
        return self.vocabulary * self.hidden

    def root(self) -> int:
        """Parameters outside the layers: embedding, head, final norm."""
        return self.head() * (1 if self.tied else 2) + self.hidden

    def parameters(self) -> int:
        return self.layers * self.layer() + self.root()

    def kept(self) -> float:
        """Bytes a layer keeps for a token: bfloat16, float32 norms, attention without scores."""
        norms = 2 * 10 * self.hidden  # input, its float32 copy, the normalised one
        qkv = 2 * 3 * self.head_dim * (self.heads + 2 * self.kv_heads)
        attention = qkv + 2 * 2 * self.head_dim * self.heads
        # Of experts also each one's copy of its tokens, and what it makes of them.
        copies = 2 * 2 * self.hidden * self.active if self.experts > 1 else 0
        mlp = 4 * 2 * self.intermediate * self.active + copies
        return norms + attention + mlp + 2 * 2 * self.hidden

    def cache(self) -> int:
        """Bytes of KV cache for each token, bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {  # from the models' config.json
    "Qwen/Qwen3-1.7B-Base": Shape(2048, 28, 16, 8, 6144, True),
    "Qwen/Qwen3-8B-Base": Shape(4096, 36, 32, 8, 12288, False),
    "Qwen/Qwen3-30B-A3B-Base": Shape(2048, 48, 32, 4, 768, False, experts=128, active=8),
    "Qwen/Qwen3-8B": Shape(4096, 36, 32, 8, 12288, False),
    "Qwen/Qwen2.5-1.5B": Shape(1536, 28, 12, 2, 8960, True),
    "Qwen/Qwen2.5-Math-1.5B": Shape(1536, 28, 12, 2, 8960, True),
    "Qwen/Qwen2.5-7B": Shape(3584, 28, 28, 4, 18944, False, vocabulary=152_064),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Shape(1536, 28, 12, 2, 8960, False),
}


def commands(name: str) -> list[list[str]]:
    """The words of each torchrun command in the file's header that names a model."""
    header = importlib.import_module(FILES[name]).__doc__.replace("\\\n", " ")
    lines = [line.strip() for line in header.splitlines()]
    lines = [line for line in lines if line.startswith("torchrun") and "Qwen" in line]
    return [re.sub(r"\s#\s.*", "", line).split() for line in lines if " ..." not in line]


def estimate(name: str, words: list[str]) -> dict[str, float]:
    """GB per GPU, by part, and on the host."""
    flags = dict(zip(words, [*words[1:], ""])) | dict(w.split("=") for w in words if "=" in w)
    local, nodes = int(flags["--nproc_per_node"]), int(flags.get("--nnodes", 1))
    args, ranks = importlib.import_module(FILES[name]).Args(), local * nodes

    def number(field: str) -> float:
        return float(flags.get(f"--{field}", getattr(args, field, 0)))

    shape, sharing = SHAPES[flags["--model"]], int(number("shard_ranks")) or ranks
    response = number("max_new_tokens") + PROMPT
    tokens = max(number("micro_tokens"), response)  # the longest response is never split
    n, root, layer = shape.parameters(), shape.root(), shape.layer()
    teacher = getattr(args, "curriculum", hasattr(args, "teacher_lr"))
    trained = n + teacher * (n - shape.head() * (not shape.tied))
    kept = shape.kept() * tokens  # of one layer
    inputs = 2 * shape.hidden * tokens * shape.layers
    held = inputs + kept if "--gradient_checkpointing" in flags else kept * shape.layers
    frozen = SHAPES[flags.get("--teacher", flags["--model"])].parameters()
    refers, offloads = number("beta") > 0, "--offload_reference" in flags
    sleeps, width = "--vllm_sleep" in flags, 1 if args.rollout_dtype == "float8" else 2
    whole_gradient = 4 * shape.head() if hasattr(args, "optimal_baseline") else 0
    parts = {
        "states": (16 * trained + 4 * n * (name == "jet")) / sharing,
        "reference": 4 * frozen / sharing if refers and not offloads else 0,
        "gathered": 2 * (root + 2 * layer) + 6 * (root + layer) + whole_gradient,
        "activations": held + 4 * 4 * BLOCK_ELEMENTS,
        "vLLM weights": width * n / number("tensor_parallel"),
    }
    share, vllm = number("vllm_memory") * GPU * 1e9, parts["vLLM weights"]
    trainer, resident = sum(parts.values()) - vllm, parts["states"] + parts["reference"]
    pushed = 2 * 2 * max(shape.head(), *shape.matrices())
    parts["KV cache"] = max(0.0, share - vllm - VLLM_WORK)
    pushing = resident + pushed + (vllm + GRAPHS if sleeps else share)
    parts["peak"] = max(trainer + (GRAPHS if sleeps else share), resident + share, pushing)
    sleeping = [*shape.matrices() * shape.layers, *[shape.head()] * (1 if shape.tied else 2)]
    blocks = [
        2 ** math.ceil(math.log2(width * m / number("tensor_parallel"))) for m in sleeping if m
    ]
    columns = 2 * shape.layers * shape.active * response if shape.experts > 1 else 0
    rows = number("prompts_per_step") * number("group_size") / nodes
    later = (4 * frozen / nodes if refers and offloads else 0) + (name == "minirl") * rows * columns
    parts["host"] = sleeps * local * sum(blocks) + max(4 * (n + refers * frozen), later)
    cached = parts["KV cache"] * number("tensor_parallel") / shape.cache()  # tokens
    parts = {part: size / 1e9 for part, size in parts.items()}
    return parts | {"parameters": n / 1e9, "ranks": ranks, "responses in cache": cached / response}


def main(names: list[str]) -> None:
    """Print a row for each command of the files named."""
    shown = "parameters ranks states reference gathered activations".split()
    shown += ["vLLM weights", "KV cache", "peak", "responses in cache", "host"]
    print("| " + " | ".join(["file", "model", *shown]) + " |")
    print("|---" * (len(shown) + 2) + "|")
    for name in names:
        for words in commands(name):
            found = estimate(name, words)
            model = words[words.index("--model") + 1].partition("/")[2]
            whole = ("ranks", "responses in cache", "host")
            cells = [f"{found[part]:.{0 if part in whole else 1}f}" for part in shown]
            print("| " + " | ".join([name, model, *cells]) + " |")


if __name__ == "__main__":
    parser = arguments(__doc__)
    known = ", ".join(FILES)
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {known} (default: all)")
    names = parser.parse_args().files or list(FILES)
    if unknown := [name for name in names if name not in FILES]:
        parser.error(f"{unknown[0]}: unknown, use some of {known}")
    main(names)
