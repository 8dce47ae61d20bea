"""One rank of a command for GPUs that are not there. Needs g++, and torch's build for CPUs.

    python -m tests.engines.fake_gpu 2 80 torchrun --nproc_per_node=8 gspo.py --lr 1e-6 ...

Every tensor is a FakeTensor: shape, type and the device cuda:0, but no memory. All but what is
patched below runs unchanged, with 2 layers of the model (0: all) on cards of 80 GB. `main` runs
three times: to the first update and a checkpoint; resumed, for a step; and the first part as the
last rank. Some responses fill a micro-batch, and one has full length: with all layers in each
rollout, with few in the resumed run only, or the ranks could not be compared. The last line is
JSON: exit code and collectives of each, and peaks in bytes by device and phase. No numbers, speed
or hangs are seen, and no types that a CUDA kernel refuses.
"""

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
from collections import Counter, defaultdict
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import common  # noqa: F401  (before torch)
import numpy as np

os.environ["HF_HUB_OFFLINE"] = "1"

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

# ruff: noqa: E402
import datasets
import torch
import torch.distributed as dist
from common import checkpoint, distributed, run
from common.clock import RUNNING
from common.data import HUB
from common.launch import launch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401  (registers their kernels)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers it)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, masking_utils

from tools.maintain.shapes import byte_tokenizer, config_of
from tools.memory import GRAPHS, VLLM_WORK, engine_bytes

MOST = 40_000_000  # elements of a tensor that has values
FEW = 1_000_000  # of one without, if it counts as zeros where it meets others
aten = torch.ops.aten
READS = (aten.item.default, aten.is_nonzero.default, aten._local_scalar_dense.default)
EMPTY = (aten.empty.memory_format, aten.empty_strided.default)
DYNAMIC = (
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.DataDependentOutputException,
    fake_tensor.UnsupportedOperatorException,
)
# Layers of the model (0: all), and bytes of a card; what runs when no phase is timed; tokens of a
# micro-batch, and whether responses fill one; whether DTensor asks for a shape
STATE = SimpleNamespace(layers=0, card=80e9, stage="load", fill=16384, long=True, shaping=False)
COLLECTIVES, PEAKS = Counter(), defaultdict(Counter)


class Peaks(MemTracker):
    """torch's count of the storages that are alive, and its peaks by phase instead of module."""

    def __init__(self):
        super().__init__()
        self._mod_tracker = MagicMock(is_bw=False)

    def _update_peak_stats(self, _: object) -> None:
        if STATE.shaping:
            return
        phase = RUNNING[0] if RUNNING else STATE.stage
        STATE.stage = {"rollout": "update", "sync": "other"}.get(phase, STATE.stage)
        for device, parts in self._curr_mem_snap.items():
            PEAKS[device.type][phase] = max(PEAKS[device.type][phase], parts["Total"])


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """The real values, on the CPU; zeros if they depend on weights."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    if not hasattr(tensor, "value"):
        assert tensor.numel() <= MOST, f"the program reads values of {tuple(tensor.shape)}"
        with torch._C._DisableTorchDispatch():
            tensor.value = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.value


def on_values(func: Callable, flat: list, spec: object) -> list:
    """What the operation makes of the values, on the CPU."""
    given = []
    for one in flat:
        one = value_of(one) if isinstance(one, torch.Tensor) else one
        given.append(torch.device("cpu") if isinstance(one, torch.device) else one)
    args, kwargs = tree_unflatten(given, spec)
    with torch._C._DisableTorchDispatch():
        found = func(*args, **kwargs)
        return tree_flatten(found.zero_() if func in EMPTY else found)


class Values(TorchDispatchMode):
    """Above FakeTensorMode: small tensors have values, so that lengths, masks, indices and metrics
    are true. What depends on weights is 0. Collectives are counted."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind not in (torch.Tensor, FakeTensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor comes first
        if func.namespace in ("c10d", "_c10d_functional"):
            COLLECTIVES[func.name()] += 1
        flat, spec = tree_flatten((args, kwargs or {}))
        tensors = [one for one in flat if isinstance(one, torch.Tensor)]
        if func in READS:
            with torch._C._DisableTorchDispatch():
                return value_of(args[0]).item()
        known = [not isinstance(one, FakeTensor) or hasattr(one, "value") for one in tensors]
        try:
            made, shape = tree_flatten(func(*args, **(kwargs or {})))
        except DYNAMIC:  # the shape depends on values
            values, shape = on_values(func, flat, spec)
            on = next((one.fake_device for one in tensors if isinstance(one, FakeTensor)), "cpu")
            made = [torch.empty(one.shape, dtype=one.dtype, device=on) for one in values]
        else:
            values = []
            size = sum(one.numel() for one in made if isinstance(one, torch.Tensor))
            small = all(one.numel() <= (MOST if k else FEW) for one, k in zip(tensors, known))
            small = small and size <= (FEW if func in EMPTY else MOST)
            if (any(known) or not tensors) and small and func.namespace == "aten":
                with contextlib.suppress(RuntimeError):  # no kernel for CPUs: not known
                    values, _ = on_values(func, flat, spec)
        for one, value in zip(made, values):
            if isinstance(one, FakeTensor) and (one.shape, one.dtype) == (value.shape, value.dtype):
                one.value = value
        return tree_unflatten(made, shape)


class LLM:
    """vLLM as common/vllm.py knows it: memory, the weights that it takes, and responses, of which a
    third is right."""

    def __init__(self, **options: object):
        self.options, config = options, config_for(options["model"])
        ranks, float8 = options["tensor_parallel_size"], "quantization" in options
        if config.num_attention_heads % ranks:
            raise ValueError(f"{config.num_attention_heads} heads do not divide by {ranks}")
        with torch.device("meta"):
            self.elements = AutoModelForCausalLM.from_config(config).num_parameters()
        self.share = options["gpu_memory_utilization"] * STATE.card
        self.weights, token = engine_bytes(config, self.elements, ranks, float8)
        if self.share - self.weights - VLLM_WORK < token * options["max_model_len"]:
            raise ValueError("the KV cache holds no response of full length")
        self.wake_up(["weights", "kv_cache"])
        self.weight = torch.nn.Linear(1, 1, device="cuda")  # for `forget` and `forgotten`
        self.chosen = (config.num_hidden_layers, getattr(config, "num_experts_per_tok", 0))
        read = byte_tokenizer(258)
        self.texts = [[*read(rf"So. Then \boxed{{{n}}}.")["input_ids"], 1] for n in (7, 8, 9)]
        self.llm_engine = SimpleNamespace(engine_core=self)

    def hold(self, awake: set[str], size: float) -> None:
        self.memory, self.awake = None, awake
        self.memory = torch.empty(int(size), dtype=torch.uint8, device="cuda")

    def sleep(self, level: int) -> None:
        assert self.options["enable_sleep_mode"]
        self.hold(set(), GRAPHS)

    def wake_up(self, tags: list[str]) -> None:
        awake = {*tags, *getattr(self, "awake", ())}
        self.hold(awake, self.share if "kv_cache" in awake else self.weights + VLLM_WORK)

    def shutdown(self) -> None:
        assert len(self.awake) == 2  # asleep, CUDA would print an error for each piece of memory
        self.memory = None

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
        return "weights" in self.awake

    def generate(self, requests: list, sampling: list, use_tqdm: bool) -> list:
        assert len(self.awake) == 2
        long, limit = [], sampling[0].max_tokens
        if STATE.long and sampling[0].n > 4:  # in training
            prompt = len(requests[0]["prompt_token_ids"])
            rows = math.ceil(STATE.fill / (prompt + limit))
            long = [limit, *[STATE.fill // rows - prompt] * rows]
        answers = []
        for number, (request, how) in enumerate(zip(requests, sampling)):
            prompt, outputs = len(request["prompt_token_ids"]), []
            assert prompt + how.max_tokens <= self.options["max_model_len"]
            for place in range(how.n):
                text = self.texts[(number + place) % 3]
                length = long.pop() if long else min(how.max_tokens, len(text) - place % 2)
                ids = text * (length // len(text)) + text[: length % len(text)]
                output = SimpleNamespace(token_ids=ids)
                output.logprobs = SimpleNamespace(logprobs=[0.0] * length)
                output.routed_experts = np.zeros((prompt + length - 1, *self.chosen), np.uint8)
                outputs.append(output)
            answers.append(SimpleNamespace(outputs=outputs))
        return answers


def config_for(model: str, **_: object) -> object:
    config = config_of(model)
    config.num_hidden_layers = STATE.layers or config.num_hidden_layers
    return config


# All that is patched, for torch 2.13.0 and transformers 5.16 to 5.19


def pretend_cuda(gpus: int) -> None:
    """An H100's answers, and the attention kernel that it would choose."""
    answers = {"is_available": True, "is_initialized": True, "device_count": gpus}
    answers |= {"get_device_capability": (9, 0), "current_device": 0, "synchronize": None}
    answers |= {"is_current_stream_capturing": False, "set_device": None, "empty_cache": None}
    answers |= {"set_rng_state": None, "get_rng_state": None, "_lazy_init": None}
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name in "Stream Event stream current_stream default_stream".split():
        setattr(torch.cuda, name, MagicMock())
    torch.backends.cuda.enable_cudnn_sdp = lambda *_: None
    FakeTensorMode.avoid_device_init = True  # torch.tensor(..., device="cuda") would ask CUDA,
    fake_tensor.init_gpu_context = lambda *_: None  # so would the mode
    FakeTensor.pin_memory = lambda self, *_: self  # by CUDA's allocator

    def flash(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
        if attn_mask is not None or query.dtype != torch.bfloat16:
            raise RuntimeError(f"no flash attention with a mask or in {query.dtype}")
        kernel = aten._scaled_dot_product_flash_attention
        return kernel(query, key, value, dropout_p, is_causal, scale=scale)[0]

    torch.nn.functional.scaled_dot_product_attention = flash  # the CPU build lacks its table
    masking_utils.is_tracing = lambda *_: False  # it takes a FakeTensor for torch.export
    FakeTensorMode.may_turn_const = lambda *_: False  # its values of single numbers need a GPU
    FakeTensor.tolist = lambda self: value_of(self).tolist()
    FakeTensor.numpy = lambda self, **_: np.array(self.tolist())

    def copied(self: FakeTensor, memo: dict) -> FakeTensor:
        if id(self) not in memo:
            made = self.detach().clone()
            parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(made, self.requires_grad) if parameter else made
        return memo[id(self)]

    FakeTensor.__deepcopy__ = copied  # torch's copies the bytes of the storage
    shapes = ShardingPropagator._propagate_tensor_meta_non_cached

    def uncounted(self: ShardingPropagator, schema: object) -> object:
        STATE.shaping = True
        made = shapes(self, schema)
        STATE.shaping = False
        return made

    # DTensor asks for a result's shape with fake tensors of the whole shape.
    ShardingPropagator._propagate_tensor_meta_non_cached = uncounted


def pretend_ranks() -> None:
    """The fake process group. Where objects cross, all ranks get what rank 0 got."""
    init, new_group, sent = dist.init_process_group, dist.new_group, []

    def grouped(ranks=None, timeout=None, backend=None, *more, **how):
        return new_group(ranks, timeout, "fake", *more, **how)

    def received(name: str, objects: list) -> list:
        COLLECTIVES[name] += 1
        if os.environ["RANK"] != "0" and len(objects) > 1:
            return sent.pop(0)
        sent.extend([objects] if len(objects) > 1 else [])
        return objects

    def gather(parts: list, mine: object, group: object = None) -> None:
        parts[:] = received("all_gather_object", [mine] * len(parts))

    def broadcast(objects: list) -> None:
        objects[:] = received("broadcast_object_list", [*objects, None])[:1]

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


def pretend_hub() -> None:
    """Models of the right shapes, problems whose answer is 7, and vLLM."""

    def load(source: str, config: object, dtype: torch.dtype, **_: object) -> tuple:
        loaded = {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval(), loaded

    def load_dataset(path: str, config: str | None = None, split: str = "") -> list:
        row = next(row for row in HUB.values() if row.path == path)
        assert split in (row.train, row.test), (path, split)
        answers = {"boxed": r"\boxed{7}", "after_hashes": "#### 7", "listed": ["7"]}
        answer = answers.get(row.extract, "7")
        return [{row.prompt: f"{path} {split} {i:04}", row.answer: answer} for i in range(9999)]

    AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained = config_for, load
    AutoTokenizer.from_pretrained = lambda *_, **__: byte_tokenizer(258)
    datasets.load_dataset = load_dataset
    vllm = sys.modules["vllm"] = ModuleType("vllm")
    vllm.__spec__, vllm.LLM, vllm.SamplingParams = ModuleSpec("vllm", None), LLM, SimpleNamespace


def pretend_disk() -> None:
    """A checkpoint is torch's own plan of this rank's part. Resume must ask for the same part."""
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
            assert part == saved["shards"].get(name), f"{name}: {part} is not in the checkpoint"

    def save_own(what: dict, path: Path) -> None:
        saved["own"] = what
        path.touch()

    def load_own(path: Path, **_: object) -> dict:
        return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, saved["own"])

    checkpoint.dcp = SimpleNamespace(save=save, load=load, FileSystemReader=MagicMock())
    checkpoint.torch = SimpleNamespace(**vars(torch) | {"save": save_own, "load": load_own})
    run.draw_run = lambda folder: folder  # no curves


# The program


def run_as(rank: int, ranks: int, module: ModuleType, flags: list[str]) -> tuple:
    """`main` on one of the ranks: its exit code and its collectives."""
    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": min(8, ranks)}
    os.environ |= {name: str(number) for name, number in place.items()}
    sys.argv, STATE.stage, code = [module.__file__, *flags], "load", 0
    COLLECTIVES.clear()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Peaks(), Values():
            launch(module.main, module.Args)
    except SystemExit as stop:
        code = stop.code
    gc.collect()
    return code, dict(COLLECTIVES)


def main() -> None:
    STATE.layers, STATE.card = int(sys.argv[1]), 1e9 * float(sys.argv[2])
    command = sys.argv[3:]
    sizes = re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", " ".join(command))
    ranks = math.prod(map(int, sizes))
    file = next(word for word in command if word.endswith(".py"))
    flags = command[command.index(file) + 1 :]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    pretend_cuda(min(8, ranks))
    pretend_ranks()
    pretend_hub()
    pretend_disk()
    module = importlib.import_module(file.removesuffix(".py"))
    first = 11 if file == "vcpo.py" else 1  # the step of the first update (--lag 10)
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, "--eval_problems", str(ranks), "--run_dir", f"{folder}/run", "--steps"]
        if "--micro_tokens" in flags:
            STATE.fill = int(flags[flags.index("--micro_tokens") + 1])
        # The exchange of rows is not real: with long rows a rank would count its own micro-batches.
        STATE.long = not STATE.layers
        runs = [run_as(0, ranks, module, [*flags, str(first)])]
        STATE.long = True
        runs.append(run_as(0, ranks, module, [*flags, str(first + 1), "--resume"]))
        peaks = {device: dict(sizes) for device, sizes in PEAKS.items()}
        STATE.long = not STATE.layers
        runs.append(run_as(ranks - 1, ranks, module, [*flags, str(first)]))
    print(json.dumps([*runs, peaks]))


if __name__ == "__main__":
    main()
