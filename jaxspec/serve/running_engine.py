"""What may be changed of an engine that runs: its weights, and whether and which requests go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from jaxspec.checkpoint.load.model import Model
from jaxspec.checkpoint.load.refill import refill
from jaxspec.draft import methods
from jaxspec.draft.early_exit import first_layers
from jaxspec.errors import ConfigError, RequestError
from jaxspec.perf.expert_placement import load_placement
from jaxspec.pytree import replace
from jaxspec.serve.driver import Driver
from jaxspec.serve.engine import Engine
from jaxspec.serve.metrics import Metric
from jaxspec.serve.prompts import Prompts
from jaxspec.serve.request import RequestOutput
from jaxspec.serve.worker import Job
from jaxspec.shapes import Params
from jaxspec.sharding.placement import mesh_of

PauseMode = Literal["abort", "wait", "keep"]
Weights = str | Path | Mapping[str, Any]
Requests = RequestOutput | str | Iterable[RequestOutput | str] | None


class RunningEngine:
    """An engine that can be steered while it runs.

    Attributes:
      model: the target.
      engine: serves it.
      driver: does what is asked for on the engine's thread.
      prompts: checks requests.
      loaded: the checked ``speculative_config``, the quantization and the file of the expert placement.
    """

    model: Model
    engine: Engine
    driver: Driver
    prompts: Prompts
    loaded: tuple[methods.SpeculativeConfig, str, str | Path | None]

    def abort(self, requests: Requests = None) -> None:
        """Ends requests as ``abort`` wherever they are, by default all of them; ``step`` does not return them.

        Args:
          requests: what ``submit`` or ``stream`` returned for them, or their ids; others are not minded.
        """
        self.driver.abort([requests] if isinstance(requests, RequestOutput | str) else requests)

    def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Lets nothing run until ``resume_generation``; requests that come meanwhile wait. Returns when all is still.

        Args:
          mode: what becomes of requests that are there: ``abort`` ends them with what they have, ``wait`` lets them end
            first, ``keep`` holds them, and they go on afterwards.
          clear_cache: whether prefixes that were read are forgotten, see ``reset_prefix_cache``.

        Raises:
          RequestError: there is no such mode.
        """
        pause, resume = self.pausing(mode), Job(self.driver.resume_now)
        try:
            self.driver.call(pause)
            if clear_cache:
                self.reset_prefix_cache()
        except BaseException:  # an interrupt, say
            self.driver.worker.put_now(resume)
            raise

    def resume_generation(self) -> None:
        """Lets run what was paused, and what came meanwhile."""
        self.driver.call(self.driver.resume_now)

    def is_paused(self) -> bool:
        """Whether generation is paused."""
        return self.driver.paused

    def update_draft(self, params: Params) -> None:
        """Replaces the parameters of the draft model or head, by those of a running training say; compiles nothing.

        Requests go on in place: their text does not depend on what drafts.

        Args:
          params: of the same structure and shapes as those in use; they are copied and cast to their dtypes.

        Raises:
          ConfigError: they do not fit, or the method of speculation has no parameters.
        """
        self.driver.call(partial(self.engine.update_draft, params))

    def reset_prefix_cache(self) -> bool:
        """Forgets all prefixes that were read; texts that are being read or run now are not kept later either.

        Other weights do it by themselves.
        """
        self.driver.call(self.engine.reset_prefix_cache)
        return True

    def update_target(self, weights: Weights) -> None:
        """Replaces the target's weights between two dispatches; compiles nothing.

        Where requests wait or run, pause first: they are refused otherwise. With ``pause_generation(mode="keep")`` they
        go on with the new weights: their prompts and texts so far are read again, as if they had been given. The
        control of ``"auto"`` keeps what it has measured.

        Args:
          weights: a directory, or a mapping of arrays by published (Hugging Face) name, which are laid out, quantized
            and packed as the model's own were; or a tree of parameters, in this model's layout (``llm.model.params``)
            or that of training (layers apart, plain weights). What is given is copied.

        Raises:
          ConfigError: requests run and nothing is paused, or the weights do not fit; all mismatches are named.
          CheckpointError: tensors are missing, not known, misshaped or not finite.
        """
        config, quantization, placement = self.loaded
        params = refill(
            self.model, weights, quantization=quantization, mesh=mesh_of(self.model.params),
            placement=None if placement is None else load_placement(Path(placement)),
        )  # fmt: skip
        own = None
        if config.method == "early_exit":
            own = first_layers(self.model.net, params, config.exit_layer)[1]
        self.driver.call(partial(self._swap, params, own))

    def get_metrics(self) -> list[Metric]:
        """Returns engine totals since the start, vLLM's names first."""
        return self.driver.call(self.engine.metrics.counters)

    def pausing(self, mode: str) -> Callable[[], Any]:
        """Returns what pauses, on the engine's thread."""
        if mode not in get_args(PauseMode):
            raise RequestError(f"pause_generation: mode must be one of {list(get_args(PauseMode))}, got {mode!r}")
        return partial(self.driver.pause_now, mode)

    def _swap(self, params: Params, own: Params | None) -> None:
        if self.engine.busy and not self.driver.paused:
            raise ConfigError(
                "update_target: requests wait or run; call pause_generation first, which ends them (abort, wait) or "
                "lets them go on with the new weights (keep)"
            )
        self.engine.update_target(params)
        if own is not None:
            self.engine.update_draft(own)
        self.model = replace(self.model, params=params)
        self.prompts.model = self.model
