"""Models by their id on the Hugging Face hub: only what is read is downloaded, once, and found again offline."""

import errno
import glob
import os
from collections.abc import Sequence
from pathlib import Path

from jaxspec.checkpoint.files.model_files import TEXT_FILES
from jaxspec.checkpoint.files.shards import INDEX, SINGLE, weight_map
from jaxspec.checkpoint.gguf.gguf_header import SUFFIX
from jaxspec.checkpoint.heads.identify import is_head
from jaxspec.checkpoint.heads.tensors import ARCHIVES
from jaxspec.checkpoint.hub_progress import log_progress
from jaxspec.checkpoint.load.model import no_directory, read_config
from jaxspec.errors import ConfigError

CONFIG = "config.json"
SMALL = (CONFIG, INDEX, *TEXT_FILES, "*.jinja")
LOG_IN = "log in with hf auth login, or set HF_TOKEN"


def resolve_model(
    name: str | Path, revision: str | None = None, download_dir: str | Path | None = None, *, weights: bool = True
) -> Path:
    """Returns the directory of a model or head, downloaded first if it is the id of one on the hub.

    Args:
      name: directory, or an id such as ``Qwen/Qwen3-30B-A3B``.
      revision: branch, tag or commit; by default the main branch.
      download_dir: cache of downloads; by default the hub's own (``HF_HOME``).
      weights: whether the weights are needed, too, or the config and tokenizer alone.

    Raises:
      ConfigError: there is no such directory or id, it cannot be downloaded, or a directory is given with a revision.
    """
    if not isinstance(name, str | Path) or not str(name) or not isinstance(revision, str | None):
        raise ConfigError(f"model: a directory or a hub id is needed, got {name!r}, revision {revision!r}")
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        if revision is not None:
            raise ConfigError(f"{path}: a directory has no revision, got {revision!r}; leave it out, or give a hub id")
        return path
    if os.path.lexists(path) or path.suffix == SUFFIX or not _is_id(str(name)):
        raise no_directory(path)
    hub = _Hub(str(name), download_dir)
    directory = hub.fetch(revision, SMALL)
    if not weights:
        return directory
    # By commit from here on: all files are of one, whatever is pushed meanwhile.
    for patterns in (choices := _weights(directory)):
        hub.fetch(directory.name, (CONFIG, *patterns), outside=False)
        if patterns is not choices[-1] and any(any(directory.glob(pattern)) for pattern in patterns):
            break
    return directory


def _weights(directory: Path) -> list[Sequence[str]]:
    """Returns names of weight files in the order in which they are looked for; the first that exist count."""
    if os.path.lexists(directory / INDEX):
        return [[glob.escape(name) for name in sorted(set(weight_map(directory / INDEX).values()))]]
    archives = [ARCHIVES] if os.path.lexists(directory / CONFIG) and is_head(read_config(directory)) else []
    return [[SINGLE], ["*.safetensors"], *archives]


def _is_id(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


class _Hub:
    """Downloads of one repository.

    Attributes:
      name: its id.
      cache: where downloads lie.
    """

    def __init__(self, name: str, download_dir: str | Path | None):
        from huggingface_hub import constants

        self.name, self.cache = name, Path(download_dir or constants.HF_HUB_CACHE).expanduser()

    def fetch(self, revision: str | None, patterns: Sequence[str], *, outside: bool = True) -> Path:
        """Returns the snapshot with the files that are wanted, which are downloaded where they are not there yet.

        Raises:
          ConfigError: that is not possible.
        """
        from huggingface_hub import snapshot_download

        try:
            with log_progress(self.name, self.cache):
                snapshot = snapshot_download(
                    self.name, revision=revision, cache_dir=self.cache, allow_patterns=list(patterns),
                    ignore_patterns=None if outside else ["*/*"],
                )  # fmt: skip
        except Exception as error:
            raise ConfigError(f"{self.name}: {self._why(error, revision)}") from error
        return Path(snapshot)

    def _why(self, error: Exception, revision: str | None) -> str:
        """Says what went wrong, and what to do."""
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):
            return f"a gated model; accept its terms on its page of the hub, then {LOG_IN}"
        if isinstance(error, errors.RepositoryNotFoundError):
            return f"no such directory, and no such model on the hub, or a private one; check the spelling, or {LOG_IN}"
        if isinstance(error, errors.RevisionNotFoundError):
            return f"no revision {revision!r} on the hub; give a branch, a tag or a commit"
        if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
            return self._unreachable(error, revision)
        if isinstance(error, errors.HfHubHTTPError):
            return _refused(error.response.status_code)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return f"no space left in {self.cache}; make room, or choose another place with download_dir or HF_HOME"
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            return f"cannot write to {self.cache} ({error.strerror}); choose another place with download_dir or HF_HOME"
        return f"the download failed ({_words(error)}); the same command goes on where it stopped"

    def _unreachable(self, error: Exception, revision: str | None) -> str:
        from huggingface_hub import constants

        cause = error.__cause__
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return _refused(status)
        wanted = f"hf download {self.name}" + (f" --revision {revision}" if revision else "")
        if constants.HF_HUB_OFFLINE:
            why = f"HF_HUB_OFFLINE is set; unset it, or run {wanted} first"
        else:
            why = f"the hub cannot be reached ({_words(cause or error)}); check the network"
        return f"no such directory, not whole in the cache {self.cache}, and {why}"


def _refused(status: int) -> str:
    if status == 401:
        return f"the hub refuses the token (401); {LOG_IN}"
    if status == 403:
        return f"the hub refuses access (403); accept the model's terms on its page, then {LOG_IN}"
    return f"the hub answers with status {status}; try again later"


def _words(error: BaseException) -> str:
    """Shortens an error to one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".removesuffix(": ")
