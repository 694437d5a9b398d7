"""Builds `kernels.c` and `draw.c` for this machine on first use and declares their functions.

The object is cached beside the models, named by a digest of source, flags and processor, so a changed source
or another machine builds its own, and a machine that lost its compiler keeps what it has. Where the cache
cannot be used a process builds for itself. Without a C compiler there is no library, and the engine runs on
torch kernels: slower, same tokens up to rounding.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal, TypeAlias

from outrider import models

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")
Element: TypeAlias = Literal["bfloat16", "float32"]
ELEMENT_FLAGS: dict[Element, tuple[str, ...]] = {"bfloat16": (), "float32": ("-DFLOAT32",)}
"""kernels.c is compiled once for each type of weights, activations and cache."""

DRAW_SOURCE = Path(__file__).with_name("draw.c")
DRAW_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
"""No fused multiply-adds: the noise's recipe says which roundings there are."""

BUILD_TIMEOUT_S = 120
DIGEST_BYTES = hashlib.sha256().digest_size

logger = logging.getLogger(__name__)


class BuildError(Exception):
    """The kernels cannot be built or loaded here; the message says why."""


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
def load(element: Element) -> ctypes.CDLL:
    """The library for this type, built if need be. Raises `BuildError`.

    OUTRIDER_AMX=0 in the environment keeps it to portable vectors, as on processors without AMX.
    """
    library = _compiled(SOURCE, FLAGS + ELEMENT_FLAGS[element])
    try:
        _declare(library)
    except AttributeError as error:  # whatever CC named, it was no C compiler
        raise BuildError(f"the library lacks a function: {error}") from error
    library.outrider_native_init(int(os.environ.get("OUTRIDER_AMX", "1") != "0"))
    return library


@functools.cache
def load_draw() -> ctypes.CDLL | None:
    """The library of `draw.c`; None where it cannot be built: torch draws the same tokens, more slowly."""
    try:
        library = _compiled(DRAW_SOURCE, DRAW_FLAGS)
        library.outrider_draw.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 3]
        library.outrider_draw.restype = None
    except (BuildError, AttributeError) as error:
        logger.warning("sampled tokens are drawn by torch, which is slower than C: %s", error)
        return None
    return library


def _compiled(source: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    cached = _cached_path(source, flags)
    return _opened(cached) or _built(source, flags, cached)


def _declare(library: ctypes.CDLL) -> None:
    library.outrider_native_init.argtypes = [ctypes.c_int]
    library.outrider_native_init.restype = ctypes.c_int
    library.outrider_pack.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.outrider_pack.restype = None
    library.outrider_forward.argtypes = [ctypes.c_void_p] * 5
    library.outrider_forward.restype = None


def _cached_path(source: Path, flags: tuple[str, ...]) -> Path | None:
    """Where the library of this source and processor is kept; None where nobody says what home is."""
    parts = (source.read_text(encoding="utf-8"), *flags, _processor())
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    try:
        return models.cache_dir() / "kernels" / f"{name}.so"
    except RuntimeError:  # a container's user without a name
        return None


def _opened(cached: Path | None) -> ctypes.CDLL | None:
    """The library of the cache; None when it is not there, damaged, or cannot be loaded from there."""
    if cached is None:
        return None
    try:
        content = cached.read_bytes()
        # Loading half a file may kill the process instead of raising.
        if hashlib.sha256(content[:-DIGEST_BYTES]).digest() != content[-DIGEST_BYTES:]:
            logger.info("%s is damaged and is built anew", cached)
            return None
        return ctypes.CDLL(str(cached))
    except OSError as error:
        logger.info("%s cannot be loaded: %s", cached, error)
        return None


def _built(source: Path, flags: tuple[str, ...], cached: Path | None) -> ctypes.CDLL:
    """Compile, keep the object in the cache where it can be written, and load it from where it may run."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BuildError("no C compiler was found (install gcc, or set CC)")
    try:
        with tempfile.TemporaryDirectory(prefix="outrider-") as scratch:
            built = Path(scratch) / "kernels.so"
            _run([compiler, *flags, "-o", str(built), str(source), "-lm"])
            if not built.is_file():
                raise BuildError(f"{compiler} made no library")
            _keep(built, cached)
            # The cache first: a temporary folder is more often mounted noexec. What is loaded stays mapped.
            return _opened(cached) or ctypes.CDLL(str(built))
    except OSError as error:
        raise BuildError(f"what {compiler} made cannot be loaded: {error}") from error


def _keep(built: Path, cached: Path | None) -> None:
    """Copy the object into the cache, its digest behind it. Where that fails, the next start builds again."""
    if cached is None:
        return
    content = built.read_bytes()
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
            whole = Path(scratch) / cached.name
            whole.write_bytes(content + hashlib.sha256(content).digest())
            whole.replace(cached)  # whole or not at all, also when two workers build at once
    except OSError as error:
        logger.warning("the C kernels are built at every start, %s cannot be written: %s", cached, error)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=BUILD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-400:]}")


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
