"""An optimized HLO module parsed from its text, with how often each computation runs per step."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from jaxspec.decode.compaction import FULL, SMALLER

HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r"^  (?:ROOT )?%?([\w.\-]+) = (.*)$")
OPCODE = re.compile(r"(?:^|[\s})\]])([a-z][\w\-]*)\(")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# The step holds one loop per packed size, of which one turns once and the others never: counted as if all were live.
TURNS = {FULL: {"condition": 2, "body": 1}, SMALLER: {"condition": 1, "body": 0}}
ONCE = re.compile(rf'op_name="[^"]*({FULL}|{SMALLER})/while"')
CALLED = re.compile(r"(\w+)=%([\w.\-]+)|branch_computations=\{([^}]*)\}")
BRANCHES = ("true_computation", "false_computation")
BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Instruction:
    """One line.

    Attributes:
      name: without the percent sign.
      opcode: such as ``fusion``.
      result: text of its shape.
      rest: operands and attributes.
    """

    name: str
    opcode: str
    result: str
    rest: str

    @cached_property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each array of the result."""
        return [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in ARRAY.findall(self.result)]

    @property
    def size_bytes(self) -> int:
        """Bytes of the largest array of the result."""
        return max((array_bytes(dtype, shape) for dtype, shape in self.arrays), default=0)

    @property
    def trips(self) -> int | None:
        """Trips of a loop, where XLA knows them."""
        match = TRIPS.search(self.rest)
        return int(match[1]) if match else None

    @property
    def turns(self) -> dict[str, int] | None:
        """Runs of condition and body of a loop that holds one size of the step; the largest size is taken to run."""
        match = ONCE.search(self.rest)
        return TURNS[match[1]] if match else None

    @cached_property
    def called(self) -> list[tuple[str, str]]:
        """Computations that it calls, by the attribute that names them."""
        names: list[tuple[str, str]] = []
        for attribute, one, many in CALLED.findall(self.rest):
            if one and attribute not in ("to_apply",):
                names.append((attribute, one))
            names += [("branch", name.strip().lstrip("%")) for name in many.split(",") if name.strip()]
        return names


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the bytes of an array by the name that HLO gives its dtype, such as ``f8e4m3fn``."""
    bits = BITS.search(dtype)
    return math.prod(shape) * (max(int(bits[0]) // 8, 1) if bits else 1)


@dataclass(frozen=True)
class Execution:
    """How often something runs in one step.

    Attributes:
      times: in a step whose loops of unknown length turn once.
      optional: whether it is in a branch that need not be taken.
      looped: whether it is in a loop whose length depends on the data.
      setup: whether it runs once per dispatch, around the steps.
    """

    times: int = 1
    optional: bool = False
    looped: bool = False
    setup: bool = False


@dataclass(frozen=True)
class Module:
    """A module.

    Attributes:
      computations: instructions by computation.
      entry: name of the one that is called.
      stepped: whether the turns of a loop in it are the steps; otherwise the whole of it is one.
    """

    computations: dict[str, list[Instruction]]
    entry: str
    stepped: bool

    @cached_property
    def step_loop(self) -> str | None:
        """Name of the loop whose turns are steps: the entry's only one of unknown length."""
        if not self.stepped:
            return None
        loops = [i.name for i in self.computations[self.entry] if i.opcode == "while" and i.trips is None]
        return loops[0] if len(loops) == 1 else None

    @cached_property
    def runs(self) -> dict[str, Execution]:
        """Executions of each computation but those inside fusions and reductions."""
        runs: dict[str, Execution] = {}
        self._visit(self.entry, Execution(setup=self.step_loop is not None), runs)
        return runs

    def _visit(self, name: str, run: Execution, runs: dict[str, Execution]) -> None:
        runs[name] = run
        for instruction in self.computations.get(name, []):
            if instruction.opcode not in ("while", "conditional", "call", "async-start"):
                continue
            for attribute, callee in instruction.called:
                self._visit(callee, self.inside(instruction, run, attribute), runs)

    def inside(self, instruction: Instruction, run: Execution, attribute: str) -> Execution:
        """Returns how often the computations that an instruction calls run."""
        if instruction.opcode == "conditional":
            return replace(run, optional=True)
        if instruction.opcode != "while":
            return run
        if instruction.name == self.step_loop:
            return Execution()
        if instruction.trips is None:
            turns = instruction.turns
            return replace(run, looped=True) if turns is None else replace(run, times=run.times * turns[attribute])
        # XLA counts the turns of such a loop itself and never runs its condition.
        return replace(run, times=0 if attribute == "condition" else run.times * instruction.trips)

    def executed(self) -> Iterator[tuple[Instruction, Execution]]:
        """Yields every instruction that runs by itself, and how often."""
        for name, run in self.runs.items():
            for instruction in self.computations.get(name, []):
                yield instruction, run

    def find(self, name: str) -> Instruction | None:
        """Returns an instruction by its name."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, Instruction]:
        return {i.name: i for instructions in self.computations.values() for i in instructions}


def parse(text: str, *, stepped: bool) -> Module:
    """Reads what ``compiled.as_text()`` returns; see ``Module`` for ``stepped``."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = HEADER.match(line)
        if header:
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif current is not None and (match := INSTRUCTION.match(line)):
            current.append(_instruction(match[1], match[2]))
    return Module(computations, entry, stepped)


def _instruction(name: str, text: str) -> Instruction:
    """Splits shape, opcode and the rest; the shape of a tuple is in parentheses itself."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and letter == " ":
            opcode, _, rest = text[i + 1 :].partition("(")
            return Instruction(name, opcode, text[:i], rest)
    return Instruction(name, "", text, "")


MOVES = frozenset({
    "parameter", "constant", "bitcast", "bitcast-convert", "copy", "copy-start", "copy-done", "transpose", "reshape",
    "broadcast", "dynamic-slice", "slice", "gather", "concatenate", "convert", "pad", "reverse", "tuple",
    "get-tuple-element", "iota",
})  # fmt: skip
ELEMENTWISE = MOVES | {
    "multiply", "add", "subtract", "and", "or", "xor", "not", "shift-left", "shift-right-logical", "select", "compare",
    "clamp", "negate", "minimum", "maximum", "divide", "remainder", "abs",
}  # fmt: skip
NARROW = ("f8", "s8", "u8", "u16", "s4", "u4", "f4")
IN_PLACE = ("dynamic-update-slice", "scatter")


def copies(module: Module, least_bytes: int) -> Iterable[tuple[Instruction, Execution]]:
    """Yields instructions whose big result repeats what is in memory: copied, cut out, gathered or widened.

    Args:
      module: optimized.
      least_bytes: of a result that counts.
    """
    for instruction, run in module.executed():
        if instruction.size_bytes >= least_bytes and _repeats(module, instruction, least_bytes):
            yield instruction, run


def _repeats(module: Module, instruction: Instruction, least_bytes: int) -> bool:
    passive = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "broadcast", "iota", "copy-done")
    if instruction.opcode != "fusion":
        return instruction.opcode in MOVES and instruction.opcode not in passive
    inner = [i for _, name in instruction.called for i in module.computations.get(name, [])]
    big = [i for i in inner if i.size_bytes * 4 >= least_bytes]
    if any(i.opcode in IN_PLACE for i in inner) or all(i.opcode in passive for i in big):
        return False
    # A fusion that widens narrow weights as it copies them still reads them twice, so arithmetic does not excuse it.
    sources = [i for i in inner if i.opcode == "parameter" and i.size_bytes * 4 >= least_bytes]
    if not sources:
        return False
    narrow = any(dtype.startswith(NARROW) for source in sources for dtype, _ in source.arrays)
    return all(i.opcode in (ELEMENTWISE if narrow else MOVES) for i in big)
