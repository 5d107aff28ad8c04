"""The errors that a caller of jaxspec may catch."""


class JaxspecError(Exception):
    """Base of every error raised on purpose; the message says what was got, what is allowed and what to do."""


class ConfigError(JaxspecError):
    """A configuration value or file is missing, unknown or contradictory."""


class CheckpointError(JaxspecError):
    """A checkpoint cannot be read or does not match the model; all wrong names are listed at once."""


class CapacityError(JaxspecError):
    """A request or a batch does not fit the memory that was set aside."""


class QueueFullError(JaxspecError):
    """As many requests wait as may wait; the same request may be taken later."""


class RequestError(JaxspecError):
    """A prompt or its sampling parameters are not acceptable."""


class UnsupportedKernel(JaxspecError):
    """No implementation of an operation exists for this platform, dtype and shape."""
