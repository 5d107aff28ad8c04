"""Runs in a Python that has lm_eval, torch and jaxspec's dependencies: both models of one directory, as JSON."""

import json
import sys
from types import SimpleNamespace

from lm_eval.models.huggingface import HFLM

from jaxspec.bench.harness import JaxspecLM, register

PAIRS = [("the cat", " sat on a mat"), ("", "hello world"), ("one two", " three"), ("the cat sat on", " a mat: user")]
TEXTS = ["the cat sat on a mat", "hello world one two three " * 20]
GREEDY = [("the cat", {"until": ["zzz"], "max_gen_toks": 6, "do_sample": False}), ("hello", {"max_gen_toks": 4})]


def answers(model) -> dict:
    def asked(*args):
        return SimpleNamespace(args=args)

    return {
        "loglikelihood": model.loglikelihood([asked(*pair) for pair in PAIRS]),
        "rolling": model.loglikelihood_rolling([asked(text) for text in TEXTS]),
        "generated": model.generate_until([asked(text, dict(settings)) for text, settings in GREEDY]),
    }


if __name__ == "__main__":
    directory, length = sys.argv[1], int(sys.argv[2])
    register()
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
    ours = JaxspecLM(
        directory, speculative_config=ngram, batch_size=2, dtype="float32", max_model_len=length + 1,
        max_length=length, prefill_buckets=(16,),
    )  # fmt: skip
    theirs = HFLM(pretrained=directory, dtype="float32", batch_size=1, max_length=length, device="cpu")
    sys.stdout.write("\n" + json.dumps({"ours": answers(ours), "theirs": answers(theirs)}) + "\n")
