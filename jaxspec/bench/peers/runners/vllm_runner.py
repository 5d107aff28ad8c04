"""Runs vLLM for a benchmark: plain, n-gram lookup, draft model."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import wire

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


class Vllm:
    """An engine of vLLM in this process, stepped by hand so that its decode loop can be timed."""

    def __init__(self, wanted: dict[str, Any]):
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(core))
        self._vllm: Any = import_module("vllm")
        self.version = self._vllm.__version__
        self._llm = self._vllm.LLM(
            model=wanted["model"],
            dtype=wanted["dtype"],
            max_model_len=wanted["capacity"],
            max_num_seqs=wanted["rows"],
            speculative_config=self._speculation(wanted),
            enable_prefix_caching=False,
            disable_log_stats=False,
            seed=0,
        )
        self._rows, self._number = wanted["rows"], 0

    @staticmethod
    def _speculation(wanted: dict[str, Any]) -> dict[str, Any] | None:
        if wanted["mode"] == "plain":
            return None
        config = {"method": wanted["mode"], "num_speculative_tokens": wanted["k"]}
        if wanted["mode"] == "ngram":
            return config | {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        return config | {"model": wanted["draft"]}

    def _accepted(self) -> int:
        """Drafts accepted since the start; their counter's name ends in _total in some versions."""
        metrics = [m for m in self._llm.get_metrics() if m.name.removesuffix("_total") == ACCEPTED]
        return int(sum(m.value for m in metrics))

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Steps the engine until all are done."""
        engine, before, clock = self._llm.llm_engine, self._accepted(), wire.Clock()
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        names = [str(self._number + i) for i in range(len(prompts))]
        self._number += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        token_ids: dict[str, list[int]] = {}
        done: set[str] = set()
        while engine.has_unfinished_requests():
            for output in engine.step():
                token_ids[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    done.add(output.request_id)
            # Busy rows: those that have a token and are not done. Fewer than all, or a first token, is no decoding.
            if len(token_ids) - len(done) == min(self._rows, len(prompts)):
                clock.decoding(sum(map(len, token_ids.values())))
            else:
                clock.pause()
        total = sum(map(len, token_ids.values()))
        return wire.answer(clock, [token_ids[name] for name in names], total - (self._accepted() - before))

    def close(self) -> None:
        """Does nothing: the engine lives in this process."""


def preload(library: Path) -> None:
    """Starts this program anew with a library loaded before all others, unless it is or does not exist.

    On a CPU vLLM asks for Intel's OpenMP, which is installed with it: without, it says, speculation is far slower.
    """
    loaded = os.environ.get("LD_PRELOAD", "")
    if library.exists() and str(library) not in loaded:
        wanted = {**os.environ, "LD_PRELOAD": f"{loaded} {library}".strip()}
        os.execve(sys.executable, sys.orig_argv, wanted)


if __name__ == "__main__":
    preload(Path(sys.prefix) / "lib" / "libiomp5.so")
    wire.serve(Vllm)
