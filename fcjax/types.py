"""The types of a round: frozen dataclasses that are JAX pytrees.

All fields except static ones are leaves: `jax.vmap` maps over them, `jax.jit` traces them, and `jax.grad`
differentiates with respect to them. M is the number of devices. Field docs give shape, unit and the paper's symbol.
Quantities are in SI units, on a linear scale.

Constructors check nothing, because pytrees of the same class also carry gradients and `vmap` axes. The functions that
compute with these values check them (see `fcjax.checks`).
"""

from __future__ import annotations  # short types in help()

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=False)
def pytree(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass whose fields are the leaves of a JAX pytree."""
    # eq=False, because comparing arrays has no single truth value.
    made = jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls))
    if "__repr__" not in vars(cls):
        made.__repr__ = in_brief  # type: ignore[method-assign]
    return made


def in_brief(fields: Any, **instead: str) -> str:
    """Returns one line per field: shape and range of arrays, the type's name otherwise."""
    names = (field.name for field in dataclasses.fields(fields))
    lines = (f"  {name}: {instead.get(name) or _brief(getattr(fields, name))}" for name in names)
    return "\n".join([type(fields).__name__, *lines])


def _brief(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}(...)"
    if isinstance(value, dict | list):  # model parameters
        return f"{sum(np.size(leaf) for leaf in jax.tree.leaves(value))} numbers"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype") or value.dtype.kind not in "biuf":
        return getattr(value, "__name__", None) or repr(value)
    array = np.asarray(value)
    if array.ndim == 0:
        return f"{array.item():g}"
    kind = f"{array.dtype} {array.shape}"
    if array.size == 0 or np.isnan(array).all():
        return kind
    low, high = np.nanmin(array), np.nanmax(array)
    return f"{kind}, all {low:g}" if low == high else f"{kind}, {low:g} to {high:g}"


def static(default: Any = dataclasses.MISSING) -> Any:
    """Declares a static field: not a leaf, but known at compile time."""
    return dataclasses.field(default=default, metadata={"static": True})


def quantity(allowed: str, default: Any = dataclasses.MISSING, *, shape: str = "()", **limits: float) -> Any:
    """Declares a leaf with the values that `fcjax.checks` allows.

    Args:
      allowed: "positive", "not negative" or "fraction".
      default: of the field.
      shape: "()", "(M,)" or "() or (M,)".
      limits: `low` and `high`, where they differ from those of the check.
    """
    return dataclasses.field(default=default, metadata={"allowed": allowed, "shape": shape, "limits": limits})


@pytree
class Cell:
    """The radio of a cell and its devices; the defaults are the paper's.

    Attributes:
      bandwidth_hz: () Hz, B: shared by the scheduled devices, as `access` says.
      noise_psd_w_hz: () W/Hz, N0.
      power_w: (M,) W, P_i.
      upload_bits: () or (M,) bit, S.
      radius_m: () m, R.
      min_distance_m: () m, the smallest distance in the path loss, so that the gain stays below 1.
      reference_gain: () power gain at 1 km; by default a loss of 128.1 dB.
      path_loss_exponent: () exponent of the distance.
      scatter: () in [0, 1], scattered fraction of the power: 0 no fading, 1 Rayleigh, else Rician.
      shadowing_db: () dB, standard deviation of log-normal shadowing.
      sample_floor_s: () or (M,) s per sample, a_i: the minimum computation time.
      sample_rate_hz: () or (M,) samples/s, mu_i: the rate of the additional random time.
      access: "fdma", "ofdma" or "tdma"; see `fcjax.wireless.access`.
      num_blocks: blocks of bandwidth under OFDMA.
    """

    # These limits keep all products and ratios of the first four within the range of float32.
    bandwidth_hz: ArrayLike = quantity("positive", low=1e-3, high=1e15)
    noise_psd_w_hz: ArrayLike = quantity("positive", low=1e-28, high=1)
    power_w: ArrayLike = quantity("not negative", shape="(M,)", low=1e-20, high=1e6)
    upload_bits: ArrayLike = quantity("not negative", shape="() or (M,)", low=1e-6, high=1e20)
    radius_m: ArrayLike = quantity("positive", 600.0)
    min_distance_m: ArrayLike = quantity("positive", 1.0)
    reference_gain: ArrayLike = quantity("positive", 10**-12.81)
    path_loss_exponent: ArrayLike = quantity("not negative", 3.76, high=100)
    scatter: ArrayLike = quantity("fraction", 0.0)
    shadowing_db: ArrayLike = quantity("not negative", 0.0, high=100)
    sample_floor_s: ArrayLike = quantity("not negative", 5e-4, shape="() or (M,)")
    sample_rate_hz: ArrayLike = quantity("positive", 2000.0, shape="() or (M,)")
    access: str = static("fdma")
    num_blocks: int = static(50)


@pytree
class Observation:
    """Channels and computation times of a round.

    Attributes:
      gain: (M,) power gain, h_i^2.
      compute_s: (M,) s, t_i^cp.
    """

    gain: ArrayLike
    compute_s: ArrayLike


@pytree
class Decision:
    """A scheduling decision: the devices of a round, their shares of the bandwidth, and the round time.

    Attributes:
      scheduled: (M,) bool, Pi.
      share: (M,) gamma_i: 0 for devices that are not scheduled; the others sum to 1.
      round_s: () s, t*: 0 if no device is scheduled, inf if a scheduled device never finishes.
    """

    scheduled: Array
    share: Array
    round_s: Array


@pytree
class Training:
    """Settings of local training; the defaults are the paper's for MNIST, with the momentum that its figures imply.

    Attributes:
      learning_rate: () eta.
      momentum: () momentum of local SGD, reset each round.
      budget_s: () s, T: a round that would end later does not take place.
      num_samples: () or (M,) D_i: only their ratios matter.
      local_steps: tau.
      batch_size: d.
    """

    learning_rate: ArrayLike = 0.01
    momentum: ArrayLike = 0.9
    budget_s: ArrayLike = 60.0
    num_samples: ArrayLike = 1.0
    local_steps: int = static(5)
    batch_size: int = static(128)


@pytree
class Estimates:
    """The base station's estimates of the loss; a device that is not scheduled keeps its last values.

    Attributes:
      rho: (M,) Lipschitz constants, rho_i.
      beta: (M,) smoothness, beta_i.
      delta: (M,) gradient divergence, delta_i.
    """

    rho: ArrayLike
    beta: ArrayLike
    delta: ArrayLike


@pytree
class RoundContext:
    """What a policy knows about a round.

    Attributes:
      observation: channels and computation times as the base station observes them, with errors.
      estimates: estimates of the loss.
      cell: the radio and the devices.
      training: the settings of local training; `num_samples` is (M,).
      elapsed_s: () s since training began.
      round_index: () 0 in the first round.
    """

    observation: Observation
    estimates: Estimates
    cell: Cell
    training: Training
    elapsed_s: ArrayLike
    round_index: ArrayLike


class Policy(NamedTuple):
    """A scheduling policy: two pure functions of arrays, and a state that is passed from round to round.

    Put the parameters of a policy into its state: policies that differ only in their state share one compiled program,
    and `jax.vmap` maps over it.
    """

    init: Callable[[Cell], Any]  # cell -> state
    select: Callable[[Array, Any, RoundContext], tuple[Any, Decision]]  # key, state, context -> state, decision

    @property
    def name(self) -> str:
        """The name of its function."""
        return getattr(self.select, "__qualname__", repr(self.select)).replace("_select_", "").split(".")[0]

    def __repr__(self) -> str:
        return f"Policy({self.name})"
