"""80/20: only the mini-batch's tokens of high entropy are trained on. (Clip-Cov and KL-Cov have
checks/entropy20.py and tests/algorithms/test_exactness.py.)"""

import numpy

from tests.loop.oracle import Batch, Tensor, surrogate, token_mean, tokens_of

FLAGS = {"grad_clip": 8.0}
OFF = {"top_entropy": 1.0}


def objective(b: Batch) -> Tensor:
    height = numpy.quantile(b.entropy[b.mask > 0].numpy(), 1 - b.args["top_entropy"])
    forks = b.mask * (b.entropy >= height - 1e-5)
    return token_mean(surrogate(b), tokens_of(b, forks))
