"""A tiny target, a draft model and a scripted drafter; engines whose compiled programs all tests share."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as changed
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxspec.checkpoint.load.model import Model, load_model
from jaxspec.checkpoint.load.save import save_model
from jaxspec.control.decision import Outcome
from jaxspec.control.draft_cost import CONFIDENCE_STEPS, VerifyBudget
from jaxspec.decode.compaction import Sizes
from jaxspec.decode.dispatch import dispatch
from jaxspec.decode.prefill import admit, catch_up, prefill, retire
from jaxspec.decode.prefix import load_blocks, save_blocks
from jaxspec.decode.runner import Runner
from jaxspec.decode.state import DecodeState, Target
from jaxspec.decode.step import StepPlan
from jaxspec.draft.mtp_drafter import MtpHeads
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.small_lm import SmallLm
from jaxspec.models.catalog import arch_of
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.native.packing import pack
from jaxspec.nn.param import declared
from jaxspec.nn.policy import Policy, make_policy, policy_for
from jaxspec.protocol import Anchor, Drafter, NoDrafts, Proposal
from jaxspec.pytree import pytree, replace, static
from jaxspec.serve import engine as engine_module
from jaxspec.serve.background import CompiledPrograms
from jaxspec.serve.compiled import Programs
from jaxspec.serve.engine import Engine
from jaxspec.serve.engine_spec import EngineSpec
from jaxspec.serve.request import RequestOutput, SamplingParams, key_words
from jaxspec.serve.sample import new_samples
from jaxspec.serve.text import IncrementalText
from jaxspec.shapes import Array
from jaxspec.topology import Topology, chain
from jaxspec.verify.rules import RULES

VOCAB, EOS, CAPACITY, PLACES = 64, 0, 96, 3
LETTERS = [chr(ord("!") + i) for i in range(VOCAB)]
CONFIG = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}
Request = tuple[list[int], SamplingParams]


def write_model(directory: Path, config: dict, seed: int) -> Path:
    """A random model, its weights large enough that its text varies and its distributions have a shape."""
    arch = arch_of(config)
    policy = make_policy("float32")
    net = Transformer(arch, policy)
    params = jax.jit(net.initial)(jax.random.key(seed))
    params = jax.tree.map(lambda x: x * (7.0 if x.ndim > 1 else 1.0), params)
    save_model(directory, params, arch, config, np.dtype("float32"))
    return directory


def write_tokenizer(directory: Path, letters: list[str]) -> None:
    """One character per token."""
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token=letters[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": letters[1]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model(tmp_path_factory.mktemp("target"), CONFIG, 0)
    write_tokenizer(directory, LETTERS)
    return directory


@pytest.fixture(scope="session")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's architecture with other weights: knows nothing about the target."""
    return write_model(tmp_path_factory.mktemp("draft"), CONFIG, 1)


@pytree
class Scripted(Drafter):
    """Proposes what a table says: per request the target's true text, and where to be wrong or silent.

    Attributes:
      key_RX: key words by which rows find their request.
      truth_RS: each request's prompt and true continuation.
      wrong_RS: positions at which every sibling is wrong.
      silent_RS: positions at which the right draft is not valid.
      twins: scalar; true makes all siblings equal.
    """

    key_RX: Array
    truth_RS: Array
    wrong_RS: Array
    silent_RS: Array
    twins: Array
    topology: Topology = static()

    def propose(self, state: tuple[()], anchor: Anchor, rule: str) -> tuple[Proposal, tuple[()]]:
        same = jnp.all(anchor.sampling.key_BX[:, None] == self.key_RX[None], axis=-1)
        request_B = jnp.argmax(same, axis=1)
        tokens, valid = [], []
        for node in range(1, self.topology.nodes):
            siblings = self.topology.children[self.topology.parents[node]]
            rank = siblings.index(node)
            at_B = anchor.length_B + self.topology.depth[node]
            truth, wrong, silent = (
                jnp.take_along_axis(x[request_B], at_B[:, None], axis=1, mode="clip")[:, 0]
                for x in (self.truth_RS, self.wrong_RS, self.silent_RS)
            )
            right = ((at_B % len(siblings) == rank) | self.twins) & ~wrong
            off = jnp.where(self.twins, 1, 1 + rank)
            tokens.append(jnp.where(right, truth, (truth + off) % VOCAB))
            valid.append(~(right & silent))
        return Proposal(jnp.stack(tokens, 1).astype(jnp.int32), jnp.stack(valid, 1), None), state


@cache
def _jitted(plan: StepPlan) -> Callable:
    return jax.jit(partial(dispatch, plan=plan), donate_argnums=2)


@cache
def _caught_up(size: int) -> Callable:
    return jax.jit(partial(catch_up, size=size), donate_argnums=1)


def _priceless(program: Callable) -> Callable:
    """The program, shared by engines with and without prices: it hands them through."""

    def run(*args):
        (place,) = (i for i, arg in enumerate(args) if isinstance(arg, DecodeState))
        prices = args[place].draft_costs
        return replace(
            program(*args[:place], replace(args[place], draft_costs=None), *args[place + 1 :]), draft_costs=prices
        )

    return run


SHARED = {
    "admit": _priceless(jax.jit(admit, donate_argnums=0)),
    "retire": _priceless(jax.jit(retire, donate_argnums=0)),
    "prefill": _priceless(jax.jit(prefill, donate_argnums=2)),
}


def _prefill(target, drafter, state, chunk):
    # What a drafter observes of a prompt does not depend on its topology: one program serves all of them.
    plain = NoDrafts() if drafter.needs == "none" else drafter.with_topology(chain(1))
    return SHARED["prefill"](target, plain, state, chunk)


class SharedPrograms(Programs):
    """The engine's programs, compiled once per shape for all engines of the test run."""

    def __init__(self, target, drafters, state, spec, *, turns=False, first=None, prefix=None):
        buckets, plan = spec.buckets, StepPlan(spec.rule, spec.steps, spec.logprobs)
        Runner.__init__(self, target, drafters, buckets, {})
        self.programs, self._urgent = CompiledPrograms({}), ()
        self.any_cut = True
        self._joint = (spec.joint, buckets[0]) if spec.joint > 1 else None
        self.programs.update({"admit": SHARED["admit"], "retire": SHARED["retire"]})
        self.programs.update({("dispatch", topology): _jitted(plan) for topology in drafters})
        self.programs.update({("catch up", size): _caught_up(size) for size in self.drafter.replay_sizes(buckets)})
        self.programs.update({(name, size): _prefill for size in buckets for name in ("prefill", "prefill jointly")})
        self._copies, self._blocks = {}, spec.capacity // prefix[0].size if prefix else 0
        if prefix:
            for name, (function, donated) in {"save": (save_blocks, 0), "load": (load_blocks, 1)}.items():
                self.programs[f"{name} prefix"] = jax.jit(partial(function, plan=prefix[0]), donate_argnums=donated)
        self.turns = turns and self.drafter.needs != "none"
        self.skipping = {arm for arm, one in drafters.items() if Sizes.of(target, one, state).anchors}


@pytest.fixture
def shared_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "Programs", SharedPrograms)


class Wheel(VerifyBudget):
    """Goes through prices, whatever happens: nothing is cut, by confidence, by time, everything."""

    def __init__(self):
        super().__init__(CONFIG["num_experts"], CONFIG["num_experts_per_tok"])
        self.calls, self.outcome_HMC = 0, np.zeros((2, 2, CONFIDENCE_STEPS))

    def prices(self, length: int, rows: int) -> dict[str, Any]:
        self.calls += 1
        some = {"tok_per_s": 1.0, "token_s": 0.1, "expert_s": 0.1, "depth_s": 0.1}
        changes = ({}, {"min_confidence": 0.3}, some, {"min_confidence": 0.999})[self.calls % 4]
        accept_MC = np.tile(np.linspace(0, 1, CONFIDENCE_STEPS, dtype=np.float32), (2, 1))
        values = {name: np.float32(value) for name, value in changes.items()}
        always = {"min_confidence": np.float32(0), "max_drafts": np.float32(length), "accept_MC": accept_MC}
        return super().prices(length, rows) | always | values

    def record(self, length: int, outcome: Outcome, outcome_HMC: np.ndarray) -> None:
        self.outcome_HMC += outcome_HMC


def layout_of(name: str, dtype: Any) -> Policy:
    """What a CPU takes, layers stacked or apart by plain XLA, or stacked ones by a GPU's kernels, interpreted."""
    if name == "interpret":
        return make_policy(dtype, depth="stacked", kernels="interpret")
    return policy_for(str(dtype), "cpu") if name == "native" else make_policy(dtype, depth=name)


def packed(params: Any, policy: Policy) -> Any:
    """Parameters that no file held, as the loader would have packed them."""

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        to = declared(path).packed(leaf, policy)
        return leaf if to is None else pack(leaf, lead=len(to.lead), axes=len(to.inner))

    return jax.tree_util.tree_map_with_path(one, params)


@dataclass
class Lab:
    """Models by kind, and engines over them.

    Attributes:
      target_dir, draft_dir: checkpoints.
      plain: outputs of plain decoding by settings, so that each is computed once.
    """

    target_dir: Path
    draft_dir: Path
    plain: dict = field(default_factory=dict)
    loaded: dict = field(default_factory=dict)

    def model(self, name: str, dtype: str = "float32", layout: str = "native") -> Model:
        key = (name, dtype, layout)
        if key not in self.loaded:
            self.loaded[key] = load_model(getattr(self, f"{name}_dir"), layout_of(layout, dtype))
        return self.loaded[key]

    def drafter(self, kind: str, topology: Topology, dtype: str = "float32", layout: str = "native") -> Drafter:
        if kind == "ngram":
            return Ngram(topology, 3, 1)
        if kind == "mtp":
            return self.prediction(topology, dtype, layout)
        model = self.model({"self": "target", "random": "draft"}[kind], dtype, layout)
        return SmallLm(model.params, model.net, topology)

    def prediction(self, topology: Topology, dtype: str, layout: str) -> MtpHeads:
        """A random layer of multi-token prediction, as if published with the target."""
        target = self.model("target", dtype, layout)
        net = Mtp(changed(target.net.arch, mtp=target.net.arch.layers[-1:]), target.net.policy)
        key = ("prediction", dtype, layout)
        if key not in self.loaded:
            params = jax.jit(net.clone(policy=make_policy(dtype)).initial)(jax.random.key(2))
            made = jax.tree.map(lambda x: x * (7.0 if x.ndim > 1 else 1.0), params)
            self.loaded[key] = packed(made, net.policy)
        return MtpHeads(self.loaded[key], target.params, net, target.net, topology)

    def engine(
        self,
        drafter: Drafter,
        *,
        dtype="float32",
        layout="native",
        block: int = 128,
        control=None,
        budget=None,
        **spec,
    ) -> Engine:
        model = self.model("target", dtype, layout)
        spec["rule"] = RULES[spec.get("rule", "match")]
        spec = EngineSpec(**{"rows": PLACES, "capacity": CAPACITY, "logprobs": 0, "buckets": (8, 32), **spec})
        made = engine_module.Programs
        engine_module.Programs = SharedPrograms
        try:
            engine = Engine(Target(model.params, model.net, block), drafter, spec, {EOS}, control, budget)
            engine.start()
            return engine
        finally:
            engine_module.Programs = made

    def run(self, drafter: Drafter, requests: list[Request], **spec) -> list[RequestOutput]:
        return generate(self.engine(drafter, **spec), requests)

    def reference(self, name: str, requests: list[Request], **spec) -> list[RequestOutput]:
        """Plain decoding's outputs of a named batch."""
        key = (name, tuple(sorted(spec.items())))
        if key not in self.plain:
            self.plain[key] = self.run(NoDrafts(), requests, **spec)
        return self.plain[key]


def generate(engine: Engine, requests: list[Request], steps: int | None = None) -> list[RequestOutput]:
    """Runs requests to their ends, at most ``steps`` verifications per dispatch."""
    depth, outputs = engine.depth, []
    for number, (prompt, params) in enumerate(requests):
        samples = new_samples(
            str(number), None, prompt, params, lambda p: IncrementalText(None, p),
            seeds=(0, number), capacity=engine.spec.capacity, draft_length=depth,
        )  # fmt: skip
        engine.add(samples)
        outputs.append(samples[0].output)
    while engine.busy:
        engine.step(steps)
    return outputs


def script(
    requests: list[Request],
    outputs: list[RequestOutput],
    topology: Topology,
    *,
    wrong: float,
    silent: float = 0.0,
    twins: bool = False,
) -> Scripted:
    """A drafter that knows the outputs, wrong at a share of the positions and silent at another."""
    rng = np.random.default_rng(7)
    truth_RS = np.zeros((PLACES * 6, CAPACITY), np.int32)
    key_RX = np.full((PLACES * 6, 2), 1, np.uint32)
    for number, (output, (prompt, params)) in enumerate(zip(outputs, requests, strict=True)):
        text = prompt + output.outputs[0].token_ids
        truth_RS[number, : len(text)] = text
        key_RX[number] = key_words(params.seed, 0, number, 0)
    wrong_RS, silent_RS = rng.random(truth_RS.shape) < wrong, rng.random(truth_RS.shape) < silent
    arrays = (jnp.asarray(x) for x in (key_RX, truth_RS, wrong_RS, silent_RS, np.bool_(twins)))
    return Scripted(*arrays, topology=topology)


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    """Token ids of every sample of every request."""
    return [[c.token_ids for c in output.outputs] for output in outputs]


@pytest.fixture(scope="session")
def lab(target_dir: Path, draft_dir: Path) -> Lab:
    return Lab(target_dir, draft_dir)


def mixed_requests(kind: str) -> list[Request]:
    """More requests than rows, of many lengths: ``cold`` all greedy, ``warm`` all sampled, ``mixed`` both."""
    rng = np.random.default_rng(3)
    shapes = [(1, 20), (5, 9), (40, 24), (9, 16), (17, 1), (30, 12), (3, 18), (33, 30)]
    styles = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.8, "top_k": 12, "min_p": 0.01}]
    requests = []
    for number, (length, most) in enumerate(shapes):
        warm = kind == "warm" or (kind == "mixed" and number % 2 == 1)
        style = {"temperature": 0.8, **styles[number % len(styles)]} if warm else {"temperature": 0.0}
        params = SamplingParams(**style, max_tokens=most, seed=number, ignore_eos=number % 3 != 1)
        requests.append((rng.integers(1, VOCAB, length).tolist(), params))
    return requests
