"""A tiny model, engines over it, and a desk for each test of batch jobs."""

from pathlib import Path

import pytest

from jaxspec.serve.llm import LLM
from tests.unit.serve.job_desk import ENGINE, NGRAM, Desk
from tests.unit.serve.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("job") / "tiny")


@pytest.fixture(scope="session")
def llm(model: Path) -> LLM:
    return LLM(model, max_num_seqs=3, **ENGINE)


@pytest.fixture(scope="session")
def speculative(model: Path) -> LLM:
    return LLM(model, max_num_seqs=2, speculative_config=NGRAM, **ENGINE)


@pytest.fixture
def desk(tmp_path: Path, model: Path, llm: LLM) -> Desk:
    return Desk(tmp_path, model, llm)
