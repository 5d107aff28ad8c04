"""Multi-token prediction: where its tokens and hidden states come from, and what loading it refuses."""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint.load.model import load_model, load_mtp
from jaxspec.checkpoint.load.places import flatten, resolve_rules
from jaxspec.checkpoint.load.save import save_model
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.checkpoint.names.packs import PACKS
from jaxspec.decode.dispatch import dispatch
from jaxspec.decode.prefill import Chunk, admit, prefill
from jaxspec.decode.state import Target, init_sampling, init_state
from jaxspec.decode.step import StepPlan
from jaxspec.draft.mtp_drafter import MtpHeads
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.apply import apply
from jaxspec.models.arch import MtpForm
from jaxspec.models.catalog import arch_of
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer, embed, head, teacher_forced
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy
from jaxspec.protocol import Anchor, Commit, Drafter, Features, NoDrafts
from jaxspec.pytree import replace
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.shapes import Array, Params
from jaxspec.topology import chain, tree
from jaxspec.verify.rules import RULES
from tests.leaf_paths import leaf_paths
from tests.oracle.conftest import SharedPrograms
from tests.random_params import random_params

VOCAB, DIM, BLOCK, CHUNK = 48, 16, 8, 4
POLICY = make_policy("float32")
CONFIG = {
    "model_type": "glm4_moe",
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
}


# As published with DeepSeek-V3, Step 3.5 and MiMo-V2-Flash.
FORMS = (MtpForm(), MtpForm(stream=True, own_heads=True), MtpForm(stream=True, chained=False))


@cache
def random_pair(layers: int, form: MtpForm = FORMS[0]) -> tuple[Transformer, Params, Mtp, Params]:
    """A target and its layers of prediction, with weights large enough that texts vary."""
    arch = replace(arch_of({**CONFIG, "num_nextn_predict_layers": layers}), mtp_form=form)
    nets = Transformer(arch, POLICY), Mtp(arch, POLICY)
    params = [random_params(net, seed, wide=7.0) for seed, net in enumerate(nets)]
    return nets[0], params[0], nets[1], params[1]


@cache
def clairvoyant_pair() -> tuple[Transformer, Params, Mtp, Params]:
    """A target whose next token depends on the last one alone, and prediction that reads this off the embedding."""
    net, params, mtp, weights = random_pair(1)

    def silent(path, x: Array) -> Array:
        return x * 0 if path[-1].key in ("out_HCD", "down_FD", "down_EFD") else x

    params, weights = (jax.tree_util.tree_map_with_path(silent, p) for p in (params, weights))
    layer = weights["params"]["mtp_0"]
    join_XD = jnp.concatenate([jnp.eye(DIM), jnp.zeros((DIM, DIM))])
    return net, params, mtp, {"params": {"mtp_0": {**layer, "join_XD": join_XD}}}


PREFILL, ADMIT = jax.jit(prefill, donate_argnums=2), jax.jit(admit, donate_argnums=0)
DISPATCH = jax.jit(dispatch, donate_argnums=2, static_argnames="plan")
NEW = 22


def generated(
    target: Target, drafter: Drafter, rule: str, prompts: list[list[int]], new: int, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """New tokens of every prompt [B, new], and how many each step committed [B, steps]."""
    rows, longest = len(prompts), max(map(len, prompts))
    state = init_state(target, drafter, rows, longest + new, slack=max(CHUNK, drafter.slack), stop_ids=1)
    for row, prompt in enumerate(prompts):
        for start in range(0, len(prompt) - 1, CHUNK):
            count = min(CHUNK, len(prompt) - 1 - start)
            # Padding that is not 0 must not matter either.
            chunk = np.resize(prompt[start : start + count + 1], CHUNK + 1).astype(np.int32)
            row_R, start_R, count_R = np.asarray([[row], [start], [count]], np.int32)
            state = PREFILL(target, drafter, state, Chunk(row_R, chunk[None], start_R, count_R))
        sampling = replace(
            init_sampling(1, 1), max_length_B=jnp.full(1, len(prompt) + new, jnp.int32),
            temperature_B=jnp.full(1, temperature), draft_limit_B=jnp.full(1, 99, jnp.int32),
            key_BX=jnp.asarray([[7, row]], jnp.uint32),
        )  # fmt: skip
        history = np.pad(np.asarray(prompt, np.int32), (0, state.history_BS.shape[1] - len(prompt)))
        state = ADMIT(state, np.int32(row), history, np.int32(len(prompt)), sampling, None)
    plan = StepPlan(RULES[rule], steps=new)
    state, report = DISPATCH(target, drafter, state, jnp.int32(new), jnp.array(False), plan=plan)
    counts = report.unpack().count_BX
    history = np.asarray(state.history_BS)
    return np.stack([history[row, len(p) : len(p) + new] for row, p in enumerate(prompts)]), counts


PROMPTS = [[5], [9, 3], [4, 30, 17, 8, 22, 22, 41, 5, 2, 11, 38], [int(i) for i in np.arange(2, 40, 3)]]


@pytest.mark.parametrize(
    ("rule", "temperature"),
    [
        pytest.param("greedy", 0.0, marks=pytest.mark.slow), ("match", 0.9),
        pytest.param("reject", 0.9, marks=pytest.mark.slow), ("block", 0.9),
    ],
)  # fmt: skip
def test_drafts_that_the_target_would_have_chosen_are_all_accepted(rule: str, temperature: float):
    net, params, mtp, weights = clairvoyant_pair()
    drafter, new = MtpHeads(weights, params, mtp, net, chain(3), BLOCK), NEW
    target = Target(params, net, BLOCK)
    tokens, counts = generated(target, drafter, rule, PROMPTS, new, temperature)
    assert len(set(tokens.ravel())) > 5
    for prompt, count in zip(PROMPTS, counts, strict=True):
        # A prompt of one token has no hidden state to start from.
        wanted = [1] * (len(prompt) == 1)
        while sum(wanted) < new:
            wanted.append(min(4, new - sum(wanted)))
        assert count[count > 0].tolist() == wanted
    if rule in ("greedy", "match"):
        plain, _ = generated(target, NoDrafts(), rule, PROMPTS, new, temperature)
        np.testing.assert_array_equal(tokens, plain)


class Several:
    """Prediction by several layers without caches, DeepSeek-V3 (2024) equations 21 to 23, one row.

    Layer m joins what layer m - 1 says at place i (the target for m = 0, or for all) with token i + m + 1.
    """

    def __init__(self, layers: int, form: MtpForm, text: list[int], hidden_TD: np.ndarray):
        self.net, self.params, self.mtp, self.weights = random_pair(layers, form)
        self.layers, self.form, self.text, self.hidden_TD = layers, form, list(text), hidden_TD

    def run(self, layer: int, token: list[int], feature_TD: np.ndarray) -> np.ndarray:
        size = 40
        token_T, feature = np.zeros((1, size), np.int32), np.zeros((1, size, DIM), np.float32)
        token_T[0, : len(token)], feature[0, : len(token)] = token, feature_TD
        return np.asarray(_slots(layer, self.layers, self.form, token_T, feature))[0, : len(token)]

    def before(self, layer: int) -> np.ndarray:
        """What a layer joins at the places that the target has seen, [T, D]."""
        if layer == 0 or not self.form.chained:
            return self.hidden_TD
        return self.run(layer - 1, self.text[layer:][: len(self.hidden_TD)], self.before(layer - 1))

    def next(self) -> np.ndarray:
        """Logits of the next draft, [V]."""
        known = len(self.hidden_TD)
        depth = len(self.text) - known - 1
        layer = min(depth, self.layers - 1)
        feature = self.run(layer, self.text[layer + 1 :][:known], self.before(layer))
        feature = feature if layer < self.layers - 1 else self._extended(feature, depth)
        last = apply(self.mtp, self.weights, layer, feature[-1:], method="last")
        return np.asarray(last if self.form.own_heads else head(self.net, self.params, last))[0]

    def _extended(self, feature_TD: np.ndarray, depth: int) -> np.ndarray:
        """The last layer goes on from its own output."""
        before = self.before(self.layers - 1)
        for _ in range(depth - self.layers + 1):
            before = np.concatenate([before, feature_TD[-1:]])
            feature_TD = self.run(self.layers - 1, self.text[self.layers :][: len(before)], before)
        return feature_TD


@partial(jax.jit, static_argnums=(0, 1, 2))
def _slots(layer: int, layers: int, form: MtpForm, token_BT: Array, feature: Array) -> Array:
    net, params, mtp, weights = random_pair(layers, form)
    position_BT = jnp.arange(token_BT.shape[1], dtype=jnp.int32)[None]
    return apply(mtp, weights, layer, embed(net, params, token_BT), feature, Inputs(token_BT, position_BT))[1]


@pytest.mark.parametrize(
    "form", [pytest.param(FORMS[0], marks=pytest.mark.slow), *FORMS[1:]], ids=["deepseek", "step", "mimo"]
)
@pytest.mark.parametrize(
    "topology", [pytest.param(chain(5), marks=pytest.mark.slow), tree((2, 1, 1, 2))], ids=["chain", "tree"]
)
def test_several_layers_draft_as_whole_sequences_do(topology, form):
    layers, rng = 3, np.random.default_rng(1)
    net, params, mtp, weights = random_pair(layers, form)
    drafter = MtpHeads(weights, params, mtp, net, topology, BLOCK)
    text_BT = rng.integers(0, VOCAB, (2, 24)).astype(np.int32)
    position_BT = np.broadcast_to(np.arange(24, dtype=np.int32), text_BT.shape)
    _, hidden = jax.jit(teacher_forced, static_argnums=0)(net, params, text_BT, position_BT)
    state, length_B = drafter.init_state(2, 32, slack=CHUNK), np.zeros(2, np.int32)
    observe, propose = jax.jit(drafter.observe), jax.jit(partial(drafter.propose, rule="reject"))

    def commit(rows: slice, start_B: np.ndarray, count_B: list[int], row: int | None) -> Commit:
        place_BT = np.minimum(start_B[:, None] + np.arange(CHUNK), 22)
        tokens = (np.take_along_axis(text_BT[rows], place_BT + shift, axis=1) for shift in (0, 1))
        both = (
            np.take_along_axis(np.asarray(x)[rows], place_BT[..., None], axis=1)
            for x in (hidden.last_BTD, hidden.stream)
        )
        where = None if row is None else jnp.full(1, row, jnp.int32)
        return Commit(*tokens, Features(*both), np.asarray(count_B, np.int32), start_B, None, where)

    for row, chunks in enumerate([(1, 4, 2), (4,)]):  # prompts of 8 and 5 tokens
        for count in chunks:
            start = length_B[row : row + 1].copy()
            state = observe(state, commit(slice(row, row + 1), start, [count], row))
            length_B[row] += count
    checked = 0
    for count_B in ([0, 1], [2, 4], [1, 0], [4, 3]):
        state = observe(state, commit(slice(None), length_B.copy(), count_B, None))
        length_B += np.asarray(count_B, np.int32)
        anchor = Anchor(text_BT[[0, 1], length_B], length_B, jnp.zeros((2, 1), jnp.int32), init_sampling(2, 1))
        proposal, _ = propose(state, anchor)
        assert np.asarray(proposal.valid_BN).all()
        token_BN, logp_BNV = np.asarray(proposal.token_BN), np.asarray(proposal.logp_BNV)
        for row in range(2):
            length = int(length_B[row])
            for path in leaf_paths(topology):
                seen_TD = np.asarray(hidden.stream if form.stream else hidden.last_BTD)[row, :length]
                slow = Several(layers, form, text_BT[row, : length + 1].tolist(), seen_TD)
                for node in path:
                    wanted = jax.nn.log_softmax(slow.next())
                    np.testing.assert_allclose(logp_BNV[row, node - 1], wanted, rtol=0, atol=1e-4)
                    slow.text.append(int(token_BN[row, node - 1]))
                    checked += 1
    assert checked == 4 * 2 * sum(map(len, leaf_paths(topology)))


def test_rows_without_enough_text_draft_nothing():
    layers = 3
    net, params, mtp, weights = random_pair(layers)
    drafter = MtpHeads(weights, params, mtp, net, chain(2), BLOCK)
    length_B = jnp.arange(5, dtype=jnp.int32)
    anchor = Anchor(length_B, length_B, jnp.zeros((5, 1), jnp.int32), init_sampling(5, 1))
    proposal, _ = jax.jit(partial(drafter.propose, rule="match"))(drafter.init_state(5, 16, CHUNK), anchor)
    np.testing.assert_array_equal(np.asarray(proposal.valid_BN)[:, 0], np.arange(5) >= layers)


def published(directory: Path, config: dict, drop: Callable[[str], bool] = lambda name: False) -> Path:
    """A checkpoint with one layer of prediction, some of its tensors left out."""
    net, params, _, weights = random_pair(1)
    save_model(directory, params, net.arch, config, np.dtype("float32"))
    tensors, leaves = load_file(directory / "model.safetensors"), flatten(weights["params"])
    for path, leaf in resolve_rules(known_tables()["glm4_moe"].mtp_rules(net.arch), leaves, net.arch).items():
        for index, rule in leaf.rules.items():
            parts = PACKS[rule.pack].split(np.asarray(leaves[path])[index])
            tensors |= {name: np.ascontiguousarray(part) for name, part in zip(rule.hub, parts, strict=True)}
    tensors["model.layers.1.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    save_file({n: x for n, x in tensors.items() if not drop(n)}, directory / "model.safetensors")
    return directory


SETTINGS = {"dtype": "float32", "max_model_len": 48, "max_num_seqs": 2, "max_logprobs": 0, "prefill_buckets": (8,)}


def test_the_public_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxspec.serve.engine.Programs", SharedPrograms)
    directory = published(tmp_path / "model", CONFIG)
    model = load_model(directory, POLICY)
    _, loaded = load_mtp(directory, model.net)
    for wanted, found in zip(*(jax.tree.leaves(p) for p in (random_pair(1)[3], loaded)), strict=True):
        np.testing.assert_array_equal(found, wanted)
    params = [SamplingParams(temperature=t, seed=3, max_tokens=16, ignore_eos=True) for t in (0.0, 0.8)]
    texts = []
    for config in (None, {"method": "deepseek_mtp", "num_speculative_tokens": 3}):
        llm = LLM(directory, speculative_config=config, **SETTINGS)
        outputs = llm.generate([PROMPTS[2], PROMPTS[3]], params)
        texts.append([o.outputs[0].token_ids for o in outputs])
    assert texts[0] == texts[1]
    assert isinstance(llm.engine.drafter, MtpHeads)
    assert all(o.metrics.num_draft_tokens > 0 for o in outputs)


def test_checkpoints_without_it(tmp_path: Path):
    config = {"method": "mtp", "num_speculative_tokens": 2}
    directory = published(tmp_path / "lacking", CONFIG, lambda name: "eh_proj" in name or "experts.3.up" in name)
    with pytest.raises(CheckpointError, match=r"2 of their tensors are missing.*saved again") as caught:
        LLM(directory, speculative_config=config, **SETTINGS)
    for name in ("model.layers.1.eh_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"):
        assert name in str(caught.value)
    none = {**CONFIG, "num_nextn_predict_layers": 0}
    save_model(tmp_path / "none", random_pair(1)[1], arch_of(none), none, np.dtype("float32"))
    with pytest.raises(ConfigError, match=r"no layers of multi-token prediction \(num_nextn_predict_layers\)"):
        LLM(tmp_path / "none", speculative_config=config, **SETTINGS)
    with pytest.raises(ConfigError, match=r"holds no trained layer of multi-token prediction; leave model out"):
        LLM(directory, speculative_config={**config, "model": str(directory)}, **SETTINGS)
    with pytest.raises(ConfigError, match=r'method "mtp" takes no "revision"'):
        LLM(directory, speculative_config={**config, "revision": "main"}, **SETTINGS)
    narrow = load_file(directory / "model.safetensors") | {"model.layers.1.enorm.weight": np.ones(3, np.float32)}
    save_file({**narrow, "model.layers.1.eh_proj.weight": np.ones((DIM, 2 * DIM), np.float32),
               "model.layers.1.mlp.experts.3.up_proj.weight": np.ones((8, DIM), np.float32)},
              directory / "model.safetensors")  # fmt: skip
    assert json.loads((directory / "config.json").read_text())["num_nextn_predict_layers"] == 1
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.enorm\.weight: \(3,\) in the file, \(16,\) by"):
        LLM(directory, speculative_config=config, **SETTINGS)
