from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.config import SpeculativeConfig
from outrider.contracts import DraftContext, TargetInfo
from outrider.engine.model import Batch, Numerics
from outrider.errors import ConfigError
from outrider.messages import SamplingParams
from outrider.registry import drafter_factory, needs_device
from outrider.sampling.processors import Lane, process
from outrider.sampling.target import choose_tokens
from outrider_plugins.draft_model import DraftGenerator, ModelDrafter, common_prefix

GREEDY = SamplingParams(temperature=0.0)
BLOCK = 4
VOCAB = 97


class FoldingModel:
    """A causal model small enough to reason about: the next token is a fold over all tokens before it.

    It reads those tokens back from its paged memory, so that a wrong block, position, length or rollback
    changes the answer. A row after `poison` gives NaN.
    """

    numerics: Numerics = "strict"
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, *, vocab_size: int = VOCAB, max_model_len: int = 1000) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.block_size = BLOCK
        self.poison: int | None = None
        self.rows: list[int] = []  # of each forward

    def bytes_per_block(self) -> int:
        return 8 * self.block_size

    def allocate(self, num_blocks: int) -> None:
        self._memory = torch.full((num_blocks, self.block_size), -1)

    def forward(self, batch: Batch) -> Tensor:
        self.rows.append(len(batch.tokens))
        blocks = [block for span in batch.spans for block in span.blocks]
        assert len(blocks) == len(set(blocks)), "two sequences share a block"
        last_row = {}
        for span in batch.spans:
            assert len(span.blocks) == -(-span.length // self.block_size)
            for row in range(span.start, span.start + span.rows):
                position = int(batch.positions[row])
                assert position == span.length - span.rows + row - span.start
                block = span.blocks[position // self.block_size]
                self._memory[block, position % self.block_size] = batch.tokens[row]
            last_row[span.start + span.rows - 1] = self._memory[list(span.blocks)].flatten()[: span.length]
        logits = torch.zeros(len(batch.logit_rows), self.vocab_size)
        for number, row in enumerate(batch.logit_rows.tolist()):
            tokens = last_row[row].tolist()
            logits[number, next_token(tokens, self.vocab_size)] = 1.0
            if tokens[-1] == self.poison:
                logits[number, 3] = float("nan")
        return logits


def next_token(tokens: Sequence[int], vocab_size: int = VOCAB) -> int:
    fold = 7
    for token in tokens:
        fold = (31 * fold + token + 1) % 10007
    return fold % vocab_size


def continuation(tokens: Sequence[int], count: int, vocab_size: int = VOCAB) -> list[int]:
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(known, vocab_size))
    return known[len(tokens) :]


def generator(model: FoldingModel, **changes: Any) -> DraftGenerator:
    given_: dict[str, Any] = {"num_blocks": 64, "vocab_size": VOCAB, "max_model_len": 1000, "max_rows": 512}
    return DraftGenerator(model, **(given_ | changes))


def proposed(drafter: DraftGenerator | ModelDrafter, contexts: Sequence[DraftContext]) -> list[list[int]]:
    return [list(draft.tokens) for draft in drafter.propose(contexts)]


def context(sequence: str, tokens: Sequence[int], count: int = 4) -> DraftContext:
    return DraftContext(sequence, tuple(tokens), count, GREEDY)


def test_ragged_batch_with_a_k_of_each_equals_greedy_continuations() -> None:
    prompts = [[1], [2, 3, 4, 5], list(range(20)), [9] * 7]
    counts = [1, 5, 3, 8]
    contexts = [context(str(i), prompt, k) for i, (prompt, k) in enumerate(zip(prompts, counts, strict=True))]
    model = FoldingModel()
    drafts = proposed(generator(model), contexts)
    assert drafts == [continuation(prompt, k) for prompt, k in zip(prompts, counts, strict=True)]
    # The prompts share the first forward; a lane leaves when it has its drafts.
    assert model.rows == [32, 3, 3, 2, 2, 1, 1, 1]


def test_only_what_the_cache_lacks_is_computed() -> None:
    model = FoldingModel()
    drafter = generator(model)
    prompt = list(range(10))
    (drafts,) = proposed(drafter, [context("a", prompt)])
    assert model.rows == [10, 1, 1, 1]
    model.rows.clear()
    accepted_all = [*prompt, *drafts, 50]  # the last draft and the bonus token have no row yet
    assert proposed(drafter, [context("a", accepted_all)]) == [continuation(accepted_all, 4)]
    assert model.rows == [2, 1, 1, 1]
    model.rows.clear()
    rejected_second = [*accepted_all, continuation(accepted_all, 1)[0], 60]
    assert proposed(drafter, [context("a", rejected_second)]) == [continuation(rejected_second, 4)]
    assert model.rows == [1, 1, 1, 1]


def test_context_with_another_past_is_recomputed_from_where_it_differs() -> None:
    model = FoldingModel()
    drafter = generator(model)
    proposed(drafter, [context("a", range(12))])
    model.rows.clear()
    other = [0, 1, 2, 3, 4, 90, 91]
    assert proposed(drafter, [context("a", other)]) == [continuation(other, 4)]
    assert model.rows == [2, 1, 1, 1]


def test_long_prompts_are_computed_in_pieces_beside_short_ones() -> None:
    model = FoldingModel()
    long, short = list(range(70)), [5, 6]
    drafts = proposed(generator(model, max_rows=16), [context("long", long), context("short", short)])
    assert drafts == [continuation(long, 4), continuation(short, 4)]
    assert max(model.rows) <= 16
    assert sum(model.rows) == (70 + 3) + (2 + 3)


def test_no_token_beyond_the_targets_vocabulary_is_drawn() -> None:
    class Padded(FoldingModel):
        def forward(self, batch: Batch) -> Tensor:
            logits = super().forward(batch)
            logits[:, VOCAB:] = 5.0  # an untrained row of a padded embedding may say anything
            return logits

    drafter = generator(Padded(vocab_size=VOCAB + 31))
    (drafts,) = proposed(drafter, [context("a", [1, 2, 3])])
    assert len(drafts) == 4
    assert all(token < VOCAB for token in drafts)


def test_token_the_model_has_no_embedding_for_skips_that_context_only() -> None:
    """Public reports 30 and 32: no crash, and nobody waits."""
    drafter = generator(FoldingModel())
    assert proposed(drafter, [context("a", [1, VOCAB]), context("b", [1])]) == [[], continuation([1], 4)]
    assert drafter.counts.limited == {"vocabulary": 1}


@pytest.mark.parametrize(("length", "drafts"), [(27, 4), (29, 4), (30, 3), (32, 1), (33, 0), (500, 0)])
def test_drafts_shrink_to_the_drafters_context_and_end_there(length: int, drafts: int) -> None:
    """Public reports 20, 31 and 32: a prompt beyond the context is skipped, and the one beside it is not."""
    model = FoldingModel(max_model_len=32)
    drafter = generator(model)
    prompt = [token % VOCAB for token in range(length)]
    beside = [4, 5]
    answers = proposed(drafter, [context("a", prompt), context("b", beside)])
    assert answers == [continuation(prompt, drafts), continuation(beside, 4)]
    assert drafter.counts.limited["context"] == (drafts < 4)


def test_pool_smaller_than_the_context_is_the_context() -> None:
    drafter = generator(FoldingModel(), num_blocks=3)
    assert proposed(drafter, [context("a", range(12))]) == [continuation(range(12), 1)]
    assert proposed(drafter, [context("a", range(13))]) == [[]]


def test_nothing_is_drafted_for_no_tokens_or_no_wish() -> None:
    model = FoldingModel()
    drafter = generator(model)
    assert proposed(drafter, [context("a", []), context("b", [1, 2], 0)]) == [[], []]
    assert proposed(drafter, []) == []
    assert model.rows == []


def test_least_recently_used_cache_makes_room_and_can_be_rebuilt() -> None:
    model = FoldingModel()
    drafter = generator(model, num_blocks=8)  # 32 tokens; each sequence below needs 13 to 15
    a, b, c = ([start] * 10 for start in (1, 2, 3))
    proposed(drafter, [context("a", a)])
    proposed(drafter, [context("b", b)])
    a += continuation(a, 2)
    proposed(drafter, [context("a", a)])
    assert drafter.counts.evicted == 0
    assert proposed(drafter, [context("c", c)]) == [continuation(c, 4)]
    assert drafter.counts.evicted == 1
    model.rows.clear()
    a += continuation(a, 1)
    proposed(drafter, [context("a", a)])
    assert model.rows[0] == 1, "a was used after b, so b's cache went"
    assert proposed(drafter, [context("b", b)]) == [continuation(b, 4)]


def test_batch_whose_caches_do_not_fit_together_is_drafted_in_waves() -> None:
    drafter = generator(FoldingModel(), num_blocks=7)
    prompts = [[start] * (8 + start) for start in range(6)]
    contexts = [context(str(i), prompt) for i, prompt in enumerate(prompts)]
    for _ in range(2):
        assert proposed(drafter, contexts) == [continuation(prompt, 4) for prompt in prompts]
    assert drafter.counts.evicted > 0


def test_one_sequence_twice_in_a_batch_gets_both_answers() -> None:
    drafter = generator(FoldingModel())
    first, second = [1, 2, 3, 4, 5, 6], [1, 2, 9]
    assert proposed(drafter, [context("a", first), context("a", second)]) == [
        continuation(first, 4),
        continuation(second, 4),
    ]


def test_nan_ends_that_draft_only_and_is_not_kept() -> None:
    """Public report 8, the drafter's half."""
    model = FoldingModel()
    drafter = generator(model)
    a, b = [1, 2, 3], [4, 5, 6]
    expected = continuation(a, 4)
    assert expected[1] not in (*a, *b, *continuation(b, 4), expected[0])
    model.poison = expected[1]
    assert proposed(drafter, [context("a", a), context("b", b)]) == [expected[:2], continuation(b, 4)]
    assert drafter.counts.limited == {"nan": 1}
    model.poison = None
    model.rows.clear()
    assert proposed(drafter, [context("a", a)]) == [expected]
    assert model.rows[0] == 3, "nothing of the poisoned cache is used again"


def test_failed_forward_leaves_a_cache_that_still_tells_the_truth() -> None:
    class Failing(FoldingModel):
        fail = False

        def forward(self, batch: Batch) -> Tensor:
            if self.fail:
                raise RuntimeError("out of memory")
            return super().forward(batch)

    model = Failing()
    drafter = generator(model)
    proposed(drafter, [context("a", range(10))])
    model.fail = True
    with pytest.raises(RuntimeError, match="out of memory"):
        proposed(drafter, [context("a", [*range(8), 50, 51]), context("b", [1])])
    model.fail = False
    tokens = [*range(8), 50, 51, 52]
    assert proposed(drafter, [context("a", tokens), context("b", [1])]) == [
        continuation(tokens, 4),
        continuation([1], 4),
    ]


@pytest.mark.parametrize("closed", [True, False])
def test_200_sequences_leave_the_memory_as_it_was_and_drafting_on(closed: bool) -> None:
    """Public report 35: drafting stopped after three requests, because nobody freed the drafter's cache."""
    drafter = generator(FoldingModel(), num_blocks=8)
    for number in range(200):
        prompt = [number % VOCAB, 1, 2, 3, 4]
        for _ in range(3):
            assert proposed(drafter, [context(str(number), prompt)]) == [continuation(prompt, 4)]
            prompt += continuation(prompt, 3)
        if closed:
            drafter.forget(str(number))
            assert drafter.pool.num_free == 8
    for number in range(200):
        drafter.forget(str(number))
    assert drafter.pool.num_free == 8
    assert (drafter.counts.evicted == 0) == closed


@settings(max_examples=60, deadline=None)
@given(
    rounds=st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 3),  # which sequence
                st.integers(0, 9),  # tokens cut off its end
                st.lists(st.integers(0, 3), min_size=1, max_size=9),  # tokens appended
                st.integers(0, 5),  # K
            ),
            min_size=1,
            max_size=4,
            unique_by=lambda step: step[0],
        ),
        min_size=1,
        max_size=8,
    )
)
def test_any_history_of_contexts_in_a_small_pool_equals_greedy(
    rounds: list[list[tuple[int, int, list[int], int]]],
) -> None:
    drafter = generator(FoldingModel(max_model_len=40), num_blocks=10, max_rows=16)
    known: dict[int, list[int]] = {}
    for steps in rounds:
        contexts, expected = [], []
        for number, cut, appended, count in steps:
            tokens = known.get(number, [])
            tokens = (tokens[: max(0, len(tokens) - cut)] + appended)[:37]
            known[number] = tokens
            contexts.append(context(str(number), tokens, count))
            expected.append(continuation(tokens, min(count, 41 - len(tokens))))
        assert proposed(drafter, contexts) == expected


@given(st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(0, 1), max_size=30))
def test_common_prefix_is_where_the_first_tokens_differ(cached: list[int], tokens: list[int]) -> None:
    length = common_prefix(cached, tokens)
    assert cached[:length] == tokens[:length]
    assert length == min(len(cached), len(tokens)) or cached[length] != tokens[length]


# ---- The plugin on a real model: a tiny random Llama in float32.


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small lose more to waking threads than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        initializer_range=0.4,  # peaked logits: float noise never decides
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(llama_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_continuation(
    reference: Any, tokens: Sequence[int], count: int, sampling: SamplingParams
) -> list[int]:
    """Without any cache: the whole text through the model for every token."""
    known = list(tokens)
    for _ in range(count):
        logits = reference(torch.tensor([known])).logits[:, -1].float()
        lanes = [Lane(sampling, len(known))]
        known.append(int(choose_tokens(process(logits, lanes, 128), lanes)))
    return known[len(tokens) :]


def target(folder: Path, *, vocab_size: int = 128) -> TargetInfo:
    return TargetInfo(
        model=str(folder), vocab_size=vocab_size, max_model_len=96, dtype="float32", device="cpu"
    )


def load(folder: Path, **extra: Any) -> ModelDrafter:
    config = SpeculativeConfig(
        method="draft_model",
        model=str(folder),
        extra={"block_size": 16, "kv_cache_memory_bytes": 1 << 20} | extra,
    )
    drafter = drafter_factory("draft_model")(config, target(folder))
    assert isinstance(drafter, ModelDrafter)
    return drafter


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=5)])
def test_drafts_are_the_models_own_continuation(
    llama_folder: Path, reference: Any, sampling: SamplingParams
) -> None:
    """Ragged, over several rounds of which some reject: same weights and noise give the target's tokens."""
    drafter = load(llama_folder, max_num_batched_tokens=32)
    texts = [[3], list(range(40, 75)), [9, 8, 7, 6, 5], [100] * 17]
    for accepted in (4, 0, 2, 4):
        contexts = [DraftContext(str(i), tuple(text), 1 + i, sampling) for i, text in enumerate(texts)]
        expected = [reference_continuation(reference, text, 1 + i, sampling) for i, text in enumerate(texts)]
        assert proposed(drafter, contexts) == expected
        for text, drafts in zip(texts, expected, strict=True):
            text += [*drafts[:accepted], 77]


def test_drafts_are_right_after_eviction(llama_folder: Path, reference: Any) -> None:
    drafter = load(
        llama_folder, kv_cache_memory_bytes=5 * 2 * 2 * 16 * 16 * 4
    )  # 5 blocks, a sequence needs 2
    texts = [[start, *range(start, start + 19)] for start in (10, 20, 30)]
    for _ in range(2):
        for number, text in enumerate(texts):
            (drafts,) = proposed(drafter, [DraftContext(str(number), tuple(text), 4, GREEDY)])
            assert drafts == reference_continuation(reference, text, 4, GREEDY)
            text += drafts[:1]
    assert drafter.generator.counts.evicted > 0


def test_blocks_return_after_200_requests(llama_folder: Path) -> None:
    """Public report 35."""
    drafter = load(llama_folder)
    free = drafter.generator.pool.num_free
    for number in range(200):
        (drafts,) = proposed(drafter, [DraftContext(str(number), (number % 128, 1, 2), 2, GREEDY)])
        assert len(drafts) == 2
        drafter.forget(str(number))
    assert drafter.generator.pool.num_free == free


def test_max_model_len_ends_drafting_earlier(llama_folder: Path) -> None:
    config = SpeculativeConfig(method="draft_model", model=str(llama_folder), max_model_len=20)
    drafter = ModelDrafter(config, target(llama_folder))
    prompts = [tuple(range(length)) for length in (18, 20, 21)]
    drafts = proposed(drafter, [DraftContext(str(i), prompt, 4, GREEDY) for i, prompt in enumerate(prompts)])
    assert [len(answer) for answer in drafts] == [3, 1, 0]


def test_method_draft_model_gets_a_deployment_of_its_own() -> None:
    assert needs_device("draft_model")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": None}, r"speculative_config\.model is missing"),
        ({"model": "no-such-model"}, "no-such-model"),
        ({"max_model_len": 97}, r"max_model_len 97 is above the 96"),
        (
            {"extra": {"kv_cache_bytes": 1}},
            r"unknown key 'kv_cache_bytes'; did you mean 'kv_cache_memory_bytes'",
        ),
        ({"extra": {"dtype": "int8"}}, r"speculative_config\.extra: dtype"),
        ({"extra": {"device": "tpu"}}, r"speculative_config\.extra: device"),
        ({"extra": {"kv_cache_memory_bytes": 8}}, "kv_cache_memory_bytes 8 holds no block"),
        ({"extra": {"kv_cache_memory_bytes": 1 << 50}}, "GiB are free: lower kv_cache_memory_bytes"),
    ],
)
def test_bad_configuration_is_refused_by_key(llama_folder: Path, changes: dict[str, Any], named: str) -> None:
    given_ = {"method": "draft_model", "model": str(llama_folder)} | changes
    with pytest.raises(ConfigError, match=named):
        ModelDrafter(SpeculativeConfig(**given_), target(llama_folder))


def test_drafter_of_another_vocabulary_is_refused_before_its_weights_load(
    llama_folder: Path, tmp_path: Path
) -> None:
    """Public report 30."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((llama_folder / "config.json").read_text().replace("128", "64"))
    with pytest.raises(ConfigError, match=r"64 token ids and target .* 128"):
        ModelDrafter(SpeculativeConfig(method="draft_model", model=str(other)), target(llama_folder))
