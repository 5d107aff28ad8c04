"""A draft model whose vocabulary has fewer or more padding rows than the target's: the same text, and good drafts."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.cache.window import Window
from jaxspec.checkpoint.load.padding import check_vocabulary
from jaxspec.draft.small_lm import SmallLm
from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import make_policy
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.topology import chain
from tests.oracle.conftest import CONFIG, LETTERS, VOCAB, write_model, write_tokenizer
from tests.random_params import random_params

PADDED = VOCAB + 24  # rows of the target, whose tokenizer knows 64 tokens
SIZES = (VOCAB, PADDED + 24)
ROWS = ("model.embed_tokens.weight", "lm_head.weight")
SETTINGS = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "prefill_buckets": (8,), "max_logprobs": 0}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**CONFIG, "vocab_size": PADDED, "num_hidden_layers": 1}
    directory = write_model(tmp_path_factory.mktemp("padded"), config, 3)
    write_tokenizer(directory, LETTERS)
    return directory


def resized(target: Path, directory: Path, size: int, letters: list[str] | None) -> Path:
    """The target with another number of rows, those beyond its own at random."""
    directory.mkdir()
    config = json.loads((target / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    tensors = load_file(target / "model.safetensors")
    for name in ROWS:
        more = np.random.default_rng(1).normal(size=(max(size - PADDED, 0), tensors[name].shape[1]))
        tensors[name] = np.concatenate([tensors[name][:size], 7 * more.astype(np.float32)])
    save_file(tensors, directory / "model.safetensors")
    if letters is not None:
        write_tokenizer(directory, letters)
    return directory


@pytest.mark.parametrize("size", SIZES)
def test_speculation_gives_the_same_text(target: Path, tmp_path: Path, size: int):
    draft = resized(target, tmp_path / "draft", size, LETTERS)
    llm = LLM(target, speculative_config={"model": str(draft), "num_speculative_tokens": 3}, **SETTINGS)
    prompts = [[2, 3, 4, 5, 6], [20, 30, 40]]
    texts, metrics = [], []
    for speculative in (None, False):
        params = [
            SamplingParams(temperature=t, seed=5, max_tokens=40, ignore_eos=True, speculative=speculative)
            for t in (0.0, 0.9)
        ]
        outputs = llm.generate(prompts, params)
        texts.append([out.outputs[0].token_ids for out in outputs])
        metrics.append([out.metrics.num_steps for out in outputs])
    assert texts[0] == texts[1]
    assert max(max(text) for text in texts[0]) >= VOCAB, "the target says tokens that a smaller draft has no row for"
    # A draft of all the target's rows says what the target says; one of fewer, wherever that is a known token.
    assert sum(metrics[0]) <= (22 if size > PADDED else 60) < sum(metrics[1]) == 80


@pytest.mark.parametrize("mesh", [None, {"tensor": 2}])
def test_a_token_map_gives_the_same_text(target: Path, tmp_path: Path, mesh: dict[str, int] | None):
    """A draft of all that the target says is right with the tokens of that text alone, and wrong without some."""
    prompts, steps = [[2, 3, 4, 5, 6], [20, 30, 40]], []
    params = [SamplingParams(temperature=t, seed=5, max_tokens=40, ignore_eos=True) for t in (0.0, 0.9)]
    texts = [out.outputs[0].token_ids for out in LLM(target, **SETTINGS).generate(prompts, params)]
    said = np.unique(np.concatenate(texts))
    for ids in (said[::-1], said[: len(said) // 2]):
        np.save(tmp_path / "map.npy", ids)
        config = {"model": str(target), "speculative_token_map": str(tmp_path / "map.npy"), "num_speculative_tokens": 3}
        outputs = LLM(target, speculative_config=config, mesh=mesh, **SETTINGS).generate(prompts, params)
        assert [out.outputs[0].token_ids for out in outputs] == texts
        steps.append(sum(out.metrics.num_steps for out in outputs))
    assert steps[0] <= 22 < steps[1] < 80


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (None, "cannot be read .No such file.*as jaxspec token-map writes it"),
        (np.array([0.5, 1.5]), "a row of integers is needed, at least one, got float64"),
        (np.array([1, PADDED]), f"ids from 1 to {PADDED}, but the target has {PADDED} tokens"),
        (np.array([], np.int64), "a row of integers is needed"),
    ],
)
def test_a_token_map_that_is_none_is_refused(target: Path, tmp_path: Path, ids: np.ndarray | None, why: str):
    if ids is not None:
        np.save(tmp_path / "map.npy", ids)
    config = {"model": str(target), "speculative_token_map": str(tmp_path / "map.npy"), "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match=f"speculative_token_map: .*map.npy.* {why}"):
        LLM(target, speculative_config=config, **SETTINGS)


@pytest.mark.parametrize("size", SIZES)
def test_drafts_are_of_the_target_vocabulary(size: int):
    arch = arch_of({**CONFIG, "vocab_size": size, "num_hidden_layers": 1})
    net = Transformer(arch, make_policy("float32"))
    params = random_params(net, 0)
    drafter = SmallLm(params, net, chain(2), 16, PADDED)
    assert drafter.vocab_size == PADDED
    token_BT = jnp.asarray([[1, PADDED - 1]], jnp.int32)
    state, place_BT = drafter.init_state(1, 16, 2), jnp.asarray([[0, 1]], jnp.int32)
    window = Window(jnp.zeros(1, jnp.int32), block=16)
    run = jax.jit(lambda token_BT: drafter.run(state, token_BT, None, place_BT, window, 0)[0])
    last_BTD = run(token_BT)
    found_BTV = np.asarray(drafter.logits(last_BTD))
    own_BTV = np.asarray(SmallLm(params, net, chain(2), 16).logits(last_BTD))
    assert found_BTV.shape == (1, 2, PADDED)
    assert np.isfinite(np.asarray(last_BTD)).all()
    np.testing.assert_array_equal(found_BTV[..., : min(size, PADDED)], own_BTV[..., : min(size, PADDED)])
    assert (found_BTV[..., size:] == -np.inf).all()
    np.testing.assert_array_equal(last_BTD, run(jnp.minimum(token_BT, size - 1)))


@pytest.mark.parametrize(
    ("letters", "size", "why"),
    [
        (None, VOCAB, r"no tokenizer of the draft says that the other rows are padding"),
        ([*LETTERS[:10], *LETTERS[:9:-1]], VOCAB, r"54 tokens have other ids, such as \["),
        (LETTERS[:40], VOCAB, r"24 tokens have other ids"),
        (LETTERS, VOCAB - 8, r"8 tokens lie beyond 56, such as \["),
    ],
)
def test_other_tokens_are_refused(target: Path, tmp_path: Path, letters: list[str] | None, size: int, why: str):
    draft = resized(target, tmp_path / "draft", size, letters)
    message = rf"a vocabulary of {size}, the target of {PADDED}; use a draft model trained with the target's.*{why}"
    with pytest.raises(ConfigError, match=message):
        check_vocabulary(draft, target, PADDED)
    with pytest.raises(ConfigError, match=message):
        LLM(target, speculative_config={"model": str(draft), "num_speculative_tokens": 2}, **SETTINGS)


def test_sizes_that_agree_need_no_tokenizer(target: Path, tmp_path: Path):
    check_vocabulary(resized(target, tmp_path / "draft", PADDED, None), target, PADDED)
