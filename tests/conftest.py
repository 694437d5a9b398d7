"""Models that the tests share: a tiny random Llama made here, and the embedded SmolLM2 when it was added."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.errors import ConfigError
from outrider.models import resolve

BuildLlama: TypeAlias = Callable[..., Path]
"""`build_llama(name, *, dtype=torch.float32, seed=0, **config)`: see the fixture."""

# Two OpenMP threads that share two cores with a cluster spin more than they compute.
torch.set_num_threads(1)

END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = [END, "<|system|>", "<|user|>", "<|assistant|>"]

# Enough to learn some merges from, with letters of more than one byte among them.
CORPUS = [
    "The router drafts, the verifier accepts, and the text is the same as without any drafts at all.",
    "Speculation is a guess that is checked: the checked guess is the answer, the wrong guess is nothing.",
    "Ağaç, çiçek, şeker, gül; 草稿 検証 초안; naïve café, coöperate; 🙂🚀",
]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in bfloat16; `make test` adds it."""
    try:
        return resolve("smollm2")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def build_llama(tmp_path_factory: pytest.TempPathFactory) -> BuildLlama:
    """Make a tiny random Llama with its tokenizer, and return its folder.

    The same `seed` and `config` give the same weights in any run; `dtype` is what they are saved in.
    `config` overrides fields of `LlamaConfig`, for example `num_hidden_layers=2` for a smaller draft model
    or `vocab_size=384` for a vocabulary padded beyond the tokenizer's.
    """

    def build(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any) -> Path:
        folder = tmp_path_factory.mktemp(name)
        tokenizer = _tokenizer()
        tokenizer.save_pretrained(folder)
        shape: dict[str, Any] = {
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            # Wide weights make a peaked distribution that depends on the context; the usual 0.02 would
            # make greedy decoding repeat one token, which proves little.
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.eos_token_id,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(LlamaConfig(**(shape | config)))
        # A logit of 0 is never the largest of 300, so greedy decoding does not end by chance. A test that
        # wants an end calls another token of the text the end: `eos_token_id=...`.
        with torch.no_grad():
            model.lm_head.weight[tokenizer.eos_token_id] = 0
        model.to(dtype).save_pretrained(folder)
        return folder

    return build


@pytest.fixture(scope="session")
def tiny_llama(build_llama: BuildLlama) -> Path:
    """A random Llama of four layers in float32, where greedy decoding is exact."""
    return build_llama("tiny_llama")


@pytest.fixture(scope="session")
def tiny_llama_bf16(build_llama: BuildLlama) -> Path:
    """The same weights as `tiny_llama`, rounded to bfloat16."""
    return build_llama("tiny_llama_bf16", dtype=torch.bfloat16)


def _tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text in, the same text out, characters split over several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=304,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=SPECIAL_TOKENS[1:],
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
