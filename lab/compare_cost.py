"""What drafting with each compared head costs: the time of five drafts over that of a plain step, one row, bfloat16.

``taskset -c 1 python lab/compare_cost.py DIR`` after ``lab/compare_heads.py --out DIR``; it writes
``DIR/costs.json``, which ``compare_heads.py --table`` shows. Heads and the plain step are timed in turns.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.draft_timer import PROPOSALS, propose_often
from jaxspec.checkpoint.heads.directory import load_head
from jaxspec.checkpoint.heads.identify import is_head
from jaxspec.checkpoint.load.model import Model, load_model, read_config
from jaxspec.decode.dispatch import dispatch
from jaxspec.decode.state import Target, init_state
from jaxspec.decode.step import StepPlan
from jaxspec.draft.head_drafter import head_drafter
from jaxspec.draft.small_lm import SmallLm
from jaxspec.nn.policy import Policy, policy_for
from jaxspec.protocol import Drafter, NoDrafts
from jaxspec.pytree import replace
from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.topology import chain

LENGTH, CAPACITY, SEEN, BLOCK, STEPS = 5, 512, 256, 128, 8


def drafter_of(directory: Path, target: Model, policy: Policy) -> Drafter:
    """The drafter of a saved head or draft model."""
    base = (target.net, target.params)
    if is_head(read_config(directory)):
        return head_drafter(load_head(directory, target.net.arch, policy), base, chain(LENGTH), BLOCK)
    model = load_model(directory, policy)
    return SmallLm(model.params, model.net, chain(LENGTH), BLOCK)


def drafting(target: Target, drafter: Drafter) -> Callable[[], float]:
    """Times one proposal after ``SEEN`` positions, in seconds."""
    state = init_state(target, drafter, 1, CAPACITY, slack=drafter.topology.nodes)
    anchor = replace(state.anchor, length_B=jnp.full(1, SEEN, jnp.int32))
    program = jax.jit(propose_often, static_argnums=3).lower(drafter, state.draft, anchor, "match").compile()

    def measure() -> float:
        began = time.perf_counter()
        jax.block_until_ready(program(drafter, state.draft, anchor))
        return (time.perf_counter() - began) / PROPOSALS

    return measure


def plain(target: Target) -> Callable[[], float]:
    """Times one step of plain decoding after ``SEEN`` positions, in seconds."""
    drafter = NoDrafts()
    state = init_state(target, drafter, 1, CAPACITY, slack=1)
    sampling = replace(state.sampling, max_length_B=jnp.full(1, CAPACITY, jnp.int32))
    state = replace(
        state, sampling=sampling, active_B=jnp.ones(1, bool), length_B=jnp.full(1, SEEN, jnp.int32),
        anchor_B=jnp.ones(1, jnp.int32),
    )  # fmt: skip
    args = (target, drafter, state, jnp.int32(STEPS), jnp.asarray(False))
    program = jax.jit(partial(dispatch, plan=StepPlan(steps=STEPS))).lower(*args).compile()

    def measure() -> float:
        began = time.perf_counter()
        jax.block_until_ready(program(*args))
        return (time.perf_counter() - began) / STEPS

    return measure


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("out", type=Path, help="directory of the comparison")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(argv)
    seeds = sorted(args.out.glob("seed*.json"))
    if not seeds:
        parser.error(f"{args.out} holds no seed*.json; run compare_heads.py first")
    policy = policy_for("bfloat16", jax.default_backend())
    model = load_model(demo_model_dir("target"), policy)
    target = Target(model.params, model.net, BLOCK)
    timers, costs = {"plain": plain(target)}, {}
    for name in json.loads(seeds[0].read_text())["heads"]:
        place = seeds[0].with_suffix("") / name.replace(" ", "-").replace(",", "")
        timers[name] = drafting(target, drafter_of(place, model, policy))
        print(f"{name}: compiled", flush=True)
    for timer in timers.values():
        timer()
    times = np.asarray([[timer() for timer in timers.values()] for _ in range(args.rounds)])
    ratios = times[:, 1:] / times[:, :1]
    for name, column in zip(list(timers)[1:], ratios.T, strict=True):
        low, middle, high = np.percentile(column, [25, 50, 75])
        costs[name] = {"draft_cost": float(middle), "quartiles": [float(low), float(high)]}
    about = {"length": LENGTH, "rounds": args.rounds, "plain_step_s": float(np.median(times[:, 0])), "heads": costs}
    (args.out / "costs.json").write_text(json.dumps(about, indent=2) + "\n")
    print(json.dumps(about, indent=2))


if __name__ == "__main__":
    main()
