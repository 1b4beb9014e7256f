"""Errors that are shown to the user as one line."""


class ConfigError(ValueError):
    """The configuration cannot be run, or a file cannot be used. The message is shown to the user."""


class LostProcess(RuntimeError):
    """A process that the run needs has ended. The message names it."""
