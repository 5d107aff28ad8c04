"""``jaxspec generate``: text for one prompt on the terminal, or for a file of requests."""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jaxspec.cli.engine_flags import EngineFlags, load_llm
from jaxspec.cli.host_flags import HostFlags
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.serve.job import Progress
    from jaxspec.serve.request import RequestOutput


@dataclass(frozen=True)
class SamplingFlags:
    """Settings of requests that say nothing else; the rest comes from the model's generation_config.json.

    Attributes:
      max_tokens: Most generated tokens per request.
      temperature: 0 always takes the most likely token.
      top_p: Share of probability that is sampled from.
      top_k: Number of tokens that are sampled from; 0 for all.
      min_p: Least probability, relative to the most likely token.
      repetition_penalty: Above 1 discourages tokens of the prompt and the text.
      presence_penalty: Above 0 discourages tokens of the text.
      frequency_penalty: Above 0 discourages tokens of the text by how often they occurred.
      stop: Strings that end the text.
      stop_token_ids: Token ids that end the text, besides the model's own.
      ignore_eos: Go on behind the model's end-of-text ids.
      min_tokens: Generated tokens before which no stop id may come.
      n: Samples per request.
      logprobs: Most likely tokens to report per position.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: tyro.conf.FlagCreatePairsOff[bool] = False
    min_tokens: int | None = None
    n: int | None = None
    logprobs: int | None = None

    def given(self) -> dict[str, Any]:
        """The settings that were given, by the names of ``SamplingParams``."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


@dataclass(frozen=True)
class GenerateArgs:
    """What ``jaxspec generate`` is asked for.

    Attributes:
      prompt: Text to continue; the continuation is printed while it grows.
      chat: Send --prompt as a user's message through the model's chat template.
      input: JSONL file of requests, - for standard input: {"prompt": ...}, {"messages": [...]} or
        {"prompt_token_ids": [...]} with settings inline, or lines of OpenAI's Batch API.
      output: File that gets one line per request in the order of completion, - for standard output. The
        same command started again after a crash goes on where it ended.
      retry_failed: Run the lines of --input again whose record in --output is an error.
    """

    prompt: str | None = None
    chat: tyro.conf.FlagCreatePairsOff[bool] = False
    input: str | None = None
    output: str | None = None
    retry_failed: tyro.conf.FlagCreatePairsOff[bool] = False
    engine: Annotated[EngineFlags, tyro.conf.arg(name="")] = field(default_factory=EngineFlags)
    hosts: Annotated[HostFlags, tyro.conf.arg(name="")] = field(default_factory=HostFlags)
    sampling: Annotated[SamplingFlags, tyro.conf.arg(name="")] = field(default_factory=SamplingFlags)


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
    llm = args.engine.load()
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
        sys.stderr.write(_spent(output, time.monotonic() - began))
    return 0


def _spent(output: "RequestOutput", time_s: float) -> str:
    count, m = len(output.outputs[0].token_ids), output.metrics
    return f"jaxspec: {count} tokens in {time_s:.1f} s, acceptance length {m.mean_acceptance_length:.2f}\n"


def _job(args: GenerateArgs, source: str, target: str) -> int:
    from jaxspec.cli.progress import ShownProgress
    from jaxspec.serve.job import run_job

    with args.hosts.together() as talks:

        def load(model: Path, **keywords: Any):
            if talks:
                sys.stderr.write(f"jaxspec: loading {model}\n")
            return load_llm(model, **keywords)

        with ShownProgress() if talks else nullcontext(lambda progress: None) as watch:
            progress = run_job(
                args.engine.directory(), source, target,
                engine=args.engine.keywords(), sampling=args.sampling.given(),
                retry_failed=args.retry_failed, watch=watch, load=load,
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
    """The exit code of a job."""
    return 128 + p.stopped_by if p.stopped_by else 1 if p.failed else 0
