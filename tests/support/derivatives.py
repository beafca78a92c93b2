"""Checks derivatives against finite differences by coordinate, with fewer compilations than check_grads."""

import jax
import numpy as np
from jax.flatten_util import ravel_pytree


def check_derivatives(function, at, *, rtol, step=1e-4, order=2):
    """Compares Jacobians in both modes with central differences of the function.

    If the order is 2, second derivatives are compared with central differences of the Jacobian. Errors are relative to
    the largest entry for the same output, with a margin for the rounding of differences.
    """
    flat, unravel = ravel_pytree(at)

    def vector(x):
        return ravel_pytree(function(unravel(x)))[0]

    def differences(f):
        def central(i):
            h = step * np.eye(flat.size)[i]
            return (np.asarray(f(flat + h)) - np.asarray(f(flat - h))) / (2 * step)

        return np.stack([central(i) for i in range(flat.size)], axis=-1)

    def assert_close(got, expected):
        scale = np.abs(expected).reshape(expected.shape[0], -1).max(1)
        error = np.abs(np.asarray(got) - expected).reshape(len(scale), -1).max(1)
        np.testing.assert_array_less(error, rtol * scale + 10 * np.finfo(float).eps / step)

    reverse = jax.jit(jax.jacrev(vector))
    first = differences(jax.jit(vector))
    assert_close(reverse(flat), first)
    assert_close(jax.jit(jax.jacfwd(vector))(flat), first)
    if order == 2:
        assert_close(jax.jit(jax.jacfwd(jax.jacrev(vector)))(flat), differences(reverse))
