"""Estimate the memory of a run, in GB per GPU.

    python -m tools.memory [FILE.py] --model MODEL [FLAGS] [--gpus N] [--gpu_memory GB]

FILE.py is an algorithm file (grpo.py), FLAGS are its flags, and MODEL is a folder or a hub name,
whose config.json is read. The program prints the peak and its parts, how many responses the cache
holds, and the peaks with one more flag that saves memory.

The parts, with N parameters over R ranks:
    states       float32 master copy, AdamW's two moments, float32 gradient: 16 N / R bytes; as
                 much again for a second model that is trained (a teacher, a critic)
    reference    float32 shards of a frozen model, 4 N / R (0 with --offload_reference)
    gathered     bfloat16 copies of what FSDP gathers at once, the root (embedding and head) and
                 two layers; and a layer's float32 gradient before it is scattered
    activations  the most that is alive in the forward and backward passes of one micro-batch,
                 counted by running the model on torch's meta device, where tensors have no memory
    vLLM         weights (bfloat16 or float8) / --tensor_parallel; the KV cache is what
                 --vllm_memory, a share of the card, leaves beside the weights and some 5 GB for
                 activations and CUDA graphs
With --offload, states and reference are in host memory; the GPU holds float32 shards of what is
being gathered. The peak is that of the larger phase. An update needs all of the trainer's parts and
vLLM's share, or with --vllm_sleep only its graphs, which stay (2 GB). Sampling needs the states
without gradient, the reference and vLLM's share. Allocator slack and NCCL's buffers come on top
(some 3 to 6 GB). A command that fits leaves 1 GB and 6% of the card for them.

host: GB on the node of rank 0, because only this rank loads the float32 weights and copies them for
the reference. With --vllm_sleep it includes each rank's sleeping weights, every tensor in a pinned
block of the next power of two. It also includes offloaded parts, and recorded experts.
"""

import importlib
import math
import sys
import warnings
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from checks.files import MODULES
from common import model as loading
from common.cli import BadInput, Flags, blame, say
from common.launch import parse
from common.logprobs import entropies
from common.scale.head import TokenLogprobs
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig

from tools import arguments
from tools.shapes import SHAPES, config_of

PROMPT = 512  # tokens of a prompt
VLLM_WORK = 5e9  # bytes of vLLM's activations and CUDA graphs
GRAPHS = 2e9  # bytes of the graphs alone
COPIES = 3.5  # copies of a rollout's recorded experts: two columns, and parts of them
PARTS = ("states", "reference", "gathered", "activations", "vLLM")
SAVINGS = {"vllm_sleep": True, "micro_tokens": 8192, "offload_reference": True}  # cheapest first
SAVINGS |= {"gradient_checkpointing": True, "offload": True}


def flash(module, query, key, value, mask, scaling=None, **_) -> tuple:
    """Compute attention by the kernel that a GPU takes, which keeps no scores. On the meta device
    torch would choose another kernel."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    return kernel(query, key, value, 0.0, True, scale=scaling)[0].transpose(1, 2), None


AttentionInterface.register("counted", flash)


def configuration(model: str) -> PreTrainedConfig:
    if model in SHAPES:
        return config_of(model)
    with blame(f"--model {model}: its config.json cannot be read"):
        return loading.config_of(loading.source_of(model)).get_text_config()


def counted(model: str, layers: int, tokens: int, checkpointing: bool) -> Counter:
    """Count a model with `layers` layers: its parameters, the bytes of its tensors in pinned
    blocks, and the peak of activations in one forward and backward pass over `tokens` tokens."""
    config = configuration(model)
    config.num_hidden_layers, config._attn_implementation = layers, "counted"
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        ids = torch.zeros(1, tokens, dtype=torch.long)
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    found = Counter()
    for parameter in lm.parameters():
        found["parameters"] += parameter.numel()
        found["pinned"] += 2 ** math.ceil(math.log2(2 * parameter.numel()))
    for parameter in lm.base_model.layers.parameters():  # FSDP scatters their gradients at once
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    tracker = MemTracker()
    tracker.track_external(lm)
    with warnings.catch_warnings(action="ignore"), tracker:
        hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        logp, _ = TokenLogprobs.apply(hidden, lm.lm_head.weight, ids[0], 1.0, entropies)
        logp.sum().backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()  # there is one device
    found["activations"] = peak["Total"] - 2 * found["parameters"]
    return found


@lru_cache
def counts(model: str, tokens: int, checkpointing: bool) -> dict[str, float]:
    """Compute `counted` for the whole model from 2 and 4 layers: it is linear in their number."""
    two, four = (counted(model, layers, tokens, checkpointing) for layers in (2, 4))
    layers = configuration(model).num_hidden_layers
    found = {name: four[name] + (layers - 4) / 2 * (four[name] - two[name]) for name in four}
    return found | {"layer": (four["parameters"] - two["parameters"]) / 2}


def engine_bytes(
    config: PreTrainedConfig, parameters: float, ranks: int, float8: bool
) -> tuple[float, int]:
    """Return the bytes of vLLM's weights on each of the ranks that share it, and of its cache for
    one token. Embedding and head stay bfloat16."""
    outside = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    weights = 2 * outside + (1 if float8 else 2) * (parameters - outside)
    dim = getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
    heads = max(1, config.num_key_value_heads // ranks)
    return weights / ranks, 2 * 2 * config.num_hidden_layers * heads * dim


def estimate(args: Flags, gpus: int, gpu: float) -> dict[str, float | str]:
    """Estimate a run with these flags: PARTS and peak in GB per GPU of `gpu` GB, host in GB of a
    node, the phase of the peak, and how many responses vLLM's cache holds."""
    nodes = math.ceil(gpus / 8)
    response = args.max_new_tokens + PROMPT
    tokens = max(args.micro_tokens, response)  # the longest response is never split
    config = configuration(args.model)
    found = counts(args.model, tokens, args.gradient_checkpointing)
    n, layer = found["parameters"], found["layer"]
    root = n - config.num_hidden_layers * layer
    sharing = args.shard_ranks or gpus

    # The trainer
    trained = 1 + hasattr(args, "teacher_lr") + hasattr(args, "critic_lr")
    frozen = getattr(args, "beta", 0) > 0
    frozen += hasattr(args, "teacher") and not hasattr(args, "teacher_lr")
    gradients = trained * 4 * n / sharing
    parts = {"states": 4 * gradients, "reference": frozen * 4 * n / sharing}
    if args.offload:
        parts["states"] = 4 * (root + 2 * layer) / sharing
    if args.offload or args.offload_reference:
        parts["reference"] = 0
    parts["gathered"] = 2 * (root + 2 * layer) + 4 * layer
    parts["activations"] = found["activations"]

    # vLLM
    ranks = args.tensor_parallel
    weights, token = engine_bytes(config, n, ranks, args.rollout_dtype == "float8")
    share = args.vllm_memory * gpu * 1e9
    phases = {"updating": sum(parts.values()) + (GRAPHS if args.vllm_sleep else share)}
    states = 0 if args.offload else parts["states"] - gradients
    phases["sampling"] = states + parts["reference"] + share
    phase = max(phases, key=phases.get)

    # The host has rank 0's float32 weights at the start, and later whatever was moved there.
    pinned = gpus / nodes * found["pinned"] * weights / (2 * n) if args.vllm_sleep else 0
    moved = 4 * n / nodes * frozen if args.offload or args.offload_reference else 0
    moved += 16 * n / nodes if args.offload else 0
    if getattr(args, "routing_replay", "none") != "none":
        rows = args.prompts_per_step * args.group_size / nodes
        experts = config.num_hidden_layers * config.num_experts_per_tok
        moved += COPIES * rows * response * experts
    parts |= {"vLLM": share, "peak": phases[phase]}
    parts["host"] = pinned + max(4 * n * (2 if frozen else 1), moved)
    responses = max(0.0, share - weights - VLLM_WORK) / token / response
    found = {name: size / 1e9 for name, size in parts.items()}
    return found | {"phase": phase, "responses": responses}


def answer(file: str, words: list[str], gpus: int, gpu: float) -> list[str]:
    """Say what a command needs, and which peaks one more flag would give."""
    if Path(file).stem not in MODULES:
        raise BadInput(f"{file}: not an algorithm file")
    sys.argv = [file, *words]
    args = parse(importlib.import_module(MODULES[Path(file).stem]).Args)
    found = estimate(args, gpus, gpu)
    room = 0.94 * gpu - 1
    verdict = "fits" if found["peak"] <= room else "does not fit"
    lines = [f"peak {found['peak']:.1f} GB per GPU, while {found['phase']}: {verdict} {gpu:g} GB"]
    lines += ["    " + ", ".join(f"{name} {found[name]:.1f}" for name in PARTS)]
    lines += [f"room for {found['responses']:.0f} responses of full length per GPU"]
    lines += [f"needs {found['host']:.0f} GB of host memory"]
    for name, value in SAVINGS.items():
        better = estimate(replace(args, **{name: value}), gpus, gpu)
        if better["peak"] < found["peak"]:
            shown = f"--{name}" if value is True else f"--{name} {value}"
            lines.append(f"    peak {better['peak']:.1f} with {shown}")
    larger = replace(args, micro_tokens=16384)
    if args.micro_tokens < 16384 and estimate(larger, gpus, gpu)["peak"] <= room:
        lines.append("    --micro_tokens 16384 fits, too: 9% faster updates on an H100 than 8192")
    return lines


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.allow_abbrev = False
    parser.add_argument("--gpus", type=int, default=1, help="number (more than 8: nodes of 8)")
    parser.add_argument("--gpu_memory", type=float, default=80.0, metavar="GB", help="of each GPU")
    words = sys.argv[1:]
    file = words.pop(0) if words and not words[0].startswith("-") else "grpo.py"
    given, flags = parser.parse_known_args(words)
    if given.gpus < 1 or given.gpus > 8 and given.gpus % 8:
        parser.error(f"--gpus {given.gpus}: 1 to 8 GPUs or whole nodes of 8")
    try:
        say(*answer(file, flags, given.gpus, given.gpu_memory))
    except BadInput as error:
        parser.error(str(error))
