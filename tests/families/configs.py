"""Tiny random models, one for each family that has something of its own: about a second each.

Windows and chunks are short, so that prompts of a hundred tokens cross them, and weights are drawn wide, so that every
cached key, value and state has a say in the logits: what is wrong shows in the greedy tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
import transformers

VOCABULARY: Final = 256
WINDOW: Final = 20
CHUNK: Final = 32
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"

_COMMON: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": False,  # tied, a random model repeats its last token
    }
)
_ABSENT: Final = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
"""Fields of attention, which a model without any has not."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model class, what its config says beyond the common fields, and what its layers keep between tokens."""

    model: str
    config: str
    fields: Mapping[str, Any]
    kinds: tuple[str, ...]

    def config_of(self) -> Any:
        kind = getattr(transformers, self.config)
        # A property of some configs: the number follows from the list of layers.
        own = {"num_hidden_layers": ...} if isinstance(getattr(kind, "num_hidden_layers", None), property) else {}
        fields = {**_COMMON, **own, **self.fields}
        return kind(**{name: value for name, value in fields.items() if value is not ...})


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 1) -> Any:
    """The model of family ``name`` with random weights, the same ones every time, in eval mode."""
    family = FAMILIES[name]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, family.model)(family.config_of())
        for parameter_name, parameter in model.named_parameters():
            _draw(parameter_name, parameter)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


def _draw(name: str, parameter: torch.Tensor) -> None:
    """Wide where the model is linear; decays, norms and step sizes keep what the model's own code drew."""
    if name.endswith("A_log"):
        parameter.uniform_(-4.0, 0.0)  # states that fade over 2 to 20 tokens: none is forgotten at once
    elif "conv" in name and parameter.ndim == 3:
        parameter.normal_(0, 0.4)
    elif parameter.ndim >= 2:
        parameter.normal_(0, 0.08)
    elif name.endswith("sinks"):
        parameter.normal_(0, 1.0)


# ----------------------------------------------------------------------------------------------------- parts of configs


def _layers(*types: str) -> dict[str, Any]:
    return {"layer_types": list(types), "num_hidden_layers": len(types)}


_SLIDING_4: Final = MappingProxyType({**_layers(SLIDING, SLIDING, SLIDING, FULL), "sliding_window": WINDOW})
_MLA: Final = MappingProxyType(
    {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
    }
)
_EXPERTS: Final = MappingProxyType({"num_experts_per_tok": 2, "moe_intermediate_size": 64})
_MAMBA2: Final = MappingProxyType(
    {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": CHUNK,
    }
)
_DELTA: Final = MappingProxyType(
    {
        **_layers(LINEAR, LINEAR, LINEAR, FULL),
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
)
_ONLY_STATE: Final = MappingProxyType(dict.fromkeys(_ABSENT, ...))
_SHARED_KV: Final = MappingProxyType(
    {
        **_layers(SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL),
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
    }
)


def _family(model: str, config: str, kinds: str, *parts: Mapping[str, Any], **fields: Any) -> Family:
    merged: dict[str, Any] = {}
    for part in parts:
        merged.update(part)
    return Family(
        f"{model}ForCausalLM", f"{config}Config", MappingProxyType({**merged, **fields}), tuple(kinds.split())
    )


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        # full attention
        "llama": _family("Llama", "Llama", "full"),
        "qwen3": _family("Qwen3", "Qwen3", "full", head_dim=32),
        # windows and chunks
        "mistral": _family("Mistral", "Mistral", "window", head_dim=16, sliding_window=WINDOW),
        "ministral": _family("Ministral", "Ministral", "window full", _SLIDING_4, head_dim=16),
        "gemma2": _family(
            *("Gemma2", "Gemma2", "window full"),
            **_layers(SLIDING, FULL, SLIDING, FULL),
            head_dim=32,
            sliding_window=WINDOW,
            query_pre_attn_scalar=32,
            attn_logit_softcapping=5.0,
        ),
        "gemma3": _family(
            *("Gemma3", "Gemma3Text", "window full"),
            **_layers(*[SLIDING] * 5, FULL),
            head_dim=32,
            sliding_window=WINDOW,
            query_pre_attn_scalar=32,
        ),
        "cohere2": _family("Cohere2", "Cohere2", "window full", _SLIDING_4, logit_scale=1.0),
        "olmo3": _family("Olmo3", "Olmo3", "window full", _SLIDING_4),
        "llama4": _family(
            *("Llama4", "Llama4Text", "chunked full"),
            **_layers(*["chunked_attention"] * 3, FULL),
            head_dim=16,
            attention_chunk_size=CHUNK,
            num_local_experts=2,
            num_experts_per_tok=1,
            intermediate_size_mlp=128,
            interleave_moe_layer_step=2,
            no_rope_layers=[1, 1, 1, 0],
            attn_temperature_tuning=True,
            floor_scale=16,
            attn_scale=0.5,
        ),
        # keys and values of other layers
        "gemma3n": _family(
            *("Gemma3n", "Gemma3nText", "window full", _SHARED_KV),
            intermediate_size=[128] * 6,
            activation_sparsity_pattern=[0.0] * 6,
            laurel_rank=8,
        ),
        "gemma4": _family("Gemma4", "Gemma4Text", "window full", _SHARED_KV, global_head_dim=32),
        # latents
        "deepseek_v2": _family(
            *("DeepseekV2", "DeepseekV2", "full", _MLA, _EXPERTS),
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
        ),
        "deepseek_v3": _family(
            *("DeepseekV3", "DeepseekV3", "full", _MLA, _EXPERTS),
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
        ),
        "glm4_moe_lite": _family(
            *("Glm4MoeLite", "Glm4MoeLite", "full", _MLA, _EXPERTS),
            n_routed_experts=4,
            mlp_layer_types=["dense", "sparse", "sparse"],
        ),
        "longcat_flash": _family(
            *("LongcatFlash", "LongcatFlash", "full", _MLA),
            num_hidden_layers=...,
            num_layers=2,
            head_dim=16,
            ffn_hidden_size=128,
            expert_ffn_hidden_size=64,
            n_routed_experts=4,
            zero_expert_num=2,
            moe_topk=2,
        ),
        "minicpm3": _family("MiniCPM3", "MiniCPM3", "full", _MLA, dim_model_base=64, scale_emb=1.0),
        # experts
        "gpt_oss": _family(
            *("GptOss", "GptOss", "window full", _SLIDING_4), head_dim=16, num_local_experts=4, num_experts_per_tok=2
        ),
        "qwen3_moe": _family("Qwen3Moe", "Qwen3Moe", "full", _EXPERTS, num_experts=4, head_dim=32),
        "mixtral": _family("Mixtral", "Mixtral", "full", num_local_experts=4, num_experts_per_tok=2),
        # gated delta and its kin
        "qwen3_next": _family(
            *("Qwen3Next", "Qwen3Next", "state full", _DELTA, _EXPERTS),
            head_dim=32,
            num_experts=4,
            shared_expert_intermediate_size=64,
        ),
        "qwen3_5": _family("Qwen3_5", "Qwen3_5Text", "state full", _DELTA, head_dim=32),
        "olmo_hybrid": _family(
            "OlmoHybrid", "OlmoHybrid", "state full", _DELTA, linear_num_key_heads=4, num_key_value_heads=4
        ),
        "kimi_linear": _family(
            *("KimiLinear", "KimiLinear", "state full", _MLA, _EXPERTS),
            **_layers(LINEAR, LINEAR, LINEAR, FULL),
            q_lora_rank=None,
            num_local_experts=4,
            linear_head_dim=16,
            linear_num_heads=4,
        ),
        # Mamba-2
        "mamba2": _family(
            *("Mamba2", "Mamba2", "state", _ONLY_STATE),
            num_heads=8,
            head_dim=16,
            state_size=16,
            n_groups=1,
            chunk_size=CHUNK,
        ),
        "bamba": _family("Bamba", "Bamba", "state full", _MAMBA2, num_hidden_layers=4, attn_layer_indices=[2]),
        "falcon_h1": _family("FalconH1", "FalconH1", "full state", _MAMBA2, mamba_d_ssm=128),
        "granite_hybrid": _family(
            *("GraniteMoeHybrid", "GraniteMoeHybrid", "state full", _MAMBA2),
            **_layers("mamba", "mamba", "attention", "mamba"),
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=64,
        ),
        "nemotron_h": _family(
            *("NemotronH", "NemotronH", "state full"),
            num_hidden_layers=...,
            layers_block_type=["mamba", "moe", "mamba", "attention"],
            head_dim=16,
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=1,
            ssm_state_size=16,
            chunk_size=CHUNK,
            n_routed_experts=4,
            moe_intermediate_size=64,
            moe_shared_expert_intermediate_size=64,
        ),
        "zamba2": _family(
            *("Zamba2", "Zamba2", "state full"),
            num_hidden_layers=6,
            num_key_value_heads=4,
            layers_block_type=["mamba", "mamba", "hybrid"] * 2,
            hybrid_layer_ids=[2, 5],
            n_mamba_heads=8,
            mamba_headdim=16,
            mamba_d_state=16,
            chunk_size=CHUNK,
        ),
        # Mamba-1
        "mamba": _family("Mamba", "Mamba", "state", _ONLY_STATE, state_size=8),
        "falcon_mamba": _family("FalconMamba", "FalconMamba", "state", _ONLY_STATE, state_size=8),
        "jamba": _family(
            *("Jamba", "Jamba", "state full"),
            num_hidden_layers=4,
            attn_layer_period=4,
            attn_layer_offset=2,
            num_experts=2,
            num_experts_per_tok=1,
            mamba_d_state=8,
            use_mamba_kernels=False,
        ),
        "zamba": _family(
            *("Zamba", "Zamba", "state full"),
            num_hidden_layers=6,
            num_key_value_heads=4,
            layers_block_type=["mamba", "mamba", "hybrid"] * 2,
            attn_layer_period=3,
            attn_layer_offset=2,
            mamba_d_state=8,
            use_mamba_kernels=False,
        ),
        # short convolutions
        "lfm2": _family(
            *("Lfm2", "Lfm2", "state full"),
            **_layers("conv", "conv", FULL, "conv"),
            block_auto_adjust_ff_dim=False,
        ),
    }
)

QUICK: Final = frozenset({"gemma3", "deepseek_v3", "qwen3_next", "bamba"})
"""A window, a latent, a gated delta rule and a Mamba-2: these stand for all where a test has to be quick."""
