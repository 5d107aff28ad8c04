"""A whole training run from its settings: data, target, head, loop."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import msgspec
from jax.sharding import Mesh

from jaxspec.checkpoint.files.fingerprint import fingerprint
from jaxspec.checkpoint.load.model import read_config
from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.shapes import Params
from jaxspec.sharding import hosts
from jaxspec.sharding.mesh import make_mesh
from jaxspec.train import head_run, loop
from jaxspec.train.advice import epochs, facts_of, warnings_of
from jaxspec.train.data import Corpus, batches, load_corpus
from jaxspec.train.features import FeatureRows, Teacher, Tell
from jaxspec.train.fit import fit
from jaxspec.train.memory import GB
from jaxspec.train.metrics import Entry
from jaxspec.train.optimizer import adamw, schedule_of
from jaxspec.train.provenance import provenance_of
from jaxspec.train.settings import RunSettings, identity


@dataclass(frozen=True)
class Trained:
    """What a run gave.

    Attributes:
      params: after the last update.
      run: the head that they belong to.
      directory: holds ``best/``, ``last/`` and ``metrics.jsonl``.
    """

    params: Params
    run: head_run.HeadRun
    directory: Path


def train(
    settings: RunSettings,
    target: Path,
    watch: Callable[[Entry], None] = lambda entry: None,
    tell: Tell = lambda facts: None,
) -> Trained:
    """Trains a head, going on where an earlier run of the same settings stopped.

    Where several processes have met (``jaxspec.sharding.hosts``), all of them call this with the same settings and see
    the same directory; process 0 writes what is not split over them.

    Args:
      settings: everything about it.
      target: model directory.
      watch: receives every logged entry, first ``{"step": first}``.
      tell: receives what is known before training begins: documents, tokens, sizes.

    Raises:
      ConfigError, CheckpointError: settings, data or target are not usable.
      JaxspecError: the disk is full, a loss is not finite, or another process was lost; what went before is kept.
    """
    with hosts.explain_lost_process():
        return _train(settings, target, watch, tell)


def _train(settings: RunSettings, target: Path, watch: Callable[[Entry], None], tell: Tell) -> Trained:
    corpus, mesh = _prepare(settings, target, tell)
    for words in warnings_of(settings, corpus):
        tell({"warning": words})
    plan = fit(settings, target, mesh, tell, evaluated=bool(corpus.held_out))
    tell({"loading": f"the target, {plan.needed['target'] / GB:.1f} GB"})
    found = head_run.build(settings, target, corpus, mesh, remat=plan.remat)
    tell(found.facts)
    rows = corpus.rows
    if settings.features.cache is not None:
        rows = _cached(settings, target, corpus, mesh, found, plan.rows, tell)
    t, seed = settings.train, settings.seed
    part, parts = (0, 1) if mesh is None else hosts.local_share(mesh, "data")
    spec = loop.LoopSpec(
        t.steps, Path(settings.out), t.save_every, t.log_every, settings.evaluation.every, seed,
        best=None if found.evaluate is None else head_run.metric_of(settings),
        identity={"settings": identity(settings), "data": corpus.digest(), "target": fingerprint(target)},
        tensorboard=settings.logging.tensorboard, wandb=settings.logging.wandb, mesh=mesh, parts=plan.parts,
    )  # fmt: skip
    task = loop.Task(
        params=found.init(jax.random.key(seed, impl="rbg")),  # a third of the time to compile
        optimizer=adamw(settings.optimizer, t.steps),
        loss_fn=found.loss_fn,
        batches=lambda first: batches(
            rows, seed=seed, size=t.rows, accumulation=t.accumulation, first=first, part=part, parts=parts
        ),
        frozen=found.frozen,
        evaluate=found.evaluate,
        save=found.save,
        learning_rate=schedule_of(settings.optimizer, t.steps),
        epoch=lambda step: round(epochs(settings, corpus, step), 4),
        provenance=provenance_of(settings, target, corpus.digest()),
    )  # fmt: skip
    return Trained(loop.run(spec, task, watch), found, spec.directory)


def write_features(settings: RunSettings, target: Path, tell: Tell = lambda facts: None) -> None:
    """Writes the feature cache of a run, as far as it is not there, and trains nothing; arguments as of ``train``.

    Raises:
      ConfigError, CheckpointError: settings, data or target are not usable, or the cache is of something else.
      JaxspecError: the features do not fit on the disk, or it cannot be written.
    """
    if settings.features.cache is None:
        raise ConfigError("features: cache names no directory to write to; give --set features.cache=DIR")
    corpus, mesh = _prepare(settings, target, tell)
    plan = fit(settings, target, mesh, tell, evaluated=False, trained=False)
    found = head_run.build(settings, target, corpus, mesh, evaluated=False)
    _cached(settings, target, corpus, mesh, found, plan.rows, tell)


def _prepare(settings: RunSettings, target: Path, tell: Tell) -> tuple[Corpus, Mesh | None]:
    """The data, and the devices."""
    arch = arch_of(read_config(target))
    corpus = load_corpus(
        settings.data, Text.load(target), arch.vocab_size, alone=arch.one_text_only, target=fingerprint(target)
    )
    tell(corpus.counts | facts_of(settings, corpus))
    asked = {name: value for name, value in msgspec.to_builtins(settings).items() if name != "out"}
    hosts.check_same({"settings": asked, "data": corpus.digest(), "target": fingerprint(target)})
    sizes = {name: getattr(settings.mesh, name) for name in settings.mesh.__struct_fields__}
    return corpus, make_mesh(sizes) if max(sizes.values()) > 1 or hosts.is_multiprocess() else None


def _cached(
    settings: RunSettings,
    target: Path,
    corpus: Corpus,
    mesh: Mesh | None,
    found: head_run.HeadRun,
    together: int,
    tell: Tell,
) -> FeatureRows:
    """The rows with their features, which are computed where they are not there yet."""
    course, kept = found.frozen, settings.features.dtype
    teacher = Teacher(course.target, course.base, found.reads, found.routing, kept, together, mesh)
    identity = {"target": fingerprint(target), "target_dtype": settings.train.target_dtype, "data": corpus.digest()}
    return FeatureRows(corpus.rows, teacher, Path(settings.features.cache or ""), identity, tell)
