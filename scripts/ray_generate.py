"""Answers a JSONL of requests with independent replicas: Ray Data's ``map_batches`` over the in-process ``LLM``.

``pip install 'jaxspec[ray]'``, then on a cluster (``RAY_ADDRESS``) or on this machine alone:

    python scripts/ray_generate.py --input prompts.jsonl --output out.jsonl --replicas 2

takes the files and settings of ``jaxspec generate`` and writes its records, each request exactly once. The output is
that command's journal, too: killed at any moment, either of the two goes on where it ended. Every host needs the model
under the same path; texts do not depend on which replica answers.
"""

import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tyro

from jaxspec.checkpoint.load.model import read_generation
from jaxspec.cli.engine_flags import EngineFlags
from jaxspec.cli.generate import SamplingFlags
from jaxspec.errors import CapacityError, JaxspecError, RequestError
from jaxspec.serve.compile_cache import use_compile_cache
from jaxspec.serve.defaults import sampling_defaults
from jaxspec.serve.job import OpenJob, open_job
from jaxspec.serve.job_lines import Line, error_record, finished_record
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams

Batch = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Args:
    """A job for a fleet.

    Attributes:
      input: JSONL file of requests, as for jaxspec generate.
      output: File that gets one line per request in the order of completion.
      replicas: Engines, each in a process of its own with its own copy of the model.
      replica_cpus: Cores that Ray sets aside for each.
      replica_gpus: GPUs that Ray sets aside for each, and shows it alone.
      batch_size: Requests that a replica takes at a time. The last of them run with fewer rows busy, so it should be
        several times --max-num-seqs; what was not finished of it is lost when a replica dies, and run again.
    """

    input: str
    output: str
    replicas: int = 2
    replica_cpus: float = 1.0
    replica_gpus: float = 0.0
    batch_size: int = 64
    engine: Annotated[EngineFlags, tyro.conf.arg(name="")] = field(default_factory=EngineFlags)
    sampling: Annotated[SamplingFlags, tyro.conf.arg(name="")] = field(default_factory=SamplingFlags)


class Replica:
    """One engine of the fleet; Ray makes it once per worker and hands it batch after batch.

    Args:
      model: directory of the target.
      engine: keyword arguments of ``LLM``.
    """

    def __init__(self, model: Path, engine: Mapping[str, Any]):
        use_compile_cache()
        self._llm, self._name = LLM(model, **engine), model.resolve().name

    def __call__(self, batch: Batch) -> dict[str, list[bytes]]:
        """Records of a batch of lines, as JSON, in the order of completion."""
        lines = map(pickle.loads, batch["line"])
        return {"record": [msgspec.json.encode(record) for record in self._records(lines)]}

    def _records(self, lines: Iterable[Line]) -> Iterator[dict[str, Any]]:
        flying: dict[str, Line] = {}
        for line in lines:
            try:
                if line.error is not None:
                    raise RequestError(line.error)
                # The number is where randomness comes from, whichever replica answers and in whatever company.
                self._llm.submit(line.prompt, line.params, request_id=str(line.index), number=line.index)
                flying[str(line.index)] = line
            except (RequestError, CapacityError) as error:
                yield error_record(line, str(error))
            except Exception as error:
                yield error_record(line, f"{type(error).__name__}: {error}", "request_failed")
        while flying:
            for output in self._llm.step():
                if output.finished:
                    yield finished_record(flying.pop(output.request_id), output, self._name, self._llm.text)


def fleet(args: Args, model: Path, lines: Iterable[Line]) -> Iterator[bytes]:
    """The records of all lines as replicas finish them, batch by batch."""
    ray: Any = import_module("ray")
    data: Any = import_module("ray.data")
    ray.init(include_dashboard=False, log_to_driver=False)
    answered = data.from_items([{"line": pickle.dumps(line)} for line in lines]).map_batches(
        Replica,
        fn_constructor_kwargs={"model": model, "engine": args.engine.keywords()},
        batch_size=args.batch_size,
        compute=data.ActorPoolStrategy(size=args.replicas),
        num_cpus=args.replica_cpus,
        num_gpus=args.replica_gpus,
    )
    try:
        for row in answered.iter_rows():
            yield row["record"]
    finally:
        ray.shutdown()


def run(args: Args, job: OpenJob, model: Path) -> int:
    """Runs what is left of a job; returns the exit code."""
    defaults = SamplingParams.from_mapping(args.sampling.given(), sampling_defaults(read_generation(model)))
    if len(job.journal.done) < job.count:
        for record in fleet(args, model, job.lines(defaults)):
            job.journal.append(msgspec.json.decode(record))
    print(f"{len(job.journal.done)} requests in {args.output}, {job.journal.failed} of them failed", file=sys.stderr)
    return 1 if job.journal.failed else 0


def main() -> int:
    """The command."""
    args = tyro.cli(Args, description=__doc__)
    model = args.engine.directory().resolve()
    engine, sampling = args.engine.keywords(), args.sampling.given()
    try:
        with open_job(model, args.input, args.output, engine=engine, sampling=sampling) as job:
            return run(args, job, model)
    except JaxspecError as error:
        print(f"ray_generate: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
