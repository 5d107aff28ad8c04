"""Steps of a recurrence in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def recurrent_steps(state_BHNC: jax.Array, positions: Any, counts: Any) -> tuple[jax.Array, jax.Array]:
    """As ``api.recurrent_steps``."""
    p, each = positions, state_BHNC.shape[1] // positions.k_BXGN.shape[2]
    count = p.v_BXHC.shape[1]
    replays = count - counts.last
    arrays = {"q": jnp.repeat(p.q_BXGN, each, 2), "k": jnp.repeat(p.k_BXGN, each, 2), "v": p.v_BXHC}
    arrays |= {"decay": p.decay_BXHN, "beta": p.beta_BXH1, "skip": p.skip_BXHC}
    arrays = {name: jnp.moveaxis(x, 1, 0) for name, x in arrays.items() if x is not None}

    def one(carry: Any, step: Any) -> Any:
        state, kept = carry
        x, own = step
        new = state * own["decay"][..., None]
        value = own["v"]
        if "beta" in own:
            value = own["beta"] * (value - jnp.einsum("bhnc,bhn->bhc", new, own["k"], precision="highest"))
        new = new + own["k"][..., None] * value[:, :, None]
        out = jnp.einsum("bhnc,bhn->bhc", new, own["q"], precision="highest")
        out = out + own["skip"] if "skip" in own else out
        runs_B = (x >= replays) | (x < counts.replay_B)
        state = jnp.where(runs_B[:, None, None, None], new, state)
        keeps_B = x < replays + counts.kept_B
        return (state, jnp.where(keeps_B[:, None, None, None], state, kept)), out

    number_X = jnp.arange(count, dtype=jnp.int32)
    (_, kept), out_XBHC = lax.scan(one, (state_BHNC, state_BHNC), (number_X, arrays))
    return kept, jnp.moveaxis(out_XBHC[replays:], 0, 1)
