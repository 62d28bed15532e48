"""The flags of ``ostinato serve``: what they are called, what their help says, under which heading.

Owns: the words.  Does not own: defaults and meaning (``command``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

_SERVER: Final = "Server"
_LIMITS: Final = "Limits"
_CACHE: Final = "Cache"
_ENGINE: Final = "Model and engine"


def _option(panel: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, rich_help_panel=panel, **more)


Model = Annotated[str, typer.Argument(help="gemma3-270m, a Hugging Face folder, or a hub id.")]
Host = Annotated[str, _option(_SERVER, help="Address to listen on.")]
Port = Annotated[int, _option(_SERVER, help="Port to listen on; 0 is any.")]
ServedModelName = Annotated[
    list[str] | None, _option(_SERVER, help="What clients call the model; repeat it. Default: MODEL.")
]
ApiKey = Annotated[
    list[str] | None, _option(_SERVER, envvar="OSTINATO_API_KEY", help="A key that clients must give; repeat it.")
]
AllowPublic = Annotated[bool, _option(_SERVER, "--allow-public", help="Let other machines in without a key.")]
ChatTemplate = Annotated[str | None, _option(_SERVER, help="A Jinja file, plain or gemma. Default: the model's own.")]
ShutdownTimeout = Annotated[float, _option(_SERVER, help="Seconds that running requests get after SIGTERM.", min=0.0)]
MaxModelLen = Annotated[int | None, _option(_LIMITS, help="Longest prompt and answer together, in tokens.")]
MaxNumSeqs = Annotated[int, _option(_LIMITS, help="Most completions that run at once.")]
MaxNumBatchedTokens = Annotated[int, _option(_LIMITS, help="Most tokens computed in one step.")]
MaxQueue = Annotated[int, _option(_LIMITS, help="Most completions that wait; beyond, clients get a 429.", min=0)]
MaxBodyBytes = Annotated[int, _option(_LIMITS, help="Largest body of a request.", min=1024)]
CacheDir = Annotated[
    Path | None,
    _option(_CACHE, envvar="OSTINATO_CACHE_DIR", help="Keep what is cached in this folder, over restarts too."),
]
CacheSize = Annotated[
    str | None, _option(_CACHE, help="Most that the folder takes, such as 50GiB. Default: half of what is free.")
]
KvCacheMemory = Annotated[
    str, _option(_CACHE, help="Memory of the device pool, such as 4GiB. auto: half of what is free, up to 32 GiB.")
]
Kv = Annotated[
    list[str] | None, _option(_CACHE, "--kv", help="A lower tier, such as host:4GiB; repeat it, fastest first.")
]
KvTransferConfig = Annotated[str | None, _option(_CACHE, help="More tiers, in vLLM's JSON.")]
KvEventsConfig = Annotated[str | None, _option(_CACHE, help="Publish KV events over ZeroMQ; vLLM's JSON.")]
NoEnablePrefixCaching = Annotated[
    bool, _option(_CACHE, "--no-enable-prefix-caching", help="Compute every prompt from its first token.")
]
Dtype = Annotated[str, _option(_ENGINE, help="auto, bfloat16 or float32.")]
SchedulingPolicy = Annotated[str, _option(_ENGINE, help="fcfs or priority.")]
