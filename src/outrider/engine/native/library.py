"""Builds `kernels.c` for this machine on first use and declares its functions.

The object is cached beside the models, named by a digest of source, compiler, flags and processor, so a
changed source or another machine builds its own. Without a C compiler there is no library, and the engine
runs on torch kernels: slower, same tokens up to rounding.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from outrider import models

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")
BUILD_TIMEOUT_S = 120


class BuildError(Exception):
    """The kernels cannot be built here; the message says why."""


class Model(ctypes.Structure):
    """`Model` of kernels.c: sizes and what all layers share."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *((name, ctypes.c_int64) for name in ("vocab", "layers", "block_size")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("tied", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("embedding", "final_norm", "head", "cosines", "sines")),
    )


class Layer(ctypes.Structure):
    """`Layer` of kernels.c: pointers into the arena and the cache pools."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("qkv", "qkv_bias", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("window", ctypes.c_int64),
    )


class Batch(ctypes.Structure):
    """`Batch` of kernels.c: pointers to int64 arrays."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "spans", "logit_rows")),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "wanted")),
        *((name, ctypes.c_void_p) for name in ("starts", "counts", "lengths", "tables", "blocks")),
    )


@functools.cache
def load() -> ctypes.CDLL:
    """The library, built if need be. Raises `BuildError`.

    OUTRIDER_AMX=0 in the environment keeps it to portable vectors, as on processors without AMX.
    """
    library = ctypes.CDLL(str(_built()))
    library.outrider_native_init.argtypes = [ctypes.c_int]
    library.outrider_native_init.restype = ctypes.c_int
    library.outrider_pack.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.outrider_pack.restype = None
    library.outrider_forward.argtypes = [ctypes.c_void_p] * 5
    library.outrider_forward.restype = None
    library.outrider_native_init(int(os.environ.get("OUTRIDER_AMX", "1") != "0"))
    return library


def _built() -> Path:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BuildError("no C compiler was found (install gcc, or set CC)")
    version = _run([compiler, "--version"]).splitlines()[0]
    name = hashlib.sha256(
        "\0".join([SOURCE.read_text(encoding="utf-8"), version, *FLAGS, _processor()]).encode()
    ).hexdigest()[:24]
    folder = models.cache_dir() / "kernels"
    target = folder / f"{name}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / "kernels.so"
            _run([compiler, *FLAGS, "-o", str(built), str(SOURCE), "-lm"])
            built.replace(target)  # whole or not at all, also when two workers build at once
    return target


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-400:]}")
    return done.stdout


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
