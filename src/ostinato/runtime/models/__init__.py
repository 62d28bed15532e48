"""Model files: from a name to a loaded model and tokenizer.

Owns: finding, checking, converting and loading weights.  Does not own: how a model is run (the runner) or what its
KV cache looks like (the layout probe).
"""

from __future__ import annotations

from ostinato.runtime.models.files import ModelFiles, NoProgress, Progress, cache_folder, weights_digest
from ostinato.runtime.models.source import load_model, load_tokenizer, resolve

__all__ = [
    "ModelFiles",
    "NoProgress",
    "Progress",
    "cache_folder",
    "load_model",
    "load_tokenizer",
    "resolve",
    "weights_digest",
]
