"""Convergence bounds, least energy, and what to design by them."""
