"""What the scripts share on the command line."""

import os

import pytest

from fcjax.runtime import console


def test_a_folder_whose_name_is_not_text(tmp_path):
    with pytest.raises(OSError, match=r"results cannot be written to .*bad.udcff.: it is not UTF-8; choose another"):
        console.check_writable(tmp_path / os.fsdecode(b"bad\xff"))


def test_sigterm_ends_as_ctrl_c_does(start):
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
