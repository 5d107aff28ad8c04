"""Keeps the head that drafts close to a policy that changes: a few updates on its text while the next is rolled out."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.heads.directory import load_head
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import make_policy
from jaxspec.serve.running_engine import RunningEngine
from jaxspec.shapes import Params
from jaxspec.train.batch import Batch
from jaxspec.train.head_run import loss_fn
from jaxspec.train.objective import HeadObjective
from jaxspec.train.optimizer import adamw
from jaxspec.train.policy.policy_loss import PolicyBatch
from jaxspec.train.policy.policy_settings import FreshHeadSettings
from jaxspec.train.update import TrainState, make_update


class FreshHead:
    """A head in training beside an engine that drafts with it.

    The engine's text does not depend on what drafts, so it does not matter when an update arrives.
    """

    def __init__(self, directory: Path, net: Transformer, settings: FreshHeadSettings, steps: int, micro_rows: int):
        """Loads the head; ``steps`` and ``micro_rows`` are those of the policy's training."""
        head = load_head(directory, net.arch, make_policy("float32"))
        self._head, self._net, self._settings, self._rows = head, net, settings, micro_rows
        self._ids = None if head.ids_W is None else jnp.asarray(head.ids_W)
        optimizer = adamw(settings.optimizer, steps * settings.updates)
        self._update = make_update(loss_fn, optimizer, seed=0)
        params = jax.tree.map(jnp.array, head.params)
        self._state = TrainState(params, optimizer.init(params), jnp.int32(0))
        self._pool, self._running = ThreadPoolExecutor(1), None

    _running: Future[float] | None

    def follow(self, batch: PolicyBatch, target: Params, engine: RunningEngine) -> None:
        """Begins to train on text of the policy, and hands the head to the engine once it is done."""
        self._running = self._pool.submit(self._train, batch, target, engine)

    def wait(self) -> dict[str, float]:
        """Waits for what was begun; returns its last loss, nothing where nothing was."""
        running, self._running = self._running, None
        return {} if running is None else {"head_loss": running.result()}

    def close(self) -> None:
        """Ends its thread."""
        self._pool.shutdown()

    def _train(self, batch: PolicyBatch, target: Params, engine: RunningEngine) -> float:
        o = HeadObjective(target, self._ids, self._net, self._head.net, self._settings.loss)
        loss, rows = float("nan"), len(batch.token_BT)
        for number in range(self._settings.updates):
            # As many rows as the policy's own updates look at together, others each time.
            chosen = np.arange(number * self._rows, (number + 1) * self._rows) % rows
            part = Batch(batch.token_BT, batch.segment_BT, batch.position_BT, batch.loss_BT)
            part = jax.tree.map(lambda x: x[None, chosen], part)  # noqa: B023
            self._state, metrics = self._update(self._state, o, part)
            loss = float(metrics["loss"])
        engine.update_draft(self._state.params)
        return loss
