"""From arguments to a running engine: finds the checkpoint, picks the implementation, sizes the cache."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from outrider import models
from outrider.config import EngineArgs
from outrider.contracts import TargetInfo
from outrider.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from outrider.engine.engine import Engine
    from outrider.engine.model import CausalModel, Numerics

logger = logging.getLogger(__name__)

TORCH_DTYPES = ("float32", "bfloat16", "float16")


def target_info(args: EngineArgs) -> TargetInfo:
    """What the target's files say, without reading its weights.

    Whether the device is in this process is not asked: a router names the drafters' device and has none.
    """
    folder = models.resolve(args.model)
    config = text_config(folder)
    return TargetInfo(
        model=str(folder),
        vocab_size=vocabulary_size(folder, config),
        max_model_len=context_length(args, config),
        dtype=_dtype_name(args.dtype, config),
        device=_device_name(args.device),
        parameters=parameter_count(folder),
    )


def load_engine(args: EngineArgs) -> Engine:
    """The target model behind an `Engine`, with its KV cache allocated. Raises `ConfigError`."""
    import torch

    from outrider.engine.engine import Engine
    from outrider.engine.native_model import NativeModel

    torch.set_num_threads(args.cpu_threads)
    target = target_info(args)
    model = load_model(
        Path(target.model),
        dtype=target.dtype,
        device=target.device,
        block_size=args.block_size,
        cpu_kernels=args.cpu_kernels,
        numerics=args.numerics,
    )
    if args.cpu_threads > 1 and isinstance(model, NativeModel):
        logger.warning("cpu_threads is %d, and the C kernels use one thread", args.cpu_threads)
    num_blocks = args.num_kv_blocks or args.kv_cache_memory_bytes // model.bytes_per_block()
    room = num_blocks * args.block_size
    if room < target.max_model_len:
        raise ConfigError(
            f"the KV cache holds {room} tokens and max_model_len is {target.max_model_len}: one sequence "
            "must always fit; raise kv_cache_memory_bytes (or num_kv_blocks) or lower max_model_len"
        )
    from outrider.grammar import GrammarCompiler

    return Engine(
        model,
        grammars=GrammarCompiler(target.model, vocab_size=target.vocab_size),
        num_blocks=num_blocks,
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        prefix_caching=args.enable_prefix_caching,
    )


def load_model(
    folder: Path,
    *,
    dtype: str,
    device: str,
    block_size: int,
    cpu_kernels: str,
    numerics: Literal["auto", "strict", "fast"] = "auto",
) -> CausalModel:
    """The fastest implementation that can run this checkpoint here. Raises `ConfigError`.

    cpu_kernels: "native" insists on the C kernels, "torch" refuses them, "auto" takes them where they fit
    and says so where they do not.
    numerics: "auto" is strict where that costs (nearly) nothing: the C kernels are strict as they are, also
    where fast was asked for. Fixed tiles in torch cost more than a tenth of a step (docs/benchmarks.md), and
    those on CUDA were not measured, so there it is fast.
    """
    import torch

    from outrider.engine.transformers_model import TransformersModel

    _check_device(device)
    config = text_config(folder)
    torch_dtype: torch.dtype = getattr(torch, _dtype_name(dtype, config))
    if cpu_kernels != "torch" and device == "cpu":
        from outrider.engine import native_model

        reason = native_model.unsupported(folder, torch_dtype, block_size)
        if reason is None:
            logger.info("%s runs with numerics: strict, as the C kernels always do", folder)
            return native_model.NativeModel(folder, dtype=torch_dtype, block_size=block_size)
        if cpu_kernels == "native":
            raise ConfigError(f"cpu_kernels: native cannot run {folder}: {reason}; use auto or torch")
        logger.warning("%s runs on torch's kernels, which are slower than the C kernels: %s", folder, reason)
    chosen: Numerics = "strict" if numerics == "strict" else "fast"
    why = "as asked" if numerics != "auto" else _why_fast(device, config)
    logger.info("%s runs with numerics: %s, %s", folder, chosen, why)
    return TransformersModel(
        folder,
        dtype=torch_dtype,
        device=torch.device(device),
        block_size=block_size,
        numerics=chosen,
    )


def _why_fast(device: str, config: dict[str, Any]) -> str:
    """Why `numerics: auto` is fast without the C kernels."""
    from outrider.engine.strict import why_not

    if reason := why_not(SimpleNamespace(**config)):
        return f"because {reason}"
    if device == "cpu":
        return "because strict costs more than a tenth of a step without the C kernels"
    return "because what strict costs on CUDA was not measured"


def text_config(folder: Path) -> dict[str, Any]:
    """config.json, or its text part for models that have several."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return {**config, **config.get("text_config", {})}


def parameter_count(folder: Path) -> int:
    """Weights that a token passes through, from the headers of the checkpoint's files; 0 where it has none.

    An input embedding that is only looked up is left out; where it is the output head too, it counts once.
    """
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a file handle, not a dict
                sizes[name] = math.prod(file.get_slice(name).get_shape())
    heads = [name for name in sizes if name.endswith("lm_head.weight")]
    lookups = [name for name in sizes if name.endswith(("embed_tokens.weight", "wte.weight"))]
    return sum(sizes.values()) - (sum(sizes[name] for name in lookups) if heads else 0)


def context_length(args: EngineArgs, config: dict[str, Any]) -> int:
    """The model's own limit, or less where asked."""
    own = config.get("max_position_embeddings") or config.get("n_positions")
    if own is None:
        if args.max_model_len is None:
            raise ConfigError(f"{args.model} does not say its context length: set max_model_len")
        return args.max_model_len
    if args.max_model_len is not None and args.max_model_len > own:
        raise ConfigError(f"max_model_len {args.max_model_len} is above the model's own {own}: lower it")
    return min(args.max_model_len or own, int(own))


def vocabulary_size(folder: Path, config: dict[str, Any]) -> int:
    """Ids that mean something: the tokenizer's where the model's embedding is padded beyond it."""
    padded = int(config["vocab_size"])
    path = folder / "tokenizer.json"
    if not path.exists():
        return padded
    from tokenizers import Tokenizer

    return min(padded, int(Tokenizer.from_file(str(path)).get_vocab_size(with_added_tokens=True)))


def _dtype_name(asked: str, config: dict[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32" if asked == "auto" else asked
    if name not in TORCH_DTYPES:
        raise ConfigError(f"dtype {name!r} is not one of {', '.join(TORCH_DTYPES)}: set dtype")
    return str(name)


def _device_name(asked: str) -> str:
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked


def _check_device(device: str) -> None:
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was asked for and torch sees no CUDA device: use cpu or auto")
