"""The tiny models of tests/golden of further families of 2026, see ``golden_models``."""

import importlib
from typing import Any

from golden_models import LATENT, LLAMA3, YARN, Golden

# Any: what is only in the environment that makes goldens.
transformers: Any = importlib.import_module("transformers")
conversion: Any = importlib.import_module("transformers.conversion_mapping")
torch: Any = importlib.import_module("torch")


class Step3p5ForCausalLM(transformers.Step3p7PreTrainedModel):
    """The text model with its head, which transformers has inside of Step 3.7 alone."""

    config_class = transformers.Step3p7TextConfig
    config: Any

    def __init__(self, config: Any):
        super().__init__(config)
        self.model = transformers.Step3p7TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        """Returns logits."""
        out = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(out.last_hidden_state))


class SarvamMoEForCausalLM(transformers.Glm4MoeForCausalLM):
    """What transformers computes of a Sarvam-30B."""

    config_class = transformers.SarvamMoEConfig


class SarvamMLAForCausalLM(transformers.DeepseekV3ForCausalLM):
    """What transformers computes of a Sarvam-105B."""

    config_class = transformers.SarvamMLAConfig


for one in (Step3p5ForCausalLM, SarvamMoEForCausalLM, SarvamMLAForCausalLM):
    setattr(transformers, one.__name__, one)
# Its published names are those of Step 3.7's text model, but for the prefixes.
conversion.register_checkpoint_conversion_mapping(
    "step3p5",
    [
        rule
        for rule in conversion.get_checkpoint_conversion_mapping("step3p7")
        if not any(pattern.startswith("^") for pattern in rule.source_patterns)
    ],
    overwrite=True,
)

# Heads, bases and turned parts by layer, bounds in one layer alone: 0 means none.
STEP = {
    **dict.fromkeys(("num_key_value_heads",), ...),
    "num_hidden_layers": 3,
    "intermediate_size": 24,
    "head_dim": 8,
    "num_attention_groups": 2,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 8,
    },
    # Lists speak of the layers of multi-token prediction, too: the last two.
    "layer_types": ["full_attention", *["sliding_attention"] * 4],
    "sliding_window": 7,
    "rope_theta": [500000.0, *[10000.0] * 4],
    "partial_rotary_factors": [0.5, *[1.0] * 4],
    "rope_scaling": LLAMA3,
    "yarn_only_types": ["full_attention"],
    "moe_layers_enum": "1,2",
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 8,
    "share_expert_dim": 8,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "swiglu_limits": [0.0, 0.0, 0.7, 0.0, 0.0],
    "swiglu_limits_shared": [0.6, 0.0, 0.5, 0.0, 0.4],
    "use_qk_norm": True,
    "use_head_wise_attn_gate": True,
    "zero_centered": True,
    "num_nextn_predict_layers": 2,
    "tie_word_embeddings": False,
}
MISTRAL4 = {
    **LATENT,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "rope_interleave": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        **YARN,
        "original_max_position_embeddings": 5,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3,
    },
}
LING = {
    "head_dim": 16,
    "moe_intermediate_size": 8,
    "num_experts": 8,
    "num_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "rope_theta": 600000.0,
    "tie_word_embeddings": False,
}
EXPERTS_2026 = {
    "bailing_moe": Golden(
        "SarvamMoEForCausalLM",
        {
            **LING,
            "model_type": "bailing_moe",
            "head_dim": 8,
            "intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 1,
        },
        mtp=1,
    ),
    "sarvam_moe": Golden("SarvamMoEForCausalLM", {**LING, "model_type": "sarvam_moe", "n_group": 1, "topk_group": 1}),
    "sarvam_mla": Golden(
        "SarvamMLAForCausalLM",
        {
            **LATENT,
            **dict.fromkeys(("n_routed_experts", "n_shared_experts", "num_key_value_heads"), ...),
            "model_type": "sarvam_mla",
            "num_experts": 4,
            "num_shared_experts": 1,
            "q_lora_rank": None,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "deepseek_yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "afmoe": Golden(
        "AfmoeForCausalLM",
        {
            "model_type": "afmoe",
            "num_hidden_layers": 3,
            "global_attn_every_n_layers": 2,
            "head_dim": 8,
            "sliding_window": 7,
            "moe_intermediate_size": 8,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "route_norm": True,
            "route_scale": 2.826,
            "score_func": "sigmoid",
            "mup_enabled": True,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
    ),
    "mellum": Golden(
        "MellumForCausalLM",
        {
            "model_type": "mellum",
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
            "norm_topk_prob": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 500000.0, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False,
        },
        mtp=1,
        longer={
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "granitemoeshared": Golden(
        "GraniteMoeSharedForCausalLM",
        {
            "model_type": "granitemoeshared",
            "intermediate_size": 8,
            "shared_intermediate_size": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": False,
            "embedding_multiplier": 0.2,
            "attention_multiplier": 0.5,
            "residual_multiplier": 0.8,
            "logits_scaling": 2.0,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        },
    ),
    "step3p5": Golden(
        "Step3p5ForCausalLM",
        {**STEP, "model_type": "step3p5"},
        mtp=2,
        longer={"num_nextn_predict_layers": 0, "layer_types": STEP["layer_types"]},
    ),
    "step3p7": Golden(
        "Step3p5ForCausalLM",
        {
            **STEP,
            "model_type": "step3p7",
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_theta": [10000.0, 500000.0, 10000.0],
            "partial_rotary_factors": [1.0, 0.5, 1.0],
            "moe_layers_enum": "0,1",
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
            "num_nextn_predict_layers": 1,
        },
        mtp=1,
        longer={
            "num_nextn_predict_layers": 0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        nested=("text_config", "model."),
    ),
    "mistral4": Golden("Mistral4ForCausalLM", {**MISTRAL4, "model_type": "mistral4", "n_group": 2, "topk_group": 1}),
    "mistral3": Golden(
        "Mistral4ForCausalLM",
        {
            **MISTRAL4,
            "model_type": "mistral3",
            "first_k_dense_replace": 0,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.0,
        },
        nested=("text_config", "language_model."),
    ),
}
