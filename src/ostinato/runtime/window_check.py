"""Whether a model whose attention calls name no window keeps to the one in its config, by its masks.

Owns: the trial.  Most models pass the window to the attention function, where it is seen.  Others only build it into
the masks that they make for transformers' own attention; and a few have one in their config and attend to everything.
Over pages no masks are made, so it must be known which.  Runs at load, before attention is replaced.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import PreTrainedModel

_TOKENS: Final = 24
_NEAR: Final = 4
_FAR: Final = 1 << 20


def masks_have_window(model: PreTrainedModel) -> bool:
    """Whether the last token's logits change with the window that the config names."""
    config: Any = model.config.get_text_config(decoder=True)
    window, attention = config.sliding_window, model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return not torch.equal(_logits(model, config, _NEAR), _logits(model, config, _FAR))
    finally:
        config.sliding_window = window
        model.set_attn_implementation(attention)


def _logits(model: PreTrainedModel, config: Any, window: int) -> torch.Tensor:
    config.sliding_window = window
    tokens = torch.arange(_TOKENS)[None] % config.vocab_size
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=tokens.to(model.device), use_cache=False).logits[0, -1]
    return logits
