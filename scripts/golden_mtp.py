"""Multi-token prediction of the tiny models: published names of its layer, weights for it, and reference logits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from golden_models import COMMON, Golden

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Published:
    """Names of a layer after a model of ``{y}`` layers.

    Attributes:
      layer: beginnings of names of its decoder layer in transformers, and of the published ones, the first that fits
        counts; what none fits is not published.
      join: published names of the norms of embedding, hidden state and output, and of the product between.
      copies: of embedding and head.
    """

    layer: tuple[tuple[str, str], ...]
    join: tuple[str, ...]
    copies: tuple[str, ...] = ()


def _inside(prefix: str, last: str, *copies: str, layer: tuple[tuple[str, str], ...] = ()) -> Published:
    """Names of a layer that has the norms and the product of its join inside."""
    names = (prefix + "enorm.weight", prefix + "hnorm.weight", prefix + last, prefix + "eh_proj.weight")
    return Published((*layer, ("model.layers.{y}.", prefix)), names, tuple(prefix + name for name in copies))


NEXT = "model.layers.{y}."
MIMO = "model.mtp.layers.0."
DEEPSEEK = _inside(NEXT, "shared_head.norm.weight", "embed_tokens.weight", "shared_head.head.weight")
QWEN = Published(
    ((NEXT, "mtp.layers.0."),),
    ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight", "mtp.fc.weight"),
)
PUBLISHED = {
    "deepseek_v4": Published(
        (("layers.{y}.", "mtp.0."),), ("mtp.0.enorm.weight", "mtp.0.hnorm.weight", "mtp.0.norm.weight", "")
    ),
    "qwen3_next": QWEN,
    "qwen3_5_moe_text": QWEN,
    "exaone_moe": QWEN,
    **dict.fromkeys(("hy_v3", "bailing_moe"), _inside(NEXT, "final_layernorm.weight")),
    "mimo_v2_flash": _inside(
        MIMO,
        "final_layernorm.weight",
        layer=((f"{NEXT}post_attention_layernorm.", f"{MIMO}pre_mlp_layernorm."),),
    ),
    # The last norm is the model's own.
    "ernie4_5_moe": Published(
        ((NEXT, "model.mtp_block.0."),),
        (
            "model.mtp_emb_norm.0.weight",
            "model.mtp_hidden_norm.0.weight",
            "model.norm.weight",
            "model.mtp_linear_proj.0.weight",
        ),
    ),
    # Half of one of its layers, without experts.
    "longcat_flash": Published(
        (
            (f"{NEXT}self_attn.0.", f"{MIMO}self_attn."),
            (f"{NEXT}input_layernorm.0.", f"{MIMO}input_layernorm."),
            (f"{NEXT}post_attention_layernorm.0.", f"{MIMO}post_attention_layernorm."),
            (f"{NEXT}mlps.0.", f"{MIMO}transformer_layer.mlp."),
        ),
        (f"{MIMO}enorm.m.weight", f"{MIMO}hnorm.m.weight", "model.mtp.norm.weight", f"{MIMO}eh_proj.weight"),
        ("model.mtp.embed_tokens.weight",),
    ),
    # Two of its layers: attention, and experts.
    "nemotron_h": Published(
        (("backbone.layers.{y}.", "mtp.layers.0."), ("backbone.layers.{z}.", "mtp.layers.1.")),
        (
            "mtp.layers.0.enorm.weight",
            "mtp.layers.0.hnorm.weight",
            "mtp.layers.1.final_layernorm.weight",
            "mtp.layers.0.eh_proj.weight",
        ),
    ),
}  # fmt: skip


def published_of(golden: Golden) -> Published:
    """Returns the names of a golden's layer."""
    names = PUBLISHED.get(golden.config["model_type"], DEEPSEEK)
    depth = golden.depth()

    def filled(name: str) -> str:
        return name.replace("{y}", str(depth)).replace("{z}", str(depth + 1))

    return Published(
        tuple((filled(core), filled(hub)) for core, hub in names.layer),
        tuple(map(filled, names.join)),
        tuple(map(filled, names.copies)),
    )


def renamed(golden: Golden, tensors: Tensors, *, back: bool = False) -> Tensors:
    """Gives the tensors of the layer their published names, or, back, those that transformers reads."""
    pairs = [(hub, core) if back else (core, hub) for core, hub in published_of(golden).layer]
    out = {}
    for name, x in tensors.items():
        fits = next(((old, new) for old, new in pairs if name.startswith(old)), None)
        if fits is not None:
            out[fits[1] + name.removeprefix(fits[0])] = x
        elif back or not name.startswith(f"model.layers.{golden.depth()}."):
            out[name] = x
    return out


def add_mtp(golden: Golden, tensors: Tensors) -> Tensors:
    """Adds what a layer of multi-token prediction has besides its decoder layer, and gives that its published name."""
    dim, names = COMMON["hidden_size"], published_of(golden)
    tensors = renamed(golden, tensors)

    def product(*shape: int) -> torch.Tensor:
        return torch.randn(shape) * 1.5 * shape[-1] ** -0.5

    more = {name: torch.rand(dim) + 0.5 - norm_offset(golden) for name in names.join[:3]}
    if golden.config["model_type"] == "deepseek_v4":
        more |= {f"mtp.0.{part}_proj.weight": product(dim, dim) for part in "eh"}
        for part in ("fn", "base", "scale"):
            main = tensors[f"hc_head_{part}"]
            tensors[f"mtp.0.hc_head_{part}"] = main + 0.1 * torch.randn(main.shape)
    else:
        more[names.join[3]] = product(dim, 2 * dim)
    for name in names.copies:
        more[name] = tensors["lm_head.weight" if "head" in name else "model.embed_tokens.weight"].clone()
    return tensors | {name: x.bfloat16().float() for name, x in more.items()}


def norm_offset(golden: Golden) -> float:
    """Returns what is added to the weights of the norms."""
    return 1.0 if golden.config["model_type"].startswith("qwen3_") else 0.0


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm."""
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@torch.no_grad()
def mtp_reference(
    golden: Golden, tensors: Tensors, model: torch.nn.Module, core: torch.nn.Module, ids: torch.Tensor
) -> torch.Tensor:
    """Logits of multi-token prediction [B, T-1, V]: slot i joins token i + 1 with the hidden state after token i.

    DeepSeek-V3 (2024), section 2.2; for DeepSeek-V4 its released inference code; for the others the order of the join
    and the norms are those of vLLM 0.32 (``*_mtp.py``), but for ERNIE-4.5's last norm, which is PaddlePaddle's (vLLM
    has none). The decoder layer is transformers'.

    Args:
      golden: which model.
      tensors: its weights by published name.
      model: the model.
      core: the same without its head and with nothing but the layer after it.
      ids: the text.
    """
    config, kind, out = golden.text(), golden.config["model_type"], []
    eps = next(config[key] for key in ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon") if key in config)

    def norm(x: torch.Tensor, number: int) -> torch.Tensor:
        return rms(x, norm_offset(golden) + tensors[published_of(golden).join[number]], eps)

    e = norm(model.get_input_embeddings()(ids[:, 1:]), 0)
    hidden = norm(hidden_of(model, ids, streams=kind == "deepseek_v4")[:, :-1], 1)
    w = {name.removeprefix("mtp.0."): x for name, x in tensors.items() if name.startswith("mtp.0.")}
    if kind == "deepseek_v4":
        joined = (e @ w["e_proj.weight"].T)[:, :, None] + hidden @ w["h_proj.weight"].T
    else:
        joined = torch.cat([e, hidden], -1) @ tensors[published_of(golden).join[3]].T
    hooks = [
        core.layers[0].register_forward_pre_hook(lambda m, args: (joined, *args[1:])),
        core.layers[-1].register_forward_hook(lambda m, a, o: out.append(o if torch.is_tensor(o) else o[0])),
    ]
    core(inputs_embeds=e, use_cache=False)
    for hook in hooks:
        hook.remove()
    if kind == "deepseek_v4":
        flat = rms(out[0].flatten(2), torch.ones(1), eps)
        weight = torch.sigmoid(flat @ w["hc_head_fn"].T * w["hc_head_scale"] + w["hc_head_base"]) + config["hc_eps"]
        out[0] = (weight[..., None] * out[0]).sum(2)
    return model.lm_head(norm(out[0], 2)).float().contiguous()


def hidden_of(model: torch.nn.Module, ids: torch.Tensor, *, streams: bool) -> torch.Tensor:
    """Returns what the head reads, or the streams after the last layer."""
    kept: list[Any] = []
    if streams:
        hook = model.model.layers[-1].register_forward_hook(lambda m, a, o: kept.append(o))
    else:
        hook = model.lm_head.register_forward_pre_hook(lambda m, args: kept.append(args[0]))
    model(ids, use_cache=False)
    hook.remove()
    return kept[0] if torch.is_tensor(kept[0]) else kept[0][0]


def layer_after(
    golden: Golden, tensors: Tensors, load: Callable[[Golden, Tensors, int], torch.nn.Module]
) -> torch.nn.Module:
    """A model without a head that has nothing but the layer of multi-token prediction."""
    depth = golden.depth()
    core = load(golden, renamed(golden, tensors, back=True), depth + golden.mtp).model
    core.layers = core.layers[depth:]
    if golden.config["model_type"] == "longcat_flash":
        silence(core.layers[0])
    elif getattr(core.config, "layer_types", None) and "layer_types" in golden.longer:
        core.config.layer_types = core.config.layer_types[depth:]
    return core


def silence(layer: torch.nn.Module) -> None:
    """Lets a layer of LongCat-Flash add nothing after its first attention and dense feed-forward."""

    def nothing(module: Any, args: Any, out: Any) -> Any:
        return torch.zeros_like(out) if torch.is_tensor(out) else (torch.zeros_like(out[0]), *out[1:])

    for part in (layer.mlp, layer.self_attn[1], layer.mlps[1]):
        part.register_forward_hook(nothing)
