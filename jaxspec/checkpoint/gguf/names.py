"""Names of GGUF tensors to the hub's, by architecture."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)$")
ONE_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d+)$")  # as files of before 2024 have them
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROTATION = "rope_freqs.weight"
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
LATENT = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}
DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PREDICTION = {
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}


@dataclass(frozen=True)
class Names:
    """Hub names of one architecture.

    Attributes:
      layer: of what a layer has once, by GGUF name, both without ``weight`` or ``bias``.
      experts: pattern of one routed expert's gate, up and down, ``{e}`` for its number; '' where experts are stacked
        in a way of their own.
      expert_parts: the words of that pattern for gate, up and down.
      turned: whether rows of queries and keys lie pair by pair, as llama.cpp turns them.
    """

    layer: Mapping[str, str]
    experts: str = "mlp.experts.{e}.{part}"
    expert_parts: Mapping[str, str] = field(
        default_factory=lambda: {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
    )
    turned: bool = False

    def whole(self, name: str) -> str | None:
        """Returns the hub name of a tensor that is one there, None if it is none or not known."""
        if name in TOP:
            return TOP[name]
        if not (match := LAYER.match(name)):
            return None
        number, part, end = match.groups()
        if part == "exp_probs_b" and end == "bias" and "ffn_gate_inp" in self.layer:
            return f"model.layers.{number}.mlp.gate.e_score_correction_bias"
        if part == "attn_sinks":
            return f"model.layers.{number}.self_attn.sinks"
        if one := ONE_EXPERT.match(part):
            return self.expert(number, one[1], int(one[2]), end)
        return f"model.layers.{number}.{self.layer[part]}.{end}" if part in self.layer else None

    def expert(self, layer: str, part: str, e: int, end: str) -> str | None:
        """Returns the hub name of one expert's part, None where its experts are stacked there, too."""
        if not self.experts or part not in self.expert_parts:
            return None
        name = self.experts.replace("{e}", str(e)).replace("{part}", self.expert_parts[part])
        return f"model.layers.{layer}.{name}.{end}"


def _norms(second: str) -> dict[str, str]:
    return {second: "post_attention_layernorm"}


def _shared(hub: str) -> dict[str, str]:
    return {f"{name}_shexp": value.replace("mlp.", hub) for name, value in DENSE.items()}


_QWEN = {**ATTENTION, **_norms("ffn_norm"), **DENSE, "ffn_gate_inp": "mlp.gate"}
_GLM = {**_norms("post_attention_norm"), **DENSE, **_shared("mlp.shared_experts."), "ffn_gate_inp": "mlp.gate"}
NAMES: Mapping[str, Names] = {
    "llama": Names({**ATTENTION, **_norms("ffn_norm"), **DENSE}, turned=True),
    "mixtral": Names(
        {**ATTENTION, **_norms("ffn_norm"), "ffn_gate_inp": "block_sparse_moe.gate"},
        "block_sparse_moe.experts.{e}.{part}", {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}, turned=True,
    ),
    "qwen2": Names({**ATTENTION, **_norms("ffn_norm"), **DENSE}),
    "qwen3": Names({**ATTENTION, **_norms("ffn_norm"), **DENSE}),
    "qwen2moe": Names(
        {**_QWEN, **_shared("mlp.shared_expert."), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
    ),
    "qwen3moe": Names(_QWEN),
    "gpt-oss": Names({**ATTENTION, **_norms("post_attention_norm"), "ffn_gate_inp": "mlp.router"}, ""),
    "deepseek2": Names({**LATENT, **_GLM, **_norms("ffn_norm"), **PREDICTION}),
    "glm4moe": Names({**ATTENTION, **_GLM, **PREDICTION}),
}  # fmt: skip
