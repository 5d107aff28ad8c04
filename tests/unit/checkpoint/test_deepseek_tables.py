"""The text model inside of another keeps DeepSeek-V3's names behind a prefix, beside tensors of an image encoder."""

from dataclasses import replace

from jaxspec.checkpoint.names.known import known_tables
from jaxspec.models.catalog import arch_of

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


def test_names_inside_of_another_model_have_its_prefix():
    arch, tables = arch_of(CONFIG), known_tables()
    for part in ("rules", "mtp_rules"):
        plain, inside = (list(getattr(tables[name], part)(arch)) for name in ("deepseek_v3", "kimi_k25"))
        assert len(plain) > 30
        assert inside == [replace(r, hub=tuple(f"language_model.{name}" for name in r.hub)) for r in plain]


def test_tensors_of_the_image_encoder_are_not_the_text_models():
    arch, tables = arch_of(CONFIG), known_tables()
    others = ("vision_tower.blocks.0.norm0.weight", "mm_projector.linear_1.bias")
    behind = "model.layers.2.enorm.weight"
    assert all(tables["kimi_k25"].unread(arch).covers(name) for name in (*others, f"language_model.{behind}"))
    assert tables["deepseek_v3"].unread(arch).covers(behind)
    assert not any(tables["deepseek_v3"].unread(arch).covers(name) for name in (*others, "model.layers.1.x"))
