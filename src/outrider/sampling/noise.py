"""Gumbel noise that depends on (seed, position, token id) and on nothing else.

The same noise perturbs the drafter's and the target's log-probabilities, so equal distributions draw equal
tokens, and the target's token is the same whatever was drafted (Daliri, Musco and Suresh 2024,
arXiv 2408.07978: drafter-invariant sampling by the Gumbel-max trick).

Recipe: a row key is made from (seed, position) with two SplitMix64 finalisers in Python integers; each
token's 64 bits are the finaliser of key + token * golden ratio; the upper 53 bits, centred, are a uniform
in (0, 1); the noise is -log(-log(uniform)) in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, SplitMix64's increment
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _finalise(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def row_key(seed: int, position: int) -> int:
    """The 64-bit key of one sampling position, as a signed integer."""
    return _signed(_finalise((_finalise(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK))


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch shifts int64 arithmetically."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def gumbel(keys: Sequence[int], tokens: Tensor) -> Tensor:
    """Noise for rows of token ids.

    keys: L row keys; tokens: (L, C) or (C,) int64 ids. Returns (L, C) float64 on the tokens' device.
    """
    key = torch.tensor(keys, dtype=torch.int64, device=tokens.device).unsqueeze(1)
    bits = key + tokens * _signed(_GOLDEN)
    bits = (bits ^ _shifted(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_MIX_2)
    bits = bits ^ _shifted(bits, 31)
    uniform = (_shifted(bits, 11).to(torch.float64) + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))
