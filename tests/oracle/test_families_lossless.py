"""Losslessness of every family: on each golden model, drafts that are right, wrong or mixed change no token."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.load import Model, load_model, load_mtp
from jaxspec.draft import catalog
from jaxspec.draft.mtp import MtpHeads
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.small_lm import SmallLm
from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.nn.policy import Policy
from jaxspec.protocol import Drafter
from jaxspec.serve.request import RequestOutput, SamplingParams
from jaxspec.shapes import Array
from jaxspec.topology import Topology, chain, tree
from tests.oracle.conftest import Lab, Request, tokens_of

GOLDENS = {file.parent.name: file.parent for file in sorted(Path(__file__).parents[1].glob("golden/*/config.json"))}
ARCHS = {name: arch_of(json.loads((path / "config.json").read_text())) for name, path in GOLDENS.items()}
# One golden for each way of attending and caching: windows, sinks, latents, a shared index, compressed entries.
MECHANISMS = ("qwen2", "gpt_oss", "deepseek_v3", "glm_moe_dsa_shared", "deepseek_v4")
CHAIN, TREE, BLOCK = chain(4), tree((2, 2)), 16
SPEC = {"rows": 2, "capacity": 64, "buckets": (16,), "block": BLOCK}


def goldens(quick: tuple[str, ...], *, trees: bool = False, mtp: bool = False) -> list:
    """Golden models of a test, slow but for the quick ones."""
    fit = [n for n, a in ARCHS.items() if not (trees and a.chain_only) and not (mtp and not has_mtp(n))]
    return [pytest.param(n, marks=[] if n in quick else [pytest.mark.slow]) for n in fit]


def has_mtp(name: str) -> bool:
    return b'"mtp_logits"' in (GOLDENS[name] / "reference.safetensors").read_bytes()[:10000]


def requests_of(vocab: int) -> list[Request]:
    """More requests than rows, greedy and sampled by turns; they cross windows, chunks and compressed entries."""
    rng, requests = np.random.default_rng(3), []
    for number, (length, most) in enumerate([(1, 25), (11, 20), (26, 30), (17, 13), (8, 22)]):
        style = {"temperature": 0.8, "top_p": 0.9} if number % 2 else {"temperature": 0.0}
        params = SamplingParams(**style, max_tokens=most, seed=number, ignore_eos=number != 3)
        requests.append((rng.integers(1, vocab, length).tolist(), params))
    return requests


def shifted(head_DV: Array, first: int) -> Array:
    """A head that takes every token from ``first`` on for the one behind it."""
    return jnp.concatenate([head_DV[:, :first], jnp.roll(head_DV[:, first:], 1, axis=1)], axis=1)


class Family(Lab):
    """A golden model as target, and as draft with heads that are right, wrong everywhere, or wrong half the time."""

    def __init__(self, name: str):
        super().__init__(GOLDENS[name], GOLDENS[name])
        self.requests = requests_of(ARCHS[name].vocab_size)

    def model(self, name: str, dtype: str = "float32", layout: str = "switched") -> Model:
        key, kind = (name, dtype, layout), jnp.dtype(dtype)
        if key not in self.loaded and name == "target":
            policy = Policy(kind, kind, layout, "unrolled" if layout == "switched" else "stacked", own_head=True)
            self.loaded[key] = load_model(self.target_dir, policy)
        elif key not in self.loaded:
            target = self.model("target", dtype, layout)
            inside = dict(target.params["params"])
            first = {"right": inside["head_DV"].shape[1], "mixed": inside["head_DV"].shape[1] // 2, "wrong": 0}[name]
            inside["head_DV"] = shifted(inside["head_DV"], first) if name != "right" else inside["head_DV"]
            self.loaded[key] = replace(target, params={"params": inside})
        return self.loaded[key]

    def drafter(self, kind: str, topology: Topology, dtype: str = "float32", layout: str = "switched") -> Drafter:
        if kind == "ngram":
            return Ngram(topology, 3, 1)
        if kind == "mtp":
            target = self.model("target", dtype, layout)
            net, params = load_mtp(self.target_dir, target.net)
            return MtpHeads(params, target.params, net, target.net, topology, BLOCK)
        model = self.model(kind, dtype, layout)
        return SmallLm(model.params, model.net, topology, BLOCK)

    def check(self, kind: str, topology: Topology, dtype: str = "float32", layout: str = "switched", **more) -> None:
        """Speculates and compares every token; then whether as many drafts were accepted as must be."""
        settings = {**SPEC, "dtype": dtype, "layout": layout, **more}
        wanted = self.reference("mixed", self.requests, **settings)
        found = self.run(self.drafter(kind, topology, dtype, layout), self.requests, **settings)
        assert tokens_of(found) == tokens_of(wanted), kind
        greedy = [o for o, (_, p) in zip(found, self.requests, strict=True) if p.temperature == 0]
        check_acceptance(kind, greedy, topology)


def check_acceptance(kind: str, greedy: list[RequestOutput], topology: Topology) -> None:
    drafted = sum(o.metrics.num_draft_tokens for o in greedy)
    accepted = sum(o.metrics.num_accepted_tokens for o in greedy)
    if kind == "right":
        for output in greedy:
            count = len(output.outputs[0].token_ids)
            assert output.metrics.num_steps == -(-count // (topology.max_depth + 1))
            assert output.metrics.num_accepted_tokens == count - output.metrics.num_steps
    elif kind == "wrong" and topology.is_chain:
        assert drafted > 0
        assert accepted == 0
    elif kind == "mixed":
        assert 0 < accepted < drafted
    elif kind == "mtp":
        assert drafted > 0


@pytest.fixture(scope="module")
def families() -> Iterator[dict[str, Family]]:
    """Families made so far; tests of one model stand together, so that only the last one is kept."""
    yield {}


def family_of(families: dict[str, Family], name: str) -> Family:
    if name not in families:
        families.clear()
        families[name] = Family(name)
    return families[name]


@pytest.mark.parametrize("name", goldens(tuple(GOLDENS)))
def test_right_wrong_and_mixed_drafts(families: dict[str, Family], name: str):
    """The three drafts differ in their weights alone, so all of them run the same program."""
    family = family_of(families, name)
    texts = [o.outputs[0].token_ids for o in family.reference("mixed", family.requests, **SPEC, dtype="float32", layout="stacked")]
    assert len({token for text in texts for token in text}) > 20, "the texts vary"
    for kind in ("right", "wrong", "mixed"):
        family.check(kind, CHAIN, layout="stacked")
