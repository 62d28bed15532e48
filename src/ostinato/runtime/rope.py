"""Rotary embeddings whose factors would follow the longest position of the batch.

Owns: finding such modules and freezing them at load.  Does not own: rotary arithmetic (the model's).

Why: transformers' ``dynamic`` and ``longrope`` types pick or rescale their frequencies by ``max(position_ids)`` of the
call.  In a packed batch one long neighbour would change everybody's keys, and cached keys would mix two scalings.  For
``longrope`` one set of factors is right for a whole deployment, chosen by the longest context that is served (as vLLM
does); for ``dynamic`` no single choice is faithful, so the model is refused.

Runs once per model, at load.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ostinato.errors import ModelRefusedError


def freeze_rope(model: PreTrainedModel, max_model_len: int) -> str:
    """Freeze every rotary module of ``model`` for contexts of up to ``max_model_len`` tokens.

    Returns what was frozen, for the namespace of cached keys: empty when nothing depends on the batch.  Raises
    :class:`ModelRefusedError` for a rotary type that has no fixed meaning.
    """
    frozen = []
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _follows_batch(kinds):
            frozen.append(_freeze(name, module, kinds, max_model_len))
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if _follows_batch(kind):
                    raise ModelRefusedError(
                        f"{type(model).__name__} cannot be served: {name} uses {kind} rotary factors for {layer_type} "
                        "layers only, which follow the longest sequence of a batch"
                    )
    return ";".join(frozen)


def _follows_batch(kind: str) -> bool:
    """The same test as transformers' own update makes in each forward pass."""
    return "dynamic" in kind or kind == "longrope"


def _freeze(name: str, module: Any, kind: str, max_model_len: int) -> str:
    config = module.config
    if "dynamic" in kind:
        if max_model_len <= int(config.max_position_embeddings):
            # Below its original length the dynamic type is the default one; positions never pass it.
            return ""
        raise ModelRefusedError(
            f"{name} rescales its rotary embedding with each sequence's length beyond "
            f"{config.max_position_embeddings} tokens; serve at most that many (max_model_len)"
        )
    original = int(config.rope_parameters["original_max_position_embeddings"])
    long = max_model_len > original
    length = original + 1 if long else original
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    module.register_buffer("inv_freq", frequencies, persistent=False)
    module.attention_scaling = scaling
    # Any other name is passed over by transformers' per-batch update.
    module.rope_type = f"frozen-{kind}"
    return f"{name} {kind} {'long' if long else 'short'}"
