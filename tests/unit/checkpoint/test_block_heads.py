"""Files of heads that draft blocks: every layout that is written is read back to the bit, others are understood."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint.heads.block_config import default_taps
from jaxspec.checkpoint.heads.directory import load_head, save_head, stored_policy
from jaxspec.checkpoint.heads.formats import Verifier
from jaxspec.checkpoint.heads.identify import is_head
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.block_head import BlockSpec
from tests.unit.checkpoint.block_cases import (
    DFLASH2,
    DSPARK,
    EVERY,
    MIXED,
    NATIVE,
    PUBLISHED,
    SPECULATORS,
    block_head,
    block_spec,
)  # fmt: skip
from tests.unit.checkpoint.head_cases import FLOAT32, ROUTED, TARGET, D, V, W, assert_same, head, spec
from tests.unit.checkpoint.test_heads_import import write_archive

VERIFIER = Verifier("models/target", ("Qwen3MoeForCausalLM",))
TRIPS = (
    [(name, of, "native") for name, of in NATIVE.items()]
    + [(name, of, "dflash") for name, of in PUBLISHED.items()]
    + [(name, of, "speculators") for name, of in SPECULATORS.items()]
)


@pytest.mark.parametrize(("of", "form"), [trip[1:] for trip in TRIPS], ids=[f"{c}-{f}" for c, _, f in TRIPS])
def test_what_is_saved_is_loaded_to_the_bit(tmp_path: Path, of: BlockSpec, form):
    made = block_head(of)
    save_head(made, tmp_path / "head", form, verifier=VERIFIER)
    assert is_head(json.loads((tmp_path / "head" / "config.json").read_text()))
    assert_same(load_head(tmp_path / "head", TARGET, FLOAT32), made)
    assert stored_policy(tmp_path / "head").storage.param == np.float32


def published(directory: Path, of: BlockSpec, form: Any = "dflash", **changes: Any) -> Path:
    """A head's directory, with other keys in its config; ``...`` takes one out, a dictionary changes those inside."""
    save_head(block_head(of), directory, form, verifier=VERIFIER)
    config = json.loads((directory / "config.json").read_text())
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
        config[key] = {k: v for k, v in config[key].items() if v is not ...} if isinstance(value, dict) else config[key]
    kept = {key: value for key, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(kept))
    return directory


def renamed(directory: Path, change: Any) -> Path:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file({change(name): x for name, x in tensors.items()}, file)
    return directory


def test_names_of_other_tools_are_understood(tmp_path: Path):
    """ModelOpt leaves the containers out, early SpecForge files have one more, Muse's assistant calls fc otherwise."""
    of = block_spec(markov_kind="gated", **DSPARK)
    bare = renamed(
        published(tmp_path / "bare", of), lambda n: n.replace("markov_head.", "").replace("head.proj", "proj")
    )
    early = renamed(published(tmp_path / "early", of), lambda n: f"logit_head.{n}" if n.startswith("markov") else n)
    muse = renamed(
        published(tmp_path / "muse", of),
        lambda n: (
            n.replace("fc.", "encoder.fc.")
            if n.startswith("fc.")
            else n.replace("hidden_norm.", "encoder.output_norm_enc.")
        ),
    )
    for directory in (bare, early, muse):
        assert_same(load_head(directory, TARGET, FLOAT32), block_head(of))
    selector = block_spec(**DFLASH2)
    codebooks = renamed(
        published(tmp_path / "books", selector), lambda n: f"{n}.weight" if n.endswith("_codebook") else n
    )
    assert_same(load_head(codebooks, TARGET, FLOAT32), block_head(selector))


NO_ANCHOR, USE_SWA = {"sample_from_anchor": ...}, {"use_swa": True, "swa_window_size": 6}
OLD = {"target_layer_ids": ..., "sample_from_anchor": ...}
MEANINGS: dict[str, tuple[BlockSpec, dict[str, Any], dict[str, Any]]] = {
    # Old files of z-lab: keys at the top, no tap ids, no word about the anchor.
    "old": (
        block_spec({"num_hidden_layers": 3}, reads=replace(block_spec().reads, taps=default_taps(3, 8))),
        OLD | {"dflash_config": dict.fromkeys(("block_size", *OLD), ...)}, {"from_anchor": False},
    ),
    "deepspec": (block_spec(**DSPARK), {"dflash_config": ..., "sample_from_anchor": ...}, {"from_anchor": True}),
    "deepspec-dflash": (
        block_spec(from_anchor=True), {"dflash_config": ..., "sample_from_anchor": ..., "markov_rank": 0},
        {"from_anchor": True, "markov_rank": 0},
    ),
    "modelopt": (
        block_spec(**DSPARK), NO_ANCHOR | {"dflash_config": NO_ANCHOR | {"shift_label": True}}, {"from_anchor": True},
    ),
    "causal": (block_spec(MIXED), {"is_causal": ...}, {"causal": (True, False)}),
    "all-causal": (block_spec(MIXED), {"is_causal": ..., "dflash_config": {"causal": True}}, {"causal": (True, True)}),
    # A window without layer_types is none, whatever use_sliding_window says; use_swa gives it to all layers.
    "no-window": (block_spec(), {"sliding_window": 6, "use_sliding_window": True}, {}),
    "use_swa": (block_spec(EVERY), {"layer_types": ..., "sliding_window": ..., "dflash_config": USE_SWA}, {}),
    "logit_scale": (
        block_spec(output_scale=0.5), {"logit_scale": 0.5, "dflash_config": {"output_multiplier": ...}}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANINGS)
def test_what_files_leave_unsaid_is_what_their_writers_mean(tmp_path: Path, case: str):
    of, config, wanted = MEANINGS[case]
    found = load_head(published(tmp_path / "head", of, **config), TARGET, FLOAT32)
    assert found.net.spec == replace(of, **wanted)


def test_taps_follow_the_published_rule():
    assert default_taps(1, 36) == (19,)
    assert default_taps(5, 64) == (2, 17, 32, 47, 62)  # z-lab's ids 1, 16, 31, 46, 61 are the blocks before
    assert default_taps(8, 40)[0::7] == (2, 38)


def test_a_mask_embedding_beside_the_weights_is_read(tmp_path: Path):
    directory, mask_D = published(tmp_path / "head", block_spec()), np.arange(D, dtype=np.float32)
    write_archive(directory / "mask_embedding.pt", {"embedding": mask_D}, mask_token_id=7)
    found = load_head(directory, TARGET, FLOAT32)
    assert found.net.spec.own_mask
    np.testing.assert_array_equal(np.asarray(found.params["params"]["mask_D"]), mask_D)
    write_archive(directory / "mask_embedding.pt", {"embedding": np.zeros((3, D), np.float32)}, per_position=True)
    with pytest.raises(ConfigError, match=r"mask_embedding has the shape \[3, 32\]"):
        load_head(directory, TARGET, FLOAT32)


WRONG: dict[str, tuple[BlockSpec, dict[str, Any], str]] = {
    "taps": (block_spec(), {"target_layer_ids": [1, 2, 3]}, "contradicts itself about the layer boundaries"),
    "mask": (block_spec(), {"mask_token_id": ..., "dflash_config": {"mask_token_id": ...}}, "names none; write"),
    "window": (block_spec(EVERY), {"sliding_window": ...}, "states no sliding_window"),
    "layer_types": (block_spec(), {"layer_types": ["full_attention"] * 2}, "2 layer_types, but 1 layers"),
    "domino": (block_spec(), {"dflash_config": {"projector_type": "domino"}}, "Domino's correction"),
    "markov": (block_spec(**DSPARK), {"markov_head_type": "rnn", "dflash_config": {"markov_head_type": ...}}, "of 'v"),
    "selector": (block_spec(**DFLASH2), {"dflash_config": {"selector_top_k": ...}}, "must state selector_top_k"),
    "groups": (block_spec(**DFLASH2), {"dflash_config": {"conv_group_size": 5}}, "groups of 5 does not fit"),
    "deep": (block_spec(), {"target_layer_ids": [1, 9, 10], "dflash_config": {"target_layer_ids": ...}}, "from 0 to 8"),
    "block": (block_spec(), {"block_size": 1, "dflash_config": {"block_size": 1}}, "leave nothing to draft"),
    "target": (block_spec(), {"target_hidden_size": 9}, "reads vectors of 9, the target's hidden size is 32"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_one_error(tmp_path: Path, case: str):
    of, config, says = WRONG[case]
    with pytest.raises(ConfigError, match=says):
        load_head(published(tmp_path / "head", of, **config), TARGET, FLOAT32)


def test_tensors_that_mean_something_else_are_refused(tmp_path: Path):
    """Laguna gates its attention and normalizes each tap: without them it would draft badly and not fail."""
    directory = published(tmp_path / "head", block_spec())
    tensors = load_file(directory / "model.safetensors")
    save_file(
        tensors | {"layers.0.self_attn.g_proj.weight": np.ones((4, D), np.float32)}, directory / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"1 not known: layers.0.self_attn.g_proj"):
        load_head(directory, TARGET, FLOAT32)


UNABLE = [
    (block_spec(), "eagle3", "it drafts blocks.*These formats can: dflash, speculators"),
    (block_spec({"model_type": "llama"}), "dflash", "not normalized"),
    (block_spec(own_mask=True), "dflash", "embedding of its mask"),
    (block_spec(ROUTED), "dflash", "layers have experts, .* dense. No other engine's format can"),
    (block_spec(conv_taps=2, conv_group=4), "dflash", "a selector or a convolution alone"),
    (block_spec(EVERY), "speculators", "its windows end where"),
    (block_spec(EVERY, causal=(True, False)), "dflash", "in a way that no config states"),
    (block_spec(softcap=3.0), "speculators", "it scales embeddings or logits"),
    (block_spec(draft_vocab=V), "speculators", "over the whole vocabulary"),
]


@pytest.mark.parametrize(("of", "form", "says"), UNABLE)
def test_a_format_that_cannot_express_a_head_says_why(tmp_path: Path, of: BlockSpec, form, says: str):
    with pytest.raises(ConfigError, match=says):
        save_head(block_head(of), tmp_path / "head", form, verifier=VERIFIER)


def test_only_heads_of_blocks_are_written_as_such(tmp_path: Path):
    with pytest.raises(ConfigError, match="it does not draft blocks"):
        save_head(head(spec()), tmp_path / "head", "dflash")


def test_a_published_config_says_everything_in_both_ways(tmp_path: Path):
    save_head(block_head(block_spec(draft_vocab=W, **DSPARK)), tmp_path / "head", "dflash")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    wanted = {"block_size": 4, "mask_token_id": 7, "target_layer_ids": [1, 3, 4], "sample_from_anchor": True}
    wanted |= {"markov_rank": 5, "markov_head_type": "vanilla", "enable_confidence_head": True}
    assert wanted.items() <= config.items()
    assert wanted.items() <= config["dflash_config"].items()
    assert config["architectures"] == ["Qwen3DSparkModel"]
