"""Models by hub id: only what is read is downloaded, once, of one commit; what goes wrong is one clear error."""

import errno
import json
import queue
import random
import re
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from jaxspec import LLM
from jaxspec.checkpoint.hub import resolve_model
from jaxspec.checkpoint.hub_progress import log_progress
from jaxspec.checkpoint.load.model import load_model, read_config
from jaxspec.cli.main import main
from jaxspec.draft import methods
from jaxspec.errors import ConfigError
from jaxspec.inspect.shipped import model_config
from jaxspec.nn.policy import Policy
from jaxspec.serve.loading import load_draft
from tests.unit.checkpoint.hub_server import NAME, Hub, serving
from tests.unit.checkpoint.model_edits import shard
from tests.unit.serve.tiny_model import write_tiny_model

OLD, NEW = "a" * 40, "b" * 40
NEEDED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
JUNK = (
    "pytorch_model.bin", "consolidated.00.pth", "consolidated.safetensors", "original/model.safetensors",
    "onnx/model.safetensors", "tokenization_tiny.py", "modeling_tiny.py", "README.md", "tiny.gguf",
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model as it is published, in one file."""
    directory = write_tiny_model(tmp_path_factory.mktemp("published") / "tiny")
    (directory / "generation_config.json").write_text('{"temperature": 0.5}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return {file.name: file.read_bytes() for file in directory.iterdir()} | dict.fromkeys(JUNK, b"not wanted")


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The stand-in, with the client pointed at it and an empty cache."""
    older = {**files, "generation_config.json": b'{"temperature": 0.25}'}
    with serving(Hub({OLD: older, NEW: files}, {"main": NEW, "v1": OLD})) as hub:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()


def refusal(*args, **settings) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(*args, **settings)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(args[0]))
    return text


def test_only_what_is_read_is_downloaded(hub: Hub):
    directory = resolve_model(NAME)
    assert sorted(hub.fetched) == sorted(NEEDED | {"model.safetensors"})
    assert {str(file.relative_to(directory)) for file in directory.rglob("*")} == NEEDED | {"model.safetensors"}
    load_model(directory, Policy())
    assert main(["inspect", NAME]) == 0


def test_the_shards_of_the_index_are_downloaded_and_no_others(hub: Hub, files: dict[str, bytes], tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(files["model.safetensors"])
    shards = set(shard(tmp_path).values())
    index = "model.safetensors.index.json"
    whole = {name: (tmp_path / name).read_bytes() for name in (*shards, index)}
    hub.commits = {NEW: {**files, **whole, "model-00009-of-00009.safetensors": b"stray"}}
    directory = resolve_model(NAME)
    assert sorted(hub.fetched) == sorted(NEEDED | shards | {index})
    load_model(directory, Policy())


def test_a_head_published_as_an_archive_is_downloaded(hub: Hub, files: dict[str, bytes]):
    config = json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}).encode()
    hub.commits = {NEW: {"config.json": config, "pytorch_model.bin": b"archive", "README.md": b"words"}}
    directory = resolve_model(NAME)
    assert sorted(hub.fetched) == ["config.json", "pytorch_model.bin"]
    assert (directory / "pytorch_model.bin").read_bytes() == b"archive"


def test_the_second_time_nothing_is_asked_of_the_network(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    first = resolve_model(NAME)
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(NAME) == first
    assert hub.asked == []


def test_what_is_not_in_the_cache_is_said_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = refusal(NAME)
    assert "HF_HUB_OFFLINE is set" in text
    assert f"hf download {NAME}" in text
    assert "no such directory" in text
    assert hub.asked == []


def test_a_download_that_was_cut_off_is_not_taken_for_whole(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    resolve_model(NAME, weights=False)
    assert "model.safetensors" not in hub.fetched
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "not whole in the cache" in refusal(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.fetched.clear()
    resolve_model(NAME)
    assert hub.fetched == ["model.safetensors"], "what is there is not fetched again"


@pytest.mark.parametrize("revision", ["v1", OLD])
def test_a_revision_is_that_commit(hub: Hub, revision: str):
    directory = resolve_model(NAME, revision)
    assert directory.name == OLD
    assert json.loads((directory / "generation_config.json").read_text()) == {"temperature": 0.25}
    assert resolve_model(NAME).name == NEW


def test_all_files_are_of_one_commit(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    """A push between the first file and the weights changes nothing."""
    real = huggingface_hub.snapshot_download

    def then_pushed(*args, **settings):
        snapshot = real(*args, **settings)
        hub.branches["main"] = OLD
        return snapshot

    monkeypatch.setattr(huggingface_hub, "snapshot_download", then_pushed)
    directory = resolve_model(NAME)
    assert directory.name == NEW
    assert (directory / "model.safetensors").exists()


def test_downloads_go_where_they_are_told(hub: Hub, tmp_path: Path):
    directory = resolve_model(NAME, download_dir=tmp_path / "elsewhere")
    assert directory.is_relative_to(tmp_path / "elsewhere")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("refuses", "words"),
    [
        ((401, "GatedRepo"), "a gated model; accept its terms"),
        ((403, "GatedRepo"), "a gated model; accept its terms"),
        ((401, ""), "HF_TOKEN"),
        ((403, ""), "the hub refuses access (403)"),
        ((404, "RepoNotFound"), "no such directory, and no such model on the hub"),
        ((500, ""), "the hub answers with status 500"),
    ],
    ids=str,
)
def test_refusals_of_the_hub_are_clear(hub: Hub, refuses: tuple[int, str], words: str):
    hub.refuses = refuses
    assert words in refusal(NAME)


def test_a_revision_that_is_not_there(hub: Hub):
    assert "no revision 'v9'" in refusal(NAME, "v9")


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    text = refusal(NAME)
    assert "the hub cannot be reached (ConnectError" in text
    assert "no such directory" in text


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "no space left"), (errno.EACCES, "cannot write"), (errno.EIO, "goes on")]
)
def test_a_disk_that_takes_nothing(hub: Hub, monkeypatch: pytest.MonkeyPatch, code: int, words: str):
    def fail(*args, **settings):
        raise OSError(code, "refused")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert words in refusal(NAME)


def test_a_directory_comes_first(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert resolve_model(NAME) == Path(NAME)
    assert "a directory has no revision" in refusal(NAME, "main")
    assert hub.asked == []


@pytest.mark.parametrize(
    "name", ["/no/where", "./no/where", "../where", "no/where/else", "a b", "~/nowhere", "~nobody/x"]
)
def test_what_is_no_id_is_a_directory_that_is_not_there(hub: Hub, name: str):
    with pytest.raises(ConfigError, match=r"no such directory; a model is a directory .* or the id of one on the"):
        read_config(resolve_model(name))
    assert hub.asked == []


@pytest.mark.parametrize(("name", "revision"), [("", None), (None, None), (7, None), (NAME, 7)])
def test_what_is_no_name(hub: Hub, name, revision):
    with pytest.raises(ConfigError, match="a directory or a hub id is needed"):
        resolve_model(name, revision)


def test_a_plan_needs_the_config_alone(hub: Hub):
    name, config = model_config(NAME)
    assert (name, config["model_type"]) == ("tiny", "qwen2_moe")
    assert "model.safetensors" not in hub.fetched


def test_a_download_says_how_far_it_is(tmp_path: Path):
    blobs = tmp_path / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    data = random.Random(0).randbytes(2**24)
    (blobs / "first").write_bytes(data)
    lines: queue.Queue[str] = queue.Queue()
    with log_progress(NAME, tmp_path, lines.put, every_s=0.01):
        (blobs / "second.incomplete").write_bytes(data)
        line = lines.get(timeout=10)
    assert re.fullmatch(r"jaxspec: downloading org/tiny, 0\.0[2-4] GB of it are here\n", line)


def test_nothing_is_said_while_nothing_arrives(tmp_path: Path):
    lines: list[str] = []
    with log_progress(NAME, tmp_path, lines.append, every_s=0.001):
        resolve_model(tmp_path)
    assert lines == []


def test_an_engine_takes_ids(hub: Hub):
    with pytest.raises(ConfigError, match="no revision 'v9' on the hub"):
        LLM(NAME, revision="v9")


def test_a_draft_model_is_downloaded_too(hub: Hub, tmp_path: Path):
    target = load_model(resolve_model(NAME), Policy())
    config = methods.parse({"model": NAME, "revision": "v1", "num_speculative_tokens": 2})
    draft = load_draft(config, target, "auto", tmp_path / "drafts")
    assert isinstance(draft, tuple)
    assert draft[0] == target.net
    assert [folder.name for folder in (tmp_path / "drafts").glob("*/snapshots/*")] == [OLD]


def test_a_draft_may_have_a_revision():
    config = {"model": NAME, "revision": "v1", "num_speculative_tokens": 2}
    assert methods.parse(config).revision == "v1"
    with pytest.raises(ConfigError, match='method "ngram" takes no "revision"'):
        methods.parse({"method": "ngram", "revision": "v1", "num_speculative_tokens": 2})
