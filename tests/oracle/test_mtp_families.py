"""Multi-token prediction of many families through the public door: right, wrong and mixed drafts change no token.

The golden models are edited: the more their layers add to the embedding, the more often prediction, which is made to
say what follows from the last token alone, is wrong.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.draft.mtp_drafter import MtpHeads
from jaxspec.models.catalog import arch_of
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import RequestOutput, SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = (
    "qwen3_next",
    "qwen3_5_moe",
    "nemotron_h",
    "mimo_v2_flash",
    "longcat_flash",
    "exaone_moe",
    "hy_v3",
    "ernie4_5_moe",
    "mellum",
    "step3p5",
    "step3p7",
    "bailing_hybrid",
)
OUTPUTS = ("o_proj.weight", "out_proj.weight", "attention.dense.weight", "down_proj.weight", "down_proj")
SETTINGS = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "max_logprobs": 0, "prefill_buckets": (16,)}
DRAFTS, NEW, IDENTITIES = 3, 30, slice(4, None)
LENGTHS = (19, 2, 9)  # of prompts
# How much the target's layers add, and whether prediction says the likeliest token or the least likely.
KINDS = {"right": (0.0, 1.0), "wrong": (0.1, -1.0), "mixed": (0.15, 1.0)}


def edited(name: str, share: float, sign: float, directory: Path) -> Path:
    """Writes a golden model whose layers add a share of what they did, and its prediction nothing."""
    directory.mkdir()
    shutil.copy(GOLDEN / name / "config.json", directory)
    tensors = {key: np.array(x) for key, x in TensorFiles.of(GOLDEN / name).items()}
    arch = arch_of(json.loads((directory / "config.json").read_text()))
    table = known_tables()[arch.family]
    rules = {rule.leaf: rule.hub for rule in table.mtp_rules(arch)}
    behind = {key for hub in rules.values() for key in hub}
    for key, x in tensors.items():
        if key.endswith(OUTPUTS):
            tensors[key] = (x * (0.0 if key in behind else share)).astype(x.dtype)
        elif name == "longcat_flash" and key.endswith("e_score_correction_bias"):
            x[IDENTITIES] = -1e3  # what they add cannot be scaled
    for n in range(len(arch.mtp)):
        (embed_norm,), (join,), (norm,) = (rules[f"mtp_{n}/{leaf}"] for leaf in ("embed_norm_D", "join_XD", "norm_D"))
        dtype, dim = tensors[join].dtype, arch.model_dim
        tensors[embed_norm] = np.full(dim, 1 - arch.norm_offset, dtype)
        tensors[join] = np.concatenate([sign * np.eye(dim), np.zeros((dim, dim))], axis=1).astype(dtype)
        tensors[norm] = tensors[table.hub_names("norm_D")[0]]
        for head in rules.get(f"mtp_{n}/head_DV", ()):
            tensors[head] = tensors[table.hub_names("head_DV")[0]]
    save_file(tensors, directory / "model.safetensors")
    return directory


def outputs_of(directory: Path, config: dict | None) -> list[RequestOutput]:
    llm = LLM(directory, speculative_config=config, **SETTINGS)
    assert isinstance(llm.engine.drafter, MtpHeads) == (config is not None)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, 96, length).tolist() for length in LENGTHS]
    styles = [SamplingParams(temperature=t, seed=4, max_tokens=NEW, ignore_eos=True) for t in (0.0, 0.0, 0.8)]
    return llm.generate(prompts, styles)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if (name, kind) == ("qwen3_next", "mixed") else [pytest.mark.slow])
        for name in FAMILIES
        for kind in KINDS
    ],
)
@pytest.mark.usefixtures("shared_programs")
def test_drafts_of_every_kind(name: str, kind: str, tmp_path: Path):
    directory = edited(name, *KINDS[kind], tmp_path / "model")
    plain = outputs_of(directory, None)
    found = outputs_of(directory, {"method": "mtp", "num_speculative_tokens": DRAFTS})
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in plain]
    counts = [(o.metrics.num_steps, o.metrics.num_accepted_tokens) for o in found[:2]]
    # The last of several layers starts as many positions later; until then a step commits one token.
    layers = len(arch_of(json.loads((directory / "config.json").read_text())).mtp)
    alone = [max(layers + 1 - length, 0) for length in LENGTHS[:2]]
    fewest = [n + -(-(NEW - n) // (DRAFTS + 1)) for n in alone]
    if kind == "mixed":
        assert 0 < sum(o.metrics.num_accepted_tokens for o in found) < sum(o.metrics.num_draft_tokens for o in found)
    else:
        assert counts == [(steps, NEW - steps) if kind == "right" else (NEW, 0) for steps in fewest]
