"""Prompts in chunks: the same bits however they are cut and whoever shares a chunk; rows that decode go on between."""

import jax
import numpy as np
import pytest

from jaxspec.decode.chunks import UnreadPrompt
from jaxspec.protocol import NoDrafts
from jaxspec.serve.background import CompiledPrograms
from jaxspec.serve.compiled import reads_alike
from jaxspec.serve.request import SamplingParams
from jaxspec.serve.sample import new_samples
from jaxspec.serve.text import IncrementalText
from jaxspec.topology import chain
from tests.oracle.conftest import VOCAB, Lab, generate, mixed_requests, tokens_of

LENGTHS = (50, 21, 9)
CUTS = {"at once": ((64,), 0), "in pieces": ((8,), 0), "in sizes": ((4, 16), 0), "jointly": ((8, 16), 3)}


def caches(lab: Lab, model: tuple[str, str], sizes: tuple[int, ...], joint: int) -> list[list[np.ndarray]]:
    """Reads prompts into three rows, the last of them into the first row; returns what was written for each."""
    engine = lab.engine(NoDrafts(), dtype=model[0], layout=model[1], buckets=sizes, joint=joint)
    rng = np.random.default_rng(1)
    rows = list(zip((2, 1, 0), LENGTHS, strict=True))
    unread = [UnreadPrompt(row, rng.integers(1, VOCAB, n).astype(np.int32)) for row, n in rows]
    state, programs = engine.state, engine.programs
    while left := [prompt for prompt in unread if prompt.left]:
        state = programs.read(state, left)
    assert state.length_B.tolist() == [n - 1 for n in reversed(LENGTHS)]
    layers = [np.asarray(pages).reshape(-1, 3, *pages.shape[1:]) for pages in jax.tree.leaves(state.layers)]
    return [[x[:, row, :, : n - 1] for x in layers] for row, n in rows]


@pytest.mark.served
@pytest.mark.parametrize(
    "model", [("bfloat16", "stacked"), ("bfloat16", "native"), ("float32", "native")], ids="-".join
)
def test_bits_do_not_depend_on_the_cut_or_on_who_shares_a_chunk(lab: Lab, model: tuple[str, str]):
    if not reads_alike(lab.model("target", *model).net.policy.compute):
        pytest.skip("kernels in C cannot be compiled here, and XLA's float32 products do depend on it")
    wanted = caches(lab, model, *CUTS["at once"])
    for name, cut in CUTS.items():
        for row, (one, other) in enumerate(zip(wanted, caches(lab, model, *cut), strict=True)):
            for x, y in zip(one, other, strict=True):
                assert np.abs(x.astype(np.float32)).max() > 0
                np.testing.assert_array_equal(x, y, err_msg=f"{name}, prompt {row}")


def test_chunks_depend_on_the_length_alone_where_sizes_round_differently(lab: Lab):
    assert not reads_alike(lab.model("target", "float32", "stacked").net.policy.compute)
    engine = lab.engine(NoDrafts(), buckets=(8, 32), joint=3)
    engine.programs.programs = CompiledPrograms({})  # nothing is ready
    for any_cut in (True, False):
        engine.programs.any_cut = any_cut
        assert engine.programs.sizes == (8, 32)
        engine.programs.programs["prefill", 8] = print
        assert engine.programs.sizes == ((8,) if any_cut else (8, 32))
        del engine.programs.programs["prefill", 8]
    assert not engine.programs.can_read([UnreadPrompt(0, np.arange(9))])


@pytest.mark.parametrize("kind", ["ngram", "self"])
def test_prompts_that_are_read_jointly_give_the_same_text(lab: Lab, kind: str):
    requests = mixed_requests("mixed")
    engine = lab.engine(lab.drafter(kind, chain(3)), joint=2)
    jointly = []
    read = engine.programs.programs["prefill jointly", 8]
    engine.programs.programs["prefill jointly", 8] = lambda *args: (
        jointly.append(args[3].row_R.tolist()),
        read(*args),
    )[1]
    assert tokens_of(generate(engine, requests, steps=2)) == tokens_of(lab.reference("mixed", requests))
    assert jointly
    assert all(len(set(rows)) == 2 for rows in jointly)


def test_a_long_prompt_stalls_no_row_for_more_than_a_chunk(lab: Lab):
    rng = np.random.default_rng(2)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    requests = [(rng.integers(1, VOCAB, n).tolist(), params) for n in (5, 55, 3)]
    engine = lab.engine(NoDrafts(), buckets=(8,))
    first, *later = (
        new_samples(
            str(number), None, prompt, params, lambda p: IncrementalText(None, p),
            seeds=(0, number), capacity=engine.spec.capacity, draft_length=0,
        )
        for number, (prompt, params) in enumerate(requests)
    )  # fmt: skip
    engine.add(first)
    engine.step(1)
    done, read, calls = first[0].completion.token_ids, engine.programs.read, []

    def reading(state, prompts):
        calls.append(len(done))
        return read(state, prompts)

    engine.programs.read = reading
    for samples in later:
        engine.add(samples)
    before = len(done)
    while len(calls) < 8:  # seven chunks of 8 for the long prompt, one for the short one
        engine.step()
        most = 2 if engine.scheduler.reading else engine.spec.steps
        assert before < len(done) <= before + most, "some steps after each chunk, and few"
        before = len(done)
    assert calls == sorted(set(calls)), "no two chunks in a row"
    while engine.busy:
        engine.step()
    outputs = [samples[0].output for samples in (first, *later)]
    assert tokens_of(outputs) == tokens_of(generate(lab.engine(NoDrafts()), requests))
