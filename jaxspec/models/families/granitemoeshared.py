"""Granite 3 with experts beside a shared one."""

from dataclasses import replace

from jaxspec.models.families import granitemoe
from jaxspec.models.families.granitemoehybrid import FAMILY as GRANITE4

FAMILY = replace(granitemoe.FAMILY, model_type="granitemoeshared", moe=GRANITE4.moe)
