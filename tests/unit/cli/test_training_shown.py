"""What a training says on standard error, piped and on a terminal."""

from pathlib import Path

import pytest

from jaxspec.cli.progress import ShownTraining, acceptance_words, figures_of
from jaxspec.cli.train import TrainArgs, _print_facts, _settings
from jaxspec.serve.demo_pair import demo_model_dir

ENTRY = {
    "step": 10, "time_s": 3725.4, "learning_rate": 1.25e-4, "epoch": 0.5, "loss": 4.25, "accuracy_0": 0.5,
    "tokens_per_s": 1234.5, "left_s": 61.0,
}  # fmt: skip
LINE = (
    "epoch 0.5, loss 4.25, first draft right 50.0%, learning rate 0.000125, 1,234 tokens/s, "
    "1:02:05 elapsed, 0:01:01 left"
)


def test_a_line_says_all_that_is_known():
    assert figures_of(ENTRY) == LINE
    measured = figures_of(ENTRY | {"k3/t0/acceptance_length": 1.5, "k3/t0/accepted_at_1": 0.4})
    assert "right 50.0%, tokens per pass k3/t0 1.50, learning rate" in measured
    assert figures_of({"step": 1, "loss": 1.0}) == "loss 1"
    assert "1,234 tokens/s, MFU 12.5%, 1:02:05 elapsed" in figures_of(ENTRY | {"mfu": 0.125})


def test_both_lengths_are_shown_where_they_differ():
    assert acceptance_words(1.25, 2.5) == "1.25 tokens per pass (2.50 where drafted)"
    assert acceptance_words(2.5, 2.501) == "2.50 tokens per pass"


def test_piped_lines(capsys: pytest.CaptureFixture[str]):
    with ShownTraining() as shown:
        for entry in ({"step": 4, "steps": 60}, {"step": 5, "compiled_s": 65.0}, ENTRY, {"step": 20, "measuring": 1}):
            shown(entry)
    assert capsys.readouterr().err.splitlines() == [
        "jaxspec: going on after update 4",
        "jaxspec: compiling the update ...",
        "jaxspec: the update is compiled, the first one took 0:01:05",
        f"jaxspec: 10/60 updates, {LINE}",
        "jaxspec: 20/60 updates, measuring acceptance ...",
    ]


def test_a_finished_run_compiles_nothing(capsys: pytest.CaptureFixture[str]):
    with ShownTraining() as shown:
        shown({"step": 60, "steps": 60})
    assert capsys.readouterr().err == "jaxspec: going on after update 60\n"


def test_facts_are_lines(capsys: pytest.CaptureFixture[str]):
    _print_facts({"rows": 3, "tokens": 9})
    _print_facts({"warning": "few rows"})
    _print_facts({})
    assert capsys.readouterr().err == "jaxspec: rows 3, tokens 9\njaxspec: warning: few rows\n"


@pytest.mark.parametrize("start", ["demo", "runs/mine/best"])
def test_a_head_that_comes_with_jaxspec_is_trained_further_by_name(start: str, tmp_path: Path):
    config = tmp_path / "further.toml"
    lines = ('target = "demo"', 'out = "run"', f'head = {{ kind = "shared_expert", start = "{start}" }}')
    config.write_text("\n".join([*lines, 'data = { train = ["texts.jsonl"] }', "train = { steps = 1 }"]))
    head = _settings(TrainArgs(str(config))).head
    assert head.kind == "shared_expert"
    assert head.start == (str(demo_model_dir("head")) if start == "demo" else start)
