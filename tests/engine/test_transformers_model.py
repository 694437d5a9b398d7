"""`TransformersModel` against each family's own forward, on tiny random checkpoints made here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from outrider.engine.model import Batch, Span
from outrider.engine.transformers_model import TransformersModel

BLOCK_SIZE = 16
VOCAB = 96
WINDOW = 7  # shorter than the sequences, so that it matters

ROTARY = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HYBRID_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**ROTARY),
    "llama_rope_scaled": lambda: transformers.LlamaConfig(
        **ROTARY, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    ),
    "qwen2": lambda: transformers.Qwen2Config(**ROTARY),
    "qwen3": lambda: transformers.Qwen3Config(**ROTARY),
    "mistral": lambda: transformers.MistralConfig(**ROTARY, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **{**ROTARY, "num_hidden_layers": 4, **HYBRID_WINDOWS},
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=16,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**ROTARY, "num_hidden_layers": 4, **HYBRID_WINDOWS}, query_pre_attn_scalar=16
    ),
    "gemma4_with_shared_keys": lambda: transformers.Gemma4TextConfig(
        **{**ROTARY, "num_hidden_layers": 6},
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        word_embed_proj_dim=48,
        max_position_embeddings=128,
        pad_token_id=1,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **ROTARY, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **ROTARY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **{**ROTARY, "num_hidden_layers": 4, **HYBRID_WINDOWS},
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def save_checkpoint(config: Any, folder: Path) -> Path:
    """A random model whose attention weighs in: fresh initialisation is so small that masks hardly show."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny checkpoint, made on first use."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_checkpoint(FAMILIES[family](), tmp_path_factory.mktemp(family))
        return made[family]

    return get


def load(folder: Path, dtype: torch.dtype = torch.float32, *, pack: bool = True) -> TransformersModel:
    model = TransformersModel(
        folder, dtype=dtype, device=torch.device("cpu"), block_size=BLOCK_SIZE, pack_linears=pack
    )
    model.allocate(12)
    return model


def own_logits(folder: Path, tokens: Sequence[int]) -> Tensor:
    """The family's own forward over the whole sequence: (len(tokens), V)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


@dataclass
class Text:
    """One sequence: what its cache holds, and where."""

    blocks: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)


def step(model: TransformersModel, *parts: tuple[Text, Sequence[int]]) -> list[Tensor]:
    """Append tokens to several sequences in one batch; the logits of all new rows, one tensor a sequence."""
    tokens: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    for text, new in parts:
        old = len(text.tokens)
        text.tokens += new
        used = -(-len(text.tokens) // BLOCK_SIZE)
        spans.append(Span(len(tokens), len(new), len(text.tokens), text.blocks[:used]))
        tokens += new
        positions += range(old, old + len(new))
    batch = Batch(torch.tensor(tokens), torch.tensor(positions), tuple(spans), torch.arange(len(tokens)))
    logits = model.forward(batch)
    assert logits.dtype == torch.float32
    return list(torch.split(logits, [len(new) for _, new in parts]))


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_every_step_has_the_logits_of_the_models_own_forward(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    """Chunked prefill beside decoding, drafts to verify in several sequences, rejection by writing over."""
    folder = checkpoint(family)
    model = load(folder)
    scattered, consecutive, short = Text((5, 2, 9)), Text((6, 7, 8)), Text((0,))

    def check(*parts: tuple[Text, Sequence[int]]) -> None:
        for (text, new), logits in zip(parts, step(model, *parts), strict=True):
            expected = own_logits(folder, text.tokens)[-len(new) :]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)

    check((scattered, random_tokens(20, 1)), (short, random_tokens(9, 2)))
    check(
        (scattered, random_tokens(13, 3)), (consecutive, random_tokens(30, 4)), (short, random_tokens(1, 5))
    )
    check((short, random_tokens(3, 6)), (scattered, random_tokens(5, 7)), (consecutive, random_tokens(1, 8)))
    del scattered.tokens[-4:], short.tokens[-2:]  # drafts were rejected
    check(
        (scattered, random_tokens(2, 9)), (consecutive, random_tokens(5, 10)), (short, random_tokens(1, 11))
    )
    check((consecutive, random_tokens(1, 12)))


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("mistral", [WINDOW, WINDOW, WINDOW]),
        ("gemma3", [WINDOW, None, WINDOW, None]),
        ("llama", [None, None, None]),
    ],
)
def test_windows_reach_the_attention_function(
    family: str, windows: list[int | None], checkpoint: Callable[[str], Path]
) -> None:
    model = load(checkpoint(family))
    assert [layer.scoring.window for layer in model._layers] == windows


def test_only_the_wanted_rows_get_logits(checkpoint: Callable[[str], Path]) -> None:
    model = load(checkpoint("llama"))
    tokens = random_tokens(10, 1)
    span = Span(0, 10, 10, (3,))

    def logits(*rows: int) -> Tensor:
        wanted = torch.tensor(rows, dtype=torch.int64)
        return model.forward(Batch(torch.tensor(tokens), torch.arange(10), (span,), wanted))

    everything = logits(*range(10))
    torch.testing.assert_close(logits(4, 9), everything[[4, 9]])
    assert logits().shape == (0, VOCAB)


def test_two_models_live_side_by_side(checkpoint: Callable[[str], Path]) -> None:
    """A target and a draft model, taking turns in one process."""
    target, draft = load(checkpoint("gemma3")), load(checkpoint("llama"))
    in_target, in_draft = Text((1, 0)), Text((1, 0))
    for tokens in (random_tokens(12, 1), random_tokens(1, 2), random_tokens(6, 3)):
        (target_logits,) = step(target, (in_target, tokens))
        (draft_logits,) = step(draft, (in_draft, tokens))
        n = len(tokens)
        expected = own_logits(checkpoint("gemma3"), in_target.tokens)[-n:]
        torch.testing.assert_close(target_logits, expected, atol=1e-4, rtol=1e-4)
        expected = own_logits(checkpoint("llama"), in_draft.tokens)[-n:]
        torch.testing.assert_close(draft_logits, expected, atol=1e-4, rtol=1e-4)


def test_sizes_are_read_from_the_model(checkpoint: Callable[[str], Path]) -> None:
    model = load(checkpoint("llama"))
    assert (model.vocab_size, model.max_model_len) == (VOCAB, 128)
    # 3 layers, 16 tokens, 2 heads, keys and values of 16 floats
    assert model.bytes_per_block() == 3 * 16 * 2 * (16 + 16) * 4


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen2", "gemma3"])
def test_packed_linears_give_the_same_logits_up_to_rounding(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    plain = load(checkpoint(family), torch.bfloat16, pack=False)
    packed = load(checkpoint(family), torch.bfloat16)
    in_plain, in_packed = Text((4, 5)), Text((4, 5))
    for tokens in (random_tokens(20, 1), random_tokens(1, 2), random_tokens(5, 3)):
        (expected,) = step(plain, (in_plain, tokens))
        (logits,) = step(packed, (in_packed, tokens))
        error = (logits - expected).norm() / expected.norm()
        assert error < 0.03


def test_prompt_rows_without_logits_pass_a_packed_head(checkpoint: Callable[[str], Path]) -> None:
    model = load(checkpoint("llama"), torch.bfloat16)
    nothing = torch.zeros(0, dtype=torch.int64)
    batch = Batch(torch.tensor(random_tokens(4, 1)), torch.arange(4), (Span(0, 4, 4, (0,)),), nothing)
    assert model.forward(batch).shape == (0, VOCAB)
