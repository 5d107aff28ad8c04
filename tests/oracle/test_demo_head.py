"""The head that comes with the demo pair is right often enough, and the text is the target's."""

import pytest

from jaxspec.bench.workload import HELD_OUT, choose, load_excerpts
from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams


@pytest.mark.served
@pytest.mark.slow
def test_five_drafts_commit_two_and_a_half_tokens_per_pass_of_held_out_code():
    head = {"method": "shared_expert", "model": str(demo_model_dir("head")), "num_speculative_tokens": 5}
    # Shapes as in the README's first program, so that both tests compile the same ones.
    llm, texts = LLM(demo_model_dir("target"), speculative_config=head, max_model_len=512), []
    prompts = [excerpt.prompt for excerpt in choose(load_excerpts(HELD_OUT), 8)]
    for speculative in (False, None):
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, speculative=speculative)
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]
    assert llm.engine.metrics.speculation.mean_acceptance_length > 2.5
