"""Broken model directories end in one clear error each, without hanging; what does no harm loads the same."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.checkpoint.load.model import Model, load_model
from jaxspec.cli.main import main
from jaxspec.nn.policy import Policy
from tests.unit.checkpoint.harmless import HARMLESS
from tests.unit.checkpoint.mutations import MUTATIONS, Mutation
from tests.unit.serve.tiny_model import write_tiny_model

LIMIT_S = 20


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("sound") / "tiny")


@pytest.fixture(scope="module")
def loaded(sound: Path) -> Model:
    return load_model(sound, Policy())


@pytest.fixture
def directory(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "tiny"))


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Ends what waits, such as for the other end of a pipe."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"not done after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_each_ends_in_its_error(mutation: Mutation, directory: Path, capsys: pytest.CaptureFixture):
    mutation.change(directory)
    with pytest.raises(mutation.error, match=mutation.words) as caught:
        load_model(directory, Policy())
    assert type(caught.value) is mutation.error
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert len(text) < 1000
    code = main(["inspect", str(directory)])
    assert "Traceback" not in capsys.readouterr().err
    assert (code == 0) == mutation.in_numbers


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_no_harm_loads_the_same(name: str, directory: Path, loaded: Model):
    HARMLESS[name](directory)
    again = load_model(directory, Policy())
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), again.params, loaded.params))
    assert main(["inspect", str(directory)]) == 0


def test_names_of_cases_are_their_own():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) == len(set(names))
