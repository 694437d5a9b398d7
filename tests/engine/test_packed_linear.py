"""Packed linear layers against the plain ones, where this CPU has them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outrider.engine import packed_linear
from outrider.engine.packed_linear import FusedPart, PackedLinear, can_pack, pack_linears

needs_packing = pytest.mark.skipif(not can_pack(), reason="this CPU or torch build has no packed bfloat16")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a - b).float().norm() / b.float().norm())


class Attention(nn.Module):
    """Queries, keys and values of different widths, as grouped-query attention has them."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(48, 64, bias=bias)
        self.k_proj = nn.Linear(48, 32, bias=bias)
        self.v_proj = nn.Linear(48, 16, bias=bias)
        self.o_proj = nn.Linear(64, 48, bias=bias)
        self.to(torch.bfloat16)


@needs_packing
@pytest.mark.parametrize("rows", [1, 5, 8, 64, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_the_plain_one_for_any_number_of_rows(rows: int, bias: bool) -> None:
    weight, x = normal(96, 64), normal(1, rows, 64)
    added = normal(96) if bias else None
    with torch.inference_mode():
        out = PackedLinear(weight, added)(x)
    assert relative_error(out, F.linear(x, weight, added)) < 0.01


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
def test_siblings_are_fused_and_give_what_they_gave_alone(bias: bool) -> None:
    module, x = Attention(bias=bias), normal(1, 5, 48)
    with torch.inference_mode():
        expected = [module.q_proj(x), module.k_proj(x), module.v_proj(x)]
        assert pack_linears(module) == 4
        found = [module.q_proj(x), module.k_proj(x), module.v_proj(x)]
    assert isinstance(module.q_proj, FusedPart)
    assert isinstance(module.o_proj, PackedLinear)
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 0.01


@needs_packing
def test_fused_siblings_may_be_called_in_any_order_and_with_different_inputs() -> None:
    module, x, y = Attention(bias=False), normal(1, 5, 48), normal(1, 3, 48)
    with torch.inference_mode():
        expected = [module.v_proj(x), module.q_proj(y), module.k_proj(x), module.q_proj(x)]
        pack_linears(module)
        found = [module.v_proj(x), module.q_proj(y), module.k_proj(x), module.q_proj(x)]
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 0.01


@needs_packing
def test_layers_stored_the_other_way_round_are_packed_too() -> None:
    module, x = nn.Sequential(Conv1D(32, 48).to(torch.bfloat16)), normal(2, 48)
    with torch.inference_mode():
        expected = module(x)
        assert pack_linears(module) == 1
        assert relative_error(module(x), expected) < 0.01


@needs_packing
def test_a_tied_embedding_survives_the_packing_of_the_head() -> None:
    embedding, head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "head": head}).to(torch.bfloat16)
    with torch.inference_mode():
        hidden = model["embedding"](torch.tensor([[3, 7]]))
        expected = model["head"](hidden)
        pack_linears(model)
        assert torch.equal(model["embedding"](torch.tensor([[3, 7]])), hidden)
        assert relative_error(model["head"](hidden), expected) < 0.01


def test_float32_layers_are_left_alone() -> None:
    module = Attention(bias=False).float()
    assert pack_linears(module) == 0
    assert type(module.q_proj) is nn.Linear


def test_nothing_is_packed_where_the_cpu_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "can_pack", lambda: False)
    module = Attention(bias=False)
    assert pack_linears(module) == 0
    assert type(module.q_proj) is nn.Linear
