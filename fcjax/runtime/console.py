"""Helpers of command-line programs: early checks, one-line warnings, tables and signals."""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

Block = str | list[list[str]]  # a paragraph, or the rows of a table, header first


def check_writable(folder: Path) -> None:
    """Raises OSError if results cannot be written to a folder."""
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise OSError(
            f"results cannot be written to {str(folder)!a}: it is not UTF-8; choose another with --out"
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"results cannot be written to {folder}: {error.strerror}; choose another with --out") from error


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Prints each warning as one line, without its source line."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        yield


def as_text(blocks: Sequence[Block]) -> str:
    """Formats paragraphs and tables for a terminal; columns of words are left-aligned, of numbers right-aligned."""
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


def end_on_sigterm() -> None:
    """Handles SIGTERM, which clusters send to end a job, like Ctrl-C."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def leave(code: int) -> NoReturn:
    """Exits at once: after Ctrl-C, a compilation may still be running in another thread."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):  # such as a closed pipe
            stream.flush()
    os._exit(code)
