"""The question that ``jaxspec plan`` is asked: its flags, and the model, machine and drafters that they name."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import tyro

from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.perf.cost import Mesh, ModelCost
    from jaxspec.perf.drafting import AcceptanceModel, DraftCost
    from jaxspec.perf.hardware import Hardware
    from jaxspec.perf.planner import Question

PADDING_ROWS = 1024  # by which vocabularies of one tokenizer may differ
AXIS = re.compile(r"(data|expert|tensor)=(\d+)")


@dataclass(frozen=True)
class PlanArgs:
    """Flags of ``jaxspec plan``.

    Attributes:
      model: A config.json, a model directory, demo, or a shipped config such as qwen3-30b-a3b. No weights are read.
      hardware: Device and how many, for example h200x8; or a record like those in configs/hardware. Not needed with
        --calibration.
      devices: Tabulate these numbers of devices of --hardware instead, each with --batch rows per device (8).
      mesh: Devices per axis, for example expert=4,tensor=2; by default experts (or a dense model's matrices) are
        spread over all devices.
      drafter: ngram, mtp, eagle, medusa, the config of a draft model, or the directory of a head; by default the best
        of those that the model allows.
      acceptance: Probability that a draft is accepted after accepted ones (0.7), or the share of passes in which each
        position is accepted, as engines report it (0.9,0.72,0.48); by default published figures of the drafter.
      overlap: Experts that four neighboring positions touch, as a share of the count under independent routing; by
        default the published range of 0.69 to 1.
      context: Tokens in the cache of each row.
      batch: Rows decoded together; by default 1 to 256.
      lengths: Drafts per step to choose from.
      trees: Choose among small trees, too, where the model can verify them.
      price_per_hour: Of all devices together, in any currency.
      calibration: What jaxspec calibrate wrote for this model; its machine is then planned for.
      dtype: Of weights that are not quantized.
      quantization: How weights lie in memory, as for generate.
      kv_cache_dtype: How keys and values are cached, as for generate.
      train: A training config, a name in configs/train or a TOML file: say memory and time of its updates instead.
      set: A value that differs from that config's, such as train.rows=16; may come again.
      rules: Hold the usual rules of thumb against this model and machine.
      json: Print JSON.
      plot: File for a picture, .png, .svg or .pdf: speed-up by batch, target efficiency, experts touched.
      color: Color on a terminal.
    """

    GROUPS: ClassVar = {
        "machine": (
            "hardware",
            "devices",
            "mesh",
            "price_per_hour",
            "calibration",
            "dtype",
            "quantization",
            "kv_cache_dtype",
        ),
        "speculation": ("drafter", "acceptance", "overlap", "lengths", "trees"),
        "training": ("train", "set"),
        "output": ("rules", "json", "plot", "color"),
    }

    model: str
    hardware: str | None = None
    devices: tuple[int, ...] = ()
    mesh: str | None = None
    drafter: str | None = None
    acceptance: str | None = None
    overlap: float | None = None
    context: int = 1024
    batch: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    trees: bool = True
    price_per_hour: float | None = None
    calibration: Path | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quantization: Literal["auto", "none", "fp8", "int8"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    train: str | None = None
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    rules: bool = False
    json: bool = False
    plot: Path | None = None
    color: bool = True


def question_of(args: PlanArgs) -> tuple["Question", str]:
    """Returns what is to be planned, and the machine in words.

    Raises:
      ConfigError: model, hardware, mesh, drafter, acceptance or calibration are not usable.
    """
    from jaxspec.inspect.model_cost import model_cost
    from jaxspec.inspect.shipped import model_config
    from jaxspec.perf.planner import TREES, Question

    name, config = model_config(args.model)
    model = model_cost(
        config, name=name, dtype=args.dtype, quantization=args.quantization, kv_cache_dtype=args.kv_cache_dtype
    )
    if (args.hardware is None) == (args.calibration is None):
        raise ConfigError("plan: give either --hardware, for example h200x8, or --calibration")
    drafters = drafters_of(args.drafter, model, config)
    if args.rules and args.drafter is None:
        # Rules are held against one drafter: what comes with the model, or what people train for it.
        drafters = tuple(d for d in drafters if d.kind == ("mtp" if model.prediction else "eagle"))
    machine, words = (
        _assumed(args, model) if args.calibration is None else _calibrated(args, model, args.calibration, config)
    )
    given = acceptance_of(args.acceptance)
    question = Question(
        model=model,
        drafters=drafters,
        acceptance={d.kind: (given,) for d in drafters} if given else {},
        context=args.context,
        lengths=args.lengths,
        trees=TREES if args.trees else (),
        **machine,
    )
    return question, words


def _assumed(args: PlanArgs, model: "ModelCost") -> tuple[dict[str, Any], str]:
    """Returns what a question says of a machine by its data sheet, and the machine in words."""
    from jaxspec.perf.machine import assumed_machines, default_mesh
    from jaxspec.perf.overlap import AssumedOverlap

    hardware, count = machine_of(args.hardware or "")
    mesh = parse_mesh(args.mesh) or default_mesh(model, count)
    mesh.check(model)
    if mesh.devices != count:
        raise ConfigError(f"plan: --mesh has {mesh.devices} devices, --hardware {args.hardware} has {count}")
    overlap = None if args.overlap is None else AssumedOverlap(args.overlap)
    axes = ", ".join(f"{axis}={n}" for axis, n in asdict(mesh).items() if n > 1)
    machine = {
        "machines": assumed_machines(model, hardware, mesh, overlap), "mesh": mesh, "rates": hardware.rates(),
        "room_bytes": hardware.memory_bytes * hardware.assumed.usable_memory,
    }  # fmt: skip
    return machine, f"{count} x {hardware.name}" + (f", mesh {axes}" if axes else "")


def _calibrated(
    args: PlanArgs, model: "ModelCost", file: Path, config: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Returns what a question says of the machine of a calibration, and the machine in words."""
    from jaxspec.checkpoint.files.fingerprint import digests
    from jaxspec.perf.calibration import Predictor, load_calibration
    from jaxspec.perf.cost import Mesh
    from jaxspec.perf.machine import calibrated_machines

    calibration, mesh = load_calibration(file), parse_mesh(args.mesh) or Mesh()
    if calibration.model.get("config_digest") != digests(config)["config_digest"]:
        raise ConfigError(
            f"plan: {file} was measured with another model ({calibration.model.get('name')}); calibrate this one"
        )
    if args.overlap is not None or mesh.devices > 1:
        raise ConfigError("plan: a calibration is of one device and has measured overlap; leave --mesh, --overlap out")
    words = f"{calibration.machine.get('cpu')}, {calibration.machine.get('device')} (calibrated {calibration.date})"
    machines = calibrated_machines(Predictor(calibration, model))
    return {"machines": machines, "mesh": mesh, "rates": None, "room_bytes": math.inf}, words


def machine_of(text: str) -> tuple["Hardware", int]:
    """Returns a device's record and how many of them.

    Raises:
      ConfigError: there is no such record, or its servers have no network that the record knows.
    """
    from jaxspec.config import shipped
    from jaxspec.perf.hardware import load_hardware

    hardware, count = load_hardware(text, shipped("hardware"))
    if count > hardware.node_devices and not hardware.network_gb_per_s:
        raise ConfigError(
            f"plan: {count} x {hardware.name} are {-(-count // hardware.node_devices)} servers, and what joins them is "
            "not known; plan with a copy of its record in configs/hardware that says network_gb_per_s"
        )
    return hardware, count


def parse_mesh(text: str | None) -> "Mesh | None":
    """Parses devices per axis, such as ``expert=4,tensor=2``.

    Raises:
      ConfigError: the text says something else.
    """
    from jaxspec.perf.cost import Mesh

    if text is None:
        return None
    matches = [AXIS.fullmatch(part.strip()) for part in text.split(",")]
    axes = {match[1]: int(match[2]) for match in matches if match}
    if len(axes) != len(matches):
        raise ConfigError(f"plan: --mesh is like expert=4,tensor=2 with axes data, expert and tensor; got {text!r}")
    return Mesh(**axes)


def drafters_of(name: str | None, model: "ModelCost", config: Mapping[str, Any]) -> tuple["DraftCost", ...]:
    """Returns the drafter of this name for the model of a config, or all that are possible without a draft model.

    Raises:
      ConfigError: it is not known, or the model has none of its kind.
    """
    from jaxspec.checkpoint.heads.identify import is_head
    from jaxspec.inspect.head_cost import head_cost
    from jaxspec.inspect.model_cost import model_cost
    from jaxspec.inspect.shipped import model_config
    from jaxspec.perf.drafting import KINDS, DraftCost
    from jaxspec.perf.planner import possible_drafters

    possible = possible_drafters(model)
    if name is None:
        return possible
    for drafter in possible:
        if drafter.kind == name:
            return (drafter,)
    if name == "mtp":
        raise ConfigError(f"plan: {model.name} has no layers of multi-token prediction; choose another drafter")
    if name in KINDS:
        raise ConfigError(f"plan: for {name} give the config of a draft model instead, for example llama-3.2-1b")
    path, (name, own) = Path(name), model_config(name)
    if is_head(own):
        return (head_cost(path, config, model),)
    draft = model_cost(own, name=name)
    if abs(draft.vocab_size - model.vocab_size) > PADDING_ROWS:
        raise ConfigError(
            f"plan: {name} has a vocabulary of {draft.vocab_size}, {model.name} of {model.vocab_size}; a draft model "
            "needs the target's tokenizer"
        )
    return (DraftCost("draft_model", draft),)


def acceptance_of(text: str | None) -> "AcceptanceModel | None":
    """Parses one probability for every draft, or survival per position.

    Raises:
      ConfigError: the text says something else.
    """
    from jaxspec.perf.drafting import AcceptanceModel, acceptance_of_positions

    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"plan: --acceptance is like 0.7 or 0.9,0.72,0.48; got {text!r}") from None
    return AcceptanceModel((values[0],)) if len(values) == 1 else acceptance_of_positions(values)
