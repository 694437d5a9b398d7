"""Fields that OpenAI or vLLM know and that are refused here, and what is no part of this service at all."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_serve.openai_body import Unsupported

IN_BOTH = (
    # vLLM
    Unsupported("add_special_tokens"),
    Unsupported("allowed_token_ids"),
    Unsupported("bad_words", ([],)),
    Unsupported("cache_salt"),
    Unsupported("include_stop_str_in_output", (False,)),
    Unsupported("kv_transfer_params"),
    Unsupported("length_penalty", (1,)),
    Unsupported("priority", (0,)),
    Unsupported("prompt_logprobs"),
    Unsupported("repetition_detection"),
    Unsupported("request_id"),
    Unsupported("return_token_ids", (False,)),
    Unsupported("return_tokens_as_token_ids", (False,)),
    Unsupported("skip_special_tokens", (True,)),
    Unsupported("spaces_between_special_tokens", (True,)),
    Unsupported("truncate_prompt_tokens"),
    Unsupported("truncation_side"),
    Unsupported("use_beam_search", (False,)),
    Unsupported("vllm_xargs", ({},)),
)
IN_CHAT = (
    # OpenAI
    Unsupported("audio"),
    Unsupported("function_call", ("none", "auto")),
    Unsupported("functions", ([],)),
    Unsupported("metadata", ({},)),
    Unsupported("modalities", (["text"],)),
    Unsupported("moderation"),
    Unsupported("parallel_tool_calls", (True,)),
    Unsupported("prompt_cache_key"),
    Unsupported("prompt_cache_options"),
    Unsupported("prompt_cache_retention"),
    Unsupported("reasoning_effort", ("none",)),
    Unsupported("safety_identifier"),
    Unsupported("service_tier", ("auto", "default")),
    Unsupported("store", (False,)),
    Unsupported("tool_choice", ("none", "auto")),
    Unsupported("tools", ([],)),
    Unsupported("verbosity", ("medium",)),
    Unsupported("web_search_options"),
    # vLLM
    Unsupported("add_generation_prompt", (True,)),
    Unsupported("best_of", (1,)),
    Unsupported("chat_template"),
    Unsupported("chat_template_kwargs", ({},)),
    Unsupported("continue_final_message", (False,)),
    Unsupported("documents", ([],)),
    Unsupported("echo", (False,)),
    Unsupported("include_reasoning", (True,)),
    Unsupported("mm_processor_kwargs", ({},)),
    Unsupported("thinking_token_budget"),
)
IN_COMPLETIONS = (
    # OpenAI
    Unsupported("best_of", (1,)),
    Unsupported("suffix", ("",)),
    # vLLM
    Unsupported("prompt_embeds"),
)
IN_MESSAGES = (
    # Clients send an answer's message back as they got it, with these set to null.
    Unsupported("annotations", ([],)),
    Unsupported("audio"),
    Unsupported("function_call"),
    Unsupported("name"),
    Unsupported("reasoning"),
    Unsupported("reasoning_content"),
    Unsupported("refusal"),
    Unsupported("tool_call_id"),
    Unsupported("tool_calls", ([],)),
)
IN_STREAM_OPTIONS = (
    Unsupported("continuous_usage_stats", (False,)),
    Unsupported("include_obfuscation", (False,)),
)
IN_STRUCTURED_OUTPUTS = (
    Unsupported("choice"),
    Unsupported("disable_additional_properties", (False,)),
    Unsupported("disable_any_whitespace", (False, True)),  # JSON comes without free whitespace anyhow
    Unsupported("structural_tag"),
    Unsupported("whitespace_pattern"),
)


@dataclass(frozen=True, slots=True)
class OutOfScope:
    """What this service does not do, where it would be asked for, and what is answered there."""

    what: str
    asked_by: str
    answer: str


OUT_OF_SCOPE = (
    OutOfScope(
        "tool calls",
        "`tools`, `tool_choice`, `parallel_tool_calls`, `functions`, `function_call`; a message of role tool",
        "400 naming the field",
    ),
    OutOfScope(
        "images, audio and files",
        "a content part of another type than text; `audio`, `modalities`",
        "400 naming the part or the field",
    ),
    OutOfScope(
        "LoRA", "`model` with an adapter's name; a key such as `enable_lora` in args", "404; refused at start"
    ),
    OutOfScope(
        "tensor parallelism",
        "`tensor_parallel_size` in args or `speculative_config`",
        "refused at start, naming the key",
    ),
    OutOfScope(
        "quantised weights",
        "`quantization` in args; a checkpoint with a `quantization_config`",
        "refused at start, naming the key or the method",
    ),
    OutOfScope("beam search", "`use_beam_search`, `best_of`, `length_penalty`", "400 naming the field"),
)
