"""Keys of published configs that change what a model computes: one that nothing reads must be off."""

from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import GqaRow
from jaxspec.models.read import Config, Reader, short

# Values with which a key says nothing; null, false and empty ones never do. Names are those of transformers' text
# models and of the hub's configs with code of their own.
ONE, ZERO, NEVER = (1,), (0,), ()
MECHANISMS: dict[str, tuple[Any, ...]] = {
    # which layers attend to what
    **dict.fromkeys(
        (
            "sliding_window", "use_sliding_window", "sliding_window_size", "sliding_window_pattern", "window_size",
            "attention_window_size", "local_attention", "global_attn_every_n_layers", "attention_chunk_size",
            "attention_types", "block_types", "layers_block_type", "hybrid_layer_pattern", "hybrid_override_pattern",
            "full_attn_idxs", "full_attention_interval", "attn_layer_indices", "attn_layer_period", "layer_group_size",
            "attn_type_list", "keep_window_size", "is_hybrid", "no_rope_layers", "nope_layer_interval",
            "use_bidirectional_attention", "dual_chunk_attention_config", "sparse_attention_config", "sparse_config",
            "linear_attn_config", "use_mla", "index_topk", "index_n_heads", "index_head_dim", "indexer_types",
            "index_topk_pattern", "compress_ratios", "compress_rates", "use_cla", "attention_k_eq_v",
        ),
        NEVER,
    ),
    "layer_types": ("full_attention",), "index_topk_freq": (0, 1), "cla_share_factor": ONE,
    "no_rope_layer_interval": ZERO, "num_kv_shared_layers": ZERO,
    # projections and scores
    **dict.fromkeys(
        (
            "attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias", "attention_out_bias", "use_bias", "bias",
            "add_bias_linear", "lm_head_bias", "use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm",
            "qk_norm_type", "query_key_norm", "attn_logit_softcapping", "attn_logit_softcap", "attn_soft_cap",
            "clip_qkv", "attn_output_gate", "attention_gate", "use_attention_gate", "gated_attention", "gating",
            "attention_sink", "attention_sinks", "add_swa_attention_sink_bias", "add_full_attention_sink_bias",
            "learnable_sink_init", "attn_temperature_tuning", "query_pre_attn_scalar", "attn_scale", "use_v_norm",
            "scale_attn_by_inverse_layer_idx", "swa_head_dim", "swa_num_attention_heads", "swa_num_key_value_heads",
            "num_attention_heads_per_layer", "num_key_value_heads_per_layer", "value_residual", "attention_scale",
        ),
        NEVER,
    ),
    **dict.fromkeys(
        (
            "attention_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier",
            "attention_value_scale",
        ),
        ONE,
    ),
    # positions
    **dict.fromkeys(
        (
            "alibi", "use_alibi", "rope_local_base_freq", "local_rope_theta", "global_rope_theta", "swa_rope_theta",
            "layer_rope_theta", "use_dynamic_ntk", "use_logn_attn", "use_mem_rope", "mrope_section", "rope_ratio",
            "original_rope", "sinusoidal_embeddings", "learned_pos_emb", "rope_parameters", "rope_scaling",
            "swa_rope_parameters", "rope_interleave", "rope_interleaved", "use_rope_layers",
        ),
        NEVER,
    ),
    "position_embedding_type": ("rope", "rotary", "rotary_embedding"), "rotary_pct": ONE, "rope_pct": ONE,
    "rotary_emb_fraction": ONE, "partial_rotary_factor": ONE, "rope_scaling_factor": ONE,
    # the stream between layers, embeddings and logits
    **dict.fromkeys(
        (
            "parallel_attn", "use_parallel_residual", "parallel_residual", "parallel_attention",
            "new_decoder_architecture", "apply_residual_connection_post_layernorm", "use_post_norm",
            "use_sandwich_norm", "sandwich_norm", "use_peri_norm", "post_norm", "pre_norm", "scale_embedding",
            "embedding_scale", "scale_depth", "dim_model_base", "mup_enabled", "use_mup", "final_logit_softcapping",
            "final_logit_softcap", "logits_soft_cap", "output_logit_soft_cap", "logits_mup_width_multiplier",
            "hidden_size_per_layer_input", "vocab_size_per_layer_input", "altup_num_inputs", "laurel_rank",
            "embedding_layernorm", "hc_mult", "hc_count", "use_embedding_norm", "ngram_size", "over_embedding",
            "residual_post_layernorm", "n_layers_per_attn_res_block",
        ),
        NEVER,
    ),
    **dict.fromkeys(
        (
            "residual_multiplier", "residual_scale", "embedding_multiplier", "embedding_multiplier_scale", "scale_emb",
            "logits_scaling", "logit_scale", "output_multiplier_scale", "lm_head_multiplier",
            "layernorm_full_attention_alpha", "layernorm_full_attention_beta", "layernorm_linear_attention_alpha",
            "layernorm_linear_attention_beta", "layernorm_mlp_alpha",
            "layernorm_mlp_beta", "full_attn_alpha_factor", "full_attn_beta_factor",
            "linear_attn_alpha_factor", "linear_attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor",
        ),
        ONE,
    ),
    "norm_type": ("rmsnorm", "rms_norm", "RMSNorm"), "layer_norm_elementwise_affine": NEVER,
    # feed-forward layers
    **dict.fromkeys(
        (
            "mlp_bias", "ffn_bias", "use_mlp_bias", "swiglu_limit", "swiglu_limits", "swiglu_alpha", "mlp_gate_softcap",
            "mlp_up_softcap", "activation_sparsity_pattern", "mlp_multipliers", "use_double_wide_mlp",
            "intermediate_size_mlp", "ffn_config", "attn_config",
        ),
        NEVER,
    ),
    "mlp_layer_types": ("dense",),
    **dict.fromkeys(
        ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "ff_activation", "activation"),
        ("silu", "swish", "swiglu"),
    ),
    # state-space and convolution layers
    **dict.fromkeys(
        (
            "mamba_d_state", "mamba_d_ssm", "mamba_num_heads", "ssm_state_size", "state_size", "conv_L_cache",
            "lru_width", "linear_num_value_heads", "linear_conv_kernel_dim", "short_conv_kernel_size", "use_short_conv",
        ),
        NEVER,
    ),
}  # fmt: skip

# Of layers with experts; in a family that has none their weights would be found not to fit, and heads of such targets
# keep these keys.
EXPERTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "n_shared_experts", "num_shared_experts", "num_shared_expert", "shared_expert_intermediate_size",
            "shared_intermediate_size", "moe_num_shared_experts", "moe_shared_expert_intermediate_size",
            "share_expert_dim", "first_k_dense_replace", "num_dense_layers", "num_hash_layers", "moe_latent_size",
            "zero_expert_num", "zero_expert_type", "num_zero_experts", "use_expert_bias",
            "moe_router_enable_expert_bias", "use_routing_bias",
            "moe_apply_router_weight_on_input", "moe_router_logit_softcapping", "moe_layers",
            "mlp_only_layers", "shared_expert_sink", "enable_moe_block", "use_residual_moe", "router_bias",
            "router_scale",
        ),
        ZERO,
    ),
    **dict.fromkeys(
        (
            "n_group", "num_expert_group", "topk_group", "moe_layer_freq", "decoder_sparse_step", "moe_layer_interval",
            "interleave_moe_layer_step", "expert_layer_period", "routed_scaling_factor", "router_scaling_factor",
            "moe_routed_scaling_factor", "route_scale",
        ),
        ONE,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), (0, 1)),
    "scoring_func": NEVER, "topk_method": NEVER, "norm_topk_prob": NEVER, "expert_selection_fn": NEVER,
}  # fmt: skip

# Keys that say nothing about what is computed; what jaxspec reads elsewhere is among them.
HARMLESS = {
    "_name_or_path", "architectures", "attention_dropout", "attn_implementation", "_attn_implementation", "auto_map",
    "aux_loss_alpha", "bos_token_id", "chunk_size_feed_forward", "dropout", "dtype", "embd_pdrop", "ep_size",
    "eos_token_id", "expert_dtype", "experts_per_token", "gradient_checkpointing", "head_dim", "hidden_dropout",
    "id2label", "init_std", "initial_context_length", "initializer_range", "input_jitter_noise", "intermediate_size",
    "intermediate_size_mlp_only", "is_decoder", "is_encoder_decoder", "keep_residual_in_fp32", "label2id", "layerdrop",
    "max_length", "max_model_len", "max_window_layers", "model_type", "moe_intermediate_size", "num_key_value_heads",
    "num_nextn_predict_layers", "num_mtp_modules", "mtp_transformer_layers", "use_mtp", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "prefix", "pretraining_tp", "qk_head_dim",
    "quantization_config", "residual_dropout", "resid_pdrop", "return_dict", "router_aux_loss_coef",
    "router_jitter_noise", "seq_aux", "text_config", "tie_word_embeddings", "tokenizer_class", "torch_dtype",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache", "vision_config",
    "index_share_for_mtp_iteration", "hc_eps", "for_llm_compressor",
    # tokens that stand for images and sounds
    "audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "boi_token_index", "eoa_token_index",
    "eoi_token_id", "eoi_token_index", "image_token_id", "image_token_index", "video_token_id",
    "vision_soft_tokens_per_image",
}  # fmt: skip


def check_mechanisms(read: Reader, family: Family) -> None:
    """Refuses a config that switches on what nothing of its family reads.

    Args:
      read: what the architecture was read with.
      family: of the config.

    Raises:
      ConfigError: keys do so, all of them named.
    """
    implied, table = _implied(family), _table(family)
    window = read.config.get("use_sliding_window") is False
    wrong = {}
    for key in read.config.keys() - read.asked:
        value = read.config[key]
        if key in implied:
            fine = value is None or implied[key] is ... or _among(value, implied[key])
        elif key in table and not (window and key == "sliding_window"):
            fine = _is_off(value) or _among(value, table[key])
        else:
            fine = True
        if not fine:
            wrong[key] = value
    if wrong:
        listed = ", ".join(f"{key} = {short(value)}" for key, value in sorted(wrong.items()))
        raise ConfigError(
            f"config: model_type {family.model_type} does not have {listed} in jaxspec, and without it the texts would "
            "be others; use a model whose config does not ask for it, or remove what its weights do not need"
        )


def ignored_keys(read: Reader, family: Family) -> tuple[str, ...]:
    """Keys that nothing reads and that are not known to be harmless, sorted; none of them is a mechanism."""
    known = HARMLESS | _table(family).keys() | _implied(family).keys()
    known |= {key for key in EXPERTS if _is_off(read.config.get(key))}
    return tuple(sorted(str(key) for key in read.config.keys() - read.asked - known))


def _table(family: Family) -> dict[str, tuple[Any, ...]]:
    return MECHANISMS if family.moe is None else MECHANISMS | EXPERTS


def _implied(family: Family) -> Config:
    """Values that the family's rows imply for keys that nothing reads."""
    implied: dict[str, Any] = {}
    if isinstance(family.mixer, GqaRow) and family.mixer.qk_norm != "none" and family.mixer.qk_norm_switch is None:
        implied |= dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm"), True)
    if isinstance(family.mixer, GqaRow) and family.mixer.sinks:
        implied |= dict.fromkeys(("attention_sink", "attention_sinks"), True)
    row = family.moe
    if row is not None:
        score = {"softmax": "softmax", "topk_softmax": "softmax", "sigmoid": "sigmoid", "sqrt_softplus": "sqrtsoftplus",
                 "sparse_mixer": "sparsemixer"}  # fmt: skip
        implied |= {
            "scoring_func": score[row.router],
            "topk_method": "noaux_tc" if row.choice_bias else "greedy",
            "mlp_layer_types": ("sparse", "moe"),
            "use_routing_bias": row.choice_bias is True,
        }
        if isinstance(row.renormalize, bool):
            implied["norm_topk_prob"] = row.renormalize
    return implied | dict(family.implied)


def _is_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, list | tuple | dict | str) and not value)


def _among(value: Any, allowed: Any) -> bool:
    """Whether a value, or each entry of a list, is one that is allowed; true is not 1."""
    if isinstance(value, list | tuple):
        return all(_among(one, allowed) for one in value)
    return any(one == value and isinstance(one, bool) == isinstance(value, bool) for one in _several(allowed))


def _several(allowed: Any) -> tuple[Any, ...]:
    return allowed if isinstance(allowed, tuple) else (allowed,)
