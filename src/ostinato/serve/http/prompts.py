"""From text and chats to token ids.

Owns: the tokenizer's thread, so that a long text does not keep the event loop, and chat templates.  Does not own: what
the engine decodes.  Templates are run in transformers' sandbox; they come from the model or the command line, never
from a request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ostinato.engine.live import Prompt
from ostinato.errors import ConfigError
from ostinato.serve.http.errors import bad_request
from ostinato.serve.http.protocol import Conversation, Message

T = TypeVar("T")
SHIPPED: Final = Path(__file__).parent / "templates"
_RESERVED: Final = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize", "padding"}
    | {"continue_final_message", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
    | {"return_assistant_tokens_mask"}
)
"""What of ``apply_chat_template`` is not the template's."""


def read_template(name: str) -> str:
    """A shipped template by name, or a file.  Raises ConfigError."""
    shipped = sorted(path.stem for path in SHIPPED.glob("*.jinja"))
    path = SHIPPED / f"{name}.jinja" if name in shipped else Path(name)
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--chat-template {name}: neither a file that can be read ({error}) nor one of {', '.join(shipped)}"
        ) from None


class Prompts:
    """A model's tokenizer for a server.  ``template`` replaces the model's own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, template: str | None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._template = template or getattr(tokenizer, "chat_template", None)
        self._thread = ThreadPoolExecutor(1, "ostinato-tokenizer")
        if tokenizer is not None:
            # The first call may change the tokenizer (its truncation); nobody else uses it yet.
            tokenizer("a")

    @property
    def has_template(self) -> bool:
        return bool(self._template)

    async def of_text(self, text: str, special: bool = True, param: str = "prompt") -> Prompt:
        """``special``: with the tokens that begin a text, as the tokenizer adds them."""
        tokenizer = self._needed(param)

        def encode() -> list[int]:
            ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False).input_ids
            return ids

        return Prompt(text, await self.run(encode))

    def of_ids(self, ids: Sequence[int], param: str = "prompt") -> Prompt:
        """Raises ApiError where one is no token of the model."""
        for token in ids:
            if not 0 <= token < self._vocabulary:
                raise bad_request(f"{param}: token ids are from 0 to {self._vocabulary - 1}, not {token}", param)
        return Prompt(None, list(ids))

    async def of_chat(self, chat: Conversation, use_tools: bool = True) -> Prompt:
        """The template's text of the messages, and its ids.  Raises ApiError."""
        tokenizer, template = self._needed("messages"), self._template
        if not template:
            raise bad_request(
                "this model has no chat template: start the server with --chat-template FILE (or plain, or gemma), or "
                "use /v1/completions",
                "messages",
                "no_chat_template",
            )
        wished = chat.chat_template_kwargs or {}
        if clash := sorted(_RESERVED & set(wished)):
            raise bad_request(f"chat_template_kwargs: {clash[0]} is not the template's", "chat_template_kwargs")
        messages = [_plain(message) for message in chat.messages]
        going_on = bool(chat.continue_final_message)
        prompted = not going_on if chat.add_generation_prompt is None else chat.add_generation_prompt
        if going_on and prompted:
            raise bad_request("continue_final_message and add_generation_prompt exclude each other")

        def render() -> Prompt:
            text: Any = tokenizer.apply_chat_template(
                messages,
                tools=chat.tools if use_tools and chat.tools else None,  # type: ignore[arg-type]
                chat_template=template,
                add_generation_prompt=prompted,
                continue_final_message=going_on,
                tokenize=False,
                **wished,
            )
            # The template has written the special tokens that begin the text.
            special = bool(chat.add_special_tokens)
            return Prompt(text, tokenizer(text, add_special_tokens=special, verbose=False).input_ids)

        try:
            return await self.run(render)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise bad_request(f"the chat template refuses these messages: {error}", "messages", "template") from None

    async def text(self, ids: Sequence[int]) -> str:
        """Ids back to text, special tokens included."""
        tokenizer = self._needed("tokens")
        return str(await self.run(lambda: tokenizer.decode(list(ids), skip_special_tokens=False)))

    async def spelled(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        tokenizer = self._needed("prompt")
        spelled: Any = await self.run(lambda: tokenizer.convert_ids_to_tokens(list(ids)))
        return [str(token) for token in spelled]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, call: Callable[[], T]) -> T:
        """``call`` on the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _needed(self, param: str) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise bad_request("this model has no tokenizer: give token ids", param, "no_tokenizer")
        return self._tokenizer


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates know it: text content, arguments of tool calls as objects."""
    plain = message.model_dump(exclude_unset=True)
    if plain["role"] == "developer":
        plain["role"] = "system"
    plain["content"] = _text(message)
    for call in plain.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError:
                raise bad_request("the arguments of a tool call are not JSON", "messages") from None
    return plain


def _text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    parts = []
    for part in message.content:
        text = part.get("text")
        if part.get("type") not in ("text", "input_text", "refusal") or not isinstance(text, str):
            raise bad_request(f"messages: parts are text, not {part.get('type')!r}", "messages", "unsupported")
        parts.append(text)
    return "".join(parts)
