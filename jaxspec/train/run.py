"""A whole training run from its settings: data, target, head, loop."""

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from jax.sharding import Mesh

from jaxspec.checkpoint.files.fingerprint import fingerprint
from jaxspec.checkpoint.load.places import unflatten
from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import ConfigError
from jaxspec.shapes import Params
from jaxspec.sharding import hosts
from jaxspec.sharding.mesh import make_mesh
from jaxspec.train import loop
from jaxspec.train.advice import facts_of, warnings_of, with_steps
from jaxspec.train.data import Corpus, load_corpus
from jaxspec.train.features import FeatureRows, Teacher, is_complete
from jaxspec.train.fit import fit
from jaxspec.train.head_run import batches_from, head_facts, make_objective, make_run
from jaxspec.train.memory import GB
from jaxspec.train.objective import HeadObjective
from jaxspec.train.provenance import provenance_of
from jaxspec.train.run_log import Notify, Watcher
from jaxspec.train.settings import RunSettings, identity
from jaxspec.train.target import TargetHeaders, read_headers


@dataclass(frozen=True)
class TrainResult:
    """The end of a run: parameters after the last update, and what was trained."""

    params: Params
    run: loop.TrainRun


def train(
    settings: RunSettings,
    target: Path,
    watch: Watcher = lambda entry: None,
    notify: Notify = lambda facts: None,
    seconds_at_peak: float = 0.0,
) -> TrainResult:
    """Trains a head, going on where an earlier run of the same settings stopped.

    Where several processes are connected (``jaxspec.sharding.hosts``), all of them call this with the same settings
    and see the same directory; process 0 writes what is not split over them.

    Args:
      settings: everything about it.
      target: model directory.
      watch: receives every logged entry, first ``{"step": first}``.
      notify: receives what is known before training begins: documents, tokens, sizes.
      seconds_at_peak: see ``TrainRun``.

    Raises:
      ConfigError, CheckpointError: settings, data or target are not usable.
      JaxspecError: the disk is full, a loss is not finite, or another process was lost; what went before is kept.
    """
    with hosts.explain_lost_process():
        settings, headers, corpus, mesh = _prepare(settings, target, notify)
        for warning in warnings_of(settings, corpus):
            notify({"warning": warning})
        outside = _needs_no_layers(settings, corpus)
        read = headers.outside if outside else headers
        plan = fit(settings, read, mesh, notify)
        notify({"loading": f"the target{', without its layers' * outside}, {plan.needed['target'] / GB:.1f} GB"})
        digest = corpus.digest()
        run = make_run(settings, read.load(mesh), corpus, mesh, remat=plan.remat, parts=plan.parts, outside=outside)
        notify(head_facts(run.frozen, corpus))
        run = replace(
            run,
            identity={"settings": identity(settings), "data": digest, "target": fingerprint(target)},
            provenance=provenance_of(settings, target, digest),
            seconds_at_peak=seconds_at_peak,
        )
        if settings.features.cache is not None:
            rows = _cached(settings, headers, corpus, mesh, run.frozen, plan.rows, notify)
            run = replace(run, batches=batches_from(settings, rows, mesh))
        return TrainResult(loop.train(run, watch), run)


def write_features(settings: RunSettings, target: Path, notify: Notify = lambda facts: None) -> None:
    """Writes the missing part of a run's feature cache, and trains nothing; arguments and errors as of ``train``."""
    if settings.features.cache is None:
        raise ConfigError("features: cache names no directory to write to; give --set features.cache=DIR")
    settings, headers, corpus, mesh = _prepare(settings, target, notify)
    plan = fit(settings, headers, mesh, notify, trained=False)
    _, objective = make_objective(settings, headers.load(mesh), corpus, mesh)
    _cached(settings, headers, corpus, mesh, objective, plan.rows, notify)


def check(settings: RunSettings, target: Path, notify: Notify) -> None:
    """Reads the data and the target's headers, and says what a run would take; arguments and errors as of ``train``."""
    settings, headers, corpus, mesh = _prepare(settings, target, notify)
    for warning in warnings_of(settings, corpus):
        notify({"warning": warning})
    fit(settings, headers, mesh, notify)


def _prepare(
    settings: RunSettings, target: Path, notify: Notify
) -> tuple[RunSettings, TargetHeaders, Corpus, Mesh | None]:
    """Reads the target's headers and the data, counts the updates, and makes the mesh."""
    sizes = msgspec.structs.asdict(settings.mesh)
    mesh = make_mesh(sizes) if max(sizes.values()) > 1 or hosts.is_multiprocess() else None
    headers = read_headers(settings, target, mesh)
    arch, digest = headers.arch, fingerprint(target)
    corpus = load_corpus(settings.data, Text.load(target), arch.vocab_size, alone=arch.one_text_only, target=digest)
    settings = with_steps(settings, corpus)
    notify(corpus.counts | facts_of(settings, corpus))
    asked = {name: value for name, value in msgspec.to_builtins(settings).items() if name != "out"}
    hosts.check_same({"settings": asked, "data": corpus.digest(), "target": digest})
    return settings, headers, corpus, mesh


def _needs_no_layers(settings: RunSettings, corpus: Corpus) -> bool:
    """Whether all features are there and no acceptance is measured, so that the target's layers never run."""
    cache = settings.features.cache
    return cache is not None and not corpus.held_out and is_complete(Path(cache), corpus.rows)


def _cached(
    settings: RunSettings,
    target: TargetHeaders,
    corpus: Corpus,
    mesh: Mesh | None,
    objective: HeadObjective,
    rows: int,
    notify: Notify,
) -> FeatureRows:
    """Returns the corpus's rows with their features; missing ones are computed, ``rows`` at a time."""
    o, dtype = objective, settings.features.dtype
    net, params = o.target, o.target_params
    if net.arch != target.arch:  # only shapes matter, of a network that reads parameters as files have them
        net = target.plan.net.clone(policy=target.plan.net.policy.update(kernels="xla"))
        params: Params = {"params": unflatten(target.plan.leaves)}
    teacher = Teacher(net, params, o.reads, o.routing, dtype, rows, mesh, o.reads_last)
    identity = {
        "target": fingerprint(target.plan.directory),
        "target_dtype": settings.train.target_dtype,
        "data": corpus.digest(),
    }
    return FeatureRows(corpus.rows, teacher, Path(settings.features.cache or ""), identity, notify)
