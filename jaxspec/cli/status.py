"""Exit statuses of commands."""

from jaxspec.errors import JaxspecError

FAILED, USAGE_ERROR, BROKEN_PIPE = 1, 2, 141


def status_of(error: JaxspecError) -> int:
    """Returns 1 for what failed on the way, such as a full disk, 2 for what could not have been done."""
    return FAILED if type(error) is JaxspecError else USAGE_ERROR
