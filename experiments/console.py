"""What scripts owe their user on the command line: cheap checks first, and warnings as lines."""

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn


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


def leave(code: int) -> NoReturn:
    """Ends the process at once: after Ctrl-C a compilation may still be under way, and nobody waits for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
