"""Settings of a training run: the records of ``configs/train`` and ``configs/heads``."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from jaxspec.checkpoint.files.fingerprint import fingerprint
from jaxspec.config import find_config, read_toml, to_record
from jaxspec.errors import ConfigError
from jaxspec.train.block_settings import BlockLoss, BlockSettings
from jaxspec.train.expert_settings import EXPERTS, check_experts


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a config."""


def _at_least(table: str, record: Any, **least: float) -> None:
    for name, bound in least.items():
        value = getattr(record, name)
        if value is not None and value < bound:
            raise ConfigError(f"{table + ': ' if table else ''}{name} must be at least {bound}, got {value}")


class HeadSettings(Record, frozen=True):
    """The head that is trained; sizes that are not given are the target's.

    Attributes:
      kind: how it drafts, in the words of ``speculative_config``.
      layers: decoder layers; Medusa: residual layers of each of its heads.
      heads: Medusa's heads.
      hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim: of its layers.
      num_experts, num_experts_per_tok, moe_intermediate_size, shared_expert_intermediate_size: of its layers, as of
        Qwen's mixtures; none are a dense feed-forward. A token chooses 2 unless said, together as wide as that.
      taps: layer boundaries whose residual streams it reads (``hidden_states[b]``); ``default`` is 2, L // 2 and L - 3,
        of heads that draft blocks as many as they have layers.
      commons: expert layers whose shared experts it reads; ``default`` spreads three over the depth.
      routing: expert layers whose choices it predicts.
      draft_vocab_size: W, tokens that it can draft; none is the whole vocabulary.
      own_head, own_embedding: whether it trains these itself instead of using the target's.
      from_target: whether these start as the target's, where widths agree; ``mtp``: whether the layer starts as the
        first one that the target was published with, where there is one.
      norm_before_residual, norm_before_fc, fc_norm, norm_output: as EAGLE-3's configs name them.
      qk_norm: whether its queries and keys are normalized, as Qwen3's are.
      bias: whether the product in front of the layers has a bias.
      mask_token: token that stands for those that are not drafted yet; by default the vocabulary's last.
      rope_theta: base of its rotary positions.
      block: of heads that draft blocks.
      start: directory of a head, of any format that ``jaxspec import`` reads, or of a draft model, that is trained
        further, or ``demo`` or ``smollm2-moe`` for what comes with them; it says everything but the kind.
    """

    kind: Literal[
        "eagle", "eagle3", "peagle", "medusa", "shared_expert", "dflash", "dflash2", "dspark", "mtp", "draft_model"
    ]
    layers: int = 1
    heads: int = 4
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_experts: int = 0
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int = 0
    taps: Literal["default"] | tuple[int, ...] = "default"
    commons: Literal["default"] | tuple[int, ...] = ()
    routing: Literal["default"] | tuple[int, ...] = ()
    draft_vocab_size: int | None = None
    own_head: bool = True
    own_embedding: bool = False
    from_target: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    bias: bool = True
    mask_token: int | None = None
    rope_theta: float | None = None
    block: BlockSettings = BlockSettings()
    start: str | None = None

    def __post_init__(self) -> None:
        _at_least("head", self, layers=1, heads=1)
        _at_least("head", self, draft_vocab_size=1, hidden_size=1, intermediate_size=1, mask_token=0)
        _at_least("head", self, num_attention_heads=1, num_key_value_heads=1, head_dim=1)
        check_experts(self)
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("head: norm_before_fc and fc_norm exclude each other; leave one of them out")


class DataSettings(Record, frozen=True):
    """The data that is trained on.

    Attributes:
      train: JSONL and plain text files, in this order.
      held_out: files for evaluation; none takes ``held_out_fraction`` of the documents instead.
      held_out_fraction: share of the documents, chosen by their content, where ``held_out`` names no files.
      length: T, tokens of a packed row, which also is the longest conversation.
      too_long: what to do with a longer conversation: ``error``, ``cut`` after T tokens, or ``drop``.
      window: rows that stay open while documents are packed; more waste less.
      template: settings of the chat template, such as ``enable_thinking``.
    """

    train: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    held_out_fraction: float = 0.0
    length: int = 2048
    too_long: Literal["error", "cut", "drop"] = "error"
    window: int = 64
    template: dict[str, Any] = {}

    def __post_init__(self) -> None:
        _at_least("data", self, length=4, window=1)
        if not self.train:
            raise ConfigError("data: train names no file; give JSONL or plain text files")
        if not 0 <= self.held_out_fraction < 1:
            raise ConfigError(f"data: held_out_fraction must be from 0 to below 1, got {self.held_out_fraction}")


class TrainSettings(Record, frozen=True):
    """Length of the run, size of an update, and intervals.

    Attributes:
      steps: updates in all; more than before extend a run, whose learning rate then follows the new length.
      epochs: instead of ``steps``, passes over the data.
      rows: packed rows that a gradient is taken over at a time, over all devices and hosts.
      accumulation: such gradients of one update.
      micro_rows: rows that are computed together, a divisor of ``rows``; none takes as many as fit into memory. The
        result is the same but for the order of sums.
      remat: whether each round of drafting is recomputed for its gradient instead of kept; none does so where
        memory is short.
      memory_gb: memory of each device that a run may take, in 10^9 bytes; none is what is free.
      save_every, log_every: in updates.
      param_dtype, compute_dtype: of the head's stored parameters and of its products.
      target_dtype: of the frozen target.
      vocabulary: whether a vocabulary product of the head's own is trained; otherwise it stays as it begins, which by
        default is the target's.
    """

    steps: int = 0
    epochs: float | None = None
    rows: int = 8
    accumulation: int = 1
    micro_rows: int | None = None
    remat: bool | None = None
    memory_gb: float | None = None
    save_every: int = 100
    log_every: int = 10
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    target_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    vocabulary: bool = True

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs <= 0:
            raise ConfigError(f"train: epochs must be above 0, got {self.epochs}")
        if self.epochs is not None and self.steps:
            raise ConfigError(f"train: got both steps = {self.steps} and epochs; set train.steps=0 to count by epochs")
        _at_least(
            "train",
            self,
            steps=0 if self.epochs else 1,
            rows=1,
            accumulation=1,
            save_every=1,
            log_every=1,
            micro_rows=1,
        )
        if self.micro_rows and self.rows % self.micro_rows:
            raise ConfigError(f"train: micro_rows must divide rows = {self.rows}, got {self.micro_rows}")
        if self.memory_gb is not None and self.memory_gb <= 0:
            raise ConfigError(f"train: memory_gb must be above 0, got {self.memory_gb}")


class OptimizerSettings(Record, frozen=True):
    """AdamW, or Muon and AdamW, and their schedule.

    Attributes:
      learning_rate: at its peak.
      muon: learning rate of matrices at its peak, where Muon (Jordan 2024) trains them and AdamW the rest; 0 for AdamW
        alone.
      schedule: what follows the warm-up: ``linear`` or ``cosine`` decay to ``final``, ``wsd`` (constant, then linear
        decay over the last ``decay_fraction``), or ``constant``.
      warmup: updates until the peak.
      final: share of the peak that is left at the end.
      decay_fraction: of the updates, for ``wsd``.
      betas, eps: of the moments.
      weight_decay: of matrices; vectors are not decayed.
      clip: most that the gradient's norm may be, 0 for no limit.
    """

    learning_rate: float = 1e-4
    muon: float = 0.0
    schedule: Literal["linear", "cosine", "wsd", "constant"] = "cosine"
    warmup: int = 100
    final: float = 0.0
    decay_fraction: float = 0.4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 0.5

    def __post_init__(self) -> None:
        _at_least("optimizer", self, muon=0, warmup=0, final=0, weight_decay=0, clip=0)
        shares = {"final": self.final, "decay_fraction": self.decay_fraction}
        shares |= {f"betas[{i}]": beta for i, beta in enumerate(self.betas)}
        if wrong := [f"{name} = {value}" for name, value in shares.items() if not 0 <= value <= 1]:
            raise ConfigError(f"optimizer: shares must be from 0 to 1, got {', '.join(wrong)}")
        if self.learning_rate <= 0 or self.eps <= 0:
            raise ConfigError(
                f"optimizer: learning_rate and eps must be above 0, got {self.learning_rate} and {self.eps}"
            )


class LossSettings(Record, frozen=True):
    """The loss that is minimized.

    Attributes:
      kind: between the target's distribution and the head's.
      rounds: S, drafts that follow one another while training (EAGLE-3's training-time test).
      decay: weight of a draft relative to the one before.
      token: weight of the loss over tokens.
      feature: weight of EAGLE-1's regression to the target's hidden state.
      routing: weight of the routing loss.
      balance: weight of the loss that spreads tokens over the experts of a head that has some of its own.
      noise: width of the uniform noise on what the head reads.
      keep, keep_least: of P-EAGLE, share of a round's slots that the next one keeps, and of all that it keeps at least.
      draft_only: whether the target's distribution is computed over the draft vocabulary alone, which saves most of
        its vocabulary product; no position counts as unknown then.
      token_map: file of the tokens that the losses of a draft model, or of a head that drafts through the target's
        vocabulary product, are over, as ``jaxspec token-map`` writes it; none are all.
      skip_unknown: whether positions are left out where the target's best token is outside of the draft vocabulary.
      block: of heads that draft blocks, which have no rounds.
    """

    kind: Literal["soft_ce", "kl", "reverse_kl", "tv", "lk_alpha", "lk_hybrid"] = "soft_ce"
    rounds: int = 5
    decay: float = 0.8
    token: float = 1.0
    feature: float = 0.0
    routing: float = 0.0
    balance: float = 0.001
    noise: float = 0.0
    keep: float = 0.7
    keep_least: float = 0.2
    draft_only: bool = False
    token_map: str | None = None
    skip_unknown: bool = True
    block: BlockLoss = BlockLoss()

    def __post_init__(self) -> None:
        _at_least("loss", self, rounds=1, decay=0, token=0, feature=0, routing=0, balance=0, noise=0)
        if not 0 < self.keep_least <= self.keep <= 1:
            raise ConfigError(f"loss: 0 < keep_least <= keep <= 1 must hold, got {self.keep_least} and {self.keep}")

    def counts(self, slots: int) -> tuple[int, ...]:
        """Returns the slots of each round after the first, of heads that draft in one pass."""
        return tuple(max(1, round(slots * max(self.keep**d, self.keep_least))) for d in range(1, self.rounds))


class EvaluationSettings(Record, frozen=True):
    """Held-out acceptance, measured by the serving step.

    Attributes:
      every: in updates, besides after the last one.
      prompts: held-out documents that are continued.
      prompt_tokens: most tokens of a prompt; of plain text, that many.
      new_tokens: generated per prompt.
      lengths: drafts per step.
      temperatures: of sampling; 0 is greedy.
      metric: figure that the best head is kept by; none takes the acceptance length of the first length and
        temperature.
    """

    every: int = 200
    prompts: int = 16
    prompt_tokens: int = 128
    new_tokens: int = 64
    lengths: tuple[int, ...] = (3, 5)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    metric: str | None = None

    def __post_init__(self) -> None:
        _at_least("evaluation", self, every=1, prompts=1, prompt_tokens=1, new_tokens=1)
        if not self.lengths or min(self.lengths) < 1 or not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError("evaluation: lengths must be 1 or more and temperatures 0 or more, and neither empty")


class FeatureSettings(Record, frozen=True):
    """The cache of what the target computes, which then runs once, before training.

    Attributes:
      cache: directory of the files, none runs the target in every update.
      dtype: of the cached features; ``float32`` trains as without files, ``bfloat16`` takes half of the room. In
        ``float8_e4m3fn`` what the head reads takes a quarter, with a scale for each position; the last hidden state,
        which the logits are computed from, stays in bfloat16.
    """

    cache: str | None = None
    dtype: Literal["float32", "bfloat16", "float8_e4m3fn"] = "bfloat16"


class LoggingSettings(Record, frozen=True):
    """Where figures go besides the console and ``metrics.jsonl``.

    Attributes:
      tensorboard: whether TensorBoard files are written.
      wandb: project of Weights & Biases, none for not at all.
    """

    tensorboard: bool = True
    wandb: str | None = None


class MeshSettings(Record, frozen=True):
    """Devices along each axis."""

    data: int = 1
    expert: int = 1
    tensor: int = 1


class RunSettings(Record, frozen=True):
    """A whole training run.

    Attributes:
      target: model directory in Hugging Face layout, or ``demo``.
      out: directory of the run; the same command goes on where it stopped.
      head: what is trained, or the name or file of such a record in ``configs/heads``.
      seed: of initial parameters, data order and noise.
      data, train, optimizer, loss, evaluation, features, logging, mesh: see there.
    """

    target: str
    out: str
    head: HeadSettings
    data: DataSettings
    train: TrainSettings
    optimizer: OptimizerSettings = OptimizerSettings()
    loss: LossSettings = LossSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    features: FeatureSettings = FeatureSettings()
    logging: LoggingSettings = LoggingSettings()
    mesh: MeshSettings = MeshSettings()
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("", self, seed=0)
        _at_least("mesh", self.mesh, data=1, expert=1, tensor=1)
        for name in ("rows", "micro_rows"):
            if (count := getattr(self.train, name)) and count % self.mesh.data:
                words = f"{count} {name}" if name == "rows" else f"{name} = {count}"
                raise ConfigError(f"train: {words} cannot be split evenly over data = {self.mesh.data} devices")


def load_run_settings(wanted: str, changes: Sequence[str] = (), out: str | None = None) -> RunSettings:
    """Loads a training config.

    Args:
      wanted: a name in ``configs/train``, or a file.
      changes: ``train.steps=100`` and the like. Keys of a head change what its file says.
      out: directory of the run, where it is not the config's.

    Raises:
      ConfigError: there is no such file, or it is wrong; unknown keys are named with the known ones.
    """
    file = find_config(wanted, "train")
    in_head = [change for change in changes if change.partition("=")[0].strip().startswith("head.")]
    values = read_toml(file, [change for change in changes if change not in in_head])
    head = values.get("head")
    if isinstance(head, str):
        inner = [change.strip().removeprefix("head.") for change in in_head]
        values["head"] = read_toml(find_config(head, "heads"), inner)
    elif in_head:
        values = read_toml(file, changes)
    if out is not None:
        values["out"] = out
    return to_record(values, RunSettings, str(file))


def identity(settings: RunSettings) -> dict[str, Any]:
    """Returns what the result of a run depends on: the settings but for those that only say where and how often."""
    values = msgspec.to_builtins(settings)
    for key in ("epochs", "save_every", "log_every", "micro_rows", "remat", "memory_gb"):
        del values["train"][key]
    if values["features"].pop("cache") is None:
        del values["features"]
    if values["loss"]["balance"] == LossSettings().balance:
        del values["loss"]["balance"]
    if not values["head"]["num_experts"]:
        values["head"] = {key: value for key, value in values["head"].items() if key not in EXPERTS}
    if values["head"]["start"] is None:
        del values["head"]["start"]
    else:
        values["head"]["start"] = fingerprint(values["head"]["start"])
    return {key: value for key, value in values.items() if key not in ("out", "logging")}
