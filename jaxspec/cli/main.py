"""The command line: finds the subcommand, shows its errors as one line, sets the exit code."""

import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import get_type_hints

import tyro
from tyro.extras import SubcommandApp

from jaxspec.errors import JaxspecError

COMMANDS = {
    "generate": "Generate text for one prompt, or for a file of them.",
    "inspect": "Say what a model directory holds and needs, without loading it.",
    "sizes": "Compile a model for 8 or 16 GPUs that need not be there; show what each would hold and exchange.",
    "train": "Fit a draft head to a model, going on where an earlier run stopped.",
    "plot": "Draw losses and acceptance of training runs.",
    "export": "Write a draft head in the format of another engine.",
    "import": "Write a draft head of any known format in ours.",
    "plan": "Say whether speculation will pay for a model on a machine, before anything is loaded.",
    "calibrate": "Measure a model on this machine, so that plans for it rest on measurements.",
    "bench": "Measure speed and acceptance over a grid, or compare two such reports (jaxspec bench compare A B).",
    "bench compare": "Compare two reports of jaxspec bench, cell by cell.",
    "demo": "See speculation at work on the packaged demo models.",
}
MODULES = {"import": "import_head"}  # where a command is a word of Python's
USAGE_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(args: list[str] | None = None) -> int:
    """Runs ``jaxspec`` and returns its exit code.

    Each subcommand is a module of this package with a function ``run(args)``; the type of ``args`` gives its
    flags. Only the module that is asked for is imported.
    """
    args = sys.argv[1:] if args is None else args
    try:
        code = _run(args)
        sys.stdout.flush()
    except JaxspecError as error:
        sys.stderr.write(f"jaxspec: {' '.join(str(error).split())}\n")
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return BROKEN_PIPE
    return code


def _run(args: list[str]) -> int:
    if args == ["--version"]:
        sys.stdout.write(f"jaxspec {version('jaxspec')}\n")
        return 0
    name = next((words for words in (" ".join(args[:2]), " ".join(args[:1])) if words in COMMANDS), None)
    if name is None:
        overview = SubcommandApp()
        for word, about in COMMANDS.items():
            if " " not in word:
                overview.command(name=word, help=about)(_nothing)
        overview.cli(prog="jaxspec", args=args or ["--help"], description="Lossless speculative decoding in JAX.")
        return 0
    command = import_module(f"jaxspec.cli.{MODULES.get(name, name.replace(' ', '_'))}")
    kind = get_type_hints(command.run)["args"]
    rest = args[len(name.split()) :]
    parsed = tyro.cli(kind, prog=f"jaxspec {name}", args=rest, description=COMMANDS[name])
    return command.run(parsed) or 0


def _nothing() -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
