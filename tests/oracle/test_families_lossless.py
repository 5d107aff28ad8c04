"""Losslessness of every family: on each golden model, drafts that are right, wrong or mixed change no token."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoint.load.model import Model, load_model, load_mtp
from jaxspec.decode import compaction
from jaxspec.decode.state import Target
from jaxspec.draft.mtp_drafter import MtpHeads
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.small_lm import SmallLm
from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.native.packing import Packed, pack, unpack
from jaxspec.protocol import Drafter
from jaxspec.serve import engine as engine_module
from jaxspec.serve.engine import Engine
from jaxspec.serve.engine_spec import EngineSpec
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import RequestOutput, SamplingParams
from jaxspec.shapes import Array
from jaxspec.topology import Topology, chain, tree
from tests.oracle.conftest import EOS, Lab, SharedPrograms, layout_of, tokens_of

GOLDENS = {file.parent.name: file.parent for file in sorted(Path(__file__).parents[1].glob("golden/*/config.json"))}
ARCHS = {name: arch_of(json.loads((path / "config.json").read_text())) for name, path in GOLDENS.items()}
# One golden for each way of attending and caching: windows, sinks, latents, a shared index, compressed entries, states.
MECHANISMS = ("qwen2", "gpt_oss", "deepseek_v3", "glm_moe_dsa_shared", "deepseek_v4", "qwen3_next")
# Others that are slow here: chunks, heads of two sizes, two caches in a layer.
CACHED = ("llama4_text", "gemma4_text", "longcat_flash")
CHAIN, TREE, BLOCK = chain(4), tree((2, 2)), 16
each_model = partial(pytest.mark.parametrize, "name", scope="module")  # so that the tests of a model stand together
OWN_STEPS = 7  # of a dispatch: a program that no other test has compiled


def goldens(quick: Sequence[str], fits: Callable[[str], bool] = lambda name: True) -> list:
    """Golden models of a test, slow but for the quick ones."""
    return [pytest.param(n, marks=[] if n in quick else [pytest.mark.slow]) for n in ARCHS if fits(n)]


def has_mtp(name: str) -> bool:
    return b'"mtp_logits"' in (GOLDENS[name] / "reference.safetensors").read_bytes()[:10000]


def has_trees(name: str) -> bool:
    return ARCHS[name].chain_only is None


def shifted(head_DV: Array, first: int) -> Array:
    """A head that takes every token from ``first`` on for the one after it."""
    return jnp.concatenate([head_DV[:, :first], jnp.roll(head_DV[:, first:], 1, axis=1)], axis=1)


class Family(Lab):
    """A golden model as target, and as draft with heads that are right, wrong everywhere, or wrong half the time.

    Attributes:
      requests: more than rows, greedy and sampled, of lengths that cross windows, chunks and compressed entries; the
        first two are the golden's own.
      greedy: what transformers says to those two.
    """

    def __init__(self, name: str):
        super().__init__(GOLDENS[name], GOLDENS[name])
        says = reference_of(name)
        self.greedy = says["greedy_ids"].tolist()
        said = np.unique(says["greedy_ids"])
        self.cut = int(said[len(said) // 2])  # so that it has tokens on both sides
        prompts = says["input_ids"][:, : int(says["prompt_length"])].tolist()
        self.requests = [(p, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)) for p in prompts]
        rng = np.random.default_rng(3)
        for number, (length, most) in enumerate([(1, 25), (26, 30), (17, 13)]):
            style = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=most, seed=number, ignore_eos=number != 2)
            self.requests.append((rng.integers(1, ARCHS[name].vocab_size, length).tolist(), style))

    def model(self, name: str, dtype: str = "float32", layout: str = "native") -> Model:
        key = (name, dtype, layout)
        if key in self.loaded:
            return self.loaded[key]
        if name == "target":
            self.loaded[key] = load_model(self.target_dir, layout_of(layout, dtype).update(own_head=True))
        else:
            target = self.model("target", dtype, layout)
            inside = dict(target.params["params"])
            head_DV = inside["head_DV"]
            plain_DV = unpack(head_DV) if isinstance(head_DV, Packed) else head_DV
            inside["head_DV"] = shifted(plain_DV, {"right": plain_DV.shape[1], "mixed": self.cut, "wrong": 0}[name])
            if isinstance(head_DV, Packed):
                inside["head_DV"] = pack(inside["head_DV"])
            self.loaded[key] = replace(target, params={"params": inside})
        return self.loaded[key]

    def drafter(self, kind: str, topology: Topology, dtype: str = "float32", layout: str = "native") -> Drafter:
        if kind == "ngram":
            return Ngram(topology, 3, 1)
        if kind == "mtp":
            target = self.model("target", dtype, layout)
            net, params = load_mtp(self.target_dir, target.net)
            return MtpHeads(params, target.params, net, target.net, topology, BLOCK)
        model = self.model(kind, dtype, layout)
        return SmallLm(model.params, model.net, topology, BLOCK)

    def engine(self, drafter: Drafter, *, dtype="float32", layout="native", block: int = BLOCK, **spec) -> Engine:
        model = self.model("target", dtype, layout)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "Programs", SharedPrograms)
            spec = EngineSpec(**{"rows": 2, "capacity": 64, "logprobs": 0, "buckets": (16,), **spec})
            return Engine(Target(model.params, model.net, block), drafter, spec, {EOS})

    def speculate(self, kind: str, topology: Topology, dtype="float32", layout="native", **spec) -> list:
        """Tokens of every request; as many drafts have been accepted as must be."""
        drafter = self.drafter(kind, topology, dtype, layout)
        outputs = self.run(drafter, self.requests, dtype=dtype, layout=layout, **spec)
        check_acceptance(
            kind, [o for o, (_, p) in zip(outputs, self.requests, strict=True) if not p.temperature], drafter
        )
        return tokens_of(outputs)

    def plainly(self, **settings) -> list:
        """Tokens of every request without speculation."""
        return tokens_of(self.reference("all", self.requests, **settings))


def reference_of(name: str) -> dict[str, np.ndarray]:
    """What transformers says about a golden model."""
    return {key: np.asarray(x) for key, x in load_file(GOLDENS[name] / "reference.safetensors").items()}


def check_acceptance(kind: str, greedy: list[RequestOutput], drafter: Drafter) -> None:
    drafted = sum(o.metrics.num_draft_tokens for o in greedy)
    accepted = sum(o.metrics.num_accepted_tokens for o in greedy)
    if kind == "right":
        for output in greedy:
            count = len(output.outputs[0].token_ids)
            assert output.metrics.num_steps == -(-count // (drafter.topology.max_depth + 1))
            assert output.metrics.num_accepted_tokens == count - output.metrics.num_steps
    elif kind == "wrong":
        assert drafted > 0
        assert accepted == 0
    elif kind == "mixed":
        assert 0 < accepted < drafted
    elif kind == "mtp":
        assert drafted > 0


@pytest.fixture(scope="module")
def made() -> dict[str, Family]:
    """The last family used."""
    return {}


@pytest.fixture
def family(made: dict[str, Family], name: str) -> Family:
    if name not in made:
        made.clear()
        made[name] = Family(name)
    return made[name]


@each_model(goldens(MECHANISMS))
def test_right_wrong_and_mixed_drafts(family: Family):
    """The drafts differ in their weights alone, so one program runs them all; a wrong one leaves a token per step."""
    texts = {kind: family.speculate(kind, CHAIN) for kind in ("wrong", "right", "mixed")}
    assert [text for [text] in texts["wrong"][:2]] == family.greedy
    assert texts["right"] == texts["wrong"]
    assert texts["mixed"] == texts["wrong"]
    assert len({token for [text] in texts["wrong"] for token in text}) > 6, (
        "the texts vary, though tied random models like to repeat"
    )


@each_model(goldens(("qwen2", "deepseek_v3", "qwen3_next")))
def test_plain_decoding_and_ngrams(family: Family, monkeypatch: pytest.MonkeyPatch):
    plain = family.plainly()
    assert [text for [text] in plain[:2]] == family.greedy
    sizes, packed_sizes = [], compaction.packed_sizes

    def noted(*asked: Any) -> tuple[int, ...]:
        sizes.append(packed_sizes(*asked))
        return sizes[-1]

    monkeypatch.setattr(compaction, "STEP", 1)  # so that two rows, too, compute only the drafts that there are
    monkeypatch.setattr(compaction, "IDLE_PARTS", (2,))
    monkeypatch.setattr(compaction, "packed_sizes", noted)
    assert family.speculate("ngram", CHAIN, steps=OWN_STEPS) == plain
    assert (5, 6) in sizes, "one row of two, and the anchors with half of the drafts"
    assert family.speculate("mixed", CHAIN) == plain


@each_model(goldens(("gpt_oss", "deepseek_v3", "qwen3_next"), lambda n: n in MECHANISMS))
def test_prompts_that_share_a_chunk(family: Family):
    """Rows of a chunk write where each stands: pages, rings and compressed entries."""
    assert family.speculate("mixed", CHAIN, joint=2) == family.plainly()


@each_model(goldens(("gpt_oss", "glm_moe_dsa_shared"), lambda n: n in (*MECHANISMS, *CACHED) and has_trees(n)))
def test_trees(family: Family):
    assert family.speculate("mixed", TREE) == family.plainly()


@each_model(goldens(("deepseek_v3",), has_mtp))
def test_multi_token_prediction(family: Family):
    assert family.speculate("mtp", CHAIN) == family.plainly()


@pytest.mark.slow
@each_model(MECHANISMS)
@pytest.mark.parametrize("layout", ["stacked", "unrolled"])
def test_layers_without_kernels(family: Family, layout: str):
    assert family.speculate("mixed", CHAIN, layout=layout) == family.plainly(layout=layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm_moe_dsa_shared", "deepseek_v4"])
def test_kernels_that_gather_what_an_indexer_chose(family: Family):
    assert family.speculate("mixed", CHAIN, layout="interpret") == family.plainly(layout="interpret")


@pytest.mark.served
@pytest.mark.slow
@each_model(["deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latents_by_the_kernels_of_a_gpu(family: Family, dtype: str):
    """Interpreted: products with each head's weights, latents into their pages, attention, routing and experts."""
    plain = family.plainly(dtype=dtype, layout="interpret")
    assert family.speculate("mixed", CHAIN, dtype, "interpret") == plain


@pytest.mark.served
@pytest.mark.slow
@each_model([*MECHANISMS, *CACHED])
def test_bfloat16(family: Family):
    """Rounded logits leave room for ties and flips; every bit must be as without drafts."""
    plain = family.plainly(dtype="bfloat16")
    for kind in ("right", "mixed"):
        assert family.speculate(kind, CHAIN, "bfloat16") == plain


@pytest.mark.slow
@each_model(["deepseek_v4"])
def test_rows_of_deepseek_v4_do_not_touch_each_other(family: Family):
    """Several rows of different lengths, each at its own place within its windows, give the texts of single ones."""
    together = family.speculate("mixed", CHAIN, rows=3)
    assert together == family.speculate("mixed", CHAIN, rows=1)
    assert together == family.plainly()


@pytest.mark.slow
@each_model(["deepseek_v4_fp4"])
def test_a_published_window_of_128_completes(family: Family):
    long = np.random.default_rng(5).integers(1, ARCHS["deepseek_v4_fp4"].vocab_size, (2, 120)).tolist()
    styles = (SamplingParams(temperature=t, max_tokens=20, seed=1, ignore_eos=True) for t in (0.0, 0.8))
    requests, family.requests = family.requests, list(zip(long, styles, strict=True))
    family.plain.clear()
    for kind in ("right", "mixed"):
        assert family.speculate(kind, CHAIN, capacity=160) == family.plainly(capacity=160)
    family.requests = requests
    family.plain.clear()


@pytest.mark.parametrize("name", [n for n in ARCHS if not has_trees(n)])
def test_trees_are_refused_where_branches_cannot_be_told_apart(name: str):
    config = {"method": "ngram", "speculative_token_tree": [2, 2]}
    says = rf"a tree is not possible for the target \({ARCHS[name].family}\): .*num_speculative_tokens"
    with pytest.raises(ConfigError, match=says):
        LLM(GOLDENS[name], dtype="float32", max_model_len=64, speculative_config=config)
