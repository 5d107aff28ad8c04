"""Runs a job on two machines in one: network namespaces with names and addresses of their own, joined by one cable.

Nothing is shared but the disk. The cable is cut in the middle of the job: both sides must end with a message, within
the time that a lost host may be silent. The same commands then finish the file, and every text must be that of one
process. Needs root, ``ip`` and ``unshare``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxspec.serve.demo_pair import demo_model_dir

ROOT = Path(__file__).parents[1]
NAMES, ADDRESSES, PORT = ("jaxspec-a", "jaxspec-b"), ("10.99.0.1", "10.99.0.2"), 7700
LOST_S, PATIENCE_S, REQUESTS, BEFORE_THE_CUT = 10, 300, 32, 3
JAXSPEC = [sys.executable, "-c", "from jaxspec.cli.main import main; main()"]


def ip(command: str) -> None:
    """Runs ``ip``."""
    subprocess.run(["ip", *command.split()], check=True)


@contextmanager
def two_machines(hosts: Path) -> Iterator[None]:
    """Namespaces joined by a cable, and a file in which either finds the other one's address."""
    lines = (f"{address} {name}\n" for address, name in zip(ADDRESSES, NAMES, strict=True))
    hosts.write_text("127.0.0.1 localhost\n" + "".join(lines), encoding="utf-8")
    try:
        for name in NAMES:
            ip(f"netns add {name}")
        ip(f"link add cable netns {NAMES[0]} type veth peer name cable netns {NAMES[1]}")
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip(f"-n {name} addr add {address}/24 dev cable")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set cable up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def start(number: int, port: int, command: Sequence[str], hosts: Path) -> subprocess.Popen[str]:
    """Starts a command on one of the machines, with its own host name."""
    name = NAMES[number]
    inside = f'hostname {name} && mount --bind "$0" /etc/hosts && exec "$@"'
    meet = ["--coordinator-address", f"{NAMES[0]}:{port}", "--num-processes", "2", "--process-id", str(number)]
    whole = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "bash", "-c", inside, str(hosts)]
    flags = ["--mesh", "expert=2", "--lost-timeout", str(LOST_S)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*whole, *command, *meet, *flags], env=environment, stderr=subprocess.PIPE, text=True)


def both(port: int, command: Sequence[str], hosts: Path) -> list[subprocess.Popen[str]]:
    """Starts a command on both machines."""
    return [start(number, port, command, hosts) for number in range(2)]


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Waits for processes; what each said last."""
    try:
        said = [process.communicate(timeout=PATIENCE_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()  # nothing to those that have ended
    return [text.strip().splitlines()[-1] if text.strip() else "" for text in said]


def records(file: Path) -> list[tuple[int, list[int]]]:
    """Index and tokens of each request, in order."""
    if not file.exists():
        return []
    return sorted((r["index"], r["token_ids"]) for r in map(json.loads, file.read_text(encoding="utf-8").splitlines()))


def main() -> int:
    """Prints what happened as JSON; fails if anything was not as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=demo_model_dir("target"))
    chosen = parser.parse_args()
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if os.geteuid() or missing:
        parser.error(f"needs root and the tools ip and unshare; missing: {', '.join(missing) or 'root'}")
    with tempfile.TemporaryDirectory() as folder:
        asked, out, alone, hosts = (
            Path(folder) / name for name in ("asked.jsonl", "out.jsonl", "alone.jsonl", "hosts")
        )
        lines = ({"prompt": f"class C{i}:\n    def f(self):\n", "max_tokens": 64} for i in range(REQUESTS))
        asked.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        common = ["generate", "--model", str(chosen.model), "--max-model-len", "256", "--dtype", "float32"]
        job = [*JAXSPEC, *common, "--input", str(asked)]
        lookup = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
        subprocess.run([*job, "--output", str(alone)], check=True, stderr=subprocess.DEVNULL)
        with two_machines(hosts):
            command = [*job, *lookup, "--output", str(out)]
            processes, began = both(PORT, command, hosts), time.monotonic()
            while len(records(out)) < BEFORE_THE_CUT and time.monotonic() < began + PATIENCE_S:
                time.sleep(0.2)
            ip(f"-n {NAMES[1]} link set cable down")
            cut, kept = time.monotonic(), len(records(out))
            said, silent_s = ended(processes), time.monotonic() - cut
            ip(f"-n {NAMES[1]} link set cable up")
            again = both(PORT + 1, command, hosts)
            last = ended(again)
        figures = {
            "records_at_the_cut": kept,
            "seconds_until_both_ended": round(silent_s, 1),
            "exit_codes": [process.returncode for process in processes],
            "said": said,
            "exit_codes_again": [process.returncode for process in again],
            "said_again": last,
            "records": len(records(out)),
            "same_texts_as_one_process": records(out) == records(alone),
        }
    print(json.dumps(figures, indent=2))
    well = 0 < kept < REQUESTS and silent_s < 3 * LOST_S and all(figures["exit_codes"])
    return 0 if well and not any(figures["exit_codes_again"]) and figures["same_texts_as_one_process"] else 1


if __name__ == "__main__":
    sys.exit(main())
