"""Heads, random ones and one that has learned its target: the text stays, training and serving count alike."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.checkpoint.heads.directory import save_head
from jaxspec.checkpoint.heads.layers import routed_ffn
from jaxspec.decode.state import Target
from jaxspec.draft.early_exit import first_layers
from jaxspec.draft.head_drafter import head_drafter
from jaxspec.draft.hybrid import Hybrid
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.small_lm import SmallLm
from jaxspec.errors import ConfigError
from jaxspec.models.block_head import BlockHead, BlockSpec
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.medusa import Medusa, MedusaSpec
from jaxspec.models.trained_head import Head
from jaxspec.protocol import CaptureSpec, Drafter
from jaxspec.pytree import replace
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.topology import AnyTopology, DynamicTree, chain, tree
from jaxspec.train.batch import Batch
from jaxspec.train.evaluate import AcceptanceEvaluator, EvalSpec
from jaxspec.train.head_loss import head_loss
from jaxspec.train.objective import HeadObjective
from jaxspec.train.packed_rows import PackedRows
from jaxspec.train.settings import LossSettings
from jaxspec.train.sources import Document
from jaxspec.train.teacher import run_teacher
from tests.oracle.conftest import CONFIG, VOCAB, Lab, Wheel, generate, mixed_requests, packed, tokens_of

DIM, KNOWN = CONFIG["hidden_size"], np.arange(0, VOCAB, dtype=np.int32)[4:]
LAYER = {k: v for k, v in CONFIG.items() if "expert" not in k and "moe" not in k and k != "architectures"}
OWN = arch_of(LAYER | {"model_type": "llama", "num_hidden_layers": 1})
NEAR = replace(OWN.layers[0], attention=replace(OWN.layers[0].attention, window=8))
ROUTED = replace(OWN, layers=(replace(OWN.layers[0], ffn=routed_ffn(4, 2, 24, 8)),) * 2)
NETS = {
    "eagle": HeadSpec(OWN, DIM, last=True, join="product", join_bias=True),
    "peagle": HeadSpec(OWN, DIM, CaptureSpec(taps=(0, 1, 2)), draft_vocab=len(KNOWN), mask_token=1),
    "medusa": MedusaSpec(4, 1, DIM, VOCAB),
    "dflash": BlockSpec(OWN, DIM, CaptureSpec(taps=(1, 2)), 6, mask_token=1),
    "dflash2": BlockSpec(
        OWN, DIM, CaptureSpec(taps=(1, 2)), 6, 1, conv_taps=2, conv_group=4, selector_rank=4, selector_top_k=8
    ),
    "dspark": BlockSpec(
        replace(OWN, layers=(NEAR, *OWN.layers)), DIM, CaptureSpec(taps=(0, 2)), 4, 1, True, causal=(True, False),
        draft_vocab=len(KNOWN), markov_rank=4, confidence="markov",
    ),
    "shared_expert": HeadSpec(
        OWN, DIM, CaptureSpec((2,), (0, 1)), fc_norm=True, draft_vocab=len(KNOWN), routing=(0, 1), experts=4
    ),
    "eagle3 with experts": HeadSpec(ROUTED, DIM, CaptureSpec(taps=(0, 1, 2)), draft_vocab=len(KNOWN)),
    "dflash with experts": BlockSpec(ROUTED, DIM, CaptureSpec(taps=(1, 2)), 6, mask_token=1),
}  # fmt: skip
LEARNT, UPDATES = "shared_expert", 100


def texts(lab: Lab) -> list[list[int]]:
    """What the target writes, prompts included."""
    found = []
    for kind in ("cold", "mixed"):
        requests = mixed_requests(kind)
        written = tokens_of(lab.reference(kind, requests))
        found += [prompt + own[0] for (prompt, _), own in zip(requests, written, strict=True)]
    return [text for text in found if len(text) > 8]


def head_of(lab: Lab, kind: str) -> Head:
    """A head; the one that learns has seen the very texts that it will draft."""
    if kind not in lab.loaded:
        spec, policy = NETS[kind], lab.model("target", layout="stacked").net.policy
        kinds = {MedusaSpec: Medusa, BlockSpec: BlockHead, HeadSpec: DraftHead}
        net = kinds[type(spec)](spec, policy)
        head = Head(net, jax.jit(net.initial)(jax.random.key(1)), KNOWN if spec.draft_vocab else None)
        head = train(lab, net, head) if kind == LEARNT and isinstance(net, DraftHead) else head
        serving, lab.loaded[f"{kind} in training"] = lab.model("target").net.policy, head
        lab.loaded[kind] = Head(net.clone(policy=serving), packed(head.params, serving), head.ids_W)
    return lab.loaded[kind]


def train(lab: Lab, net: DraftHead, head: Head) -> Head:
    """Learns the texts by heart."""
    target = lab.model("target", layout="stacked")
    loss_settings = LossSettings(rounds=3, routing=0.1)
    objective = HeadObjective(target.params, jnp.asarray(head.ids_W), target.net, net, loss_settings)
    documents = [Document(np.array(t, np.int32), np.ones(len(t), bool), "") for t in texts(lab)]
    rows = PackedRows(documents, 72, 8)
    batch = Batch(*(jnp.stack([jnp.asarray(rows[n][key]) for n in range(len(rows))]) for key in rows[0]))
    optimizer = optax.adam(0.01)

    @jax.jit
    def learn(objective, params, batch):
        teacher = run_teacher(target.net, objective.target_params, batch, net.spec.reads, net.spec.routing)

        def update(_, carry):
            params, state = carry
            grads = jax.grad(lambda p: head_loss(objective, p, teacher, batch, jax.random.key(0))[0])(params)
            with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
                changes, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, changes), state

        return jax.lax.fori_loop(0, UPDATES, update, (params, optimizer.init(params)))[0]

    return Head(net, learn(objective, head.params, batch), head.ids_W)


def drafter_of(lab: Lab, kind: str, topology: AnyTopology) -> Drafter:
    target = lab.model("target")
    base = (target.net, target.params)
    if kind == "early_exit":
        net, params = first_layers(*base, 1)
        return SmallLm(params, net, topology)
    if kind == "hybrid":
        return Hybrid(Ngram(topology, 3, 1), drafter_of(lab, LEARNT, topology))
    return head_drafter(head_of(lab, kind), base, topology, 128)


CASES = [(kind, chain(4)) for kind in (*NETS, "early_exit", "hybrid")] + [(LEARNT, tree((2, 2)))]
CASES += [("dflash", DynamicTree(top_k=7, steps=5, nodes=8)), ("dspark", tree((2, 2))), ("dflash2", tree((2, 1)))]
CASES += [("eagle3 with experts", tree((2, 2))), ("dflash with experts", DynamicTree(top_k=7, steps=5, nodes=8))]
QUICK = ("medusa", LEARNT, "hybrid")  # the others draft in the same loop
ALSO_QUICK = (("dspark", chain(4)), ("eagle3 with experts", tree((2, 2))), ("dflash with experts", chain(4)))


@pytest.mark.parametrize(
    ("kind", "topology"),
    [
        pytest.param(k, t, id=f"{k}-{t.name}", marks=[] if k in QUICK or (k, t) in ALSO_QUICK else [pytest.mark.slow])
        for k, t in CASES
    ],
)
def test_heads_change_nothing_but_the_speed(lab: Lab, kind: str, topology: AnyTopology):
    requests = mixed_requests("mixed")
    outputs = lab.run(drafter_of(lab, kind, topology), requests)
    assert tokens_of(outputs) == tokens_of(lab.reference("mixed", requests))
    steps = sum(o.metrics.num_steps for o in outputs)
    length = 1 + sum(o.metrics.num_accepted_tokens for o in outputs) / steps
    assert length > (1.6 if kind in (LEARNT, "hybrid") else 1.0)


def test_cut_drafts_change_nothing_but_the_speed(lab: Lab):
    requests, budget = mixed_requests("mixed"), Wheel()
    engine = lab.engine(drafter_of(lab, LEARNT, chain(4)), budget=budget)
    assert tokens_of(generate(engine, requests, steps=2)) == tokens_of(lab.reference("mixed", requests))
    assert engine.metrics.cut_drafts > 0
    tried, accepted = budget.outcome_HMC.sum(axis=(1, 2))
    assert tried > accepted > 0


def test_evaluation_counts_what_serving_counts(lab: Lab, tmp_path: Path):
    head = head_of(lab, LEARNT)
    save_head(lab.loaded[f"{LEARNT} in training"], tmp_path / "head")
    llm = LLM(
        lab.target_dir, dtype="float32", max_num_seqs=2, max_model_len=96, prefill_buckets=(64,),
        speculative_config={"method": "shared_expert", "model": str(tmp_path / "head"), "num_speculative_tokens": 4},
    )  # fmt: skip
    prompts = [prompt for prompt, _ in mixed_requests("cold")][:3]
    served, tokens, passes = [], 0, 0
    for prompt in prompts:
        grown = [1]
        for output in llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)):
            grown.append(len(output.outputs[0].token_ids))
        counts = np.diff([0, *grown[1:]])
        served.append(tuple((counts[:-1] - 1).tolist()))
        tokens, passes = tokens + 24, passes + output.metrics.num_steps
    target = lab.model("target")
    evaluator = AcceptanceEvaluator(Target(target.params, target.net), prompts, EvalSpec(tokens=24, rows=2))
    found = evaluator.measure(head_drafter(head, (target.net, target.params), chain(4), 128))
    assert found.counts == tuple(served)
    flat = [n for counts in served for n in counts]
    assert found.length == pytest.approx(tokens / passes)
    assert found.verifications == passes
    assert found.survival == pytest.approx([np.mean(np.array(flat) >= k) for k in range(1, 5)])
    metrics = {(m.name, m.labels.get("drafts")): m.value for m in llm.get_metrics()}
    experts = [metrics["jaxspec:predicted_experts", str(k)] for k in range(1, 5)]
    assert 2 <= experts[0] <= experts[1] <= experts[2] <= experts[3] <= 4


@pytest.mark.parametrize(
    "kind", [LEARNT, *(pytest.param(kind, marks=pytest.mark.slow) for kind in NETS if kind != LEARNT)]
)
def test_quantized_heads_change_nothing_but_the_speed(lab: Lab, tmp_path: Path, kind: str):
    head = head_of(lab, kind)
    save_head(lab.loaded[f"{kind} in training"], tmp_path)
    config = {"method": head.kind, "model": str(tmp_path), "num_speculative_tokens": 4, "quantization": "int8"}
    llm = LLM(
        lab.target_dir, dtype="float32", max_num_seqs=2, max_model_len=96, prefill_buckets=(64,),
        speculative_config=config,
    )  # fmt: skip
    requests = mixed_requests("mixed")
    outputs = llm.generate(*map(list, zip(*requests, strict=True)), use_tqdm=False)
    assert tokens_of(outputs) == tokens_of(lab.reference("mixed", requests))
    steps = sum(o.metrics.num_steps for o in outputs)
    assert 1 + sum(o.metrics.num_accepted_tokens for o in outputs) / steps > (1.6 if kind == LEARNT else 1.0)


def test_a_running_training_hands_its_head_to_a_live_engine(lab: Lab):
    head, requests = head_of(lab, LEARNT), mixed_requests("cold")
    target = lab.model("target")
    plain = lab.loaded[f"{LEARNT} in training"]
    random = jax.jit(plain.net.initial)(jax.random.key(9))
    fresh = Head(head.net, packed(random, head.net.policy), head.ids_W)
    engine = lab.engine(head_drafter(fresh, (target.net, target.params), chain(4), 128))

    def run() -> tuple[list, float]:
        outputs = generate(engine, requests)
        steps = sum(o.metrics.num_steps for o in outputs)
        return tokens_of(outputs), 1 + sum(o.metrics.num_accepted_tokens for o in outputs) / steps

    before, low = run()
    compiled = engine.programs.programs["dispatch", chain(4)]._cache_size()
    engine.programs.update_params(plain.params)
    after, high = run()
    assert after == before == tokens_of(lab.reference("cold", requests))
    assert low < 1.3
    assert high > 1.6
    assert engine.programs.programs["dispatch", chain(4)]._cache_size() == compiled, "nothing was compiled for it"


def test_parameters_that_do_not_fit_are_refused(lab: Lab):
    drafter = drafter_of(lab, "hybrid", chain(2))
    params = jax.tree.map(lambda x: x[:1], head_of(lab, LEARNT).params)
    with pytest.raises(ConfigError, match="must have the structure and shapes of those in use; these differ: "):
        drafter.update_params(params)
    with pytest.raises(ConfigError, match="Ngram has no parameters"):
        Ngram(chain(2)).update_params(params)
