"""Greedy decoding by vLLM with an EAGLE-3 head, step by step; run by an interpreter that has it.

usage: vllm_drafts.py TARGET HEAD ASKED.json FOUND.json

Asked are ``drafts`` per step and ``requests`` of ``prompt`` and ``max_tokens``. Found are the ``tokens`` of each
request, how many it had after each step (``ends``), and the counters of the whole run.
"""

import json
import os
import sys

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def main(target, head, asked, found):
    from vllm import LLM, SamplingParams

    with open(asked) as file:
        asked = json.load(file)
    llm = LLM(
        model=target, dtype="float32", max_model_len=256, max_num_seqs=len(asked["requests"]), seed=0,
        skip_tokenizer_init=True, enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False,
        speculative_config={"method": "eagle3", "model": head, "num_speculative_tokens": asked["drafts"]},
    )  # fmt: skip
    engine = llm.llm_engine
    for number, request in enumerate(asked["requests"]):
        params = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
        engine.add_request(str(number), {"prompt_token_ids": request["prompt"]}, params)
    tokens, ends = {}, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            number = int(output.request_id)
            tokens[number] = list(output.outputs[0].token_ids)
            if len(tokens[number]) > ends.setdefault(number, [0])[-1]:
                ends[number].append(len(tokens[number]))
    counts = {
        metric.name.removeprefix("vllm:spec_decode_"): metric.value if hasattr(metric, "value") else metric.values
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_")
    }
    order = range(len(asked["requests"]))
    with open(found, "w") as file:
        json.dump({"tokens": [tokens[i] for i in order], "ends": [ends[i][1:] for i in order], "counts": counts}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
