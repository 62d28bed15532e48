"""Gemma 3 text models from GGUF to a Hugging Face folder.

Owns: config, weights and generation config; the tokenizer is ``gguf_tokenizer``'s.  Does not own: where the folder
goes or whether the file is the right one (``known``).

Invariants: the result depends on the GGUF file alone (no library version or time goes in), so equal files give equal
weights digests.  Peak memory is the bf16 weights plus one chunk of rows in fp32.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from ostinato.errors import ModelFileError
from ostinato.runtime.models.files import Progress
from ostinato.runtime.models.gguf_file import GgufFile, TensorInfo
from ostinato.runtime.models.gguf_tokenizer import write_tokenizer

_CHUNK_ROWS: Final = 8192
_ARCHITECTURE: Final = "gemma3"
_PREFIX: Final = "gemma3."

_TOP: Final = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
)
_LAYER: Final = MappingProxyType(
    {
        "attn_q.weight": "self_attn.q_proj.weight",
        "attn_k.weight": "self_attn.k_proj.weight",
        "attn_v.weight": "self_attn.v_proj.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
        "attn_norm.weight": "input_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
        "ffn_gate.weight": "mlp.gate_proj.weight",
        "ffn_up.weight": "mlp.up_proj.weight",
        "ffn_down.weight": "mlp.down_proj.weight",
    }
)


def convert(path: Path, folder: Path, progress: Progress) -> None:
    """Write ``folder``'s model.safetensors (bf16), config.json, generation_config.json and tokenizer from ``path``.

    Raises :class:`ModelFileError` when the file is not a sound Gemma 3 text model.
    """
    with GgufFile(path) as source:
        architecture = source.metadata.get("general.architecture")
        if architecture != _ARCHITECTURE:
            raise ModelFileError(f"{path} holds a {architecture!r} model; only {_ARCHITECTURE!r} can be converted")
        _write_json(folder / "config.json", gemma3_config(source))
        _write_json(folder / "generation_config.json", _token_ids(source))
        write_tokenizer(source, folder, progress)
        progress.start(len(source.tensors), "converting weights")
        weights: dict[str, torch.Tensor] = {}
        for info in source.tensors:
            weights[target_name(info.name)] = read_tensor(source, info, torch.bfloat16)
            progress.advance(1)
        progress.finish()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def gemma3_config(source: GgufFile) -> dict[str, Any]:
    """``config.json`` of the text model, from the file's metadata.

    GGUF states one rope base, the global layers'; local layers use 10 000, and one layer in six is global, unless the
    file says otherwise (Gemma 3 report, 2025, section 2).
    """
    heads = source.integer(_PREFIX + "attention.head_count")
    layers = source.integer(_PREFIX + "block_count")
    head_dim = source.integer(_PREFIX + "attention.key_length")
    every = source.integer(_PREFIX + "attention.sliding_window_pattern", 6)
    local_base = source.number(_PREFIX + "rope.freq_base_swa", 10_000.0)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": len(source.items("tokenizer.ggml.tokens")),
        "hidden_size": source.integer(_PREFIX + "embedding_length"),
        "intermediate_size": source.integer(_PREFIX + "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": source.integer(_PREFIX + "attention.head_count_kv"),
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": source.integer(_PREFIX + "context_length"),
        # Stored as fp32; seven digits give back the decimal that was meant.
        "rms_norm_eps": float(f"{source.number(_PREFIX + 'attention.layer_norm_rms_epsilon'):.7g}"),
        "query_pre_attn_scalar": head_dim,
        "attention_bias": False,
        "sliding_window": source.integer(_PREFIX + "attention.sliding_window"),
        "layer_types": ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": source.number(_PREFIX + "rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
        },
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        **_token_ids(source),
    }


def _token_ids(source: GgufFile) -> dict[str, Any]:
    return {
        "bos_token_id": source.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": source.integer("tokenizer.ggml.padding_token_id"),
    }


def target_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor."""
    if name in _TOP:
        return _TOP[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    if not name.startswith("blk.") or rest not in _LAYER or not block.isdecimal():
        raise ModelFileError(f"GGUF tensor {name!r} is not part of a Gemma 3 text model")
    return f"model.layers.{block}.{_LAYER[rest]}"


def read_tensor(source: GgufFile, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise one tensor, as ``info.shape``.

    GGUF's norm weights include the ``+ 1`` that Gemma's RMSNorm adds itself; it is taken off in fp32 before rounding.
    Queries and keys need no permutation: both sides rotate halves.
    """
    rows, columns = (info.shape[0], info.shape[1]) if len(info.shape) == 2 else (1, info.shape[0])
    kind = gguf.GGMLQuantizationType(info.kind)
    block_items, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if columns % block_items:
        raise ModelFileError(f"GGUF tensor {info.name} has rows of {columns}, not a multiple of {block_items}")
    row_bytes = columns // block_items * block_bytes
    out = torch.empty(rows, columns, dtype=dtype)
    for first in range(0, rows, _CHUNK_ROWS):
        count = min(_CHUNK_ROWS, rows - first)
        with source.data(info.start + first * row_bytes, count * row_bytes) as view:
            raw = np.frombuffer(bytes(view), dtype=np.uint8).reshape(count, row_bytes)
        values = gguf.dequantize(raw, kind).astype(np.float32, copy=False).reshape(count, columns)
        if info.name.endswith("norm.weight"):
            values = values - np.float32(1)
        # Copied, since the array may be a read-only view of the bytes above.
        out[first : first + count] = torch.from_numpy(np.array(values))
    return out.reshape(info.shape)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
