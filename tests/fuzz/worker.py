"""Reads directories from standard input and says what became of each: a process that may hang or die for the fuzz.

``python -m tests.fuzz.worker MODEL LETTERS``: sound models, whose engines run job files and those with forms.
"""

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from jaxspec.errors import JaxspecError

MEMORY_BYTES = 8 << 30
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Watch:
    """Notes files that are written, and code that is run, where none may be."""

    def __init__(self) -> None:
        self.inside: Path | None = None
        self.wrong: list[str] = []
        self.allowed = [os.environ["FUZZ_ROOT"], os.environ["JAX_COMPILATION_CACHE_DIR"], "/dev/null", "/tmp/tmp"]
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.inside is None:
            return
        if event == "open" and isinstance(args[0], str) and (args[2] or 0) & WRITES:
            path = os.path.abspath(args[0])
            if not path.startswith((str(self.inside), *self.allowed[1:])):
                self.wrong.append(f"wrote {path}")
        if event == "exec" and str(getattr(args[0], "co_filename", "")).startswith(str(self.inside)):
            self.wrong.append(f"ran {args[0].co_filename}")


def look_at(kind: str, directory: Path, llms: dict[str, Any]) -> str:
    """Does with a case what a user would do; what it raises is the verdict."""
    from jaxspec.cli.main import main
    from jaxspec.serve.job import run_job

    if kind in llms:
        llm = llms[kind]
        progress = run_job(
            llm.model.directory, str(directory / "in.jsonl"), str(directory / "out.jsonl"), load=lambda *_, **__: llm,
            sampling={"max_tokens": 4},
        )  # fmt: skip
        records = [json.loads(line) for line in (directory / "out.jsonl").read_text().splitlines()]
        assert sorted(r["index"] for r in records) == list(range(progress.total)), "a line has no record, or two"
        return f"{progress.failed} of {progress.total} refused"
    if kind == "head":
        from jaxspec.checkpoint.heads.directory import load_head
        from tests.unit.checkpoint.head_cases import FLOAT32, TARGET

        load_head(directory, TARGET, FLOAT32)
        return "loaded"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = main(["inspect", str(directory)])
    assert status in (0, 1, 2), f"inspect ended with {status}"
    load(directory)
    return f"inspect {status}, loaded"


def load(directory: Path) -> None:
    """Loads everything that an ``LLM`` does, and writes a chat prompt; nothing is compiled."""
    from jaxspec.checkpoint.load.model import load_model
    from jaxspec.checkpoint.text.codec import Text
    from jaxspec.nn.policy import make_policy
    from jaxspec.serve.defaults import end_ids, sampling_defaults

    model = load_model(directory, make_policy("float32"))
    end_ids(model.config, model.generation)
    sampling_defaults(model.generation)
    text = Text.load(directory)
    if text is not None:
        text.decode(text.encode("the cat sat"))
        text.encode_chat([{"role": "user", "content": "hello"}])


def serve(models: dict[str, str]) -> None:
    """One line in, one line out."""
    import resource

    from jaxspec.serve.llm import LLM

    settings: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 2, "prefill_buckets": (16,), "max_logprobs": 2}
    llms = {kind: LLM(model, steps_per_dispatch=2, **settings) for kind, model in models.items()}
    watch = Watch()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        watch.inside, watch.wrong = Path(asked["directory"]), []
        try:
            verdict, detail = "fine", look_at(asked["kind"], watch.inside, llms)
        except JaxspecError as error:
            verdict, detail = "refused", str(error)
            if "\n" in detail.strip():
                verdict, detail = "crash", f"an error of several lines: {detail}"
        except BaseException:
            verdict, detail = "crash", traceback.format_exc()
        watch.inside = None
        if watch.wrong:
            verdict, detail = "crash", "; ".join(watch.wrong)
        say({"verdict": verdict, "detail": detail})


def say(answer: dict[str, Any]) -> None:
    """Writes one line for the parent."""
    sys.__stdout__.write(json.dumps(answer) + "\n")
    sys.__stdout__.flush()


if __name__ == "__main__":
    serve(dict(zip(("job", "forms"), sys.argv[1:], strict=True)))
