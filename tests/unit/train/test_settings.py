"""Training configs: the shipped ones load, and a wrong value is one error that says what is known."""

from pathlib import Path

import pytest

from jaxspec.config import differences, shipped
from jaxspec.errors import ConfigError
from jaxspec.train.settings import identity, load_run_settings

SMALL = """
target = "demo"
out = "here"
head = "eagle3"
[data]
train = ["a.jsonl"]
[train]
steps = 3
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "run.toml").write_text(SMALL)
    return str(tmp_path / "run.toml")


@pytest.mark.parametrize("name", sorted(p.stem for p in shipped("heads").glob("*.toml")))
def test_shipped_heads_load(name: str):
    assert load_run_settings("demo", [f'head="{name}"']).head.kind == name


@pytest.mark.parametrize("name", sorted(p.stem for p in shipped("train").glob("*.toml")))
def test_shipped_runs_load(name: str):
    assert load_run_settings(name).train.steps > 0


def test_values_are_changed_from_outside(config: str):
    changes = ["train.steps=7", "data.train=['b.jsonl', 'c.txt']", "head.layers=2", "target=some/dir", "mesh.data = 2"]
    found = load_run_settings(config, changes, out="there")
    assert (found.train.steps, found.data.train, found.head.layers) == (7, ("b.jsonl", "c.txt"), 2)
    assert (found.target, found.mesh.data, found.out) == ("some/dir", 2, "there")
    assert found.head.kind == "eagle3"


def test_another_head_is_chosen_by_name(config: str):
    assert load_run_settings(config, ["head=eagle", "head.bias=false"]).head.kind == "eagle"
    inline = load_run_settings(config, ['head={kind="medusa"}', "head.heads=3"]).head
    assert (inline.kind, inline.heads) == ("medusa", 3)


WRONG = [
    ("train.stepz=3", r"unknown key train\.stepz; known in \[train\] are steps, epochs, rows, accumulation"),
    ("speed=3", "unknown key speed; known are target, out, head"),
    ("head.tapz=[1]", r"unknown key head\.tapz; known in \[head\] are kind, layers"),
    ("train.steps=many", r"Expected `int`, got `str` - at `\$\.train\.steps`"),
    ("train.steps=0", "train: steps must be at least 1, got 0"),
    ("train.epochs=2", "train: got both steps = 3 and epochs; set train.steps=0 to count by epochs"),
    ("train.epochs=-1", "train: epochs must be above 0, got -1"),
    ("head.kind=eagle9", "Invalid enum value 'eagle9'"),
    ("head=eagle9", "eagle9: no such file, and not one of the names that ship in configs/heads: dflash, dflash2, "),
    ("data.train=[]", "data: train names no file"),
    ("data.held_out_fraction=1.5", "held_out_fraction must be from 0"),
    ("optimizer.betas=[0.9, 1.5]", r"shares must be from 0 to 1, got betas\[1\] = 1\.5"),
    ("optimizer.learning_rate=0", "learning_rate and eps must be above 0"),
    ("loss.keep=0.1", "0 < keep_least <= keep <= 1"),
    ("evaluation.lengths=[]", "evaluation: lengths must be"),
    ("mesh.data=3", "8 rows cannot be split evenly over data = 3"),
    ("head.draft_vocab_size=0", "head: draft_vocab_size must be at least 1"),
    ("train.steps", "write table.key=value"),
    ("data.train=[a.jsonl]", r"""--set data\.train=\[a\.jsonl\]: not TOML .*--set 'data\.train=\["a\.jsonl"\]'"""),
    ("data.train=[a.jsonl, b c.txt]", r"""--set 'data\.train=\["a\.jsonl", "b c\.txt"\]'"""),
    ("head={kind=medusa}", r"--set head=\{kind=medusa\}: not TOML .*quotes"),
    ("train.micro_rows=3", "micro_rows must divide rows = 8, got 3"),
    ("train.memory_gb=0", "memory_gb must be above 0, got 0"),
    ("target.name=x", "target is a value, not a table"),
]


@pytest.mark.parametrize(("change", "says"), WRONG, ids=[change for change, _ in WRONG])
def test_wrong_values_are_one_error(config: str, change: str, says: str):
    with pytest.raises(ConfigError, match=says):
        load_run_settings(config, [change])


def test_files_that_are_missing_or_no_toml(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such file, and not one of the names that ship in configs/train: demo"):
        load_run_settings("nothing.toml")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        load_run_settings(str(tmp_path / "bad.toml"))
    (tmp_path / "bare.toml").write_text('target = "demo"\n')
    with pytest.raises(ConfigError, match="missing required field `out`"):
        load_run_settings(str(tmp_path / "bare.toml"))


def test_identity_leaves_out_what_changes_no_result(config: str):
    run = load_run_settings(config)
    same = load_run_settings(config, ["train.save_every=7", "train.log_every=2", "logging.tensorboard=false"], out="b")
    assert identity(run) == identity(load_run_settings(config, ["train.micro_rows=2", "train.memory_gb=3"]))
    other = load_run_settings(config, ["optimizer.clip=1"])
    assert identity(run) == identity(same)
    assert differences(identity(run), identity(other)) == ["optimizer.clip was 0.5 and is 1.0"]
