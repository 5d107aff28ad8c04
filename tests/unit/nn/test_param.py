"""Parameters are declared once; nothing reads their axes from their names."""

import ast
from pathlib import Path

import flax.linen as nn
import jax
import pytest

from jaxspec.nn.param import DECLARED, Param, declare, declared, kind_of
from jaxspec.nn.policy import make_policy

PACKAGE = Path(__file__).parents[3] / "jaxspec"
# An expert's number, and the fields of a decoding state, which are no parameters.
SPLITTERS = {"checkpoint/load/places.py", "sharding/placement.py"}


def test_declarations_of_one_name_must_agree():
    with pytest.raises(AssertionError, match="declared twice"):
        Param("down_FD", ("embed", "mlp"))
    assert DECLARED["down_FD"].axes == ("mlp", "embed")


def test_letters_document_and_mean_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxspec.nn.param.DECLARED", dict(DECLARED))
    param = Param("oddly_named_ZZZZ", ("embed", "vocab"))
    policy = make_policy("float32")

    class Net(nn.Module):
        @nn.compact
        def __call__(self):
            return declare(self, policy, param, (3, 5))

    boxed = Net().init(jax.random.key(0))["params"][param.name]
    assert boxed.names == declared(f"layers_3/{param.name}").axes == ("embed", "vocab")
    assert declared(param.name).axes_of(3) == ("layers", "embed", "vocab")


def test_no_code_takes_axes_out_of_a_parameters_name():
    offenders = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).as_posix() not in SPLITTERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("split", "rsplit", "partition", "rpartition")
        and node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == "_"
    ]  # fmt: skip
    assert offenders == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("layers_3/ffn/down_EFD", "ffn/down_EFD"),
        ("segment_0/attention/qkv_DGQC", "attention/qkv_DGQC"),
        ("mtp_0/block/ffn/shared/down_FD", "ffn/shared/down_FD"),
    ],
)
def test_kinds_have_no_numbers(path: str, kind: str):
    assert kind_of(path.split("/")) == kind
