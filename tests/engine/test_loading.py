"""What is asked of the arguments before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.config import EngineArgs, ServiceArgs
from outrider.engine.loading import load_engine, target_info
from outrider.errors import ConfigError

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@without_cuda
def test_a_process_without_a_gpu_can_name_the_device_of_drafters_that_have_one(tiny_llama: Path) -> None:
    args = ServiceArgs.model_validate(
        {"model": str(tiny_llama), "drafter": {"placement": "actor", "num_gpus": 1}}
    )
    # As a router does.
    assert target_info(args.model_copy(update={"device": args.drafter.device})).device == "cuda"


@without_cuda
def test_weights_are_not_loaded_to_a_device_that_is_not_there(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="device 'cuda' was asked for and torch sees no CUDA device"):
        load_engine(EngineArgs(model=str(tiny_llama), device="cuda"))
