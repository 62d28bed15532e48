"""What clients send, and what of it becomes :class:`SamplingParams`.

Owns: the fields, their types, which ones are refused since ignoring them would give another answer than was asked for.
Does not own: ranges (``sampling_params``) or the answers (``completions``, ``chat``).  Unknown fields are ignored, as
OpenAI's clients expect; names beyond OpenAI's are vLLM's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ostinato.sampling_params import SamplingParams
from ostinato.serve.http.errors import bad_request

MOST_LOGPROBS: Final = 20
MOST_WORDS: Final = 256
"""Each is looked for at every token, on the engine's thread."""
_HALF: Final = re.compile("[\ud800-\udfff]")
_SAMPLED: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words"),
    *("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
)
_SALT: Final = "what is cached is kept apart by API key; cache_salt is not taken from requests"
_FORM: Final = "this way to say the form of an output is not available: use response_format or structured_outputs"
_REFUSED: Final = MappingProxyType(
    {
        "suffix": "inserting before a suffix is not available",
        "use_beam_search": "beam search is not available: use n",
        "prompt_logprobs": "use echo with logprobs at /v1/completions",
        "guided_whitespace_pattern": _FORM,
        "structural_tag": _FORM,
        "functions": "functions are superseded: use tools",
        "function_call": "functions are superseded: use tools",
        "audio": "this server makes text only",
        "chat_template": "the template is the server's: see --chat-template",
        "cache_salt": _SALT,
    }
)
"""Fields that no client sets by default, and that change the answer."""


class Body(BaseModel):
    """Types are meant: a number as text is an error.  Fields that are not named here land in ``model_extra``."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        """JSON can spell halves of characters, which no tokenizer takes."""
        if _has_half_character(given):
            raise PydanticCustomError("not_text", "a text has a surrogate that stands alone: it is not Unicode")
        return given


class StreamOptions(Body):
    include_usage: bool | None = None


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: str
    json_schema: JsonSchema | None = None


class StructuredFields(Body):
    """vLLM's ``structured_outputs``: one of these."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampled(Body):
    """What chats and plain completions share; a null is as good as nothing."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_WORDS)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Annotated[list[str] | None, Field(max_length=MOST_WORDS)] = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Raise ApiError for what would be answered otherwise than was asked."""
        for name, why in _REFUSED.items():
            if (self.model_extra or {}).get(name) not in (None, False, "", [], {}):
                raise bad_request(f"{name}: {why}", name, "unsupported")
        for name, value in ((self.structured_outputs and self.structured_outputs.model_extra) or {}).items():
            if value not in (None, False):
                raise bad_request(f"structured_outputs: {name} is not available", "structured_outputs", "unsupported")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options need stream", "stream_options")

    def sampling(self, max_tokens: int, logprobs: int | None = None, **more: Any) -> SamplingParams:
        """Raises SamplingError where a value is out of range."""
        given = {name: getattr(self, name) for name in _SAMPLED}
        chosen = {name: value for name, value in given.items() if value is not None}
        if self.logit_bias:
            chosen["logit_bias"] = _bias(self.logit_bias)
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **chosen, **more)


class CompletionRequest(Sampled):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=MOST_LOGPROBS)] = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request("best_of: choosing among more completions than n is not available", "best_of")
        if self.echo and self.stream and self.logprobs is not None:
            raise bad_request("echo with logprobs cannot be streamed: leave out stream", "echo")


class Message(Body):
    """One message; whatever else it has is passed on to the template."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class Conversation(Body):
    """What a chat template makes a prompt of."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(Sampled, Conversation):
    """``POST /v1/chat/completions``."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MOST_LOGPROBS)] = None
    tool_choice: str | dict[str, Any] | None = None
    modalities: list[str] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs need logprobs", "top_logprobs")
        if self.tool_choice not in (None, "none", "auto"):
            raise bad_request("tool_choice: only none and auto are available", "tool_choice", "unsupported")
        if self.modalities not in (None, [], ["text"]):
            raise bad_request("modalities: this server makes text only", "modalities", "unsupported")


class TokenizeRequest(Body):
    """``POST /tokenize``: of a prompt, or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


def _has_half_character(value: Any) -> bool:
    match value:
        case str():
            return not value.isascii() and _HALF.search(value) is not None
        case dict():
            return any(_has_half_character(part) for pair in value.items() for part in pair)
        case list():
            return any(map(_has_half_character, value))
    return False


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    """JSON has no whole numbers as names."""
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise bad_request("logit_bias is a map of token ids to numbers", "logit_bias", "invalid_value") from None
