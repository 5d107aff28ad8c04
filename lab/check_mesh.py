"""Compares the greedy text of every small MoE model on every mesh with that of one device; no difference may be.

Run ``python -m lab.check_mesh --out cases.jsonl``; one line per case is appended, and cases that the file has are
not run again. Experts that a mesh does not divide get redundant slots; any other size that it does not divide is
``refused``. It exits with 1 if a text differs or a case fails.
Nine tenths of the time is compiling, which therefore gets the quick options of ``scripts/test``.
"""

import argparse
import gc
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.golden_files import GOLDENS, unpack_goldens

XLA_FLAGS = (
    "--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true",
    "--xla_force_host_platform_device_count=8",
)  # fmt: skip
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": " ".join(XLA_FLAGS),
}
MESHES = {
    "1x1": {"data": 1}, "8x1": {"data": 8}, "1x8": {"expert": 8}, "4x2": {"data": 4, "expert": 2},
    "2x4": {"data": 2, "expert": 4}, "2x2x2": {"data": 2, "expert": 2, "tensor": 2},
}  # fmt: skip
DRAFTS: Mapping[str, dict[str, Any] | None] = {
    "plain": None,
    "chain": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1},
    "tree": {"method": "ngram", "speculative_token_tree": [2, 2], "prompt_lookup_min": 1},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
}
LOADS = ("own", "same")
KEY = ("family", "mesh", "transport", "drafts", "load")
ROWS, TOKENS = 8, 10
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": ROWS, "prefill_buckets": (8,), "max_logprobs": 0,
}  # fmt: skip
ROUTER = re.compile(r"(\.gate|\.router)\.(weight|bias|tid2eid|e_score_correction_bias)$|moe\.e_score_correction_bias$")
REFUSED = "cannot be split evenly"


def goldens() -> dict[str, Any]:
    """Every golden MoE model's architecture, those that compile quickest first."""
    from jaxspec.models.catalog import arch_of

    archs = {file.parent.name: arch_of(json.loads(file.read_text())) for file in sorted(GOLDENS.glob("*/config.json"))}
    moe = [(name, arch) for name, arch in archs.items() if arch.is_moe]
    return dict(sorted(moe, key=lambda item: (item[1].chain_only is not None, len(item[1].layers))))


def with_one_load(source: Path, place: Path) -> Path:
    """A copy of a model whose routers find all experts equally good: every token takes the first A of them."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_bytes((source / "config.json").read_bytes())
    content = bytearray((source / "model.safetensors").read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    routers = {name: entry for name, entry in json.loads(content[8:begin]).items() if ROUTER.search(name)}
    assert routers, f"{source} has no router"
    for name, entry in routers.items():
        first, last = (begin + n for n in entry["data_offsets"])
        content[first:last] = bytes(last - first)
        if name.endswith("tid2eid"):  # the choices themselves, by token id
            rows, count = entry["shape"]
            width = (last - first) // (rows * count)
            content[first:last] = b"".join(n.to_bytes(width, "little") for n in range(count)) * rows
    (place / "model.safetensors").write_bytes(content)
    return place


def text_of(llm: Any) -> tuple[list[list[int]], int]:
    """Greedy continuations, and accepted drafts; more requests than rows, so that rows are used again."""
    import numpy as np

    from jaxspec.serve.request import SamplingParams

    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 90, size).tolist() for size in (3, 9, 14, 5, 7, 2, 11, 4, 6, 10)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    return [output.outputs[0].token_ids for output in outputs], accepted


def cases(args: argparse.Namespace, archs: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yields what is asked for and possible, family by family."""
    for family in args.families or archs:
        arch = archs[family]
        has = {"tree": arch.chain_only is None, "mtp": bool(arch.mtp) and _predicts(family)}
        for mesh in args.meshes:
            for drafts in (d for d in args.drafts if has.get(d, True)):
                for load in args.loads:
                    yield dict(zip(KEY, (family, mesh, args.transport, drafts, load), strict=True))


def _predicts(family: str) -> bool:
    return b'"mtp_logits"' in (GOLDENS / family / "reference.safetensors").read_bytes()[:10000]


def with_slots(model: Path, arch: Any, devices: int, file: Path) -> int:
    """Writes a placement whose redundant slots make a multiple of ``devices``; returns how many, 0 for none."""
    from jaxspec.checkpoint.files.fingerprint import digests
    from jaxspec.nn.moe import MoeSpec
    from jaxspec.perf.expert_placement import LayerSlots, Placement, balanced, save_placement

    routed = {y: layer.ffn.experts for y, layer in enumerate(arch.layers) if isinstance(layer.ffn, MoeSpec)}
    (experts,) = set(routed.values())
    redundant = -experts % devices
    if redundant:
        layers = tuple(LayerSlots(y, balanced([1.0] * experts, devices, redundant)) for y in routed)
        named = {"name": model.name, **digests(json.loads((model / "config.json").read_text()))}
        save_placement(Placement(1, named, devices, redundant, layers, "equal loads"), file)
    return redundant


def check(
    case: Mapping[str, str], model: Path, alone: list[list[int]], placement: Path | None = None
) -> dict[str, Any]:
    """Runs one case: ``equal``, ``different``, ``refused`` where the mesh does not divide the model, or ``failed``."""
    from jaxspec.errors import ConfigError
    from jaxspec.serve.llm import LLM

    try:
        llm = LLM(
            model, **SETTINGS, mesh=MESHES[case["mesh"]], expert_transport=case["transport"],
            speculative_config=DRAFTS[case["drafts"]], expert_placement=placement,
        )  # fmt: skip
        text, accepted = text_of(llm)
    except Exception as error:
        refused = isinstance(error, ConfigError) and REFUSED in str(error)
        return {"result": "refused" if refused else "failed", "why": f"{type(error).__name__}: {str(error)[:300]}"}
    differing = [n for n, (a, b) in enumerate(zip(text, alone, strict=True)) if a != b]
    words = {"used": llm.model.net.policy.compute.transport, "accepted": accepted, "differing": differing}
    return {"result": "different" if differing else "equal", **words}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compares greedy text on meshes with that of one device.")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; cases in it are not run again")
    parser.add_argument("--families", nargs="+", help="folders of tests/golden; by default all with experts")
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES), help="data x expert (x tensor)")
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=list(DRAFTS))
    parser.add_argument(
        "--loads", nargs="+", choices=LOADS, default=list(LOADS), help="own routing, or all tokens to the same A"
    )
    parser.add_argument("--transport", choices=("auto", "sum", "padded"), default="padded")
    parser.add_argument("--time", type=float, default=float("inf"), help="seconds after which no case is begun")
    return parser.parse_args()


def main() -> int:
    """Runs what is not there yet; returns the exit code."""
    args, began = arguments(), time.monotonic()
    unpack_goldens()
    archs = goldens()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {_key(entry): entry["result"] for entry in map(json.loads, lines)}
    results: Counter[str] = Counter()
    texts: dict[tuple[str, str], list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as name, args.out.open("a") as out:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(name) / "cache"))
        for case in cases(args, archs):
            if done.get(_key(case), "failed") == "failed" and time.monotonic() - began < args.time:
                started = time.monotonic()
                model = GOLDENS / case["family"]
                if case["load"] == "same":
                    model = with_one_load(model, Path(name) / case["family"])
                if (case["family"], case["load"]) not in texts:
                    texts[case["family"], case["load"]] = _alone(model)
                slots = Path(name) / "placement.json"
                redundant = with_slots(model, archs[case["family"]], MESHES[case["mesh"]].get("expert", 1), slots)
                result = case | check(case, model, texts[case["family"], case["load"]], slots if redundant else None)
                result["redundant"] = redundant
                result["time_s"] = round(time.monotonic() - started, 1)
                out.write(json.dumps(result) + "\n")
                out.flush()
                print(json.dumps(result), flush=True)
                done[_key(case)] = result["result"]
                gc.collect()
            results[done.get(_key(case), "not run")] += 1
    print(json.dumps(results))
    return int(bool(results["different"] + results["failed"]))


def _key(case: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(case[name] for name in KEY)


def _alone(model: Path) -> list[list[int]]:
    from jaxspec.serve.llm import LLM

    return text_of(LLM(model, **SETTINGS))[0]


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    sys.exit(main())
