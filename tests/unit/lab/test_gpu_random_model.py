"""Random targets have the layout of loaded ones, and numbers that products can be made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.aot.programs import abstract_target
from jaxspec.nn.policy import make_policy
from lab.gpu import random_model
from lab.gpu.random_model import DEVIATION, published_config, random_array, random_target
from pallas_kernels.quantized import Quantized, widen


def test_published_formats_layout_and_scale():
    config, policy = published_config("gpt-oss-20b", tiny=True), make_policy(depth="stacked")
    made, wanted = random_target(config, policy).params, abstract_target(config, policy).params
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
    down = made["params"]["segment_0"]["ffn"]["down_EFD"]
    assert isinstance(down, Quantized)
    assert down.format.kind == "fp4"
    assert 0.5 * DEVIATION < float(jnp.std(widen(down, jnp.float32))) < 2 * DEVIATION


@pytest.mark.parametrize("on_device", [1, 1 << 22])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "uint8", "int8"])
def test_numbers_are_finite_and_spread(dtype: str, on_device: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(random_model, "ON_DEVICE", on_device)
    found = np.asarray(random_array(1, (3, 8, 64), dtype).astype(jnp.float32))
    assert np.isfinite(found).all()
    assert 0.8 < found.std() / {"bfloat16": DEVIATION, "float8_e4m3fn": 107, "uint8": 74, "int8": 74}[dtype] < 1.2
    assert len(np.unique(found)) > 100
