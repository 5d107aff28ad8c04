"""The tiny models that tests/golden holds: which class of transformers builds each, and its published config."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 32
YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@dataclass(frozen=True)
class Golden:
    """One model.

    Attributes:
      architecture: its class in transformers.
      config: the published config on top of ``COMMON``; a value of ``...`` takes a common key out.
      quantized: layout of the stored weights, if they are not all bfloat16.
      mtp: how many layers of transformers hold the layers of multi-token prediction that are stored after the model.
      longer: settings of the model with those layers.
      nested: key of the published config under which the text model's lies, and prefix of its tensors; where that ends
        in the name of a part, those of the head have none.
      recurrent: whether some layers carry a state.
      gain: deviation of other matrices over that which keeps the size of what they multiply.
      embedded: deviation of the embedding's numbers; with large ones a tied model repeats itself.
      fused: whether one published tensor has the gate and up rows of all experts of a layer, and one their down rows.
      significant_bits: of stored weights; few are small in git, and 8 is all that bfloat16 has.
    """

    architecture: str
    config: dict[str, Any] = field(default_factory=dict)
    quantized: Literal["", "fp8", "mxfp4", "deepseek_v4"] = ""
    mtp: int = 0
    longer: dict[str, Any] = field(default_factory=dict)
    nested: tuple[str, str] = ("", "")
    fused: bool = False
    recurrent: bool = False
    gain: float = 1.5
    embedded: float = 1.0
    significant_bits: int = 4

    def text(self) -> dict[str, Any]:
        """The published config of the text model."""
        known = {"architectures": [self.architecture], "torch_dtype": "bfloat16", **COMMON, **self.config}
        return {key: value for key, value in known.items() if value is not ...}

    def depth(self) -> int:
        """Returns the number of layers."""
        return next(self.text()[key] for key in DEPTH if key in self.text())

    def published(self) -> dict[str, Any]:
        """The ``config.json`` that a hub directory of this model would hold."""
        if not self.nested[0]:
            return {key: value for key, value in self.text().items() if key not in IN_CODE_ALONE}
        kind = self.config["model_type"]
        inside, outside = (kind, kind.removesuffix("_text")) if kind.endswith("_text") else (WRAPPED[kind], kind)
        return {"model_type": outside, self.nested[0]: self.text() | {"model_type": inside}}

    def settings(self) -> dict[str, Any]:
        """Returns what the config class of transformers takes."""
        outside = ("architectures", "torch_dtype", "model_type", "quantization_config", "expert_dtype")
        # A copy: transformers writes into what it is given.
        return deepcopy({key: value for key, value in self.text().items() if key not in outside})


DEPTH = ("num_hidden_layers", "num_layers")
WRAPPED = {"kimi_k25": "deepseek_v3", "mistral3": "mistral4", "step3p7": "step3p5"}
# Sizes of chunks and of what other keys say, which change no result: transformers' classes ask for them.
IN_CODE_ALONE = ("mamba_expand", "chunk_size", "block_size")
MIXTRAL = {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "rope_theta": 1e6,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "attention_bias": True,
    "swiglu_limit": 2.0,
    "rope_theta": 150000.0,
    "rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False},
    "tie_word_embeddings": False,
}
SHARED_EXPERT = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
LATENT = {
    **SHARED_EXPERT,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DEEPSEEK = {
    **LATENT,
    "n_group": 4,
    "topk_group": 2,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
KIMI = {
    **DEEPSEEK,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "rope_theta": 50000.0,
}
INDEXER = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 8}
NEAR, FULL = "sliding_attention", "full_attention"
CLOSE, FAR = "compressed_sparse_attention", "heavily_compressed_attention"
DEEPSEEK_V4 = {
    "model_type": "deepseek_v4",
    "intermediate_size": ...,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "o_groups": 2,
    "o_lora_rank": 12,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 2.0,
    "sliding_window": 8,
    "index_n_heads": 8,
    "index_head_dim": 8,
    "index_topk": 3,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"type": "yarn", **YARN, "factor": 16.0},
    "tie_word_embeddings": False,
}
GOLDENS = {
    "llama3": Golden(
        "LlamaForCausalLM",
        {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3, "tie_word_embeddings": False},
    ),
    "llama_tied": Golden(
        "LlamaForCausalLM",
        {"model_type": "llama", "rope_theta": 1e4, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "qwen2": Golden(
        "Qwen2ForCausalLM",
        {
            "model_type": "qwen2",
            "rope_theta": 1e6,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": Golden(
        "Qwen3ForCausalLM",
        {"model_type": "qwen3", "rope_theta": 1e6, "head_dim": 16, "tie_word_embeddings": False},
    ),
    "opt": Golden(
        "OPTForCausalLM",
        {
            "model_type": "opt",
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": True,
            "activation_function": "relu",
            "bos_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": 1,
            **dict.fromkeys(("num_key_value_heads", "intermediate_size", "rms_norm_eps", "hidden_act"), ...),
        },
    ),
    "mixtral": Golden("MixtralForCausalLM", {**MIXTRAL, "sliding_window": None, "tie_word_embeddings": False}),
    "mixtral_window": Golden("MixtralForCausalLM", {**MIXTRAL, "sliding_window": 7, "tie_word_embeddings": False}),
    "qwen2_moe": Golden(
        "Qwen2MoeForCausalLM",
        {
            "model_type": "qwen2_moe",
            "rope_theta": 1e6,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_experts": 12,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "num_hidden_layers": 3,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_moe": Golden(
        "Qwen3MoeForCausalLM",
        {
            "model_type": "qwen3_moe",
            "rope_theta": 1e6,
            "head_dim": 16,
            "moe_intermediate_size": 8,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
        },
    ),
    "olmoe": Golden(
        "OlmoeForCausalLM",
        {
            "model_type": "olmoe",
            "rope_theta": 10000.0,
            "num_key_value_heads": 4,
            "intermediate_size": 8,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": Golden("GptOssForCausalLM", {**GPT_OSS, "num_hidden_layers": 4, "intermediate_size": 8}),
    "gpt_oss_mxfp4": Golden(
        "GptOssForCausalLM",
        {
            **GPT_OSS,
            "intermediate_size": 32,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
        },
        quantized="mxfp4",
    ),
    "minimax_m2": Golden(
        "MiniMaxM2ForCausalLM",
        {
            "model_type": "minimax_m2",
            "head_dim": 16,
            "rotary_dim": 8,
            "rope_theta": 5e6,
            "intermediate_size": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "tie_word_embeddings": False,
        },
    ),
    "glm4_moe": Golden(
        "Glm4MoeForCausalLM",
        {
            **SHARED_EXPERT,
            "model_type": "glm4_moe",
            "num_hidden_layers": 3,
            "n_routed_experts": 4,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_theta": 1e6,
            "num_nextn_predict_layers": 1,
        },
        mtp=1,
    ),
    "deepseek_v3": Golden(
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "model_type": "deepseek_v3", "num_hidden_layers": 3, "num_nextn_predict_layers": 1},
        mtp=1,
    ),
    "deepseek_v3_fp8": Golden(
        "DeepseekV3ForCausalLM",
        {
            **DEEPSEEK,
            "model_type": "deepseek_v3",
            "qk_nope_head_dim": 32,
            "v_head_dim": 36,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "quantization_config": FP8,
        },
        quantized="fp8",
    ),
    "kimi_k2": Golden("DeepseekV3ForCausalLM", {**KIMI, "model_type": "kimi_k2"}),
    "kimi_k25": Golden(
        "DeepseekV3ForCausalLM", {**KIMI, "model_type": "kimi_k25"}, nested=("text_config", "language_model.")
    ),
    "deepseek_v32": Golden("DeepseekV32ForCausalLM", {**DEEPSEEK, **INDEXER, "model_type": "deepseek_v32"}),
    "glm4_moe_lite": Golden(
        "Glm4MoeLiteForCausalLM", {**LATENT, "model_type": "glm4_moe_lite", "n_routed_experts": 4, "rope_theta": 1e6}
    ),
    "glm_moe_dsa": Golden(
        "GlmMoeDsaForCausalLM",
        {
            **LATENT,
            **INDEXER,
            "model_type": "glm_moe_dsa",
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "rope_theta": 1e6,
            "num_nextn_predict_layers": 1,
        },
        mtp=1,
    ),
    "glm_moe_dsa_shared": Golden(
        "GlmMoeDsaForCausalLM",
        {
            **LATENT,
            **INDEXER,
            "model_type": "glm_moe_dsa",
            "num_hidden_layers": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "rope_theta": 8e6,
            "index_topk_freq": 2,
            "index_skip_topk_offset": 1,
        },
    ),
    "deepseek_v4": Golden(
        "DeepseekV4ForCausalLM",
        {
            **DEEPSEEK_V4,
            "num_hidden_layers": 4,
            "hc_mult": 2,
            "layer_types": [NEAR, CLOSE, FAR, CLOSE],
            "compress_rates": {CLOSE: 4, FAR: 8},
            "num_nextn_predict_layers": 1,
        },
        mtp=1,
        longer={"layer_types": [NEAR, CLOSE, FAR, CLOSE, NEAR]},
    ),
    "deepseek_v4_fp4": Golden(
        "DeepseekV4ForCausalLM",
        {
            **DEEPSEEK_V4,
            "num_hidden_layers": 3,
            "hc_mult": 3,
            "head_dim": 40,
            "moe_intermediate_size": 32,
            "compress_ratios": [0, 4, 128, 0],
            "num_nextn_predict_layers": 0,
            "expert_dtype": "fp4",
            "quantization_config": {**FP8, "scale_fmt": "ue8m0"},
        },
        quantized="deepseek_v4",
    ),
}
# The same shape as OPT-350m: norms after the sums, an embedding narrower than the model.
GOLDENS["opt_350m"] = Golden(
    "OPTForCausalLM", {**GOLDENS["opt"].config, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
)
