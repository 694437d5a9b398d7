"""The start-up probe: what a model's attention layers ask for, and whether the model can be served at all.

Serving puts many sequences into one flat row of tokens. That is only right for a model whose rows depend on
nothing but their own sequence, which few models say about themselves. So after the checks on the
configuration, which can name their reason, the probe *tries* it: it runs a row that holds the same short
sequence twice, then one token at the last position of the context, and compares both copies with the model's
own attention on the sequence alone. Position arithmetic over the whole row, state that leaks between
neighbours, biases that travel in the mask and unknown kinds of attention all show as a difference.

Not shown by the probe: what only happens beyond its few tokens (`PROBE_ROWS`). Windows are longer than that,
so they are read from the layers' arguments and compared with the configuration instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.model import Batch, Span
from outrider.engine.paged_attention import INTERFACE, Attend, Pool, Scoring, Step, attending
from outrider.errors import ConfigError

PROBE_ROWS = 8
"""Tokens of the probe's sequence."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.15}
"""Largest relative error (L2, over all logits of the row, each row centred) between ours and the model's own
attention. Half types differ by rounding (0.03 for SmolLM2 in bfloat16) and, in mixtures of experts, by a rare
other choice of expert; positions that are ignored give 1.1."""

READ_OPTIONS = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
"""Arguments that become a layer's `Scoring`."""

IDLE_OPTIONS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "cache"}
)
"""Arguments that layers pass along and that say nothing about the result."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What one attention layer showed when it was called."""

    module: nn.Module
    heads: int
    kv_heads: int
    key_size: int  # head size of queries and keys
    value_size: int
    scoring: Scoring
    shared_with: int | None  # index of the earlier layer whose keys and values it reuses


@dataclass(frozen=True, slots=True)
class ModelProfile:
    layers: tuple[LayerProfile, ...]  # in the order in which they are called
    vocab_size: int  # width of the logits


def check_config(config: Any, model_class: Any) -> None:
    """Refuse by name what the configuration alone shows; `model_class` may be None where there is none."""
    name = config.model_type
    if getattr(config, "quantization_config", None) is not None:
        method = _read(config.quantization_config, "quant_method") or "unnamed"
        raise ConfigError(
            f"model: a {name} checkpoint quantised with {method!r} is not supported; "
            "use the unquantised weights (float32, bfloat16 or float16)"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"model: {name} is an encoder-decoder; only decoder-only language models are served"
        )
    if model_class is None:
        raise ConfigError(f"model: {name} has no causal language model in transformers; it cannot be served")
    if getattr(model_class, "_is_stateful", False):
        raise ConfigError(
            f"model: {name} keeps a recurrent state, which cannot be rolled back after a rejected draft; "
            "use a model with attention in every layer"
        )
    text = config.get_text_config()
    _check_layer_types(name, text)
    if not model_class._can_set_attn_implementation():
        raise ConfigError(_no_interface(name))
    _check_rope(name, text)


def _no_interface(name: str) -> str:
    return (
        f"model: {name} does not call its attention through transformers' attention interface, so its cache "
        "cannot be paged; use one of the tested families (docs/models.md)"
    )


def _check_layer_types(name: str, text: Any) -> None:
    known = {"full_attention", "sliding_attention"}
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - known)
    if unknown:
        recurrent = any("linear" in kind or "mamba" in kind or "conv" in kind for kind in unknown)
        reason = (
            "keep a recurrent state, which cannot be rolled back after a rejected draft"
            if recurrent
            else "see other keys than those of full or sliding-window attention"
        )
        raise ConfigError(f"model: {name} has layers of type {', '.join(unknown)}, which {reason}")
    if getattr(text, "attention_chunk_size", None):
        raise ConfigError(
            f"model: {name} uses chunked attention (attention_chunk_size), which is not implemented"
        )


def _check_rope(name: str, text: Any) -> None:
    parameters = getattr(text, "rope_parameters", None) or {}
    # One set of parameters, or one for each type of layer.
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    for rope in sets:
        kind = rope.get("rope_type", "default") or "default"
        if "dynamic" in kind or kind == "longrope":
            raise ConfigError(
                f"model: {name} uses {kind} RoPE, which takes its frequencies from the largest position in "
                "the whole batch: a long neighbour would change another request's text; use a checkpoint "
                "with default, linear, llama3 or yarn RoPE"
            )


def probe(model: Any, *, attend: Attend, max_model_len: int) -> ModelProfile:
    """Run the model on a short row, note what its layers ask for, and compare with its own attention.

    `model` is a transformers causal language model loaded with the `outrider` attention. Raises
    `ConfigError`.
    """
    try:
        return _probe(model, attend, max_model_len)
    except ConfigError:
        raise
    except Exception as error:
        # A family that was never tried can fail in any way; its user is owed a reason, not a stack trace.
        raise ConfigError(
            f"model: {model.config.model_type} fails on a flat row of tokens: {type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}; use one of the "
            "tested families (docs/models.md)"
        ) from error


def _probe(model: Any, attend: Attend, max_model_len: int) -> ModelProfile:
    name = model.config.model_type
    text = model.config.get_text_config()
    rows = min(PROBE_ROWS, max_model_len)
    sequence = _ordinary_tokens(rows, text.vocab_size)
    positions = torch.arange(rows)

    row = torch.cat([sequence, sequence, sequence[:1]])
    row_positions = torch.cat([positions, positions, torch.tensor([max_model_len - 1])])
    spans = (Span(0, rows, rows, (0,)), Span(rows, rows, rows, (1,)), Span(2 * rows, 1, 1, (2,)))
    batch = Batch(row, row_positions, spans, torch.arange(len(row)))
    recorder = _Recorder(Step(batch, block_size=PROBE_ROWS, device=model.device), attend)
    with attending(recorder):
        ours = _logits(model, row, row_positions)
    layers = tuple(_profile(name, call, recorder.calls) for call in recorder.calls)
    _check_layers(name, text, layers)

    model.set_attn_implementation("eager")
    try:
        own = _logits(model, sequence, positions)
    finally:
        model.set_attn_implementation(INTERFACE)
    for which, start in (("alone", 0), ("beside a neighbour", rows)):
        error = _relative_error(ours[start : start + rows], own)
        if error > TOLERANCE[model.dtype]:
            raise ConfigError(
                f"model: {name} gives other logits {which} in a flat row than with its own attention "
                f"(relative error {error:.2g}, allowed {TOLERANCE[model.dtype]:g}): its layers depend on "
                "something that paged attention does not see; use one of the tested families (docs/models.md)"
            )
    return ModelProfile(layers, own.shape[-1])


@dataclass(frozen=True, slots=True)
class _Call:
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    options: Mapping[str, Any]


class _Recorder:
    """An attention function that notes each call and answers it with the real kernel over a pool of its
    own."""

    def __init__(self, step: Step, attend: Attend) -> None:
        self.calls: list[_Call] = []
        self._step = step
        self._attend = attend

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        # The tensors are kept, so that layers that share keys are told apart from layers that reuse memory.
        self.calls.append(_Call(module, query, key, value, options))
        blocks = (len(self._step.spans), self._step.block_size)
        pool = Pool(
            key.new_zeros(*blocks, key.shape[1], key.shape[3]),
            value.new_zeros(*blocks, value.shape[1], value.shape[3]),
        )
        pool.write(self._step.slots, key, value)
        return self._attend(query[0], pool, self._step, _scoring(options, query))[None]


def _scoring(options: Mapping[str, Any], query: Tensor) -> Scoring:
    scale = options.get("scaling")
    return Scoring(
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )


def _profile(name: str, call: _Call, calls: Sequence[_Call]) -> LayerProfile:
    """Read one call; refuses arguments that `Scoring` has no place for."""
    for option, value in call.options.items():
        if not (option in READ_OPTIONS or option in IDLE_OPTIONS or _says_nothing(option, value)):
            raise ConfigError(
                f"model: {name} passes {option}={_short(value)} to its attention, which is not implemented; "
                "use one of the tested families (docs/models.md)"
            )
    earlier = calls[: next(i for i, other in enumerate(calls) if other is call)]
    if any(other.module is call.module for other in earlier):
        raise ConfigError(f"model: {name} runs one attention layer twice in a pass, which is not implemented")
    shared = next((i for i, other in enumerate(earlier) if _same(other.key, call.key)), None)
    if shared is not None and not _same(earlier[shared].value, call.value):
        raise ConfigError(
            f"model: {name} shares keys but not values between layers, which is not implemented"
        )
    return LayerProfile(
        module=call.module,
        heads=call.query.shape[1],
        kv_heads=call.key.shape[1],
        key_size=call.key.shape[3],
        value_size=call.value.shape[3],
        scoring=_scoring(call.options, call.query),
        shared_with=shared,
    )


def _says_nothing(option: str, value: object) -> bool:
    """Whether an unknown argument is switched off; only `is_causal` means something when it is false."""
    if option == "is_causal":
        return value is None or value is True
    return value is None or value is False or (option == "dropout" and value == 0.0)


def _check_layers(name: str, text: Any, layers: Sequence[LayerProfile]) -> None:
    """Compare what the layers asked for with what the configuration promises."""
    if not layers:
        raise ConfigError(_no_interface(name))
    if len(layers) < text.num_hidden_layers:
        raise ConfigError(
            f"model: only {len(layers)} of the {text.num_hidden_layers} layers of {name} are attention; what "
            "the others remember cannot be rolled back after a rejected draft"
        )
    # Without `layer_types`, a configured window holds for every layer that takes it.
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    if kinds is None:
        expected = window is not None
        if expected and all(layer.scoring.window is None for layer in layers):
            raise ConfigError(f"model: {name} has sliding_window={window} but none of its layers pass it on")
        return
    for index, (kind, layer) in enumerate(zip(kinds, layers, strict=False)):
        if kind == "sliding_attention" and layer.scoring.window is None:
            raise ConfigError(f"model: layer {index} of {name} has a sliding window but does not pass it on")


def _ordinary_tokens(count: int, vocab_size: int) -> Tensor:
    """Ids spread over the vocabulary: (count,). Special tokens sit at its ends, and barely trained ones make
    a model's logits jump by half on nothing but rounding."""
    return torch.arange(1, count + 1) * (vocab_size // (count + 2)) % vocab_size


def _logits(model: Any, row: Tensor, positions: Tensor) -> Tensor:
    row, positions = row.to(model.device)[None], positions.to(model.device)[None]
    logits: Tensor = model(input_ids=row, position_ids=positions, use_cache=False).logits
    return logits[0]


def _relative_error(ours: Tensor, own: Tensor) -> float:
    """L2 distance over the L2 norm, after taking each row's mean away (it does not change the softmax).

    Rows that the model's own attention makes non-finite say nothing and are left out.
    """
    finite = torch.isfinite(own).all(dim=-1)
    if not finite.any():
        return 0.0
    a, b = (x[finite].float() - x[finite].float().mean(dim=-1, keepdim=True) for x in (ours, own))
    scale = float(b.norm())
    distance = float(torch.nan_to_num(a - b, nan=float("inf")).norm())
    return distance / scale if scale else distance


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _short(value: object) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _read(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, Mapping) else getattr(section, key, None)
