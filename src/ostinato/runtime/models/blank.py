"""A model without its weights, from its ``config.json`` alone: enough to see what it puts into the cache.

Owns: finding the config by the model's name, and the model on the meta device.  Does not own: names with weights
(``source``).  No remote code is run; from the hub only ``config.json`` is fetched.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ostinato.errors import ModelFileError, ModelRefusedError, UnknownModelError
from ostinato.runtime.models.known import KNOWN, find_known
from ostinato.runtime.models.source import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_config(name: str) -> Path:
    """The ``config.json`` of a known model, of a folder, or of a hub id; a path to the file itself will do.

    Raises :class:`UnknownModelError` or :class:`ModelFileError`.
    """
    if find_known(name) is not None:
        return resolve(name, notice=lambda _: None).config
    path = Path(name).expanduser()
    if name and path.is_file():
        return path
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelFileError(f"{path} has no config.json, so it is not a Hugging Face model folder")
        return path / "config.json"
    if _HUB_ID.fullmatch(name):
        return _from_hub(name)
    names = ", ".join(model.name for model in KNOWN)
    raise UnknownModelError(
        f"model {name!r} is neither a known name, a folder, nor a hub id; use one of: {names}; "
        "a folder with config.json; or a hub id such as owner/model"
    )


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:
        # The hub client raises many kinds (its own, httpx's, OSError, ValueError), and all mean: not to be had.
        raise UnknownModelError(
            f"the config of model {name!r} could not be fetched from the hub ({_first_line(error)}); "
            "download its config.json and give the folder"
        ) from error


def blank_model(config: Path, dtype: str) -> PreTrainedModel:
    """The model on the meta device in ``dtype`` (``bfloat16`` or ``float32``): shapes without numbers.

    Raises :class:`ModelFileError` when the file is no config, :class:`ModelRefusedError` when transformers has no
    causal language model for it.
    """
    _check_json(config)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        settings = AutoConfig.from_pretrained(str(config), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # A config class checks its fields in ways of its own, with errors of its own.
        raise ModelFileError(f"cannot read {config}: {_first_line(error)}") from error
    auto: Any = AutoModelForCausalLM  # its methods are not typed
    try:
        with torch.device("meta"):
            model = auto.from_config(settings, dtype=getattr(torch, dtype), trust_remote_code=False)
    except Exception as error:
        raise ModelRefusedError(
            f"transformers makes no causal language model from {config}: {_first_line(error)}"
        ) from error
    result: PreTrainedModel = model.train(False).requires_grad_(False)
    return result


def _check_json(config: Path) -> None:
    try:
        fields = json.loads(config.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot read {config}: {_first_line(error)}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ModelFileError(f"{config} has no model_type, so it is not a Hugging Face config")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
