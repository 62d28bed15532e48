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
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from ostinato.errors import ConfigError

if TYPE_CHECKING:
    import socket

    from ostinato.engine.llm import LLM
    from ostinato.serve.tables import Bars

app: Final = typer.Typer()

_PARTS: Final = ("fastapi", "uvicorn", "prometheus_client", "jinja2")
_AUTO: Final = "auto"
_MOST_AUTO: Final = 8 << 30
Tiers = Annotated[
    list[str] | None, typer.Option("--kv", help="A lower tier, such as host:4GiB; repeat it, fastest first.")
]
Keys = Annotated[
    list[str] | None, typer.Option(envvar="OSTINATO_API_KEY", help="A key that clients must give; repeat it.")
]


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="gemma3-270m, a Hugging Face folder, or a hub id.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; repeat it. Default: MODEL.")
    ] = None,
    api_key: Keys = None,
    allow_public: Annotated[bool, typer.Option("--allow-public", help="Let other machines in without a key.")] = False,
    chat_template: Annotated[
        str | None, typer.Option(help="A Jinja file, plain or gemma. Default: the model's own.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and answer together, in tokens.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most completions that run at once.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens computed in one step.")] = 512,
    max_queue: Annotated[int, typer.Option(help="Most completions that wait; beyond, clients get a 429.", min=0)] = 256,
    max_body_bytes: Annotated[int, typer.Option(help="Largest body of a request.", min=1024)] = 16 << 20,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get after SIGTERM.", min=0.0)
    ] = 30.0,
    scheduling_policy: Annotated[str, typer.Option(help="fcfs or priority.")] = "fcfs",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    kv: Tiers = None,
    kv_transfer_config: Annotated[str | None, typer.Option(help="More tiers, in vLLM's JSON.")] = None,
    kv_events_config: Annotated[str | None, typer.Option(help="Publish KV events over ZeroMQ; vLLM's JSON.")] = None,
    kv_cache_memory: Annotated[
        str, typer.Option(help="Memory of the device pool, such as 4GiB. auto: half of what is free, at most 8 GiB.")
    ] = _AUTO,
    no_enable_prefix_caching: Annotated[
        bool, typer.Option("--no-enable-prefix-caching", help="Compute every prompt from its first token.")
    ] = False,
) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    engine: dict[str, Any] = {
        "dtype": dtype,
        "kv": tuple(kv or ()),
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
    if not _serve(model, engine, {**options, "keys": keys, "template": chat_template}, (host, port)):
        raise typer.Exit(1)


def _serve(model: str, engine: dict[str, Any], options: dict[str, Any], address: tuple[str, int]) -> bool:
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
        with bind(*address) as sock, _load(model, engine, bars) as llm:
            loading.close()
            print_startup(llm.startup, console)
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


def _load(model: str, engine: dict[str, Any], bars: Bars) -> LLM:
    from ostinato.engine.llm import LLM
    from ostinato.memory import available_memory
    from ostinato.runtime.load import load_runtime

    if engine["kv_cache_memory"] != _AUTO:
        return LLM(model, progress=bars, **engine)
    runtime = load_runtime(model, engine["dtype"], progress=bars)
    return LLM(runtime, **{**engine, "kv_cache_memory": min(_MOST_AUTO, available_memory() // 2)})


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
