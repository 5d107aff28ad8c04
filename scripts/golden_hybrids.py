"""The tiny models of tests/golden whose layers are recurrent or of several kinds, see ``golden_models``."""

import re
from dataclasses import replace

import torch  # pyright: ignore[reportMissingImports]
from golden_models import FULL, SHARED_EXPERT, Golden

LINEAR = "linear_attention"
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e7,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 16,
    "tie_word_embeddings": False,
}
QWEN3_5_KINDS = [LINEAR, FULL, LINEAR]
QWEN3_5 = {
    **QWEN3_NEXT,
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 3,
    "intermediate_size": ...,
    "rope_theta": ...,
    "partial_rotary_factor": ...,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "full_attention_interval": ...,
    "layer_types": QWEN3_5_KINDS,
    "attn_output_gate": True,
}
KIMI_LINEAR = {
    **SHARED_EXPERT,
    "model_type": "kimi_linear",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "n_routed_experts": ...,
    "n_shared_experts": ...,
    "num_experts_per_tok": ...,
    "n_group": ...,
    "norm_topk_prob": ...,
    "max_position_embeddings": ...,
    "pad_token_id": 0,
    "model_max_length": 256,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "moe_renormalize": True,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "mla_use_nope": True,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
        "num_heads": 4,
        "head_dim": 6,
        "short_conv_kernel_size": 4,
    },
}
LFM2 = {
    "model_type": "lfm2_moe",
    "num_hidden_layers": 3,
    "rms_norm_eps": ...,
    "hidden_act": ...,
    "norm_eps": 1e-5,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
GRANITE = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 3,
    "intermediate_size": 8,
    "shared_intermediate_size": 16,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    "position_embedding_type": "nope",
    "tie_word_embeddings": True,
}
NEMOTRON_KINDS = "ME*M-"
NEMOTRON = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 5,
    "rms_norm_eps": ...,
    "hidden_act": ...,
    "layer_norm_epsilon": 1e-5,
    "hybrid_override_pattern": NEMOTRON_KINDS,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "chunk_size": 8,
    "use_bias": False,
    "use_conv_bias": True,
    "mlp_hidden_act": "relu2",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 16,
    "moe_latent_size": 16,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
}
MINIMAX = {
    "model_type": "minimax",
    "num_hidden_layers": 3,
    "intermediate_size": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "block_size": 8,
    "rope_theta": 1e6,
    "full_attn_alpha_factor": 1.5,
    "full_attn_beta_factor": 0.9,
    "linear_attn_alpha_factor": 1.3,
    "linear_attn_beta_factor": 1.1,
    "mlp_alpha_factor": 1.7,
    "mlp_beta_factor": 0.8,
    "tie_word_embeddings": False,
}
LING = {
    **SHARED_EXPERT,
    "model_type": "bailing_hybrid",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "n_routed_experts": ...,
    "n_shared_experts": ...,
    "num_experts_per_tok": ...,
    "n_group": ...,
    "norm_topk_prob": ...,
    "max_position_embeddings": ...,
    "pad_token_id": 0,
    "model_max_length": 256,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "num_expert_group": 2,
    "topk_group": 1,
    "moe_renormalize": True,
    "layer_group_size": 3,
    "linear_head_dim": 6,
    "linear_num_heads": 4,
    "short_conv_kernel_size": 4,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "rope_theta": 6e6,
}
HYBRIDS = {
    "qwen3_next": Golden(
        "Qwen3NextForCausalLM",
        {**QWEN3_NEXT, "mlp_only_layers": [1], "decoder_sparse_step": 1},
        mtp=1,
        behind={"layer_types": [LINEAR, LINEAR, LINEAR, FULL, FULL]},
    ),
    "qwen3_5_moe_text": Golden("Qwen3_5MoeForCausalLM", QWEN3_5),
    "qwen3_5_moe": Golden(
        "Qwen3_5MoeForCausalLM",
        {**QWEN3_5, "mtp_num_hidden_layers": 1},
        nested=("text_config", "model.language_model."),
        fused=True,
        mtp=1,
        behind={"layer_types": [*QWEN3_5_KINDS, FULL]},
    ),
    "kimi_linear": Golden("KimiLinearForCausalLM", KIMI_LINEAR),
    "lfm2_moe": Golden("Lfm2MoeForCausalLM", LFM2),
    "granitemoehybrid": Golden("GraniteMoeHybridForCausalLM", GRANITE),
    "nemotron_h": Golden(
        "NemotronHForCausalLM", NEMOTRON, mtp=2, behind={"hybrid_override_pattern": f"{NEMOTRON_KINDS}*E"}
    ),
    "minimax": Golden("MiniMaxForCausalLM", MINIMAX),
    "bailing_hybrid": Golden("BailingHybridForCausalLM", LING),
}
HYBRIDS = {name: replace(golden, recurrent=True) for name, golden in HYBRIDS.items()}


@torch.no_grad()
def spread(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Largest difference between logits of whole texts and of single steps: a recurrence may enlarge roundings."""
    cache, steps = None, []
    for t in range(ids.shape[1]):
        out = model(ids[:, t : t + 1], past_key_values=cache, position_ids=torch.full((len(ids), 1), t), use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    return float((torch.cat(steps, 1) - model(ids, use_cache=False).logits).abs().max())


def as_nested(golden: Golden, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """dict[str, torch.Tensor] of a text model under the names that they have in a larger one."""
    prefix = golden.nested[1]
    # transformers writes Kimi-Linear's dense layers under the name of those with experts.
    stored = {re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name): x for name, x in stored.items()}
    if "zero_expert_num" in golden.config:  # transformers has weights of these that nobody reads or publishes
        last = golden.config["n_routed_experts"]
        numbers = {name: re.search(r"\.experts\.(\d+)\.", name) for name in stored}
        stored = {name: x for name, x in stored.items() if not (n := numbers[name]) or int(n[1]) < last}
    if not golden.fused:
        before = r"^model\." if prefix.startswith("model.") else "^"
        return {re.sub(before, prefix, tensor): x for tensor, x in stored.items()}
    out = {re.sub(r"^model\.", prefix, name): x for name, x in stored.items() if ".experts." not in name}
    stacks = sorted({name.partition(".experts.")[0] for name in stored if ".experts." in name})
    for stack in stacks:
        experts = range(sum(name.startswith(f"{stack}.experts.") for name in stored) // 3)

        def each(part: str, stack: str = stack, experts: range = experts) -> torch.Tensor:
            return torch.stack([stored[f"{stack}.experts.{e}.{part}_proj.weight"] for e in experts])

        fused = {"gate_up": torch.cat([each("gate"), each("up")], 1), "down": each("down")}
        out |= {f"{re.sub(r'^model.', prefix, stack)}.experts.{n}_proj": x.contiguous() for n, x in fused.items()}
    return out
