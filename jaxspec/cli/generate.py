"""``jaxspec generate``: text for one prompt on the terminal, or for a file of requests."""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from jaxspec.cli.engine_flags import EngineFlags, load_llm
from jaxspec.cli.host_flags import HostFlags
from jaxspec.cli.interrupts import INTERRUPTS
from jaxspec.cli.progress import acceptance_words
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.serve.job import Progress
    from jaxspec.serve.request import RequestOutput


PLAIN = (
    "without speculation; --speculative-config switches it on, for example "
    '\'{"method": "ngram", "num_speculative_tokens": 4}\''
)


@dataclass(frozen=True)
class SamplingFlags:
    """Settings of requests that say nothing else; the rest comes from the model's generation_config.json.

    Attributes:
      max_tokens: Most generated tokens per request; by default 128.
      temperature: 0 is greedy; by default what the model's generation_config.json says, else 1.
      top_p: Share of probability that is sampled from; by default the model's, else 1.
      top_k: Number of tokens that are sampled from, 0 for all; by default the model's, else all.
      min_p: Least probability, relative to the most likely token; by default the model's, else 0.
      repetition_penalty: Above 1 discourages tokens of the prompt and the text; by default the model's, else 1.
      presence_penalty: Above 0 discourages tokens of the text; by default 0.
      frequency_penalty: Above 0 discourages tokens of the text by how often they occurred; by default 0.
      sampling_seed: Seed of every request; by default each has its own, derived from --seed and its line.
      stop: Strings that end the text; it is cut before them.
      stop_token_ids: Token ids that end the text, besides the model's own.
      include_stop_str_in_output: Do not cut the stop string off.
      ignore_eos: Go on after the model's end-of-text token.
      min_tokens: Generated tokens before which no end-of-text or stop token may come; by default 0.
      skip_special_tokens: Leave special tokens out of the text.
      n: Samples per request; by default 1.
      logprobs: Log-probabilities per position: the sampled token's and those of so many most likely ones.
      speculative: --no-speculative decodes plainly whatever --speculative-config says: the same text, slower.
    """

    GROUP: ClassVar = "sampling"

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    sampling_seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = None
    skip_special_tokens: bool = True
    n: int | None = None
    logprobs: int | None = None
    speculative: bool = True

    def given(self) -> dict[str, Any]:
        """Returns the settings that were given, by the names of ``SamplingParams``."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if "sampling_seed" in values:  # --seed is the engine's, as for LLM
            values["seed"] = values.pop("sampling_seed")
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


@dataclass(frozen=True)
class GenerateArgs:
    """Flags of ``jaxspec generate``.

    Attributes:
      prompt: Text to continue; the continuation is printed while it grows.
      chat: Send --prompt as a user's message through the model's chat template.
      input: JSONL file of requests, - for standard input: {"prompt": ...}, {"messages": [...]} or
        {"prompt_token_ids": [...]} with sampling settings beside it (those without a flag, too), or lines of OpenAI's
        Batch API.
      output: File that gets one line per request in the order of completion, - for standard output. The
        same command started again after a crash goes on where it ended.
      retry_failed: Run the lines of --input again whose record in --output is an error.
    """

    prompt: str | None = None
    chat: bool = False
    input: Annotated[str | None, tyro.conf.arg(metavar="FILE", aliases=["-i"])] = None
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE", aliases=["-o"])] = None
    retry_failed: bool = False
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)
    hosts: HostFlags = field(default_factory=HostFlags)


def run(args: GenerateArgs) -> int:
    """Runs one prompt or a job; returns the exit code."""
    if (args.prompt is None) == (args.input is None):
        raise ConfigError("generate: give either --prompt or --input")
    if args.prompt is not None:
        if args.hosts.wanted:
            raise ConfigError("generate: several processes share a file of requests; give --input and --output")
        if args.output is not None:
            raise ConfigError("generate: --output goes with --input; --prompt prints its text")
        if args.retry_failed:
            raise ConfigError("generate: --retry-failed goes with --input and --output")
        return _prompt(args, args.prompt)
    if args.output is None or args.chat:
        raise ConfigError(
            'generate: --chat goes with --prompt; give {"messages": ...} in the file' if args.chat
            else "generate: --input needs --output, a file or -"
        )  # fmt: skip
    return _job(args, args.input or "", args.output)


def _prompt(args: GenerateArgs, prompt: str) -> int:
    from jaxspec.serve.request import SamplingParams

    wanted = args.sampling.given()
    if SamplingParams.from_mapping(wanted).n != 1:
        raise ConfigError("generate: --prompt prints one sample; give --n with --input")
    # One row for the one request; a mesh wants as many as it has devices for rows.
    llm = (replace(args.engine, max_num_seqs=1) if args.engine.mesh is None else args.engine).load()
    INTERRUPTS.doing = "generating"
    params = SamplingParams.from_mapping(wanted, llm.default_sampling_params)
    shown, output, began = 0, None, time.monotonic()
    request = {"messages": [{"role": "user", "content": prompt}]} if args.chat else prompt
    for output in llm.stream(request, params):
        text = output.outputs[0].text
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
    sys.stdout.write("\n")
    sys.stdout.flush()
    if output is not None:
        sys.stderr.write(
            _spent(output, time.monotonic() - began, speculates=args.engine.speculative_config is not None)
        )
    return 0


def _spent(output: "RequestOutput", time_s: float, *, speculates: bool) -> str:
    count, m = len(output.outputs[0].token_ids), output.metrics
    words = acceptance_words(m.mean_acceptance_length, m.drafted_acceptance_length) if speculates else PLAIN
    return f"jaxspec: {count} tokens in {time_s:.1f} s, {words}\n"


def _job(args: GenerateArgs, source: str, target: str) -> int:
    from jaxspec.cli.progress import ShownProgress
    from jaxspec.serve.job import run_job

    INTERRUPTS.hint = "" if target == "-" else "no request is lost, the same command goes on"
    engine = args.engine.keywords()  # before a model is downloaded
    with args.hosts.together() as talks:

        def load(model: Path, **keywords: Any):
            return load_llm(model, quiet=not talks, **keywords)

        with ShownProgress() if talks else nullcontext(lambda progress: None) as show:

            def watch(progress: "Progress") -> None:
                INTERRUPTS.dismiss()  # a running job ends after its dispatch and says so itself
                show(progress)

            progress = run_job(
                args.engine.directory(), source, target,
                engine=engine, sampling=args.sampling.given(), retry_failed=args.retry_failed, watch=watch, load=load,
            )  # fmt: skip
        return _conclude(progress, target) if talks else _status(progress)


def _conclude(p: "Progress", target: str) -> int:
    """Says what became of a job and returns its exit code."""
    from jaxspec.cli.progress import rates

    for message in p.errors:
        sys.stderr.write(f"jaxspec: {message}\n")
    if p.stopped_by:
        again = "" if target == "-" else "; run the same command again to go on"
        sys.stderr.write(f"jaxspec: stopped after {p.done} of {p.total} requests{again}\n")
        return _status(p)
    if p.earlier == p.total:
        sys.stderr.write(f"jaxspec: {target} is complete with {p.total} requests; nothing to do\n")
    else:
        sys.stderr.write(f"jaxspec: {p.done} requests in {target}, {p.time_s:.1f} s, {rates(p)}\n")
    if p.failed:
        again = "; --retry-failed runs them again" if target != "-" else ""
        sys.stderr.write(f'jaxspec: {p.failed} of {p.total} requests failed; their records have an "error"{again}\n')
    return _status(p)


def _status(p: "Progress") -> int:
    """Returns the exit code of a job."""
    return 128 + p.stopped_by if p.stopped_by else 1 if p.failed else 0
