"""``jaxspec generate`` as a command: one prompt, a file, kill -9, exit codes, and a quick ``--help``."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from jaxspec.cli import main as main_module
from jaxspec.cli.generate import GenerateArgs
from jaxspec.cli.main import main
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.serve.job import Progress
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from scripts.house_report import ROOT
from tests.unit.serve.tiny_model import write_tiny_model

FLAGS = [
    "--max-model-len",
    "64",
    "--prefill-buckets",
    "16",
    "--max-num-seqs",
    "2",
    "--steps-per-dispatch",
    "1",
]
LINES = [{"prompt": "the cat", "max_tokens": 8 + i % 9, "n": 1 + (i % 5 == 0)} for i in range(60)]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("generate") / "tiny")


class Command:
    """The command in processes of its own, which share a compile cache."""

    def __init__(self, model: Path, folder: Path):
        self.model, self.folder = model, folder
        self.source = folder / "in.jsonl"
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "xla"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self.environment = {**os.environ, **cache, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
        self.source.write_text("".join(json.dumps(line) + "\n" for line in LINES))

    def start(self, target: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "jaxspec.cli.main", "generate", "--model", str(self.model), *FLAGS]
        command += ["--input", str(self.source), "--output", str(target)]
        return subprocess.Popen(
            command,
            env=self.environment,
            cwd=self.folder,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start_and_send(self, target: Path, number: int, records: int) -> subprocess.Popen[str]:
        """Sends a signal once the output has so many records, and one that this process wrote."""
        records = max(records, self.records(target) + 1)
        process = self.start(target)
        while process.poll() is None and self.records(target) < records:
            time.sleep(0.002)
        process.send_signal(number)
        return process

    @staticmethod
    def records(target: Path) -> int:
        return target.read_bytes().count(b"\n") if target.exists() else 0


@pytest.fixture(scope="session")
def command(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command(model, tmp_path_factory.mktemp("command"))


def keyed(target: Path) -> dict[int, tuple]:
    records = [json.loads(line) for line in target.read_bytes().splitlines()]
    outputs = {r["index"]: [(o["text"], o["token_ids"]) for o in r.get("outputs", [r])] for r in records}
    assert len(outputs) == len(records), "each request once"
    return outputs


@pytest.mark.slow
def test_killed_at_any_moment_it_finishes_the_same_file(command: Command):
    whole, target = command.folder / "whole.jsonl", command.folder / "killed.jsonl"
    process = command.start(whole)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert len(keyed(whole)) == len(LINES)
    for records in (1, 27):
        killed = command.start_and_send(target, signal.SIGKILL, records)
        killed.communicate()
        assert killed.returncode == -signal.SIGKILL
        assert records <= command.records(target) < len(LINES)
    stopped = command.start_and_send(target, signal.SIGTERM, 50)
    _, errors = stopped.communicate()
    assert stopped.returncode == 128 + signal.SIGTERM, errors
    assert "run the same command again" in errors
    process = command.start(target)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert keyed(target) == keyed(whole)


def test_one_prompt_is_streamed(model: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    llm = LLM(model, max_model_len=64, prefill_buckets=(16,), max_num_seqs=1)
    loaded: list[int] = []

    def load(*args: object, max_num_seqs: int, **keywords: object) -> LLM:
        loaded.append(max_num_seqs)
        return llm

    monkeypatch.setattr("jaxspec.cli.engine_flags.load_llm", load)
    flags = ["--temperature", "0", "--max-tokens", "20"]
    whole = llm.generate("the cat", SamplingParams(temperature=0.0, max_tokens=20))[0].outputs[0].text
    for more, wanted in ([], whole), (["--stop", whole[7:10]], whole[: whole.index(whole[7:10])]):
        assert main(["generate", "--model", str(model), "--prompt", "the cat", *flags, *more]) == 0
        shown = capsys.readouterr()
        assert shown.out == wanted + "\n"
        assert "without speculation; --speculative-config switches it on" in shown.err
    assert main(["generate", "--model", str(model), "--prompt", "hello", "--chat", *flags]) == 0
    chat = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(temperature=0.0, max_tokens=20))
    assert capsys.readouterr().out == chat[0].outputs[0].text + "\n"
    assert main(["generate", "--model", str(model), "--prompt", "hello", "--mesh", "expert=1", *flags]) == 0
    assert loaded == [1, 1, 1, 8], "one row for one prompt; a mesh may need more"


def test_failed_lines_give_exit_code_1(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "the"}\nnonsense\n')
    arguments = [
        "generate",
        "--model",
        str(model),
        "--input",
        str(source),
        "--output",
        str(target),
        "--max-tokens",
        "3",
    ]
    assert main([*arguments, *FLAGS]) == 1
    shown = capsys.readouterr().err
    assert "line 2: not valid JSON" in shown
    assert "1 of 2 requests failed" in shown
    assert main([*arguments, *FLAGS]) == 1
    assert "complete with 2 requests; nothing to do" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "either --prompt or --input"),
        (["--prompt", "a", "--input", "b"], "either --prompt or --input"),
        (["--prompt", "a", "--output", "b"], "--output goes with --input"),
        (["--prompt", "a", "--retry-failed"], "--retry-failed goes with --input"),
        (["--input", "a"], "needs --output"),
        (["--input", "a", "--output", "b", "--chat"], "--chat goes with --prompt"),
        (["--prompt", "a", "--n", "2"], "one sample"),
        (["--prompt", "a", "--temperature", "-1"], "temperature"),
        (["--prompt", "a", "--speculative-config", "{"], "--speculative-config: not valid JSON"),
        (["--prompt", "a", "--model", "nowhere"], "nowhere"),
        (["--input", "nowhere", "--output", "b", "--model", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = [] if "--model" in flags else ["--model", "unused"]
    assert main(["generate", *flags, *model]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1].startswith("jaxspec: ")
    assert words in shown[-1]


@pytest.mark.parametrize("flags", [[], ["--retry-failed"]])
def test_failed_lines_run_again_when_asked(flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys):
    asked = []

    def run_job(*args: object, retry_failed: bool, **keywords: object) -> Progress:
        asked.append(retry_failed)
        return Progress(2, 1, 2, 1)

    monkeypatch.setattr("jaxspec.serve.job.run_job", run_job)
    assert main(["generate", "--input", "a", "--output", "b", *flags]) == 1
    assert asked == [bool(flags)]
    assert '1 of 2 requests failed; their records have an "error"; --retry-failed runs' in capsys.readouterr().err


def test_what_ends_a_command_sets_its_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    def run_with(error: BaseException) -> int:
        def run(args: GenerateArgs) -> int:
            raise error

        module = ModuleType("stub")
        monkeypatch.setattr(module, "run", run, raising=False)
        monkeypatch.setattr(main_module, "import_module", lambda name: module)
        monkeypatch.setattr(main_module.os, "dup2", lambda *fds: None)
        monkeypatch.setattr(main_module.INTERRUPTS, "say", lambda number: None)
        return main(["generate"])

    assert run_with(KeyboardInterrupt()) == 130
    assert run_with(BrokenPipeError()) == 141
    assert run_with(ConfigError("several\nlines")) == 2
    assert run_with(JaxspecError("out.jsonl: No space left on device")) == 1
    assert run_with(OSError(28, "No space left on device", "plan.png")) == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "jaxspec: several lines",
        "jaxspec: out.jsonl: No space left on device",
        "jaxspec: [Errno 28] No space left on device: 'plan.png'",
    ]
    with pytest.raises(ValueError, match="a fault of ours"):
        run_with(ValueError("a fault of ours"))


def test_demo_models_are_named():
    with pytest.raises(ConfigError, match=r"known are \['target', 'draft', 'head'\]"):
        demo_model_dir("teacher")


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"]])
def test_help_needs_no_jax(arguments: list[str]):
    program = f"""
import sys, types
package = types.ModuleType("jaxspec")  # the public names load JAX; what the command line adds must not
package.__path__ = [{str(ROOT / "jaxspec")!r}]
sys.modules["jaxspec"] = package
from jaxspec.cli.main import main
try:
    main({arguments!r})
except SystemExit as end:
    assert not end.code
assert "jax" not in sys.modules and "transformers" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "usage: jaxspec" in result.stdout
