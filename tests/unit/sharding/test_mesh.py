"""Meshes have all axes, as many devices as asked for, and clear refusals."""

import jax
import pytest

from jaxspec.errors import ConfigError
from jaxspec.sharding.mesh import AXES, make_mesh


def test_axes_left_out_have_one_device():
    mesh = make_mesh({"expert": 4, "tensor": 2})
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"data": 1, "expert": 4, "tensor": 2}
    assert list(make_mesh({}).devices.flat) == jax.devices()[:1]


def test_fewer_devices_than_there_are():
    assert make_mesh({"data": 2}, jax.devices()[4:]).devices.size == 2


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"expert": 16}, r"data 1 x expert 16 x tensor 1 needs 16 devices, there are 8"),
        ({"expert": 0}, "expert must be a whole number of at least 1, got 0"),
        ({"tensor": 2.0}, r"tensor must be a whole number of at least 1, got 2\.0"),
        ({"model": 2}, r"unknown axes \['model'\]; known are data, expert, tensor"),
    ],
)
def test_mistakes_are_refused(sizes: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        make_mesh(sizes)
