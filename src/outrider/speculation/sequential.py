"""The reference schedule: draft, then verify. The router's half of one sequence's rounds.

No I/O and no clock: messages come in by `on_*`, go out by the legs that are attached. What it keeps can be
rebuilt from the committed tokens at any time: that is how a leg is re-homed.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import Any

from outrider.contracts import Draft, DraftContext, Drafter, DrafterLeg, VerifierLeg
from outrider.generation import GenerationRequest, GenerationStats
from outrider.messages import (
    Close,
    DraftOrder,
    DraftProbs,
    Open,
    Plan,
    Proposal,
    Resync,
    TokenLogprobs,
    Verdict,
    VerifyOrder,
)
from outrider.sampling.draft_probs import guess
from outrider.speculation.prediction import Prediction

logger = logging.getLogger(__name__)

MISSED_GATES_ALLOWED = 8
"""Rounds in a row that may pass without the drafter's answer before the sequence decodes plainly."""

TIMEOUTS_ALLOWED = 2
"""The same under the ratio rules, where the verifier waits for a draft as long as `draft_timeout_s`. Not 1:
an order may cross the verdict of the prefill."""

PAUSE_TOKENS = 32
"""Tokens of plain decoding after that; twice as many every time the drafter is late again."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens that a verdict added to what the router knew."""

    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]  # which of them were accepted drafts
    predicted: bool = False  # the drafts were the client's prediction
    rejected: int = 0  # drafts that were verified and not accepted
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class _Predicted:
    """The newest order came out of the client's prediction."""

    base_len: int
    count: int


def _packed(probs: Any) -> DraftProbs | None:
    """A plugin's distributions, if they are what a message carries: the verifier judges the numbers."""
    match probs:
        case None | DraftProbs(width=int(), token_ids=bytes(), probs=bytes()):
            return probs
    raise TypeError(f"Draft.probs is a {type(probs).__name__}: pack it by outrider.sampling.draft_probs")


class SequentialRounds:
    """Steers one sequence: every verdict is answered with the next drafts, or with a plan of none."""

    def __init__(
        self,
        sequence: str,
        request: GenerationRequest,
        *,
        num_tokens: int,
        gate_s: float,
        drafter: Drafter | None,
        stats: GenerationStats,
    ) -> None:
        """`num_tokens` is K; `drafter` drafts in this process, None means a leg may come later."""
        self.sequence = sequence
        self.tokens: list[int] = list(request.prompt)
        self.verify_epoch = 0  # of the leg that is attached or being leased, as is the other
        self.draft_epoch = 0
        self.verifier_spoke = False  # whether the verifier of this epoch has given a token
        self._request = request
        self._num_tokens = num_tokens
        self._gate_s = gate_s
        self._drafter = drafter
        self._stats = stats
        self._verifier: VerifierLeg | None = None
        self._remote: DrafterLeg | None = None
        self._drafter_knows = 0  # tokens that the remote drafter was told
        self._asked_at: int | None = None  # base of the draft order that is out
        self._missed = 0
        self._pause = PAUSE_TOKENS  # of the next pause
        self._paused_until = 0  # committed length at which a late drafter is asked again
        self._ratio = request.sampling.needs_draft_probs  # then nothing may depend on drawn tokens
        self._prediction = Prediction(request.prediction) if request.prediction and num_tokens else None
        self._told: Plan | None = None  # the plan that the verifier has
        self._predicted: _Predicted | None = None  # set while the newest order is the prediction's

    # ---- legs

    @property
    def plan(self) -> Plan:
        """Gated while somebody drafts, free-running otherwise."""
        asked = self._remote is not None and len(self.tokens) >= self._paused_until
        predicting = self._prediction is not None and (self._predicted is not None or not self.verifier_spoke)
        drafting = self._drafter is not None or asked or predicting
        return Plan(
            self.sequence,
            self.verify_epoch,
            num_tokens=self._num_tokens if drafting else 0,
            gate_s=self._gate_s if drafting else 0.0,
        )

    def attach_verifier(self, leg: VerifierLeg, opened_with: Plan) -> None:
        """The verifier has the sequence. It is told if the plan changed while it was being leased.

        A leg of an older epoch, here and in `attach_drafter`, came too late: it is freed at once.
        """
        if opened_with.epoch != self.verify_epoch:
            leg.send(Close(self.sequence, opened_with.epoch, cancelled=True))
            return
        self._verifier, self._told = leg, opened_with
        if self.plan != opened_with:
            self._send_plan()
        if self.verifier_spoke:  # its first verdict overtook the leg, so the answer to it had no way out
            self._order_drafts()

    def attach_drafter(self, leg: DrafterLeg, opening: Open) -> None:
        """A remote drafter knows the tokens of `opening`: from now on the verifier waits for orders."""
        if opening.epoch != self.draft_epoch:
            leg.send(Close(self.sequence, opening.epoch, cancelled=True))
            return
        self._remote = leg
        self._drafter_knows = len(opening.prompt) + len(opening.committed)
        self._asked_at, self._missed = None, 0
        self._stats.fallback = None
        self._paused_until = 0
        self._send_plan()
        self._order_drafts()

    def detach_drafter(self, reason: str) -> None:
        """No more drafts, for the given reason: the sequence free-runs. A successor gets a new epoch."""
        self._release_drafter(cancelled=False)
        self._stats.fallback = reason
        self._send_plan()

    def detach_verifier(self) -> None:
        """The verifier is lost; its successor gets a new epoch and all committed tokens.

        It is closed all the same: a verifier that was merely silent would go on decoding.
        """
        self._release_verifier(cancelled=False)
        self.verifier_spoke = False
        self._asked_at = None

    def close(self, *, cancelled: bool) -> None:
        """Free the sequence on both legs. What still comes, messages or legs, is of an old epoch."""
        self._release_verifier(cancelled=cancelled)
        self._release_drafter(cancelled=cancelled)

    def _release_verifier(self, *, cancelled: bool) -> None:
        if self._verifier is not None:
            self._verifier.send(Close(self.sequence, self.verify_epoch, cancelled=cancelled))
        self._verifier = None
        self.verify_epoch += 1

    def _release_drafter(self, *, cancelled: bool) -> None:
        if self._remote is not None:
            self._remote.send(Close(self.sequence, self.draft_epoch, cancelled=cancelled))
        if self._drafter is not None:
            self._forget(self._drafter)
        self._remote, self._drafter = None, None
        self.draft_epoch += 1

    # ---- messages

    def on_verdict(self, verdict: Verdict) -> Committed | None:
        """Take the truth in and order the next drafts. None: nothing new (a replay, or an old epoch)."""
        if verdict.epoch != self.verify_epoch:
            return None
        known = len(self.tokens) - verdict.base_len
        if known < 0:  # a verdict was lost: an order on the old base has it replayed
            self._order(len(self.tokens), Draft())
            return None
        new = verdict.tokens[known:]
        if not new:
            return None
        if verdict.batch:  # a step, not a replay
            self._count(verdict)
            self._missed = self._missed + 1 if self._asked_at is not None and not verdict.drafted else 0
        self.tokens += new
        self.verifier_spoke = True
        drafted = tuple(known + index < verdict.accepted for index in range(len(new)))
        predicted = self._is_predicted(verdict)
        reported = verdict.logprobs[known:]
        if verdict.finish is None:
            self._order_drafts()
        return Committed(new, drafted, predicted, verdict.drafted - verdict.accepted, reported)

    def _count(self, verdict: Verdict) -> None:
        self._stats.count(drafted=verdict.drafted, accepted=verdict.accepted, invalid=verdict.invalid_drafts)
        if self._is_predicted(verdict):
            self._stats.predicted_drafts += verdict.drafted

    def _is_predicted(self, verdict: Verdict) -> bool:
        """Whether the verified drafts are the prediction's, perhaps re-based to what was committed since."""
        order = self._predicted
        return order is not None and 0 <= verdict.base_len - order.base_len < order.count

    def on_proposal(self, proposal: Proposal) -> None:
        """Pass a draft on. One that comes late is still sent: the verifier re-bases it.

        Not under a ratio rule: its position was drawn without it. Nor where the prediction has been ordered.
        """
        if proposal.epoch != self.draft_epoch or self._remote is None:
            return
        if proposal.base_len > len(self.tokens):
            return  # no drafter knows more than the router told it
        if proposal.base_len == self._asked_at:  # the answer to an older order is no answer to this one
            self._asked_at = None
        if proposal.base_len < len(self.tokens):
            self._stats.late_proposals += 1
            if self._ratio or self._predicted is not None:
                return
        self._order(proposal.base_len, Draft(proposal.tokens, proposal.draft_probs))

    def on_verifier_resync(self, resync: Resync) -> bool:
        """The verifier has less than the router: True when the sequence must be opened anew there."""
        return resync.epoch == self.verify_epoch and resync.committed_len < len(self.tokens)

    def on_drafter_resync(self, resync: Resync) -> bool:
        """The drafter's base is another: tell it what it lacks. True when it must be opened anew."""
        if resync.epoch != self.draft_epoch or self._remote is None:
            return False
        if not 0 < resync.committed_len <= len(self.tokens):
            return True
        self._drafter_knows = resync.committed_len
        self._order_drafts()
        return False

    # ---- orders

    def _order_drafts(self) -> None:
        if self._predict():
            return
        if self._drafter is not None:
            draft = self._propose(self._drafter)
            if draft is not None:
                self._order(len(self.tokens), draft)
        elif self._remote is not None:
            if self._ratio and self._missed >= TIMEOUTS_ALLOWED:
                self.detach_drafter(f"drafter lost: silent for {self._missed} x {self._gate_s:g} s")
                return
            if self._missed >= MISSED_GATES_ALLOWED:
                self._pause_drafts()
            if len(self.tokens) < self._paused_until:
                return
            if self._paused_until:
                self._paused_until = 0
                self._stats.fallback = None
                self._send_plan()
            self._asked_at = len(self.tokens)
            self._remote.send(
                DraftOrder(
                    self.sequence,
                    self.draft_epoch,
                    base_len=len(self.tokens),
                    committed_since=tuple(self.tokens[self._drafter_knows :]),
                    num_tokens=self._num_tokens,
                    traceparent=self._request.traceparent,
                )
            )
            self._drafter_knows = len(self.tokens)

    def _predict(self) -> bool:
        """Order what the client's prediction says next; False where it says nothing."""
        if self._prediction is None:
            return False
        output = self.tokens[len(self._request.prompt) :]
        tokens = self._prediction.continuation(output, self._num_tokens)
        self._predicted = _Predicted(len(self.tokens), len(tokens)) if tokens else None
        if self.plan != self._told:
            self._send_plan()  # with nobody else to draft, no token waits for the router
        if not tokens:
            return False
        self._asked_at = None  # an answer that is still out is no answer to this round
        self._order(len(self.tokens), guess(tokens, self._request.sampling))
        return True

    def _pause_drafts(self) -> None:
        """Free-run for a while: waiting for a drafter that does not answer slows the whole batch down."""
        self._stats.fallback = f"drafter late: {self._missed} rounds in a row"
        self._paused_until = len(self.tokens) + self._pause
        self._pause *= 2
        self._missed, self._asked_at = 0, None
        self._send_plan()

    def _send_plan(self) -> None:
        if self._verifier is not None:
            self._told = self.plan
            self._verifier.send(self.plan)

    def _propose(self, drafter: Drafter) -> Draft | None:
        context = DraftContext(
            self.sequence,
            self.tokens,
            self._num_tokens,
            self._request.sampling,
            prompt_len=len(self._request.prompt),
        )
        try:
            (draft,) = drafter.propose([context])
            tokens = tuple(int(token) for token in itertools.islice(draft.tokens, self._num_tokens))
            return Draft(tokens, _packed(draft.probs) if self._ratio else None)
        except Exception as error:  # a plugin's fault costs drafts, never the request
            logger.exception("the in-process drafter failed on %s; it decodes plainly", self.sequence)
            self.detach_drafter(f"the drafter failed: {type(error).__name__}")
            return None

    def _forget(self, drafter: Drafter) -> None:
        try:
            drafter.forget(self.sequence)
        except Exception:  # a plugin may raise anything; the sequence is over for it all the same
            logger.exception("the in-process drafter could not forget %s", self.sequence)

    def _order(self, base_len: int, draft: Draft) -> None:
        if self._verifier is not None:
            self._verifier.send(
                VerifyOrder(
                    self.sequence,
                    self.verify_epoch,
                    base_len,
                    draft.tokens,
                    draft_probs=draft.probs,
                    traceparent=self._request.traceparent,
                )
            )
