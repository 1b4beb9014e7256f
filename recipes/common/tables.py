"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def markdown(head: Sequence[object], lines: Iterable[Sequence[object]]) -> str:
    """A table with one line per row."""
    rows = [f"| {' | '.join(map(str, line))} |" for line in (head, *lines)]
    return "\n".join([rows[0], "|---" * len(head) + "|", *rows[1:]])
