"""A tiny random model of any class: its default config with small numbers.

Owns: which layers of the default are kept, how weights are drawn.  Does not own: the numbers (``numbers``), or whether
the model can be served.  Thread: one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from ostinato.runtime.survey.numbers import LAYERS, MOST_LAYERS, OVERRIDES, SMALL

MOST_WEIGHTS: Final = 20_000_000
_SEED: Final = 1


class NoTinyModelError(Exception):
    """No small model of this class could be made; says at which point and why."""


def tiny_model(name: str) -> PreTrainedModel:
    """The model of class ``name`` in float32 and eval mode, the same weights every time.  Raises NoTinyModelError."""
    try:
        kind = getattr(transformers, name)
        config = tiny_config(kind.config_class, OVERRIDES.get(name, {}))
        weights = _count_weights(kind, config)
        if weights > MOST_WEIGHTS:
            raise NoTinyModelError(f"{weights / 1e6:.0f} million weights")
        torch.manual_seed(_SEED)
        model: PreTrainedModel = kind(config)
    except NoTinyModelError:
        raise
    except ImportError as error:
        raise NoTinyModelError(f"a package is missing: {str(error).strip().partition('. ')[0]}") from error
    except Exception as error:  # whatever a config's validation or a constructor raises
        raise NoTinyModelError(f"{type(error).__name__}: {error}") from error
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _draw(parameter_name, parameter)
    torch.nn.Module.to(model, torch.float32)
    model.train(False)
    return model


def _count_weights(kind: type[PreTrainedModel], config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in kind(config).parameters())


def _draw(name: str, parameter: torch.Tensor) -> None:
    """Wide where the model is linear, so that every cached number matters; the rest stays as the model drew it."""
    if name.endswith("A_log"):
        parameter.uniform_(-4.0, 0.0)
    elif "conv" in name and parameter.ndim == 3:
        parameter.normal_(0, 0.4)
    elif parameter.ndim >= 2:
        parameter.normal_(0, 0.08)


def tiny_config(kind: type[PretrainedConfig], fields: Mapping[str, Any]) -> PretrainedConfig:
    """The default config of ``kind`` with small numbers and few layers, ``fields`` on top of them."""
    default = kind()
    known = default.to_dict()
    wanted: dict[str, Any] = {}
    layers = _layers_kept(default, known)
    # Some classes write a common field under a name of their own.
    common = {own: name for name, own in kind.attribute_map.items()}
    for field, value in known.items():
        name = field if field in SMALL else common.get(field, field)
        if name in SMALL and value is not None:
            wanted[field] = [SMALL[name]] * len(layers) if isinstance(value, list) else SMALL[name]
        elif isinstance(value, list) and len(value) == _depth(default):
            wanted[field] = [value[index] for index in layers]
    for field in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if field in wanted:
            wanted[field] = len(layers)
    if known.get("kv_lora_rank") is not None and "num_key_value_heads" in wanted:
        wanted["num_key_value_heads"] = SMALL["num_attention_heads"]
    merged = {**wanted, **fields}
    for field, sub in _sub_configs(default):
        merged[field] = tiny_config(type(sub), fields.get(field, {}))
    return kind(**{field: value for field, value in merged.items() if value is not ...})


def _sub_configs(config: PretrainedConfig) -> Iterator[tuple[str, PretrainedConfig]]:
    for field in getattr(type(config), "sub_configs", {}):
        sub = getattr(config, field, None)
        if isinstance(sub, PretrainedConfig):
            yield field, sub


def _depth(config: PretrainedConfig) -> int:
    depth = getattr(config, "num_hidden_layers", 0)
    return depth if isinstance(depth, int) else 0


def _layers_kept(config: PretrainedConfig, known: Mapping[str, Any]) -> list[int]:
    """Layers of the default config, one of each sort and some more, in their order."""
    depth = _depth(config)
    lists = [value for value in known.values() if isinstance(value, list) and len(value) == depth]
    sorts = {index: tuple(str(value[index]) for value in lists) for index in range(depth)}
    first = {sort: index for index, sort in reversed(sorts.items())}
    kept = sorted(first.values())[:MOST_LAYERS]
    rest = (index for index in range(depth) if index not in kept)
    while len(kept) < LAYERS:
        kept.append(next(rest, depth))
    return sorted(kept)
