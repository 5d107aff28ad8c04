"""Small models as plain numbers, for tests of the arithmetic."""

from jaxspec.perf.cost import CacheCost, LayerCost, ModelCost


def dense_model(**changes: object) -> ModelCost:
    """Two layers of 1000 bytes, 4 bytes of cache per position, a head of 500 bytes."""
    layer = LayerCost(2, 1000.0, 1000.0, (CacheCost(4.0, heads=2, entry_flops=8.0),))
    made = {
        "name": "dense", "model_dim": 10, "vocab_size": 50, "max_context": 4096, "layers": (layer,),
        "head_bytes": 500.0, "head_flops": 500.0, "memory_bytes": {"attention": 2000.0, "head": 500.0, "norms": 40.0},
        "token_bytes": 8.0, "heads": 4, "kv_heads": 2,
    }  # fmt: skip
    return ModelCost(**{**made, **changes})


def routed_model(**changes: object) -> ModelCost:
    """Three layers, 2 of 8 experts of 200 bytes each beside 1000 dense bytes."""
    caches = (CacheCost(4.0, entry_flops=8.0),)
    layer = LayerCost(3, 1000.0, 1000.0, caches, experts=8, top_k=2, expert_bytes=200.0, expert_flops=200.0)
    made = {
        "name": "routed", "model_dim": 10, "vocab_size": 50, "max_context": 4096, "layers": (layer,),
        "head_bytes": 500.0, "head_flops": 500.0,
        "memory_bytes": {"attention": 3000.0, "routed experts": 4800.0, "router": 48.0, "head": 500.0, "norms": 40.0},
        "token_bytes": 12.0, "row_bytes": 100.0, "heads": 4, "kv_heads": 0,
    }  # fmt: skip
    return ModelCost(**{**made, **changes})
