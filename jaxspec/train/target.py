"""The frozen target of a run: its headers, read once, and its parameters as they are served with."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.checkpoint.load.fill import fill
from jaxspec.checkpoint.load.load_plan import LoadPlan
from jaxspec.checkpoint.load.model import Model, plan_model, policy_on_mesh, read_config, shardings_on
from jaxspec.models.arch import ArchSpec
from jaxspec.nn.policy import policy_for
from jaxspec.train.settings import RunSettings


@dataclass(frozen=True)
class TargetHeaders:
    """A model directory before any parameter is loaded: its published config, and how its parameters are loaded."""

    config: Mapping[str, Any]
    plan: LoadPlan

    @property
    def arch(self) -> ArchSpec:
        """The architecture."""
        return self.plan.net.arch

    @property
    def outside(self) -> "TargetHeaders":
        """The same without the layers: embedding, last norm and head."""
        inside = re.compile(r"(layers|segment)_\d+/")
        plan, parts = self.plan, {}
        for name in ("leaves", "rules_by_leaf"):
            parts[name] = {path: x for path, x in getattr(plan, name).items() if not inside.match(path)}
        return replace(self, plan=replace(plan, **parts))

    def load(self, mesh: Mesh | None = None) -> Model:
        """Loads the parameters; raises CheckpointError that names all missing, unknown and misshaped tensors."""
        self.plan.check()
        return Model(self.plan.net, fill(self.plan, shardings_on(mesh)), self.config, {}, self.plan.directory)


def read_headers(settings: RunSettings, directory: Path, mesh: Mesh | None = None) -> TargetHeaders:
    """Reads a model directory's config and the headers of its files; raises ConfigError and CheckpointError."""
    platform = jax.default_backend()
    policy = policy_on_mesh(policy_for(settings.train.target_dtype, platform), mesh)
    # A GPU's kernel reads a whole text in one launch.
    policy = policy.update(recurrence="chunks" if platform == "cpu" else "steps")
    config = read_config(directory)
    return TargetHeaders(config, plan_model(directory, policy, config=config))
