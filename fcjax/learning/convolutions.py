"""Convolutions and max pooling with derivatives that are fast on a CPU.

Inside a loop, XLA's CPU backend takes about ten times as long for the gradient of a convolution as for the convolution,
and its gradient of max pooling (select-and-scatter) is slow too. Here a convolution keeps XLA's forward pass. Its
derivative with respect to the kernel is a sum of matrix products, one per row of the kernel, and its derivative with
respect to the input is written such that the transposed convolution needs no transposed kernel inside the loop. Max
pooling selects the first maximum of each window by comparisons.

`rewrite` puts them into any function, such as the `apply` of a flax module, by way of its jaxpr.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

_CONVOLUTION, _MAX_POOL = "conv_general_dilated", "reduce_window_max"
_MOST_OFFSETS = 100  # of a pooling window; programs grow with it


def rewrite(function: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
    """Returns the same function, with convolutions and max pooling whose derivatives are fast on a CPU.

    Functions without either are returned as they are, and on accelerators all of them are. What cannot be replaced is
    left to XLA, with a warning: transposed convolutions, and those inside loops, conditions or custom derivatives.

    Args:
      function: a function of arrays.
      examples: arguments, or their shapes and types.
    """
    if jax.default_backend() != "cpu":
        return function
    found = list(_find(jax.make_jaxpr(function)(*examples).jaxpr))
    if left := sorted({reason for reason in found if reason}):
        warnings.warn(f"gradients may be slow on a CPU, because XLA computes {' and '.join(left)}", stacklevel=3)
    if None not in found:
        return function

    @functools.wraps(function)
    def rewritten(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return rewritten


def _find(jaxpr: core.Jaxpr, inside: str | None = None) -> Iterator[str | None]:
    """Yields, for each convolution and max pooling, why it cannot be replaced, or None."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in (_CONVOLUTION, _MAX_POOL):
            kind = "convolutions" if name == _CONVOLUTION else "max pooling"
            yield f"{kind} inside {inside}" if inside else _obstacle(name, equation.params)
        deeper = inside if name == "jit" else inside or name
        for part in core.jaxprs_in_params(equation.params):
            yield from _find(part, deeper)


def _obstacle(name: str, params: dict[str, Any]) -> str | None:
    if name == _MAX_POOL:
        too_large = math.prod(params["window_dimensions"]) > _MOST_OFFSETS
        return "max pooling over large windows" if too_large or set(params["base_dilation"]) != {1} else None
    transposed = set(params["lhs_dilation"]) - {1} or params["batch_group_count"] != 1
    return "transposed convolutions" if transposed else None


def _evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]  # noqa: E731
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inputs = [read(atom) for atom in equation.invars]
        if name in (_CONVOLUTION, _MAX_POOL) and _obstacle(name, params) is None:
            replacement = convolve if name == _CONVOLUTION else max_pool
            results = [replacement(tuple(sorted(params.items())), *inputs)]
        elif name == "jit" and None in _find(params["jaxpr"].jaxpr):
            results = _evaluate(params["jaxpr"].jaxpr, params["jaxpr"].consts, inputs)
        else:
            variables = [atom for atom in equation.invars if not isinstance(atom, core.Literal)]
            alone = jaxpr.replace(constvars=[], invars=variables, outvars=equation.outvars, eqns=[equation])
            results = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*map(read, variables))
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def convolve(settings: tuple[tuple[str, Any], ...], x: Array, kernel: Array) -> Array:
    """Returns the convolution of `jax.lax.conv_general_dilated`, with its arguments as pairs of name and value."""
    return lax.conv_general_dilated(x, kernel, **dict(settings))


@functools.partial(convolve.defjvp, symbolic_zeros=True)
def _convolve_jvp(settings, primals, tangents):
    (x, kernel), (dx, dkernel) = primals, tangents
    result = convolve(settings, x, kernel)
    terms = []
    if not _is_zero(dx):
        terms.append(_convolve_input(dict(settings), dx, kernel))
    if not _is_zero(dkernel):
        terms.append(_convolve_kernel(dict(settings), x, dkernel).astype(result.dtype))
    return result, sum(terms) if terms else jnp.zeros_like(result)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _convolve_input(settings: dict[str, Any], dx: Array, kernel: Array) -> Array:
    """Convolves such that the transposed function convolves with a kernel in XLA's own order of axes.

    JAX transposes a convolution by reversing the kernel and exchanging the roles of its input and output axes, which
    is slow inside a loop. Here both are already done once, so that transposing undoes them.
    """
    if settings["feature_group_count"] > 1:
        return lax.conv_general_dilated(dx, kernel, **settings)
    numbers = settings["dimension_numbers"]
    out, into, *spatial = numbers.rhs_spec
    adjoint = lax.rev(jnp.swapaxes(kernel, out, into), spatial)
    exchanged = numbers._replace(rhs_spec=(into, out, *spatial))
    return lax.conv_general_dilated(dx, lax.rev(adjoint, spatial), **settings | {"dimension_numbers": exchanged})


def _convolve_kernel(settings: dict[str, Any], x: Array, kernel: Array) -> Array:
    """Convolves by matrix products, one for each row of the kernel, all of whose offsets are side by side."""
    (batch, feature, *spatial), (out, into, *window), out_spec = settings["dimension_numbers"]
    groups, precision = settings["feature_group_count"], settings["precision"]
    x = jnp.transpose(x, (batch, *spatial, feature))
    kernel = jnp.transpose(kernel, (*window, into, out))
    edges = ((0, 0), *settings["padding"], (0, 0))
    strides, dilation = ((1, *settings[name], 1) for name in ("window_strides", "rhs_dilation"))
    views = _views(x, (1, *kernel.shape[:-2], 1), strides, edges, dilation, 0)
    width, (size, number) = kernel.shape[-3] if window else 1, kernel.shape[-2:]
    rows = kernel.reshape(-1, width, size, groups, number // groups)
    sums: list[Array] = []
    for index, row in enumerate(rows):
        side = jnp.stack(views[index * width : (index + 1) * width], axis=-2)
        side = side.reshape(*side.shape[:-1], groups, size)
        if groups == 1:
            flat = side.reshape(*side.shape[:-3], width * size)
            sums.append(jnp.matmul(flat, row.reshape(width * size, number), precision=precision))
        else:
            terms = jnp.einsum("...wgc,wcgf->...gf", side, row, precision=precision)
            sums.append(terms.reshape(*terms.shape[:-2], number))
    order = np.argsort((out_spec[0], *out_spec[2:], out_spec[1])).tolist()
    return jnp.transpose(sum(sums[1:], sums[0]), order)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def max_pool(settings: tuple[tuple[str, Any], ...], x: Array) -> Array:
    """Returns the largest value of each window, as `jax.lax.reduce_window` with `jax.lax.max` does."""
    least = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    return lax.reduce_window(x, jnp.asarray(least, x.dtype), lax.max, **dict(settings))


@max_pool.defjvp
def _max_pool_jvp(settings, primals, tangents):
    """Takes the tangent of the first maximum of each window."""
    (x,), (dx,) = primals, tangents
    params = dict(settings)
    where = (params[name] for name in ("window_dimensions", "window_strides", "padding", "window_dilation"))
    window, strides, edges, dilation = where
    result = max_pool(settings, x)
    tangent, found = jnp.zeros_like(result), jnp.zeros(result.shape, bool)
    pairs = zip(
        *(_views(a, window, strides, edges, dilation, fill) for a, fill in ((x, -np.inf), (dx, 0))), strict=True
    )
    for value, change in pairs:
        is_first = (value == result) & ~found
        tangent += jnp.where(is_first, change, 0)
        found |= is_first
    return result, tangent


def _views(
    x: Array,
    window: Sequence[int],
    strides: Sequence[int],
    edges: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    fill: float,
) -> list[Array]:
    """Returns, for each offset in a window, the array of what all windows have there."""
    x = lax.pad(x, jnp.asarray(fill, x.dtype), [(*edge, 0) for edge in edges])
    views = []
    for offset in np.ndindex(*window):
        start = [place * step for place, step in zip(offset, dilation, strict=True)]
        # The last offset leaves room for the stride; the others end as far from the edge as they begin before it.
        ends = [
            size - (length - 1 - place) * step
            for size, length, place, step in zip(x.shape, window, offset, dilation, strict=True)
        ]
        views.append(lax.slice(x, start, ends, strides))
    return views
