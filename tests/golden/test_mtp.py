"""Multi-token prediction gives its reference's logits: teacher forced, and drafting after observed text."""

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.load.model import Model, load_model, load_mtp
from jaxspec.decode.state import init_sampling
from jaxspec.draft import methods
from jaxspec.draft.mtp_drafter import MtpHeads
from jaxspec.errors import ConfigError
from jaxspec.models.apply import apply
from jaxspec.models.catalog import arch_of
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import embed, head, teacher_forced
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy
from jaxspec.protocol import Anchor, Commit, Features
from jaxspec.pytree import replace
from jaxspec.shapes import Array, Params
from jaxspec.topology import Topology, chain, tree
from tests.golden.test_families import CLOSE, GOLDENS, KNOWN_ORACLES, ORACLES, config_of

BLOCK, DRAFTS, SPARE = 8, 4, 8
# Ways to join, kinds of layer and their names; the others are like these.
QUICK = (
    "deepseek_v3", "deepseek_v4", "ernie4_5_moe", "longcat_flash", "mimo_v2_flash", "nemotron_h", "qwen3_next",
    "step3p5", "step3p7",
)  # fmt: skip
PROMISING = [d for d in (*GOLDENS, *KNOWN_ORACLES) if arch_of(config_of(d)).mtp]


def reference_of(directory: Path) -> Path:
    return directory / ("io.safetensors" if directory in ORACLES else "reference.safetensors")


def layouts(most: int = 100) -> list:
    """Models with a reference for prediction, layers apart and stacked; of some, one layout is quick."""
    known = [
        d
        for d in PROMISING
        if b'"mtp_logits"' in reference_of(d).read_bytes()[:10000] and len(arch_of(config_of(d)).mtp) <= most
    ]
    return [
        pytest.param(
            (d, e),
            id=f"{'oracle-' * (d in ORACLES)}{d.name}-{e}",
            marks=[] if e == "stacked" and d.name in QUICK else [pytest.mark.slow],
        )
        for d in known
        for e in ("unrolled", "stacked")
    ]


@dataclass(frozen=True)
class Case:
    """A loaded model, its layers of prediction, and what the reference says.

    Attributes:
      feature: the target's hidden states that prediction starts from, after every token.
      says: what else the reference says.
    """

    model: Model
    net: Mtp
    params: Params
    ids_BT: np.ndarray
    feature: np.ndarray
    features: Features
    logits_BTV: np.ndarray
    says: TensorFiles

    def run(self, token_BT: np.ndarray, feature: np.ndarray, layer: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Logits and features of whole sequences of slots."""
        nets = self.net, self.model.net
        return tuple(np.asarray(x) for x in _run(*nets, layer, self.params, self.model.params, token_BT, feature))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run(net, target, layer: int, params, base, token_BT: Array, feature: Array) -> tuple[Array, Array]:
    position_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1], dtype=jnp.int32), token_BT.shape)
    embedded = embed(target, base, token_BT)
    last, feature, _ = apply(net, params, layer, embedded, feature, Inputs(token_BT, position_BT))
    return last if net.arch.mtp_form.own_heads else head(target, base, last), feature


@pytest.fixture(scope="module", params=layouts())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory, depth = request.param
    model_dir, says_dir = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("reference")
    shutil.copy(directory / ("hub_config.json" if directory in ORACLES else "config.json"), model_dir / "config.json")
    shutil.copy(directory / "model.safetensors", model_dir / "model.safetensors")
    shutil.copy(reference_of(directory), says_dir / "says.safetensors")
    says = TensorFiles.of(says_dir)
    model = load_model(model_dir, make_policy(jnp.float32, depth=depth))
    net, params = load_mtp(model_dir, model.net)
    ids_BT = np.asarray(says["input_ids"]).astype(np.int32)
    position_BT = np.broadcast_to(np.arange(ids_BT.shape[1], dtype=np.int32), ids_BT.shape)
    _, hidden = jax.jit(teacher_forced, static_argnums=0)(model.net, model.params, ids_BT, position_BT)
    feature = hidden.stream if model.net.arch.mtp_form.stream else hidden.last_BTD
    features = Features(hidden.last_BTD, hidden.stream)
    return Case(model, net, params, ids_BT, np.asarray(feature), features, np.asarray(says["mtp_logits"]), says)


def test_a_config_that_promises_prediction_has_a_reference_for_it():
    assert {d.name for d in PROMISING if d in GOLDENS} <= {p.values[0][0].name for p in layouts()}


def test_teacher_forced(case: Case):
    feature = case.feature
    for layer in range(len(case.net.arch.mtp)):
        logits_BTV, out = case.run(case.ids_BT[:, layer + 1 :], feature[:, :-1], layer)
        np.testing.assert_allclose(logits_BTV, case.says[f"mtp_logits.{layer}" if layer else "mtp_logits"], **CLOSE)
        feature = out if case.net.arch.mtp_form.chained else feature[:, :-1]


class Plain:
    """Prediction without a cache: what is drafted after each row's first tokens, whole sequences at a time."""

    def __init__(self, case: Case, length_B: np.ndarray):
        rows, count = case.ids_BT.shape
        self.case, self.slot_B, self.rows = case, length_B - 1, np.arange(rows)
        self.token_BT = np.zeros((rows, count + SPARE), np.int32)
        self.feature = np.zeros((rows, count + SPARE, *case.feature.shape[2:]), np.float32)
        for row, length in enumerate(length_B):
            self.token_BT[row, :length] = case.ids_BT[row, 1 : length + 1]
            self.feature[row, :length] = case.feature[row, :length]

    def next(self) -> np.ndarray:
        """Logits of the next draft, [B, V]."""
        self.logits_BTV, self.out = self.case.run(self.token_BT, self.feature)
        return self.logits_BTV[self.rows, self.slot_B]

    def take(self, token_B: np.ndarray) -> None:
        """Goes on after a draft."""
        self.feature[self.rows, self.slot_B + 1] = self.out[self.rows, self.slot_B]
        self.slot_B = self.slot_B + 1
        self.token_BT[self.rows, self.slot_B] = token_B


# A drafter is an argument, so that the tests share what is compiled for it.
@jax.jit
def _observe(drafter: MtpHeads, state, commit: Commit):
    return drafter.observe(state, commit)


def observed(case: Case, topology: Topology, seed: int = 0):
    """Yields lengths, drafter, state and anchor after blocks of which only some places count."""
    rows, count = case.ids_BT.shape
    drafter = MtpHeads(case.params, case.model.params, case.net, case.model.net, topology, BLOCK)
    state = drafter.init_state(rows, count, slack=drafter.slack)
    rng, length_B = np.random.default_rng(seed), np.zeros(rows, np.int32)
    while True:
        place_BT = np.minimum(length_B[:, None] + np.arange(5), count - 2)
        # All places but one may be wrong; a row that commits nothing keeps what it knows.
        count_B = np.minimum(rng.integers(0, 6, rows), count - 1 - length_B).astype(np.int32)
        wrong_BT = np.arange(5)[None] >= count_B[:, None]

        def along(x, place_BT=place_BT, wrong_BT=wrong_BT):
            found = np.take_along_axis(np.asarray(x), place_BT.reshape(*place_BT.shape, *[1] * (x.ndim - 2)), axis=1)
            return jnp.asarray(np.where(wrong_BT.reshape(*wrong_BT.shape, *[1] * (x.ndim - 2)), found * 0 + 3, found))

        tokens = [along(case.ids_BT), along(case.ids_BT[:, 1:])]
        commit = Commit(*tokens, jax.tree.map(along, case.features), count_B, length_B, None, None)
        state, length_B = _observe(drafter, state, commit), length_B + count_B
        last_B = case.ids_BT[np.arange(rows), length_B]
        # Cold rows under a rejection rule show the law of what they choose greedily.
        anchor = Anchor(last_B, jnp.asarray(length_B), jnp.zeros((rows, 1), jnp.int32), init_sampling(rows, 1))
        yield length_B, drafter, state, anchor
        if (length_B >= count - 1).all():
            return


def check_law(proposal, node: int, logits_BV: np.ndarray, rows: np.ndarray) -> None:
    wanted = jax.nn.log_softmax(logits_BV)
    np.testing.assert_allclose(np.asarray(proposal.logp_BNV)[rows, node - 1], wanted[rows], **CLOSE)


# What several layers draft together is compared in tests/unit/draft/test_mtp.py.
@pytest.mark.parametrize("case", layouts(most=1), indirect=True)
def test_drafting_a_chain_behind_observed_text(case: Case):
    propose = None
    for length_B, drafter, state, anchor in observed(case, chain(DRAFTS)):
        propose = propose or jax.jit(partial(drafter.propose, rule="reject"))
        proposal, _ = propose(state, anchor)
        some = length_B > 0
        np.testing.assert_array_equal(proposal.valid_BN, np.repeat(some[:, None], DRAFTS, axis=1))
        plain, rows = Plain(case, np.maximum(length_B, 1)), np.flatnonzero(some)
        first = case.logits_BTV[np.arange(len(some)), np.maximum(length_B, 1) - 1]
        for node in range(1, DRAFTS + 1):
            logits_BV = plain.next()
            check_law(proposal, node, logits_BV, rows)
            if node == 1:
                check_law(proposal, node, first, rows)
            token_B = np.asarray(proposal.token_BN)[:, node - 1]
            np.testing.assert_array_equal(token_B[rows], logits_BV.argmax(-1)[rows])
            plain.take(token_B)


@pytest.mark.parametrize("case", layouts(most=1), indirect=True)
def test_drafting_a_tree_behind_observed_text(case: Case):
    arch = case.model.net.arch
    if arch.chain_only or replace(arch, layers=arch.mtp).chain_only:
        config = methods.parse({"method": "mtp", "speculative_token_tree": [2, 1, 2]})
        with pytest.raises(ConfigError, match="a tree is not possible for the target"):
            methods.build(config, (case.model.net, case.model.params), BLOCK, (case.net, case.params))
        return
    topology, propose = tree((2, 1, 2)), None
    for length_B, drafter, state, anchor in list(observed(case, topology))[3::3]:
        propose = propose or jax.jit(partial(drafter.propose, rule="reject"))
        proposal, _ = propose(state, anchor)
        leaves = [node for node, children in enumerate(topology.children) if not children]
        for path in topology.path_TJ[leaves, 1:].tolist():
            plain = Plain(case, length_B)
            for node in path:
                logits_BV = plain.next()
                check_law(proposal, node, logits_BV, plain.rows)
                token_B = np.asarray(proposal.token_BN)[:, node - 1]
                rank = topology.children[topology.parents[node]].index(node)
                np.testing.assert_array_equal(token_B, np.argsort(-logits_BV, axis=-1)[:, rank])
                plain.take(token_B)
