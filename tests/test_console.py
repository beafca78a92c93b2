"""What becomes of signals and of streams, in scripts."""

import os
import signal
import subprocess
import sys

import console
import pytest


def test_an_interrupt_waits_for_what_must_not_be_interrupted():
    done = []

    def interrupted():
        with console.not_now():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interrupted()
    signal.signal(signal.SIGTERM, handler)
    assert len(done) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_that_came_where_nothing_can_be_raised_comes_once_more(number, start):
    code = """
import gc, os, sys, time
import console
console.end_in_order()
def collected(phase, _):
    if phase == "start":
        gc.callbacks.remove(collected)
        os.kill(os.getpid(), int(sys.argv[1]))
gc.callbacks.append(collected)
try:
    gc.collect()
    print("ignored", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    process = start(code, int(number))
    assert process.communicate(timeout=50) == ("ignored\ninterrupted\n", "")


def test_streams_that_have_been_closed(tmp_path):
    code = f"""
import os, sys
sys.path.insert(0, {os.path.dirname(console.__file__)!r})
import console
console.watch()
def main():
    with open({str(tmp_path / "file")!r}, "w") as file:
        print("words")
        print("more words", file=sys.stderr)
        os.write(1, b"of others")
        os.write(2, b"of others")
        file.write("content")
    return 3
console.leave(console.run(main))
"""
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, timeout=50).returncode == 3
    assert (tmp_path / "file").read_text() == "content"


def test_a_folder_that_is_no_text(tmp_path):
    with pytest.raises(OSError, match=r"results cannot be written to .*bad.udcff.: it is no UTF-8; choose another"):
        console.check_writable(tmp_path / os.fsdecode(b"bad\xff"))
