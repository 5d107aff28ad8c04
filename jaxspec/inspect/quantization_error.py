"""Measures what quantizing a model's weights does to its logits, on a text that both versions read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.load.model import load_model
from jaxspec.errors import ConfigError, RequestError
from jaxspec.models.transformer import teacher_forced
from jaxspec.nn.policy import policy_for
from jaxspec.sharding.compiler_options import compiler_options

PADDED_TO = 64


def quantization_error(
    directory: str | Path, quantization: str, token_ids: Sequence[int], dtype: str = "bfloat16"
) -> dict[str, Any]:
    """Compares the teacher-forced logits of a checkpoint dequantized and quantized; one is in memory at a time.

    Args:
      directory: checkpoint in Hugging Face layout.
      quantization: ``fp8`` or ``int8`` for a plain checkpoint, ``auto`` for one that was published quantized.
      token_ids: of the text; every position counts once.
      dtype: ``bfloat16`` or ``float32`` of plain weights and products, in both versions.

    Returns:
      ``positions`` and, over them, ``max_abs_logit_error``, ``mean_abs_logit_error``, ``logit_std`` (of the widened
      model, for scale), ``mean_kl_nats`` and ``max_kl_nats`` (of the next token's distributions, quantized from
      widened), ``argmax_agreement`` (share of positions with the same most likely token); ``weight_bytes`` and
      ``quantized_weight_bytes``.

    Raises:
      ConfigError: the dtype or the quantization is not possible.
      CheckpointError: the checkpoint is not usable.
      RequestError: there are no token ids, or some that the model lacks.
    """
    if dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"quantization_error: dtype must be bfloat16 or float32, got {dtype!r}")
    widened_TV, plain_bytes = _logits(directory, "none", token_ids, dtype)
    quantized_TV, bytes_ = _logits(directory, quantization, token_ids, dtype)
    error_TV = np.abs(quantized_TV - widened_TV)
    p_TV, q_TV = (_log_softmax(logits.astype(np.float64)) for logits in (widened_TV, quantized_TV))
    kl_T = np.maximum(np.sum(np.exp(p_TV) * (p_TV - q_TV), axis=-1), 0)
    return {
        "positions": len(widened_TV),
        "max_abs_logit_error": float(error_TV.max()),
        "mean_abs_logit_error": float(error_TV.mean()),
        "logit_std": float(widened_TV.std()),
        "mean_kl_nats": float(kl_T.mean()),
        "max_kl_nats": float(kl_T.max()),
        "argmax_agreement": float(np.mean(widened_TV.argmax(-1) == quantized_TV.argmax(-1))),
        "weight_bytes": plain_bytes,
        "quantized_weight_bytes": bytes_,
    }


def _log_softmax(logits_TV: np.ndarray) -> np.ndarray:
    shifted = logits_TV - logits_TV.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _logits(directory: str | Path, quantization: str, token_ids: Sequence[int], dtype: str) -> tuple[np.ndarray, int]:
    """Returns logits [T, V] and the bytes of all weights."""
    model = load_model(directory, policy_for(dtype, jax.default_backend()), quantization=quantization)
    vocab, longest = model.net.arch.vocab_size, model.net.arch.max_position
    wrong = [i for i in token_ids if not 0 <= int(i) < vocab]
    if not 0 < len(token_ids) <= longest or wrong:
        raise RequestError(
            f"token_ids: from 1 to {longest} ids from 0 to {vocab - 1} are needed, "
            f"got {len(token_ids)} of which {wrong[:5]} are out of range"
        )
    padding = -len(token_ids) % PADDED_TO
    token_BT = jnp.asarray([[*map(int, token_ids), *[0] * padding]], jnp.int32)
    position_BT = jnp.arange(token_BT.shape[1], dtype=jnp.int32)[None]
    forward = jax.jit(
        lambda params: teacher_forced(model.net, params, token_BT, position_BT)[0], compiler_options=compiler_options()
    )
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    return np.asarray(forward(model.params))[0, : len(token_ids)], weight_bytes
