"""Other weights in a live engine: the text of a fresh one, nothing compiled, and what runs goes on as documented."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoint.heads.directory import save_head
from jaxspec.checkpoint.load.model import load_model
from jaxspec.draft.early_exit import first_layers
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.trained_head import Head
from jaxspec.nn.policy import make_policy
from jaxspec.serve import compiled
from jaxspec.serve import engine as engine_module
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from tests.oracle.conftest import CAPACITY, CONFIG, Lab, SharedPrograms

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": CAPACITY, "max_num_seqs": 2, "prefill_buckets": (8,), "max_logprobs": 0,
    "steps_per_dispatch": 2,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True, seed=3)
PROMPTS = [[5, 9, 3 + i] for i in range(3)]


def text(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = PARAMS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def shared() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Programs", SharedPrograms)
        yield


@pytest.fixture(scope="module")
def texts(lab: Lab, shared: None) -> dict[str, list[list[int]]]:
    """Of fresh engines on both checkpoints."""
    return {name: text(LLM(getattr(lab, f"{name}_dir"), **SETTINGS)) for name in ("target", "draft")}


@pytest.fixture(scope="module")
def llm(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """With a head that uses the target's embedding and head, and programs of its own."""
    layer = {k: v for k, v in CONFIG.items() if "expert" not in k and "moe" not in k and k != "architectures"}
    own = arch_of(layer | {"model_type": "llama", "num_hidden_layers": 1})
    net = DraftHead(
        HeadSpec(own, CONFIG["hidden_size"], last=True, join="product", join_bias=True), make_policy("float32")
    )
    folder = tmp_path_factory.mktemp("heads") / "head"
    save_head(Head(net, jax.jit(net.initial)(jax.random.key(1)), None), folder)
    made = LLM(
        lab.target_dir,
        **SETTINGS,
        speculative_config={"method": "eagle", "model": str(folder), "num_speculative_tokens": 2},
    )
    made.finish_compiling()
    return made


def published(directory: Path) -> dict[str, np.ndarray]:
    return load_file(directory / "model.safetensors")


def test_the_text_of_a_fresh_engine_and_nothing_compiled(
    llm: LLM, lab: Lab, texts: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
):
    assert texts["target"] != texts["draft"]
    assert text(llm) == texts["target"]
    policy = make_policy("float32")
    ways: list[tuple[str, Any]] = [
        ("draft", lab.draft_dir),
        ("target", published(lab.target_dir)),
        ("draft", load_model(lab.draft_dir, llm.model.net.policy).params),
        ("target", load_model(lab.target_dir, policy).params),
        ("draft", {name: jax.numpy.asarray(x, "float32") for name, x in published(lab.draft_dir).items()}),
        ("target", load_model(lab.target_dir, policy.update(depth="stacked")).params),
    ]
    compiled_before = set(llm.engine.programs.programs)
    monkeypatch.setattr(compiled, "compile_program", lambda *_, **__: pytest.fail("compiled again"))
    for name, weights in ways:
        llm.update_target(weights)
        assert text(llm) == texts[name]
        assert _base(llm) is llm.model.params, "the head drafts with the new embedding"
    assert set(llm.engine.programs.programs) == compiled_before


def _base(llm: LLM) -> Any:
    return cast(Any, llm.engine.programs.drafter).base


def test_what_is_given_is_copied(llm: LLM, lab: Lab, texts: dict[str, list[list[int]]]):
    """A training donates its parameters to the next update."""
    params = load_model(lab.target_dir, llm.model.net.policy).params
    llm.update_target(params)
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    assert text(llm) == texts["target"]


def test_requests_that_run(llm: LLM, lab: Lab, texts: dict[str, list[list[int]]]):
    """They are refused, or kept by a pause: then they go on as a fresh engine would from their text so far."""
    llm.update_target(lab.target_dir)
    output = llm.submit(PROMPTS[0], PARAMS)
    llm.step()
    before = list(output.outputs[0].token_ids)
    assert 0 < len(before) < 20
    with pytest.raises(ConfigError, match="requests wait or run; call pause_generation first"):
        llm.update_target(lab.draft_dir)
    llm.pause_generation(mode="keep")
    llm.update_target(lab.draft_dir)
    llm.resume_generation()
    while not output.finished:
        llm.step()
    ids = output.outputs[0].token_ids
    assert ids[: len(before)] == before == texts["target"][0][: len(before)]
    rest = SamplingParams(**{**vars(PARAMS), "max_tokens": 20 - len(before)})
    assert ids[len(before) :] == text(llm, [PROMPTS[0] + before], rest)[0]
    assert text(llm) == texts["draft"]


def test_weights_that_do_not_fit_are_named_and_change_nothing(llm: LLM, lab: Lab, texts: dict[str, list[list[int]]]):
    llm.update_target(lab.target_dir)
    whole = published(lab.draft_dir)
    first, second = sorted(whole)[:2]
    missing = {name: x for name, x in whole.items() if name not in (first, second)}
    with pytest.raises(CheckpointError, match=f"2 missing: {first}, {second}"):
        llm.update_target(missing)
    with pytest.raises(CheckpointError, match="1 not known: else"):
        llm.update_target(whole | {"else": whole[first]})
    with pytest.raises(CheckpointError, match=f"{first}: .* in the file"):
        llm.update_target(whole | {first: whole[first][:-1]})
    with pytest.raises(CheckpointError, match=r"NaN|finite"):
        llm.update_target(whole | {first: whole[first] * np.float32("nan")})
    own: Any = load_model(lab.draft_dir, make_policy("float32")).params["params"]
    with pytest.raises(ConfigError, match="no parameters of this model: more_V"):
        llm.update_target({"params": {**own, "more_V": own["embed_VD"]}})
    cut: Any = jax.tree.map(lambda x: x, llm.model.params)
    cut["params"]["embed_VD"] = cut["params"]["embed_VD"][:-1]
    with pytest.raises(ConfigError, match=r"do not: embed_VD float32 \(64, 32\), got float32 \(63, 32\)"):
        llm.update_target(cut)
    with pytest.raises(ConfigError, match="a directory, arrays by published name, or a tree"):
        llm.update_target(cast(Any, 3))
    with pytest.raises(ConfigError, match="what is not an array: a"):
        llm.update_target({"a": 3})
    assert text(llm) == texts["target"]


@pytest.mark.usefixtures("shared")
def test_quantized_weights_and_early_exit(lab: Lab):
    """Quantized while loading, as the first weights were; the layers that draft are the new ones."""
    more = {**SETTINGS, "quantization": "int8"}
    fresh = text(LLM(lab.draft_dir, **more))
    early = {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 2}
    llm = LLM(lab.target_dir, speculative_config=early, **more)
    assert text(llm) != fresh
    for weights in (lab.draft_dir, load_model(lab.draft_dir, make_policy("float32")).params):
        llm.update_target(weights)
        assert text(llm) == fresh
    _, wanted = first_layers(llm.model.net, llm.model.params, 1)
    drafter: Any = llm.engine.programs.drafter
    for a, b in zip(jax.tree.leaves(drafter.params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    plain = LLM(lab.target_dir, **SETTINGS)
    with pytest.raises(ConfigError, match=r"a plain weight|must fit those in use"):
        llm.update_target(plain.model.params)
