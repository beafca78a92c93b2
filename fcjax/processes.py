"""Several processes, on one machine or many, that do a sweep together: each a part of the runs, kept in one folder.

Which process does what follows from their number alone. Nothing is sent between them: each finds the runs of the others
in the folder. There each also gives signs of life, which tell what it does, so that none waits for one that is not
there, or that does something else.
"""

import contextlib
import enum
import threading
import time
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax

T = TypeVar("T")

_POLL_S = 1.0  # between two looks at what others have done
_BEAT_S = 3.0  # between two signs of life
_SILENT_S = 40.0  # after which a process that was seen is taken for dead
_ABSENT_S = 300.0  # after which one that never was is: it may still load data
_UNSEEN_S = 120.0  # until what another process has written is seen here: network file systems remember for a minute


class Does(enum.StrEnum):
    WORK = "works"
    WAIT = "waits"  # its own runs are in the folder
    REST = "rests"  # it has seen all runs, and what it writes is written; it stays until the others rest too


class _Sign(NamedTuple):
    text: str  # a word that is never the same twice, the task, and what is done
    since: float
    is_new: bool = False  # not what was left behind by a process of another day

    @property
    def task(self) -> str:
        return self.text.split()[1] if self.is_new else _NONE

    @property
    def does(self) -> str:
        return self.text.split()[2] if self.is_new else ""


_NONE = "-"


class Team:
    """The processes that JAX has joined, seen from one of them; without `jax.distributed`, this one alone."""

    def __init__(self, folder: Path | None):
        self.index, self.size = jax.process_index(), jax.process_count()
        if self.size > 1 and folder is None:
            raise ValueError(
                f"{self.size} processes do this sweep together: give `keep`, a folder that all of them have in common"
            )
        self._folder = folder
        self._task = _NONE
        self._does = Does.WORK
        self._signs: dict[int, _Sign] = {}
        self._checked_at = 0.0
        self._common_at: dict[int, float] = {}  # when each of the others was last known to do the same
        self._seen: set[int] = set()  # those that were seen to
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "Team":
        if self.size > 1:
            self._signs = {
                index: _Sign(self._read(index), time.monotonic()) for index in range(self.size) if index != self.index
            }
            self._common_at = dict.fromkeys(self._signs, time.monotonic())
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._thread.is_alive():
            self._thread.join()

    def part(self, everything: Sequence[T]) -> Sequence[T]:
        """What of it falls to this process."""
        return everything[self.index :: self.size]

    def begin(self, task: str) -> None:
        """Tells the others what is done together, by a word that is the same for all."""
        self._task = task

    def tell(self, does: Does) -> None:
        """Tells the others what this process does."""
        self._does = does
        if self.size > 1:
            self._write()

    def rest(self) -> None:
        """Tells the others that all is done here, and waits until it is with them: who comes late must see that."""
        self.tell(Does.REST)
        try:
            while not self.have_rested(*self._signs):
                self.pause()
        except RuntimeError as error:
            warnings.warn(f"all runs are there, but {error}", stacklevel=2)

    def have_rested(self, *others: int) -> bool:
        """Whether these processes have done all for the common task."""
        self._look()
        return all(map(self._has_rested, others))

    def check(self) -> None:
        """Raises RuntimeError if one of the others is not there any more, or does something else.

        It may be called often, and looks now and then.
        """
        now = time.monotonic()
        if self.size == 1 or now - self._checked_at < _BEAT_S:
            return
        self._checked_at = now
        self._look()
        for index, sign in self._signs.items():
            who = f"process {index} of {self.size}"
            away_s, silent_s = now - self._common_at[index], now - sign.since
            if self._has_rested(index):
                if (away_s if self._is_foreign(index) else silent_s) > _UNSEEN_S:
                    raise self._lost(f"{who} has finished, but not all of its runs can be seen in {self._folder}")
            elif away_s > {Does.WORK: 2 * _BEAT_S, Does.WAIT: _UNSEEN_S}.get(Does(sign.does or Does.REST), _ABSENT_S):
                raise RuntimeError(
                    f"{who} does another sweep than this one, or has another version of JAX, fcjax or a policy: start "
                    "all with the same command, in the same environment"
                )
            elif not sign.is_new and silent_s > _ABSENT_S:
                why = f"it did not begin, or does not have {self._folder} in common with this one"
                raise self._lost(f"{who} gave no sign of life for {silent_s:.0f} s: {why}")
            elif sign.does in (Does.WORK, Does.WAIT) and silent_s > _SILENT_S:
                raise self._lost(f"{who} gave no sign of life for {silent_s:.0f} s: it has ended")

    def pause(self) -> None:
        """Lets some time pass for the others, and checks that they are there."""
        self.check()
        time.sleep(_POLL_S)

    def _lost(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{what}. Finished runs are kept in {self._folder}; start all processes again, and they go on with what is "
            "missing"
        )

    def _look(self) -> None:
        now = time.monotonic()
        for index, sign in self._signs.items():
            text = self._read(index)
            if text and text != sign.text:
                self._signs[index] = _Sign(text, now, is_new=True)
            if not self._is_foreign(index):
                self._common_at[index] = now
                if self._signs[index].task == self._task != _NONE:
                    self._seen.add(index)

    def _is_foreign(self, index: int) -> bool:
        return _NONE not in (self._signs[index].task, self._task) and self._signs[index].task != self._task

    def _has_rested(self, index: int) -> bool:
        """Whether another process has done all for the common task; it may have gone on to something else."""
        sign = self._signs[index]
        if sign.task == self._task:
            return sign.does == Does.REST
        return index in self._seen

    def _path(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f".process-{index}-of-{self.size}"

    def _read(self, index: int) -> str:
        """The last sign of a process; nothing if there is none, or half of one."""
        with contextlib.suppress(OSError):
            text = self._path(index).read_text()
            words = text.split()
            return text if len(words) == 3 and words[2] in list(Does) else ""
        return ""

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk is told where a run cannot be kept
            self._path(self.index).write_text(f"{uuid.uuid4().hex} {self._task} {self._does}")

    def _beat(self) -> None:
        while not self._left.wait(_BEAT_S):
            self._write()
