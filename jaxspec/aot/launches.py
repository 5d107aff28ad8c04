"""XLA's launch list of a compiled program: the launches of one step, and which of them are inside CUDA graphs."""

import re
from collections import Counter
from dataclasses import dataclass, field, replace

from jaxspec.aot.hlo import Execution, Module

THUNK = re.compile(r"^(\s*)(\d+): (k\w+)\s+\[[^\]]*\]\s?(.*)$")
MARKER = re.compile(r"^\s*(?:No thunks\.\s*)?(condition|body|\w*branch\w*):$")
KERNEL = re.compile(r"^(\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), \d+, \d+\]\s+shared_memory: (\d+)")
IDENTITY = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
SOURCE = re.compile(r'op_name="([^"]*)"')
MOSAIC = re.compile(r"/(\w+)/mpmd_map$")  # how the source of a custom call ends that is a kernel of Mosaic GPU
CONTROL = frozenset({
    "kWhile", "kConditional", "kCommandBuffer", "kSequential", "kDynamicSliceFusion", "kAsyncStart", "kAsyncDone",
    "kWaitForStreams",
})  # fmt: skip

CACHE = ("verify_attention", "heads_to_cache", "latents_to_cache", "chosen_attention", "choose_places", "index_scores")
EXPERTS = ("experts_", "sort_rows")
ROUTING, HEAD, LAYERS = "route/", "Transformer.logits", "/Transformer"


@dataclass
class Thunk:
    """One entry of the list.

    Attributes:
      kind: such as ``kCustomKernel``.
      number: its id.
      text: what the list says about it.
      inside: entries by section; a loop has ``condition`` and ``body``.
    """

    kind: str
    number: int
    text: str
    inside: dict[str, list["Thunk"]] = field(default_factory=dict)


@dataclass(frozen=True)
class ListedLaunch:
    """Something that the GPU is told to do.

    Attributes:
      kind: such as ``kCustomKernel`` or ``kCopy``.
      name: of the kernel, or the kind.
      programs: of its grid.
      shared_bytes: of memory that a program of it asks for.
      run: how often per step.
      graph: number of the CUDA graph that it is in, None for none.
      source: path of modules and functions that it comes from, empty where XLA names none.
    """

    kind: str
    name: str
    programs: int
    shared_bytes: int
    run: Execution
    graph: int | None
    source: str = ""

    @property
    def group(self) -> str:
        """The part of a step that it belongs to, named as in ``perf.cost.PassWork``."""
        if self.name.startswith(CACHE):
            return "kv"
        if self.name.startswith(EXPERTS) or f"/{ROUTING}" in self.source:
            return "experts"
        if HEAD in self.source:
            return "head"
        return "dense" if LAYERS in self.source else "sampling"


@dataclass(frozen=True)
class Launches:
    """Everything that a program launches.

    Attributes:
      all: in order.
      graphs: how often per step each CUDA graph is started.
      waits: loops and branches outside of graphs whose predicate the host waits for.
    """

    all: tuple[ListedLaunch, ...]
    graphs: tuple[Execution, ...]
    waits: tuple[Execution, ...]

    def per_step(self) -> int:
        """Counts launches of a step in which no branch is taken and no loop of unknown length turns."""
        return sum(x.run.times for x in self.all if _always(x.run))

    def in_branches(self) -> int:
        """Counts further launches of a step in which every branch is taken."""
        return sum(x.run.times for x in self.all if x.run.optional and not x.run.looped)

    def per_turn(self) -> int:
        """Counts further launches of each turn of the loops whose length depends on the data."""
        return sum(x.run.times for x in self.all if x.run.looped)

    def outside_graphs(self) -> int:
        """Counts launches of a step that are in no CUDA graph."""
        return sum(x.run.times for x in self.all if _always(x.run) and x.graph is None)

    def graphs_per_step(self) -> int:
        """Counts CUDA graphs that the host starts in a step, once per turn in loops of unknown length."""
        return sum(run.times for run in self.graphs if not run.setup)

    def waits_per_step(self) -> int:
        """Counts the host's waits for the GPU in a step, once per turn in loops of unknown length."""
        return sum(run.times for run in self.waits if not run.setup)

    def by_group(self) -> Counter[str]:
        """Counts launches per step by group, those in branches and in loops of unknown length left out."""
        counts: Counter[str] = Counter()
        for launch in self.all:
            if _always(launch.run):
                counts[launch.group] += launch.run.times
        return counts

    def by_kernel(self) -> Counter[str]:
        """Counts launches per step by kernel, numbered copies of a name put together."""
        counts: Counter[str] = Counter()
        for launch in self.all:
            if not launch.run.setup:
                counts[re.sub(r"(_+\d+)+$", "", launch.name)] += launch.run.times
        return counts


def _always(run: Execution) -> bool:
    return not (run.optional or run.looped or run.setup)


def parse(listing: str, identities: str, module: Module) -> Launches:
    """Reads what XLA dumps.

    Args:
      listing: ``thunk_sequence`` as text.
      identities: ``thunk_metadata``, which names the instruction of each entry.
      module: the instructions, which know how often loops turn.
    """
    names = {int(number): name for name, number in IDENTITY.findall(identities)}
    walk = _Walk(module, names)
    roots = _tree(listing)
    walk.visit(roots, Execution(setup=module.step_loop is not None), None)
    return Launches(tuple(walk.launches), tuple(walk.graphs), tuple(walk.waits))


def _tree(listing: str) -> list[Thunk]:
    lines = [line for line in listing.splitlines() if THUNK.match(line) or MARKER.match(line)]
    roots, rest = _children(lines, -1)
    if rest:
        raise AssertionError(f"the launch list ends early, before: {rest[0]}")
    return roots.get("", [])


def _children(lines: list[str], above: int) -> tuple[dict[str, list[Thunk]], list[str]]:
    """Returns the entries indented deeper than ``above``, by section, and the lines after them."""
    sections: dict[str, list[Thunk]] = {}
    section = ""
    while lines:
        marker = MARKER.match(lines[0])
        if marker:
            # A section seen here already, or next to entries without one, belongs to a thunk further out.
            if marker[1] in sections or "" in sections:
                break
            section = marker[1]
            sections[section] = []
            lines = lines[1:]
            continue
        match = THUNK.match(lines[0])
        assert match is not None, "lines were chosen to match"
        indent = len(match[1])
        if indent <= above:
            break
        thunk = Thunk(match[3], int(match[2]), match[4].strip())
        lines = lines[1:]
        if thunk.kind in CONTROL:
            thunk.inside, lines = _children(lines, indent)
        sections.setdefault(section, []).append(thunk)
    return sections, lines


@dataclass
class _Walk:
    """Collects launches."""

    module: Module
    names: dict[int, str]
    launches: list[ListedLaunch] = field(default_factory=list)
    graphs: list[Execution] = field(default_factory=list)
    waits: list[Execution] = field(default_factory=list)

    def visit(self, thunks: list[Thunk], run: Execution, graph: int | None) -> None:
        for thunk in thunks:
            if thunk.kind not in CONTROL:
                self.launches.append(_launch(thunk, run, graph, self._source(thunk)))
                continue
            inner = graph
            if thunk.kind == "kCommandBuffer" and graph is None:
                self.graphs.append(run)
                inner = len(self.graphs) - 1
            for section, inside in thunk.inside.items():
                self.visit(inside, self._run(thunk, run, section, inner), inner)

    def _source(self, thunk: Thunk) -> str:
        instruction = self.module.find(self.names.get(thunk.number, ""))
        match = SOURCE.search(instruction.rest) if instruction is not None else None
        return match[1] if match else ""

    def _run(self, thunk: Thunk, run: Execution, section: str, graph: int | None) -> Execution:
        if thunk.kind == "kConditional":
            if graph is None:
                self.waits.append(run)
            return replace(run, optional=True)
        if thunk.kind != "kWhile":
            return run
        instruction = self.module.find(self.names.get(thunk.number, ""))
        if instruction is None:
            return replace(run, looped=True)
        inside = self.module.inside(instruction, run, section)
        if section == "condition" and instruction.trips is None and graph is None:
            self.waits.append(inside)
        return inside


def _launch(thunk: Thunk, run: Execution, graph: int | None, source: str) -> ListedLaunch:
    match = KERNEL.match(thunk.text)
    if not match:
        mosaic = MOSAIC.search(source) if thunk.kind == "kCustomCall" else None
        return ListedLaunch(thunk.kind, mosaic[1] if mosaic else thunk.kind, 0, 0, run, graph, source)
    programs = int(match[2]) * int(match[3]) * int(match[4])
    return ListedLaunch(thunk.kind, match[1], programs, int(match[6]), run, graph, source)
