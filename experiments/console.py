"""What scripts owe their user on the command line: cheap checks first, warnings as lines, and tables in columns."""

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

Block = str | list[list[str]]  # a paragraph, or the lines of a table, the first its head


def check_writable(folder: Path) -> None:
    """Raises OSError for a folder that results cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"results cannot be written to {folder}: {error.strerror}; choose another with --out") from error


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Prints warnings without the line of code that they come from."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        yield


def as_text(blocks: Sequence[Block]) -> str:
    """Paragraphs and tables for a terminal; columns of words are adjusted to the left, of numbers to the right."""
    parts = []
    for block in blocks:
        if isinstance(block, str):
            parts.append(block)
            continue
        columns = []
        for column in zip(*block, strict=True):
            width = max(map(len, column))
            words = any(letter.isalpha() for entry in column[1:] for letter in entry)
            columns.append([entry.ljust(width) if words else entry.rjust(width) for entry in column])
        parts.append("\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True)))
    return "\n\n".join(parts)


def leave(code: int) -> NoReturn:
    """Ends the process at once: after Ctrl-C a compilation may still be under way, and nobody waits for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
