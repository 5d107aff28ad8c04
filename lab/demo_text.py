"""Lets the demo target continue pieces of the corpus, so that its draft learns from its text too."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from demo_models import DECODE, Recipe

from jaxspec.checkpoint.load.model import load_model
from jaxspec.decode.dispatch import dispatch
from jaxspec.decode.prefill import admit, prefill
from jaxspec.decode.runner import Runner
from jaxspec.decode.state import Target, init_sampling, init_state
from jaxspec.decode.step import StepPlan
from jaxspec.protocol import NoDrafts
from jaxspec.pytree import replace
from jaxspec.topology import PLAIN

STEPS = 32
TEMPERATURE = 0.7

PREFILL, ADMIT = jax.jit(prefill, donate_argnums=2), jax.jit(admit, donate_argnums=0)
DISPATCH = {("dispatch", PLAIN): jax.jit(partial(dispatch, plan=StepPlan(steps=STEPS)), donate_argnums=2)}


def continue_prompts(target: Target, prompt_BT: np.ndarray, length: int, seed: int) -> np.ndarray:
    """Continues prompts to ``length`` tokens, even rows greedily and odd rows by sampling.

    Args:
      target: model.
      prompt_BT: int32 prompts of equal length.
      length: tokens of each result, prompt included.
      seed: of the sampling.

    Returns:
      int32 [B, length].
    """
    (rows, given), drafter = prompt_BT.shape, NoDrafts()
    runner = Runner(target, {PLAIN: drafter}, (given,), {("prefill", given): PREFILL, "admit": ADMIT, **DISPATCH})
    state = init_state(target, drafter, rows, length, slack=given)
    for row, prompt_T in enumerate(prompt_BT):
        sampling = replace(
            init_sampling(1, 8),
            temperature_B=jnp.full(1, TEMPERATURE * (row % 2), jnp.float32),
            max_length_B=jnp.full(1, length, jnp.int32),
            key_BX=jnp.array([[seed, row]], jnp.uint32),
        )
        state = runner.admit(runner.prefill(state, row, prompt_T), row, prompt_T, sampling)
    while bool(np.asarray(state.active_B).any()):
        state, _ = runner.dispatch(state, PLAIN, STEPS)
    return np.asarray(state.history_BS[:, :length])


def prompts(tokens: np.ndarray, recipe: Recipe, index: int) -> np.ndarray:
    """The prompts of one batch, a pure function of its arguments."""
    rng = np.random.default_rng((recipe.text_seed, index))
    starts = rng.integers(len(tokens) - recipe.prompt, size=recipe.rows)
    return np.stack([tokens[start : start + recipe.prompt] for start in starts]).astype(np.int32)


def write_text(model: Path, tokens: np.ndarray, out: Path, recipe: Recipe, sequences: int) -> np.ndarray:
    """Returns rows of the target's own text, written now or by an earlier call.

    Args:
      model: directory of the target.
      tokens: stream that the prompts are cut from.
      out: directory that receives one file per batch.
      recipe: sizes.
      sequences: rows, rounded up to whole batches.

    Returns:
      int32 [rows, length + 1].
    """
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{index:04d}.npy" for index in range(-(-sequences // recipe.rows))]
    missing = [index for index, file in enumerate(files) if not file.exists()]
    if missing:
        loaded = load_model(model, DECODE)
        target = Target(loaded.params, loaded.net)
    for index in missing:
        seed = recipe.text_seed * 1_000_003 + index
        text = continue_prompts(target, prompts(tokens, recipe, index), recipe.length + 1, seed)
        part = files[index].with_suffix(".part.npy")
        np.save(part, text.astype(np.uint16))
        part.rename(files[index])
        print(f"{out.name}: batch {index + 1} of {len(files)}")
    return np.concatenate([np.load(file) for file in files]).astype(np.int32)
