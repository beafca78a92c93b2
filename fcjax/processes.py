"""Several processes, on one machine or many, that do a sweep together: each a part of the runs, kept in one folder.

Which process does what follows from their number alone. Nothing is sent between them: each finds the runs of the others
in the folder, and there also sees that they are alive, so that none waits for one that is not.
"""

import contextlib
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import jax

T = TypeVar("T")

_BEAT_S = 3.0  # between two signs of life
_SILENT_S = 40.0  # after which a process that was seen is taken for dead
_ABSENT_S = 300.0  # after which one that never was is: it may still load data


class Team:
    """The processes that JAX has joined, seen from one of them; without `jax.distributed`, this one alone."""

    def __init__(self, folder: Path | None):
        self.index, self.size = jax.process_index(), jax.process_count()
        if self.size > 1 and folder is None:
            raise ValueError(
                f"{self.size} processes do this sweep together: give `keep`, a folder that all of them have in common"
            )
        self._folder = folder
        self._signs = {index: ("", time.monotonic(), False) for index in self._others()}  # what, since when, ever new
        self._left = threading.Event()

    def __enter__(self) -> "Team":
        if self.size > 1:
            for index in self._others():  # what was left behind by those of another day
                self._signs[index] = self._read(index), time.monotonic(), False
            threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def part(self, everything: Sequence[T]) -> Sequence[T]:
        """What of it falls to this process."""
        return everything[self.index :: self.size]

    def check(self) -> None:
        """Raises RuntimeError if one of the others is not there any more."""
        now = time.monotonic()
        for index, (known, since, seen) in self._signs.items():
            if (sign := self._read(index)) != known:
                self._signs[index] = sign, now, True
            elif now - since > (_SILENT_S if seen else _ABSENT_S):
                why = (
                    "it has ended" if seen else f"it did not begin, or does not have {self._folder} in common with this"
                )
                raise RuntimeError(
                    f"process {index} of {self.size} gave no sign of life for {now - since:.0f} s: {why}. Finished "
                    f"runs are kept in {self._folder}; start all processes again, and they go on with what is missing"
                )

    def _others(self) -> list[int]:
        return [index for index in range(self.size) if index != self.index]

    def _path(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"process-{index}-of-{self.size}.alive"

    def _read(self, index: int) -> str:
        try:
            return self._path(index).read_text()
        except OSError:
            return ""

    def _beat(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # a full disk is told where a run cannot be kept
                self._path(self.index).write_text(uuid.uuid4().hex)
            if self._left.wait(_BEAT_S):
                self._path(self.index).unlink(missing_ok=True)
                return
