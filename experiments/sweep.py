"""Runs `fcjax sweep` from a clone."""

import sys

from fcjax.cli import leave, sweep

if __name__ == "__main__":
    leave(sweep(sys.argv[1:], program="python experiments/sweep.py"))
