"""Makes tests/golden: tiny random models of every known family with reference outputs of transformers.

``scripts/make_goldens [NAME ...]`` runs it in an environment that has torch and transformers.
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from golden_files import GOLDENS as OUT
from golden_files import pack_golden
from golden_hybrids import HYBRIDS
from golden_models import COMMON, DEPTH, GOLDENS, Golden
from golden_moe import EXPERTS
from golden_mtp import add_mtp, layers_after, mtp_reference, shortened
from safetensors.torch import load_file, save_file

ROWS, LENGTH, NEW, PROMPT = 2, 24, 24, 12
SMALLEST_GAP, MOST_SPREAD = 1e-5, 5e-5
STEP = 2.0**-17  # of reference numbers; a twelfth of what tests allow them to be apart
Tensors = dict[str, torch.Tensor]
# Kept in float32 by those who publish: biases of choices, and what DeepSeek-V4 computes in float32.
FLOAT32 = (
    "e_score_correction_bias", "ffn.gate.bias", "attn_sink", ".ape", "_base", "_scale", "_fn", "expert_bias", "A_log",
    "dt_bias", ".D", ".router_bias",
)  # fmt: skip
ROUTERS = (
    "mlp.gate", "mlp.gate.wg", "mlp.router", "mlp.router.gate", "block_sparse_moe.gate", "block_sparse_moe.router",
    "feed_forward.gate", "feed_forward.router", "mixer.gate", "router.proj",
)  # fmt: skip
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def build(golden: Golden, layers: int) -> torch.nn.Module:
    """A model in float32, its weights spread widely enough that every part matters."""
    architecture = getattr(transformers, golden.architecture)
    settings = golden.settings()
    if layers > golden.depth():
        settings |= {**{key: layers for key in DEPTH if key in settings}, **golden.longer}
    model = architecture(architecture.config_class(**settings, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"norm(_\d)?\.weight$|scale$", name):
                weight.uniform_(0.5, 1.5)
            elif weight.ndim == 1:
                weight.normal_(0, 0.3)
            else:
                weight.normal_(0, golden.embedded if "embed" in name else golden.gain * weight.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
            elif name.endswith("tid2eid"):
                experts = torch.rand(buffer.shape[0], COMMON["vocab_size"])[:, : golden.config["n_routed_experts"]]
                buffer.copy_(experts.argsort(dim=1)[:, : buffer.shape[1]])
    return model


def published_tensors(model: torch.nn.Module, golden: Golden) -> Tensors:
    """Every weight under its published name, as a number that its published dtype has."""
    if golden.config["model_type"] == "deepseek_v4":
        tensors = dict(deepseek_v4_tensors(model))
    else:
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            tensors = load_file(Path(directory) / "model.safetensors")
    bits = golden.significant_bits
    return {name: x if is_exact(name, x) else shortened(x.float(), bits) for name, x in tensors.items()}


def is_exact(name: str, x: torch.Tensor) -> bool:
    """Whether a tensor is published in the dtype that it has here."""
    return name.endswith(FLOAT32) or not x.is_floating_point()


# What transformers 5.23 writes for DeepSeek-V4 are neither the published names nor those of its modules.
DEEPSEEK_V4 = (
    (r"^lm_head", "head"),
    (r"^model\.embed_tokens", "embed"),
    (r"^model\.", ""),
    (r"hc_head\.hc_", "hc_head_"),
    (r"(attn|ffn)_hc\.", r"hc_\1_"),
    (r"compressor\.indexer\.(scorer\.weights_proj|q_b_proj)", r"indexer.\1"),
    (r"compressor\.indexer\.", "indexer.compressor."),
    (r"scorer\.", ""),
    (r"compressor\.kv_norm", "compressor.norm"),
    (r"self_attn\.", "attn."),
    (r"mlp\.", "ffn."),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"position_bias", "ape"),
    (r"gate\.e_score_correction_bias", "gate.bias"),
    (r"shared_experts\.gate_proj", "shared_experts.w1"),
    (r"shared_experts\.up_proj", "shared_experts.w3"),
    (r"shared_experts\.down_proj", "shared_experts.w2"),
    (r"\.sinks", ".attn_sink"),
    (r"\.q_a_norm", ".q_norm"),
    (r"\.(q_a|q_b|kv|gate|o_a|o_b)_proj", r".w\1"),
    (r"\.w(q|o)(_[ab])", r".w\1\2"),
)


def deepseek_v4_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of DeepSeek-V4 under their published names."""
    for name, x in model.state_dict().items():
        for pattern, replacement in DEEPSEEK_V4:
            name = re.sub(pattern, replacement, name)
        stem, _, fused = name.partition("experts.gate_up_proj")
        down, _, last = name.partition("experts.down_proj")
        if name != stem and not fused:
            for e, both in enumerate(x):
                gate, up = both.chunk(2)
                yield f"{stem}experts.{e}.w1.weight", gate
                yield f"{stem}experts.{e}.w3.weight", up
        elif name != down and not last:
            yield from ((f"{down}experts.{e}.w2.weight", one) for e, one in enumerate(x))
        else:
            yield name, x


def blocks_of(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Largest magnitude of every block of a matrix, ragged ones at its edges included."""
    return torch.stack([torch.stack([b.abs().max() for b in a.split(columns, 1)]) for a in x.split(rows)])


def fp8(x: torch.Tensor, *, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 numbers in blocks of 128 x 128, the scale of each block, and the exact values."""
    scale = blocks_of(x, 128, 128) / 448
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    wide = scale.repeat_interleave(128, 0)[: x.shape[0]].repeat_interleave(128, 1)[:, : x.shape[1]]
    stored = (x / wide).to(torch.float8_e4m3fn)
    return stored, scale, stored.float() * wide


def fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e2m1 nibbles [..., K/2], an exponent byte per 32 of them [..., K/32], and the exact values."""
    group = x.unflatten(-1, (-1, 32))
    power = torch.ceil(torch.log2(group.abs().amax(-1) / 6)).clamp(-127, 127)
    scaled = group / torch.exp2(power)[..., None]
    code = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    exact = FP4[code] * torch.where(scaled < 0, -1.0, 1.0) * torch.exp2(power)[..., None]
    nibble = (code + 8 * (scaled < 0)).to(torch.uint8).flatten(-2)
    return nibble[..., ::2] | (nibble[..., 1::2] << 4), (power + 127).to(torch.uint8), exact.flatten(-2)


def quantize(golden: Golden, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Returns what is stored, and the same weights exactly dequantized in float32."""
    stored, exact = {}, dict(tensors)
    for name, x in tensors.items():
        stem = name.removesuffix(".weight")
        parts, layer = {name: x if is_exact(name, x) else x.bfloat16()}, "layers." in name
        if golden.quantized == "fp8" and layer and x.ndim == 2 and not name.endswith("mlp.gate.weight"):
            stored_x, scale, exact[name] = fp8(x, power_of_two=False)
            parts = {name: stored_x, f"{name}_scale_inv": scale}
        elif golden.quantized == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            nibbles, power, values = fp4(x.transpose(1, 2).contiguous())
            parts = {f"{name}_blocks": nibbles.unflatten(-1, (-1, 16)), f"{name}_scales": power}
            exact[name] = values.transpose(1, 2).contiguous()
        elif golden.quantized == "deepseek_v4" and ".experts." in name:
            nibbles, power, exact[name] = fp4(x)
            parts = {name: nibbles.view(torch.int8), f"{stem}.scale": power.view(torch.float8_e8m0fnu)}
        elif golden.quantized == "deepseek_v4" and stem.endswith(
            ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "shared_experts.w1", "shared_experts.w2", "shared_experts.w3")
        ):
            stored_x, scale, exact[name] = fp8(x, power_of_two=True)
            parts = {name: stored_x, f"{stem}.scale": scale.to(torch.float8_e8m0fnu)}
        stored |= parts
    return {name: x.contiguous() for name, x in stored.items()}, exact


def loaded(golden: Golden, tensors: Tensors, layers: int) -> torch.nn.Module:
    """The model of transformers with these weights, read from their published names."""
    architecture = getattr(transformers, golden.architecture)
    config = build(golden, layers).config
    with tempfile.TemporaryDirectory() as directory:
        whole = {name: x.contiguous() for name, x in tensors.items()}
        save_file(whole, Path(directory) / "model.safetensors", metadata={"format": "pt"})
        (Path(directory) / "generation_config.json").write_text("{}")
        model = architecture.from_pretrained(directory, config=config, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@contextmanager
def watched_choices() -> Iterator[list[float]]:
    """Collects the distance between the last taken and the first left-out value of every ``topk`` inside."""
    gaps, places = [1.0], [(torch, torch.topk), (torch.Tensor, torch.Tensor.topk)]

    def watch(real: Callable, x: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if k < x.shape[-1]:
            best = real(x, k + 1).values
            gap = best[..., -2] - best[..., -1]
            gaps.extend(gap[best[..., -1] > -1e30].tolist())  # below that are masked ones
        return real(x, k, *args, **kwargs)

    for place, real in places:
        place.topk = _method(watch, real)
    try:
        yield gaps
    finally:
        for place, real in places:
            place.topk = real


def _method(watch: Callable, real: Callable) -> Callable:
    return lambda *args, **kwargs: watch(real, *args, **kwargs)


def logits_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of whole texts, without a cache."""
    return model(ids, use_cache=False).logits


@torch.no_grad()
def reference(model: torch.nn.Module, ids: torch.Tensor) -> Tensors:
    """Logits, the stream at every layer boundary, router logits by layer."""
    layers = getattr(model.model, "decoder", model.model).layers
    streams: list[torch.Tensor] = []
    routers: dict[int, torch.Tensor] = {}

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        streams.append(args[0] if args else kwargs["hidden_states"])

    def leave(module: Any, args: Any, out: Any) -> None:
        streams.append(out if isinstance(out, torch.Tensor) else out[0])

    def route(y: int, gate: Any, args: Any, out: Any) -> None:
        x, gate = args[0].reshape(-1, args[0].shape[-1]), getattr(gate, "classifier", gate)
        logits = torch.nn.functional.linear(x, gate.weight, getattr(gate, "bias", None))
        cap = getattr(gate, "router_logit_softcapping", 0)
        routers[y] = cap * torch.tanh(logits / cap) if cap else logits

    hooks = [layers[-1].register_forward_hook(leave)]
    for y, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        for name, module in layer.named_modules():
            if name in ROUTERS and (hasattr(module, "weight") or hasattr(module, "classifier")):
                hooks.append(module.register_forward_hook(partial(route, y)))
    out = {"logits": logits_of(model, ids).float().contiguous()}
    for hook in hooks:
        hook.remove()
    out |= {f"hidden.{n}": stream.half().contiguous() for n, stream in enumerate(streams)}
    return out | {f"router_logits.{y}": router.float().contiguous() for y, router in routers.items()}


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Continues a prompt by full forwards: new ids, whole text, smallest gap between the best two logits."""
    ids, gap = prompt, float("inf")
    for _ in range(NEW):
        best = logits_of(model, ids)[:, -1].topk(2)
        gap = min(gap, float((best.values[:, 0] - best.values[:, 1]).min()))
        ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    return ids[:, prompt.shape[1] :], ids, gap


@torch.no_grad()
def spread(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Returns how far logits of whole texts and of single steps lie apart: a recurrence may enlarge roundings."""
    cache, steps = None, []
    for t in range(ids.shape[1]):
        out = model(ids[:, t : t + 1], past_key_values=cache, position_ids=torch.full((len(ids), 1), t), use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    return float((torch.cat(steps, 1) - model(ids, use_cache=False).logits).abs().max())


def as_nested(golden: Golden, stored: Tensors) -> Tensors:
    """Returns the tensors of a text model under the names that they have in a larger one."""
    prefix = golden.nested[1]
    # transformers writes Kimi-Linear's dense layers under the name of those with experts.
    stored = {re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name): x for name, x in stored.items()}
    if "zero_expert_num" in golden.config:  # transformers has weights of these that nobody reads or publishes
        last = golden.config["n_routed_experts"]
        numbers = {name: re.search(r"\.experts\.(\d+)\.", name) for name in stored}
        stored = {name: x for name, x in stored.items() if not (n := numbers[name]) or int(n[1]) < last}
    if golden.architecture == "SarvamMoEForCausalLM":  # transformers saves its own name of this one
        stored = {name.replace("embed_tokens", "word_embeddings"): x for name, x in stored.items()}
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


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to multiples of ``STEP``, so that a reference takes an eighth less in git."""
    return torch.round(x / STEP) * STEP if x.dtype == torch.float32 else x


def make(name: str, golden: Golden) -> None:
    """Writes one directory, with the first inputs in which no choice is close to a tie."""
    directory = OUT / name
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(len(name))
    layers = golden.depth()
    tensors = published_tensors(build(golden, layers + golden.mtp), golden)
    stored, exact = quantize(golden, add_mtp(golden, tensors) if golden.mtp else tensors)
    model, cores = loaded(golden, exact, layers), layers_after(golden, exact, loaded) if golden.mtp else []
    for seed in range(400):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, COMMON["vocab_size"], (ROWS, LENGTH), generator=generator)
        if golden.recurrent and spread(model, ids) > MOST_SPREAD:
            continue
        new, text, margin = greedy(model, ids[:, :PROMPT])
        if margin <= 1e-3:
            continue
        with watched_choices() as gaps, torch.no_grad():
            outputs = reference(model, ids)
            logits_of(model, text)
            if cores:
                outputs |= mtp_reference(golden, exact, model, cores, ids)
        if min(gaps) >= SMALLEST_GAP:
            break
    else:
        raise SystemExit(f"{name}: every input comes close to a tie")
    prompt = torch.tensor(PROMPT, dtype=torch.int32)
    outputs |= {"input_ids": ids.int(), "greedy_ids": new.int().contiguous(), "prompt_length": prompt}
    save_file({name: rounded(x) for name, x in outputs.items()}, directory / "reference.safetensors")
    save_file(as_nested(golden, stored), directory / "model.safetensors", metadata={"format": "pt"})
    pack_golden(directory)
    (directory / "config.json").write_text(json.dumps(golden.published(), indent=2) + "\n")
    size = sum(file.stat().st_size for file in directory.iterdir() if file.suffix != ".safetensors")
    print(f"{name}: seed {seed}, gap {min(gaps):.1e}, margin {margin:.1e}, {size / 1000:.0f} kB")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    known = GOLDENS | HYBRIDS | EXPERTS
    for chosen in sys.argv[1:] or known:
        make(chosen, known[chosen])
