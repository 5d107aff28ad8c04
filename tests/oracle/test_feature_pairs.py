"""Features in pairs: any two together give the text of plain decoding on one device, as docs/features.md says."""

import re
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.serve.llm import LLM
from jaxspec.serve.request import CompletionOutput, SamplingParams
from jaxspec.serve.structured_outputs import StructuredOutputsParams
from tests.oracle.conftest import SharedPrograms

ENGINE: dict[str, dict[str, Any]] = {
    "tree": {"speculative_token_tree": [2, 2, 1]},
    "mesh": {"mesh": {"data": 2, "expert": 2}},
    "head": {"method": "shared_expert", "model": "demo"},
    "prefix cache": {"enable_prefix_caching": True},
}
REQUEST: dict[str, dict[str, Any]] = {
    "grammar": {
        "structured_outputs": StructuredOutputsParams(regex=r"(def|class) [a-z]{2,8}\(x\):\n    return x[a-z +]{3,30}")
    },
    "logprobs": {"logprobs": 2},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4},
    "n > 1": {"n": 2},
    "streaming": {},
}
QUICK = {("mesh", "grammar")}  # of the pairs that need an engine on a mesh, or one for two of its own features


def pair(first: str, second: str) -> Any:
    heavy = "mesh" in (first, second) or {first, second} <= ENGINE.keys()
    return pytest.param(first, second, marks=pytest.mark.slow if heavy and (first, second) not in QUICK else ())


PAIRS = [pair(*names) for names in combinations((*ENGINE, *REQUEST), 2)]
BEGIN = "import os\n" + "".join(
    f"\n\ndef {name}(a, b):\n    return a + b\n" for name in ("add", "join", "plus", "sum") * 4
)
PROMPTS = [BEGIN + "\n\ndef minus(a, b):\n    ", BEGIN + "\n\nclass Numbers:\n    ", "x = [1, 2"]
PAGE = Path(__file__).parents[2] / "docs" / "features.md"


@cache
def engine(*features: str) -> LLM:
    """The demo pair with features that an engine has; without a tree or a head it drafts by prompt lookup."""
    settings: dict[str, Any] = {"enable_prefix_caching": False}
    spec: dict[str, Any] = {}
    for name in set(features) & set(ENGINE):
        (spec if name in ("tree", "head") else settings).update(ENGINE[name])
    if features != ("plain",):
        spec = {"method": "ngram", "prompt_lookup_min": 1} | spec
        spec |= {} if "tree" in features else {"num_speculative_tokens": 3}
    with pytest.MonkeyPatch.context() as patch:
        if "mesh" not in features:
            patch.setattr("jaxspec.serve.engine.Programs", SharedPrograms)
        return LLM(
            "demo", dtype="float32", max_model_len=384, max_num_seqs=4, prefill_buckets=(64,), max_logprobs=2,
            speculative_config=spec or None, **settings,
        )  # fmt: skip


def params_of(names: tuple[str, ...]) -> list[SamplingParams]:
    own: dict[str, Any] = {}
    for name in names:
        own |= REQUEST.get(name, {})
    return [SamplingParams(temperature=heat, seed=n, max_tokens=24, **own) for n, heat in enumerate((0.0, 0.0, 0.9))]


def run(llm: LLM, names: tuple[str, ...]) -> list[CompletionOutput]:
    """Answers all prompts, twice where there is a prefix to hit."""
    params = params_of(names)
    for _ in range(1 + ("prefix cache" in names)):
        if "streaming" in names:
            outputs = [[*llm.stream(prompt, own)][-1] for prompt, own in zip(PROMPTS, params, strict=True)]
        else:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    if "prefix cache" in names:
        assert any(output.num_cached_tokens for output in outputs)
    drafts = any(output.metrics.num_draft_tokens for output in outputs)
    assert drafts != (llm is engine("plain")), "nothing switches drafting off"
    return [choice for output in outputs for choice in output.outputs]


@cache
def reference(*names: str) -> list[CompletionOutput]:
    return run(engine("plain"), names)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_features_together_give_the_text_of_plain_decoding(first: str, second: str):
    names = (first, second)
    got = run(engine(*(name for name in names if name in ENGINE)), names)
    wanted = reference(*(name for name in names if name in REQUEST and name != "streaming"))
    assert [c.token_ids for c in got] == [c.token_ids for c in wanted]
    assert [c.text for c in got] == [c.text for c in wanted]
    if "logprobs" in names:
        for ours, theirs in zip(got, wanted, strict=True):
            assert ours.logprobs
            assert theirs.logprobs
            for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert a.keys() == b.keys()
                np.testing.assert_allclose([a[k].logprob for k in a], [b[k].logprob for k in a], atol=1e-4)
    if "grammar" in names:
        pattern = REQUEST["grammar"]["structured_outputs"].regex
        assert all(re.fullmatch(pattern, c.text) for c in got if c.finish_reason == "stop")


def test_the_page_lists_every_pair():
    rows = [line.split("|")[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| **")]
    names = [row[0].strip(" *") for row in rows]
    assert names == [*ENGINE, *REQUEST]
    assert all(len(row) == len(names) + 1 for row in rows)
