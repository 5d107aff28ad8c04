"""DSpark as DeepSeek-V4 publishes it, in a directory of its layout: loaded, computed as stated, served losslessly."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint.heads.directory import load_head, save_head
from jaxspec.checkpoint.heads.traps import check_head
from jaxspec.checkpoint.load.model import load_model
from jaxspec.decode.prefill import Chunk, prefill
from jaxspec.decode.state import Target, init_state
from jaxspec.draft.head_drafter import head_drafter
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.apply import apply
from jaxspec.models.block import Block
from jaxspec.models.block_head import BlockLayer
from jaxspec.models.transformer import head
from jaxspec.nn.anchored import Anchored, BlockView
from jaxspec.nn.block_one_key import BlockOneKey
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy
from jaxspec.protocol import Anchor, CaptureSpec
from jaxspec.pytree import replace
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.topology import chain
from jaxspec.train.batch import Batch
from jaxspec.train.block_loss import run_blocks
from jaxspec.train.head_start import make_initial_head
from jaxspec.train.objective import HeadObjective
from jaxspec.train.settings import HeadSettings, LossSettings
from jaxspec.train.teacher import run_teacher
from tests.contract.tiny_drafters import features_for
from tests.oracle.conftest import SharedPrograms

GOLDEN = Path(__file__).parents[2] / "golden" / "deepseek_v4"
EXACT = make_policy("float32")
STAGES, RANK, SIZE, LENGTH = 3, 6, 4, 19  # texts are longer than the window of 8
KEYS = {
    "dspark_block_size": SIZE, "dspark_noise_token_id": 95, "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": RANK, "n_mtp_layers": STAGES,
}  # fmt: skip
JOINS = ("e_proj", "h_proj", "enorm", "hnorm", "hc_head", "mtp.0.norm")


def stages() -> dict[str, np.ndarray]:
    """Tensors under the names of the release: decoder layers, what joins the taps, and what follows the last."""
    tensors, rng = load_file(GOLDEN / "model.safetensors"), np.random.default_rng(0)
    dim, vocab, streams = 32, 96, 2

    def drawn(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32) * 0.2

    layer = {n: x for n, x in tensors.items() if n.startswith("mtp.0.") and not any(j in n for j in JOINS)}
    made = {n: x for n, x in tensors.items() if not n.startswith("mtp.")}
    for stage in range(STAGES):
        made |= {
            n.replace("mtp.0.", f"mtp.{stage}."): (x + 0.05 * rng.normal(size=x.shape)).astype(x.dtype)
            for n, x in layer.items()
        }
    last = f"mtp.{STAGES - 1}."
    return made | {
        "mtp.0.main_proj.weight": drawn(dim, 3 * dim), "mtp.0.main_norm.weight": 1 + drawn(dim),
        f"{last}norm.weight": 1 + drawn(dim), f"{last}hc_head_fn": drawn(streams, streams * dim),
        f"{last}hc_head_base": drawn(streams), f"{last}hc_head_scale": 1 + drawn(1),
        f"{last}markov_head.markov_w1.weight": 3 * drawn(vocab, RANK),
        f"{last}markov_head.markov_w2.weight": 3 * drawn(vocab, RANK),
        f"{last}confidence_head.proj.weight": drawn(1, dim + RANK),
    }  # fmt: skip


def write(directory: Path, tensors: dict[str, np.ndarray] | None = None, **keys: Any) -> Path:
    """The target's directory with the stages in it; a key ``...`` is left out."""
    directory.mkdir()
    config = json.loads((GOLDEN / "config.json").read_text()) | KEYS | keys
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    save_file(stages() if tensors is None else tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("v4") / "model")


@cache
def loaded(place: Path) -> tuple[Any, Any]:
    model = load_model(place, EXACT)
    return model, load_head(place, model.net.arch, EXACT)


def test_the_files_say_what_it_is(place: Path):
    model, head = loaded(place)
    spec, tensors = head.net.spec, stages()
    assert head.kind == "dspark"
    assert (len(spec.arch.layers), spec.drafts, spec.block_size, spec.mask_token) == (STAGES, SIZE, SIZE, 95)
    assert (spec.reads.taps, spec.markov_rank, spec.confidence, spec.confidence_bias) == (
        (2, 3, 4),
        RANK,
        "markov",
        False,
    )
    assert spec.views == (BlockView(8, causal=False, from_anchor=True),) * STAGES
    assert {layer.attention.rope.scaling for layer in spec.arch.layers} == {None}, "plain base, whatever the target's"
    assert {(layer.ffn.experts, layer.ffn.top_k, layer.ffn.router.kind) for layer in spec.arch.layers} == {
        (4, 2, "sqrt_softplus")
    }
    params = head.params["params"]
    np.testing.assert_array_equal(params["fc_XD"], tensors["mtp.0.main_proj.weight"].T)
    up = params["layers_2"]["ffn"]["gate_up_ED2F"][3, :, 1]
    np.testing.assert_array_equal(up, tensors["mtp.2.ffn.experts.3.w3.weight"].astype(np.float32).T)
    np.testing.assert_array_equal(params["markov"]["markov_out_RW"], tensors["mtp.2.markov_head.markov_w2.weight"].T)
    assert check_head(place, place) == ((), "")
    assert model.net.arch.mtp, "num_nextn_predict_layers says nothing about them"


def test_stages_may_have_fewer_experts_than_the_target(tmp_path: Path):
    few = {n: x for n, x in stages().items() if not (n.startswith("mtp.") and ".experts.3." in n)}
    few = {n: x[:3] if n.startswith("mtp.") and "ffn.gate" in n else x for n, x in few.items()}
    directory = write(tmp_path / "few", few, dspark_n_routed_experts=3, dspark_num_experts_per_tok=1)
    spec = load_head(directory, load_model(directory, EXACT).net.arch, EXACT).net.spec
    assert {(layer.ffn.experts, layer.ffn.top_k) for layer in spec.arch.layers} == {(3, 1)}


WRONG = [
    ({"dspark_block_size": ...}, "must state dspark_block_size as a whole number from 1, got None"),
    ({"dspark_target_layer_ids": 3}, "must state dspark_target_layer_ids as a list of layers, got 3"),
    ({"dspark_target_layer_ids": [1, 2, 9]}, r"reads the layer boundaries \[2, 3, 10\], the target's go from 0 to 4"),
    ({"model_type": "deepseek_v3"}, "stages of DSpark .* known of deepseek_v4 alone"),
]


@pytest.mark.parametrize(("keys", "says"), WRONG)
def test_what_cannot_be_is_one_error(place: Path, tmp_path: Path, keys: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        load_head(write(tmp_path / "wrong", **keys), loaded(place)[0].net.arch, EXACT)


def test_missing_and_strange_tensors_are_named(place: Path, tmp_path: Path):
    tensors = stages()
    del tensors["mtp.1.attn.wkv.weight"]
    tensors["mtp.1.attn.stray"] = np.zeros(1, np.float32)
    with pytest.raises(CheckpointError) as caught:
        load_head(write(tmp_path / "wrong", tensors), loaded(place)[0].net.arch, EXACT)
    assert "1 missing: mtp.1.attn.wkv.weight" in str(caught.value)
    assert "1 not known: mtp.1.attn.stray" in str(caught.value)


def test_they_are_served_and_neither_exported_nor_trained(place: Path, tmp_path: Path):
    model, head = loaded(place)
    for form in ("native", "dflash"):
        with pytest.raises(ConfigError, match=r"no published config describes|its layers have experts"):
            save_head(head, tmp_path / "out", form)
    # A training takes the directory for what its config says, the target.
    settings = HeadSettings(kind="dspark", start=str(place))
    with pytest.raises(ConfigError, match='holds kind "draft_model", not "dspark"'):
        make_initial_head(settings, model, EXACT, np.ones(96))


def test_a_row_that_is_alone_goes_through_a_layer_of_the_target(place: Path):
    """Streams, norms, projections and experts are those of the layers that the goldens check."""
    head = loaded(place)[1]
    arch, layer = head.net.spec.arch, head.net.spec.arch.layers[0]
    own, rng = head.params["params"]["layers_1"], np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(1, 1, 2, 32)), jnp.float32)
    zero = jnp.zeros((1, 1), jnp.int32)
    wanted = jax.jit(lambda own, x: Block(layer, arch, EXACT).apply({"params": own}, x, Inputs(zero, zero)).x)(own, x)
    spec = head.net.spec
    text = Anchored(zero, zero, (jnp.ones((1, 1, 1, 16)),) * 2, size=1)
    net, inputs = BlockLayer(layer, spec.views[0], spec, EXACT), Inputs(zero, zero, memory=text)
    alone = jax.jit(lambda own, x: net.apply({"params": own}, x, inputs)[0])(own, x)
    np.testing.assert_allclose(alone, wanted, atol=1e-5)


def test_attention_sees_the_window_before_the_anchor_and_the_whole_block(place: Path):
    """By the equations, in double precision: one rotated key that is also the value, and a sink."""
    head, rng = loaded(place)[1], np.random.default_rng(2)
    spec, own = head.net.spec.arch.layers[0].attention, head.params["params"]["layers_0"]["attention"]
    anchor, heads, wide, turned = 13, 4, 16, 4
    c, x = (rng.normal(size=(1, n, 32)).astype(np.float32) for n in (LENGTH, SIZE))
    place_T = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    row_S = anchor + jnp.arange(SIZE, dtype=jnp.int32)[None]
    net = BlockOneKey(spec, BlockView(8, from_anchor=True), 32, 1e-6, EXACT)
    memory: Any = Anchored(jnp.ones((1, LENGTH), jnp.int32), jnp.full((1, 1), anchor, jnp.int32), size=SIZE)

    @jax.jit
    def attend(own: Any, c: Any, x: Any) -> Any:
        seen = net.apply({"params": own}, c, Inputs(place_T, place_T, memory=memory), method="observe")
        return net.apply({"params": own}, x, Inputs(row_S, row_S, memory=seen))[0]

    found = attend(own, c, x)

    w: Any = {name: np.asarray(leaf, np.float64) for name, leaf in own.items()}

    def rms(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def turn(x: np.ndarray, at: np.ndarray, sign: int = 1) -> np.ndarray:
        angle = sign * at[:, None] * 10000.0 ** (-np.arange(0, turned, 2) / turned)
        angle = angle.reshape(len(at), *[1] * (x.ndim - 2), turned // 2)
        even, odd = x[..., -turned::2], x[..., 1 - turned :: 2]
        pairs = even * np.cos(angle) - odd * np.sin(angle), even * np.sin(angle) + odd * np.cos(angle)
        return np.concatenate([x[..., :-turned], np.stack(pairs, -1).reshape(*x.shape[:-1], turned)], -1)

    def key(x: np.ndarray, at: np.ndarray) -> np.ndarray:
        return turn(rms(x @ w["kv_DC"]) * w["kv_norm_C"], at)

    rows = np.arange(anchor, anchor + SIZE)
    low = rms(x[0] @ w["q_a_DR"]) * w["q_norm_R"]
    q = turn(rms(np.einsum("sr,rhc->shc", low, w["q_b_RHC"])), rows)
    near = np.arange(anchor - 8, anchor)
    kv = np.concatenate([key(c[0, near], near), key(x[0], rows)])
    score = np.einsum("shc,tc->sht", q, kv) / np.sqrt(wide)
    sink = np.broadcast_to(w["sinks_H"][None, :, None], (SIZE, heads, 1))
    prob = np.exp(np.concatenate([score, sink], -1))
    out = turn(np.einsum("sht,tc->shc", (prob / prob.sum(-1, keepdims=True))[..., :-1], kv), rows, -1)
    low = np.einsum("sgc,grc->sgr", out.reshape(SIZE, 2, 2 * wide), w["out_a_XC"].reshape(2, 12, 2 * wide))
    np.testing.assert_allclose(found[0], low.reshape(SIZE, -1) @ w["out_b_XD"], atol=2e-5)


def test_taps_are_the_mean_of_the_streams(place: Path):
    net, params = (model := loaded(place)[0]).net, model.params
    token = np.random.default_rng(3).integers(1, 90, (1, 6)).astype(np.int32)
    features = features_for(net, params, token, CaptureSpec(taps=(0, 4)))
    np.testing.assert_allclose(features.taps[1], np.asarray(features.stream).mean(axis=2), atol=1e-6)
    assert features.taps[0].shape == (1, 6, 32)


def test_drafts_from_the_cache_are_those_of_whole_texts(place: Path):
    model, made = loaded(place)
    net, params, spec = model.net, model.params, made.net.spec
    token_BT = np.random.default_rng(4).integers(1, 90, (1, LENGTH + SIZE)).astype(np.int32)
    drafter = head_drafter(made, (net, params), chain(SIZE), 16)
    base = Target(params, net, 16)
    state, zero = init_state(base, drafter, 1, 40, slack=32), jnp.zeros(1, jnp.int32)
    chunk = np.zeros((1, 33), np.int32)
    chunk[0, :LENGTH] = token_BT[0, :LENGTH]
    state = jax.jit(prefill)(base, drafter, state, Chunk(zero, chunk, zero, jnp.full(1, LENGTH - 1, jnp.int32)))
    sampling = replace(state.sampling, temperature_B=jnp.ones(1), draft_limit_B=jnp.full(1, 99, jnp.int32))
    anchor = Anchor(
        jnp.asarray(token_BT[:, LENGTH - 1]), jnp.full(1, LENGTH - 1, jnp.int32), state.history_BS, sampling
    )
    proposal, _ = jax.jit(drafter.propose, static_argnums=2)(state.draft, anchor, "reject")
    token_BT[0, LENGTH:] = np.asarray(proposal.token_BN)[0]

    ones = jnp.ones(token_BT.shape, jnp.int32)
    at = jnp.broadcast_to(jnp.arange(token_BT.shape[1], dtype=jnp.int32), token_BT.shape)
    batch = Batch(jnp.asarray(token_BT), ones, at, ones > 0)

    @jax.jit
    def read(params: Any, own: Any, batch: Batch) -> Any:
        objective = HeadObjective(params, None, net, made.net, LossSettings())
        teacher = run_teacher(net, params, batch, spec.reads)
        last, _ = run_blocks(objective, made.net, own, teacher, batch, jnp.full((1, 1), LENGTH - 1, jnp.int32))
        e = apply(made.net, own, batch.token_BT[None, :, LENGTH - 1 : -1], method="markov_embed")
        logits = head(net, params, apply(made.net, own, last, method="normed"))
        logits += apply(made.net, own, e, method="markov_bias")
        sure = jax.nn.sigmoid(apply(made.net, own, last, e, method="confidence"))
        return jax.nn.log_softmax(logits)[0, 0], sure[0, 0]

    logp, sure = read(params, made.params, batch)
    np.testing.assert_allclose(proposal.logp_BNV[0], logp, atol=2e-4)
    assert np.ptp(sure) > 1e-4


def test_drafts_change_no_text(place: Path, monkeypatch: pytest.MonkeyPatch):
    """Chains alone: the target's attention pools consecutive positions, which the branches of a tree are not."""
    monkeypatch.setattr("jaxspec.serve.engine.Programs", SharedPrograms)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, 90, n).tolist() for n in (3, 12, 21)]
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "prefill_buckets": (16,)}
    settings["max_logprobs"], texts = 0, []
    for speculation in (None, {"method": "dspark", "model": str(place), "num_speculative_tokens": SIZE}):
        llm = LLM(place, **settings, speculative_config=speculation)
        outputs = [
            llm.generate(prompts, SamplingParams(temperature=t, max_tokens=14, seed=1, ignore_eos=True))
            for t in (0.0, 1.0)
        ]
        texts.append([output.outputs[0].token_ids for each in outputs for output in each])
    assert texts[0] == texts[1]
