"""What all nine algorithm files share, and no more. Import it before torch: see the two settings below."""

import os

# OpenMP reads these once, when torch loads. Idle threads must sleep, not spin: on a busy machine spinning makes a tiny
# model 10 to 30 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
