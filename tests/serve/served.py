"""A tiny model with a tokenizer, and a real server for it on a thread of this process."""

from __future__ import annotations

import string
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import openai
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from e2e.support import VOCABULARY, tiny_gemma3
from ostinato.engine.llm import LLM
from ostinato.runtime.load import Runtime
from ostinato.serve.http.auth import ApiKeys
from ostinato.serve.http.prompts import read_template
from ostinato.serve.http.server import HttpServer, ServerOptions, bind

MODEL = "tiny"
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and pairs of letters that only a model says: what is said can be read."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ("".join(pair) for pair in product(string.ascii_lowercase, repeat=2))
    words = [*SPECIAL, *letters, *(next(pairs) for _ in range(VOCABULARY - len(SPECIAL) - len(letters)))]
    made = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    wrap: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )
    return wrapped


def tiny_runtime() -> Runtime:
    return replace(tiny_gemma3(torch.float32), name=MODEL, tokenizer=tokenizer())


def save_tiny(folder: Path) -> None:
    """The tiny model's shape and tokenizer as a folder, with random weights."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=32,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


class Running:
    """A server that runs, and how to reach it."""

    def __init__(self, server: HttpServer, port: int) -> None:
        self.server = server
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def client(self, key: str = "none", **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": 120, **more})

    def async_client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    @property
    def live(self) -> int:
        """Completions that the engine knows."""
        return len(self.server.llm.llm.built.engine.scheduler.requests)


@contextmanager
def serving(
    runtime: Runtime, engine: dict[str, Any] | None = None, keys: tuple[str, ...] = (), **options: Any
) -> Iterator[Running]:
    """``options``: of the server; ``template`` is a name here."""
    if "template" in options:
        options["template"] = read_template(options["template"])
    llm = LLM(runtime, **{"num_gpu_blocks_override": 600, "check_invariants": True, **(engine or {})})
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        server = HttpServer(llm, ServerOptions(**{"names": (MODEL,), "keys": ApiKeys(keys), **options}), sock)
        ready = threading.Event()
        thread = threading.Thread(target=server.run, args=(ready.set,), daemon=True)
        thread.start()
        assert ready.wait(60), "the server did not start"
        try:
            yield Running(server, port)
        finally:
            server.stop()
            thread.join(60)
            assert not thread.is_alive(), "the server did not stop"
