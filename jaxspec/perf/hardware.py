"""Records of devices with their sources, and assumptions on how much of their peaks is achieved."""

import math
import re
import tomllib
from pathlib import Path

import msgspec

from jaxspec.errors import ConfigError
from jaxspec.perf.cost import SHARPNESS, Rates

COUNTED = re.compile(r"(.+?)(?:x(\d+))?")
SCENARIOS = ("low", "likely", "high")
# A laptop's CPU, by orders of magnitude. Of several virtual devices on one CPU, what they send is copied in its memory.
CPU_RATES = Rates(
    layer_s=50e-6, byte_s=1 / 10e9, flop_s=1 / 50e9, expert_byte_s=1 / 10e9, expert_flop_s=1 / 50e9,
    kv_byte_s=1 / 10e9, link_byte_s=1 / 5e9, link_s=20e-6,
)  # fmt: skip


class Assumed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Assumptions that no data sheet states; each a low, a likely and a high value.

    Attributes:
      bandwidth, expert_bandwidth: shares of the memory's bandwidth that dense weights and routed experts reach.
      compute: share of the peak of matrix products.
      link: share of the links' bandwidth.
      launch_us: from one program to the next on the device.
      launches_per_layer: programs per layer.
      step_us: of a step, whatever it does.
      link_us, network_us: from sending to receiving, within a node and beyond it.
      usable_memory: share of the memory that weights, caches and buffers may take.
      source: where the ranges come from.
    """

    bandwidth: tuple[float, float, float]
    expert_bandwidth: tuple[float, float, float]
    compute: tuple[float, float, float]
    link: tuple[float, float, float]
    launch_us: tuple[float, float, float]
    launches_per_layer: int
    step_us: tuple[float, float, float]
    link_us: tuple[float, float, float]
    network_us: tuple[float, float, float]
    usable_memory: float
    source: str


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device.

    Attributes:
      name: as people call it.
      memory_gb: capacity, 1e9 bytes.
      memory_gb_per_s: bandwidth.
      bf16_tflops, fp8_tflops, fp4_tflops: peaks of dense matrix products, 0 where there is no such unit.
      nvlink_gb_per_s: both directions together, 0 without.
      pcie_gb_per_s: both directions together.
      node_devices: devices of the server that it is sold in.
      network_gb_per_s: to other servers, per device, both directions together; 0 where that is the buyer's choice.
      power_w: most.
      sources: by field, the vendor's document.
      assumed: achieved shares and overheads.
    """

    name: str
    memory_gb: float
    memory_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float
    fp4_tflops: float
    nvlink_gb_per_s: float
    pcie_gb_per_s: float
    node_devices: int
    network_gb_per_s: float
    power_w: float
    sources: dict[str, str]
    assumed: Assumed

    @property
    def memory_bytes(self) -> float:
        """Capacity."""
        return self.memory_gb * 1e9

    def rates(self, bandwidth: str = "likely", overhead: str = "likely") -> Rates:
        """Computes seconds per unit of work; products are bfloat16, to which quantized weights are widened.

        Args:
          bandwidth: ``low``, ``likely`` or ``high`` shares of what the device could.
          overhead: ``low``, ``likely`` or ``high`` launch and link times.
        """
        a, share, slow = self.assumed, SCENARIOS.index(bandwidth), SCENARIOS.index(overhead)
        byte_s = 1 / (self.memory_gb_per_s * 1e9)
        flop_s = 1 / (self.bf16_tflops * 1e12 * a.compute[share])
        # One direction of the faster link: NVLink where there is one.
        link = max(self.nvlink_gb_per_s, self.pcie_gb_per_s) / 2 * 1e9 * a.link[share]
        return Rates(
            fixed_s=a.step_us[slow] * 1e-6,
            layer_s=a.launches_per_layer * a.launch_us[slow] * 1e-6,
            byte_s=byte_s / a.bandwidth[share],
            flop_s=flop_s,
            expert_byte_s=byte_s / a.expert_bandwidth[share],
            expert_flop_s=flop_s,
            kv_byte_s=byte_s / a.bandwidth[share],
            link_byte_s=1 / link,
            link_s=a.link_us[slow] * 1e-6,
            network_byte_s=1 / (self.network_gb_per_s / 2 * 1e9 * a.link[share]) if self.network_gb_per_s else math.inf,
            network_s=a.network_us[slow] * 1e-6,
            node=self.node_devices,
            sharpness=SHARPNESS,
        )


def parse_hardware(text: str, name: str) -> Hardware:
    """Reads a record.

    Raises:
      ConfigError: keys are missing or unknown, numbers are not positive, or a number has no source.
    """
    try:
        hardware = msgspec.convert(tomllib.loads(text), Hardware)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"hardware {name}: {error}; configs/hardware/h200.toml is an example") from None
    numbers = [f for f in hardware.__struct_fields__ if f not in ("name", "sources", "assumed")]
    unsourced = sorted(set(numbers) ^ set(hardware.sources))
    if unsourced:
        raise ConfigError(f"hardware {name}: every number needs a source and nothing else has one, see {unsourced}")
    zero = ("fp8_tflops", "fp4_tflops", "nvlink_gb_per_s", "network_gb_per_s")
    bad = [f for f in numbers if not (getattr(hardware, f) > 0 or (f in zero and getattr(hardware, f) == 0))]
    a = hardware.assumed
    for field in ("bandwidth", "expert_bandwidth", "compute", "link", "launch_us", "step_us", "link_us", "network_us"):
        low, likely, high = getattr(a, field)
        if not 0 < low <= likely <= high or (
            field in ("bandwidth", "expert_bandwidth", "compute", "link") and high > 1
        ):
            bad.append(f"assumed.{field}")
    if not 0 < a.usable_memory <= 1 or a.launches_per_layer < 1:
        bad.append("assumed.usable_memory or launches_per_layer")
    if bad:
        raise ConfigError(f"hardware {name}: numbers must be positive, rise, and shares be at most 1: {bad}")
    return hardware


def load_hardware(wanted: str, directory: Path) -> tuple[Hardware, int]:
    """Loads a record and the number of devices, from ``h200``, ``h200x8`` or the path of a record of one's own.

    Raises:
      ConfigError: there is no such record (the known ones are listed), or it is wrong.
    """
    match = COUNTED.fullmatch(wanted)
    name, count = (match[1], int(match[2] or 1)) if match else (wanted, 1)
    known = known_hardware(directory)
    file = Path(name) if name.endswith(".toml") else known.get(name.lower())
    if file is None or not file.is_file() or count < 1:
        raise ConfigError(
            f"hardware {wanted!r} is not known; known are {', '.join(known)}, with a count after an x (h200x8), or a "
            ".toml file like them"
        )
    return parse_hardware(file.read_text(encoding="utf-8"), name), count


def known_hardware(directory: Path) -> dict[str, Path]:
    """Returns the files of known records by name."""
    return {file.stem: file for file in sorted(directory.glob("*.toml"), key=lambda file: file.stem)}


def hardware_of(device_kind: str, directory: Path) -> Hardware | None:
    """Returns the record of a device by what its driver calls it (``NVIDIA H100 80GB HBM3``), None if there is none."""
    words = device_kind.lower()
    fits = [name for name in known_hardware(directory) if all(part in words for part in name.split("-"))]
    return load_hardware(max(fits, key=len), directory)[0] if fits else None
