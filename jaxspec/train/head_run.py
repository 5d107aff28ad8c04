"""A head for one target: what is trained, on which loss, how it is measured and saved."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoint.heads.directory import save_head
from jaxspec.checkpoint.load.model import Model, load_model
from jaxspec.checkpoint.load.save import save_model
from jaxspec.checkpoint.text.codec import TOKENIZER_FILES
from jaxspec.decode.state import Target
from jaxspec.draft.heads import head_drafter
from jaxspec.draft.small_lm import SmallLm
from jaxspec.errors import ConfigError
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.heads import Head
from jaxspec.models.medusa import Medusa
from jaxspec.models.transformer import Transformer
from jaxspec.models.vocab import coverage
from jaxspec.nn.policy import make_policy, policy_for
from jaxspec.protocol import NO_CAPTURE, CaptureSpec, Drafter
from jaxspec.shapes import Array, Params
from jaxspec.sharding.placement import settle
from jaxspec.topology import chain
from jaxspec.train.data import Corpus, prompts
from jaxspec.train.evaluate import Examiner, Trial, figures
from jaxspec.train.head_loss import Course, head_loss
from jaxspec.train.head_nets import Net
from jaxspec.train.head_start import Start, initial, start_of
from jaxspec.train.settings import RunSettings
from jaxspec.train.teacher import Batch, teach

BLOCK, TOGETHER = 128, 8


@dataclass(frozen=True)
class HeadRun:
    """What the training loop needs of a head.

    Attributes:
      init: a key to initial parameters.
      loss_fn: (params, frozen, batch, key) to (loss, metrics).
      frozen: what the loss reads besides, an argument of the compiled update.
      evaluate: params to held-out acceptance; None without held-out documents.
      save: writes params as a head's directory.
      drafter: params and a number of drafts per step to the drafter that serves.
      reads: what the head reads of the target.
      routing: expert layers whose choices it is trained on.
      facts: sizes, in words.
    """

    init: Callable[[Array], Params]
    loss_fn: Callable[[Params, Any, Batch, Array], tuple[Array, dict[str, Array]]]
    frozen: Course
    evaluate: Callable[[Params], Mapping[str, float]] | None
    save: Callable[[Params, Path], None]
    drafter: Callable[[Params, int], Drafter]
    reads: CaptureSpec
    routing: tuple[int, ...]
    facts: Mapping[str, str]


def build(
    settings: RunSettings,
    directory: Path,
    corpus: Corpus,
    mesh: Mesh | None = None,
    *,
    evaluated: bool = True,
    remat: bool = False,
) -> HeadRun:
    """Loads the target and makes the head's network.

    Args:
      settings: of the run.
      directory: the target's.
      corpus: whose tokens choose the draft vocabulary, and whose held-out documents measure acceptance.
      mesh: devices that the target is split over.
      evaluated: whether acceptance is measured.
      remat: whether each round is computed again for its gradient.

    Raises:
      ConfigError, CheckpointError: the target or the settings are not usable.
    """
    kind = jnp.dtype(settings.train.target_dtype)
    model = load_model(directory, make_policy(kind), mesh=mesh)
    arch, head = model.net.arch, settings.head
    policy = make_policy(settings.train.compute_dtype, param=jnp.dtype(settings.train.param_dtype))
    count_V = corpus.token_counts(arch.vocab_size)
    start = start_of(head, model, policy, count_V)
    net, ids_W = start.net, start.ids_W
    _check_loss(settings, net)
    ids = None if ids_W is None else settle(jnp.asarray(ids_W), mesh)
    course = Course(model.params, ids, model.net, net, settings.loss, remat=remat)
    reads = net.spec.reads if isinstance(net, DraftHead) else NO_CAPTURE
    routing = net.spec.routing if isinstance(net, DraftHead) else ()
    known = {}
    if ids_W is not None:
        known["draft vocabulary"] = f"{len(ids_W)} tokens, {coverage(count_V, ids_W):.1%} of the text"
    count = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: initial(net, jax.random.key(0)))))
    return HeadRun(
        init=start.init,
        loss_fn=_loss(reads, routing),
        frozen=course,
        evaluate=_evaluation(settings, net, ids_W, model, corpus, mesh) if evaluated else None,
        save=_saving(start, model),
        drafter=lambda params, length: _drafter(net, params, ids_W, model, length),
        reads=reads,
        routing=routing,
        facts={"parameters": f"{count:,}"} | known,
    )


def _check_loss(settings: RunSettings, net: Net) -> None:
    """Refuses losses over what a head does not predict."""
    o, spec = settings.loss, net.spec if isinstance(net, DraftHead) else None
    if o.feature and (spec is None or spec.join != "product"):
        raise ConfigError(
            f'loss: feature = {o.feature} is for heads of kind "eagle", which predict features; set it to 0'
        )
    if o.routing and (spec is None or not spec.routing):
        raise ConfigError(
            f"loss: routing = {o.routing}, but the head predicts no routing; give head.routing or set it to 0"
        )


def metric_of(settings: RunSettings) -> str:
    """The figure that the best head is kept by."""
    e = settings.evaluation
    return e.metric or f"{_name(e.lengths[0], e.temperatures[0])}/acceptance_length"


def _name(length: int, temperature: float) -> str:
    return f"k{length}/t{temperature:g}"


def _loss(reads: CaptureSpec, routing: tuple[int, ...]) -> Callable[..., Any]:
    def loss_fn(params: Params, frozen: Course, batch: Batch, key: Array) -> tuple[Array, dict[str, Array]]:
        lesson = teach(frozen.target, frozen.base, batch, reads, routing)
        return head_loss(frozen, params, lesson, batch, key)

    return loss_fn


def _drafter(net: Net, params: Params, ids_W: np.ndarray | None, model: Model, length: int) -> Drafter:
    if isinstance(net, Transformer):
        return SmallLm(params, net, chain(length), BLOCK)
    return head_drafter(Head(net, params, ids_W), (model.net, model.params), chain(length), BLOCK)


def _evaluation(
    settings: RunSettings, net: Net, ids_W: np.ndarray | None, model: Model, corpus: Corpus, mesh: Mesh | None
) -> Callable[[Params], dict[str, float]] | None:
    """Held-out acceptance by the serving step, chains of every length at every temperature."""
    e = settings.evaluation
    if not corpus.held_out:
        return None
    if isinstance(net, Medusa) and max(e.lengths) > net.spec.heads:
        raise ConfigError(
            f"evaluation: lengths {list(e.lengths)}, but {net.spec.heads} Medusa heads draft at most as many tokens; "
            "lower evaluation.lengths or raise head.heads"
        )
    asked = prompts(corpus.held_out, count=e.prompts, length=e.prompt_tokens)
    longest = max(len(p) for p in asked) + e.new_tokens
    if longest > model.net.arch.max_position:
        raise ConfigError(f"evaluation: {longest} tokens are more than the target's {model.net.arch.max_position}")
    # Rows of decoding are few: on a CPU that wants another layout of the experts than training does.
    wanted = policy_for(settings.train.target_dtype, jax.default_backend(), "xla")
    serving = load_model(model.directory, wanted) if wanted.layout.experts == "switched" and mesh is None else model
    target = Target(serving.params, serving.net, BLOCK)
    trials = [Trial(e.new_tokens, t, min(TOGETHER, len(asked)), seed=settings.seed) for t in e.temperatures]
    examiners = [Examiner(target, [p.tolist() for p in asked], trial) for trial in trials]

    def evaluate(params: Params) -> dict[str, float]:
        found: dict[str, float] = {}
        for examiner in examiners:
            for length in e.lengths:
                drafter = _drafter(net, params, ids_W, serving, length)
                found |= figures(_name(length, examiner.trial.temperature), examiner.measure(drafter))
        return found

    return evaluate


def _saving(start: Start, model: Model) -> Callable[[Params, Path], None]:
    net = start.net

    def save(params: Params, place: Path) -> None:
        if not isinstance(net, Transformer):
            save_head(Head(net, jax.device_get(params), start.ids_W), place)
            return
        ends = {key: model.config[key] for key in ("bos_token_id", "eos_token_id") if key in model.config}
        arch, dtype = net.arch, np.dtype(net.policy.storage.param)
        config = {**(start.config or {}), **ends, "torch_dtype": str(dtype)}
        save_model(place, jax.device_get(params), arch, config, dtype)
        for name in (*TOKENIZER_FILES, "special_tokens_map.json"):
            if (model.directory / name).exists():
                shutil.copyfile(model.directory / name, place / name)

    return save
