"""The hierarchy below vLLM's device pool, as a KV connector plug-in.

vLLM imports this package by its name (``kv_connector_module_path``) and takes ``OstinatoConnector`` from it; nothing of
vLLM is imported before that.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "OstinatoConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ostinato.integrations.vllm.compat import check_installed

    check_installed()
    from ostinato.integrations.vllm.connector import OstinatoConnector

    return OstinatoConnector
