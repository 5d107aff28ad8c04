"""The operation in plain JAX: every key gathered and scored, the best of a whole sort."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.where import Where


def choose_places(
    q_BTHC: jax.Array,
    weight_BTH: jax.Array,
    k_pages_PGZC: jax.Array,
    seen_BT: jax.Array,
    *,
    top_k: int,
    dtype: jnp.dtype,
    where: Where,
) -> jax.Array:
    """As ``api.choose_places``, but for the counts."""
    place_S = jnp.arange(where.room(k_pages_PGZC), dtype=jnp.int32)
    place_BTS = jnp.broadcast_to(place_S, (*seen_BT.shape, place_S.size))
    k_BTSC = where.gather(k_pages_PGZC, place_BTS)[:, :, :, 0].astype(dtype)
    exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    product = jnp.einsum("bthc,btsc->bths", q_BTHC.astype(dtype), k_BTSC, **exact)
    score_BTS = jnp.sum(jax.nn.relu(product) * weight_BTH[..., None], axis=2)
    score_BTS = jnp.where(score_BTS == 0, 0.0, score_BTS)  # zeros of either sign are equal
    seen_BTS = place_S < seen_BT[..., None]
    _, best_BTK = lax.top_k(jnp.where(seen_BTS, score_BTS, -jnp.inf), min(top_k, place_S.size))
    best_BTK = jnp.sort(jnp.where(best_BTK < seen_BT[..., None], best_BTK, place_S.size), axis=2)
    best_BTK = jnp.pad(best_BTK, ((0, 0), (0, 0), (0, top_k - best_BTK.shape[2])), constant_values=place_S.size)
    return jnp.where(best_BTK < place_S.size, best_BTK, 0)
