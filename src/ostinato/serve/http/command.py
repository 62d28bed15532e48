"""``ostinato serve``.

Owns: its flags, the order of start.  Does not own: the server.  What can be wrong in a flag is told before torch is
imported or a weight is read.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console

from ostinato.errors import ConfigError
from ostinato.serve.http import flags
from ostinato.serve.settings import Config
from ostinato.serve.sizing import cache_folder_tier, pool_bytes, pool_reason, tier_reasons

if TYPE_CHECKING:
    import socket

    from ostinato.engine.llm import LLM
    from ostinato.serve.tables import Bars

app: Final = typer.Typer()

_PARTS: Final = ("fastapi", "uvicorn", "prometheus_client", "jinja2")
_AUTO: Final = "auto"
_EXAMPLES: Final = """
Examples:

ostinato serve gemma3-270m --chat-template gemma

ostinato serve ./my-model --cache-dir ~/.cache/my-model --port 8080

OSTINATO_API_KEY=secret ostinato serve gemma3-270m --host 0.0.0.0

ostinato serve --config /etc/ostinato.toml
"""


@app.command(epilog=_EXAMPLES)
def serve(
    model: flags.Model,
    config: Config = None,  # noqa: ARG001  # read by its callback
    host: flags.Host = "127.0.0.1",
    port: flags.Port = 8000,
    served_model_name: flags.ServedModelName = None,
    api_key: flags.ApiKey = None,
    allow_public: flags.AllowPublic = False,
    chat_template: flags.ChatTemplate = None,
    shutdown_timeout: flags.ShutdownTimeout = 30.0,
    max_model_len: flags.MaxModelLen = None,
    max_num_seqs: flags.MaxNumSeqs = 64,
    max_num_batched_tokens: flags.MaxNumBatchedTokens = 512,
    max_queue: flags.MaxQueue = 256,
    max_body_bytes: flags.MaxBodyBytes = 16 << 20,
    cache_dir: flags.CacheDir = None,
    cache_size: flags.CacheSize = None,
    kv_cache_memory: flags.KvCacheMemory = _AUTO,
    kv: flags.Kv = None,
    kv_transfer_config: flags.KvTransferConfig = None,
    kv_events_config: flags.KvEventsConfig = None,
    no_enable_prefix_caching: flags.NoEnablePrefixCaching = False,
    dtype: flags.Dtype = "auto",
    scheduling_policy: flags.SchedulingPolicy = "fcfs",
) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    tiers = tuple(kv or ())
    folder = cache_folder_tier(cache_dir, cache_size, tiers) if cache_dir is not None else None
    if folder is None and cache_size is not None:
        raise ConfigError("--cache-size is the size of --cache-dir: name the folder too")
    engine: dict[str, Any] = {
        "dtype": dtype,
        "kv": (*tiers, folder.tier) if folder is not None else tiers,
        "kv_transfer_config": kv_transfer_config,
        "kv_events_config": kv_events_config,
        "kv_cache_memory": kv_cache_memory,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "scheduling_policy": scheduling_policy,
        "enable_prefix_caching": not no_enable_prefix_caching,
    }
    options: dict[str, Any] = {
        "names": tuple(served_model_name or [model]),
        "max_queue": max_queue,
        "max_body": max_body_bytes,
        "shutdown_s": shutdown_timeout,
    }
    _check_installed()
    from ostinato.serve.http.auth import ApiKeys, check_address

    keys = ApiKeys(api_key or ())
    check_address(host, keys, allow_public)
    options |= {"keys": keys, "template": chat_template}
    if not _serve(model, engine, options, (host, port), [folder.why] if folder is not None else []):
        raise typer.Exit(1)


def _serve(
    model: str, engine: dict[str, Any], options: dict[str, Any], address: tuple[str, int], reasons: list[str]
) -> bool:
    """``reasons``: of what was decided for the user; the start shows them."""
    from ostinato.config import EngineConfig
    from ostinato.serve.early import check_early
    from ostinato.serve.stopping import stoppable
    from ostinato.serve.tables import Bars, print_startup

    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    bars = Bars(console)
    # What "auto" is can be told only when the weights are there.
    early = {**engine, "kv_cache_memory": 0 if engine["kv_cache_memory"] == _AUTO else engine["kv_cache_memory"]}
    check_early(EngineConfig(model=model, **early), bars)
    with stoppable(), contextlib.ExitStack() as loading:
        loading.enter_context(_uncollected())
        from ostinato.serve.http.prompts import read_template
        from ostinato.serve.http.server import HttpServer, ServerOptions, bind

        if options["template"] is not None:
            options["template"] = read_template(options["template"])
        with bind(*address) as sock, _load(model, engine, bars, reasons) as llm:
            loading.close()
            print_startup(llm.startup, console)
            for reason in (*reasons, *_missing_tiers(engine)):
                console.print(reason, style="dim", highlight=False, markup=False)
            _begin_log()
            server = HttpServer(llm, ServerOptions(**options), sock)
            _print_notes(console, server.service.prompts.has_template, bool(options["keys"]))
            return server.run(lambda: _print_address(console, sock))


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """While a model is loaded nearly all that is made stays: to look for what does not would take half a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _load(model: str, engine: dict[str, Any], bars: Bars, reasons: list[str]) -> LLM:
    from ostinato.engine.llm import LLM
    from ostinato.memory import available_memory
    from ostinato.runtime.load import load_runtime

    if engine["kv_cache_memory"] != _AUTO:
        return LLM(model, progress=bars, **engine)
    runtime = load_runtime(model, engine["dtype"], progress=bars)
    free = available_memory()
    reasons.insert(0, pool_reason(free))
    return LLM(runtime, **{**engine, "kv_cache_memory": pool_bytes(free)})


def _missing_tiers(engine: dict[str, Any]) -> tuple[str, ...]:
    """Whoever names tiers in JSON, or wants no cache, has decided it all."""
    decided = engine["kv_transfer_config"] is not None or not engine["enable_prefix_caching"]
    return () if decided else tier_reasons(engine["kv"])


def _print_notes(console: Console, has_template: bool, has_keys: bool) -> None:
    if not has_template:
        console.print("off: /v1/chat/completions: the model has no chat template (see --chat-template)", style="yellow")
    if not has_keys:
        console.print("off: API keys: whoever reaches this address may use it (see OSTINATO_API_KEY)", style="yellow")


def _print_address(console: Console, sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    console.print(f"listening on http://{shown}:{port}", highlight=False, markup=False)


def _begin_log() -> None:
    """One line for each answer; warnings of everything else."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("ostinato.serve.http").setLevel(logging.INFO)


def _check_installed() -> None:
    missing = [name for name in _PARTS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the server needs {', '.join(missing)}: pip install 'ostinato[serve]'")
