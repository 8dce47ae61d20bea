"""An engine in a process of its own, that samples while the trainer updates."""

import copy
import os
import pickle
import signal
import threading
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection

import torch
from transformers import PreTrainedModel as Model

from common.batch import Rollout
from common.cli import Flags, RunStopped, in_one_line
from common.clock import timed
from common.distributed import TIMEOUT, World, broadcast_module, full_parameters, setup
from common.logprobs import Policy
from common.rollout import make_engine


class Overlapped:
    """The engine that `--rollout` names, in a process of its own on this rank.

    Weights cross in memory that both processes share.
    """

    def __init__(self, args: Flags, lm: Model, world: World):
        lm = broadcast_module(copy.deepcopy(lm), world).requires_grad_(False).share_memory()
        self.policy = Policy(lm)
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        given = (theirs, args, lm, world.rank)
        self.process = context.Process(target=serve, args=given, daemon=True)
        self.process.start()
        theirs.close()
        world.closing.callback(self._close)
        self.asked = 1
        self._answer()

    def _close(self) -> None:
        self.process.kill()
        self.process.join()

    def _ask(self, method: str, *given: object) -> None:
        self.asked += 1
        try:
            self.pipe.send_bytes(pickle.dumps((method, given)))
        except OSError:
            self._ended()

    def _answer(self) -> object:
        while self.asked:
            if not self.pipe.poll(TIMEOUT.total_seconds()):
                raise RunStopped("the sampler's process gave no answer")
            try:
                answer = pickle.loads(self.pipe.recv_bytes())
            except (EOFError, OSError):
                self._ended()
            self.asked -= 1
            if isinstance(answer, Exception):
                raise answer
        return answer

    def _ended(self) -> None:
        self.process.join(10)
        raise RunStopped(f"the sampler's process ended with exit code {self.process.exitcode}") from None

    @timed("sync")
    def sync(self, policy: torch.nn.Module) -> None:
        if self.asked:
            self._answer()
        weights = self.policy.lm.state_dict()
        for name, full in full_parameters(policy):
            weights[name].copy_(full)
        self._ask("sync")

    def state_dict(self) -> dict:
        self._ask("state_dict")
        return self._answer()

    def load_state_dict(self, state: dict) -> None:
        self._ask("load_state_dict", state)

    def submit(self, *given: object) -> None:
        self._ask("generate", *given)

    @timed("rollout")
    def take(self) -> Rollout:
        return self._answer()

    def generate(self, *given: object) -> Rollout:
        self.submit(*given)
        return self.take()


def serve(pipe: Connection, args: Flags, lm: Model, rank: int) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    world = setup()
    world.rank = rank
    policy = Policy(lm)
    engine = None
    method, given = "built", ()
    while True:
        try:
            if method == "built":
                engine = make_engine(args, lm, world)
                answer = None
            elif method == "sync":
                answer = engine.sync(policy)
            else:
                answer = getattr(engine, method)(*given)
        except Exception as error:
            answer = error
        pipe.send_bytes(pickle.dumps(answer))
        method, given = pickle.loads(pipe.recv_bytes())


def end_with_parent() -> None:
    parent_process().join()
    os._exit(1)
