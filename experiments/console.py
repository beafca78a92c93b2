"""What scripts owe their user on the command line: cheap checks first, warnings as lines, and tables in columns."""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

Block = str | list[list[str]]  # a paragraph, or the lines of a table, the first its head


def check_writable(folder: Path) -> None:
    """Raises OSError for a folder that results cannot be written to."""
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise OSError(
            f"results cannot be written to {str(folder)!a}: it is no UTF-8; choose another with --out"
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"results cannot be written to {folder}: {error.strerror}; choose another with --out") from error


class FolderLock:
    """Held by all processes that work in a folder, so that each can find out whether it is alone.

    It leaves no file, and goes when its process does, in whatever way. Where there are no such locks, all seem alone.
    """

    def __init__(self, folder: Path):
        self._folder: int | None = None
        with contextlib.suppress(ImportError, OSError):
            self._folder = os.open(folder, os.O_RDONLY)
            self._take(shared=True, wait=True)

    def is_shared(self) -> bool:
        """Whether another process has it too."""
        try:
            self._take(shared=False, wait=False)
        except BlockingIOError:
            return True
        except (ImportError, OSError):
            return False
        finally:
            with contextlib.suppress(ImportError, OSError):
                self._take(shared=True, wait=True)
        return False

    def release(self) -> None:
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def _take(self, *, shared: bool, wait: bool) -> None:
        import fcntl  # not on Windows

        if self._folder is not None:
            fcntl.flock(self._folder, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


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
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):  # nobody reads on
            stream.flush()
    _to_witness(_AS_USUAL)
    os._exit(code)


def run(main: Callable[[], int]) -> int:
    """The exit code of a script, also of one that fails."""
    _open_streams()
    try:
        return main()
    except SystemExit as end:  # argparse's
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1


_witness: int | None = None
_AS_USUAL = b"\0"


def watch() -> None:
    """Lets a small process wait for the end of this one, to tell what was left to be told.

    What is killed, for want of memory or by JAX, because another process of a cluster is gone, cannot tell it itself.
    To be called before anything large is imported.
    """
    global _witness
    _open_streams()
    if not hasattr(os, "fork"):
        return
    read, write = os.pipe()
    if os.fork():
        os.close(read)
        _witness = write
        return
    os.close(write)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(read, "rb") as told:
        words = told.read()
    if words and not words.endswith(_AS_USUAL):
        os.write(2, b"error: " + words.split(b"\n")[-1] + b"\n")
    os._exit(0)


def _open_streams() -> None:
    """Output that has been closed goes nowhere, instead of into the next file that is opened."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")


def last_words(words: str) -> None:
    """What is printed if this process is killed."""
    _to_witness(b"\n" + words.encode())


def _to_witness(words: bytes) -> None:
    if _witness is not None:
        with contextlib.suppress(OSError):  # it has been killed
            os.write(_witness, words)


def end_in_order() -> None:
    """Makes of SIGTERM, by which clusters end a job, what Ctrl-C is.

    Either may come where Python can raise nothing, as in what the garbage collector calls: then it comes once more.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, _interrupt)
    if sys.unraisablehook is not _once_more and hasattr(signal, "setitimer"):
        global _other_hook
        _other_hook = sys.unraisablehook
        signal.signal(signal.SIGALRM, _interrupt)
        sys.unraisablehook = _once_more


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


_other_hook = sys.unraisablehook


def _once_more(ignored: "sys.UnraisableHookArgs") -> None:
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    else:
        _other_hook(ignored)


@contextlib.contextmanager
def not_now() -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM wait for the end of the block: what is being imported makes other errors of them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}  # as of a shell
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt
