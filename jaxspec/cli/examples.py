"""An example of each command and what its exit status says, as ``--help`` shows them."""

COMMON = "2 the command cannot run as it was given; 130, 143 ended by SIGINT, SIGTERM"
STATUS = f"0 done; 1 failed; {COMMON}"

EXAMPLES = {
    "generate": (
        "jaxspec generate --model DIR --input prompts.jsonl --output answers.jsonl "
        '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'',
        "jaxspec generate --prompt 'def read_lines(path):' "
        '--speculative-config \'{"method": "shared_expert", "model": "demo", "num_speculative_tokens": 5}\'',
    ),
    "chat": ("jaxspec chat", "jaxspec chat DIR --temperature 0.7"),
    "inspect": ("jaxspec inspect DIR", "jaxspec inspect HEAD --target DIR"),
    "sizes": (
        "jaxspec sizes deepseek-v3 --hardware h200x8 h200x16",
        "jaxspec sizes qwen3-30b-a3b --hardware h100 --train eagle3 --set train.micro_rows=1",
    ),
    "train": ("jaxspec train eagle3 --set target=DIR --set 'data.train=[\"answers.jsonl\"]' --out runs/mine",),
    "train policy": ("jaxspec train policy demo --set steps=10 --out runs/mine",),
    "token-map": ("jaxspec token-map DIR answers.jsonl --size 32768 --output token_map.npy",),
    "plot": ("jaxspec plot runs/mine runs/other --output both.png",),
    "convert": ("jaxspec convert model.gguf DIR",),
    "export": ("jaxspec export runs/mine/best exported --format eagle3",),
    "import": ("jaxspec import PUBLISHED imported --target DIR",),
    "plan": (
        "jaxspec plan --model qwen3-30b-a3b --hardware h200x8 --drafter eagle --plot plan.png",
        "jaxspec plan --model qwen3-30b-a3b --hardware h100 --train eagle3 --set train.rows=16",
    ),
    "calibrate": ("jaxspec calibrate DIR --output calibration.json",),
    "bench": (
        "jaxspec bench DIR --drafters ngram draft_model=DRAFT --k 0 2 4 auto --concurrency 1 8 --output report",
        "jaxspec bench compare old/bench.json new/bench.json --check",
    ),
    "bench compare": ("jaxspec bench compare old/bench.json new/bench.json --check",),
    "demo": ("jaxspec demo --quick",),
}
STATUSES = {
    "plan": f"0 done; 1 an update of --train does not fit; {COMMON}",
    "generate": (
        f"0 every request has its text; 1 some requests failed, or the disk is full or a process was lost; {COMMON}"
    ),
    "inspect": f"0 the files are what the config needs; 1 they are not; {COMMON}",
    "sizes": f"0 everything fits; 1 something does not; {COMMON}",
    "bench": f"0 done; 1 some text differed that may not, or it failed; {COMMON}",
    "bench compare": f"0 done; 1 with --check, something is slower beyond the noise; {COMMON}",
    "demo": f"0 the same text with and without speculation; 1 not; {COMMON}",
}


def description_of(command: str, about: str) -> str:
    """Returns what stands above the flags of a command: what it does, examples, exit statuses."""
    examples = "\n".join(f"  {line}" for line in EXAMPLES[command])
    return f"{about}\n\nExample:\n{examples}\n\nExit status: {STATUSES.get(command, STATUS)}"
