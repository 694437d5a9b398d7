"""The C kernels against transformers' own forward, and against themselves in other company."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from outrider.config import EngineArgs
from outrider.engine.engine import Engine, drive
from outrider.engine.loading import load_engine, load_model
from outrider.engine.model import Batch, CausalModel, Span
from outrider.engine.native import library
from outrider.engine.native_model import ELEMENTS, NativeModel, unsupported
from outrider.engine.transformers_model import TransformersModel
from outrider.errors import ConfigError
from outrider.messages import Limits, Open, Plan, SamplingParams, Verdict, VerifyOrder

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
    "head-64": LlamaConfig(**SHAPE | {"head_dim": 64}),
    "head-128": Qwen3Config(**SHAPE | {"head_dim": 128, "num_hidden_layers": 2}),
    "head-256": LlamaConfig(**SHAPE | {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "one-kv-head": LlamaConfig(**SHAPE | {"num_attention_heads": 16, "num_key_value_heads": 1}),
    "odd-group": LlamaConfig(**SHAPE | {"num_attention_heads": 24, "num_key_value_heads": 1}),
    # Multiples of 32 and not of 64, the group of outputs: each matrix ends in a half-filled one.
    "half-groups": LlamaConfig(
        **SHAPE
        | {"hidden_size": 160, "intermediate_size": 224, "num_attention_heads": 5, "num_key_value_heads": 1}
    ),
}

FolderOf: TypeAlias = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
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


KERNELS = [
    pytest.param((torch.bfloat16, True), id="bfloat16"),
    pytest.param((torch.bfloat16, False), id="bfloat16-portable"),
    pytest.param((torch.float32, False), id="float32"),
]


@pytest.fixture(params=KERNELS)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Each type, and bfloat16 on portable vectors too, which AMX takes the place of where there is AMX."""
    chosen, amx = request.param
    kernels = library.load(ELEMENTS[chosen])
    kernels.outrider_native_init(int(amx))
    yield chosen
    kernels.outrider_native_init(int(os.environ.get("OUTRIDER_AMX", "1") != "0"))


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def forward(model: NativeModel, parts: Sequence[tuple[list[int], int, list[int]]]) -> Tensor:
    """All logits of sequences given as (new tokens, cached length, blocks)."""
    flat: list[int] = []
    positions: list[int] = []
    spans = []
    for new, cached, blocks in parts:
        length = cached + len(new)
        spans.append(Span(len(flat), len(new), length, tuple(blocks[: -(-length // model.block_size)])))
        flat += new
        positions += range(cached, length)
    rows = torch.arange(len(flat))
    return model.forward(Batch(torch.tensor(flat), torch.tensor(positions), tuple(spans), rows))


def loaded(
    folder: Path, dtype: torch.dtype = torch.bfloat16, num_blocks: int = 64, block_size: int = BLOCK
) -> NativeModel:
    model = NativeModel(folder, dtype=dtype, block_size=block_size)
    model.allocate(num_blocks)
    return model


@pytest.mark.parametrize(
    ("name", "block_size"), [*((name, BLOCK) for name in CONFIGS), ("llama", 64), ("mistral-window", 64)]
)
def test_logits_are_as_close_to_float32_as_transformers_own_bfloat16(
    folder_of: FolderOf, name: str, block_size: int
) -> None:
    folder, ids = folder_of(name), tokens(150)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        truth = exact(torch.tensor([ids])).logits[0]
        theirs = (rounded(torch.tensor([ids])).logits[0].float() - truth).abs()
    ours = (forward(loaded(folder, block_size=block_size), [(ids, 0, list(range(5)))]) - truth).abs()
    assert ours.mean() <= 1.1 * theirs.mean()
    assert ours.max() <= 2.0 * theirs.max()


@pytest.mark.parametrize(
    ("name", "block_size"), [*((name, BLOCK) for name in CONFIGS), ("llama", 64), ("mistral-window", 64)]
)
def test_float32_logits_are_those_of_transformers(folder_of: FolderOf, name: str, block_size: int) -> None:
    folder, ids = folder_of(name), tokens(150)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        truth = exact(torch.tensor([ids])).logits[0]
    ours = forward(loaded(folder, torch.float32, block_size=block_size), [(ids, 0, list(range(5)))])
    assert (ours - truth).abs().max() <= 1e-4 * truth.abs().max()


@pytest.mark.parametrize("name", ["llama-tied", "mistral-window", "qwen2-biases", "qwen3-norms"])
def test_greedy_float32_texts_are_those_of_generate(folder_of: FolderOf, name: str) -> None:
    folder, prompt, count = folder_of(name), tokens(30), 60
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = exact.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0
    )
    model, ours = loaded(folder, torch.float32), list(prompt)
    new, cached = prompt, 0
    for _ in range(count):
        logits = forward(model, [(new, cached, list(range(3)))])
        cached, new = len(ours), [int(logits[-1].argmax())]
        ours += new
    assert ours == theirs[0].tolist()


@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        ("llama", BLOCK),
        ("llama", 64),
        ("mistral-window", BLOCK),
        ("mistral-window", 64),
        ("qwen3-norms", BLOCK),
        ("head-64", BLOCK),
        ("head-128", 64),
        ("head-256", BLOCK),
        ("one-kv-head", BLOCK),
        ("odd-group", BLOCK),
        ("half-groups", BLOCK),
    ],
)
def test_a_row_is_bitwise_the_same_in_any_company(
    folder_of: FolderOf, dtype: torch.dtype, name: str, block_size: int
) -> None:
    model = loaded(folder_of(name), dtype, block_size=block_size)
    ids, other = tokens(300), tokens(45, seed=1)
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


@pytest.mark.parametrize("name", ["llama-tied", "mistral-window", "qwen2-biases", "qwen3-norms"])
def test_a_row_has_the_same_bits_in_any_cut_beside_any_others(
    folder_of: FolderOf, dtype: torch.dtype, name: str
) -> None:
    model = loaded(folder_of(name), dtype)
    texts = [tokens(140, seed) for seed in range(3)]
    blocks = [[7, 2, 30, 4, 11], [20, 21, 22, 23, 24], [9, 8, 1, 6, 5]]
    truths = [
        torch.cat([forward(model, [([token], at, blocks[i])]) for at, token in enumerate(text)])
        for i, text in enumerate(texts)
    ]
    chunk = st.sampled_from([1, 1, 2, 3, 5, 8, 9, 12, 13, 17, 33, 70, 140])

    @settings(max_examples=10, deadline=None)
    @given(
        st.lists(
            st.tuples(st.permutations(range(3)), st.integers(1, 3), st.tuples(chunk, chunk, chunk)),
            min_size=4,
        )
    )
    def check(steps: list[tuple[list[int], int, tuple[int, int, int]]]) -> None:
        at = [0, 0, 0]
        for order, company, chunks in steps:
            parts = [(i, at[i], min(140, at[i] + chunks[i])) for i in order[:company] if at[i] < 140]
            if not parts:
                continue
            logits = forward(model, [(texts[i][begin:end], begin, blocks[i]) for i, begin, end in parts])
            row = 0
            for i, begin, end in parts:
                assert torch.equal(logits[row : row + end - begin], truths[i][begin:end])
                row, at[i] = row + end - begin, end

    check()


def test_the_number_of_rows_changes_no_bit(folder_of: FolderOf, dtype: torch.dtype) -> None:
    # Every way in which rows are blocked: 1 to 12 at once in vectors, 16 and 32 in AMX, rests of each.
    model, ids = loaded(folder_of("half-groups"), dtype), tokens(40)
    whole = forward(model, [(ids, 0, [0, 1])])
    for rows in range(1, 40):
        assert torch.equal(forward(model, [(ids[:rows], 0, [2, 3])]), whole[:rows])


def test_a_nan_left_in_a_block_does_not_reach_its_next_owner(folder_of: FolderOf, dtype: torch.dtype) -> None:
    model, ids = loaded(folder_of("llama"), dtype, num_blocks=8), tokens(20)
    clean = forward(model, [(ids, 0, [3])])
    for pool in model._pools:
        pool.fill_(float("nan"))
    assert torch.equal(forward(model, [(ids, 0, [3])]), clean)


def test_a_nan_among_the_keys_shows_in_that_sequence_only(folder_of: FolderOf, dtype: torch.dtype) -> None:
    model, ids = loaded(folder_of("llama"), dtype, num_blocks=8), tokens(20)
    clean = forward(model, [(ids[:10], 0, [0]), (ids[:10], 0, [1])])
    model._pools[0][0, :, :64] = float("nan")
    sick, healthy = forward(model, [([5], 10, [0]), ([5], 10, [1])])
    assert sick.isnan().all()
    assert healthy.isfinite().all()
    assert clean.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_stays_among_those_that_see_it(
    folder_of: FolderOf, tmp_path: Path, dtype: torch.dtype, bad: float
) -> None:
    folder, sick = copied(folder_of("llama"), tmp_path), 299
    held = load_file(folder / "model.safetensors")
    held["model.embed_tokens.weight"][sick] = bad
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    model, ids = loaded(folder, dtype), [token % sick for token in tokens(40)]
    whole = forward(model, [(ids, 0, [0, 1])])
    block = forward(model, [([*ids[:20], sick, *ids[21:25]], 0, [2])])
    assert torch.equal(block[:20], whole[:20])
    assert block[20:].isnan().all()
    # Its drafts were rejected, and what comes instead is written over them.
    assert torch.equal(forward(model, [(ids[20:], 20, [2, 3])]), whole[20:])


def test_portable_vectors_agree_with_amx(folder_of: FolderOf, tmp_path: Path) -> None:
    folder, ids = folder_of("qwen3-norms"), tokens(90)
    ours = forward(loaded(folder), [(ids, 0, [0, 1, 2])])
    script = f"""
import torch
from outrider.engine.model import Batch, Span
from outrider.engine.native_model import NativeModel
from pathlib import Path
model = NativeModel(Path({str(folder)!r}), dtype=torch.bfloat16, block_size={BLOCK})
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
        ({"intermediate_size": 80}, "intermediate_size 80 is no multiple of 32"),
        ({"head_dim": 48}, "head_dim 48 is no multiple of 32"),
        ({"head_dim": 288}, "head_dim 288 is above 256"),
        ({"num_key_value_heads": 4}, "6 heads do not share 4 key-value heads evenly"),
        ({"hidden_act": "gelu"}, "the activation is gelu, not silu"),
        ({"mlp_bias": True}, "its matrices have biases"),
    ],
)
def test_what_the_kernels_cannot_run_is_said(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    config = LlamaConfig(**{**SHAPE, **change}, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    assert unsupported(tmp_path, torch.bfloat16, BLOCK) == reason
    with pytest.raises(ConfigError, match=f"cpu_kernels: native cannot run .*{reason}"):
        load_model(tmp_path, dtype="bfloat16", device="cpu", block_size=BLOCK, cpu_kernels="native")
    with pytest.raises(ConfigError, match=f"the C kernels cannot run .*{reason}"):
        NativeModel(tmp_path, dtype=torch.bfloat16, block_size=BLOCK)


def test_a_type_that_the_kernels_do_not_compute_in_is_said(folder_of: FolderOf) -> None:
    reason = "the C kernels compute in bfloat16 or float32, not torch.float16"
    assert unsupported(folder_of("llama"), torch.float16, BLOCK) == reason


def test_loading_takes_the_type_that_was_asked_for(folder_of: FolderOf) -> None:
    def load(dtype: str) -> CausalModel:
        return load_model(
            folder_of("llama"), dtype=dtype, device="cpu", block_size=BLOCK, cpu_kernels="native"
        )

    exact, rounded = load("float32"), load("bfloat16")
    assert (exact.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    assert exact.bytes_per_block() == 2 * rounded.bytes_per_block()
    assert exact.numerics == rounded.numerics == "strict"


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("intermediate_size", None, "config.json says intermediate_size: None, which is no count"),
        ("vocab_size", "300", "config.json says vocab_size: '300', which is no count"),
        ("num_hidden_layers", 0, "config.json says num_hidden_layers: 0, which is no count"),
        ("rms_norm_eps", None, "config.json says rms_norm_eps: None, which is no fraction"),
        ("rope_scaling", {"type": "dynamic"}, "rope type 'dynamic' is none of"),
        ("partial_rotary_factor", 0.5, "it rotates a part of each head only"),
        ("use_sliding_window", True, "it does not say which of its layers have the window"),
        # Qwen3 has a size of its own for what a file leaves out, Mistral has one for the other.
        ("architectures+head_dim", (["Qwen3ForCausalLM"], None), "config.json says head_dim: None"),
        (
            "architectures+num_key_value_heads",
            (["MistralForCausalLM"], None),
            "config.json says num_key_value_heads: None",
        ),
    ],
)
def test_a_config_that_leaves_the_shapes_open_is_left_to_transformers(
    tmp_path: Path, key: str, value: Any, reason: str
) -> None:
    LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    keys = key.split("+")
    edit_config(tmp_path, **dict(zip(keys, value if len(keys) > 1 else [value], strict=True)))
    if key == "rope_scaling":
        edit_config(tmp_path, rope_parameters=None)
    assert str(unsupported(tmp_path, torch.bfloat16, BLOCK)).startswith(reason)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def copied(folder: Path, to: Path) -> Path:
    for file in ("config.json", "model.safetensors"):
        (to / file).write_bytes((folder / file).read_bytes())
    return to


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("vocab_size", 400, "'model.embed_tokens.weight' has shape 300 x 192, .* must be 400 x 192"),
        ("intermediate_size", 128, "'model.layers.0.mlp.gate_proj.weight' has shape 96 x 192, .* 128 x 192"),
        ("hidden_size", 224, "'model.layers.0.input_layernorm.weight' has shape 192, .* must be 224"),
        (
            "num_attention_heads",
            8,
            "'model.layers.0.self_attn.q_proj.weight' has shape 192 x 192, .* 256 x 192",
        ),
        (
            "num_key_value_heads",
            3,
            "'model.layers.0.self_attn.k_proj.weight' has shape 64 x 192, .* 96 x 192",
        ),
        ("head_dim", 64, "'model.layers.0.self_attn.q_proj.weight' has shape 192 x 192, .* 384 x 192"),
        ("num_hidden_layers", 4, "the checkpoint has no tensor 'model.layers.3.input_layernorm.weight'"),
    ],
)
def test_a_config_of_another_model_is_refused_before_c_reads_a_byte(
    folder_of: FolderOf, tmp_path: Path, key: str, value: int, fault: str
) -> None:
    folder = copied(folder_of("llama"), tmp_path)
    edit_config(folder, **{key: value})
    with pytest.raises(ConfigError, match=fault):
        load_model(folder, dtype="bfloat16", device="cpu", block_size=BLOCK, cpu_kernels="auto")


TENSORS = [
    ("llama", "lm_head.weight"),
    ("llama", "model.norm.weight"),
    ("llama", "model.embed_tokens.weight"),
    *(
        ("llama", f"model.layers.1.{name}.weight")
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    ),
    *(("qwen2-biases", f"model.layers.1.self_attn.{name}_proj.bias") for name in "qkv"),
    *(("qwen3-norms", f"model.layers.1.self_attn.{name}_norm.weight") for name in "qk"),
]


@pytest.mark.parametrize(("name", "tensor"), TENSORS)
def test_every_tensor_must_have_its_shape(
    folder_of: FolderOf, tmp_path: Path, name: str, tensor: str
) -> None:
    folder = copied(folder_of(name), tmp_path)
    held = load_file(folder / "model.safetensors")
    held[tensor] = held[tensor][:-1].clone()
    save_file(held, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"tensor '{tensor}' has shape"):
        loaded(folder)
    del held[tensor]
    save_file(held, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"no tensor '{tensor}'"):
        loaded(folder)


def test_a_window_that_the_family_does_not_use_is_not_used(folder_of: FolderOf, tmp_path: Path) -> None:
    folder, ids = copied(folder_of("qwen2-biases"), tmp_path), tokens(90)
    plain = forward(loaded(folder), [(ids, 0, [0, 1, 2])])
    config = json.loads((folder / "config.json").read_text())
    config.pop("use_sliding_window", None)  # as in files that say less
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 8}))
    assert torch.equal(forward(loaded(folder), [(ids, 0, [0, 1, 2])]), plain)


def test_blocks_that_the_kernels_cannot_take_fall_back_to_torch_and_say_so_once(
    tiny_llama_bf16: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="outrider.engine.loading"):
        model = load_model(tiny_llama_bf16, dtype="auto", device="cpu", block_size=16, cpu_kernels="auto")
    assert isinstance(model, TransformersModel)
    (record,) = [r for r in caplog.records if r.name == "outrider.engine.loading"]
    assert "slower than the C kernels: block_size 16 is no multiple of 32" in record.getMessage()


def test_threads_that_the_kernels_do_not_use_are_named(
    native_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    try:
        engine = load_engine(EngineArgs(model=str(native_llama), device="cpu", cpu_threads=2))
    finally:
        torch.set_num_threads(threads)
    assert isinstance(engine.model, NativeModel)
    assert "cpu_threads is 2, and the C kernels use one thread" in caplog.text


def test_without_a_compiler_torch_runs_the_model_and_the_reason_is_named(
    native_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))  # nothing is kept there
    library.load.cache_clear()
    try:
        model = load_model(native_llama, dtype="auto", device="cpu", block_size=BLOCK, cpu_kernels="auto")
    finally:
        library.load.cache_clear()
    assert isinstance(model, TransformersModel)
    assert "no C compiler was found" in caplog.text


# ---- the engine over the kernels

SHARED = [11, 7, 5, 3] * 10
PROMPTS = [[*SHARED, 8, 9], [*SHARED, 100], [42] * 70, list(range(20, 110)), [5], [*SHARED, 60, 61, 62]]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def native_llama(build_llama: Callable[..., Path]) -> Path:
    """Two layers with heads of 32, which the kernels take."""
    return build_llama("native_llama", dtype=torch.bfloat16, num_hidden_layers=2, num_attention_heads=2)


@functools.cache
def native(folder: Path, dtype: torch.dtype) -> NativeModel:
    """One model for all: every new engine allocates its cache anew, and the one before it is over."""
    return NativeModel(folder, dtype=dtype, block_size=BLOCK)


def make_engine(
    folder: Path, dtype: torch.dtype, *, prefix_caching: bool = True, num_blocks: int = 24
) -> Engine:
    """Steps of 40 rows, so that prompts take several, and four places for eight sequences."""
    model = native(folder, dtype)
    return Engine(
        model,
        num_blocks=num_blocks,
        vocab_size=model.vocab_size,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        prefix_caching=prefix_caching,
    )


def opening(name: str, prompt: list[int], k: int) -> Open:
    plan = Plan(name, 0, k, 60.0 if k else 0.0)
    return Open(name, 0, tuple(prompt), (), SamplingParams(temperature=0.0), Limits(MAX_TOKENS), plan)


@functools.cache
def plain_texts(folder: Path, dtype: torch.dtype) -> list[list[int]]:
    """What each prompt gives alone, without drafts and without a prefix cache."""
    found = []
    for prompt in PROMPTS:
        verdicts = drive(make_engine(folder, dtype, prefix_caching=False), [opening("plain", prompt, 0)])
        found.append(
            [token for verdict in verdicts if isinstance(verdict, Verdict) for token in verdict.tokens]
        )
    return found


def draft(ahead: list[int], k: int, right: int, vocab: int) -> tuple[int, ...]:
    """K drafts of which the first `right` are what the target will say, and the next is not."""
    return tuple((t + 1) % vocab if i == right else t for i, t in enumerate(ahead[:k]))


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_engine_over_the_kernels_gives_the_plain_text_with_any_drafts(
    native_llama: Path, dtype: torch.dtype, k: int, concurrency: int
) -> None:
    truths = plain_texts(native_llama, dtype)
    for right in {0, k // 2, k}:
        engine = make_engine(native_llama, dtype)
        sequences = range(concurrency)
        done: dict[str, list[int]] = defaultdict(list)
        accepted, hits = 0, 0
        for index in sequences:
            engine.receive(opening(f"s{index}", PROMPTS[index % len(PROMPTS)], k))
        while engine.busy:
            for verdict in engine.step():
                assert isinstance(verdict, Verdict)
                name, index = verdict.sequence, int(verdict.sequence[1:]) % len(PROMPTS)
                done[name] += verdict.tokens
                accepted += verdict.accepted
                hits += verdict.cached_tokens
                drafts = draft(truths[index][len(done[name]) :], k, right, engine.vocab_size)
                base_len = len(PROMPTS[index]) + len(done[name])
                engine.receive(VerifyOrder(name, 0, base_len, drafts))
        assert done == {f"s{index}": truths[index % len(PROMPTS)] for index in sequences}
        assert (accepted > 0) is (right > 0)
        assert (hits > 0) is (concurrency > 1)  # the later ones find the prefix of the first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_plain_texts_differ_and_end_by_length(native_llama: Path, dtype: torch.dtype) -> None:
    texts = plain_texts(native_llama, dtype)
    assert {len(text) for text in texts} == {MAX_TOKENS}
    assert len({tuple(text) for text in texts}) == len(PROMPTS)


def sampled(name: str, prompt: list[int]) -> Open:
    params = SamplingParams(temperature=1.0, seed=3)
    return Open(name, 0, tuple(prompt), (), params, Limits(MAX_TOKENS), Plan(name, 0), logprobs=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_prefix_hits_and_preemption_change_no_bit_of_a_log_probability(
    native_llama: Path, dtype: torch.dtype
) -> None:
    def answers(num_blocks: int, prompts: list[list[int]]) -> tuple[list[list[Any]], int, int]:
        engine = make_engine(native_llama, dtype, num_blocks=num_blocks)
        found: dict[str, list[Any]] = defaultdict(list)
        hits = 0
        for verdict in drive(engine, [sampled(str(i), prompt) for i, prompt in enumerate(prompts)]):
            assert isinstance(verdict, Verdict)
            found[verdict.sequence] += zip(verdict.tokens, verdict.logprobs, strict=True)
            hits += verdict.cached_tokens
        return [found[str(i)] for i in range(len(prompts))], hits, engine.stats().preemptions

    alone = [answers(24, [prompt])[0][0] for prompt in PROMPTS]
    roomy, hits, _ = answers(24, PROMPTS)
    tight, _, preemptions = answers(7, PROMPTS)
    assert hits > 0
    assert preemptions > 0
    assert roomy == tight == alone
