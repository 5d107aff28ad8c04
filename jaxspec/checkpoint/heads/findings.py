"""What is looked for in the files of a draft head, and found."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from jaxspec.checkpoint.heads.directory import vocabulary
from jaxspec.checkpoint.heads.layers import layers_of
from jaxspec.errors import CheckpointError, ConfigError

Verdict = Literal["ok", "warning", "error"]
EXPORT = "jaxspec export --format eagle3 writes it for both"
SAME = "the same as jaxspec"


@dataclass(frozen=True)
class Finding:
    """The result of looking for one trap.

    Attributes:
      trap: ``T1`` to ``T10``, and from ``T11`` on of heads that draft blocks.
      title: what it is about.
      verdict: ``error`` if the head is wrong or ambiguous for everybody, ``warning`` if an engine would compute
        something else than it was made for.
      found: in these files.
      vllm, sglang: what those engines do with them.
      cure: what to do, empty if all is well.
    """

    trap: str
    title: str
    verdict: Verdict
    found: str
    vllm: str = SAME
    sglang: str = SAME
    cure: str = ""


ok, warning, error = (partial(Finding, "", "", verdict) for verdict in ("ok", "warning", "error"))


def look_at_vocabulary(head: Any) -> Finding:
    """Looks at the map from draft ids to the target's; the head has ``spec``, ``files`` and ``target``."""
    if head.spec is None:
        return ok("not looked at, the head does not fit its target")
    try:
        ids_W = vocabulary(head.files, head.spec)
    except CheckpointError as wrong:
        engines = "would take it as it is, and accept nothing"
        return error(str(wrong), engines, engines, "export the head again, or correct d2t")
    total = head.target.vocab_size
    return ok(f"all {total} tokens" if ids_W is None else f"{len(ids_W)} of {total} tokens, offsets, ascending")


def look_at_rotation(head: Any) -> Finding:
    """Looks at base and scaling of rotary positions; the head has ``kind``, ``layers`` and ``target``."""
    rope, of_target = _rope(head.layers), getattr(head.target.layers[0].attention, "rope", None)
    if head.kind == "medusa" or rope is None:
        return ok("none" if head.kind == "medusa" else "not read")
    words = f"base {rope.theta:g}, {rope.scaling.kind if rope.scaling else 'plain'}"
    if "rope_theta" not in head.layers and "rope_theta" not in (head.layers.get("rope_parameters") or {}):
        return warning(f"not stated, so {words}", cure="write down the base that it was trained with")
    if rope.scaling and rope.scaling.kind == "yarn" and not (of_target and of_target.scaling):
        words += ", the target plain; ModelOpt trains plainly and adds yarn when it exports"
        return warning(words, cure="if it was trained plainly, take rope_scaling out")
    if of_target is not None and of_target.scaling and rope.scaling is None:
        words += f", the target {of_target.scaling.kind}; it has not seen positions beyond its training's"
        return warning(words, cure="measure acceptance on long texts before serving them")
    return ok(words)


def _rope(layers: Mapping[str, Any]) -> Any:
    try:
        return getattr(layers_of(layers).layers[0].attention, "rope", None)
    except ConfigError:
        return None
