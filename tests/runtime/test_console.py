"""Tests the command-line helpers that all scripts share."""

import os

import pytest

from fcjax.runtime import console


def test_folder_name_must_be_utf8(tmp_path):
    with pytest.raises(OSError, match=r"results cannot be written to .*bad.udcff.: it is not UTF-8; choose another"):
        console.check_writable(tmp_path / os.fsdecode(b"bad\xff"))


def test_sigterm_interrupts_like_ctrl_c(start):
    code = """
import os, signal, time
from fcjax.runtime import console
console.end_on_sigterm()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    assert start(code).communicate(timeout=50) == ("interrupted\n", "")
