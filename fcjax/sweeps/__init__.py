"""Sweeps: planning, executing and storing many runs."""
