"""Holds the planner against public measurements: MTP over plain decoding at equal speed per user, on Hopper servers.

``python -m lab.plan_against_public`` prints the table of ``docs/planning.md``. Nothing in it is fitted to what was
measured: records, assumptions and the acceptance of MTP layers are those of ``jaxspec plan``.

The measurements are tokens per second and GPU at equal tokens per second and user, with and without MTP:
inferencex.semianalysis.com/compare-spec-decode (read 2026-11), engines and settings chosen by who measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from jaxspec.cli.plan_question import machine_of
from jaxspec.inspect.model_cost import model_cost
from jaxspec.inspect.shipped import model_config
from jaxspec.perf.cost import Mesh, ModelCost
from jaxspec.perf.device_memory import most_rows
from jaxspec.perf.drafting import ASSUMED, DraftCost
from jaxspec.perf.hardware import Hardware
from jaxspec.perf.machine import AssumedMachine
from jaxspec.perf.overlap import PUBLISHED_AT_4, AssumedOverlap
from jaxspec.perf.pass_time import step_time

CHUNK = 8192  # tokens of prompts that one pass reads
LENGTHS = (1, 2, 3)


@dataclass(frozen=True)
class Cell:
    """One public comparison.

    Attributes:
      model: a shipped config.
      hardware: devices of the record that hold it.
      tokens: of a prompt and of its answer.
      user_tok_per_s: speed that a user sees.
      mtp, off: tokens per second and GPU, measured.
    """

    model: str
    hardware: str
    tokens: tuple[int, int]
    user_tok_per_s: float
    mtp: float
    off: float


R1_H100, R1_H200 = ("deepseek-v3", "h100x16", (1024, 1024)), ("deepseek-v3", "h200x8", (8192, 1024))
V4_H200, GLM_H200 = ("deepseek-v4-pro", "h200x8", (1024, 1024)), ("glm-5.1", "h200x8", (1024, 1024))
CELLS = (
    Cell(*R1_H100, 26, 383, 96), Cell(*R1_H100, 41, 303, 40), Cell(*R1_H100, 57, 140, 26),
    Cell(*R1_H200, 39, 1832, 947), Cell(*R1_H200, 62, 1121, 711), Cell(*R1_H200, 84, 637, 501),
    Cell(*V4_H200, 26, 273, 299), Cell(*V4_H200, 44, 220, 158), Cell(*V4_H200, 62, 163, 77),
    Cell(*GLM_H200, 41, 329, 145), Cell(*GLM_H200, 47, 286, 113), Cell(*GLM_H200, 54, 247, 82),
)  # fmt: skip


def meshes(hardware: Hardware, devices: int) -> Iterator[Mesh]:
    """Yields expert and tensor axes over all devices, the tensor axis within a node."""
    for tensor in (1, 2, 4, 8):
        if devices % tensor == 0 and tensor <= hardware.node_devices:
            yield Mesh(expert=devices // tensor, tensor=tensor)


@dataclass(frozen=True)
class Server:
    """A model on its devices, reading prompts and decoding in turns.

    Attributes:
      model, machine: what runs, and its times.
      tokens: of a prompt and of its answer.
      room_bytes: of a device.
    """

    model: ModelCost
    machine: AssumedMachine
    tokens: tuple[int, int]
    room_bytes: float

    @property
    def context(self) -> int:
        """Returns the length of a text half way through its answer."""
        return self.tokens[0] + self.tokens[1] // 2

    def prompt_s(self) -> float:
        """Computes seconds of prompts per token of an answer: all devices share each pass over prompts."""
        mesh = self.machine.mesh
        rows = max(mesh.expert * mesh.data, 1)
        pass_s = step_time(
            self.model, self.machine.rates, rows=rows, positions=CHUNK // rows, context=self.tokens[0] // 2,
            mesh=mesh, overlap=AssumedOverlap(1.0), head_positions=0,
        ).total_s  # fmt: skip
        return pass_s / CHUNK * self.tokens[0] / self.tokens[1]

    def user_tok_per_s(self, rows: int, length: int) -> float:
        """Predicts what each of the rows sees with so many drafts of the model's MTP layers, 0 for none."""
        draft, acceptance = DraftCost("mtp", self.model.prediction), ASSUMED["mtp"][1]
        step_s = self.machine.verify_s(rows, length + 1, self.context)
        tau = 1.0
        if length:
            branching = (1,) * length
            step_s += self.machine.draft_s(draft, rows, branching, self.context)
            tau = acceptance.length(branching)
        return 1 / (step_s / tau + rows * self.prompt_s())

    def most_rows(self, speed: float, length: int) -> int:
        """Returns the most rows that each see at least this speed, 0 if not even one does."""
        room = most_rows(
            self.model, room_bytes=self.room_bytes, context=sum(self.tokens), mesh=self.machine.mesh
        )  # fmt: skip
        low, high = 0, max(room or 0, 0)
        while low < high:
            rows = (low + high + 1) // 2
            low, high = (rows, high) if self.user_tok_per_s(rows, length) >= speed else (low, rows - 1)
        return low


def servers(cell: Cell) -> Iterator[Server]:
    """Yields every way to lay the model over the devices."""
    name, config = model_config(cell.model)
    model = model_cost(config, name=name, quantization="auto" if "quantization_config" in config else "fp8")
    hardware, devices = machine_of(cell.hardware)
    for mesh in meshes(hardware, devices):
        machine = AssumedMachine(model, hardware.rates(), mesh, AssumedOverlap(PUBLISHED_AT_4[1]))
        yield Server(model, machine, cell.tokens, hardware.memory_bytes * hardware.assumed.usable_memory)


def predict(cell: Cell) -> tuple[int, int, int]:
    """Returns the most rows without drafts, the most with drafts, and how many drafts those have."""
    ways = list(servers(cell))
    off = max(server.most_rows(cell.user_tok_per_s, 0) for server in ways)
    mtp, length = max((server.most_rows(cell.user_tok_per_s, k), -k) for server in ways for k in LENGTHS)
    return off, mtp, -length


def main() -> None:
    """Prints the table."""
    print(
        "| model, devices, tokens | tok/s per user | measured | predicted | rows without, with | off by |\n|"
        + "---|" * 6
    )
    ratios = []
    for cell in CELLS:
        off, mtp, length = predict(cell)
        measured = cell.mtp / cell.off
        where = f"{cell.model}, {cell.hardware}, {cell.tokens[0]}/{cell.tokens[1]}"
        head = f"| {where} | {cell.user_tok_per_s:g} | {measured:.2f}"
        if not off:
            print(f"{head} | none without drafts | 0, {mtp} (K={length}) | |")
            continue
        ratios.append(mtp / off / measured)
        print(f"{head} | {mtp / off:.2f} | {off}, {mtp} (K={length}) | {ratios[-1]:.2f} |")
    middle = prod(max(r, 1 / r) for r in ratios) ** (1 / len(ratios)) if ratios else float("nan")
    print(f"\n{len(ratios)} of {len(CELLS)} cells; off by a factor of {middle:.2f} (geometric mean)")


if __name__ == "__main__":
    main()
