"""One name for the demo everywhere: what is there under it wins, then it is the packaged model, draft or head."""

import json
from pathlib import Path

import pytest

from jaxspec.bench.grid import DrafterChoice
from jaxspec.cli.bench import BenchArgs, default_drafters
from jaxspec.cli.demo_plan import QUICK, plan_of
from jaxspec.cli.engine_flags import EngineFlags
from jaxspec.cli.main import main
from jaxspec.inspect.shipped import model_config
from jaxspec.serve.demo_pair import demo_model_dir, resolve_model, resolve_speculation
from jaxspec.serve.job import open_job

TARGET, DRAFT, HEAD = map(demo_model_dir, ("target", "draft", "head"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_there_wins(elsewhere: Path):
    assert resolve_model("demo") == TARGET
    assert resolve_model(Path("demo"), part="head") == HEAD
    (elsewhere / "demo").mkdir()
    assert resolve_model("demo") == Path("demo")


@pytest.mark.parametrize(
    ("method", "directory"), [(None, DRAFT), ("draft_model", DRAFT), ("shared_expert", HEAD), ("hybrid", HEAD)]
)
def test_what_drafts_goes_by_its_method(method: str | None, directory: Path):
    config = {"model": "demo", "num_speculative_tokens": 3} | ({"method": method} if method else {})
    assert resolve_speculation(config) == config | {"model": str(directory)}
    flags = EngineFlags(speculative_config=json.dumps(config))
    assert flags.keywords()["speculative_config"]["model"] == str(directory)


def test_others_are_left_alone():
    for config in (None, {"method": "ngram"}, {"model": "org/draft"}, "no mapping", {"model": 5}):
        assert resolve_speculation(config) == config


def test_commands_know_it(capsys: pytest.CaptureFixture[str]):
    assert EngineFlags().directory() == EngineFlags(model="demo").directory() == TARGET
    config = '{"model": "demo", "num_speculative_tokens": 3}'
    plan = plan_of("demo", config, QUICK, print)
    assert (plan.model, plan.speculative["model"]) == (TARGET, str(DRAFT))
    assert default_drafters(BenchArgs("demo")) == default_drafters(BenchArgs()) != ("ngram",)
    assert DrafterChoice.parse("draft_model=demo").config["model"] == str(DRAFT)
    assert model_config("demo") == ("demo", json.loads((TARGET / "config.json").read_text()))
    assert main(["inspect", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(TARGET)


def test_a_job_of_the_demo_is_one_of_its_directory(elsewhere: Path):
    (elsewhere / "in.jsonl").write_text('{"prompt": "a"}\n')
    speculation = {"method": "draft_model", "num_speculative_tokens": 2, "rejection_sample_method": "block"}
    for name, drafts, known in (("demo", "demo", 0), (str(TARGET), str(DRAFT), 0)):
        engine = {"speculative_config": {**speculation, "model": drafts}}
        with open_job(name, "in.jsonl", "out.jsonl", engine=engine, sampling={}) as job:
            assert len(job.journal.done) == known  # and the identity is the same: nothing was refused
