"""Estimated memory of grpo.py per GPU in GB: the flags with which a model fits.

    python -m tools.memory --model MODEL [--gpus N] [--gpu_memory GB] [--max_new_tokens T]
    python -m tools.memory --cards   the largest Qwen3 for one card of 16, 24, 48, 80, 141 GB

MODEL is a folder or a hub name; the program reads its config.json. The first command prints the
fastest command that fits, its peak, and how many responses the cache holds.

The parts, with N parameters over R ranks:
    states       float32 master copy, AdamW's two moments, float32 gradient: 16 N / R bytes
    reference    float32 shards, 4 N / R (0 with --offload_reference)
    gathered     bfloat16 copies of what FSDP gathers at once, the root (embedding and head) and
                 two layers; and of the root and a layer the gradient before it is scattered, in
                 bfloat16 and in float32
    activations  what one micro-batch of --micro_tokens keeps for the backward pass, or with
                 --gradient_checkpointing a layer's input for each layer and one layer whole; and
                 three blocks of logits
    vLLM         weights (bfloat16) / --tensor_parallel; its KV cache is what --vllm_memory, a share
                 of the card, leaves beside them and some 5 GB for its activations and CUDA graphs
With --offload, states and reference are in host memory; the GPU holds float32 shards of what is
being gathered. The peak is that of the largest phase. In an update these are all of the trainer's
parts and vLLM's share, or with --vllm_sleep the graphs, which stay (2 GB). In a sampling these are
the states without gradient, the reference and vLLM's share; in a push also the two largest tensors,
whole. Allocator slack and NCCL's buffers come on top (some 3 to 6 GB). A command that fits leaves
1 GB and 6% of the card for them.

host: GB on the node of rank 0, which alone loads the float32 weights and copies them for the
reference. With --vllm_sleep it includes each rank's sleeping weights, every tensor in a pinned
block of the next power of two. It also includes offloaded parts.
"""

import itertools
import math
from dataclasses import dataclass, replace

import grpo
from common.cli import BadInput, blame, say
from common.logprobs import BLOCK_ELEMENTS
from tools import arguments

PROMPT = 512  # tokens of a prompt
EXAMPLE = "Qwen/Qwen3-1.7B-Base"  # in the table for every card
CARDS = (16, 24, 48, 80, 141)  # GB
VLLM_WORK = 5e9  # bytes of vLLM's activations and CUDA graphs
GRAPHS = 2e9  # of these the graphs
ENOUGH = 16  # responses that vLLM samples at once: with fewer it waits for memory, not for the GPU
# Flags that save memory, from those that cost no time to those that cost most
SLEEP, CHECKPOINTING = {"vllm_sleep": True}, {"gradient_checkpointing": True}
SAVINGS = [{}, SLEEP, SLEEP | {"micro_tokens": 8192}]
SAVINGS += [CHECKPOINTING | flags for flags in SAVINGS]
for moved in ("offload_reference", "offload"):
    for size in ({}, {"micro_tokens": 8192}, {"micro_tokens": 4096}):
        SAVINGS.append(CHECKPOINTING | SLEEP | size | {moved: True})


@dataclass
class Shape:
    """The numbers of a model that decide its memory."""

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
        """Bytes kept by a layer for a token: bfloat16, float32 norms, attention without scores."""
        norms = 2 * 10 * self.hidden  # input, its float32 copy, the normalised one
        qkv = 2 * 3 * self.head_dim * (self.heads + 2 * self.kv_heads)
        attention = qkv + 2 * 2 * self.head_dim * self.heads
        # Each expert also keeps a copy of its tokens, and its output for them.
        copies = 2 * 2 * self.hidden * self.active if self.experts > 1 else 0
        mlp = 4 * 2 * self.intermediate * self.active + copies
        return norms + attention + mlp + 2 * 2 * self.hidden

    def cache(self) -> int:
        """Bytes of KV cache for each token, bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {  # from the models' config.json
    "Qwen/Qwen3-0.6B-Base": Shape(1024, 28, 16, 8, 3072, True),
    "Qwen/Qwen3-1.7B-Base": Shape(2048, 28, 16, 8, 6144, True),
    "Qwen/Qwen3-4B-Base": Shape(2560, 36, 32, 8, 9728, True),
    "Qwen/Qwen3-8B-Base": Shape(4096, 36, 32, 8, 12288, False),
    "Qwen/Qwen3-14B-Base": Shape(5120, 40, 40, 8, 17408, False),
}


def shape_of(model: str) -> Shape:
    """From the config.json of a folder or of a hub model."""
    from transformers import AutoConfig

    if model in SHAPES:
        return SHAPES[model]
    with blame(f"--model {model}: its config.json cannot be read"):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
        experts = getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)
        width = getattr(config, "moe_intermediate_size", None) if experts else None
        return Shape(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            intermediate=width or config.intermediate_size,
            tied=config.tie_word_embeddings,
            vocabulary=config.vocab_size,
            head_dim=getattr(config, "head_dim", 0)
            or config.hidden_size // config.num_attention_heads,
            experts=experts or 1,
            active=config.num_experts_per_tok if experts else 1,
        )


def estimate(args: grpo.Args, shape: Shape, local: int, nodes: int, gpu: float) -> dict[str, float]:
    """GB per GPU of `gpu` GB, and on the host, of a run with these flags on `nodes` nodes of
    `local` ranks; and how many responses vLLM's cache holds."""
    ranks = local * nodes
    n, root, layer = shape.parameters(), shape.root(), shape.layer()

    # The trainer
    response = args.max_new_tokens + PROMPT
    tokens = max(args.micro_tokens, response)  # the longest response is never split
    activations = shape.kept() * tokens * shape.layers
    if args.gradient_checkpointing:
        activations = 2 * shape.hidden * tokens * shape.layers + shape.kept() * tokens
    activations += 3 * 4 * BLOCK_ELEMENTS
    gathered = 2 * (root + 2 * layer) + 6 * (root + layer)
    states = 4 * (root + 2 * layer) / ranks if args.offload else 16 * n / ranks
    reference_moved = args.offload or args.offload_reference
    reference = 0 if reference_moved else 4 * n / ranks
    trainer = states + reference + gathered + activations

    # vLLM, and the three phases of a step
    weights = 2 * n / args.tensor_parallel
    share = args.vllm_memory * gpu * 1e9
    cache = max(0.0, share - weights - VLLM_WORK)
    gradient = 0 if args.offload else 4 * n / ranks  # there is none while the engine works
    resident = states + reference - gradient
    pushed = 2 * 2 * max(shape.head(), *shape.matrices())
    updating = trainer + (GRAPHS if args.vllm_sleep else share)
    sampling = resident + share
    pushing = resident + pushed + (weights + GRAPHS if args.vllm_sleep else share)

    # The host: at the start rank 0's float32 weights, later whatever was moved there
    asleep = 0
    if args.vllm_sleep:
        tensors = shape.matrices() * shape.layers + [shape.head()] * (1 if shape.tied else 2)
        for size in filter(None, tensors):
            asleep += local * 2 ** math.ceil(math.log2(2 * size / args.tensor_parallel))
    later = 4 * n / nodes if reference_moved else 0
    if args.offload:
        later += 16 * n / nodes
    return {
        "peak": max(updating, sampling, pushing) / 1e9,
        "host": (asleep + max(8 * n, later)) / 1e9,
        "responses": cache * args.tensor_parallel / shape.cache() / response,
    }


def fit(
    shape: Shape, gpus: int, gpu: float, response: int
) -> tuple[dict[str, object], dict[str, float]] | None:
    """The flags of the fastest grpo.py that fits on `gpus` cards of `gpu` GB, and its estimate;
    None if none fits. vLLM's cache must hold ENOUGH responses, or two if no flags allow that."""
    nodes, local = (gpus // 8, 8) if gpus > 8 else (1, gpus)
    usual = grpo.Args(max_new_tokens=response)
    engines = [ranks for ranks in (1, 2, 4, 8) if local % ranks == 0]
    for wanted, ranks, saving in itertools.product((ENOUGH, 2), engines, SAVINGS):
        for share in range(90, 14, -5):  # from the largest down: a larger cache samples faster
            flags = saving | ({"tensor_parallel": ranks} if ranks > 1 else {})
            flags |= {"vllm_memory": share / 100}
            found = estimate(replace(usual, **flags), shape, local, nodes, gpu)
            if found["peak"] <= 0.94 * gpu - 1 and found["responses"] >= wanted:
                return flags, found
    return None


def as_words(flags: dict[str, object]) -> str:
    """Flags as on a command line."""
    words = []
    for name, value in flags.items():
        shown = f"{value:.2f}" if isinstance(value, float) else value
        words.append(f"--{name}" if value is True else f"--{name} {shown}")
    return " ".join(words)


def answer(model: str, gpus: int, gpu: float, response: int) -> list[str]:
    """The command that fits."""
    shape, cards = shape_of(model), f"{gpus} GPU(s) of {gpu:g} GB"
    n = shape.parameters() / 1e9
    lines = [f"{model}: {n:.1f} billion parameters, of which weights, gradient and AdamW's moments"]
    lines[0] += f" are {16 * n:.0f} GB in all (float32; estimates, no GPU has seen them)"
    fits = fit(shape, gpus, gpu, response)
    if not fits:
        return [*lines, f"{cards}: does not fit"]
    flags, found = fits
    launcher = f"--nproc_per_node={min(gpus, 8)}"
    if gpus > 8:
        launcher = f"--nnodes={gpus // 8} {launcher}"
    usual = {"model": model, "task": "gsm8k", "lr": "1e-6", "minibatches": 1, "save_every": 10}
    usual |= {"prompts_per_step": math.ceil(64 / gpus) * gpus, "max_new_tokens": response}
    room = f"room for {found['responses']:.0f} responses of full length per GPU"
    lines += [f"{cards}: fits"]
    lines += [f"    torchrun {launcher} grpo.py {as_words(usual | flags)}"]
    lines += [f"    peak {found['peak']:.1f} GB per GPU, {room}"]
    lines += [f"    needs {found['host']:.0f} GB of host memory"]
    return lines


def cards() -> list[str]:
    """The table of docs/gpu.md: for one card of each size the largest Qwen3 that fits with its
    states on the GPU, and with --offload; and EXAMPLE."""
    rows = ["| card | model | flags | peak | responses in cache | host |", "|---" * 6 + "|"]
    for gpu in CARDS:
        fits = {model: fit(shape, 1, gpu, 2048) for model, shape in SHAPES.items()}
        offloaded = {model: "offload" in found[0] for model, found in fits.items() if found}
        largest = {away: model for model, away in offloaded.items()}  # the last of each kind
        for model in offloaded:
            if model in (*largest.values(), EXAMPLE):
                flags, found = fits[model]
                cells = [f"{gpu} GB", model.partition("/")[2], f"`{as_words(flags)}`"]
                cells += [f"{found['peak']:.1f}", f"{found['responses']:.0f}"]
                cells += [f"{found['host']:.0f}"]
                rows.append("| " + " | ".join(cells) + " |")
    return rows


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a folder or a hub name: print the command that fits")
    parser.add_argument("--gpus", type=int, default=1, help="number (more than 8: nodes of 8)")
    parser.add_argument("--gpu_memory", type=float, default=80.0, metavar="GB", help="of each GPU")
    parser.add_argument("--max_new_tokens", type=int, default=2048, metavar="T")
    parser.add_argument("--cards", action="store_true", help="print the largest Qwen3 for one card")
    given = parser.parse_args()
    if given.model is None and not given.cards:
        parser.error("give --model MODEL or --cards")
    if given.gpus < 1 or given.gpus > 8 and given.gpus % 8:
        parser.error(f"--gpus {given.gpus}: 1 to 8 GPUs or whole nodes of 8")
    try:
        if given.cards:
            say(*cards())
        else:
            say(*answer(given.model, given.gpus, given.gpu_memory, given.max_new_tokens))
    except BadInput as error:
        parser.error(str(error))
