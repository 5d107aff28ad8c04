"""Makes tests/golden: tiny random models of every known family with reference outputs of transformers.

Run it with a Python that has torch and transformers: ``python scripts/make_goldens.py [name ...]``.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors.torch import save_file

OUT = Path(__file__).resolve().parent.parent / "tests" / "golden"
ROWS, LENGTH, NEW, PROMPT = 2, 24, 24, 12
SMALLEST_GAP = 1e-5
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
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Golden:
    """One model: its class in transformers and the published config on top of ``COMMON``."""

    architecture: str
    config: dict[str, Any] = field(default_factory=dict)

    def published(self) -> dict[str, Any]:
        """The ``config.json`` that a hub directory of this model would hold."""
        return {"architectures": [self.architecture], "torch_dtype": "bfloat16", **COMMON, **self.config}


MIXTRAL = {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "rope_theta": 1e6,
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
    "qwen3": Golden(
        "Qwen3ForCausalLM",
        {"model_type": "qwen3", "rope_theta": 1e6, "head_dim": 16, "tie_word_embeddings": False},
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
}


def build(golden: Golden) -> torch.nn.Module:
    """A model in float32 whose weights are bfloat16 numbers, spread widely enough that every part matters."""
    values = {k: v for k, v in golden.published().items() if k not in ("architectures", "torch_dtype", "model_type")}
    architecture = getattr(transformers, golden.architecture)
    config = architecture.config_class(**values, attn_implementation="eager")
    model = architecture(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            elif weight.ndim == 1:
                weight.normal_(0, 0.3)
            else:
                weight.normal_(0, 1.0 if "embed" in name else 1.5 * weight.shape[-1] ** -0.5)
            weight.copy_(weight.bfloat16().float())
    return model


def hub_tensors(model: torch.nn.Module, directory: Path) -> None:
    """Writes the weights under their published names."""
    model.bfloat16().save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)


@torch.no_grad()
def reference(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, the stream at every layer boundary, router logits."""
    routers: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, args, out: routers.append(router_logits(module, args[0])))
        for name, module in model.named_modules()
        if name.endswith(("mlp.gate", "block_sparse_moe.gate"))
    ]
    streams: list[torch.Tensor] = []
    for layer in model.model.layers:
        hooks.append(layer.register_forward_pre_hook(lambda module, args: streams.append(args[0])))
    hooks.append(model.model.norm.register_forward_pre_hook(lambda module, args: streams.append(args[0])))
    logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    out = {"logits": logits.float().contiguous()}
    out |= {f"hidden.{n}": stream.half().contiguous() for n, stream in enumerate(streams)}
    return out | {f"router_logits.{n}": router.float().contiguous() for n, router in enumerate(routers)}


def router_logits(gate: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Logits of a router, whatever its module returns."""
    return torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), gate.weight)


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Continues a prompt by full forwards: new ids, whole text, smallest gap between the best two logits."""
    ids, gap = prompt, float("inf")
    for _ in range(NEW):
        best = model(ids).logits[:, -1].topk(2)
        gap = min(gap, float((best.values[:, 0] - best.values[:, 1]).min()))
        ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    return ids[:, prompt.shape[1] :], ids, gap


def smallest_gap(found: dict[str, torch.Tensor], top_k: int) -> float:
    """Smallest distance between the last chosen and the first left-out expert."""
    ranked = [v.softmax(-1).sort(descending=True).values for k, v in found.items() if k.startswith("router_logits")]
    return min((float((r[:, top_k - 1] - r[:, top_k]).min()) for r in ranked), default=1.0)


def make(name: str, golden: Golden) -> None:
    """Writes one directory, with the first inputs in which no choice is close to a tie."""
    directory = OUT / name
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(len(name))
    model = build(golden)
    top_k = golden.config.get("num_experts_per_tok", 1)
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, COMMON["vocab_size"], (ROWS, LENGTH), generator=generator)
        found = reference(model, ids)
        new, text, margin = greedy(model, ids[:, :PROMPT])
        gap = min(smallest_gap(found, top_k), smallest_gap(reference(model, text), top_k))
        if gap >= SMALLEST_GAP and margin > 1e-3:
            break
    else:
        raise SystemExit(f"{name}: every input comes close to a tie")
    prompt = torch.tensor(PROMPT, dtype=torch.int32)
    found |= {"input_ids": ids.int(), "greedy_ids": new.int().contiguous(), "prompt_length": prompt}
    save_file(found, directory / "reference.safetensors")
    hub_tensors(model, directory)
    (directory / "config.json").write_text(json.dumps(golden.published(), indent=2) + "\n")
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{name}: seed {seed}, gap {gap:.1e}, margin {margin:.1e}, {size / 1000:.0f} kB")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or GOLDENS:
        make(chosen, GOLDENS[chosen])
