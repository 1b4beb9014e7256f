"""Errors that are shown to the user as one line, and their parts."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """The configuration cannot be run, or a file cannot be used. The message is shown to the user."""


def reason(error: Exception) -> str:
    """A short text for the error: the system's text if there is one, else the first line of the message."""
    return getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]


def closest(word: str, names: Iterable[str]) -> list[str]:
    """At most three names similar to `word`, the most similar first, and names that it abbreviates."""
    by_lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower(), by_lower)
    # abbreviations, such as lr for learning_rate or critic_learning_rate
    initials = {name: "".join(part[:1] for part in name.split("_")) for name in by_lower}
    found += [name for name, letters in initials.items() if len(word) > 1 and letters.endswith(word.lower())]
    return [by_lower[name] for name in dict.fromkeys(found)]


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of an error message that suggests names similar to `word`; empty if there are none."""
    found = closest(word, names)
    return f"; did you mean {' or '.join(found)}?" if found else ""
