"""What must be equal for two vLLM engines to have equal KV: the namespace of their keys.

Owns: the list of what counts, and the digest of the weights.  Whatever tells requests apart (adapters, images, salts)
is in vLLM's own block hashes, which the keys are made from (``chain_key``).

The weights are digested by content.  A file's digest is remembered in the user's cache folder under its path, size,
time and inode; a file of the hub's cache is named by its SHA-256 already.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ostinato.cache.keys import KeyChain, Namespace
from ostinato.errors import ConfigError
from ostinato.integrations.vllm.layout import VllmLayout

_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".gguf", ".json", ".model")
_BLOCK: Final = 16 << 20


def make_namespace(config: Any, layout: VllmLayout, kv_layout: str, digest: str, versions: Sequence[str]) -> Namespace:
    """``config``: vLLM's VllmConfig; ``digest``: names the weights if given; ``versions``: of vLLM and torch."""
    model = config.model_config
    weights = hashlib.sha256(digest.encode()).digest() if digest else weights_digest(str(model.model))
    facts = (
        getattr(config.load_config, "load_format", ""),
        model.seed if getattr(config.load_config, "load_format", "") == "dummy" else "",
        model.quantization,
        _architecture(model.hf_config.to_dict()),
        config.cache_config.cache_dtype,
        kv_layout,
        layout.layers,
        config.parallel_config.world_size,
    )
    return Namespace(
        weights=weights,
        layout=layout.cache.fingerprint(),
        config=hashlib.sha256(repr(facts).encode()).digest(),
        dtype=str(model.dtype),
        numerics=" ".join((*versions, platform.machine())),
    )


def _architecture(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The model's own fields; where it was loaded from, and by which library, says nothing about its KV."""
    return sorted(
        (key, str(value)) for key, value in config.items() if key != "transformers_version" and not key.startswith("_")
    )


def extend_chain(chain: KeyChain, hashes: Sequence[bytes]) -> None:
    """Follow vLLM's block hashes: each digest is that of the namespace and of vLLM's hash, which is a chain itself."""
    for value in hashes[len(chain.digests) :]:
        chain.digests.append(hashlib.sha256(chain.seed + value).digest())


def weights_digest(model: str) -> bytes:
    """32 bytes that stand for the model's files.  Raises ConfigError when there are none here."""
    path = Path(model)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file())
    else:
        files = _hub_files(model)
    if not files:
        raise ConfigError(
            f"the weights of {model!r} are not found here, so nobody could tell its KV from another model's: "
            "name them with model_digest in kv_connector_extra_config"
        )
    outer = hashlib.sha256(b"ostinato vllm weights 1")
    for file in files:
        name = file.name.encode()
        outer.update(len(name).to_bytes(8, "little") + name + _file_digest(file))
    return outer.digest()


def _hub_files(model: str) -> list[Path]:
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, local_files_only=True))
    except Exception:
        return []
    return sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES and file.is_file())


def _file_digest(path: Path) -> bytes:
    real = path.resolve()
    if real.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", real.name):
        return bytes.fromhex(real.name)
    stat = real.stat()
    stamp = f"{real}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}".encode("utf-8", "surrogateescape")
    memory = _cache_folder() / hashlib.sha256(stamp).hexdigest()
    try:
        known = memory.read_bytes()
        if len(known) == 32:
            return known
    except OSError:
        pass
    digest = hashlib.sha256()
    with real.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    _remember(memory, digest.digest())
    return digest.digest()


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ostinato" / "vllm-digests"


def _remember(memory: Path, digest: bytes) -> None:
    """A reader sees the whole file or none; a folder that cannot be written costs time at the next start only."""
    aside = memory.with_name(f".{memory.name}.{os.getpid()}")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(digest)
        aside.replace(memory)
    except OSError:
        aside.unlink(missing_ok=True)
