"""The prefix cache: the same text and the same accepted drafts as without it, for every kind of cache and drafter."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.decode.state import Target
from jaxspec.draft.block_drafter import BlockDrafter
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.small_lm import SmallLm
from jaxspec.protocol import NoDrafts
from jaxspec.pytree import pytree, replace
from jaxspec.serve.engine import Engine
from jaxspec.serve.engine_spec import EngineSpec
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import RequestOutput, SamplingParams
from jaxspec.topology import chain
from jaxspec.verify.rules import RULES
from tests.contract import tiny_drafters
from tests.oracle.conftest import EOS, VOCAB, Lab, Request, generate, tokens_of
from tests.oracle.test_families_lossless import CACHED, MECHANISMS, Family

KEPT = 400
Rounds = list[list[Request]]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def rounds(lab: Lab) -> Rounds:
    """Three turns of some conversations: shared beginnings, several samples, greedy and sampled."""
    rng, engine = np.random.default_rng(5), lab.engine(NoDrafts())
    common = rng.integers(1, VOCAB, 41).tolist()
    greedy, warm = {"temperature": 0.0, "max_tokens": 11}, {"temperature": 0.8, "max_tokens": 9, "n": 2}
    first = [(41, 3, greedy), (41, 9, warm), (24, 1, greedy), (33, 0, warm), (0, 40, greedy), (8, 1, greedy)]
    turns = [
        [
            (
                common[:cut] + rng.integers(1, VOCAB, own).tolist(),
                SamplingParams(**style, seed=i, ignore_eos=i % 2 == 0),
            )
            for i, (cut, own, style) in enumerate(first)
        ]
    ]
    for _ in range(2):
        outputs = generate(engine, turns[-1])
        said = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
        later = [(text + rng.integers(1, VOCAB, 4).tolist())[:84] for text in said]
        turns.append([(text, params) for text, (_, params) in zip(later, turns[-1], strict=True)])
    return turns


def run(engine: Engine, rounds: Rounds) -> list[RequestOutput]:
    return [output for requests in rounds for output in generate(engine, requests)]


@pytest.mark.parametrize(
    ("kind", "spec"), [("self", {"page": 16, "block": 16}), ("mtp", {}), slow("mtp", {"layout": "stacked"})]
)
def test_text_and_acceptance_are_those_without_it(lab: Lab, rounds: Rounds, kind: str, spec: dict[str, Any]):
    drafter = lab.drafter(kind, chain(3), layout=spec.get("layout", "native"))
    plain, cached = (lab.engine(drafter, prefix_tokens=tokens, **spec) for tokens in (0, KEPT))
    wanted, got = run(plain, rounds), run(cached, rounds)
    assert tokens_of(got) == tokens_of(wanted)
    assert [o.metrics for o in got] == [o.metrics for o in wanted]
    assert [o.num_cached_tokens for o in got[:6]] == [0, 40, 16, 24, 0, 0], "the first one's, and its tokens'"
    assert all(o.num_cached_tokens for o in got[6:]), "later turns go on with answers"
    assert cached.metrics.prefix_hits > 0.7 * cached.metrics.prefix_queries
    assert cached.pool is None or cached.pool.free == cached.pool.total


def test_acceptance_needs_the_drafter_s_part_of_a_prefix(lab: Lab, rounds: Rounds, monkeypatch: pytest.MonkeyPatch):
    """A drafter that knows the target by heart is wrong where it has not read what the target has."""
    monkeypatch.setattr(SmallLm, "with_caches", lambda self, state, caches: state)
    engine = lab.engine(lab.drafter("self", chain(3)), prefix_tokens=KEPT)
    got = generate(engine, rounds[0])
    right = lab.run(lab.drafter("self", chain(3)), rounds[0])
    assert tokens_of(got) == tokens_of(right), "the text is the target's all the same"
    accepted, wanted = (sum(o.metrics.num_accepted_tokens for o in outputs) for outputs in (got, right))
    assert accepted < wanted


BLOCK_HEADS = [
    ("dflash", {"num_speculative_tokens": 4}), ("dspark", {"speculative_token_tree": [2, 2]}),
    slow("dflash", {"speculative_num_steps": 3, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}),
    slow("dflash2", {"num_speculative_tokens": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "shape"), BLOCK_HEADS, ids=lambda value: value if isinstance(value, str) else "")
def test_heads_that_draft_blocks(rounds: Rounds, method: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """What they keep of a position is of the target's streams there alone, in windows, too."""
    net, params = tiny_drafters.model()
    drafter = tiny_drafters.drafter_of(method, shape)
    requests = [[(text, replace(params, max_tokens=40)) for text, params in turn] for turn in rounds[:2]]

    def engine(tokens: int) -> Engine:
        spec = EngineSpec(rows=3, capacity=128, logprobs=0, buckets=(8, 32), rule=RULES["match"], prefix_tokens=tokens)
        made = Engine(Target(params, net, tiny_drafters.BLOCK), drafter, spec, {EOS})
        made.start()
        return made

    wanted, got = run(engine(0), requests), run(engine(KEPT), requests)
    assert tokens_of(got) == tokens_of(wanted)
    assert [o.metrics for o in got] == [o.metrics for o in wanted]
    assert sum(o.metrics.num_accepted_tokens for o in got)
    assert got[1].num_cached_tokens == 32
    assert all(o.num_cached_tokens for o in got[6:8])
    monkeypatch.setattr(BlockDrafter, "with_caches", lambda self, state, caches: state)
    forgetful = run(engine(KEPT), requests)
    assert tokens_of(forgetful) == tokens_of(wanted)
    assert [o.metrics for o in forgetful] != [o.metrics for o in wanted]


@pytest.mark.parametrize("name", [n if n == "gpt_oss" else slow(n) for n in (*MECHANISMS, *CACHED)])
def test_every_kind_of_cache(name: str):
    """Windows, sinks, latents, indexers, compressed entries; the draft model has the target's kind, too."""
    family = Family(name)
    rng, vocab = np.random.default_rng(5), family.model("target").net.arch.vocab_size
    common = rng.integers(1, vocab, 38).tolist()
    requests = [
        (common[:cut] + rng.integers(1, vocab, own).tolist(), SamplingParams(temperature=t, max_tokens=10, seed=0))
        for cut, own, t in [(38, 3, 0.0), (38, 9, 0.8), (20, 9, 0.0), (38, 5, 0.0), (33, 4, 0.8)]
    ]
    drafter = family.drafter("mixed", chain(4))
    plain, cached = (family.engine(drafter, prefix_tokens=tokens) for tokens in (0, KEPT))
    wanted, got = generate(plain, requests), generate(cached, requests)
    assert tokens_of(got) == tokens_of(wanted)
    assert [o.metrics for o in got] == [o.metrics for o in wanted]
    assert got[0].metrics.num_accepted_tokens > 0
    assert [output.num_cached_tokens for output in got] == [0, 32, 16, 32, 32]


def test_an_engine_whose_chunk_sizes_round_differently(target_dir: Path):
    """Blocks are those of the same chunks, and the bits those of reading all of a prompt."""
    settings: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 2, "kernels": "xla", "dtype": "float32"}
    llm = LLM(target_dir, **settings, prefill_buckets=(16, 64), prefix_cache_tokens=320, enable_prefix_caching=True)
    llm.finish_compiling()
    assert not llm.engine.programs.any_cut
    rng = np.random.default_rng(7)
    common, params = rng.integers(1, VOCAB, 90).tolist(), SamplingParams(max_tokens=6, logprobs=1, seed=3)
    prompts: list[Any] = [common + rng.integers(1, VOCAB, own).tolist() for own in (3, 20, 40)]

    def ask(prompt: Any) -> tuple[Any, int | None]:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        return [(c.token_ids, c.logprobs) for c in output.outputs], output.num_cached_tokens

    cold = []
    for prompt in prompts:
        assert llm.reset_prefix_cache()
        text, cached = ask(prompt)
        assert cached == 0
        cold.append(text)
    warm = [ask(prompt) for prompt in prompts]
    assert [text for text, _ in warm] == cold
    assert [cached for _, cached in warm] == [64, 64, 128], "whole chunks of 64; the last prompt was read before"
    assert ask({"prompt_token_ids": prompts[0], "cache_salt": "other"}) == (cold[0], 0)
    assert ask(prompts[0]) == (cold[0], 80), "its own second chunk, too"
    counts = {metric.name: metric for metric in llm.get_metrics()}
    assert counts["vllm:prefix_cache_hits_total"].value == 2 * 64 + 128 + 80
    assert counts["vllm:prefix_cache_queries_total"].value == 2 * sum(map(len, prompts)) + 2 * len(prompts[0])
    about = {"enable_prefix_caching": "True", "block_size": "16", "num_blocks": "20"}
    assert counts["vllm:cache_config_info"].labels == about


def test_where_no_prefix_can_be_kept_the_engine_says_why(lab: Lab):
    @pytree
    class Silent(Ngram):
        prefix_refusal = "nobody has said"

    engine = lab.engine(Silent(chain(2)), prefix_tokens=KEPT)
    assert engine.prefix is None
    assert engine.metrics.cache_config == {"enable_prefix_caching": "False", "reason": "nobody has said"}
