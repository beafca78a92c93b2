"""Progress of long work: a bar that says what is happening on a terminal, or a line per minute in a log."""

import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tqdm.auto import tqdm

from fcjax.runtime import settings

T = TypeVar("T")

_LINE_EVERY_S = 60.0


class Progress:
    """A progress bar over `total` pieces of work, each a `unit`; shows nothing if disabled."""

    def __init__(self, total: int, unit: str, *, enabled: bool = True):
        self._total, self._unit = total, unit
        self._done = 0.0
        self._finished = 0
        self._activity: str | None = None
        self._seconds = 0.0  # spent on the work that the remaining time is estimated from
        self._resumed_at: float | None = None
        self._last_line = time.monotonic()
        self._bar = None
        enabled = enabled and sys.stderr is not None  # it is None if closed
        self._lines = enabled and not sys.stderr.isatty()
        if enabled and not self._lines:
            layout = "{percentage:3.0f}% |{bar}| {desc}"
            width = shutil.get_terminal_size().columns  # 80 if unknown
            self._bar = tqdm(total=total, bar_format=layout, leave=False, file=sys.stderr, ncols=width)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, activity: str | None = None) -> None:
        """Says what is happening; without an activity, the pieces are counted and the remaining time is estimated."""
        self._pause()
        self._activity = activity
        self._resumed_at = time.monotonic() if activity is None else None
        self.tick()

    def update(self, done: float, finished: int) -> None:
        """Sets the amount of work done, in pieces, and the number of finished pieces."""
        self._done, self._finished = done, finished
        self.tick()

    def tick(self) -> None:
        """Refreshes the display."""
        counted = f"{self._unit} {min(self._finished + 1, self._total)} of {self._total}{self._remaining()}"
        text = self._activity or counted
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            self._bar.n = min(self._done, self._total)
            self._bar.refresh()
        elif self._lines and time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._last_line = time.monotonic()
            print(f"{100 * self._done / self._total:3.0f}%  {text}", file=sys.stderr, flush=True)

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Calls function(*args) in another thread and ticks meanwhile; Ctrl-C abandons the thread."""
        outcome: list[Any] = []

        def work():
            try:
                outcome.extend((True, function(*args)))
            except BaseException as error:  # raised in the caller's thread
                outcome.extend((False, error))

        thread = threading.Thread(target=settings.carried(work), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            self.tick()
        succeeded, value = outcome
        if not succeeded:
            raise value
        return value

    def _pause(self) -> None:
        if self._resumed_at is not None:
            self._seconds += time.monotonic() - self._resumed_at

    def _remaining(self) -> str:
        seconds = self._seconds
        if self._resumed_at is not None:
            seconds += time.monotonic() - self._resumed_at
        if not seconds or not self._done or self._done >= self._total:
            return ""
        left = round(seconds * (self._total / self._done - 1))
        hours, minutes = left // 3600, left // 60 % 60
        return ", " + (f"{hours}:{minutes:02}:{left % 60:02}" if hours else f"{minutes}:{left % 60:02}") + " left"
