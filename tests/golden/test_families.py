"""Every known family gives the logits and texts of its reference, in every way that the engine computes them.

``JAXSPEC_ORACLES`` may name a directory of further references: one folder per model with ``hub_config.json``,
``model.safetensors`` and ``io.safetensors``.
"""

import json
import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.addressing import CacheSize
from jaxspec.cache.window import Window
from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.load.model import Model, load_model
from jaxspec.decode.dispatch import dispatch
from jaxspec.decode.prefill import Chunk, admit, prefill
from jaxspec.decode.state import Target, init_sampling, init_state
from jaxspec.decode.step import StepPlan
from jaxspec.models.caches import init_caches
from jaxspec.models.catalog import arch_of, known_families
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.policy import make_policy
from jaxspec.protocol import CaptureSpec, NoDrafts
from jaxspec.pytree import replace
from jaxspec.verify.rules import RULES

BLOCK = 8  # smaller than every prompt, so that attention crosses blocks
CLOSE = {"rtol": 0, "atol": 1e-4}
HALF = {"rtol": 1e-3, "atol": 1e-3}  # the references keep streams in half precision
GOLDENS = sorted(file.parent for file in Path(__file__).parent.glob("*/config.json"))
ORACLES = sorted(
    file.parent for file in Path(os.environ.get("JAXSPEC_ORACLES", "-")).resolve().glob("*/hub_config.json")
)


def config_of(directory: Path) -> dict:
    name = "hub_config.json" if directory in ORACLES else "config.json"
    return json.loads((directory / name).read_text())


KNOWN_ORACLES = [d for d in ORACLES if config_of(d)["model_type"] in known_families()]


NATIVE = ("stacked", "native")
KINDS = (NATIVE, ("stacked", "xla"), ("unrolled", "xla"))
INTERPRETED = ("stacked", "interpret")
# Together every mechanism that kernels compute; one that fell back would warn, and warnings are errors.
WITH_KERNELS = (
    "qwen3_moe", "qwen2_moe", "gpt_oss_mxfp4", "deepseek_v3", "mixtral_window", "glm4_moe", "mimo_v2_flash",
    "qwen3_next", "kimi_linear", "granitemoehybrid", "minimax", "deepseek_v32", "glm_moe_dsa_shared", "deepseek_v4",
)  # fmt: skip


EVERY = tuple(directory.name for directory in (*GOLDENS, *KNOWN_ORACLES))
# One golden for each way of attending, caching and routing; the others are quick where one program is enough.
MECHANISMS = ("qwen2_moe", "gpt_oss", "deepseek_v3", "glm_moe_dsa_shared", "deepseek_v4")
# Layers apart are called alike, whatever they are, but where one hands on what it has chosen.
APART = ("qwen2_moe", "glm_moe_dsa_shared")
# Nothing but mechanisms of others, in another arrangement.
ARRANGED = (
    "dots1", "hy_v3", "solar_open", "granitemoe", "granitemoeshared", "mellum", "mistral3", "sarvam_mla", "sarvam_moe",
    "step3p7",
)  # fmt: skip
# Of those with recurrent layers one is quick.
RECURRENT = "qwen3_next"
# Decoding differs by caches alone: these have all kinds of them, and the others are quick in a prefill.
CACHES = (*MECHANISMS, RECURRENT, "llama4_text", "gemma4_text", "longcat_flash")
# The texts of the others are quickly asked of an engine, in tests/oracle/test_families_lossless.py.
ASKED_HERE = ("qwen2_moe", "llama4_text", "gemma4_text", "longcat_flash")


def is_recurrent(directory: Path) -> bool:
    layers = arch_of(config_of(directory)).layers
    return any(stream.fixed is not None for layer in layers for stream in layer.attention.streams.values())


def layouts(*quick: tuple[str, ...]) -> pytest.MarkDecorator:
    """Every known model in so many layouts of layers, and what computes; slow but for the names given for each."""
    cases = []
    for directory in (*GOLDENS, *KNOWN_ORACLES):
        prefix, name = "oracle-" if directory in ORACLES else "", directory.name
        like_others = name in ARRANGED or (name != RECURRENT and is_recurrent(directory))
        for kind, names in zip((*KINDS, INTERPRETED), quick, strict=False):
            if kind != INTERPRETED or name in WITH_KERNELS:
                marks = [] if name in names and not like_others else [pytest.mark.slow]
                layout = "-".join(kind).removesuffix("-xla")
                cases.append(pytest.param((directory, *kind), id=f"{prefix}{name}-{layout}", marks=marks))
    return pytest.mark.parametrize("case", cases, indirect=True, scope="module")


@dataclass(frozen=True)
class Case:
    """A loaded model and what the reference says about it."""

    model: Model
    says: dict[str, np.ndarray]
    prompt_BT: np.ndarray
    continuation_BT: np.ndarray

    @property
    def ids_BT(self) -> np.ndarray:
        return self.says["input_ids"].astype(np.int32)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory, depth, kernels = request.param
    oracle = directory in ORACLES
    model_dir, says_dir = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("reference")
    shutil.copy(directory / ("hub_config.json" if oracle else "config.json"), model_dir / "config.json")
    shutil.copy(directory / "model.safetensors", model_dir / "model.safetensors")
    reference = "io.safetensors" if oracle else "reference.safetensors"
    shutil.copy(directory / reference, says_dir / "says.safetensors")
    policy = make_policy(jnp.float32, depth=depth, kernels=kernels)
    says = {name: np.asarray(value) for name, value in TensorFiles.of(says_dir).items()}
    if oracle:  # the continuation there is that of the first row's first 24 tokens, of some models only its first token
        prompt = says["input_ids"][:1, :24]
        new = says["gen_ids"][None] if "gen_ids" in says else says["logits"][:1, 23:24].argmax(-1)
    else:
        prompt, new = says["input_ids"][:, : int(says["prompt_length"])], says["greedy_ids"]
    return Case(load_model(model_dir, policy), says, prompt.astype(np.int32), new.astype(np.int32))


def test_every_family_has_a_golden():
    assert {config_of(directory)["model_type"] for directory in GOLDENS} == set(known_families())


@pytest.mark.parametrize("directory", KNOWN_ORACLES, ids=lambda d: d.name)
def test_both_dialects_of_a_config_mean_the_same(directory: Path):
    hub, saved = config_of(directory), json.loads((directory / "config.json").read_text())
    assert arch_of(hub) == arch_of(saved)


@layouts(EVERY, MECHANISMS[:1], MECHANISMS[:1])  # blocks have the same logits in the other layouts of mechanisms
def test_prefill(case: Case):
    net, ids_BT = case.model.net, case.ids_BT
    taps = tuple(range(len(net.arch.layers) + 1))

    @jax.jit
    def forward(params, token_BT):
        position_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1], dtype=jnp.int32), token_BT.shape)
        hidden = net.apply(params, Inputs(token_BT, position_BT, reads=CaptureSpec(taps), routes=True))
        logits_BTV, _ = net.apply(params, token_BT, position_BT, method="logits_of")
        return logits_BTV, hidden.taps, hidden.routing

    logits_BTV, streams, routers = forward(case.model.params, ids_BT)
    for boundary, stream_BTD in enumerate(streams):
        np.testing.assert_allclose(stream_BTD, case.says[f"hidden.{boundary}"], **HALF, err_msg=f"layer {boundary}")
    routed = [y for y, layer in enumerate(net.arch.layers) if isinstance(layer.ffn, MoeSpec)]
    for y, routing in zip(routed, routers, strict=True):
        if f"router_logits.{y}" in case.says:
            wanted = case.says[f"router_logits.{y}"].reshape(routing.logits_ME.shape)
            np.testing.assert_allclose(routing.logits_ME, wanted, **CLOSE)
        else:  # some references keep the choices alone
            chosen = np.sort(case.says[f"router_idx.{y}"].reshape(routing.expert_MA.shape))
            np.testing.assert_array_equal(np.sort(routing.expert_MA), chosen)
    np.testing.assert_allclose(logits_BTV, case.says["logits"], **CLOSE)


@layouts(CACHES)
def test_decode_one_by_one(case: Case):
    decode(case, 1)


@layouts(CACHES, MECHANISMS, APART, WITH_KERNELS)
def test_decode_in_blocks_of_5(case: Case):
    decode(case, 5)


def decode(case: Case, count: int) -> None:
    """Runs a text over the cache, so many positions at a time."""
    net, ids_BT = case.model.net, case.ids_BT
    rows, length = ids_BT.shape[0], ids_BT.shape[1] // count * count
    room = -(-(ids_BT.shape[1] + count) // BLOCK) * BLOCK
    layers = init_caches(net.arch, net.policy, CacheSize(rows, room, count, BLOCK))

    @partial(jax.jit, donate_argnums=1)
    def forward(params, layers, token_BT, start):
        start_B = jnp.full(rows, start, jnp.int32)
        position_BT = start_B[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        hidden = net.apply(params, Inputs(token_BT, position_BT, Window(start_B, block=BLOCK), layers))
        return hidden.caches, net.apply(params, hidden.last_BTD, method="logits")

    found = []
    for start in range(0, length, count):
        layers, logits_BTV = forward(case.model.params, layers, ids_BT[:, start : start + count], np.int32(start))
        found.append(np.asarray(logits_BTV))
    np.testing.assert_allclose(np.concatenate(found, axis=1), case.says["logits"][:, :length], **CLOSE)


@layouts(ASKED_HERE)
def test_greedy_continuation(case: Case):
    new = case.continuation_BT.shape[1]
    rows, length = case.prompt_BT.shape
    target, drafter = Target(case.model.params, case.model.net, block=BLOCK), NoDrafts()
    state = init_state(target, drafter, rows, length + new, slack=length, stop_ids=1)
    sampling = replace(init_sampling(1, 1), max_length_B=jnp.full(1, length + new, jnp.int32))

    @jax.jit
    def start(target, state, row, prompt_T):
        chunk = Chunk(row[None], prompt_T[None], jnp.zeros(1, jnp.int32), jnp.full(1, length - 1, jnp.int32))
        state = prefill(target, drafter, state, chunk)
        prompt_S = jnp.pad(prompt_T, (0, state.history_BS.shape[1] - length))
        return admit(state, row, prompt_S, jnp.int32(length), sampling, None)

    for row in range(rows):
        state = start(target, state, np.int32(row), case.prompt_BT[row])
    run = jax.jit(partial(dispatch, plan=StepPlan(RULES["greedy"], steps=new)))
    state, report = run(target, drafter, state, jnp.int32(new), jnp.asarray(False))
    np.testing.assert_array_equal(state.history_BS[:, length : length + new], case.continuation_BT)
    assert (report.unpack().steps, report.unpack().full_B.all()) == (new, True), "the length limit ends the rows"
