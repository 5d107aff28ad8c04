"""``jaxspec train``: fits a draft head to a target, and goes on where an earlier run stopped."""

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import tyro
from msgspec.structs import replace

from jaxspec.cli.host_flags import HostFlags
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.train.settings import RunSettings

LINES = ("warning", "memory", "loading")
NEEDED = {"optax": "optax", "orbax": "orbax-checkpoint", "grain": "grain"}


@dataclass(frozen=True)
class TrainArgs:
    """Arguments of ``jaxspec train``.

    Attributes:
      config: TOML file, or a name in configs/train.
      set: A value that differs from the file's, such as train.steps=100; may come again. Texts in lists need quotes
        inside quotes: --set 'data.train=["my.jsonl"]'.
      out: Directory of the run, by default the config's. The same command started again goes on where it ended.
      dry_run: Read the data and the target's headers, say what the run would take and what looks wrong, and end.
      features_only: Write the config's feature cache, which runs the target once over the data, and do not train.
    """

    config: Annotated[str, tyro.conf.Positional]
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    out: str | None = None
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    features_only: tyro.conf.FlagCreatePairsOff[bool] = False
    hosts: Annotated[HostFlags, tyro.conf.arg(name="")] = field(default_factory=HostFlags)


def run(args: TrainArgs) -> int:
    """Trains; returns the exit code."""
    if missing := [package for module, package in NEEDED.items() if find_spec(module) is None]:
        raise ConfigError(f"train: {', '.join(missing)} not installed; pip install 'jaxspec[train]'")
    from jaxspec.checkpoint.load.model import read_config
    from jaxspec.cli.progress import ShownTraining
    from jaxspec.inspect.train_cost import seconds_at_peak
    from jaxspec.serve.compile_cache import use_compile_cache
    from jaxspec.serve.demo_pair import resolve_model
    from jaxspec.train.run import check, train, write_features

    # Without a word of the user, JAX takes three quarters of a GPU, and the target of a head often needs more.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    settings = _settings(args)
    target = resolve_model(settings.target)
    with args.hosts.together() as talks:
        use_compile_cache()
        say = sys.stderr.write if talks else _nothing
        notify = _print_facts if talks else _nothing
        if args.dry_run:
            check(settings, target, notify)
            return 0
        if args.features_only:
            write_features(settings, target, notify)
            say(f"jaxspec: the features are in {settings.features.cache}\n")
            return 0
        say(f"jaxspec: {settings.head.kind} head for {target}, run in {settings.out}\n")
        try:
            with ShownTraining() if talks else nullcontext(_nothing) as watch:
                trained = train(settings, target, watch, notify, seconds_at_peak(settings, read_config(target)))
        except KeyboardInterrupt:
            say("jaxspec: stopped; the same command goes on from the last checkpoint\n")
            raise
        kept = [name for name in ("best", "last") if (trained.run.directory / name).exists()]
        places = " and ".join(str(trained.run.directory / name) for name in kept)
        say(f"jaxspec: {trained.run.steps} updates done; the head is in {places}\n")
    return 0


def _settings(args: TrainArgs) -> "RunSettings":
    """Reads the settings; a head that comes with jaxspec may be trained further by its target's name."""
    from jaxspec.serve.demo_pair import resolve_speculation
    from jaxspec.train.settings import load_run_settings

    settings = load_run_settings(args.config, args.set, args.out)
    head = settings.head
    known = resolve_speculation({"method": head.kind, "model": head.start}) if head.start else None
    return settings if known is None else replace(settings, head=replace(head, start=known["model"]))


def _nothing(said: object) -> None:
    pass


def _print_facts(facts: Mapping[str, object]) -> None:
    words = [f"{name}: {value}" if name in LINES else f"{name} {value}" for name, value in facts.items()]
    if words:
        sys.stderr.write(f"jaxspec: {', '.join(words)}\n")
        sys.stderr.flush()
