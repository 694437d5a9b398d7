"""The fields that say what the text must match: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from outrider.messages import Grammar
from outrider_serve.openai_body import Body, refusal
from outrider_serve.openai_unsupported import IN_STRUCTURED_OUTPUTS


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar and the field that asked for it."""

    param: str
    grammar: Grammar


class JsonSchema(Body):
    """OpenAI's wrapper of a schema. `strict` changes nothing: every schema is kept to the letter."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    # Not `schema`, which is a method of pydantic's.
    document: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            fault = "is missing" if self.json_schema is None else f"does not go with type {self.type}"
            raise refusal("json_schema", f"response_format.json_schema {fault}")
        return self

    def constraint(self) -> Constraint | None:
        if self.json_schema is not None:
            schema = json.dumps(self.json_schema.document)
            return Constraint("response_format.json_schema.schema", Grammar("json_schema", schema))
        return Constraint("response_format", Grammar("json_object")) if self.type == "json_object" else None


class StructuredOutputs(Body):
    """One of these, as vLLM spells them."""

    unsupported = IN_STRUCTURED_OUTPUTS

    # Not `json`, which is a method of pydantic's.
    schema_or_text: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(self._constraints()) != 1:
            raise ValueError("must have exactly one of json, json_object, regex and grammar")
        return self

    def constraint(self) -> Constraint:
        return self._constraints()[0]

    def _constraints(self) -> list[Constraint]:
        schema = self.schema_or_text
        text = json.dumps(schema) if isinstance(schema, dict) else schema
        wanted = {
            "json": Grammar("json_schema", text) if text is not None else None,
            "json_object": Grammar("json_object") if self.json_object else None,
            "regex": Grammar("regex", self.regex) if self.regex is not None else None,
            "grammar": Grammar("ebnf", self.grammar) if self.grammar is not None else None,
        }
        return [
            Constraint(f"structured_outputs.{name}", grammar)
            for name, grammar in wanted.items()
            if grammar is not None
        ]
