"""Does a drafter's checkpoint fit the target? Answered from the files, before any weights are loaded.

Only token ids travel between the two models, so what must agree is which token an id stands for; how text is
cut into tokens is the target's affair alone. What cannot work raises `ConfigError`; what works less well than
it might comes back as notes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from outrider.contracts import TargetInfo
from outrider.engine.loading import text_config
from outrider.errors import ConfigError

Vocabulary: TypeAlias = Mapping[int, str]

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")
_TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class DrafterFit:
    """What is allowed, and what it costs."""

    max_model_len: int | None  # tokens after which the drafter is skipped; None: its files do not say
    notes: tuple[str, ...]  # each a sentence for the log


def check_drafter(
    folder: Path,
    target: TargetInfo,
    *,
    max_model_len: int | None = None,
    dtype: str,
    device: str,
    cache_bytes: int,
) -> DrafterFit:
    """Check a drafter model against its target: device, vocabulary, context, memory, in that order.

    `max_model_len` is what `speculative_config` asks for; `cache_bytes` the drafter's KV cache.
    """
    check_device(dtype=dtype, device=device)
    notes = check_vocabulary(folder, Path(target.model))
    context = context_limit(folder, max_model_len)
    if context is not None and context < target.max_model_len:
        notes.append(
            f"the drafter takes {context} tokens, the target {target.max_model_len}: a request beyond "
            f"{context} tokens goes on without drafts"
        )
    check_memory(folder, dtype=dtype, device=device, cache_bytes=cache_bytes)
    return DrafterFit(max_model_len=context, notes=tuple(notes))


def check_device(*, dtype: str, device: str) -> None:
    """Refuse a dtype nobody knows and a device that is not there."""
    if dtype != "auto" and dtype not in _DTYPE_BYTES:
        raise ConfigError(f"drafter dtype {dtype!r} is unknown; known: auto, {', '.join(_DTYPE_BYTES)}")
    if device == "cpu":
        return
    kind, _, index = device.partition(":")
    if kind != "cuda" or (":" in device and not index.isdecimal()):
        raise ConfigError(f"drafter device {device!r} is unknown; known: cpu, cuda, cuda:N")
    import torch

    if torch.cuda.device_count() <= int(index or 0):
        raise ConfigError(
            f"drafter device {device!r} is not here: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices in this process; give the drafter num_gpus, or say cpu"
        )


def check_vocabulary(drafter: Path, target: Path) -> list[str]:
    """Refuse where an id means different tokens to the two; return notes on what differs harmlessly.

    Ids past the end of the smaller tokenizer are padding to that side: real families grow that way, and a
    drafter merely never guesses them. But the drafter must have an embedding for everything it may be fed.
    """
    if drafter.resolve() == target.resolve():
        return []
    drafter_vocabulary, target_vocabulary = read_vocabulary(drafter), read_vocabulary(target)
    embeddings = _embeddings(drafter)
    if target_vocabulary is None and drafter_vocabulary is None:
        target_embeddings = _embeddings(target)
        if embeddings != target_embeddings:
            raise ConfigError(
                f"drafter {drafter} has {embeddings} token ids and target {target} {target_embeddings}, and "
                "neither has a tokenizer that would say more: choose a drafter of the same vocabulary"
            )
        return ["neither model has a tokenizer: only the number of token ids was compared"]
    if target_vocabulary is None or drafter_vocabulary is None:
        raise ConfigError(
            f"{target if target_vocabulary is None else drafter} has no tokenizer (tokenizer.json), so "
            "nothing says that its token ids mean the same as the other model's: put the tokenizer there"
        )
    differing = first_difference(target_vocabulary, drafter_vocabulary)
    if differing is not None:
        raise ConfigError(
            f"drafter {drafter} has another tokenizer than target {target}: id {differing} is "
            f"{_spell(drafter_vocabulary, differing)} there and {_spell(target_vocabulary, differing)} here; "
            "choose a drafter of the target's family, or method ngram"
        )
    largest = max(target_vocabulary)
    if embeddings <= largest:
        raise ConfigError(
            f"drafter {drafter} has embeddings for {embeddings} token ids, and target {target} uses ids up "
            f"to {largest} ({_spell(target_vocabulary, largest)}): choose a drafter of the target's family"
        )
    notes = []
    unknown = range(max(drafter_vocabulary) + 1, largest + 1)
    if unknown:
        notes.append(
            f"{len(unknown)} of the target's tokens, from id {unknown[0]} "
            f"({_spell(target_vocabulary, unknown[0])}), are unknown to the drafter's tokenizer: drafts "
            "around them will be poor"
        )
    for key in ("bos_token_id", "eos_token_id"):
        ours, theirs = _special_ids(drafter, key), _special_ids(target, key)
        if ours != theirs:
            notes.append(
                f"{key} is {_spell_all(drafter_vocabulary, ours)} to the drafter and "
                f"{_spell_all(target_vocabulary, theirs)} to the target: drafts around it will be poor"
            )
    return notes


def read_vocabulary(folder: Path) -> dict[int, str] | None:
    """Which token each id stands for, added and special tokens included; None without a tokenizer."""
    file = folder / "tokenizer.json"
    if file.is_file():
        content = _read_json(file)
        listed = content.get("model", {}).get("vocab", {})
        # Unigram lists [token, score] in the order of the ids; the other models map tokens to ids.
        if isinstance(listed, list):
            tokens = {number: str(entry[0]) for number, entry in enumerate(listed)}
        else:
            tokens = {number: token for token, number in listed.items()}
        tokens.update({added["id"]: added["content"] for added in content.get("added_tokens", ())})
    elif any((folder / name).is_file() for name in _TOKENIZER_FILES):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"the tokenizer in {folder} cannot be read: {error}") from error
        tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    else:
        return None
    if not tokens:
        raise ConfigError(f"the tokenizer in {folder} has no tokens: it is damaged, fetch it again")
    return tokens


def first_difference(target: Vocabulary, drafter: Vocabulary) -> int | None:
    """The lowest id that means different tokens, or means one to one side only; None if there is none.

    Ids past the end of the smaller vocabulary do not count.
    """
    shared = min(max(target), max(drafter)) + 1
    return next((number for number in range(shared) if target.get(number) != drafter.get(number)), None)


def context_limit(folder: Path, max_model_len: int | None) -> int | None:
    """Positions the drafter can take: its own or the lower `max_model_len`; None if nobody says."""
    config = text_config(folder)
    own = next((config[key] for key in _CONTEXT_KEYS if config.get(key) is not None), None)
    if own is None or max_model_len is None:
        return max_model_len if own is None else int(own)
    if max_model_len > own:
        raise ConfigError(
            f"speculative_config.max_model_len {max_model_len} is above the {own} positions of drafter "
            f"{folder}: lower or remove it"
        )
    return max_model_len


def check_memory(folder: Path, *, dtype: str, device: str, cache_bytes: int) -> None:
    """Refuse weights and KV cache that do not fit into what is free on the device now.

    Not covered: activations (small beside the two), and memory that others take later.
    """
    free = free_memory(device)
    weights = weights_bytes(folder, dtype)
    if free is not None and weights + cache_bytes > free:
        raise ConfigError(
            f"drafter {folder} needs {_gib(weights + cache_bytes)} on {device} (weights {_gib(weights)}, KV "
            f"cache {_gib(cache_bytes)}), but {_gib(free)} are free: lower kv_cache_memory_bytes in "
            "speculative_config.extra, or choose a smaller model or another device"
        )


def weights_bytes(folder: Path, dtype: str) -> int:
    """Bytes of the weights once loaded as `dtype`; as stored for "auto"."""
    total = 0
    for file in _weight_files(folder):
        if file.suffix == ".safetensors":
            for entry in _safetensors_header(file).values():
                start, end = entry["data_offsets"]
                total += end - start if dtype == "auto" else math.prod(entry["shape"]) * _DTYPE_BYTES[dtype]
        else:
            total += file.stat().st_size
    return total


def free_memory(device: str) -> int | None:
    """Bytes that can be taken on a device now; None where the system does not say.

    On a CPU the lower of the machine's available memory and what a container's limit (cgroup v2) leaves.
    """
    if device != "cpu":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    rooms = [room for room in (_available_memory(), _container_room()) if room is not None]
    return min(rooms, default=None)


def _available_memory() -> int | None:
    available = _read_counters(Path("/proc/meminfo")).get("MemAvailable")
    return None if available is None else available * 1024


def _container_room(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    reclaimable = _read_counters(cgroup / "memory.stat").get("inactive_file", 0)  # page cache
    return max(0, int(limit) - used + reclaimable)


def _read_counters(file: Path) -> dict[str, int]:
    """Lines of a name and a number, as the kernel writes them; empty where there is no such file."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    fields = [line.replace(":", " ").split() for line in lines]
    return {line[0]: int(line[1]) for line in fields if len(line) >= 2 and line[1].isdecimal()}


def _weight_files(folder: Path) -> list[Path]:
    """The files that make up one copy of the weights: some folders hold a second one in another format."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
    for pattern in ("model.safetensors", "*.safetensors", "pytorch_model*.bin"):
        if files := sorted(folder.glob(pattern)):
            return files
    raise ConfigError(f"drafter {folder} has no weights (model.safetensors): fetch the whole checkpoint")


def _safetensors_header(file: Path) -> dict[str, Any]:
    """Name to dtype, shape and data_offsets: 8 bytes of length, then JSON (the format's own page)."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(min(length, 100 << 20)))  # the format's own bound
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{file} is missing or damaged ({error}): fetch it again") from error
    header.pop("__metadata__", None)
    return header


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is missing or damaged ({error}): fetch the checkpoint again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no JSON object: fetch the checkpoint again")
    return content


def _embeddings(folder: Path) -> int:
    """Ids the model has a row for: the tokenizer's, and padding after them."""
    try:
        return int(text_config(folder)["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / 'config.json'} has no usable vocab_size ({error}): fetch it again"
        ) from error


def _special_ids(folder: Path, key: str) -> frozenset[int]:
    """A special token's ids: generation_config.json speaks first, as it does in transformers."""
    generation = folder / "generation_config.json"
    value = _read_json(generation).get(key) if generation.is_file() else None
    if value is None:
        value = text_config(folder).get(key)
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


def _spell(vocabulary: Vocabulary, number: int) -> str:
    return repr(vocabulary[number]) if number in vocabulary else "no token"


def _spell_all(vocabulary: Vocabulary, numbers: frozenset[int]) -> str:
    return ", ".join(f"{number} {_spell(vocabulary, number)}" for number in sorted(numbers)) or "unset"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
