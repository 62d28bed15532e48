"""The numbers of tiny configs: plain data.

Owns: small values by field name, and what single classes need besides.  Does not own: how a config is made of them
(``tiny``).  Only values of config fields stand here; nothing of it reaches the code that serves a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

LAYERS: Final = 4
MOST_LAYERS: Final = 6
WINDOW: Final = 20
CHUNK: Final = 32
VOCABULARY: Final = 256
_HIDDEN: Final = 64
_INNER: Final = 128
_HEADS: Final = 4
_KV_HEADS: Final = 2
_HEAD_DIM: Final = 16
_EXPERTS: Final = 4
_TOKENS: Final = 2048


def _all(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


SMALL: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **_all(VOCABULARY, "vocab_size vocab_size_per_layer_input n_vocab"),
        **_all(_HIDDEN, "hidden_size n_embd d_model dim embed_dim embedding_size word_embed_proj_dim"),
        **_all(_INNER, "intermediate_size ffn_dim n_inner ffn_hidden_size intermediate_size_mlp encoder_ffn_dim dff"),
        **_all(_INNER, "decoder_ffn_dim dim_ff feed_forward_size feedforward_size ffn_hidden_dim"),
        **_all(LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
        **_all(_HEADS, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
        **_all(_KV_HEADS, "num_key_value_heads num_kv_heads"),
        **_all(_HEAD_DIM, "head_dim kv_channels global_head_dim query_pre_attn_scalar d_kv dim_head"),
        **_all(_TOKENS, "max_position_embeddings n_positions max_sequence_length max_seq_len n_ctx"),
        **_all(_TOKENS, "original_max_position_embeddings max_target_positions"),
        **_all(WINDOW, "sliding_window attention_window_size sliding_window_size window_size"),
        **_all(CHUNK, "attention_chunk_size chunk_size mamba_chunk_size"),
        # experts
        **_all(_EXPERTS, "num_experts n_routed_experts num_local_experts moe_num_experts"),
        **_all(2, "num_experts_per_tok moe_topk moe_k num_experts_per_token moe_top_k"),
        **_all(_HIDDEN, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
        **_all(_HIDDEN, "expert_ffn_hidden_size moe_shared_expert_intermediate_size"),
        **_all(1, "n_shared_experts first_k_dense_replace n_group topk_group moe_num_shared_experts"),
        "zero_expert_num": 2,
        # latents
        **_all(32, "kv_lora_rank q_lora_rank o_lora_rank"),
        **_all(_HEAD_DIM, "qk_rope_head_dim qk_nope_head_dim v_head_dim"),
        # recurrent state
        **_all(8, "mamba_n_heads mamba_num_heads n_mamba_heads"),
        **_all(_HEAD_DIM, "mamba_d_head mamba_head_dim mamba_headdim mamba_d_state ssm_state_size state_size"),
        **_all(_INNER, "mamba_d_ssm"),
        **_all(1, "mamba_n_groups mamba_ngroups n_groups"),
        **_all(4, "linear_num_value_heads linear_num_heads"),
        **_all(2, "linear_num_key_heads"),
        **_all(_HEAD_DIM, "linear_key_head_dim linear_value_head_dim linear_head_dim"),
        # the rest
        **_all(8, "rotary_dim"),
        **_all(_HEAD_DIM, "hidden_size_per_layer_input laurel_rank"),
        **_all(_HEADS, "num_attention_heads_per_layer"),
        **_all(64, "ngram_vocab_size_base encoder_hash_byte_group_vocab"),
        # What a model looks at, it looks at less of: prompts must be longer than every such budget.
        **_all(16, "index_topk index_block_size log_scaling_n_floor floor_scale"),
        **_all(2, "index_n_heads index_topk_blocks n_layers_per_attn_res_block num_dense_layers"),
        **_all(32, "index_head_dim"),
        **_all(24, "keep_window_size"),
        **_all(2 * WINDOW, "local_attention"),
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "is_decoder": True,
    }
)
"""By field name; set where the class's default config has the field and it is not None."""

_ROPE: Final[Mapping[str, Any]] = MappingProxyType({"rope_type": "default", "rope_theta": 10000.0})
_WINDOWS: Final[Mapping[str, Any]] = MappingProxyType({"layer_types": ["sliding_attention", "full_attention"] * 2})
"""Of classes whose default layers are all alike, though their checkpoints' are not."""
_SWA_LATENT: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **_all(_HEADS, "swa_num_attention_heads swa_num_key_value_heads"),
        **_all(32, "swa_q_lora_rank swa_kv_lora_rank swa_head_dim"),
        **_all(_HEAD_DIM, "swa_qk_nope_head_dim swa_v_head_dim"),
    }
)

OVERRIDES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "BambaForCausalLM": {"attn_layer_indices": [2]},
        "BltForCausalLM": {
            "encoder_config": {"hidden_size_global": _HIDDEN},
            "decoder_config": {"hidden_size_global": _HIDDEN},
        },
        "CohereCompassForCausalLM": {
            "rope_parameters": {"full_attention": dict(_ROPE), "sliding_attention": dict(_ROPE)},
            **_WINDOWS,
        },
        "DbrxForCausalLM": {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": _HIDDEN, "ffn_hidden_size": _HIDDEN, "moe_num_experts": 4, "moe_top_k": 2},
        },
        "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
        "Dots1ForCausalLM": {
            "n_routed_experts": _EXPERTS,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            **_WINDOWS,
        },
        "Dots3NoteForCausalLM": {**_SWA_LATENT, "per_layer_config": ...},
        "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
        "HunYuanDenseV1ForCausalLM": {"head_dim": _HEAD_DIM},
        "HunYuanMoEV1ForCausalLM": {"head_dim": _HEAD_DIM},
        "JambaForCausalLM": {"attn_layer_period": 4, "attn_layer_offset": 2},
        "LagunaForCausalLM": dict(_WINDOWS),
        "Lfm2ForCausalLM": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
        "Lfm2MoeForCausalLM": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
        "Mamba2ForCausalLM": {"num_heads": 8},
        "MellumForCausalLM": dict(_WINDOWS),
        "MiniMaxM3VLForCausalLM": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
        "MinistralForCausalLM": {"head_dim": _HEAD_DIM, **_WINDOWS},
        "NemotronForCausalLM": {"head_dim": _HEAD_DIM, "num_key_value_heads": _KV_HEADS},
        "Phi3ForCausalLM": {"sliding_window": WINDOW},
        "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": WINDOW, **_WINDOWS},
        "Qwen2MoeForCausalLM": {"use_sliding_window": True, "sliding_window": WINDOW, **_WINDOWS},
        "Qwen3ForCausalLM": {"use_sliding_window": True, "sliding_window": WINDOW, **_WINDOWS},
        "Qwen4ExpForCausalLM": {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": _HEAD_DIM,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
        "ReformerModelWithLMHead": {"axial_pos_embds_dim": [16, 48]},
        "XmodForCausalLM": {"default_language": "en_XX"},
        "ZayaForCausalLM": {"num_experts_per_tok": 1},
    }
)
"""By model class: fields on top of the above, also where the default is None; ``...`` leaves the default."""
