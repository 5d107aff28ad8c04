"""Records of hardware: published numbers, sources, mistakes."""

from pathlib import Path

import pytest

from jaxspec.errors import ConfigError
from jaxspec.perf.hardware import known_hardware, load_hardware, parse_hardware
from scripts.house_report import ROOT

DIRECTORY = ROOT / "configs" / "hardware"
# Memory in GB, bandwidth in GB/s, dense bfloat16, fp8 and fp4 TFLOPS, NVLink in GB/s, as vendors publish them.
PUBLISHED = {
    "a100": (80, 2039, 312, 0, 0, 600),
    "a100-40gb": (40, 1555, 312, 0, 0, 600),
    "b200": (180, 8000, 2250, 4500, 9000, 1800),
    "b300": (288, 8000, 2250, 4500, 13125, 1800),
    "h100": (80, 3350, 989.4, 1978.9, 0, 900),
    "h100-pcie": (80, 2000, 756.5, 1513, 0, 0),
    "h200": (141, 4800, 989.4, 1978.9, 0, 900),
    "l40s": (48, 864, 362, 733, 0, 0),
}


def test_every_record_is_known():
    assert set(known_hardware(DIRECTORY)) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers(name: str):
    h, count = load_hardware(name, DIRECTORY)
    assert count == 1
    found = (h.memory_gb, h.memory_gb_per_s, h.bf16_tflops, h.fp8_tflops, h.fp4_tflops, h.nvlink_gb_per_s)
    assert found == PUBLISHED[name]
    assert all("data sheet" in source or "specifications" in source for source in h.sources.values())


def test_a_count_stands_behind_an_x():
    assert load_hardware("h200x8", DIRECTORY)[1] == 8
    assert load_hardware("H200x16", DIRECTORY)[1] == 16
    assert load_hardware(str(DIRECTORY / "l40s.toml"), DIRECTORY)[0].name == "NVIDIA L40S 48GB"


def test_rates_are_shares_of_what_the_data_sheet_says():
    h = load_hardware("h200", DIRECTORY)[0]
    likely, low, high = h.rates(), h.rates("low", "high"), h.rates("high", "low")
    assert 1 / likely.byte_s == pytest.approx(4.8e12 * h.assumed.bandwidth[1])
    assert 1 / likely.flop_s == pytest.approx(989.4e12 * h.assumed.compute[1])
    assert 1 / likely.link_byte_s == pytest.approx(450e9 * h.assumed.link[1]), "one direction"
    assert low.byte_s > likely.byte_s > high.byte_s > 1 / 4.8e12
    assert low.layer_s > likely.layer_s > high.layer_s > 0
    pcie = load_hardware("l40s", DIRECTORY)[0]
    assert 1 / pcie.rates().link_byte_s == pytest.approx(32e9 * pcie.assumed.link[1])


@pytest.mark.parametrize("wanted", ["h300", "h200x0", "nothing.toml"])
def test_unknown_hardware(wanted: str):
    with pytest.raises(ConfigError, match="known are a100, a100-40gb, b200, b300, h100, h100-pcie, h200, l40s"):
        load_hardware(wanted, DIRECTORY)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory_gb = 141", "memory_gb = -1", "numbers must be positive.*memory_gb"),
        ("memory_gb = 141", "memory_mb = 141", "memory_gb|unknown field"),
        ('power_w = "NVIDIA', 'colour = "NVIDIA', "every number needs a source"),
        ("bandwidth = [0.52, 0.6, 0.87]", "bandwidth = [0.7, 0.6, 0.9]", "numbers must be positive, rise"),
        ("bandwidth = [0.52, 0.6, 0.87]", "bandwidth = [0.7, 0.8, 1.9]", "shares be at most 1"),
        ("usable_memory = 0.92", "usable_memory = 1.5", "usable_memory"),
        ("power_w = 700", "power_w = 'much'", "Expected `float`"),
        ("power_w = 700", "power_w = ", "Invalid value"),
    ],
)
def test_wrong_records(old: str, new: str, words: str):
    text = Path(DIRECTORY / "h200.toml").read_text()
    assert old in text
    with pytest.raises(ConfigError, match=words):
        parse_hardware(text.replace(old, new, 1), "mine")
