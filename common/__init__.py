"""What all nine algorithm files share, and no more. Import it before torch: see what it sets below."""

import os
import signal
import sys

# OpenMP reads these once, when torch loads. Idle threads must sleep, not spin: on a busy machine spinning makes a tiny
# model 10 to 30 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _interrupted(kind: type, error: BaseException | None, trace: object, usual: object = sys.excepthook) -> None:
    """Ctrl-C during the imports: one line, not a traceback through them, also where a library wrapped the exception."""
    cause = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    if cause is None or sys.flags.interactive or hasattr(sys, "ps1"):
        return usual(kind, error, trace)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("interrupted", file=sys.stderr, flush=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)  # the shell sees what ended us


sys.excepthook = _interrupted
