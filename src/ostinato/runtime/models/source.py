"""From a model's name to its files, and from files to a model and a tokenizer.

Owns: the order in which a name is looked up (known name, folder, hub id), and loading through transformers.  Does not
own: which models can be run (the runner's check) or their cache layout.

Invariants: nothing pickled is ever read; a model with a missing, wrongly shaped or damaged weight is refused rather
than filled with random numbers; no remote code is run.

transformers is imported inside the functions: it takes seconds, and ``resolve`` of a folder does not need it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ostinato.errors import ModelFileError, UnknownModelError
from ostinato.runtime.models.files import ModelFiles, NoProgress, Progress
from ostinato.runtime.models.known import KNOWN, find_known, resolve_known

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt")


def _say(text: str) -> None:
    print(text, flush=True)


def resolve(name: str, notice: Callable[[str], None] = _say, progress: Progress | None = None) -> ModelFiles:
    """The files of the model called ``name``: a known name, a folder, or a hub id ``owner/model``.

    ``notice`` is given the licence line when a known model is imported for the first time.  Raises
    :class:`UnknownModelError` when there is no such model, :class:`ModelFileError` when its files are not usable.
    """
    if (known := find_known(name)) is not None:
        return resolve_known(known, notice, progress or NoProgress())
    folder = Path(name).expanduser()
    # An empty name would be the current folder.
    if name and folder.is_dir():
        return ModelFiles.of_folder(name, folder)
    if _HUB_ID.fullmatch(name):
        return _from_hub(name)
    raise _unknown(name, "is neither a known name, a folder, nor a hub id")


def _unknown(name: str, why: str) -> UnknownModelError:
    names = ", ".join(model.name for model in KNOWN)
    return UnknownModelError(
        f"model {name!r} {why}; use one of: {names}; a folder with config.json and .safetensors; "
        "or a hub id such as owner/model"
    )


def _from_hub(name: str) -> ModelFiles:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:
        # The hub client raises many kinds (its own, httpx's, OSError, ValueError), and all mean: not to be had.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _unknown(name, f"could not be fetched from the hub ({reason})") from error
    return ModelFiles.of_folder(name, folder)


def load_model(files: ModelFiles, dtype: torch.dtype) -> PreTrainedModel:
    """The model in ``dtype`` on the CPU, in eval mode, its parameters without gradients.

    Raises :class:`ModelFileError` when a weight file is damaged, or does not fit the config.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        with _no_bars():
            # Typed as the model alone, whatever the options; with loading info it is a pair.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.folder,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelFileError(f"cannot load the weights in {files.folder}: {_first_line(error)}") from error
    model, info = loaded
    _refuse_partial(files, info)
    result: PreTrainedModel = model.train(False).requires_grad_(False)
    return result


@contextmanager
def _no_bars() -> Iterator[None]:
    # transformers draws on stderr unasked; what is shown to the user is the caller's to decide.
    from transformers.utils import logging as untyped

    logging: Any = untyped
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _refuse_partial(files: ModelFiles, info: dict[str, Any]) -> None:
    # transformers only warns about these, and runs on with random weights.
    for key, what in (("missing_keys", "lack"), ("mismatched_keys", "have the wrong shape for")):
        if names := sorted(str(name) for name in info.get(key) or ()):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelFileError(f"the weights in {files.folder} {what} {names[0]}{more}")


def load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase:
    """The model's fast tokenizer.  Raises :class:`ModelFileError` when the folder has none that can be read."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            files.folder, use_fast=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # tokenizers raises bare Exception for a damaged tokenizer.json.
        raise ModelFileError(f"cannot load the tokenizer in {files.folder}: {_first_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelFileError(f"the tokenizer in {files.folder} has no fast form (tokenizer.json), which is needed")
    return tokenizer


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
