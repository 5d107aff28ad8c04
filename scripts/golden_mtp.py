"""Multi-token prediction of the tiny models: published names of its layer, weights for it, and reference logits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from golden_models import COMMON, Golden

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Published:
    """Names of layer ``{n}`` of prediction, and ``{y}`` of all.

    Attributes:
      layer: beginnings of names of its decoder layer in transformers, and of the published ones, the first that fits
        counts; what none fits is not published.
      join: published names of the norms of embedding, hidden state and output, and of the product between.
      copies: of embedding and head.
      head: published name of a head of its own, empty where it is the model's.
    """

    layer: tuple[tuple[str, str], ...]
    join: tuple[str, ...]
    copies: tuple[str, ...] = ()
    head: str = ""


NEXT = "model.layers.{y}."


def _inside(prefix: str, last: str, *copies: str, layer: tuple[tuple[str, str], ...] = (), head: str = "") -> Published:
    """Names of a layer that has the norms and the product of its join inside."""
    names = (prefix + "enorm.weight", prefix + "hnorm.weight", prefix + last, prefix + "eh_proj.weight")
    return Published((*layer, (NEXT, prefix)), names, tuple(prefix + name for name in copies), head and prefix + head)


MIMO = "model.mtp.layers.{n}."
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
    "mellum": QWEN,
    **dict.fromkeys(
        ("step3p5", "step3p7"),
        _inside(NEXT, "transformer.shared_head.norm.weight", head="transformer.shared_head.output.weight"),
    ),
    **dict.fromkeys(("hy_v3", "bailing_moe", "bailing_hybrid"), _inside(NEXT, "final_layernorm.weight")),
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


# Whose layers join the stream before the last norm; of MiMo-V2-Flash all of them that of the model.
STREAMS = ("deepseek_v4", "mimo_v2_flash", "step3p5", "step3p7")
UNCHAINED = "mimo_v2_flash"


def predicting(golden: Golden) -> int:
    """Returns the number of layers of prediction."""
    return golden.config.get("num_nextn_predict_layers", 1)


def published_of(golden: Golden, number: int = 0) -> Published:
    """Returns the names of a layer of a golden."""
    names = PUBLISHED.get(golden.config["model_type"], DEEPSEEK)
    depth = golden.depth() + number

    def filled(name: str) -> str:
        return name.replace("{y}", str(depth)).replace("{z}", str(depth + 1)).replace("{n}", str(number))

    return Published(
        tuple((filled(core), filled(hub)) for core, hub in names.layer),
        tuple(map(filled, names.join)),
        tuple(map(filled, names.copies)),
        filled(names.head),
    )


def renamed(golden: Golden, tensors: Tensors, *, back: bool = False) -> Tensors:
    """Gives the tensors of the layer their published names, or, back, those that transformers reads."""
    layers = [pair for n in range(predicting(golden)) for pair in published_of(golden, n).layer]
    pairs, out = [(hub, core) if back else (core, hub) for core, hub in layers], {}
    for name, x in tensors.items():
        fits = next(((old, new) for old, new in pairs if name.startswith(old)), None)
        if fits is not None:
            out[fits[1] + name.removeprefix(fits[0])] = x
        elif back or not name.startswith(f"model.layers.{golden.depth()}."):
            out[name] = x
    return out


def add_mtp(golden: Golden, tensors: Tensors) -> Tensors:
    """Adds what layers of multi-token prediction have besides a decoder layer, and gives that its published name."""
    dim, more = COMMON["hidden_size"], {}
    tensors = renamed(golden, tensors)

    def product(*shape: int) -> torch.Tensor:
        return torch.randn(shape) * 1.5 * shape[-1] ** -0.5

    for names in (published_of(golden, n) for n in range(predicting(golden))):
        more |= {name: torch.rand(dim) + 0.5 - norm_offset(golden) for name in names.join[:3]}
        if golden.config["model_type"] == "deepseek_v4":
            more |= {f"mtp.0.{part}_proj.weight": product(dim, dim) for part in "eh"}
            for part in ("fn", "base", "scale"):
                main = tensors[f"hc_head_{part}"]
                tensors[f"mtp.0.hc_head_{part}"] = main + 0.1 * torch.randn(main.shape)
        else:
            more[names.join[3]] = product(dim, 2 * dim)
        for name in names.copies:
            more[name] = tensors["lm_head.weight" if "head" in name else "model.embed_tokens.weight"].clone()
        if names.head:
            more[names.head] = product(COMMON["vocab_size"], dim)
    return tensors | {name: shortened(x, golden.significant_bits) for name, x in more.items()}


def shortened(x: torch.Tensor, significant_bits: int) -> torch.Tensor:
    """Rounds to so many significant bits, at most the 8 of bfloat16."""
    fraction, power = torch.frexp(x)
    return torch.ldexp(torch.round(2**significant_bits * fraction) / 2**significant_bits, power)


def norm_offset(golden: Golden) -> float:
    """Returns what is added to the weights of the norms."""
    return 1.0 if golden.config["model_type"].startswith(("qwen3_", "step3p")) else 0.0


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm."""
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@torch.no_grad()
def mtp_reference(
    golden: Golden, tensors: Tensors, model: torch.nn.Module, cores: list[torch.nn.Module], ids: torch.Tensor
) -> Tensors:
    """Logits of multi-token prediction: slot i of layer n joins token i + n + 1 with a hidden state after token i.

    DeepSeek-V3 (2024), section 2.2; for DeepSeek-V4 its released inference code; for the others the order of the join
    and the norms are those of vLLM 0.32 (``*_mtp.py``), but for ERNIE-4.5's last norm, which is PaddlePaddle's (vLLM
    has none), for Mellum 2, which is as in transformers 5.24 (``MtpModel``), and for what later layers of Step 3.5 and
    of MiMo-V2-Flash join, which is as in SGLang (``multi_layer_eagle_worker_v2.py``). The decoder layers are
    transformers'.

    Args:
      golden: which model.
      tensors: its weights by published name.
      model: the model.
      cores: the same without its head and with nothing but a layer after it each.
      ids: the text.

    Returns:
      ``mtp_logits`` [B, T-1, V] of the first layer, ``mtp_logits.n`` [B, T-1-n, V] of the others.
    """
    kind, out = golden.config["model_type"], {}
    hidden = hidden_of(model, ids, streams=kind in STREAMS)
    for n, core in enumerate(cores):
        embedded = model.get_input_embeddings()(ids[:, n + 1 :])
        feature, last = layer_reference(golden, tensors, core, published_of(golden, n), embedded, hidden[:, :-1])
        head = published_of(golden, n).head
        logits = last @ tensors[head].T if head else model.lm_head(last)
        out[f"mtp_logits.{n}" if n else "mtp_logits"] = logits.float().contiguous()
        hidden = hidden[:, :-1] if kind == UNCHAINED else feature
    return out


def layer_reference(
    golden: Golden, tensors: Tensors, core: torch.nn.Module, names: Published, e: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what a layer passes on, and what the head reads."""
    config, kind, out = golden.text(), golden.config["model_type"], []
    eps = next(config[key] for key in ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon") if key in config)

    def norm(x: torch.Tensor, number: int) -> torch.Tensor:
        return rms(x, norm_offset(golden) + tensors[names.join[number]], eps)

    e, hidden = norm(e, 0), norm(hidden, 1)
    w = {name.removeprefix("mtp.0."): x for name, x in tensors.items() if name.startswith("mtp.0.")}
    if kind == "deepseek_v4":
        joined = (e @ w["e_proj.weight"].T)[:, :, None] + hidden @ w["h_proj.weight"].T
    else:
        joined = torch.cat([e, hidden], -1) @ tensors[names.join[3]].T
    hooks = [
        core.layers[0].register_forward_pre_hook(lambda m, args: (joined, *args[1:])),
        core.layers[-1].register_forward_hook(lambda m, a, o: out.append(o if torch.is_tensor(o) else o[0])),
    ]
    core(inputs_embeds=e, use_cache=False)
    for hook in hooks:
        hook.remove()
    stream = out[0]
    if kind == "deepseek_v4":
        flat = rms(stream.flatten(2), torch.ones(1), eps)
        weight = torch.sigmoid(flat @ w["hc_head_fn"].T * w["hc_head_scale"] + w["hc_head_base"]) + config["hc_eps"]
        stream = (weight[..., None] * stream).sum(2)
    last = norm(stream, 2)
    return out[0] if kind in STREAMS else last, last


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


def layers_after(
    golden: Golden, tensors: Tensors, load: Callable[[Golden, Tensors, int], torch.nn.Module]
) -> list[torch.nn.Module]:
    """Models without a head that have nothing but a layer of multi-token prediction each."""
    return [_layer_after(golden, tensors, load, n) for n in range(predicting(golden))]


def _layer_after(
    golden: Golden, tensors: Tensors, load: Callable[[Golden, Tensors, int], torch.nn.Module], number: int
) -> torch.nn.Module:
    depth, each = golden.depth(), golden.mtp // predicting(golden)
    places = slice(depth + number * each, depth + (number + 1) * each)
    core = load(golden, renamed(golden, tensors, back=True), depth + golden.mtp).model
    core.layers = core.layers[places]
    if golden.config["model_type"] == "longcat_flash":
        silence(core.layers[0])
    elif getattr(core.config, "layer_types", None) and "layer_types" in golden.longer:
        core.config.layer_types = core.config.layer_types[places]
    return core


def silence(layer: torch.nn.Module) -> None:
    """Lets a layer of LongCat-Flash add nothing after its first attention and dense feed-forward."""

    def nothing(module: Any, args: Any, out: Any) -> Any:
        return torch.zeros_like(out) if torch.is_tensor(out) else (torch.zeros_like(out[0]), *out[1:])

    for part in (layer.mlp, layer.self_attn[1], layer.mlps[1]):
        part.register_forward_hook(nothing)
