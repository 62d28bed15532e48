"""Ostinato: an LLM inference engine in which a prompt's prefix is not computed twice.

``LLM`` loads torch and transformers and is therefore imported on first use; the rest of the package stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM
    from ostinato.engine.outputs import RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from ostinato.engine.llm import LLM

        return LLM
    if name == "RequestOutput":
        from ostinato.engine.outputs import RequestOutput

        return RequestOutput
    raise AttributeError(f"module 'ostinato' has no attribute {name!r}")
