"""A command for GPUs that are not there: one of its ranks runs here. Needs g++ and torch for CPUs.

    python -m tests.engines.fake_gpu --layers 2 torchrun --nproc_per_node=8 gspo.py --lr 1e-6 ...

Every tensor is a FakeTensor: a shape, a type and the device cuda:0, but no memory. The process
group is torch's "fake" one. FSDP2, autograd, AdamW, the models of transformers and our own code run
unchanged. Without `--layers` the model has all its layers, and the peaks are those of the command.

`main` runs three times: to a first update and a checkpoint; resumed, for a step with one response
of full length and others that fill a micro-batch; and the first part again as the last rank. The
last line is JSON: for each of the three its exit code and its collectives, then the peaks in GB by
device and phase. No number, no speed, no hang is seen, and no type that a CUDA kernel refuses.
"""

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import types
from collections import Counter, defaultdict
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import common  # noqa: F401  (before torch)

# torch's build for CPUs aborts where autograd meets a tensor of CUDA. A device guard and hooks that
# do nothing, loaded before torch asks for them, make it believe in a device.
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
LIBRARY = Path(tempfile.gettempdir(), f"pretend_cuda_{version('torch')}_{os.getuid()}.so")
if not LIBRARY.exists():
    home = Path(find_spec("torch").origin).parent  # without importing it
    part = LIBRARY.with_suffix(f".{os.getpid()}")
    words = f"g++ -x c++ -std=c++20 -shared -fPIC -O0 -I{home}/include - -o {part} -L{home}/lib"
    words += f" -Wl,-rpath,{home}/lib -ltorch_cpu -lc10"
    subprocess.run(words.split(), input=PRETEND, text=True, check=True)
    part.rename(LIBRARY)
ctypes.CDLL(str(LIBRARY))

import datasets  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import checkpoint, distributed, run  # noqa: E402
from common.clock import RUNNING  # noqa: E402
from common.data import HUB  # noqa: E402
from common.launch import launch  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.distributed._tools import fake_collectives  # noqa: E402, F401  (registers them)
from torch.distributed.checkpoint import DefaultSavePlanner  # noqa: E402
from torch.distributed.tensor._sharding_prop import ShardingPropagator  # noqa: E402
from torch.testing._internal.distributed import fake_pg  # noqa: E402, F401  (registers it)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, masking_utils  # noqa: E402

from tools.maintain.shapes import byte_tokenizer, config_of  # noqa: E402
from tools.memory import GRAPHS, VLLM_WORK, Ledger, engine_bytes  # noqa: E402

CARD = 80e9  # bytes
MOST = 8_000_000  # elements of a tensor that has values
UNKNOWN = 1_000_000  # of one without values, which counts as zeros where it meets some
aten = torch.ops.aten
EMPTY = (aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default)
DYNAMIC = (
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.DataDependentOutputException,
    fake_tensor.UnsupportedOperatorException,
)
LEDGER, COLLECTIVES = Ledger(), Counter()
LAYERS = [0]  # of the model; 0: all
STAGE = ["load"]  # what runs when no phase is timed: load, then update
FULL = [0]  # in the second run: tokens of a micro-batch


def phase() -> str:
    if RUNNING[:1] == ["rollout"]:
        STAGE[0] = "update"
    return RUNNING[0] if RUNNING else STAGE[0]


def see(tensor: torch.Tensor) -> None:
    LEDGER.see(tensor, tensor.fake_device.type, phase())


# Values of small tensors


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """The real values, on the CPU; zeros if they depend on weights."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    if not hasattr(tensor, "value"):
        assert tensor.numel() <= 8 * MOST, f"the program reads values of {tuple(tensor.shape)}"
        with torch._C._DisableTorchDispatch():
            tensor.value = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.value


def on_values(func: Callable, flat: list, spec: object) -> object:
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
    """Above FakeTensorMode: small tensors have values; storages and collectives are counted.

    Lengths, masks, indices and metrics are then true. What depends on weights is 0.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind not in (torch.Tensor, FakeTensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor comes first
        flat, spec = tree_flatten((args, kwargs or {}))
        tensors = [one for one in flat if isinstance(one, torch.Tensor)]
        if func.namespace in ("c10d", "_c10d_functional"):
            COLLECTIVES[func.name()] += 1
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # its fake kernel would make a second tensor
        if func in (aten.item.default, aten.is_nonzero.default, aten._local_scalar_dense.default):
            with torch._C._DisableTorchDispatch():
                return value_of(args[0]).item()
        try:
            out = func(*args, **(kwargs or {}))
        except DYNAMIC:  # its shape depends on values
            device = next((t.fake_device for t in tensors if isinstance(t, FakeTensor)), "cpu")
            return tree_map(lambda one: faked(one, device), on_values(func, flat, spec))
        made = [one for one in tree_flatten(out)[0] if isinstance(one, FakeTensor)]
        for one in made:
            see(one)
            one.constant = None  # torch's own values of single numbers: it copies them to a GPU
        known = [not isinstance(one, FakeTensor) or hasattr(one, "value") for one in tensors]
        small = all(one.numel() <= (MOST if k else UNKNOWN) for one, k in zip(tensors, known))
        if sum(one.numel() for one in made) > MOST or func.namespace != "aten":
            return out
        if small and (any(known) or not tensors):
            with contextlib.suppress(RuntimeError):  # no kernel for CPUs: not known
                found = tree_flatten(on_values(func, flat, spec))[0]
                for one, value in zip(made, [x for x in found if isinstance(x, torch.Tensor)]):
                    if (one.shape, one.dtype) == (value.shape, value.dtype):
                        one.value = value
        return out


def faked(value: object, device: object) -> object:
    """A FakeTensor with these values."""
    if not isinstance(value, torch.Tensor):
        return value
    with MODE:
        made = torch.empty(value.shape, dtype=value.dtype, device=device)
    made.value = value
    see(made)
    return made


MODE = FakeTensorMode(allow_non_fake_inputs=True)


class LLM:
    """vLLM as common/vllm.py knows it: its memory, the weights that it takes, and responses, a
    third of which are right."""

    def __init__(self, **options: object):
        self.options, config = options, config_for(options["model"])
        ranks = options["tensor_parallel_size"]
        if config.num_attention_heads % ranks:
            raise ValueError(f"{config.num_attention_heads} heads do not divide by {ranks}")
        with torch.device("meta"):
            self.elements = AutoModelForCausalLM.from_config(config).num_parameters()
        float8 = "quantization" in options
        weights, token = engine_bytes(config, self.elements, ranks, float8)
        cache = options["gpu_memory_utilization"] * CARD - weights - VLLM_WORK
        if cache < token * options["max_model_len"]:
            raise ValueError("the KV cache holds no response of full length")
        self.sizes = {"weights": weights, "kv_cache": cache, "work": VLLM_WORK}
        self.held = {}
        self.wake_up(self.sizes)
        self.weight = torch.nn.Linear(1, 1, device="cuda")  # for `forget` and `forgotten`
        self.chosen = (config.num_hidden_layers, getattr(config, "num_experts_per_tok", 0))
        self.tokenizer = byte_tokenizer(258)
        self.llm_engine = types.SimpleNamespace(engine_core=self)

    def shutdown(self) -> None:
        self.held.clear()

    def sleep(self, level: int) -> None:
        assert self.options["enable_sleep_mode"]
        self.held.clear()
        self.held = {"graphs": torch.empty(int(GRAPHS), dtype=torch.uint8, device="cuda")}

    def wake_up(self, tags: list[str]) -> None:
        self.held.pop("graphs", None)
        if STAGE[0] == "update" and not RUNNING:
            STAGE[0] = "close"  # asleep it would print errors
        for part in {*tags, "work"} - self.held.keys():
            size = int(self.sizes[part])
            self.held[part] = torch.empty(size, dtype=torch.uint8, device="cuda")

    def apply_model(self, job: Callable) -> list:
        return [job(self.weight)]

    def collective_rpc(self, name: str, kwargs: dict) -> None:
        sizes = {}
        for key, one in kwargs["weights_iterator"]:
            assert one.dtype == self.options["dtype"] and one.is_cuda, key
            sizes[key] = one.numel()
        assert sum(sizes.values()) == self.elements, "not every weight is pushed"
        for parameter in self.weight.parameters():
            parameter.data.fill_(0)

    def reset_prefix_cache(self) -> bool:
        return "weights" in self.held

    def generate(self, requests: list, sampling: list, use_tqdm: bool) -> list:
        assert {"weights", "kv_cache"} <= self.held.keys()
        answers, long = [], []
        if FULL[0] and sampling[0].n > 4:  # a training rollout: one response of full length
            whole = len(requests[0]["prompt_token_ids"]) + sampling[0].max_tokens
            rows = math.ceil(FULL[0] / whole)  # and as many as fill a micro-batch
            long = [FULL[0] // rows - whole + sampling[0].max_tokens] * rows
            long.append(sampling[0].max_tokens)
        for number, (request, how) in enumerate(zip(requests, sampling)):
            prompt, outputs = request["prompt_token_ids"], []
            assert len(prompt) + how.max_tokens <= self.options["max_model_len"]
            for place in range(how.n):
                text = "So. Then. It is " + ("7" if (number + place) % 3 == 0 else "8")
                ids = [*self.tokenizer(rf"{text[:-1]}\boxed{{{text[-1]}}}.")["input_ids"], 1]
                length = long.pop() if long else min(how.max_tokens, len(ids) - place % 2)
                ids = (ids[:-1] * length)[: length - len(ids)] + ids
                output = types.SimpleNamespace(token_ids=ids[:length])
                output.logprobs = types.SimpleNamespace(logprobs=[0.0] * length)
                if self.options.get("enable_return_routed_experts"):
                    shape = (len(prompt) + length - 1, *self.chosen)
                    with torch._C._DisableTorchDispatch():
                        experts = torch.arange(shape[-1], dtype=torch.uint8)
                        output.routed_experts = experts.expand(shape).contiguous()
                outputs.append(output)
            answers.append(types.SimpleNamespace(outputs=outputs))
        return answers


# All that is patched, for torch 2.13.0 and transformers 5.16 to 5.19


def pretend_tensors() -> None:
    FakeTensorMode.avoid_device_init = True  # torch.tensor(..., device="cuda") would ask CUDA,
    fake_tensor.init_gpu_context = lambda *_: None  # and so would the mode
    FakeTensor.tolist = lambda self: value_of(self).tolist()
    FakeTensor.numpy = lambda self, **_: value_of(self).numpy()
    FakeTensor.pin_memory = lambda self, *_: self  # by CUDA's allocator
    resize = torch.UntypedStorage.resize_
    shapes = ShardingPropagator._propagate_tensor_meta_non_cached

    def copied(self: FakeTensor, memo: dict) -> FakeTensor:
        if id(self) not in memo:
            made = self.detach().clone()
            parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(made, self.requires_grad) if parameter else made
        return memo[id(self)]

    def resize_and_count(self: torch.UntypedStorage, size: int) -> object:
        result = resize(self, size)
        if self._cdata in LEDGER.sizes:
            LEDGER.count(self._cdata, self.nbytes(), "cuda", phase())
        return result

    def uncounted(self: ShardingPropagator, schema: object) -> object:
        peaks, LEDGER.peaks = LEDGER.peaks, defaultdict(Counter)
        made = shapes(self, schema)
        LEDGER.peaks = peaks
        return made

    FakeTensor.__deepcopy__ = copied  # torch's copies the bytes of the storage
    torch.UntypedStorage.resize_ = resize_and_count  # FSDP frees gathered weights by it
    # DTensor asks for a result's shape with fake tensors of the whole shape.
    ShardingPropagator._propagate_tensor_meta_non_cached = uncounted


def pretend_cuda(gpus: int) -> None:
    """An H100's answers, and the attention kernel that it would choose."""
    answers = {"is_available": True, "is_initialized": True, "device_count": gpus}
    answers |= {"get_device_capability": (9, 0), "current_device": 0}
    answers["is_current_stream_capturing"] = False
    for name in "synchronize set_device empty_cache _lazy_init set_rng_state".split():
        answers[name] = None
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name in "Stream Event stream current_stream default_stream".split():
        setattr(torch.cuda, name, MagicMock())
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    torch.backends.cuda.enable_cudnn_sdp = lambda *_: None

    def flash(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
        if attn_mask is not None or query.dtype != torch.bfloat16:
            raise RuntimeError(f"no flash attention with a mask or in {query.dtype}")
        kernel = aten._scaled_dot_product_flash_attention
        return kernel(query, key, value, dropout_p, is_causal, scale=scale)[0]

    torch.nn.functional.scaled_dot_product_attention = flash  # the CPU build lacks its table
    masking_utils.is_tracing = lambda *_: False  # it takes a FakeTensor for torch.export


def pretend_ranks() -> None:
    """The fake process group. Where objects or rows cross, all ranks have what rank 0 has."""
    init, new_group, sent = dist.init_process_group, dist.new_group, []

    def grouped(ranks=None, timeout=None, backend=None, *more, **how):
        return new_group(ranks, timeout, "fake", *more, **how)

    def received(objects: list) -> list:
        """The last rank gets what rank 0 got: both must then do the same."""
        if os.environ["RANK"] == "0":
            sent.append(objects)
            return objects
        return sent.pop(0)

    def gather(parts: list, mine: object, group: object = None) -> None:
        COLLECTIVES["all_gather_object"] += 1
        parts[:] = received([mine] * len(parts)) if len(parts) > 1 else [mine]

    def broadcast(objects: list) -> None:
        COLLECTIVES["broadcast_object_list"] += 1
        objects[:] = received(list(objects))

    def exchange(found: torch.Tensor, packed: torch.Tensor, received: list, given: list) -> None:
        COLLECTIVES["all_to_all_single"] += 1
        if len(found):  # rows of other ranks: this rank's, again
            order = torch.arange(len(found)) % max(1, len(packed))
            found.copy_(packed[order.to(packed.device)])

    dist.init_process_group = lambda backend, **how: init("fake", **how)
    dist.new_group = dist.distributed_c10d.new_group = grouped
    dist.all_gather_object, dist.all_to_all_single = gather, exchange
    dist.broadcast_object_list = broadcast
    dist.barrier = lambda: COLLECTIVES.update(["barrier"])
    distributed.rendezvous = lambda *_, **__: iter([(dist.HashStore(), 0, 0)])
    os._exit = sys.exit  # of a rank that fails: the report would be lost


def config_for(model: str, **_: object) -> object:
    config = config_of(model)
    config.num_hidden_layers = LAYERS[0] or config.num_hidden_layers
    return config


def pretend_hub() -> None:
    """Models of the right shapes, and problems whose answer is 7."""

    def load(source: str, config: object, dtype: torch.dtype, **_: object) -> tuple:
        lm = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        return lm, {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}

    def load_dataset(path: str, config: str | None = None, split: str = "") -> list:
        row = next(row for row in HUB.values() if row.path == path)
        assert split in (row.train, row.test), (path, split)
        answer = {"boxed": r"\boxed{7}", "after_hashes": "#### 7", "listed": ["7"]}
        answer = answer.get(row.extract, "7")
        return [{row.prompt: f"{path} {split} {i}", row.answer: answer} for i in range(9999)]

    AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained = config_for, load
    AutoTokenizer.from_pretrained = lambda *_, **__: byte_tokenizer(258)
    datasets.load_dataset = load_dataset
    vllm = sys.modules["vllm"] = types.ModuleType("vllm")
    vllm.__spec__ = ModuleSpec("vllm", None)
    vllm.LLM, vllm.SamplingParams = LLM, types.SimpleNamespace


def pretend_disk() -> None:
    """A checkpoint is torch's own plan of this rank's part. Resume asks for the same part."""
    saved = {}

    def plan(state: dict) -> dict:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=True)
        items = planner.create_local_plan().items
        return {str(item.index): str(item.tensor_data) for item in items}

    def save(state: dict, checkpoint_id: Path) -> None:
        saved["shards"] = plan(state)
        checkpoint_id.mkdir(exist_ok=True)

    def load(state: dict, storage_reader: object) -> None:
        for name, part in plan(state).items():
            if saved["shards"].get(name) != part:
                raise ValueError(f"{name}: saved {saved['shards'].get(name)}, asked for {part}")

    def save_own(what: dict, path: Path) -> None:
        saved["own"] = what
        path.touch()

    def load_own(path: Path, **_: object) -> dict:
        return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, saved["own"])

    disk = {"save": save, "load": load, "FileSystemReader": MagicMock()}
    checkpoint.dcp = types.SimpleNamespace(**disk)
    checkpoint.torch = types.SimpleNamespace(**vars(torch) | {"save": save_own, "load": load_own})
    run.draw_run = lambda folder: folder  # no curves


# The program


def run_as(rank: int, ranks: int, module: types.ModuleType, flags: list[str]) -> tuple:
    """`main` on one of the ranks: its exit code, and its collectives."""
    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": min(8, ranks)}
    os.environ |= {name: str(number) for name, number in place.items()}
    sys.argv, STAGE[0], code = [module.__file__, *flags], "load", 0
    COLLECTIVES.clear()
    try:
        with MODE, Values():
            launch(module.main, module.Args)
    except SystemExit as stop:
        code = stop.code
    gc.collect()
    return code, dict(COLLECTIVES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    LAYERS[0], command = given.layers, given.command
    sizes = re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", " ".join(command))
    ranks = math.prod(map(int, sizes))
    file = next(word for word in command if word.endswith(".py"))
    flags = command[command.index(file) + 1 :]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    pretend_tensors()
    pretend_cuda(min(8, ranks))
    pretend_ranks()
    pretend_hub()
    pretend_disk()
    module = importlib.import_module(file.removesuffix(".py"))
    first = 11 if file == "vcpo.py" else 1  # the step of the first update (--lag 10)
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, "--run_dir", f"{folder}/run", "--steps"]
        runs = [run_as(0, ranks, module, [*flags, str(first)])]
        FULL[0] = next((int(b) for a, b in zip(flags, flags[1:]) if a == "--micro_tokens"), 16384)
        runs.append(run_as(0, ranks, module, [*flags, str(first + 1), "--resume"]))
        FULL[0] = 0
        peaks = {device: dict(sizes) for device, sizes in LEDGER.peaks.items()}
        runs.append(run_as(ranks - 1, ranks, module, [*flags, str(first)]))
    for device, sizes in peaks.items():
        peaks[device] = {name: round(size / 1e9, 1) for name, size in sizes.items()}
    print(json.dumps([*runs, peaks]))


if __name__ == "__main__":
    main()
