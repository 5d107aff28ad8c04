"""A context that YaRN extends, as Qwen's instructions say: its length, its texts and its logits."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.errors import ConfigError
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from tests.oracle.conftest import write_model

ORIGINAL, FACTOR, THETA = 16, 4.0, 500.0
HEADS, KV_HEADS, HEAD_DIM, EPS = 4, 2, 8, 1e-6
CONFIG = {
    "model_type": "llama", "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "intermediate_size": 40, "hidden_act": "silu", "rms_norm_eps": EPS,
    "rope_theta": THETA, "max_position_embeddings": 20, "tie_word_embeddings": False, "eos_token_id": 0,
    "rope_scaling": {"type": "yarn", "factor": FACTOR, "original_max_position_embeddings": ORIGINAL, "beta_fast": 1.0,
                     "beta_slow": 0.1},
}  # fmt: skip


def turned(x_THC: np.ndarray) -> np.ndarray:
    """Rotation by Peng (2023), equations of section 3.2 and 3.4, in complex numbers."""
    rate = THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    place = [HEAD_DIM * math.log(ORIGINAL / (2 * math.pi * r)) / (2 * math.log(THETA)) for r in (1.0, 0.1)]
    low, high = max(math.floor(place[0]), 0), min(math.ceil(place[1]), HEAD_DIM - 1)
    share = np.clip((np.arange(HEAD_DIM // 2) - low) / (high - low), 0, 1)
    rate = rate / FACTOR * share + rate * (1 - share)
    turn = np.exp(1j * np.arange(len(x_THC))[:, None] * rate)[:, None] * (0.1 * math.log(FACTOR) + 1)
    z = (x_THC[..., : HEAD_DIM // 2] + 1j * x_THC[..., HEAD_DIM // 2 :]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def reference(directory: Path, ids: list[int]) -> np.ndarray:
    """Logits of the one layer in float64."""
    w = {name: x.astype(np.float64) for name, x in load_file(directory / "model.safetensors").items()}
    at = "model.layers.0."

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * w[name]

    x = w["model.embed_tokens.weight"][ids]
    h, length = norm(x, f"{at}input_layernorm.weight"), len(ids)
    q, k, v = ((h @ w[f"{at}self_attn.{n}_proj.weight"].T).reshape(length, -1, HEAD_DIM) for n in "qkv")
    q, k, v = turned(q), *(np.repeat(y, HEADS // KV_HEADS, axis=1) for y in (turned(k), v))
    score = np.einsum("thc,shc->hts", q, k) / math.sqrt(HEAD_DIM)
    score[:, ~np.tri(length, dtype=bool)] = -np.inf
    share = np.exp(score - score.max(-1, keepdims=True))
    mixed = np.einsum("hts,shc->thc", share / share.sum(-1, keepdims=True), v).reshape(length, -1)
    x = x + mixed @ w[f"{at}self_attn.o_proj.weight"].T
    h = norm(x, f"{at}post_attention_layernorm.weight")
    gate, up = (h @ w[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("yarn"), CONFIG, 4)


def test_texts_reach_four_times_the_original_context(directory: Path):
    settings = {"dtype": "float32", "max_num_seqs": 1, "prefill_buckets": (8,), "max_logprobs": 0}
    longest = int(ORIGINAL * FACTOR)
    assert longest > CONFIG["max_position_embeddings"]
    llm = LLM(directory, max_model_len=longest, **settings)
    prompt = [5, 6, 7]
    text = (
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))[0].outputs[0].token_ids
    )
    assert longest - 2 <= len(prompt) + len(text) <= longest
    wanted = reference(directory, prompt + text)
    np.testing.assert_allclose(llm.logits(prompt + text), wanted, rtol=1e-3, atol=1e-3)
    assert text == wanted[len(prompt) - 1 : -1].argmax(-1).tolist()
    with pytest.raises(ConfigError, match=rf"max_model_len must be from 2 to the model's {longest}, got {longest + 1}"):
        LLM(directory, max_model_len=longest + 1, **settings)


def test_without_settings_the_context_is_what_the_config_says(directory: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "rope_scaling": None}))
    shutil.copy(directory / "model.safetensors", tmp_path)
    with pytest.raises(ConfigError, match=r"max_model_len must be from 2 to the model's 20, got 64"):
        LLM(tmp_path, max_model_len=64, dtype="float32")
