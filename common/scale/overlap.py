"""An engine in a process of its own: it samples while the trainer updates."""

import copy
import os
import pickle
import signal
import threading
import traceback
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection

import torch
from transformers import PreTrainedModel

from common.batch import Rollout
from common.cli import BadInput, Flags, RunStopped
from common.clock import timed
from common.distributed import TIMEOUT, StopFlag, World, broadcast_module, full_parameters, setup
from common.logprobs import Policy
from common.rollout import make_engine

PATIENCE = TIMEOUT.total_seconds()  # how long the trainer waits for an answer


class Overlapped:
    """The engine that `--rollout` names, in a process of its own; each rank has one.

    From `submit` to `take` it samples, and this process is free. `policy` has the weights of the
    last `sync`, in memory that both processes share; the engine takes its own copy from there.
    """

    def __init__(self, args: Flags, lm: PreTrainedModel, world: World):
        if world.device.type == "cuda" or (args.rollout == "vllm" and world.size > 1):
            raise BadInput("--overlap: on CPUs only, and with --rollout vllm on one rank only")
        lm = broadcast_module(copy.deepcopy(lm), world).requires_grad_(False).share_memory()
        self.policy = Policy(lm)
        # Not forked: a fork would have the threads' locks, but not the threads that open them.
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        given = (theirs, args, lm, world.rank)
        self.process = context.Process(target=serve, args=given, daemon=True)
        self.process.start()
        theirs.close()  # now the pipe ends with the process
        world.closing.callback(self._close)
        self.open = 1  # questions without an answer so far: the first is whether the engine starts
        self._answer()

    def _close(self) -> None:
        self.process.kill()
        self.process.join()

    def _ask(self, method: str, *given: object) -> None:
        """Let the process call a method of its engine."""
        self.open += 1
        try:
            # Bytes and not tensors, of which each would hold an open file of the other process
            self.pipe.send_bytes(pickle.dumps((method, given)))
        except OSError:
            self._lost()

    def _answer(self) -> object:
        """What the last call returned, once all have ended; the first error is raised here."""
        answer = None
        while self.open:
            if not self.pipe.poll(PATIENCE):
                raise RunStopped(f"the sampler's process has not answered for {PATIENCE:.0f} s")
            try:
                answer = pickle.loads(self.pipe.recv_bytes())
            except (EOFError, OSError):
                self._lost()
            self.open -= 1
            if isinstance(answer, Exception):
                raise answer
        return answer

    def _lost(self) -> None:
        self.process.join(10)
        code = self.process.exitcode  # -9 is the kernel's, where memory is short
        raise RunStopped(f"the sampler's process has ended with exit code {code}") from None

    @timed("sync")
    def sync(self, policy: torch.nn.Module) -> None:
        self._answer()  # nobody reads the weights now
        weights = self.policy.lm.state_dict()
        for name, full in full_parameters(policy):
            weights[name].copy_(full)
        self._ask("sync")

    def state_dict(self) -> dict:
        self._ask("state_dict")
        return self._answer()

    def load_state_dict(self, state: dict) -> None:
        self._ask("load_state_dict", state)

    def submit(self, *request: object) -> None:
        self._ask("generate", *request)

    @timed("rollout")  # the wait alone
    def take(self) -> Rollout:
        return self._answer()

    def generate(self, *request: object) -> Rollout:
        self.submit(*request)
        return self.take()


def serve(pipe: Connection, args: Flags, lm: PreTrainedModel, rank: int) -> None:
    """The other process: make the engine, then call what the trainer asks for."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    for number in StopFlag.SIGNALS:  # they come to both: the trainer ends its step, and then this
        signal.signal(number, signal.SIG_IGN)
    os.environ |= {"WORLD_SIZE": "1", "SLURM_NTASKS": "1"}
    world = setup()  # a group of its own
    world.rank = rank  # gives it the seed of this rank
    policy = Policy(lm)
    engine = None
    method, given = "", ()
    while True:
        answer = None
        try:
            if engine is None:
                engine = make_engine(args, lm, world)
            elif method == "sync":
                engine.sync(policy)
            else:
                answer = getattr(engine, method)(*given)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = error
        pipe.send_bytes(pickle.dumps(answer))
        method, given = pickle.loads(pipe.recv_bytes())


def end_with_parent() -> None:
    """However the trainer ends, so does this process."""
    parent_process().join()
    os._exit(1)
