"""What rollouts gain by speculation, and what log-probabilities cost that are the engine's own to the bit.

python -m lab.measure_rollouts --dtype bfloat16 --rows 8 --tokens 64 --rounds 3
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import LLM, RequestOutput, SamplingParams
from jaxspec.checkpoint.load.model import load_model
from jaxspec.models.transformer import teacher_forced
from jaxspec.nn.policy import make_policy
from jaxspec.serve.demo_pair import resolve_model, resolve_speculation
from jaxspec.train.policy.policy_settings import load_policy_settings
from jaxspec.train.policy.rollouts import Rollout, batch_of, rollouts_of, scored


def timed(rounds: int, *calls: Callable[[], Any]) -> list[float]:
    """Returns median seconds of each call, in turns; the first turn compiles and does not count."""
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for call, own in zip(calls, seconds, strict=True):
            began = time.monotonic()
            call()
            if number:
                own.append(time.monotonic() - began)
    return [statistics.median(own) for own in seconds]


def trainer_forward(directory: Path, dtype: str, rollouts: list[Rollout], length: int, rows: int) -> Callable[[], Any]:
    """Returns what a trainer computes that may round otherwise: one forward over whole texts, ``rows`` at a time."""
    model = load_model(directory, make_policy(dtype))
    batch = batch_of(rollouts, length)

    @jax.jit
    def forward(params: Any, token_BT: Any, position_BT: Any, segment_BT: Any) -> Any:
        logits, _ = teacher_forced(model.net, params, token_BT, position_BT, segment_BT)
        logp = jax.nn.log_softmax(logits[:, :-1], axis=-1)
        return jnp.take_along_axis(logp, token_BT[:, 1:, None], axis=-1)[..., 0]

    def run() -> np.ndarray:
        parts = [
            forward(model.params, *(x[i : i + rows] for x in (batch.token_BT, batch.position_BT, batch.segment_BT)))
            for i in range(0, len(rollouts), rows)
        ]
        return np.concatenate([np.asarray(part) for part in parts])

    return run


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Returns seconds of rollouts, scores and forwards, and how far the forward is off."""
    prompts = list(load_policy_settings("demo").rollout.prompts)[: args.prompts]
    directory, length = resolve_model(args.model), args.tokens + 32
    config = {"method": args.method, "model": args.draft or args.model, "num_speculative_tokens": args.k}
    llm = LLM(
        directory, speculative_config=resolve_speculation(config), dtype=args.dtype, kernels=args.kernels,
        max_model_len=length, max_num_seqs=args.rows,
    )  # fmt: skip
    plain = LLM(llm.model, max_model_len=length, max_num_seqs=args.rows)
    params = SamplingParams(n=args.rows, temperature=1.0, max_tokens=args.tokens, logprobs=0, seed=7, ignore_eos=True)

    def rollout(engine: LLM) -> list[RequestOutput]:
        return engine.generate(prompts, params, use_tqdm=False)

    for engine in (llm, plain):
        engine.finish_compiling()
    outputs = rollout(llm)
    rollouts = rollouts_of(outputs, lambda prompt, text: 0.0, "reinforce")
    texts = [one.ids for one in rollouts]
    forward = trainer_forward(directory, args.dtype, rollouts, length, args.rows)
    drafted_s, plain_s, score_s, forward_s = timed(
        args.rounds, lambda: rollout(llm), lambda: rollout(plain), lambda: llm.score(texts), forward
    )
    batch = batch_of(rollouts, length)
    sampled = batch.loss_BT[:, 1:]
    off = np.abs(forward() - batch.old_BT[:, 1:])[sampled]
    tokens = int(sampled.sum())
    return {
        "tokens": tokens, "rollout_tokens_per_s": tokens / drafted_s, "plain_tokens_per_s": tokens / plain_s,
        "speedup": plain_s / drafted_s,
        "acceptance_length": float(np.mean([output.metrics.mean_acceptance_length for output in outputs])),
        "score_s": score_s, "forward_s": forward_s, "score_over_rollout": score_s / drafted_s,
        "different_from_score": int((scored(rollouts, llm.score(texts), length) != batch.old_BT).sum()),
        "forward_mean_off": float(off.mean()), "forward_most_off": float(off.max()),
    }  # fmt: skip


def main() -> None:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--method", default="shared_expert")
    parser.add_argument("--draft", help="what drafts, by default what comes with the model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    figures = measure(parser.parse_args())
    print(json.dumps({name: round(value, 6) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
