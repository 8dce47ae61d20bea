"""Jet-RL: MiniRL's objective, its passes on weights of 8 bits."""

from tests.loop.oracle import Tensor, centred, minirl, torch

FLAGS = {"grad_clip": 50.0}
advantages, objective = centred, minirl


def e4m3(x: Tensor) -> Tensor:
    """The nearest number with 3 bits behind the point and no exponent below -6; ties to even."""
    _, exponent = torch.frexp(x.abs().clamp(min=2.0**-6))  # |x| = m 2^exponent, 1/2 <= m < 1
    spacing = 2.0 ** (exponent - 4)
    return ((x / spacing).round() * spacing).clamp(-448, 448)


def used(name: str, w: Tensor) -> Tensor:
    """What the passes compute with: in the layers every row has the largest number, 448, where its
    largest weight is; norms and routers are left alone."""
    if ".layers." not in name or w.dim() < 2 or "gate.weight" in name:
        return w
    scale = w.abs().amax(-1, keepdim=True) / 448
    return e4m3(w / scale) * scale
