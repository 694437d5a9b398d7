"""What a service may be told, checked at the edge; unknown keys are refused with the nearest known one.

`ServiceArgs` is the application's `args`: a change restarts the service. The three `*Options` are the
deployments' `user_config`: applied hot, by `reconfigure()`. Key names follow vLLM where it has one.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from outrider.errors import ConfigError
from outrider.messages import AcceptanceRule

T = TypeVar("T", bound=BaseModel)

Device: TypeAlias = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]

ROUTER_SPARE_REQUESTS = 64
"""Places a router keeps beside running and queued requests: health, metrics, and those being refused."""


class Strict(BaseModel):
    """Base of every section: frozen, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class SpeculativeConfig(Strict):
    """Who drafts and how much, with vLLM's spellings."""

    method: Annotated[str, Field(description="drafter plugin: ngram, draft_model, or a third party's")] = (
        "ngram"
    )
    model: Annotated[str | None, Field(description="the drafter's weights, for methods that have some")] = (
        None
    )
    num_speculative_tokens: Annotated[
        int, Field(ge=0, le=64, description="K, drafts a round; 0 is plain decoding")
    ] = 4
    prompt_lookup_max: Annotated[int, Field(ge=1, le=64, description="ngram: longest suffix looked up")] = 4
    prompt_lookup_min: Annotated[int, Field(ge=1, le=64, description="ngram: shortest suffix looked up")] = 2
    max_model_len: Annotated[PositiveInt | None, Field(description="the drafter's own context limit")] = None
    rejection_sample_method: Annotated[
        AcceptanceRule,
        Field(description="acceptance rule of sampled requests: coupled, rejection or block"),
    ] = AcceptanceRule.COUPLED
    draft_sample_method: Annotated[
        Literal["coupled", "probabilistic", "greedy"] | None,
        Field(
            description="how sampled drafts are drawn: coupled (with the target's noise; only under "
            "coupled), probabilistic (with noise of its own and draft_probs; only under rejection and "
            "block) or greedy; default: what fits the rule"
        ),
    ] = None
    draft_probs_top_n: Annotated[
        int,
        Field(ge=1, le=1024, description="probabilistic: draw from so many likeliest tokens, and ship those"),
    ] = 64
    extra: Annotated[
        dict[str, Any], Field(description="keys of a third party's drafter, passed through untouched")
    ] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_tensor_parallel(cls, values: Any) -> Any:
        if isinstance(values, dict) and "tensor_parallel_size" in values:
            raise ValueError(
                "tensor_parallel_size is the target's; a drafter's would be draft_tensor_parallel_size, "
                "which is not supported: remove the key"
            )
        return values

    @property
    def drafting(self) -> Literal["coupled", "probabilistic", "greedy"]:
        """`draft_sample_method`, or what fits the rule."""
        coupled = self.rejection_sample_method is AcceptanceRule.COUPLED
        return self.draft_sample_method or ("coupled" if coupled else "probabilistic")

    @model_validator(mode="after")
    def _drafts_fit_the_rule(self) -> Self:
        rule = self.rejection_sample_method
        misfit = "probabilistic" if rule is AcceptanceRule.COUPLED else "coupled"
        if self.draft_sample_method == misfit:
            fits = "coupled or greedy" if rule is AcceptanceRule.COUPLED else "probabilistic or greedy"
            reason = (
                "which never looks at draft_probs"
                if rule is AcceptanceRule.COUPLED
                else "under which noise that is shared with the target would bias the text"
            )
            raise ValueError(
                f"draft_sample_method {misfit} does not go with rejection_sample_method {rule}, {reason}: "
                f"say {fits}, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _lookup_window(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max "
                f"{self.prompt_lookup_max}: lower the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _no_weights_for_lookup(self) -> Self:
        for key, value in (("model", self.model), ("max_model_len", self.max_model_len)):
            if self.method == "ngram" and value is not None:
                raise ValueError(
                    f"{key} {value!r} does nothing for method ngram, which has no weights: "
                    "remove it, or say method: draft_model"
                )
        return self


class ReplicaArgs(Strict):
    """Size of one pool."""

    num_replicas: PositiveInt = 1
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] = 0.0


class RouterArgs(ReplicaArgs):
    """Routers, and the two bounds of theirs that Serve keeps: the hot limits must stay inside them."""

    max_ongoing_requests: Annotated[
        PositiveInt, Field(description="HTTP requests one router holds, running, queued and probes")
    ] = 1024
    graceful_shutdown_timeout_s: Annotated[
        float, Field(gt=0, description="a leaving replica of any pool waits so long for its requests")
    ] = 660.0
    num_cpus: Annotated[float, Field(ge=0)] = 0.5

    def check(self, limits: LimitOptions, *, sequences: int) -> None:
        """Raise `ConfigError` where the hot limits do not fit what was fixed at start.

        `sequences` is how many run on all verifiers together, which one router may come to hold alone.
        Beyond Serve's bound requests wait where neither `max_queued_requests` nor `queue_timeout_s` acts.
        """
        wanted = sequences + limits.max_queued_requests + ROUTER_SPARE_REQUESTS
        if wanted > self.max_ongoing_requests:
            raise ConfigError(
                f"limits.max_queued_requests {limits.max_queued_requests} does not fit: with {sequences} "
                f"running and {ROUTER_SPARE_REQUESTS} for probes a router would hold {wanted} requests, and "
                f"router.max_ongoing_requests is {self.max_ongoing_requests}: lower the first or raise that"
            )
        if limits.request_timeout_s > self.graceful_shutdown_timeout_s:
            raise ConfigError(
                f"limits.request_timeout_s {limits.request_timeout_s:g} is above "
                f"router.graceful_shutdown_timeout_s {self.graceful_shutdown_timeout_s:g}: a leaving replica "
                "would cut requests; lower the first or raise the second"
            )


class VerifierArgs(ReplicaArgs):
    port: Annotated[int, Field(ge=0, le=65535, description="link port; 0 picks a free one")] = 0


class DrafterArgs(ReplicaArgs):
    placement: Annotated[
        Literal["auto", "inprocess", "actor"],
        Field(description="auto: in the router unless the method needs a device"),
    ] = "auto"
    device: Annotated[
        Device, Field(description="auto: cuda where the process that drafts is given GPUs, else cpu")
    ] = "auto"
    port: Annotated[int, Field(ge=0, le=65535, description="link port; 0 picks a free one")] = 0
    max_num_seqs: PositiveInt = 64


class EngineArgs(Strict):
    """The target model and the room it gets."""

    model: Annotated[str, Field(description="folder of a checkpoint, or a name of `outrider models list`")]
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[
        Device, Field(description="auto: cuda where verifiers are given GPUs (locally: where torch sees one)")
    ] = "auto"
    max_model_len: Annotated[PositiveInt | None, Field(description="default: the model's own")] = None
    block_size: Annotated[Literal[16, 32, 64], Field(description="tokens of one KV block")] = 32
    kv_cache_memory_bytes: Annotated[
        PositiveInt, Field(description="room of the paged KV cache; weights come on top")
    ] = 1 << 30
    num_kv_blocks: Annotated[PositiveInt | None, Field(description="overrides kv_cache_memory_bytes")] = None
    enable_prefix_caching: bool = True
    numerics: Annotated[
        Literal["auto", "strict", "fast"],
        Field(
            description="strict: a token's logits are bitwise the same in any company, so that a seed gives "
            "the same text with and without drafts; auto: strict where it is nearly free, else fast"
        ),
    ] = "auto"
    max_num_seqs: PositiveInt = 32
    max_num_batched_tokens: Annotated[int, Field(ge=16, description="rows of one step")] = 512
    cpu_kernels: Annotated[
        Literal["auto", "native", "torch"],
        Field(description="native: C kernels built on first use; auto falls back to torch, and says so"),
    ] = "auto"
    cpu_threads: Annotated[
        PositiveInt, Field(description="threads of torch's kernels; the C kernels always use one")
    ] = 1

    @model_validator(mode="after")
    def _one_native_thread(self) -> Self:
        if self.cpu_kernels == "native" and self.cpu_threads > 1:
            raise ValueError(
                f"cpu_threads is {self.cpu_threads}, and cpu_kernels: native always use one: remove "
                "cpu_threads, or say cpu_kernels: torch"
            )
        return self

    @model_validator(mode="after")
    def _a_row_each(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}: every running sequence needs a row a step; raise the first or lower "
                "the second"
            )
        return self

    def drafts_do_not_fit(self, speculative: SpeculativeConfig | None) -> str | None:
        """Why a round's drafts cannot be verified in one step; None when they can."""
        if speculative is None or speculative.num_speculative_tokens < self.max_num_batched_tokens:
            return None
        return (
            f"num_speculative_tokens {speculative.num_speculative_tokens} and the newest token do not fit a "
            f"step of max_num_batched_tokens {self.max_num_batched_tokens}: lower the first or raise the last"
        )


class ServiceArgs(EngineArgs):
    """The `args` of the application: a change restarts the service.

    A replica sees the GPUs that Ray reserves for it, numbered from 0, and no others. So `device: auto` is
    answered here, by `num_gpus`: `device` and `drafter.device` are never "auto" in checked args.
    """

    served_model_name: Annotated[str | None, Field(description="default: the last part of `model`")] = None
    placement: Annotated[
        Literal["separate", "colocated"],
        Field(description="separate: a verifier on a GPU holds a whole one"),
    ] = "separate"
    router: RouterArgs = RouterArgs()
    verifier: VerifierArgs = VerifierArgs()
    drafter: DrafterArgs = DrafterArgs()

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @model_validator(mode="after")
    def _whole_gpu(self) -> Self:
        if self.placement == "separate" and 0 < self.verifier.num_gpus < 1:
            raise ValueError(
                f"verifier.num_gpus is {self.verifier.num_gpus}: two fractions may land on one GPU; "
                "ask for 1, or say placement: colocated"
            )
        return self

    @model_validator(mode="after")
    def _one_sequence_fits(self) -> Self:
        if self.num_kv_blocks is None or self.max_model_len is None:
            return self  # the model decides: `load_engine` compares them
        room = self.num_kv_blocks * self.block_size
        if room < self.max_model_len:
            raise ValueError(
                f"num_kv_blocks {self.num_kv_blocks} of block_size {self.block_size} hold {room} tokens and "
                f"max_model_len is {self.max_model_len}: one sequence must always fit; raise the first or "
                "lower the last"
            )
        return self

    @model_validator(mode="after")
    def _devices(self) -> Self:
        drafting = "drafter" if self.drafter.placement == "actor" else "router"
        draft_gpus = self.drafter.num_gpus if drafting == "drafter" else self.router.num_gpus
        device = _device("device", self.device, "verifier.num_gpus", self.verifier.num_gpus)
        draft_device = _device("drafter.device", self.drafter.device, f"{drafting}.num_gpus", draft_gpus)
        # Frozen for everybody else: this is the last step of the making.
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "drafter", self.drafter.model_copy(update={"device": draft_device}))
        return self


def _device(key: str, asked: str, gpus_key: str, gpus: float) -> str:
    """What `asked` means in a process that is given so many GPUs; a fraction is a share of one."""
    if asked == "auto":
        return "cuda" if gpus > 0 else "cpu"
    kind, _, index = asked.partition(":")
    if kind == "cuda" and gpus <= int(index or 0):
        raise ValueError(
            f"{key} is {asked} and {gpus_key} is {gpus:g}: raise {gpus_key} to {int(index or 0) + 1}, or say "
            f"{key}: cpu"
        )
    return asked


class LimitOptions(Strict):
    """What one router takes in before it says no."""

    max_queued_requests: Annotated[PositiveInt, Field(description="waiting for a verifier, a router")] = 256
    queue_timeout_s: Annotated[float, Field(gt=0, description="then 429")] = 60.0
    request_timeout_s: Annotated[float, Field(gt=0, description="a whole generation")] = 600.0
    max_body_bytes: PositiveInt = 4 << 20
    default_max_tokens: Annotated[PositiveInt, Field(description="of /v1/completions, as OpenAI's 16")] = 16


class PlannerOptions(Strict):
    """Pins of the planner."""

    gate_ms: Annotated[
        float, Field(ge=0, le=60_000, description="how long a step waits for a gated sequence's order")
    ] = 50.0
    draft_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            description="under rejection and block a step waits for drafts as long as that: whether a draft "
            "comes in time must not depend on its tokens; then the drafter counts as lost",
        ),
    ] = 5.0
    first_verdict_timeout_s: Annotated[float, Field(gt=0, description="prefill included")] = 120.0
    verdict_timeout_s: Annotated[float, Field(gt=0, description="then the verifier counts as lost")] = 20.0


class RouterOptions(Strict):
    """`user_config` of the deployment Router; no speculative_config means plain decoding."""

    speculative_config: SpeculativeConfig | None = None
    limits: LimitOptions = LimitOptions()
    planner: PlannerOptions = PlannerOptions()


class VerifierOptions(Strict):
    """`user_config` of the deployment Verifier."""


class DrafterOptions(Strict):
    """`user_config` of the deployment Drafter: the same speculative_config as the Router's."""

    speculative_config: SpeculativeConfig = SpeculativeConfig()


class LocalConfig(EngineArgs):
    """What `outrider.local` takes: the engine, and those of the deployments' hot keys that act here too."""

    speculative_config: SpeculativeConfig | None = None
    planner: PlannerOptions = PlannerOptions()
    request_timeout_s: Annotated[float, Field(gt=0, description="a whole generation")] = 600.0

    @property
    def limits(self) -> LimitOptions:
        """What the coordinator reads of a router's limits; nothing queues in one process."""
        return LimitOptions(request_timeout_s=self.request_timeout_s)

    @model_validator(mode="after")
    def _drafts_fit(self) -> Self:
        if fault := self.drafts_do_not_fit(self.speculative_config):
            raise ValueError(fault)
        return self


def parse(model: type[T], values: Any, *, where: str) -> T:
    """Validate `values`, or raise `ConfigError` naming the key, the value and the nearest known key.

    `where` says which part of the file is meant, for example "args" or "Router.user_config".
    """
    try:
        return model.model_validate(values if values is not None else {})
    except ValidationError as error:
        raise ConfigError("\n".join(f"{where}: {line}" for line in explain(model, error))) from None


def explain(model: type[BaseModel], error: ValidationError) -> list[str]:
    """One line a fault: path, what is wrong, the value, and for an unknown key the nearest known one."""
    lines = []
    for fault in error.errors(include_url=False):
        path = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            known = sorted(_fields_at(model, fault["loc"][:-1]))
            near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
            cure = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            lines.append(f"unknown key {path!r}; {cure}")
        elif fault["type"] == "missing":
            lines.append(f"{path} is missing")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            # Keys that do not fit one another are named by the message; the whole section would drown it.
            got = "" if isinstance(fault["input"], dict) else f" (got {fault['input']!r})"
            lines.append(f"{path}: {message}{got}".removeprefix(": "))
    return lines


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> set[str]:
    current: type[BaseModel] = model
    for part in path:
        field = current.model_fields.get(str(part))
        if field is None:
            return set()
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not nested:
            return set()
        current = nested[0]
    return set(current.model_fields)
