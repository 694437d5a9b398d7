"""A smaller causal language model of the target's vocabulary drafts, token by token.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"
(https://arxiv.org/abs/2211.17192). The model runs on the engine's ragged batches over a paged KV cache of its
own. A batch of contexts becomes lanes; every forward carries each lane's next rows, be it a piece of a prompt
or the draft just drawn, so prompts, short and long drafts share forwards and a lane leaves when it has its K
tokens.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from outrider import models
from outrider.config import SpeculativeConfig, Strict, parse
from outrider.contracts import Draft, DraftContext, TargetInfo
from outrider.engine.blocks import BlockPool
from outrider.engine.loading import load_model, parameter_count
from outrider.engine.model import Batch, CausalModel, Span
from outrider.errors import ConfigError
from outrider.messages import DraftProbs
from outrider.sampling.draft import draw_drafts
from outrider.sampling.draft_probs import pack
from outrider.sampling.processors import Lane
from outrider.sampling.target import finite_rows
from outrider.speculation.compatibility import check_drafter

logger = logging.getLogger(__name__)


class DraftModelOptions(Strict):
    """`speculative_config.extra` of method draft_model."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None, Field(description="default: the target's")
    ] = None
    device: Annotated[
        str | None, Field(pattern=r"^(cpu|cuda(:\d+)?)$", description="default: the target's")
    ] = None
    kv_cache_memory_bytes: Annotated[PositiveInt, Field(description="room of the drafter's KV cache")] = (
        256 << 20
    )
    block_size: Literal[16, 32, 64] = 32
    max_num_batched_tokens: Annotated[int, Field(ge=16, description="rows of one forward")] = 512
    cpu_kernels: Literal["auto", "native", "torch"] = "auto"
    cpu_threads: Annotated[PositiveInt | None, Field(description="default: the process's")] = None


class ModelDrafter:
    """The plugin: loads and checks the model, then drafts with it."""

    needs_device = True

    def __init__(self, config: SpeculativeConfig, target: TargetInfo) -> None:
        options = parse(DraftModelOptions, config.extra, where="speculative_config.extra")
        if config.model is None:
            raise ConfigError(
                "speculative_config.model is missing: method draft_model needs the folder of a smaller model "
                "with the target's tokenizer, or a name of `outrider models list`"
            )
        folder = models.resolve(config.model)
        dtype, device = options.dtype or target.dtype, options.device or target.device
        fit = check_drafter(
            folder,
            target,
            max_model_len=config.max_model_len,
            dtype=dtype,
            device=device,
            cache_bytes=options.kv_cache_memory_bytes,
        )
        for note in fit.notes:
            logger.warning("drafter %s: %s", folder, note)
        if options.cpu_threads is not None:
            torch.set_num_threads(options.cpu_threads)
        model = load_model(
            folder,
            dtype=dtype,
            device=device,
            block_size=options.block_size,
            cpu_kernels=options.cpu_kernels,
        )
        num_blocks = options.kv_cache_memory_bytes // model.bytes_per_block()
        if num_blocks < 1:
            raise ConfigError(
                f"speculative_config.extra.kv_cache_memory_bytes {options.kv_cache_memory_bytes} holds no "
                f"block of {model.bytes_per_block()} bytes: raise it"
            )
        max_model_len = min(fit.max_model_len or model.max_model_len, model.max_model_len)
        if num_blocks * model.block_size < max_model_len:
            logger.warning(
                "drafter %s: its KV cache holds %d tokens of the %d it could take: longer requests go on "
                "without drafts; speculative_config.extra.kv_cache_memory_bytes is %d",
                folder,
                num_blocks * model.block_size,
                max_model_len,
                options.kv_cache_memory_bytes,
            )
        self.parameters = parameter_count(folder)
        self.generator = DraftGenerator(
            model,
            drafting=config.drafting,
            top_n=config.draft_probs_top_n,
            num_blocks=num_blocks,
            vocab_size=target.vocab_size,
            max_model_len=max_model_len,
            max_rows=options.max_num_batched_tokens,
        )

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return self.generator.propose(contexts)

    def forget(self, sequence: str) -> None:
        self.generator.forget(sequence)


@dataclass(slots=True)
class DraftingCounts:
    """What kept the model from drafting as asked, counted since it was loaded."""

    limited: Counter[str] = field(default_factory=Counter)  # contexts that got fewer drafts, by reason
    evicted: int = 0  # sequences whose cache made room for another's
    forwards: int = 0


@dataclass(slots=True)
class _Cached:
    """What one sequence has in the KV cache: keys and values of `tokens`, in `blocks`."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Lane:
    """One context on its way through the forwards of a call."""

    cached: _Cached
    context: DraftContext
    pending: list[int]  # tokens whose rows are still to be computed; the last one gives the next draft
    wanted: int
    drafts: list[int] = field(default_factory=list)
    ids: list[Tensor] = field(default_factory=list)  # (N,) a draft, where the rule needs draft_probs
    probs: list[Tensor] = field(default_factory=list)
    done: bool = False

    def sampling_lane(self) -> Lane:
        """The row that draws the next draft: the drafts before it are output like any other."""
        context = self.context
        penalised = context.sampling.penalised
        return Lane(
            context.sampling,
            len(context.tokens) + len(self.drafts),
            prompt=context.tokens[: context.prompt_len] if penalised else (),
            output=[*context.tokens[context.prompt_len :], *self.drafts] if penalised else (),
        )

    def draft(self) -> Draft:
        shipped: DraftProbs | None = None
        if self.ids:
            shipped = pack(torch.stack(self.ids), torch.stack(self.probs))
        return Draft(tuple(self.drafts), shipped)


@dataclass(frozen=True, slots=True)
class _Work:
    """A lane's part in one forward."""

    lane: _Lane
    rows: int

    @property
    def complete(self) -> bool:
        """Whether the newest token is among the rows, so that a draft can be drawn."""
        return self.rows == len(self.lane.pending)


class DraftGenerator:
    """Drafts with a causal model for any number of sequences, inside a fixed number of blocks.

    The cache of a sequence follows its context by the common prefix, so rejections need no message. When
    blocks run out, the cache of the sequence unused for longest is dropped: it can be computed again.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        num_blocks: int,
        vocab_size: int,
        max_model_len: int,
        max_rows: int,
        drafting: Literal["coupled", "probabilistic", "greedy"] = "coupled",
        top_n: int = 64,
    ) -> None:
        """`drafting` and `top_n` are those of `outrider.sampling.draft.draw_drafts`."""
        self.counts = DraftingCounts()
        self.pool = BlockPool(num_blocks, model.block_size, prefix_caching=False)
        self._model = model
        self._vocab_size = min(vocab_size, model.vocab_size)
        self._max_len = min(max_model_len, model.max_model_len, num_blocks * model.block_size)
        self._max_rows = max_rows
        self._drafting = drafting
        self._top_n = top_n
        self._cache: OrderedDict[str, _Cached] = OrderedDict()  # least recently used first
        model.allocate(num_blocks)

    def forget(self, sequence: str) -> None:
        cached = self._cache.pop(sequence, None)
        if cached is not None:
            self.pool.release(cached.blocks)

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Draft for every context that the model can take; the others get nothing, and are counted."""
        answers = [Draft() for _ in contexts]
        rooms = [self._room(context) for context in contexts]
        waiting = deque(index for index, wanted in enumerate(rooms) if wanted > 0)
        while waiting:  # once, unless the caches of the whole batch do not fit side by side
            wave: dict[str, _Lane] = {}
            places: list[int] = []
            while waiting and (lane := self._admit(contexts[waiting[0]], rooms[waiting[0]], wave)):
                index = waiting.popleft()
                wave[contexts[index].sequence] = lane
                places.append(index)
            self._run(list(wave.values()))
            for index, lane in zip(places, wave.values(), strict=True):
                answers[index] = lane.draft()
        return answers

    def _room(self, context: DraftContext) -> int:
        """How many drafts the model can give: all that are wanted, fewer near its context's end, or none."""
        length = len(context.tokens)
        if length and max(context.tokens) >= self._model.vocab_size:
            self.counts.limited["vocabulary"] += 1  # a token id that only the target has
            return 0
        room = self._max_len - length + 1 if length else 0  # the last draft is drawn, but needs no row
        if room < context.num_tokens:
            self.counts.limited["context"] += 1
        return max(0, min(context.num_tokens, room))

    def _admit(self, context: DraftContext, wanted: int, wave: Mapping[str, _Lane]) -> _Lane | None:
        """Give a context its blocks and what is to be computed; None if that must wait for the next wave.

        The first of a wave always gets them: one sequence of `_max_len` tokens fits into the pool.
        """
        if context.sequence in wave:  # twice in one batch: the cache can follow only one at a time
            return None
        tokens = list(context.tokens)
        cached = self._cache.get(context.sequence) or _Cached()
        missing = max(0, self.pool.blocks_for(len(tokens) + wanted - 1) - len(cached.blocks))
        while missing > self.pool.num_free:
            unused = (other for other in self._cache if other not in wave and other != context.sequence)
            victim = next(unused, None)
            if victim is None:
                return None
            self.forget(victim)
            self.counts.evicted += 1
        cached.blocks += self.pool.allocate(missing)
        kept = min(common_prefix(cached.tokens, tokens), len(tokens) - 1)  # the newest row gives the logits
        del cached.tokens[kept:]
        self._cache[context.sequence] = cached
        self._cache.move_to_end(context.sequence)
        return _Lane(cached, context, pending=tokens[kept:], wanted=wanted)

    def _run(self, lanes: list[_Lane]) -> None:
        """Forward until every lane has its drafts."""
        while lanes:
            works = self._next_rows(lanes)
            logits = self._model.forward(self._batch(works))
            self.counts.forwards += 1
            complete = [work.lane for work in works if work.complete]
            for work in works:
                work.lane.cached.tokens += work.lane.pending[: work.rows]
                del work.lane.pending[: work.rows]
            if complete:
                self._draw(complete, logits)
            lanes = [lane for lane in lanes if not lane.done]

    def _next_rows(self, lanes: Sequence[_Lane]) -> list[_Work]:
        """Rows of one forward: lanes that draft first, then prompts, the shortest first."""
        works = []
        room = self._max_rows
        for lane in sorted(lanes, key=lambda lane: len(lane.pending)):
            rows = min(len(lane.pending), room)
            if not rows:
                break
            works.append(_Work(lane, rows))
            room -= rows
        return works

    def _batch(self, works: Sequence[_Work]) -> Batch:
        tokens: list[int] = []
        positions: list[int] = []
        spans = []
        logit_rows = []
        for work in works:
            cached = work.lane.cached
            before, length = len(cached.tokens), len(cached.tokens) + work.rows
            blocks = tuple(cached.blocks[: self.pool.blocks_for(length)])
            spans.append(Span(start=len(tokens), rows=work.rows, length=length, blocks=blocks))
            tokens += work.lane.pending[: work.rows]
            positions += range(before, length)
            if work.complete:
                logit_rows.append(len(tokens) - 1)
        return Batch(
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor(positions, dtype=torch.int64),
            tuple(spans),
            torch.tensor(logit_rows, dtype=torch.int64),
        )

    def _draw(self, lanes: Sequence[_Lane], logits: Tensor) -> None:
        """Draw each lane's next draft by the rule of its request. logits: (L, V), a row for each lane."""
        sound = finite_rows(logits).tolist()
        drawn = draw_drafts(
            logits,
            [lane.sampling_lane() for lane in lanes],
            vocab_size=self._vocab_size,
            rounds=[len(lane.context.tokens) for lane in lanes],
            drafting=self._drafting,
            top_n=self._top_n,
        )
        for row, (lane, token, finite) in enumerate(zip(lanes, drawn.tokens.tolist(), sound, strict=True)):
            if not finite:
                self.counts.limited["nan"] += 1
                lane.cached.tokens.clear()  # the NaN may sit in keys and values: compute them anew
                lane.done = True
                continue
            lane.drafts.append(token)
            lane.pending.append(token)
            if lane.context.sampling.needs_draft_probs and drawn.ids is not None and drawn.probs is not None:
                lane.ids.append(drawn.ids[row])
                lane.probs.append(drawn.probs[row])
            lane.done = len(lane.drafts) == lane.wanted


def common_prefix(cached: list[int], tokens: list[int]) -> int:
    """Length of the longest common prefix, by bisection: comparing slices costs less than comparing items."""
    low, high = 0, min(len(cached), len(tokens))
    while low < high:
        middle = (low + high + 1) // 2
        if cached[low:middle] == tokens[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
