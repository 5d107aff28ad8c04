"""The dimension key: one letter per axis, in array names, einsum strings and type annotations.

B rows (batch slots), T positions in one forward (K + 1, or the nodes of a tree), N draft nodes, K draft length,
D model, Y layer, H query heads, G kv heads, R query heads per kv head, routed rows, or rank of a low-rank projection,
C head dim, V vocab, W draft vocab, E experts, A active experts per token, F feed-forward hidden, S cache capacity in
tokens, P pages, Z page size, J pages per row, M = B * T flattened rows, L most sampled log-probabilities, X any
flattened feature axis, or the readers of a forward.
"""

from typing import TypeAlias

import jax

Array: TypeAlias = jax.Array
Params: TypeAlias = dict[str, "Params | Array | tuple[Array, ...]"]
