"""A head for one target as a training run: what is trained, on which loss, how it is measured and saved."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoint.heads.directory import save_head
from jaxspec.checkpoint.heads.layers import layers_config
from jaxspec.checkpoint.load.model import Model
from jaxspec.checkpoint.load.save import save_model
from jaxspec.checkpoint.text.codec import TOKENIZER_FILES
from jaxspec.errors import ConfigError
from jaxspec.models.block_head import BlockHead, BlockSpec
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.mtp import Mtp
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import Transformer
from jaxspec.models.vocab import coverage
from jaxspec.shapes import Array, Params
from jaxspec.sharding import hosts
from jaxspec.sharding.placement import settle
from jaxspec.train.advice import epochs
from jaxspec.train.batch import Batch, rows_over
from jaxspec.train.data import Corpus, batches
from jaxspec.train.evaluate import best_metric, make_evaluation
from jaxspec.train.head_loss import head_loss
from jaxspec.train.head_nets import token_map_of
from jaxspec.train.head_start import InitialHead, head_policy, init_params, make_initial_head
from jaxspec.train.loop import TrainRun
from jaxspec.train.objective import HeadObjective, Net, cut_product, without_product
from jaxspec.train.optimizer import optimizer_of, schedule_of
from jaxspec.train.packed_rows import RowSource
from jaxspec.train.settings import LossSettings, RunSettings
from jaxspec.train.teacher import run_teacher


def make_run(
    settings: RunSettings,
    target: Model,
    corpus: Corpus,
    mesh: Mesh | None = None,
    *,
    remat: bool = False,
    parts: int = 1,
    outside: bool = False,
) -> TrainRun:
    """Returns the run that trains a head; what binds it to its directory is left to the caller.

    The corpus's tokens choose the draft vocabulary, its held-out documents measure acceptance; ``remat`` and ``parts``
    are those of ``MemoryPlan``. ``outside`` says that the target was loaded without its layers, as batches bring what
    it computed.

    Raises:
      ConfigError, CheckpointError: the settings are not usable for this target.
    """
    t = settings.train
    schedule: Any = schedule_of(settings.optimizer, t.steps)
    head, objective = make_objective(settings, target, corpus, mesh, remat=remat, outside=outside)
    evaluate = None if outside else make_evaluation(settings, head, target, corpus, mesh)

    def progress(done: int) -> dict[str, float]:
        return {"learning_rate": float(schedule(done - 1)), "epoch": round(epochs(settings, corpus, done), 4)}

    return TrainRun(
        directory=Path(settings.out),
        steps=t.steps,
        init=lambda: head.init(jax.random.key(settings.seed, impl="rbg")),  # a third of the time to compile
        optimizer=optimizer_of(settings.optimizer, t.steps, vocabulary=t.vocabulary),
        loss_fn=loss_fn,
        batches=batches_from(settings, corpus.rows, mesh),
        frozen=objective,
        evaluate=evaluate,
        best=None if evaluate is None else best_metric(settings.evaluation),
        save=partial(save, head, target.config, target.directory),
        progress=progress,
        save_every=t.save_every,
        log_every=t.log_every,
        evaluate_every=settings.evaluation.every,
        seed=settings.seed,
        logging=settings.logging,
        mesh=mesh,
        rows_over=rows_over(mesh, t),
        parts=parts,
    )


def make_objective(
    settings: RunSettings,
    target: Model,
    corpus: Corpus,
    mesh: Mesh | None = None,
    *,
    remat: bool = False,
    outside: bool = False,
) -> tuple[InitialHead, HeadObjective]:
    """Returns a head before its first update, and what its loss reads; arguments and errors as of ``make_run``."""
    count_V = corpus.token_counts(target.net.arch.vocab_size)
    head = make_initial_head(settings.head, target, head_policy(settings.train), count_V, mesh)
    _check_loss(settings.loss, head.net)
    map_W = token_map_of(settings.loss, head.net, target.net.arch.vocab_size)
    ids_W = head.ids_W if map_W is None else map_W
    ids = None if ids_W is None else settle(jnp.asarray(ids_W), mesh)
    few = settings.loss.draft_only or map_W is not None
    product, net, params = cut_product(target.params, ids if few else None), target.net, target.params
    if outside:
        net, params = net.clone(arch=replace(net.arch, layers=())), without_product(params, product)
    return head, HeadObjective(
        params, ids, net, head.net, settings.loss, remat=remat, product=product, vocabulary=settings.train.vocabulary
    )


def batches_from(settings: RunSettings, rows: RowSource, mesh: Mesh | None) -> Callable[[int], Iterator[Batch]]:
    """Returns what makes this process's batches from an update on; they must split evenly over processes."""
    t = settings.train
    part, parts = (0, 1) if mesh is None else hosts.local_share(mesh, *rows_over(mesh, t))
    return lambda first: batches(
        rows, seed=settings.seed, size=t.rows, accumulation=t.accumulation, first=first, part=part, parts=parts
    )


def loss_fn(params: Params, frozen: HeadObjective, batch: Batch, key: Array) -> tuple[Array, dict[str, Array]]:
    """Computes the loss of a batch, whose teacher runs first."""
    teacher = run_teacher(frozen.target, frozen.target_params, batch, frozen.reads, frozen.routing)
    return head_loss(frozen, params, teacher, batch, key)


def head_facts(objective: HeadObjective, corpus: Corpus) -> dict[str, str]:
    """Returns a head's sizes, in words."""
    shapes = jax.eval_shape(lambda: init_params(objective.net, jax.random.key(0)))
    facts = {"parameters": f"{sum(x.size for x in jax.tree.leaves(shapes)):,}"}
    if (ids_W := objective.ids_W) is not None:
        share = coverage(corpus.token_counts(objective.target.arch.vocab_size), np.asarray(ids_W))
        facts["draft vocabulary"] = f"{len(ids_W)} tokens, {share:.1%} of the text"
    return facts


def _check_loss(loss: LossSettings, net: Net) -> None:
    """Refuses losses over what a head does not predict."""
    if isinstance(net, BlockHead) and loss.noise:
        raise ConfigError(f"loss: noise = {loss.noise}, but heads that draft blocks are trained without; set it to 0")
    b, parts = loss.block, net.spec if isinstance(net, BlockHead) else BlockSpec
    for weight, name, there in (
        (b.confidence, "confidence", parts.confidence != "none"), (b.selector, "selector", parts.selector_rank > 0),
    ):  # fmt: skip
        if weight and not there:
            raise ConfigError(f"loss.block: {name} = {weight}, but the head has no {name}; set it to 0")
    spec = net.spec if isinstance(net, DraftHead) else None
    if loss.feature and (spec is None or spec.join != "product"):
        raise ConfigError(
            f'loss: feature = {loss.feature} is for heads of kind "eagle", which predict features; set it to 0'
        )
    if loss.routing and (spec is None or not spec.routing):
        raise ConfigError(
            f"loss: routing = {loss.routing}, but the head predicts no routing; give head.routing or set it to 0"
        )


def save(head: InitialHead, config: Mapping[str, Any], target: Path, params: Params, directory: Path) -> None:
    """Writes parameters as a head's directory, or a draft model's with the tokenizer of the target's directory."""
    net = head.net
    if not isinstance(net, Transformer):
        published = config if isinstance(net, Mtp) else None
        save_head(Head(net, jax.device_get(params), head.ids_W, published), directory)
        return
    dtype = np.dtype(net.policy.storage.param)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    own = head.config or {"architectures": ["LlamaForCausalLM"], **layers_config(net.arch)}
    save_model(directory, jax.device_get(params), net.arch, {**own, **ends, "torch_dtype": str(dtype)}, dtype)
    for name in (*TOKENIZER_FILES, "special_tokens_map.json"):
        if (target / name).exists():
            shutil.copyfile(target / name, directory / name)
