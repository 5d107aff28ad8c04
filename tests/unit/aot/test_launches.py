"""Reading what XLA says about a compiled program: loops and branches, launches, CUDA graphs, copies."""

import pytest

from jaxspec.aot import hlo, launches
from jaxspec.aot.hlo import Execution
from jaxspec.decode.compaction import FULL, SMALLER

HLO = """\
HloModule jit_step, is_scheduled=true

%fused_cut (param_0: bf16[48,2048,5120], param_1: s32[]) -> bf16[1,2048,5120] {
  %param_0 = bf16[48,2048,5120]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  ROOT %dynamic-slice.1 = bf16[1,2048,5120]{2,1,0} dynamic-slice(%param_0, %param_1, %param_1, %param_1)
}

%fused_write (param_0.1: u16[4,4,4096,128], param_1.1: u16[4,4,1,128]) -> u16[4,4,4096,128] {
  %param_0.1 = u16[4,4,4096,128]{3,2,1,0} parameter(0)
  %param_1.1 = u16[4,4,1,128]{3,2,1,0} parameter(1)
  ROOT %dynamic-update-slice.1 = u16[4,4,4096,128]{3,2,1,0} dynamic-update-slice(%param_0.1, %param_1.1)
}

%fused_widen (param_0.2: f8e4m3fn[2048,1024], param_1.2: f32[16,8]) -> bf16[2048,1024] {
  %param_0.2 = f8e4m3fn[2048,1024]{1,0} parameter(0)
  %convert.1 = f32[2048,1024]{1,0} convert(%param_0.2)
  %param_1.2 = f32[16,8]{1,0} parameter(1)
  %broadcast.1 = f32[2048,1024]{1,0} broadcast(%param_1.2), dimensions={0,1}
  %multiply.1 = f32[2048,1024]{1,0} multiply(%convert.1, %broadcast.1)
  ROOT %convert.2 = bf16[2048,1024]{1,0} convert(%multiply.1)
}

%fused_gelu (param_0.3: f32[2048,1024]) -> f32[2048,1024] {
  %param_0.3 = f32[2048,1024]{1,0} parameter(0)
  ROOT %tanh.1 = f32[2048,1024]{1,0} tanh(%param_0.3)
}

%layer (arg: (s32[], bf16[48,2048,5120])) -> (s32[], bf16[48,2048,5120]) {
  %arg = (s32[], bf16[48,2048,5120]{2,1,0}) parameter(0)
  %cut = bf16[1,2048,5120]{2,1,0} fusion(%arg), kind=kLoop, calls=%fused_cut
  %write = u16[4,4,4096,128]{3,2,1,0} fusion(%arg), kind=kLoop, calls=%fused_write
  %all-reduce-start.1 = f32[4,2048]{1,0} all-reduce-start(%arg), to_apply=%add
  %all-reduce-done.1 = f32[4,2048]{1,0} all-reduce-done(%all-reduce-start.1)
}

%more_layers (arg.1: (s32[])) -> pred[] {
  ROOT %compare.1 = pred[] compare(%arg.1), direction=LT
}

%blocks (arg.2: (s32[])) -> (s32[]) {
  %gelu = f32[2048,1024]{1,0} fusion(%arg.2), kind=kLoop, calls=%fused_gelu
}

%more_blocks (arg.3: (s32[])) -> pred[] {
  ROOT %compare.2 = pred[] compare(%arg.3), direction=LT
}

%sampled (arg.4: (f32[4,4,150000])) -> (f32[4,4,150000]) {
  %copy.9 = f32[4,4,150000]{2,1,0} copy(%arg.4)
}

%step (arg.5: (s32[], bf16[48,2048,5120])) -> (s32[], bf16[48,2048,5120]) {
  %widen = bf16[2048,1024]{1,0} fusion(%arg.5), kind=kLoop, calls=%fused_widen
  %while.2 = (s32[], bf16[48,2048,5120]{2,1,0}) while(%arg.5), condition=%more_layers, body=%layer, \
backend_config={"known_trip_count":{"n":"47"}}
  %while.3 = (s32[]) while(%arg.5), condition=%more_blocks, body=%blocks
  %cond.1 = (f32[4,4,150000]{2,1,0}) conditional(%arg.5), true_computation=%sampled, false_computation=%sampled
}

%more_steps (arg.6: (s32[])) -> pred[] {
  ROOT %compare.3 = pred[] compare(%arg.6), direction=LT
}

ENTRY %main.1 (weights: bf16[48,2048,5120]) -> (s32[], bf16[48,2048,5120]) {
  %weights = bf16[48,2048,5120]{2,1,0} parameter(0)
  %while.1 = (s32[], bf16[48,2048,5120]{2,1,0}) while(%weights), condition=%more_steps, body=%step
}
"""

LISTING = """\
001: kCustomKernel [source       | next=002 (1)] fill grid: [2, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
002: kWhile        [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] go_on grid: [1, 1, 1] threads: [8, 1, 1]  shared_memory: 0 bytes
  body:
    000: kCommandBuffer [source       | next=005 (1)]
        004: kCustomKernel [source | sink] widen_1 grid: [8, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
        013: kConditional  [prev=004 (1) | sink]
          false_branch:
            014: kCustomKernel [source | sink] sample grid: [8, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
          true_branch:
            015: kCopy [source | sink] kCopy
    005: kWhile         [prev=000 (1) | next=008 (1)]
condition:
        006: kCustomKernel [source | sink] compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
      body:
        000: kCommandBuffer [source | sink]
            007: kCustomKernel [source | sink] experts_2 grid: [4, 3, 2] threads: [128, 1, 1]  shared_memory: 4096 bytes
            016: kDynamicSliceFusion [source | sink] params=1, results=1
                017: kCopy [source | sink] kCopy
    008: kWhile         [prev=005 (1) | next=012 (1)]
condition:
        009: kCustomKernel [source | sink] compare_1 grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
      body:
        000: kCommandBuffer [source | sink]
            010: kCustomKernel [source | sink] gelu grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
            011: kCustomKernel [source | sink] gelu_1 grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
    012: kCublasLtMatmul [prev=008 (1) | sink] kCublasLtMatmul
"""
WHILES = {2: "while.1", 5: "while.2", 8: "while.3"}
NAMES = "".join(f'thunk_info {{\n profile_annotation: "{name}"\n thunk_id: {n}\n}}\n' for n, name in WHILES.items())


@pytest.fixture(scope="module")
def module() -> hlo.Module:
    return hlo.parse(HLO, stepped=True)


def test_computations_run_as_often_as_their_loops_turn(module: hlo.Module):
    assert module.step_loop == "while.1"
    once = Execution()
    assert module.runs == {
        "main.1": Execution(setup=True), "step": once, "more_steps": once, "layer": Execution(47),
        "more_layers": Execution(0),
        "blocks": Execution(looped=True), "more_blocks": Execution(looped=True), "sampled": Execution(optional=True),
    }  # fmt: skip


def test_what_only_repeats_memory_is_a_copy(module: hlo.Module):
    found = {instruction.name: (instruction.size_bytes, run) for instruction, run in hlo.copies(module, 1 << 20)}
    assert found == {
        "cut": (2048 * 5120 * 2, Execution(47)), "widen": (2048 * 1024 * 2, Execution()),
        "copy.9": (4 * 4 * 150000 * 4, Execution(optional=True)),
    }  # fmt: skip


def test_launches_are_counted_per_step(module: hlo.Module):
    found = launches.parse(LISTING, NAMES, module)
    assert found.per_step() == 1 + 1 + 47 * 2 + 1, "condition, widening, two per layer, the library's product"
    assert (found.in_branches(), found.per_turn()) == (2, 3)
    assert found.outside_graphs() == 2
    assert found.graphs_per_step() == 1 + 47 + 1
    assert found.waits_per_step() == 2, "for the loop over steps, and per turn of the open loop"
    assert found.by_kernel()["experts"] == 47
    experts = next(launch for launch in found.all if launch.name == "experts_2")
    assert (experts.programs, experts.shared_bytes, experts.run) == (24, 4096, Execution(47))


def test_a_program_without_steps_is_one_step():
    text = HLO.replace("ENTRY %main.1", "%main.1").replace("%step (arg.5", "ENTRY %step (arg.5")
    runs = hlo.parse(text, stepped=False).runs
    assert (runs["step"], runs["layer"], runs["blocks"]) == (Execution(), Execution(47), Execution(looped=True))


def test_of_the_ways_to_step_the_widest_is_counted():
    two = [
        f"  %{name} = (s32[]) while(%arg.5), condition=%more_blocks.{n}, body=%blocks.{n}, "
        f'metadata={{op_name="jit(ngram)/while/body/{scope}/while" stack_frame_id=1}}'
        for n, (name, scope) in enumerate({"while.3": FULL, "while.4": SMALLER}.items())
    ]
    text = HLO.replace("  %while.3 = (s32[]) while(%arg.5), condition=%more_blocks, body=%blocks", "\n".join(two))
    module = hlo.parse(text, stepped=True)
    runs = [module.runs[name] for name in ("blocks.0", "more_blocks.0", "blocks.1", "more_blocks.1")]
    assert runs == [Execution(1), Execution(2), Execution(0), Execution(1)], (
        "a loop that turns once is asked twice, the other one once"
    )
    listing = LISTING[: LISTING.index("    012:")].replace(
        "condition:\n        009: kCustomKernel [source | sink] compare_1 grid: [1, 1, 1] threads: [1, 1, 1]  "
        "shared_memory: 0 bytes\n      body:",
        "condition:\n        No thunks.      body:",
    )
    assert "No thunks." in listing
    found = launches.parse(listing, NAMES, module)
    assert found.by_kernel()["gelu"] == 2
    assert (found.per_step(), found.per_turn()) == (1 + 1 + 47 * 2 + 2, 0)
