"""Estimated memory per GPU in GB: which model fits a card, or the needs of the headers' commands.

    python -m tools.memory --model MODEL [--gpus N] [--gpu_memory GB] [--max_new_tokens T]
        [--task TASK] [FILE]
    python -m tools.memory --cards      the largest Qwen3 for one card of 16, 24, 48, 80, 141 GB
    python -m tools.memory [FILE ...]   of the commands in the headers, on cards of 80 GB

MODEL is a folder or a hub name; the program reads its config.json. The first command prints the
fastest command of FILE (default: grpo) that fits, its peak, and how many responses the cache holds.

The parts, with N parameters over R ranks (or --shard_ranks):
    states       float32 master copy, AdamW's two moments, float32 gradient: 16 N / R bytes
                 (goldilocks, recipe, ppo: and as much for the teacher or critic, the same model
                 without its head; jet: and the 8-bit numbers as float32, 4 N / R)
    reference    float32 shards, 4 N / R (0 without a KL term, or with --offload_reference); of opd
                 the teacher's, by its own N
    gathered     bfloat16 copies of what FSDP gathers at once, the root (embedding and head) and
                 two layers; and of the root and a layer the gradient before it is scattered, in
                 bfloat16 and in float32 (vcpo, recipe: and one response's gradient of the head,
                 float32)
    activations  what one micro-batch of --micro_tokens keeps for the backward pass, or with
                 --gradient_checkpointing a layer's input for each layer and one layer whole; and
                 three blocks of logits
    vLLM         weights (bfloat16; minirl: 8 bits) / --tensor_parallel; its KV cache is what
                 --vllm_memory, a share of the card, leaves beside them and some 5 GB for its
                 activations and CUDA graphs
With --offload, states and reference are in host memory; the GPU holds float32 shards of what is
being gathered. The peak is that of the largest phase. In an update these are all of the trainer's
parts and vLLM's share, or with --vllm_sleep the graphs, which stay (2 GB). In a sampling these are
the states without gradient, the reference and vLLM's share; in a push also the two largest tensors,
whole, in vLLM's precision. Allocator slack and NCCL's buffers come on top (some 3 to 6 GB). A
command that fits leaves 1 GB and 6% of the card for them.

host: GB on the node of rank 0, which alone loads the float32 weights (and, for a reference, copies
them). With --vllm_sleep it includes each rank's sleeping weights, every tensor in a pinned block of
the next power of two. It also includes offloaded parts, and minirl's columns of experts, the
sampler's and the trainer's.
"""

import importlib
import itertools
import math
import re
from dataclasses import dataclass

from common.cli import BadInput, Count, Positive, blame, broken_rule, say
from common.logprobs import BLOCK_ELEMENTS
from tools import arguments
from checks.files import ROOT, algorithms

# Name of each algorithm file -> its module
FILES = {p.stem: ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in algorithms()}
GPU, PROMPT = 80.0, 512  # GB; tokens of a prompt
EXAMPLE = "Qwen/Qwen3-1.7B-Base"  # the model of most commands
VLLM_WORK = 5e9  # bytes of vLLM's activations and CUDA graphs
GRAPHS = 2e9  # of these the graphs
ENOUGH = 16  # responses that vLLM samples at once: with fewer it waits for memory, not for the GPU
# Flags that save memory, from those that cost no time to those that cost most
SAVINGS = ["", "--vllm_sleep", "--vllm_sleep --micro_tokens 8192"]
SAVINGS += [f"--gradient_checkpointing {more}".strip() for more in SAVINGS]
for flag in ("--offload_reference", "--offload"):
    for size in ("", "--micro_tokens 8192", "--micro_tokens 4096"):
        words = ["--gradient_checkpointing --vllm_sleep", size, flag]
        SAVINGS.append(" ".join(word for word in words if word))


@dataclass
class Asked:
    """Numbers of the command line that are checked."""

    gpus: Count
    gpu_memory: Positive
    max_new_tokens: Count


@dataclass
class Shape:
    """The numbers of a model that decide its memory."""

    hidden: Count
    layers: Count
    heads: Count
    kv_heads: Count
    intermediate: Count  # of one expert, where there are several
    tied: bool
    vocabulary: Count = 151_936
    head_dim: Count = 128
    experts: Count = 1
    active: Count = 1

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
    "Qwen/Qwen3-30B-A3B-Base": Shape(2048, 48, 32, 4, 768, False, experts=128, active=8),
    "Qwen/Qwen2.5-1.5B": Shape(1536, 28, 12, 2, 8960, True),
    "Qwen/Qwen2.5-Math-1.5B": Shape(1536, 28, 12, 2, 8960, True),
    "Qwen/Qwen2.5-7B": Shape(3584, 28, 28, 4, 18944, False, vocabulary=152_064),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Shape(1536, 28, 12, 2, 8960, False),
}
# Qwen3's chat models have the shapes of the base models.
SHAPES |= {name.removesuffix("-Base"): shape for name, shape in SHAPES.items()}


def shape_of(model: str) -> Shape:
    """Reads the config.json of a folder or of a hub model. BadInput if a number is missing."""
    from transformers import AutoConfig

    if model in SHAPES:
        return SHAPES[model]
    with blame(f"--model {model}: its config.json cannot be read"):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    names = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
    names |= {"kv_heads": "num_key_value_heads", "intermediate": "intermediate_size"}
    names |= {"tied": "tie_word_embeddings", "vocabulary": "vocab_size"}
    if experts := getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0):
        names |= {"active": "num_experts_per_tok"}
        if hasattr(config, "moe_intermediate_size"):
            names |= {"intermediate": "moe_intermediate_size"}
    if missing := [key for key in names.values() if getattr(config, key, None) is None]:
        raise BadInput(f"--model {model}: its config.json has no {missing[0]}")
    known = {part: getattr(config, key) for part, key in names.items()}
    head_dim = getattr(config, "head_dim", None) or known["hidden"] // max(1, known["heads"])
    shape = Shape(**known, head_dim=head_dim, experts=experts or 1)
    if wrong := broken_rule(shape):
        raise BadInput(f"--model {model}: its config.json: {wrong.removeprefix('--')}")
    return shape


def commands(name: str) -> list[list[str]]:
    """The words of each torchrun command in the file's header that names a model."""
    header = importlib.import_module(FILES[name]).__doc__.replace("\\\n", " ")
    lines = [line.strip() for line in header.splitlines()]
    lines = [line for line in lines if line.startswith("torchrun") and "Qwen" in line]
    return [re.sub(r"\s#\s.*", "", line).split() for line in lines if " ..." not in line]


def estimate(
    name: str, words: list[str], gpu: float = GPU, shape: Shape | None = None
) -> dict[str, float]:
    """GB per GPU of `gpu` GB, by part, and on the host, for a command of file `name`."""
    flags = dict(zip(words, [*words[1:], ""]))
    for word in words:
        if "=" in word:
            flag, value = word.split("=")
            flags[flag] = value
    args = importlib.import_module(FILES[name]).Args()

    def number(field: str) -> float:
        return float(flags.get(f"--{field}", getattr(args, field, 0)))

    local = int(flags["--nproc_per_node"])
    nodes = int(flags.get("--nnodes", 1))
    ranks = local * nodes
    sharing = int(number("shard_ranks")) or ranks
    away = "--offload" in flags
    offloads_reference = away or "--offload_reference" in flags
    sleeps = "--vllm_sleep" in flags
    refers = number("beta") > 0
    shape = shape or SHAPES[flags["--model"]]
    n, root, layer = shape.parameters(), shape.root(), shape.layer()

    # The trainer. A teacher or a critic is trained, too: the same model without its head
    trained = n
    learns = hasattr(args, "teacher_lr") or hasattr(args, "critic_lr")
    if getattr(args, "curriculum", learns):
        trained += n if shape.tied else n - shape.head()
    states = 16 * trained / sharing
    if name == "jet":
        states += 4 * n / sharing
    response = number("max_new_tokens") + PROMPT
    tokens = max(number("micro_tokens"), response)  # the longest response is never split
    kept = shape.kept() * tokens  # of one layer
    if "--gradient_checkpointing" in flags:
        held = 2 * shape.hidden * tokens * shape.layers + kept
    else:
        held = kept * shape.layers
    frozen = SHAPES[flags["--teacher"]].parameters() if "--teacher" in flags else n
    reference = 4 * frozen if refers else 0  # on all ranks together
    gathered = 2 * (root + 2 * layer) + 6 * (root + layer)
    if hasattr(args, "optimal_baseline"):
        gathered += 4 * shape.head()
    width = 1 if args.rollout_dtype == "float8" else 2
    parts = {
        "states": 4 * (root + 2 * layer) / sharing if away else states,
        "reference": 0 if offloads_reference else reference / sharing,
        "gathered": gathered,
        "activations": held + 3 * 4 * BLOCK_ELEMENTS,
    }
    trainer = sum(parts.values())

    # vLLM, and the three phases of a step
    vllm = width * n / number("tensor_parallel")
    share = number("vllm_memory") * gpu * 1e9
    parts["vLLM weights"] = vllm
    parts["KV cache"] = max(0.0, share - vllm - VLLM_WORK)
    gradient = 0 if away else 4 * trained / sharing  # there is none while the engine works
    resident = parts["states"] + parts["reference"] - gradient
    pushed = 2 * 2 * max(shape.head(), *shape.matrices())
    updating = trainer + (GRAPHS if sleeps else share)
    sampling = resident + share
    pushing = resident + pushed + (vllm + GRAPHS if sleeps else share)
    parts["peak"] = max(updating, sampling, pushing)

    # The host: at the start rank 0's float32 weights, later whatever was moved there
    asleep = 0
    if sleeps:
        tensors = shape.matrices() * shape.layers + [shape.head()] * (1 if shape.tied else 2)
        for size in tensors:
            if size:
                bytes_of = width * size / number("tensor_parallel")
                asleep += local * 2 ** math.ceil(math.log2(bytes_of))
    later = reference / nodes if offloads_reference else 0
    if name == "minirl" and shape.experts > 1:
        rows = number("prompts_per_step") * number("group_size") / nodes
        later += rows * 2 * shape.layers * shape.active * response
    if away:
        later += states * local
    parts["host"] = asleep + max(4 * n + reference, later)

    cached = parts["KV cache"] * number("tensor_parallel") / shape.cache()  # tokens
    found = {part: size / 1e9 for part, size in parts.items()}
    return found | {"parameters": n / 1e9, "ranks": ranks, "responses in cache": cached / response}


def fit(
    name: str, model: str, shape: Shape, gpus: int, gpu: float, response: int, task: str = "gsm8k"
) -> tuple[list[str], dict[str, float]] | None:
    """The fastest command of file `name` that fits on `gpus` cards of `gpu` GB, and its estimate;
    None if none fits. vLLM's cache must hold ENOUGH responses, or two if no command allows
    that."""
    nodes, local = (gpus // 8, 8) if gpus > 8 else (1, gpus)
    prompts = math.ceil(64 / gpus) * gpus  # a multiple of the ranks
    words = [f"--nnodes={nodes}"] if nodes > 1 else []
    words += [f"--nproc_per_node={local}", f"{name}.py", "--model", model, "--task", task]
    words += "--lr 1e-6 --minibatches 1 --save_every 10".split()
    words += f"--prompts_per_step {prompts} --max_new_tokens {response}".split()
    engines = [ranks for ranks in (1, 2, 4, 8) if local % ranks == 0]
    for wanted, ranks, saving in itertools.product((ENOUGH, 2), engines, SAVINGS):
        more = saving.split()
        if ranks > 1:
            more += ["--tensor_parallel", f"{ranks}"]
        for share in range(90, 14, -5):  # from the largest down: a larger cache samples faster
            last = [*words, *more, "--vllm_memory", f"{share / 100:.2f}"]
            found = estimate(name, last, gpu, shape)
            if found["peak"] <= 0.94 * gpu - 1 and found["responses in cache"] >= wanted:
                return last, found
    return None


def answer(name: str, model: str, gpus: int, gpu: float, response: int, task: str = "gsm8k") -> str:
    """The command that fits, or the number of cards that it needs."""
    shape, cards = shape_of(model), f"{gpus} GPU(s) of {gpu:g} GB"
    n = shape.parameters() / 1e9
    lines = [f"{model}: {n:.1f} billion parameters, of which weights, gradient and AdamW's moments"]
    lines[0] += f" are {16 * n:.0f} GB in all (float32; estimates, no GPU has seen them)"
    if fits := fit(name, model, shape, gpus, gpu, response, task):
        words, found = fits
        lines += [f"{cards}: fits (FILE and --task name another command)"]
        lines += [f"    torchrun {' '.join(words)}"]
        room = f"room for {found['responses in cache']:.0f} responses of full length per GPU"
        lines += [f"    peak {found['peak']:.1f} GB per GPU, {room}"]
        lines += [f"    needs {found['host']:.0f} GB of host memory"]
        return "\n".join(lines)
    more = 2 * gpus
    while more <= 128:
        whole_nodes = more <= 8 or more % 8 == 0
        if whole_nodes and fit(name, model, shape, more, gpu, response):
            lines.append(f"{cards}: does not fit; {more} would do")
            return "\n".join(lines)
        more *= 2
    lines.append(f"{cards}: does not fit, nor do more of them")
    return "\n".join(lines)


def cards() -> list[str]:
    """For one card of each size the largest Qwen3 that fits with its states on the GPU, and with
    --offload; and EXAMPLE: rows of docs/gpu.md."""
    rows = ["| card | model | flags | peak | responses in cache | host |", "|---" * 6 + "|"]
    ladder = [model for model in SHAPES if re.fullmatch(r"Qwen/Qwen3-[\d.]+B-Base", model)]
    for gpu in (16, 24, 48, 80, 141):
        fits = {model: fit("grpo", model, SHAPES[model], 1, gpu, 2048) for model in ladder}
        offloaded = {model: "--offload" in found[0] for model, found in fits.items() if found}
        largest = {away: model for model, away in offloaded.items()}  # the last of each kind
        for model in offloaded:
            if model not in (*largest.values(), EXAMPLE):
                continue
            words, found = fits[model]
            flags = " ".join(words[words.index("2048") + 1 :])
            cells = [f"{gpu} GB", model.partition("/")[2], f"`{flags}`", f"{found['peak']:.1f}"]
            cells += [f"{found['responses in cache']:.0f}", f"{found['host']:.0f}"]
            rows.append("| " + " | ".join(cells) + " |")
    return rows


def main(names: list[str]) -> None:
    """Print a row for each command of the files named."""
    shown = "parameters ranks states reference gathered activations".split()
    shown += ["vLLM weights", "KV cache", "peak", "responses in cache", "host"]
    say("| " + " | ".join(["file", "model", *shown]) + " |")
    say("|---" * (len(shown) + 2) + "|")
    for name in names:
        for words in commands(name):
            found = estimate(name, words)
            model = words[words.index("--model") + 1].partition("/")[2]
            whole = ("ranks", "responses in cache", "host")
            cells = [f"{found[part]:.{0 if part in whole else 1}f}" for part in shown]
            say("| " + " | ".join([name, model, *cells]) + " |")


if __name__ == "__main__":
    parser = arguments(__doc__)
    known = ", ".join(FILES)
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"some of {known} (default: all)")
    parser.add_argument("--model", help="a folder or a hub name: print the command that fits")
    parser.add_argument("--gpus", type=int, default=1, help="number (more than 8: nodes of 8)")
    parser.add_argument("--gpu_memory", type=float, default=GPU, metavar="GB", help="of each GPU")
    parser.add_argument("--max_new_tokens", type=int, default=2048, metavar="T")
    parser.add_argument("--task", default="gsm8k", help="task of the printed command")
    parser.add_argument("--cards", action="store_true", help="print the largest Qwen3 for one card")
    args = parser.parse_args()
    if unknown := [name for name in args.files if name not in FILES]:
        parser.error(f"{unknown[0]}: unknown, use some of {known}")
    if wrong := broken_rule(Asked(args.gpus, args.gpu_memory, args.max_new_tokens)):
        parser.error(wrong)
    if args.gpus > 8 and args.gpus % 8:
        parser.error(f"--gpus {args.gpus}: 1 to 8 GPUs or whole nodes of 8")
    if args.model is not None and len(args.files) > 1:
        parser.error(f"{args.files[1]}: with --model one FILE at most")
    given = (args.model, args.gpus, args.gpu_memory, args.max_new_tokens, args.task)
    try:
        if args.model is not None:
            say(answer((args.files or ["grpo"])[0], *given))
        elif args.cards:
            say("\n".join(cards()))
        else:
            main(args.files or list(FILES))
    except BadInput as error:
        parser.error(str(error))
