"""One rank of a torchrun command, on GPUs that are not there; needs g++ and the CPU build of torch.

    python -m tests.engines.fake_gpu torchrun --nproc_per_node=8 grpo.py --model Qwen/Qwen3-1.7B-Base ...
    --layers 2 (before `torchrun`): the model cut to two layers: all but memory is seen in 20 seconds

Every tensor is a FakeTensor (a shape, a type and the device cuda:0, but no memory) and the process
group is torch's `fake` one. FSDP2, autograd, AdamW, the models of transformers, math-verify and all
code of ours run unchanged. `main` runs three times: one step with a checkpoint; resumed, with two
responses of full length; and the first step again as the last rank. The program prints a line of
JSON: peak memory in GB by phase, collectives of the two ranks, what vLLM would hold.

A fake shows no numbers, no speed, no hang, and no type that a kernel refuses.
"""

import argparse
import collections
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import types
import weakref
from functools import partial
from pathlib import Path

import common  # noqa: F401  (before torch)

GB = 1e9
# torch's build for CPUs aborts where autograd meets a tensor on CUDA. A device guard and hooks that
# do nothing make it believe in a device. torch asks for the hooks when it is imported.
PRETEND = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
};
struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
};
static impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new Guard);
namespace at { C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks) }
"""


def load_pretend() -> None:
    """Compile the library for this torch, once, and load it."""
    home = Path(importlib.util.find_spec("torch").origin).parent  # without importing it
    name = f"pretend_cuda_{importlib.metadata.version('torch')}_{os.getuid()}.so"
    library = Path(tempfile.gettempdir(), name)
    if not library.exists():
        source = library.with_suffix(f".{os.getpid()}.cpp")
        source.write_text(PRETEND)
        made = source.with_suffix(".so")
        command = f"g++ -std=c++20 -shared -fPIC -O0 -I{home}/include {source} -o {made}"
        command += f" -L{home}/lib -Wl,-rpath,{home}/lib -ltorch_cpu -lc10"
        subprocess.run(command.split(), check=True)
        made.rename(library)
        source.unlink()
    ctypes.CDLL(str(library))


load_pretend()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common.clock import RUNNING  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.distributed.checkpoint import DefaultSavePlanner  # noqa: E402
from torch.testing._internal.distributed import fake_pg  # noqa: E402, F401  (registers it)
from torch.distributed._tools import fake_collectives  # noqa: E402, F401
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten  # noqa: E402

from tools.maintain.shapes import byte_tokenizer  # noqa: E402

# 1. Memory


class Ledger:
    """Bytes of the live storages on each device, and their largest sum in each phase of a run."""

    def __init__(self):
        self.sizes, self.live = {}, collections.Counter()  # by storage; by device
        self.peaks = collections.defaultdict(collections.Counter)  # by device and phase
        self.stage, self.off = "load", False

    def see(self, tensor: FakeTensor) -> None:
        storage = tensor.untyped_storage()
        if not self.off and storage._cdata not in self.sizes:
            weakref.finalize(storage, self.free, storage._cdata)
            self.sizes[storage._cdata] = (tensor.fake_device.type, 0)
            self.resize(storage)

    def resize(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.sizes:
            return
        device, before = self.sizes[storage._cdata]
        self.sizes[storage._cdata] = (device, storage.nbytes())
        self.live[device] += storage.nbytes() - before
        if RUNNING[:1] == ["rollout"]:
            self.stage = "update"  # from now on this is what is not timed
        phase = RUNNING[0] if RUNNING else self.stage
        self.peaks[device][phase] = max(self.peaks[device][phase], self.live[device])

    def free(self, key: int) -> None:
        device, size = self.sizes.pop(key)
        self.live[device] -= size


LEDGER = Ledger()
COLLECTIVES = collections.Counter()

# 2. Values of small tensors

MOST = 8_000_000  # elements of a tensor that has a value
UNKNOWN = 1_000_000  # of one without, which counts as zeros where it meets a value
aten = torch.ops.aten
READS = (aten.item.default, aten.is_nonzero.default, aten._local_scalar_dense.default)
EMPTY = (aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default)
DYNAMIC = (
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.DataDependentOutputException,
    fake_tensor.UnsupportedOperatorException,
)


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """The real values, on the CPU; zeros if they depend on weights."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    if not hasattr(tensor, "value"):
        if tensor.numel() > 8 * MOST:
            raise RuntimeError(f"the program reads values of {tuple(tensor.shape)}")
        with torch._C._DisableTorchDispatch():
            tensor.value = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.value


def on_values(func: object, flat: list, spec: object) -> object:
    """The operation on the values, on the CPU."""
    given = []
    for one in flat:
        one = value_of(one) if isinstance(one, torch.Tensor) else one
        given.append(torch.device("cpu") if isinstance(one, torch.device) else one)
    args, kwargs = tree_unflatten(given, spec)
    with torch._C._DisableTorchDispatch():
        found = func(*args, **kwargs)
        return found.zero_() if func in EMPTY else found


class Values(TorchDispatchMode):
    """Above FakeTensorMode: small tensors have values, storages and collectives are counted.

    Lengths, masks, indices and metrics are then true. What depends on weights is 0.
    """

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        if any(kind not in (torch.Tensor, FakeTensor, torch.nn.Parameter) for kind in kinds):
            return NotImplemented  # a DTensor comes first
        if func.namespace in ("c10d", "_c10d_functional"):
            COLLECTIVES[func.name()] += 1
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # its fake kernel would make a second tensor
        flat, spec = tree_flatten((args, kwargs or {}))
        tensors = [one for one in flat if isinstance(one, torch.Tensor)]
        if func in READS:
            return number_of(tensors[0])
        try:
            out = func(*args, **(kwargs or {}))
        except DYNAMIC:  # the shape depends on values
            fakes = [one for one in tensors if isinstance(one, FakeTensor)]
            device = fakes[0].fake_device if fakes else "cpu"
            return tree_map(partial(self.faked, device), on_values(func, flat, spec))
        made = [one for one in tree_flatten(out)[0] if isinstance(one, FakeTensor)]
        for one in made:
            LEDGER.see(one)
            one.constant = None  # torch's own values of single numbers: it copies them to a GPU
        known = [not isinstance(one, FakeTensor) or hasattr(one, "value") for one in tensors]
        small = all(one.numel() <= (MOST if k else UNKNOWN) for one, k in zip(tensors, known))
        small = small and sum(one.numel() for one in made) <= MOST
        if small and func.namespace == "aten" and (any(known) or not tensors):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # no kernel for CPUs
                found = tree_flatten(on_values(func, flat, spec))[0]
                for one, value in zip(made, [x for x in found if isinstance(x, torch.Tensor)]):
                    if one.shape == value.shape and one.dtype == value.dtype:
                        one.value = value
        return out

    def faked(self, device: object, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        with MODE:
            out = torch.empty(value.shape, dtype=value.dtype, device=device)
        out.value = value
        LEDGER.see(out)
        return out


def number_of(tensor: torch.Tensor) -> float:
    with torch._C._DisableTorchDispatch():
        return value_of(tensor).item()


MODE = FakeTensorMode(allow_non_fake_inputs=True)

# 3. vLLM


class LLM:
    """vLLM as the trainer knows it: memory by its own accounting, pushes, responses of two lengths.
    """

    long = False  # whether two responses of the next rollout have full length

    def __init__(self, **options: object):
        from transformers import AutoConfig, AutoModelForCausalLM

        self.options, config = options, AutoConfig.from_pretrained(options["model"])
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config)
        tp, layers = options["tensor_parallel_size"], config.num_hidden_layers
        if config.num_attention_heads % tp:
            raise ValueError(f"{config.num_attention_heads} heads are not divisible by {tp}")
        dim = getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
        token = 2 * 2 * layers * max(1, config.num_key_value_heads // tp) * dim  # bytes
        outside = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        self.elements = lm.num_parameters()
        layered = (1 if "quantization" in options else 2) * (self.elements - outside)
        self.sizes = {"weights": (layered + 2 * outside) / tp, "work": 5 * GB}  # graphs: 2 of 5
        share = options["gpu_memory_utilization"] * CARD[0] * GB
        self.sizes["kv_cache"] = share - sum(self.sizes.values())
        rows = self.sizes["kv_cache"] / token / options["max_model_len"]
        if rows < 1:
            raise ValueError(f"the KV cache holds {rows:.1f} responses of max_model_len")
        self.held = {"responses": rows}
        self.wake_up(self.sizes)
        self.weight = torch.nn.Linear(1, 1, device="cuda")  # as far as `forget` knows weights
        self.layers, self.experts = layers, getattr(config, "num_experts_per_tok", 0)
        self.tokenizer = byte_tokenizer(258)
        self.llm_engine = types.SimpleNamespace(engine_core=self)

    def shutdown(self) -> None:
        self.held.clear()

    def sleep(self, level: int) -> None:
        assert self.options["enable_sleep_mode"] and level == 1
        self.held = {"graphs": torch.empty(int(2 * GB), dtype=torch.uint8, device="cuda")}

    def wake_up(self, tags: list[str]) -> None:
        self.held.pop("graphs", None)
        for part in {*tags, "work"} - self.held.keys():
            size = int(self.sizes[part])
            self.held[part] = torch.empty(size, dtype=torch.uint8, device="cuda")

    def apply_model(self, job: object) -> list:
        return [job(self.weight)]

    def collective_rpc(self, name: str, kwargs: dict) -> None:
        assert name == "reload_weights" and "weights" in self.held
        sizes = {}
        for key, one in kwargs["weights_iterator"]:
            assert one.dtype == self.options["dtype"] and one.is_cuda, key
            sizes[key] = one.numel()
        assert sum(sizes.values()) == self.elements, "not every weight is pushed"
        for parameter in self.weight.parameters():
            parameter.data.fill_(0)

    def reset_prefix_cache(self) -> bool:
        return True

    def generate(self, requests: list, sampling: list, use_tqdm: bool) -> list:
        assert {"weights", "kv_cache"} <= self.held.keys()
        lengths, answers = [], []
        if self.long and sampling[0].n > 4:
            lengths = [sampling[0].max_tokens, sampling[0].max_tokens // 2]
        for number, (request, how) in enumerate(zip(requests, sampling)):
            outputs = []
            prompt = request["prompt_token_ids"]
            assert len(prompt) + how.max_tokens <= self.options["max_model_len"]
            for place in range(how.n):
                right = (number + place) % 3 == 0
                text = "So. It. Is. Then. " + (r"\boxed{7}." if right else r"\boxed{8}.")
                ids = [*self.tokenizer(text)["input_ids"], 1]
                length = lengths.pop() if lengths else min(how.max_tokens, len(ids) - place % 2)
                ids = (ids[:-1] * length)[: length - len(ids)] + ids
                output = types.SimpleNamespace(token_ids=ids[:length])
                output.logprobs = types.SimpleNamespace(logprobs=[0.0] * length)
                if self.options.get("enable_return_routed_experts"):
                    with torch._C._DisableTorchDispatch():
                        chosen = torch.arange(self.experts, dtype=torch.uint8)
                        shape = (len(prompt) + length - 1, self.layers, self.experts)
                        output.routed_experts = chosen.expand(shape).contiguous()
                outputs.append(output)
            answers.append(types.SimpleNamespace(outputs=outputs))
        return answers


# 4. Everything that is patched, for torch 2.13.0 and transformers 5.16 to 5.19

CARD, LAYERS, SAVED, SENT = [80.0], [0], {}, []
SMALL25 = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12}
QWEN25 = {"model_type": "qwen2", "vocab_size": 151_936, "num_hidden_layers": 28, **SMALL25}
QWEN25 |= {"num_key_value_heads": 2, "max_position_embeddings": 131_072}
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "num_hidden_layers": 28, "head_dim": 128}
QWEN3 |= {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16}
QWEN3 |= {"num_key_value_heads": 8, "max_position_embeddings": 32_768}
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36}
QWEN3_MOE = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_key_value_heads": 4}
QWEN3_MOE |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
QWEN25_7B = {"vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944}
QWEN25_7B |= {"num_attention_heads": 28, "num_key_value_heads": 4}
TIED, OWN = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
MODELS = {  # from their config.json
    "Qwen/Qwen3-1.7B-Base": QWEN3 | TIED,
    "Qwen/Qwen3-8B-Base": QWEN3 | QWEN3_8B | {"num_attention_heads": 32} | OWN,
    "Qwen/Qwen3-30B-A3B-Base": QWEN3 | QWEN3_MOE | {"num_attention_heads": 32} | OWN,
    "Qwen/Qwen2.5-1.5B": QWEN25 | TIED,
    "Qwen/Qwen2.5-Math-1.5B": QWEN25 | TIED | {"max_position_embeddings": 4096},
    "Qwen/Qwen2.5-7B": QWEN25 | QWEN25_7B | OWN,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": QWEN25 | OWN,
}
ANSWERS = {"": "7", "number": "007", "boxed": r"so \boxed{7}", "after_hashes": "#### 7"}


class Stream:
    """A stream or an event: any method, and a context."""

    device = torch.device("cuda", 0)

    def __init__(self, *_: object, **__: object):
        pass

    def __getattr__(self, name: str) -> object:
        return lambda *_, **__: Stream()

    def __enter__(self) -> object:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def pretend_tensors() -> None:
    """FakeTensors that can be read, copied, resized and counted."""
    FakeTensorMode.avoid_device_init = True  # torch.tensor(..., device="cuda") would ask CUDA
    fake_tensor.init_gpu_context = lambda *_: None  # so would the mode
    FakeTensor.tolist = lambda self: value_of(self).tolist()
    FakeTensor.numpy = lambda self, **_: value_of(self).numpy()
    FakeTensor.pin_memory = lambda self, *_: self  # --offload; asks for CUDA's allocator

    def copied(self: FakeTensor, memo: dict) -> FakeTensor:  # torch's copies the storage's bytes
        if id(self) not in memo:
            made = self.detach().clone()
            parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(made, self.requires_grad) if parameter else made
        return memo[id(self)]

    FakeTensor.__deepcopy__ = copied
    resize = torch.UntypedStorage.resize_

    def resize_and_count(self: torch.UntypedStorage, size: int) -> object:
        result = resize(self, size)  # FSDP frees gathered weights in this way
        LEDGER.resize(self)
        return result

    torch.UntypedStorage.resize_ = resize_and_count
    # DTensor asks for the shape of a result with fake tensors of the whole shape: not memory.
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def uncounted(method: object, self: object, *args: object, **kwargs: object) -> object:
        before, LEDGER.off = LEDGER.off, True
        try:
            return method(self, *args, **kwargs)
        finally:
            LEDGER.off = before

    for name, method in list(vars(ShardingPropagator).items()):
        if name.startswith("_propagate_tensor_meta"):
            setattr(ShardingPropagator, name, partial_method(uncounted, method))


def partial_method(function: object, method: object) -> object:
    return lambda self, *args, **kwargs: function(method, self, *args, **kwargs)


def pretend_cuda(gpus: int) -> None:
    """An H100's answers, and the kernel that a GPU would choose."""
    answers = {"is_available": True, "is_initialized": True, "device_count": gpus}
    answers |= {"get_device_capability": (9, 0), "is_bf16_supported": True, "current_device": 0}
    for name in "synchronize set_device empty_cache _lazy_init set_rng_state".split():
        answers[name] = None
    answers["is_current_stream_capturing"] = False
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.current_stream = torch.cuda.default_stream = torch.cuda.stream = Stream
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    torch.backends.cuda.enable_cudnn_sdp = lambda *_: None

    def flash(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
        """torch chooses it by a table in C++, which the CPU build does not have."""
        if attn_mask is not None or query.dtype != torch.bfloat16:
            raise RuntimeError(f"no flash attention with a mask, or in {query.dtype}")
        attention = aten._scaled_dot_product_flash_attention
        return attention(query, key, value, dropout_p, is_causal, scale=scale)[0]

    torch.nn.functional.scaled_dot_product_attention = flash
    from transformers import masking_utils

    masking_utils.is_tracing = lambda *_: False  # it takes a FakeTensor for torch.export


def pretend_ranks() -> None:
    """The fake process group. Where values cross, all ranks have what this one has."""
    init, new_group = dist.init_process_group, dist.new_group

    def grouped(ranks=None, timeout=None, backend=None, *more, **how):
        return new_group(ranks, timeout, "fake", *more, **how)

    def gather_object(parts: list, mine: object, group: object = None) -> None:
        COLLECTIVES["all_gather_object"] += 1
        parts[:] = [mine] * len(parts)

    def exchange(found, packed, received, sent):
        COLLECTIVES["all_to_all_single"] += 1
        if len(found):  # rows of the other ranks: this rank's, again
            order = torch.arange(len(found)) % max(1, len(packed))
            found.copy_(packed[order.to(packed.device)])

    def broadcast(objects: list, *_: object, **__: object) -> None:
        COLLECTIVES["broadcast_object_list"] += 1
        if os.environ["RANK"] == "0":
            SENT.append(list(objects))
        else:
            objects[:] = SENT.pop(0)

    dist.init_process_group = lambda backend, **how: init("fake", **how)
    dist.new_group = dist.distributed_c10d.new_group = grouped
    dist.all_gather_object, dist.all_to_all_single = gather_object, exchange
    dist.broadcast_object_list = broadcast
    dist.barrier = lambda *_: COLLECTIVES.update(["barrier"])
    own = importlib.import_module("common.distributed")
    own.rendezvous = lambda *_, **__: iter([(dist.HashStore(), 0, 0)])
    os._exit = sys.exit  # a failing rank's; else nothing is printed


def pretend_hub() -> None:
    """Models of the right shapes, problems whose answer is 7."""
    import datasets
    import transformers

    def config(source: str, **_: object) -> object:
        words = dict(MODELS[source])
        words["num_hidden_layers"] = LAYERS[0] or words["num_hidden_layers"]
        return transformers.AutoConfig.for_model(words.pop("model_type"), **words)

    from_config = transformers.AutoModelForCausalLM.from_config

    def load(source: str, config: object, dtype: torch.dtype, **_: object) -> tuple:
        lm = from_config(config, dtype=dtype).eval()
        lm.generation_config.eos_token_id = 1
        return lm, {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}

    transformers.AutoConfig.from_pretrained = config
    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: byte_tokenizer(258)
    transformers.AutoModelForCausalLM.from_pretrained = load
    hub = json.loads(Path("common/hub.json").read_text()).values()

    def load_dataset(path: str, config: str | None = None, split: str = "") -> list:
        row = next(row for row in hub if row["path"] == path)
        assert split in (row.get("train"), row.get("test")), (path, split)
        kind = row.get("extract", "")
        answer = ["$7$"] if kind == "listed" else ANSWERS[kind]
        return [{row["prompt"]: f"{path} {split} {i}", row["answer"]: answer} for i in range(9999)]

    datasets.load_dataset = load_dataset
    sys.modules["vllm"] = types.ModuleType("vllm")
    sys.modules["vllm"].__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    sys.modules["vllm"].LLM, sys.modules["vllm"].SamplingParams = LLM, types.SimpleNamespace


def pretend_disk() -> None:
    """A checkpoint is torch's own plan of this rank's part, and what is not tensors in memory."""
    from common import checkpoint, run

    def parts(state: dict) -> dict:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=True)
        found = {}
        for item in planner.create_local_plan().items:
            one = planner.resolve_data(item)
            chunk = item.tensor_data and item.tensor_data.chunk
            found[str(item.index)] = str((chunk, getattr(one, "dtype", "")))
        return found

    def save(state: dict, checkpoint_id: Path) -> None:
        SAVED["shards"] = parts(state)
        checkpoint_id.mkdir(exist_ok=True)

    def load(state: dict, storage_reader: object) -> None:
        asked = parts(state)
        for name in sorted(asked.keys() | SAVED["shards"].keys()):
            if asked.get(name) != SAVED["shards"].get(name):
                raise ValueError(f"{name}: saved {SAVED['shards'].get(name)}, not {asked.get(name)}")

    def save_own(what: dict, path: Path) -> None:
        SAVED["own"] = what
        path.write_text("")

    reader = types.SimpleNamespace(read_metadata=lambda: None)
    theirs = {"save": save, "load": load, "FileSystemReader": lambda path: reader}
    checkpoint.dcp = types.SimpleNamespace(**theirs)

    def load_own(path: Path, **_: object) -> dict:
        return tree_map(lambda one: one.cpu() if isinstance(one, torch.Tensor) else one, SAVED["own"])

    checkpoint.torch = types.SimpleNamespace(**vars(torch) | {"save": save_own, "load": load_own})
    run.draw_run = lambda folder: folder  # no curves


# 5. The program


def run(module: types.ModuleType, words: list[str], rank: int, size: int) -> dict:
    """`main` with these flags on one of the ranks: exit code and collectives."""
    from common.launch import launch

    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": min(8, size)}
    os.environ |= {name: str(number) for name, number in place.items()}
    COLLECTIVES.clear()
    LEDGER.stage, code = "load", 0
    sys.argv = [module.__file__, *words]
    try:
        with MODE, Values():
            launch(module.main, module.Args)
    except SystemExit as stop:
        code = stop.code or 0
    gc.collect()
    return {"code": code, "collectives": dict(COLLECTIVES)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--card", type=float, default=80.0, help="GB of the card")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="torchrun ...")
    given = parser.parse_args()
    CARD[0], LAYERS[0] = given.card, given.layers
    text = " ".join(map(shlex.quote, given.command))
    size = 1
    for number in re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", text):
        size *= int(number)
    program = next(i for i, word in enumerate(given.command) if word.endswith(".py"))
    name, flags = given.command[program].removesuffix(".py"), given.command[program + 1 :]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    pretend_tensors()
    pretend_cuda(min(8, size))
    pretend_ranks()
    pretend_hub()
    pretend_disk()
    module = importlib.import_module(name)
    first = 11 if name == "vcpo" else 1  # steps; until then vcpo.py fills its queue (--lag 10)
    with tempfile.TemporaryDirectory() as folder:
        flags += ["--run_dir", f"{folder}/run", "--steps"]
        runs = [run(module, [*flags, str(first)], 0, size)]
        LLM.long = True
        runs.append(run(module, [*flags, str(first + 1), "--resume"], 0, size))
        peaks = json.loads(json.dumps(LEDGER.peaks))
        LLM.long = False
        runs.append(run(module, [*flags, str(first)], size - 1, size))
        line = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()[-1]
    for device in peaks:
        peaks[device] = {phase: round(most / GB, 1) for phase, most in peaks[device].items()}
    left = round(LEDGER.live["cuda"] / GB, 1)
    print(json.dumps({"runs": runs, "peaks": peaks, "left": left, "metrics": json.loads(line)}))


if __name__ == "__main__":
    main()
