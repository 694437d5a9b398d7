"""`numerics: strict` in torch: bitwise the same logits alone, in a verify block, in any prefill cut, in
company."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.config import EngineArgs
from outrider.engine import strict
from outrider.engine.engine import Engine, drive
from outrider.engine.loading import load_engine, load_model
from outrider.engine.model import Batch, Span
from outrider.engine.paged_attention import Pool, Scoring, Step
from outrider.engine.transformers_model import TransformersModel
from outrider.errors import ConfigError
from outrider.messages import Limits, Open, Plan, SamplingParams, Verdict

BLOCK = 16
VOCAB = 96
LENGTH = 90
WINDOW = 21
BLOCKS_EACH = 8

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, Callable[[], object]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **SHAPE,
        sliding_window=WINDOW,
        layer_types=LAYERS,
        attn_logit_softcapping=3.0,
        query_pre_attn_scalar=16,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SHAPE, sliding_window=WINDOW, layer_types=LAYERS, query_pre_attn_scalar=16
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        ffn_dim=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=48,
        max_position_embeddings=128,
        pad_token_id=1,
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        torch.nn.init.normal_(parameter, std=0.25)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return get


Loaded = dict[tuple[str, torch.dtype], TransformersModel]


@pytest.fixture(scope="module")
def models(checkpoint: Callable[[str], Path]) -> Callable[[str, torch.dtype], TransformersModel]:
    made: Loaded = {}

    def get(family: str, dtype: torch.dtype) -> TransformersModel:
        if (family, dtype) not in made:
            model = TransformersModel(
                checkpoint(family),
                dtype=dtype,
                device=torch.device("cpu"),
                block_size=BLOCK,
                numerics="strict",
            )
            model.allocate(4 * BLOCKS_EACH)
            made[family, dtype] = model
        return made[family, dtype]

    return get


def texts(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCAB) for _ in range(LENGTH)] for _ in range(count)]


def run(
    model: TransformersModel, parts: Sequence[tuple[int, int, int]], known: list[list[int]]
) -> list[Tensor]:
    """One step: for each part (text, begin, end) the logits (end - begin, V) of its rows."""
    tokens: list[int] = []
    positions: list[int] = []
    spans = []
    for text, begin, end in parts:
        blocks = tuple(range(text * BLOCKS_EACH, text * BLOCKS_EACH + -(-end // BLOCK)))
        spans.append(Span(len(tokens), end - begin, end, blocks))
        tokens += known[text][begin:end]
        positions += range(begin, end)
    logits = model.forward(
        Batch(torch.tensor(tokens), torch.tensor(positions), tuple(spans), torch.arange(len(tokens)))
    )
    return list(logits.split([end - begin for _, begin, end in parts]))  # type: ignore[no-untyped-call]


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_in_any_cut_and_company(
    models: Callable[[str, torch.dtype], TransformersModel], family: str, dtype: torch.dtype
) -> None:
    model, known = models(family, dtype), texts(3)
    alone = [
        torch.cat([run(model, [(text, i, i + 1)], known)[0] for i in range(LENGTH)]) for text in range(3)
    ]
    assert torch.isfinite(alone[0]).all()

    @settings(max_examples=12, deadline=None)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        rng, at = random.Random(seed), [0, 0, 0]
        while any(begin < LENGTH for begin in at):
            parts = []
            for text in rng.sample(range(3), 3):
                rows = rng.choice([0, 1, 1, 5, 17, 33, LENGTH])
                end = min(LENGTH, at[text] + rows)
                if end > at[text]:
                    parts.append((text, at[text], end))
                    at[text] = end
            if parts:
                for (text, begin, end), logits in zip(parts, run(model, parts, known), strict=True):
                    assert torch.equal(logits, alone[text][begin:end])

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_strict_logits_are_the_model_s_own(
    models: Callable[[str, torch.dtype], TransformersModel], checkpoint: Callable[[str], Path], family: str
) -> None:
    known = texts(1)
    (strict,) = run(models(family, torch.float32), [(0, 0, LENGTH)], known)
    own = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = own(torch.tensor(known)).logits[0]
    assert (strict - expected).abs().max() < 1e-3


def answer(engine: Engine, name: str, prompt: list[int], count: int) -> Open:
    limits = Limits(max_tokens=count)
    return Open(name, 0, tuple(prompt), (), SamplingParams(seed=3), limits, Plan(name, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefix_hits_and_preemption_change_no_token(
    checkpoint: Callable[[str], Path], dtype: Literal["float32", "bfloat16"]
) -> None:
    prompts = [text[: 40 + 3 * i] for i, text in enumerate(texts(3))] + [[*texts(1)[0][:33], 9, 9]]

    def tokens(num_blocks: int, opened: list[list[int]]) -> tuple[list[list[int]], int]:
        args = EngineArgs(
            model=str(checkpoint("llama")),
            dtype=dtype,
            num_kv_blocks=num_blocks,
            block_size=16,
            cpu_kernels="torch",
            numerics="strict",
            max_num_batched_tokens=48,
        )
        engine = load_engine(args)
        assert engine.model.numerics == "strict"
        names = [str(i) for i in range(len(opened))]
        events = drive(engine, [answer(engine, n, p, 40) for n, p in zip(names, opened, strict=True)])
        got: dict[str, list[int]] = {name: [] for name in names}
        for event in events:
            if isinstance(event, Verdict):
                got[event.sequence] += event.tokens
        return [got[name] for name in names], engine.stats().preemptions

    roomy, none = tokens(64, prompts)
    tight, preempted = tokens(11, prompts)
    alone = [tokens(64, [prompt])[0][0] for prompt in prompts]
    assert none == 0
    assert preempted > 0
    assert roomy == tight == alone


def load_strict(path: Path) -> TransformersModel:
    return TransformersModel(
        path, dtype=torch.float32, device=torch.device("cpu"), block_size=BLOCK, numerics="strict"
    )


def test_a_machine_that_does_not_keep_rows_apart_is_refused_at_the_start(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = strict.attend_strict

    def leaking(query: Tensor, pool: Pool, step: Step, scoring: Scoring) -> Tensor:
        """A single last bit, and only for rows that are alone in their span."""
        out = attend(query, pool, step, scoring)
        for span in step.spans:
            if span.rows == 1:
                out[span.start] = torch.nextafter(out[span.start], torch.tensor(torch.inf))
        return out

    monkeypatch.setattr(strict, "attend_strict", leaking)
    with pytest.raises(ConfigError, match=r"on this machine: \d+ of 84 rows change.*say numerics: fast"):
        load_strict(checkpoint("llama"))


def test_several_threads_are_refused_by_name(checkpoint: Callable[[str], Path]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ConfigError, match=r"one thread.*not 2.*say cpu_threads: 1, or numerics: fast"):
            load_strict(checkpoint("llama"))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("max_len", [1, 2, 7, 40])
def test_a_short_context_is_checked_in_full(tmp_path: Path, max_len: int) -> None:
    config = transformers.LlamaConfig(**{**SHAPE, "max_position_embeddings": max_len})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_strict(tmp_path)
    model.allocate(strict.check_blocks(model))
    assert strict.rows_that_change(model).tolist() == [0.0] * max_len


def test_a_model_says_why_it_runs_with_which_numerics(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    choices: tuple[Literal["auto", "strict", "fast"], ...] = ("auto", "strict", "fast")
    for numerics in choices:
        with caplog.at_level("INFO", logger="outrider.engine.loading"):
            load_model(
                checkpoint("opt"),
                dtype="float32",
                device="cpu",
                block_size=BLOCK,
                cpu_kernels="torch",
                numerics=numerics,
            )
    said = [line.split(" runs with ")[1] for line in caplog.messages if " runs with " in line]
    assert said == [
        "numerics: fast, because strict costs more than a tenth of a step without the C kernels",
        "numerics: strict, as asked",
        "numerics: fast, as asked",
    ]


def test_a_mixture_of_experts_is_refused_and_auto_is_fast(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    given_ = {"dtype": "float32", "device": "cpu", "block_size": 16, "cpu_kernels": "torch"}
    with pytest.raises(ConfigError, match=r"mixture of experts \(num_local_experts 4\).*say numerics: fast"):
        load_model(tmp_path, numerics="strict", **given_)  # type: ignore[arg-type]
    with caplog.at_level("INFO", logger="outrider.engine.loading"):
        assert load_model(tmp_path, numerics="auto", **given_).numerics == "fast"  # type: ignore[arg-type]
    assert "numerics: fast, because it is a mixture of experts" in caplog.text
