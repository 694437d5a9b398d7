"""Every message, with any content of its type, is the same on the other end of a wire."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.messages import (
    WIRE_VERSION,
    AcceptanceRule,
    Close,
    DraftOrder,
    DraftProbs,
    FinishReason,
    Grammar,
    Limits,
    Open,
    Plan,
    Proposal,
    Resync,
    SamplingParams,
    TokenLogprobs,
    Verdict,
    VerifyOrder,
)
from outrider_serve.frames import (
    FROM_DRAFTER,
    FROM_VERIFIER,
    TO_DRAFTER,
    TO_VERIFIER,
    FrameError,
    FrameReader,
    Hello,
    WireMessage,
    encode,
)

HELLO = Hello(WIRE_VERSION, "router", "r1")

texts = st.text(st.characters(codec="utf-8"), max_size=20)
tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8).map(tuple)
numbers = st.floats(allow_nan=False)
counts = st.integers(0, 2**31)

samplings = st.builds(
    SamplingParams,
    temperature=numbers,
    top_p=numbers,
    top_k=st.none() | counts,
    min_p=numbers,
    seed=st.integers(-(2**63), 2**63 - 1),
    choice=counts,
    presence_penalty=numbers,
    frequency_penalty=numbers,
    repetition_penalty=numbers,
    logit_bias=st.lists(st.tuples(counts, numbers), max_size=4).map(tuple),
    rule=st.sampled_from(AcceptanceRule),
)
draft_probs = st.builds(DraftProbs, counts, st.binary(max_size=64), st.binary(max_size=64))
grammars = st.builds(Grammar, st.sampled_from(["json_object", "json_schema", "regex", "ebnf"]), texts)
logprobs = st.builds(TokenLogprobs, numbers, st.lists(st.tuples(counts, numbers), max_size=3).map(tuple))
plans = st.builds(Plan, texts, counts, counts, numbers)
traces = st.none() | texts

MESSAGES: dict[type[WireMessage], st.SearchStrategy[Any]] = {
    Open: st.builds(
        Open,
        texts,
        counts,
        prompt=tokens,
        committed=tokens,
        sampling=samplings,
        limits=st.builds(Limits, counts, tokens, counts),
        plan=plans,
        token=texts,
        traceparent=traces,
        grammar=st.none() | grammars,
        logprobs=st.none() | counts,
    ),
    Plan: plans,
    VerifyOrder: st.builds(
        VerifyOrder, texts, counts, counts, tokens, draft_probs=st.none() | draft_probs, traceparent=traces
    ),
    Close: st.builds(Close, texts, counts, st.booleans()),
    DraftOrder: st.builds(DraftOrder, texts, counts, counts, tokens, counts, traces),
    Proposal: st.builds(
        Proposal, texts, counts, counts, tokens, numbers, numbers, draft_probs=st.none() | draft_probs
    ),
    Verdict: st.builds(
        Verdict,
        texts,
        counts,
        counts,
        tokens,
        drafted=counts,
        accepted=counts,
        invalid_drafts=counts,
        logprobs=st.lists(logprobs, max_size=4).map(tuple),
        finish=st.none() | st.sampled_from(FinishReason),
        error=st.none() | texts,
        cached_tokens=counts,
        batch=counts,
        batch_tokens=counts,
        step_time=numbers,
        queue_time=numbers,
    ),
    Resync: st.builds(Resync, texts, counts, counts),
}


@pytest.mark.parametrize("accepts", [TO_VERIFIER, FROM_VERIFIER, TO_DRAFTER, FROM_DRAFTER])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_was_sent_is_what_arrives(accepts: tuple[type[WireMessage], ...], data: st.DataObject) -> None:
    one_of = st.one_of([MESSAGES[message_type] for message_type in accepts])
    messages = data.draw(st.lists(one_of, max_size=4))
    wire = encode([HELLO]) + encode(messages)
    cut = data.draw(st.integers(0, len(wire)))
    reader = FrameReader(accepts)
    assert [*reader.feed(wire[:cut]), *reader.feed(wire[cut:])] == [[HELLO], messages]


@pytest.mark.parametrize("kind", ["xml", "", None])
def test_a_grammar_of_no_known_kind_is_a_malformed_frame(kind: Any) -> None:
    opening = Open(
        "s",
        0,
        (1,),
        (),
        SamplingParams(),
        Limits(1),
        Plan("s", 0),
        grammar=Grammar(kind, "x"),
    )
    reader = FrameReader(TO_VERIFIER)
    with pytest.raises(FrameError, match="malformed"):
        reader.feed(encode([HELLO]) + encode([opening]))
