"""What the start-up probe refuses, and with which words: on configurations and tiny checkpoints made here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama import modeling_llama

from outrider.engine.paged_attention import INTERFACE, attend_torch, register
from outrider.engine.probe import probe
from outrider.engine.transformers_model import TransformersModel
from outrider.errors import ConfigError

VOCAB = 96
ROTARY = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(folder: Path) -> TransformersModel:
    return TransformersModel(folder, dtype=torch.float32, device=torch.device("cpu"), block_size=16)


def random_model(config: Any) -> Any:
    register()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=INTERFACE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.25)
    return model


REFUSED_BY_CONFIGURATION: dict[str, tuple[Callable[[], Any], str]] = {
    "dynamic_rope": (
        lambda: transformers.LlamaConfig(
            **ROTARY, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        ),
        "llama uses dynamic RoPE.*long neighbour",
    ),
    "longrope": (
        lambda: transformers.Phi3Config(
            **ROTARY,
            original_max_position_embeddings=64,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 6,
                "long_factor": [2.0] * 6,
                "original_max_position_embeddings": 64,
            },
        ),
        "phi3 uses longrope RoPE",
    ),
    "mamba": (
        lambda: transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2),
        "mamba keeps a recurrent state",
    ),
    "attention_beside_mamba": (lambda: transformers.JambaConfig(**ROTARY), "jamba keeps a recurrent state"),
    "linear_attention": (
        lambda: transformers.Qwen3NextConfig(**ROTARY),
        "qwen3_next keeps a recurrent state",
    ),
    "convolutions": (
        lambda: transformers.Lfm2Config(**{**ROTARY, "num_hidden_layers": 3}, full_attn_idxs=[1]),
        "layers of type conv, which keep a recurrent state",
    ),
    "chunked_attention": (
        lambda: transformers.Llama4TextConfig(**ROTARY),
        "layers of type chunked_attention",
    ),
    "encoder_decoder": (
        lambda: transformers.T5Config(vocab_size=VOCAB, d_model=32),
        "t5 is an encoder-decoder",
    ),
    "no_language_model": (lambda: transformers.ViTConfig(), "vit has no causal language model"),
    "quantised": (
        lambda: transformers.LlamaConfig(**ROTARY, quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantised with 'gptq'",
    ),
    "no_interface": (
        lambda: transformers.FalconConfig(vocab_size=VOCAB, hidden_size=64),
        "falcon does not call its attention through transformers' attention interface",
    ),
}


@pytest.mark.parametrize("case", REFUSED_BY_CONFIGURATION)
def test_a_configuration_that_cannot_be_served_is_refused_before_its_weights_are_read(
    case: str, tmp_path: Path
) -> None:
    """Public report 33, where the model keeps a recurrent state, which cannot roll back."""
    config, reason = REFUSED_BY_CONFIGURATION[case]
    config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere"):
        load(tmp_path / "nowhere")


def test_a_folder_without_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "unheard_of"}', "{}"])
def test_an_unreadable_configuration_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load(tmp_path)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    transformers.LlamaConfig(**ROTARY).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*model\.safetensors"):
        load(tmp_path)


def test_a_broken_weight_file_is_refused(tmp_path: Path) -> None:
    transformers.LlamaConfig(**ROTARY).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(tmp_path)


def test_a_checkpoint_that_lacks_weights_is_refused_rather_than_filled_with_noise(tmp_path: Path) -> None:
    random_model(transformers.LlamaConfig(**{**ROTARY, "num_hidden_layers": 1})).save_pretrained(tmp_path)
    transformers.LlamaConfig(**ROTARY).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks 9 weights, the first is model\.layers\.1\."):
        load(tmp_path)


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    """BERT has a causal head and the interface, but its configuration is not a decoder's."""
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    random_model(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="bert gives other logits alone in a flat row"):
        load(tmp_path)


def run_probe(model: Any, max_model_len: int = 128) -> Any:
    with torch.inference_mode():
        return probe(model, attend=attend_torch, max_model_len=max_model_len)


def test_a_long_neighbour_that_changes_the_logits_is_noticed_without_the_configuration() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = random_model(
        transformers.LlamaConfig(**{**ROTARY, "max_position_embeddings": 64}, rope_parameters=rope)
    )
    with pytest.raises(ConfigError, match="gives other logits alone in a flat row"):
        run_probe(model, max_model_len=4096)


def test_state_that_leaks_from_row_to_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token shift, as RWKV has it and convolutions have it: right alone, wrong behind a neighbour."""
    plain = modeling_llama.LlamaMLP.forward

    def shifted(self: Any, x: Tensor) -> Any:
        return plain(self, x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", shifted)
    with pytest.raises(ConfigError, match="gives other logits beside a neighbour"):
        run_probe(random_model(transformers.LlamaConfig(**ROTARY)))


def pass_to_attention(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Make Llama's layers hand more arguments to their attention function."""
    plain = modeling_llama.LlamaAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs, **options)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"indices": torch.zeros(1, 4)}, r"llama passes indices=a tensor \(1, 4\)"),
        ({"is_causal": False}, "llama passes is_causal=False"),
        ({"position_bias": 2}, "llama passes position_bias=2"),
    ],
)
def test_an_argument_that_attention_does_not_know_is_refused_by_name(
    options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_to_attention(monkeypatch, **options)
    with pytest.raises(ConfigError, match=reason):
        run_probe(random_model(transformers.LlamaConfig(**ROTARY)))


def test_arguments_that_are_switched_off_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_to_attention(monkeypatch, indices=None, output_something=False, is_causal=True)
    assert len(run_probe(random_model(transformers.LlamaConfig(**ROTARY))).layers) == 2


def test_a_mask_made_by_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = modeling_llama.LlamaAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **{**kwargs, "attention_mask": torch.zeros(1, 1, 17, 17)})

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(ConfigError, match="LlamaAttention builds a mask of its own"):
        run_probe(random_model(transformers.LlamaConfig(**ROTARY)))


def test_a_window_that_the_layers_do_not_pass_on_is_refused() -> None:
    config = transformers.LlamaConfig(**ROTARY)
    config.sliding_window = 32
    with pytest.raises(ConfigError, match="sliding_window=32 but none of its layers pass it on"):
        run_probe(random_model(config))


def test_a_model_that_fails_on_a_flat_row_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        raise RuntimeError("needs an image\nand more")

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    with pytest.raises(
        ConfigError, match="llama fails on a flat row of tokens: RuntimeError: needs an image;"
    ):
        run_probe(random_model(transformers.LlamaConfig(**ROTARY)))


def test_a_model_with_non_finite_weights_starts_and_leaves_the_error_to_its_requests() -> None:
    model = random_model(transformers.LlamaConfig(**ROTARY))
    with torch.no_grad():
        model.model.embed_tokens.weight[27] = float("nan")
    assert run_probe(model).vocab_size == VOCAB


def test_layers_that_share_keys_and_values_are_recognised() -> None:
    config = transformers.Gemma4TextConfig(
        **{**ROTARY, "num_hidden_layers": 6, "head_dim": 16},
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=7,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
    )
    shared = [layer.shared_with for layer in run_probe(random_model(config)).layers]
    assert shared == [None, None, None, None, 2, 3]
