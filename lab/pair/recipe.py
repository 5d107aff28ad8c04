"""What the pair is and how it is made: sizes, seeds, numbers of updates."""

from dataclasses import dataclass, replace
from typing import Any

SHARED: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
TARGET = SHARED | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
}
DRAFT = SHARED | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 192,
    "attention_bias": False,
}


@dataclass(frozen=True)
class Stage:
    """What one training takes.

    Attributes:
      steps: updates in all.
      tokens: predicted in one update.
      lengths: of its rows, each from a part of the updates on.
      peak: learning rate of Muon and Adam.
      seed: of parameters and data.
    """

    steps: int
    tokens: int
    lengths: tuple[tuple[float, int], ...]
    peak: float
    seed: int

    def rows(self, step: int) -> tuple[int, int]:
        """Returns number and length of the rows of an update."""
        length = next(length for part, length in reversed(self.lengths) if step >= part * self.steps)
        return max(1, self.tokens // length), length


@dataclass(frozen=True)
class Recipe:
    """Everything that the pair depends on, besides the installed packages.

    Attributes:
      target, draft: published configs.
      of_target, of_draft: their trainings.
      balance, router_z: weights of the losses that keep all experts in use and the router's logits small.
      windows: held-out rows looked at during training.
      texts: sequences that the target writes for its draft and its head to learn from, and tenths of it held out.
      prompt, length: tokens that it goes on from, and tokens of a sequence in all.
      every: updates between two checkpoints.
    """

    target: dict[str, Any]
    draft: dict[str, Any]
    of_target: Stage = Stage(2000, 2048, ((0.0, 128), (0.75, 256), (0.93, 512)), 7e-3, 0)
    of_draft: Stage = Stage(500, 2048, ((0.0, 256),), 1e-2, 2)
    balance: float = 0.05
    router_z: float = 0.001
    windows: int = 32
    texts: int = 1280
    prompt: int = 32
    length: int = 256
    every: int = 100


PAIR = Recipe(TARGET, DRAFT)
TINY = replace(
    PAIR,
    target=TARGET
    | {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"num_key_value_heads": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16, "num_experts": 4},
    draft=DRAFT | {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16},
    of_target=Stage(6, 64, ((0.0, 16), (0.5, 32)), 1e-3, 0),
    of_draft=Stage(4, 64, ((0.0, 32),), 1e-3, 2),
    windows=4,
    texts=8,
    prompt=8,
    length=32,
    every=2,
)
