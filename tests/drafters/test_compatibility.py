from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordLevel
from transformers import GPT2Tokenizer

from outrider.contracts import TargetInfo
from outrider.errors import ConfigError
from outrider.speculation import compatibility
from outrider.speculation.compatibility import (
    DrafterFit,
    check_device,
    check_drafter,
    check_memory,
    check_vocabulary,
    context_limit,
    free_memory,
    read_vocabulary,
    weights_bytes,
)

TOKENS = ("<unk>", "</s>", "the", "cat", "sat", "on", "mat")


def checkpoint(
    folder: Path,
    *,
    tokens: tuple[str, ...] | None = TOKENS,
    special: tuple[str, ...] = (),
    vocab_size: int = 16,
    generation: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A model folder with everything but a model: 16 x 4 weights in float32."""
    folder.mkdir()
    described = {"vocab_size": vocab_size, "max_position_embeddings": 64, "eos_token_id": 1, **config}
    (folder / "config.json").write_text(json.dumps(described))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if tokens is not None:
        tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
        tokenizer.add_special_tokens(list(special))
        tokenizer.save(str(folder / "tokenizer.json"))
    save_file({"embed.weight": torch.zeros(16, 4)}, folder / "model.safetensors")
    return folder


def target_info(folder: Path, *, max_model_len: int = 64) -> TargetInfo:
    return TargetInfo(
        model=str(folder), vocab_size=7, max_model_len=max_model_len, dtype="float32", device="cpu"
    )


def test_same_tokens_fit_without_a_note(tmp_path: Path) -> None:
    target, drafter = checkpoint(tmp_path / "target"), checkpoint(tmp_path / "drafter")
    fit = check_drafter(drafter, target_info(target), dtype="float32", device="cpu", cache_bytes=1)
    assert fit == DrafterFit(max_model_len=64, notes=())


def test_shuffled_tokenizer_of_the_same_size_is_refused_by_its_first_differing_id(tmp_path: Path) -> None:
    """Public report 29: a vocabulary of the same size and another order drafted garbage in silence."""
    shuffled = ("<unk>", "</s>", "the", "sat", "cat", "on", "mat")
    target, drafter = checkpoint(tmp_path / "target"), checkpoint(tmp_path / "drafter", tokens=shuffled)
    with pytest.raises(ConfigError, match=r"id 3 is 'sat' there and 'cat' here"):
        check_vocabulary(drafter, target)


def test_differing_special_token_is_a_differing_id(tmp_path: Path) -> None:
    """Public report 29."""
    target = checkpoint(tmp_path / "target", special=("<|user|>",))
    drafter = checkpoint(tmp_path / "drafter", special=("<|human|>",))
    with pytest.raises(ConfigError, match=r"id 7 is '<\|human\|>' there and '<\|user\|>' here"):
        check_vocabulary(drafter, target)


def test_hole_in_one_tokenizer_is_a_differing_id(tmp_path: Path) -> None:
    target, drafter = checkpoint(tmp_path / "target"), checkpoint(tmp_path / "drafter")
    file = drafter / "tokenizer.json"
    content = json.loads(file.read_text())
    del content["model"]["vocab"]["cat"]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"id 3 is no token there and 'cat' here"):
        check_vocabulary(drafter, target)


@pytest.mark.parametrize(("target_size", "drafter_size"), [(7, 16), (16, 7), (32, 8)])
def test_padded_embeddings_are_accepted(tmp_path: Path, target_size: int, drafter_size: int) -> None:
    target = checkpoint(tmp_path / "target", vocab_size=target_size)
    drafter = checkpoint(tmp_path / "drafter", vocab_size=drafter_size)
    assert check_vocabulary(drafter, target) == []


def test_tokens_the_drafter_never_learnt_are_accepted_where_it_has_embeddings(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", special=("<think>", "</think>"))
    (note,) = check_vocabulary(checkpoint(tmp_path / "padded", vocab_size=9), target)
    assert "2 of the target's tokens, from id 7 ('<think>')" in note
    with pytest.raises(ConfigError, match=r"embeddings for 8 token ids.*up to 8 \('</think>'\)"):
        check_vocabulary(checkpoint(tmp_path / "tight", vocab_size=8), target)


def test_tokens_the_target_does_not_have_are_ignored(tmp_path: Path) -> None:
    target, drafter = checkpoint(tmp_path / "target"), checkpoint(tmp_path / "drafter", special=("<tool>",))
    assert check_vocabulary(drafter, target) == []


def test_other_end_of_text_is_allowed_with_a_note(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", generation={"eos_token_id": [1, 6]})
    (note,) = check_vocabulary(checkpoint(tmp_path / "drafter"), target)
    assert "eos_token_id is 1 '</s>' to the drafter and 1 '</s>', 6 'mat' to the target" in note


def test_a_model_fits_itself_whatever_its_folder_lacks(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "both", tokens=None)
    assert check_vocabulary(folder, folder) == []


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    """Public report 30."""
    with_tokens, without = checkpoint(tmp_path / "with"), checkpoint(tmp_path / "without", tokens=None)
    for drafter, target in ((with_tokens, without), (without, with_tokens)):
        with pytest.raises(ConfigError, match=r"without has no tokenizer"):
            check_vocabulary(drafter, target)


def test_without_any_tokenizer_the_number_of_ids_must_agree(tmp_path: Path) -> None:
    """Public report 30."""
    target = checkpoint(tmp_path / "target", tokens=None)
    (note,) = check_vocabulary(checkpoint(tmp_path / "same", tokens=None), target)
    assert "only the number of token ids" in note
    with pytest.raises(ConfigError, match=r"has 15 token ids and target .* 16"):
        check_vocabulary(checkpoint(tmp_path / "other", tokens=None, vocab_size=15), target)


def test_unigram_lists_and_slow_tokenizers_are_read(tmp_path: Path) -> None:
    listed = tmp_path / "unigram"
    listed.mkdir()
    Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], 0)).save(str(listed / "tokenizer.json"))
    assert read_vocabulary(listed) == {0: "<unk>", 1: "a", 2: "b"}
    slow = tmp_path / "slow"
    slow.mkdir()
    tokenizer = GPT2Tokenizer(vocab={"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}, merges=[("a", "b")])
    tokenizer.save_pretrained(slow)
    fast = read_vocabulary(slow)
    (slow / "tokenizer.json").unlink()
    (slow / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}))
    (slow / "merges.txt").write_text("#version: 0.2\na b\n")
    assert read_vocabulary(slow) == fast == {0: "<|endoftext|>", 1: "a", 2: "b", 3: "ab"}


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing or damaged"):
        read_vocabulary(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no tokens"):
        read_vocabulary(folder)
    (folder / "model.safetensors").write_bytes(b"\x00")
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing or damaged"):
        weights_bytes(folder, "float32")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        weights_bytes(folder, "float32")


def test_shorter_drafter_is_allowed_with_its_limit(tmp_path: Path) -> None:
    """Public report 31."""
    target = checkpoint(tmp_path / "target", max_position_embeddings=256)
    drafter = checkpoint(tmp_path / "drafter")
    fit = check_drafter(
        drafter, target_info(target, max_model_len=256), dtype="float32", device="cpu", cache_bytes=1
    )
    assert fit.max_model_len == 64
    assert fit.notes[-1].startswith("the drafter takes 64 tokens, the target 256")


def test_context_limit_is_the_models_or_a_lower_wish(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    assert context_limit(folder, None) == 64
    assert context_limit(folder, 32) == 32
    with pytest.raises(ConfigError, match=r"max_model_len 65 is above the 64 positions"):
        context_limit(folder, 65)
    silent = checkpoint(tmp_path / "silent", max_position_embeddings=None)
    assert context_limit(silent, None) is None
    assert context_limit(silent, 65) == 65
    assert (
        context_limit(checkpoint(tmp_path / "gpt2", max_position_embeddings=None, n_positions=48), None) == 48
    )


def test_weights_are_counted_as_they_will_be_loaded(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    assert weights_bytes(folder, "float32") == 16 * 4 * 4
    assert weights_bytes(folder, "bfloat16") == 16 * 4 * 2
    assert weights_bytes(folder, "auto") == 16 * 4 * 4
    save_file({"embed.weight": torch.zeros(16, 4)}, folder / "consolidated.safetensors")
    assert weights_bytes(folder, "float32") == 16 * 4 * 4, "a second copy in another layout does not count"


def test_shards_of_an_index_are_summed(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    for name in ("one", "two"):
        save_file({name: torch.zeros(8)}, folder / f"{name}.safetensors")
    weight_map = {"one": "one.safetensors", "two": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert weights_bytes(folder, "float32") == 2 * 8 * 4


def test_what_does_not_fit_is_refused_with_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "model")
    monkeypatch.setattr(compatibility, "free_memory", lambda device: 1 << 30)
    check_memory(folder, dtype="float32", device="cpu", cache_bytes=(1 << 30) - 256)
    with pytest.raises(
        ConfigError, match=r"needs 3\.00 GiB on cpu .*KV cache 3\.00 GiB.* 1\.00 GiB are free"
    ):
        check_memory(folder, dtype="float32", device="cpu", cache_bytes=3 << 30)


def test_container_limit_lowers_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "_available_memory", lambda: 1000)
    for room, free in ((None, 1000), (400, 400), (5000, 1000)):
        monkeypatch.setattr(compatibility, "_container_room", lambda room=room: room)
        assert free_memory("cpu") == free
    monkeypatch.setattr(compatibility, "_available_memory", lambda: None)
    monkeypatch.setattr(compatibility, "_container_room", lambda: None)
    assert free_memory("cpu") is None


def test_container_room_is_the_limit_less_what_cannot_be_reclaimed(tmp_path: Path) -> None:
    def room(limit: str) -> int | None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("700\n")
        (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 200\n")
        return compatibility._container_room(tmp_path)

    assert room("1000") == 500
    assert room("100") == 0
    assert room("max") is None
    assert compatibility._container_room(tmp_path / "no cgroup v2") is None


@pytest.mark.parametrize(
    ("dtype", "device", "named"),
    [("int3", "cpu", "dtype 'int3'"), ("float32", "tpu", "device 'tpu'"), ("float32", "cuda:x", "'cuda:x'")],
)
def test_unknown_dtype_or_device_is_refused(dtype: str, device: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_device(dtype=dtype, device=device)


def test_absent_cuda_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_device(dtype="auto", device="cuda")
    with pytest.raises(ConfigError, match=r"'cuda:1' is not here.*sees 1 CUDA devices"):
        check_device(dtype="auto", device="cuda:1")
