"""The figures that a run measures on held-out prompts: acceptance for each draft length and temperature."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jaxspec.checkpoint.load.model import Model, load_model
from jaxspec.decode.state import Target
from jaxspec.draft.head_drafter import head_drafter
from jaxspec.draft.small_lm import SmallLm
from jaxspec.errors import ConfigError
from jaxspec.models.medusa import Medusa
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import policy_for
from jaxspec.protocol import Drafter
from jaxspec.shapes import Params
from jaxspec.topology import chain
from jaxspec.train.data import Corpus, prompts
from jaxspec.train.evaluate import AcceptanceEvaluator, EvalSpec, acceptance_figures
from jaxspec.train.head_start import InitialHead
from jaxspec.train.settings import EvaluationSettings, RunSettings

BLOCK, ROWS = 128, 8


def best_metric(settings: EvaluationSettings) -> str:
    """Returns the figure that the best head is kept by."""
    return settings.metric or f"{_name(settings.lengths[0], settings.temperatures[0])}/acceptance_length"


def _name(length: int, temperature: float) -> str:
    return f"k{length}/t{temperature:g}"


def make_evaluation(
    settings: RunSettings, head: InitialHead, target: Model, corpus: Corpus, mesh: Mesh | None
) -> Callable[[Params], dict[str, float]] | None:
    """Returns a function that measures a head's parameters, with chains of every length at every temperature.

    None without held-out documents.

    Raises:
      ConfigError: no document has a prompt, or lengths and prompts exceed what head and target can do.
    """
    e, net = settings.evaluation, head.net
    if not corpus.held_out:
        return None
    if isinstance(net, Medusa) and max(e.lengths) > net.spec.heads:
        raise ConfigError(
            f"evaluation: lengths {list(e.lengths)}, but {net.spec.heads} Medusa heads draft at most as many tokens; "
            "lower evaluation.lengths or raise head.heads"
        )
    asked = prompts(corpus.held_out, count=e.prompts, length=e.prompt_tokens)
    longest = max(len(p) for p in asked) + e.new_tokens
    if longest > target.net.arch.max_position:
        raise ConfigError(f"evaluation: {longest} tokens are more than the target's {target.net.arch.max_position}")
    # Decoding has few rows: a CPU wants another layout of the experts for that than for training.
    policy = policy_for(settings.train.target_dtype, jax.default_backend(), "xla")
    serving = load_model(target.directory, policy) if policy.layout.experts == "switched" and mesh is None else target
    specs = [EvalSpec(e.new_tokens, t, min(ROWS, len(asked)), seed=settings.seed) for t in e.temperatures]
    serving_target = Target(serving.params, serving.net, BLOCK)
    evaluators = [AcceptanceEvaluator(serving_target, [p.tolist() for p in asked], spec) for spec in specs]

    def evaluate(params: Params) -> dict[str, float]:
        figures: dict[str, float] = {}
        for evaluator in evaluators:
            for length in e.lengths:
                drafter = _drafter(head, params, serving, length)
                name = _name(length, evaluator.spec.temperature)
                figures |= acceptance_figures(name, evaluator.measure(drafter))
        return figures

    return evaluate


def _drafter(head: InitialHead, params: Params, model: Model, length: int) -> Drafter:
    if isinstance(head.net, Transformer):
        return SmallLm(params, head.net, chain(length), BLOCK)
    return head_drafter(Head(head.net, params, head.ids_W), (model.net, model.params), chain(length), BLOCK)
