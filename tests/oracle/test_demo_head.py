"""The head that comes with the demo pair is right often enough, and the text is the target's."""

import pytest

from jaxspec.bench.excerpts import HELD_OUT, choose, load_excerpts
from jaxspec.control.decision import Fixed
from jaxspec.draft.lazy_observer import RING_SIZE, LazyObserver
from jaxspec.pytree import replace
from jaxspec.serve import engine as engine_module
from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.topology import PLAIN, chain


@pytest.mark.served
@pytest.mark.slow
def test_five_drafts_commit_more_than_three_tokens_per_pass_of_held_out_code():
    head = {"method": "shared_expert", "model": str(demo_model_dir("head")), "num_speculative_tokens": 5}
    # Shapes as in the README's first program, so that both tests compile the same ones.
    llm, texts = LLM(demo_model_dir("target"), speculative_config=head, max_model_len=512), []
    prompts = [excerpt.prompt for excerpt in choose(load_excerpts(HELD_OUT), 8)]
    for speculative in (False, None):
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, speculative=speculative)
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]
    assert llm.engine.metrics.speculation.mean_acceptance_length > 3.2


@pytest.mark.served
@pytest.mark.slow
def test_a_head_that_missed_most_of_a_text_is_nearly_as_often_right(monkeypatch: pytest.MonkeyPatch):
    """Texts that were decoded plainly for 264 tokens: it is shown the latest ones, over what other texts left.

    This small head hardly uses older text, so acceptance does not tell whether it was shown any;
    ``test_what_was_kept_is_observed_later`` of the drafters' contract holds what it knows then, exactly.
    """
    monkeypatch.setattr(engine_module, "RING_SIZE", 512)
    config = {
        "method": "shared_expert",
        "model": str(demo_model_dir("head")),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 8, 0]],
    }
    llm = LLM(demo_model_dir("target"), speculative_config=config, max_model_len=512, max_num_seqs=8)
    engine, prompts = llm.engine, [excerpt.prompt for excerpt in choose(load_excerpts(HELD_OUT), 8)]
    whole, turn = engine.drafter, 0
    assert isinstance(whole, LazyObserver)
    per_step: dict[int, float] = {}
    for room in (512, RING_SIZE, 0):
        engine.drafter = replace(whole, ring_size=room)
        tokens = steps = 0
        for temperature in (0.0, 0.5, 0.7, 1.0):
            turn += 1  # each text runs in a row in which another one ran before
            order = [(place + turn) % 8 for place in range(8)]
            params = [
                SamplingParams(temperature=temperature, max_tokens=328, ignore_eos=True, seed=place) for place in order
            ]
            outputs = [llm.submit(prompts[place], one) for place, one in zip(order, params, strict=True)]
            engine.control = Fixed(PLAIN)
            while len(outputs[0].outputs[0].token_ids) < 264:
                engine.step()
            before = sum(output.metrics.num_steps for output in outputs)
            made = sum(len(output.outputs[0].token_ids) for output in outputs)
            engine.control = Fixed(chain(3))
            while engine.busy:
                engine.step()
            steps += sum(output.metrics.num_steps for output in outputs) - before
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs) - made
        per_step[room] = tokens / steps
    assert per_step[RING_SIZE] > 0.97 * per_step[512], per_step
    assert per_step[0] != per_step[512], "what is shown changes what is drafted"
