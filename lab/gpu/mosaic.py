"""Section "mosaic": kernels of Mosaic GPU beside Triton's; by itself, for what never ran may end its process."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from lab.gpu import experts
from lab.gpu.correctness import check_case, check_experts
from lab.gpu.report import Section
from lab.gpu.timing import Subject, chained, interleaved, side_by_side
from pallas_kernels.case import Case
from pallas_kernels.routed_experts.cases import Shape
from pallas_kernels.verify_attention.cases import CASES

TINY = {"plain": Shape(1, 4, 2, 128, 128, "bfloat16")}
WAVES = {False: ((64, 2048), (1, 8, 256)), True: ((3,),)}
NAME = "jaxspec by mosaic"
COPIES = 4  # sets of arguments, so that caches come from memory


def mosaic(section: Section) -> None:
    """Checks and measures attention of prompts, and experts with plain weights."""
    hows = ("interpret", "mosaic_interpret") if section.tiny else ("triton", "mosaic")
    cases = [case for case in CASES if case.mosaic and case.size == ("tiny" if section.tiny else "real")]
    for case in cases[: 1 if section.tiny else None]:
        with section.attempt(case.name, needed_s=0 if section.tiny else 8) as go:
            if go:
                check_case(section, f"{case.name} by mosaic", case, hows[1])
                _measure(section, case, hows)
    _experts(section, *hows)


def _measure(section: Section, case: Case, hows: tuple[Any, Any]) -> None:
    """Times a case by both kernels."""
    arguments = [case.random(jax.random.key(n)) for n in range(1 if section.tiny else COPIES)]
    made = side_by_side({how: partial(chained, case.call(how), arguments) for how in hows})
    failed = [f"{how}: {str(made[how])[:400]}" for how in hows if isinstance(made[how], Exception)]
    section.check(f"{case.name} compiles twice", passed=not failed, detail="; ".join(failed))
    if failed:
        return
    subjects = [Subject(how, made[how], len(arguments)) for how in hows]
    for how, timing in interleaved(
        subjects, rounds=1 if section.tiny else 7, round_s=0.0 if section.tiny else 0.01
    ).items():
        section.add("prompts", case=case.name, kernel=how, time_s=timing.median_s, least_s=timing.least_s)


def _experts(section: Section, triton: Any, by: Any) -> None:
    def programs(inputs: experts.Inputs, rows: list[Any]) -> dict[str, Any]:
        return {name: experts.by_kernel(how, inputs, rows) for name, how in ((experts.OWN, triton), (NAME, by))}

    for name, shape in (TINY if section.tiny else experts.REAL).items():
        if shape.form != "bfloat16":
            continue
        with section.attempt(name, needed_s=0 if section.tiny else 8) as go:
            if go:
                check_experts(section, f"experts {name} by mosaic", shape, by)
                inputs = experts.random_inputs(replace(shape, layers=1 if section.tiny else 4))
                for rows in WAVES[section.tiny]:
                    experts.measure(section, name, inputs, rows, programs, with_torch=False)
