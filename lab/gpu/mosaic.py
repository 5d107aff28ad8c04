"""Section "mosaic": routed experts by Mosaic GPU beside Triton's; by itself, for what never ran may end its process."""

from dataclasses import replace
from typing import Any

from lab.gpu import experts
from lab.gpu.correctness import check_experts
from lab.gpu.report import Section
from pallas_kernels.routed_experts.cases import Shape

TINY = {"plain": Shape(1, 4, 2, 128, 128, "bfloat16")}
WAVES = {False: ((64, 2048), (1, 8, 256)), True: ((3,),)}
NAME = "jaxspec by mosaic"


def mosaic(section: Section) -> None:
    """Checks and measures the shapes with plain weights."""
    triton, by = ("interpret", "mosaic_interpret") if section.tiny else ("triton", "mosaic")

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
