"""``jaxspec lm-eval``: EleutherAI's lm-evaluation-harness, which then knows the model ``jaxspec``."""

import sys
from collections.abc import Sequence
from importlib import import_module

from jaxspec.errors import ConfigError


def run_harness(args: Sequence[str]) -> int:
    """Runs the harness's own command line; the model is ``jaxspec`` unless one is named.

    Args:
      args: the harness's, for example ``--model_args pretrained=DIR --tasks hellaswag``.

    Raises:
      ConfigError: the harness is not installed.
    """
    try:
        harness = import_module("lm_eval.__main__")
        from jaxspec.bench.harness import register
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise ConfigError("lm_eval: lm-evaluation-harness is not there; pip install 'jaxspec[eval]'") from error
    register()
    words = list(args)
    if words and words[0] not in ("ls", "validate") and not any(w.split("=")[0] in ("--model", "-M") for w in words):
        words += ["--model", "jaxspec"]
    sys.argv = ["jaxspec lm-eval", *words]
    harness.cli_evaluate()
    return 0
