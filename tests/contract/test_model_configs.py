"""Every published config in configs/models builds its parameters, unallocated, with the published counts."""

import json
from pathlib import Path

import pytest

from jaxspec.bench.describe import count_parameters
from jaxspec.models.catalog import arch_of

CONFIGS = {path.stem: path for path in sorted(Path("configs/models").glob("*.json"))}
# Billions of parameters, in all and active per token; from the models' cards.
PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9),
    "qwen2-57b-a14b": (57.4, 14.25),
    "qwen1.5-moe-a2.7b": (14.3, 2.7),
    "llama-3.1-8b": (8.03, 8.03),
    "qwen3-8b": (8.19, 8.19),
}


@pytest.mark.parametrize("name", sorted(CONFIGS | PUBLISHED))
def test_counts_are_the_published_ones(name: str):
    counted = count_parameters(arch_of(json.loads(CONFIGS[name].read_text())))
    total, active = PUBLISHED[name]
    assert counted[0] / 1e9 == pytest.approx(total, rel=0.01)
    assert counted[1] / 1e9 == pytest.approx(active, rel=0.01)
