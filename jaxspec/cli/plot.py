"""``jaxspec plot``: losses and acceptance of training runs as a picture."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class PlotArgs:
    """Flags of ``jaxspec plot``.

    Attributes:
      runs: Directories of runs of jaxspec train.
      output: PNG, SVG or PDF that gets the picture; by default plot.png in the first run.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE", aliases=["-o"])] = None


def run(args: PlotArgs) -> int:
    """Draws; returns the exit code."""
    from jaxspec.errors import ConfigError
    from jaxspec.train.run_plot import plot_runs

    if not args.runs:
        raise ConfigError("plot: name at least one directory of a run")
    file = args.output or args.runs[0] / "plot.png"
    plot_runs(args.runs, file)
    sys.stderr.write(f"jaxspec: {file} written\n")
    return 0
