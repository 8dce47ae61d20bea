"""What all nine algorithm files share, and no more. Import it before torch: see what it sets
below."""

import os
import signal
import sys

# OpenMP reads these once, when torch loads. Idle threads must sleep, not spin: on a busy machine
# spinning makes a tiny model 10 to 30 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _end(number: int, frame: object) -> None:
    """Ctrl-C while modules and models load: one line, and the end that the shell expects.

    An exception would come out of some import as a page of traceback, or as another one, or not at
    all.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


# Only where an algorithm file is the program: notebooks, pytest and other scripts keep their own
# way.
_root, _program = (
    os.path.dirname(os.path.dirname(__file__)),
    getattr(sys.modules["__main__"], "__file__", ""),
)
_ours = os.path.dirname(os.path.abspath(_program or "")) in (_root, os.path.join(_root, "variants"))
if _program and _ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)
