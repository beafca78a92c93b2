"""Experiments, rounds and whole runs."""
