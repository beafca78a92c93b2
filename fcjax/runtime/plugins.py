"""Loads and calls user code, and reports its errors."""

import contextlib
import functools
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


def of_user(what: str, function: Callable[[], T]) -> T:
    """Calls a user's function, or one of fcjax; a user's error becomes a one-line ValueError with its location."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not any(part in frame.filename for part in ("site-packages", "<", _HERE))]
        if not own and isinstance(error, ValueError | OSError):
            raise  # fcjax's own function rejects its arguments
        where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        try:
            reason = str(error).strip().split("\n")[0]
        except Exception:  # the user's __str__ may raise too
            reason = "-"
        hint = _HINTS.get(type(error).__name__, "")
        raise ValueError(f"{what} raised {type(error).__name__}: {reason}{where}{hint}") from error


_HERE = str(Path(__file__).parents[1])
_HINTS = {
    "TracerBoolConversionError": "; use jax.numpy.where or jax.lax.cond instead of if",
    "TracerArrayConversionError": "; use jax.numpy instead of numpy",
}


def load_module(name: str) -> ModuleType:
    """Loads a module by its import name, or by the path of its file with or without .py."""
    with _current_folder_on_path():
        return _load_module(name)


@contextlib.contextmanager
def _current_folder_on_path() -> Iterator[None]:
    """Puts the current folder on the path while a user's module loads; at other times it might shadow libraries."""
    folder = str(Path.cwd())
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _load_module(name: str) -> ModuleType:
    path = _path(name)
    if not path.is_file():
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if f"{name}.".startswith(f"{error.name}."):  # not a module that the user's own one imports
                where = "" if path.is_absolute() else f" in {Path.cwd()}"
                raise ValueError(f"there is no file {path}{where} and no module {name}") from error
            raise
    return _load_file(path.resolve(), path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _load_file(path: Path, changed_ns: int) -> ModuleType:
    """Loads a file once per version, so that its functions stay the same and share programs."""
    own_name = f"fcjax_user_{path.stem}"  # so that a file such as random.py shadows nothing
    spec = importlib.util.spec_from_file_location(own_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[own_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_file(name: str) -> bool:
    """Returns whether the name of a module is that of a file."""
    with contextlib.suppress(ValueError):  # such as a null character
        return _path(name).is_file()
    return False


def _path(name: str) -> Path:
    return Path(name if name.endswith(".py") else f"{name}.py")
