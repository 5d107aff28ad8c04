"""Runs transformers for a benchmark: plain, prompt lookup, assistant model."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import wire


class Transformers:
    """A model of transformers on one thread; rows start and end together, as ``generate`` has it."""

    def __init__(self, wanted: dict[str, Any]):
        self._torch: Any = import_module("torch")
        library: Any = import_module("transformers")
        self._torch.set_num_threads(1)
        self.version, self._rows = library.__version__, wanted["rows"]
        self._settings: dict[str, Any] = {}
        load = library.AutoModelForCausalLM.from_pretrained
        # The grouped products that are its default are several times slower on a CPU.
        options = {"dtype": getattr(self._torch, wanted["dtype"]), "experts_implementation": "eager"}
        options["trust_remote_code"] = False
        self._model = load(wanted["model"], **options).eval()
        if wanted["mode"] != "plain" and self._rows > 1:
            raise ValueError(f"assisted generation runs one prompt at a time, not {self._rows}")
        if wanted["mode"] == "lookup":
            self._settings = {"prompt_lookup_num_tokens": wanted["k"], "max_matching_ngram_size": 4}
        if wanted["mode"] == "assistant":
            draft = load(wanted["draft"], **options).eval()
            draft.generation_config.num_assistant_tokens = wanted["k"]
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0
            self._settings = {"assistant_model": draft}

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Generates batch by batch."""
        clock, token_ids, passes = wire.Clock(), [], 0
        for first in range(0, len(prompts), self._rows):
            ids, rounds = self._batch(prompts[first : first + self._rows], max_tokens, clock)
            token_ids += ids
            passes += rounds * len(ids)
        return wire.answer(clock, token_ids, passes)

    def _batch(self, prompts: Sequence[Sequence[int]], max_tokens: int, clock: wire.Clock) -> tuple[list[Any], int]:
        torch, longest, rounds = self._torch, max(map(len, prompts)), 0
        token = torch.zeros((len(prompts), longest), dtype=torch.long)
        seen = torch.zeros_like(token)
        for row, ids in enumerate(prompts):
            token[row, longest - len(ids) :] = torch.tensor(ids)
            seen[row, longest - len(ids) :] = 1
        clock.pause()

        def look(token: Any, scores: Any, **others: Any) -> Any:
            nonlocal rounds
            rounds += 1
            clock.decoding(token.shape[0] * (token.shape[1] - longest))
            return torch.zeros(token.shape[0], dtype=torch.bool)

        with torch.inference_mode():
            out = self._model.generate(
                token,
                attention_mask=seen,
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[look],
                **self._settings,
            )
        return out[:, longest : longest + max_tokens].tolist(), rounds

    def close(self) -> None:
        """Does nothing: nothing was started."""


if __name__ == "__main__":
    wire.serve(Transformers)
