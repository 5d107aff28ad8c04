"""The command line: finds the subcommand, shows its errors as one line, sets the exit status."""

import os
import signal
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import get_type_hints

from tyro.extras import SubcommandApp

from jaxspec.cli.arguments import parse
from jaxspec.cli.examples import description_of
from jaxspec.cli.huge_pages import restart_with_huge_pages
from jaxspec.cli.interrupts import INTERRUPTS
from jaxspec.cli.status import BROKEN_PIPE, FAILED, status_of
from jaxspec.errors import ConfigError, JaxspecError

COMMANDS = {
    "generate": "Generate text for one prompt, or for a file of them.",
    "chat": "Talk with a model in the terminal.",
    "inspect": "Say what a model directory holds and needs, without loading it.",
    "sizes": "Compile a model for 8 or 16 GPUs that need not be there; show what each would hold and exchange.",
    "train": "Fit a draft head to a model, going on where an earlier run stopped.",
    "train policy": "Fit a model to a verifiable reward, with rollouts that speculate.",
    "token-map": "Count the tokens of a model's answers, and keep the most frequent ones for drafting.",
    "plot": "Draw losses and acceptance of training runs.",
    "convert": "Write a GGUF file as a model directory in Hugging Face layout.",
    "export": "Write a draft head in the format of another engine.",
    "import": "Write a draft head of any known format in ours.",
    "plan": "Say whether speculation will pay for a model on a machine, before anything is loaded.",
    "calibrate": "Measure a model on this machine, so that plans for it rest on measurements.",
    "bench": "Measure speed and acceptance over a grid of settings.",
    "bench compare": "Compare two reports of jaxspec bench, cell by cell.",
    "lm-eval": "Evaluate a model with lm-evaluation-harness; takes the harness's own flags.",
    "demo": "See speculation at work on the packaged demo models.",
}
MODULES = {"import": "import_head", "token-map": "token_map"}  # where a command is no name of Python's
VERSION = ("--version", "-V")


def main(args: list[str] | None = None) -> int:
    """Runs ``jaxspec`` and returns its exit status.

    Each subcommand is a module of this package with a function ``run(args)``; the type of ``args`` gives its
    flags. Only the module that is asked for is imported.

    Args:
      args: the command line; None is that of this process, whose signals are then watched, too.
    """
    if args is None:
        args = sys.argv[1:]
        if args[:1] == ["train"]:
            restart_with_huge_pages()
        INTERRUPTS.watch()
    try:
        code = _run(args)
        sys.stdout.flush()
    except BaseException as error:
        code = _ended_by(error)
        if code is None:
            raise
    return code


def _ended_by(error: BaseException) -> int | None:
    """Shows an exception as one line and returns its exit status; None for a fault of ours."""
    if isinstance(error, JaxspecError):
        return _fail(str(error), status_of(error))
    if isinstance(error, BrokenPipeError):
        # The interpreter flushes standard output once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return BROKEN_PIPE
    if isinstance(error, SystemExit):
        return None
    # An import that a signal cuts short ends in other exceptions.
    number = INTERRUPTS.number or (signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0)
    if number:
        INTERRUPTS.say(number)
        return 128 + number
    if "RESOURCE_EXHAUSTED" in str(error):
        return _fail(f"{error}; fewer rows or shorter texts need less (--max-num-seqs, --max-model-len)", FAILED)
    return _fail(str(error), FAILED) if isinstance(error, OSError) else None


def _fail(words: str, status: int) -> int:
    sys.stderr.write(f"jaxspec: {' '.join(words.split())}\n")
    return status


def _run(args: list[str]) -> int:
    if len(args) == 1 and args[0] in VERSION:
        from jaxspec import __version__

        sys.stdout.write(f"jaxspec {__version__}\n")
        return 0
    args = ["lm-eval", *args[1:]] if args[:1] == ["lm_eval"] else args
    name = next((words for words in (" ".join(args[:2]), " ".join(args[:1])) if words in COMMANDS), None)
    if name is None:
        return _overview(args)
    if name == "lm-eval":
        from jaxspec.cli.lm_eval import run_harness

        return run_harness(args[1:])
    command = import_module(f"jaxspec.cli.{MODULES.get(name, name.replace(' ', '_'))}")
    INTERRUPTS.doing = f"running jaxspec {name}"
    kind = get_type_hints(command.run)["args"]
    rest = args[len(name.split()) :]
    parsed = parse(kind, rest, prog=f"jaxspec {name}", description=description_of(name, COMMANDS[name]))
    return command.run(parsed) or 0


def _overview(args: list[str]) -> int:
    """Shows all commands.

    Raises:
      ConfigError: the word is none of them.
    """
    if args and not args[0].startswith("-"):
        near = get_close_matches(args[0], COMMANDS, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{args[0]!r} is no command; {meant}There are {', '.join(COMMANDS)}")
    overview = SubcommandApp()
    for name, about in COMMANDS.items():
        overview.command(name=name, help=about)(_nothing)
    overview.cli(
        prog="jaxspec",
        args=args or ["--help"],
        description="Lossless speculative decoding in JAX.\n\n"
        "jaxspec COMMAND --help shows a command's flags, jaxspec --version (-V) the version.",
    )
    return 0


def _nothing() -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
