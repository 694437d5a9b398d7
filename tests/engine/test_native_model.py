"""The C kernels against transformers' own forward, and against themselves in other company."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from outrider.engine.loading import load_model
from outrider.engine.model import Batch, Span
from outrider.engine.native import library
from outrider.engine.native_model import NativeModel, unsupported
from outrider.errors import ConfigError

BLOCK = 32
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 192,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 600,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=40),
    "qwen2-biases": Qwen2Config(**SHAPE),
    "qwen3-norms": Qwen3Config(**SHAPE),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(CONFIGS[name]).to(torch.bfloat16)
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if parameter_name.endswith(("norm.weight", "bias")):
                        parameter += torch.randn_like(parameter) * 0.2  # a forgotten one must show
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return folder


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def forward(model: NativeModel, parts: Sequence[tuple[list[int], int, list[int]]]) -> Tensor:
    """All logits of sequences given as (new tokens, cached length, blocks)."""
    flat: list[int] = []
    positions: list[int] = []
    spans = []
    for new, cached, blocks in parts:
        length = cached + len(new)
        spans.append(Span(len(flat), len(new), length, tuple(blocks[: -(-length // BLOCK)])))
        flat += new
        positions += range(cached, length)
    rows = torch.arange(len(flat))
    return model.forward(Batch(torch.tensor(flat), torch.tensor(positions), tuple(spans), rows))


def loaded(folder: Path, num_blocks: int = 64) -> NativeModel:
    model = NativeModel(folder, block_size=BLOCK)
    model.allocate(num_blocks)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_as_close_to_float32_as_transformers_own_bfloat16(
    folder_of: Callable[[str], Path], name: str
) -> None:
    folder, ids = folder_of(name), tokens(150)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        truth = exact(torch.tensor([ids])).logits[0]
        theirs = (rounded(torch.tensor([ids])).logits[0].float() - truth).abs()
    ours = (forward(loaded(folder), [(ids, 0, list(range(5)))]) - truth).abs()
    assert ours.mean() <= 1.1 * theirs.mean()
    assert ours.max() <= 2.0 * theirs.max()


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3-norms"])
def test_a_row_is_bitwise_the_same_in_any_company(folder_of: Callable[[str], Path], name: str) -> None:
    model, ids, other = loaded(folder_of(name)), tokens(300), tokens(45, seed=1)
    whole = forward(model, [(ids, 0, list(range(10)))])
    blocks, beside = [40, 31, 52, 33, 44, 35, 36, 37, 38, 39], [20, 21]
    pieces = [forward(model, [(ids[:150], 0, blocks)])]
    for at in range(150, 175):
        pieces.append(forward(model, [(ids[at : at + 1], at, blocks)]))
    pieces.append(forward(model, [(other[:40], 0, beside), (ids[175:180], 175, blocks)])[40:])
    rejected = [(token + 1) % 300 for token in ids[180:188]]
    forward(model, [(rejected, 180, blocks)])  # drafts that are written over by what follows
    pieces.append(forward(model, [(ids[180:260], 180, blocks), (other[40:], 40, beside)])[:80])
    pieces.append(forward(model, [(ids[260:], 260, blocks)]))
    assert torch.equal(torch.cat(pieces), whole)


def test_a_nan_left_in_a_block_does_not_reach_its_next_owner(folder_of: Callable[[str], Path]) -> None:
    model, ids = loaded(folder_of("llama"), num_blocks=8), tokens(20)
    clean = forward(model, [(ids, 0, [3])])
    for pool in model._pools:
        pool.fill_(float("nan"))
    assert torch.equal(forward(model, [(ids, 0, [3])]), clean)


def test_a_nan_among_the_keys_shows_in_that_sequence_only(folder_of: Callable[[str], Path]) -> None:
    model, ids = loaded(folder_of("llama"), num_blocks=8), tokens(20)
    clean = forward(model, [(ids[:10], 0, [0]), (ids[:10], 0, [1])])
    model._pools[0][0, :, :64] = float("nan")
    sick, healthy = forward(model, [([5], 10, [0]), ([5], 10, [1])])
    assert sick.isnan().all()
    assert healthy.isfinite().all()
    assert clean.isfinite().all()


def test_portable_vectors_agree_with_amx(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder, ids = folder_of("qwen3-norms"), tokens(90)
    ours = forward(loaded(folder), [(ids, 0, [0, 1, 2])])
    script = f"""
import torch
from outrider.engine.model import Batch, Span
from outrider.engine.native_model import NativeModel
from pathlib import Path
model = NativeModel(Path({str(folder)!r}), block_size={BLOCK})
model.allocate(4)
ids = torch.tensor({ids})
rows = torch.arange(90)
torch.save(model.forward(Batch(ids, rows, (Span(0, 90, 90, (0, 1, 2)),), rows)), {str(tmp_path / "out.pt")!r})
"""
    subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=120, env={**os.environ, "OUTRIDER_AMX": "0"}
    )
    portable = torch.load(tmp_path / "out.pt")
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        truth = exact(torch.tensor([ids])).logits[0]
    assert (portable - truth).abs().mean() <= 1.2 * (ours - truth).abs().mean()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 216, "head_dim": 32}, "hidden_size 216 is no multiple of 32"),
        ({"head_dim": 48}, "head_dim 48 is no multiple of 32"),
        ({"hidden_act": "gelu"}, "the activation is gelu, not silu"),
        ({"mlp_bias": True}, "its matrices have biases"),
    ],
)
def test_what_the_kernels_cannot_run_is_said(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    config = LlamaConfig(**{**SHAPE, **change}, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    assert unsupported(tmp_path, torch.bfloat16) == reason
    with pytest.raises(ConfigError, match=f"cpu_kernels: native cannot run .*{reason}"):
        load_model(tmp_path, dtype="bfloat16", device="cpu", block_size=BLOCK, cpu_kernels="native")


def test_without_a_compiler_the_reason_is_named(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    library.load.cache_clear()
    try:
        assert "no C compiler was found" in str(unsupported(folder_of("llama"), torch.bfloat16))
    finally:
        library.load.cache_clear()
