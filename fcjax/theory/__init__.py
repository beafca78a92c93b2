"""Convergence bounds."""
