"""Noise that depends on (seed, choice, position, purpose, round, token id) and on nothing else.

The same noise perturbs the drafter's and the target's log-probabilities, so equal distributions draw equal
tokens, and the target's token is the same whatever was drafted (Daliri, Musco and Suresh 2024,
arXiv 2408.07978: drafter-invariant sampling by the Gumbel-max trick).

The recipe, the same bit for bit on every device (test vectors: tests/sampling/test_noise.py):

1. mix(x), on 64 bits: x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9; x = (x ^ x >> 27) * 0x94D049BB133111EB;
   x ^ x >> 31 (SplitMix64's finaliser).
2. A row's key: h = mix(seed); then for each of choice, position, purpose, round: h = mix(h + (value + 1) *
   0x9E3779B97F4A7C15).
3. A token's bits: mix(key + token * 0x9E3779B97F4A7C15), of which the upper 52 are k.
4. uniform = (k + 0.5) * 2^-52, exact in float64 and inside (0, 1). A key's own uniform takes token 0.
5. noise = -log(-log(uniform)), with log(x) in float64, each operation rounded to nearest, none fused:
   x = m * 2^e with m in [1, 2); where m > sqrt 2 (0x1.6a09e667f3bcdp+0): m = m * 0.5, e = e + 1;
   s = (m - 1) / (m + 1); z = s * s; sum = 1/23; for n = 21, 19, ..., 1: sum = sum * z + 1/n;
   log = e * 0x1.62e42fefa39efp-1 + (s * 2) * sum.
6. The token drawn is the argmax of float64(logit) / temperature + noise, the lowest id where equal.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.native import library

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, SplitMix64's increment
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_LN2 = float.fromhex("0x1.62e42fefa39efp-1")
_SQRT2 = float.fromhex("0x1.6a09e667f3bcdp+0")
MOST_TOKENS = 1 << 20
"""What the C draw has room for; larger vocabularies are drawn from by torch."""

_CANDIDATE_ROWS = 8
"""Rows whose hashes are held at once by the torch draw: 8 x 152k x 8 bytes is 10 MB a tensor."""


class Purpose(enum.IntEnum):
    """What a number is drawn for: none of them may know anything of another."""

    TARGET = 0  # the target's token, and under the coupled rule the drafter's guess at it
    DRAFT = 1  # a draft that is a draw of the drafter's own
    ACCEPT = 2  # the uniform of a ratio test
    RESIDUAL = 3  # the recovered or bonus token after ratio tests


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def row_key(seed: int, choice: int, position: int, purpose: Purpose = Purpose.TARGET, round: int = 0) -> int:
    """The 64-bit key of one draw, as a signed integer.

    `round` is the committed length at which the round began: a position that is drafted again draws anew.
    The coupled rule has one draw a position and leaves it 0.
    """
    key = _mix(seed & _MASK)
    for value in (choice, position, int(purpose), round):
        key = _mix((key + (value + 1) * _GOLDEN) & _MASK)
    return _signed(key)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch shifts int64 arithmetically."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _hash52(keys: Tensor, tokens: Tensor) -> Tensor:
    """Step 3: int64 in [0, 2^52), of the shape that keys and tokens broadcast to."""
    bits = keys + tokens * _signed(_GOLDEN)
    bits = (bits ^ _shifted(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_MIX_2)
    return _shifted(bits ^ _shifted(bits, 31), 12)


def _log(x: Tensor) -> Tensor:
    """Step 5's logarithm, elementwise; x: positive, normal float64."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    m = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).view(torch.float64)
    halved = m > _SQRT2
    m = torch.where(halved, m * 0.5, m)
    exponent = exponent + halved.long()
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = torch.full_like(z, 1.0 / 23.0)
    for n in range(21, 0, -2):
        total = total * z  # one operation a line: nothing may be fused
        total = total + 1.0 / n
    return exponent.to(torch.float64) * _LN2 + (s * 2.0) * total


def _noise(hashes: Tensor) -> Tensor:
    return -_log(-_log(_uniform(hashes)))


def _uniform(hashes: Tensor) -> Tensor:
    return (hashes.to(torch.float64) + 0.5) * 2.0**-52


def _key_tensor(keys: Sequence[int] | Tensor, device: torch.device | str) -> Tensor:
    return torch.as_tensor(keys, dtype=torch.int64, device=device)


def gumbel(keys: Sequence[int], tokens: Tensor) -> Tensor:
    """Noise for rows of token ids.

    keys: L row keys; tokens: (L, C) or (C,) int64 ids. Returns (L, C) float64 on the tokens' device.
    """
    return _noise(_hash52(_key_tensor(keys, tokens.device).unsqueeze(1), tokens))


def uniform(keys: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """One number in (0, 1) a key: (L,) float64."""
    return _uniform(_hash52(_key_tensor(keys, device), torch.zeros((), dtype=torch.int64, device=device)))


def draw(logits: Tensor, temperatures: Sequence[float], keys: Sequence[int] | Tensor) -> Tensor:
    """Step 6 for L rows: (L,) int64 on the logits' device.

    logits: (L, V) float32, -inf for tokens that cannot be drawn; temperatures above 0; L row keys. A row
    without any finite logit gives 0.
    """
    small = logits.shape[1] <= MOST_TOKENS
    native = library.load_draw() if small and logits.device.type == "cpu" else None
    if native is None:
        return draw_torch(logits, temperatures, keys)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    heat = torch.tensor(temperatures, dtype=torch.float64)
    key = _key_tensor(keys, "cpu").contiguous()
    chosen = torch.empty(len(keys), dtype=torch.int64)
    native.outrider_draw(
        ctypes.c_void_p(logits.data_ptr()),
        *logits.shape,
        logits.stride(0),
        heat.data_ptr(),
        key.data_ptr(),
        chosen.data_ptr(),
    )
    return chosen


def draw_torch(logits: Tensor, temperatures: Sequence[float], keys: Sequence[int] | Tensor) -> Tensor:
    """`draw` in torch's operations, for any device: the same tokens.

    Every token's bits are hashed, but only for those that can still win is the noise computed:
    noise <= -log(1 - uniform), which the leading zeros of 2^52 - 1 - k bound from above.
    """
    heat = torch.tensor(temperatures, dtype=torch.float64, device=logits.device).unsqueeze(1)
    key = _key_tensor(keys, logits.device).unsqueeze(1)
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for begin in range(0, len(logits), _CANDIDATE_ROWS):
        rows = slice(begin, begin + _CANDIDATE_ROWS)
        chosen[rows] = _draw_rows(logits[rows], heat[rows], key[rows])
    return chosen


def _draw_rows(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    rows, vocab = logits.shape
    tokens = torch.arange(vocab, device=logits.device)
    scaled = logits.double() / temperatures
    hashes = _hash52(keys, tokens)
    # frexp's mantissa is in [0.5, 1): its exponent is one above the floor of log2.
    exponent = torch.frexp(((1 << 52) - 1 - hashes).to(torch.float64) + 0.5).exponent
    most = scaled + (53 - exponent) * _LN2 + 1e-6
    likeliest = scaled.argmax(dim=1, keepdim=True)
    sure = scaled.gather(1, likeliest) + _noise(hashes.gather(1, likeliest))
    row, token = ((most >= sure) & torch.isfinite(scaled)).nonzero(as_tuple=True)
    value = scaled[row, token] + _noise(hashes[row, token])
    best = torch.full((rows,), -torch.inf, dtype=torch.float64, device=logits.device)
    best = best.scatter_reduce(0, row, value, "amax")
    wins = value == best[row]
    chosen = torch.full((rows,), vocab, dtype=torch.int64, device=logits.device)
    chosen = chosen.scatter_reduce(0, row[wins], token[wins], "amin")
    return torch.where(chosen == vocab, 0, chosen)
