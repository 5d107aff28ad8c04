"""Suffix decoding: texts of earlier requests and of a corpus give drafts, and never another text."""

from pathlib import Path

import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from tests.oracle.conftest import VOCAB

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def made(target_dir: Path, **config: object) -> LLM:
    return LLM(
        target_dir, dtype="float32", max_model_len=96, max_num_seqs=2, prefill_buckets=(32,),
        speculative_config={"num_speculative_tokens": 4, **config},
    )  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(1, VOCAB, size).tolist() for size in (5, 9, 14)]


def texts(llm: LLM, prompts: list[list[int]], **params: object) -> tuple[list[list[int]], int]:
    """Token ids, and how many drafts were accepted for them."""
    outputs = llm.generate(
        prompts, SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params})
    )
    return [list(o.outputs[0].token_ids) for o in outputs], sum(o.metrics.num_accepted_tokens for o in outputs)


def test_what_was_written_once_is_drafted_the_next_time(target_dir: Path, prompts: list[list[int]]):
    llm = made(target_dir, method="suffix")
    plain, none = texts(llm, prompts, speculative=False)
    assert none == 0
    again, accepted = texts(llm, prompts)
    assert again == plain
    assert accepted > 0.5 * sum(map(len, plain))
    sampled, _ = texts(llm, prompts, temperature=1.0, seed=3, speculative=False)
    assert texts(llm, prompts, temperature=1.0, seed=3)[0] == sampled


def test_a_corpus_is_drafted_from(target_dir: Path, prompts: list[list[int]], tmp_path: Path):
    llm = made(target_dir, method="ngram", prompt_lookup_min=2)
    plain, alone = texts(llm, prompts)
    for name, text in enumerate(plain):
        np.save(tmp_path / f"{name}.npy", np.array([*prompts[name], *text]))
    files = [str(file) for file in sorted(tmp_path.glob("*.npy"))]
    with_corpus = made(target_dir, method="ngram", prompt_lookup_corpus=files)
    same, accepted = texts(with_corpus, prompts)
    assert same == plain
    assert accepted > alone
    assert accepted > 0.5 * sum(map(len, plain))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"method": "suffix", "num_speculative_tokens": None, "speculative_token_tree": [2, 1]}, "draft chains"),
        ({"method": "ngram", "suffix_decoding_max_spec_factor": 2.0}, 'of method "suffix"'),
        ({"method": "mtp", "prompt_lookup_corpus": "x.txt"}, "looks nothing up"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, "a number above 0"),
        ({"method": "ngram", "prompt_lookup_corpus": 3}, "the name of a text file"),
        ({"method": "ngram", "prompt_lookup_corpus": "none.txt"}, "none.txt"),
    ],
)
def test_what_cannot_be_is_said(target_dir: Path, config: dict, why: str):
    with pytest.raises(ConfigError, match=why):
        made(target_dir, **config)
