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
    return jax.tree_util.register_dataclass(_frozen(cls))


@dataclass_transform(frozen_default=True, eq_default=False)
def _frozen(cls: type[T]) -> type[T]:
    # eq=False, because comparing arrays has no single truth value.
    made = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
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
      allowed: "positive", "not negative", "not negative or infinite" or "fraction".
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
      cpu_hz: () or (M,) Hz, the highest CPU frequency, at which a sample takes `sample_floor_s`.
      capacitance: () or (M,) W/Hz^3, kappa: n CPU cycles at frequency f take the energy kappa n f^2.
      battery_j: () or (M,) J, the energy of a device for the whole run; see `fcjax.round_energy`.
      download_bits: () bit, size of the model that the base station broadcasts. A device computes once it has received
        it over the whole bandwidth. None: the download takes no time, as in the paper.
      broadcast_w: () W, power of the base station.
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
    cpu_hz: ArrayLike = quantity("positive", 1e9, shape="() or (M,)", low=1.0, high=1e12)
    capacitance: ArrayLike = quantity("not negative", 1e-28, shape="() or (M,)", low=1e-36, high=1e-10)
    battery_j: ArrayLike = quantity("not negative or infinite", float("inf"), shape="() or (M,)")
    download_bits: ArrayLike | None = quantity("not negative", None, low=1e-6, high=1e20)
    broadcast_w: ArrayLike = quantity("positive", 40.0, low=1e-20, high=1e6)


@_frozen
class Observation:
    """Channels and computation times of a round.

    Attributes:
      gain: (M,) power gain, h_i^2.
      compute_s: (M,) s, t_i^cp, at the frequency `cell.cpu_hz` and for all samples of a round.
      available: () or (M,) bool; a device that is not available cannot be scheduled.
    """

    gain: ArrayLike
    compute_s: ArrayLike
    available: ArrayLike = True


def _flatten_observation(observation: Observation) -> tuple[tuple, None]:
    # True is not a leaf: `jax.grad` with respect to an observation would reject a boolean.
    available = None if observation.available is True else observation.available
    names = map(jax.tree_util.GetAttrKey, ("gain", "compute_s", "available"))
    return tuple(zip(names, (observation.gain, observation.compute_s, available), strict=True)), None


def _unflatten_observation(_: None, leaves: Any) -> Observation:
    gain, compute_s, available = leaves
    return Observation(gain, compute_s, True if available is None else available)


jax.tree_util.register_pytree_with_keys(Observation, _flatten_observation, _unflatten_observation)


@pytree
class Decision:
    """A decision: the devices of a round, their shares of the uplink, the round time, and optional settings of devices.

    An optional setting that is None keeps the value of the cell or the training. Each holds for the whole round, (), or
    per device, (M,). Policies that decide other settings have different programs.

    Attributes:
      scheduled: (M,) bool, Pi.
      share: (M,) gamma_i, a fraction without a unit: of the bandwidth, or of the round under TDMA. It is 0 for devices
        that are not scheduled. The others sum to 1 under FDMA, and to at most 1 otherwise.
      round_s: () s, t*: 0 if no device is scheduled, inf if a scheduled device never finishes.
      power_w: () or (M,) W, at most `cell.power_w`.
      cpu_hz: () or (M,) Hz, at most `cell.cpu_hz`; it scales the computation time by cell.cpu_hz/cpu_hz.
      local_steps: () or (M,) from 1 to `training.local_steps`.
      batch_size: () or (M,) from 1 to `training.batch_size`.
    """

    scheduled: Array
    share: Array
    round_s: Array
    power_w: Array | None = None
    cpu_hz: Array | None = None
    local_steps: Array | None = None
    batch_size: Array | None = None


@pytree
class Training:
    """Settings of local training; the defaults are the paper's for MNIST, with the momentum that its figures imply.

    Attributes:
      learning_rate: () eta.
      momentum: () momentum of local SGD, reset each round.
      budget_s: () s, T: a round that would end later does not take place.
      num_samples: () or (M,) D_i: only their ratios matter.
      local_steps: tau, mini-batches of a device in a round.
      batch_size: d, samples of a mini-batch.
      proximal: () mu: devices add mu/2 |w - w_{k-1}|^2 to their loss (FedProx); None leaves it out.
    """

    learning_rate: ArrayLike = 0.01
    momentum: ArrayLike = 0.9
    budget_s: ArrayLike = 60.0
    num_samples: ArrayLike = 1.0
    local_steps: int = static(5)
    batch_size: int = static(128)
    proximal: ArrayLike | None = None


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
class Reports:
    """What devices last reported to the base station; a report is lost with its upload.

    Attributes:
      loss: (M,) loss of the model before local training, 0 if never reported.
      update_norm: (M,) Euclidean norm of the update, 0 if never reported. A policy with `asks_norms` finds the norms of
        this round here.
      last_round: (M,) index of the round, -1 if never reported.
      times_scheduled: (M,) number of rounds.
      energy_j: (M,) J, spent so far.
    """

    loss: ArrayLike
    update_norm: ArrayLike
    last_round: ArrayLike
    times_scheduled: ArrayLike
    energy_j: ArrayLike


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
      reports: what devices last reported; a run always provides them.
    """

    observation: Observation
    estimates: Estimates
    cell: Cell
    training: Training
    elapsed_s: ArrayLike
    round_index: ArrayLike
    reports: Reports | None = None


def _one_program_per(*names: str) -> Callable[[type[T]], type[T]]:
    """Makes a NamedTuple equal to another one whose fields `names` are the same.

    The other fields make states and parameters, which are data. Equal ones therefore share compiled programs.
    """

    def decorate(cls: type[T]) -> type[T]:
        def identity(self: Any) -> tuple:
            return type(self), *(getattr(self, name) for name in names)

        made: Any = cls
        made.__eq__ = lambda self, other: type(self) is type(other) and identity(self) == identity(other)
        made.__ne__ = lambda self, other: not made.__eq__(self, other)  # a tuple has its own
        made.__hash__ = lambda self: hash(identity(self))
        return cls

    return decorate


def _factory(function: Callable) -> str:
    """Returns the name of the function that defines another one, or the other one's own name."""
    return getattr(function, "__qualname__", repr(function)).split(".")[0]


@_one_program_per("select", "asks_norms")
class Policy(NamedTuple):
    """A scheduling policy: two pure functions of arrays, and a state that is passed from round to round.

    Put the parameters of a policy into its state: policies that differ only in their state share one compiled program,
    and `jax.vmap` maps over it.

    A policy with `asks_norms` sees the norms of this round's updates of all available devices. All of them compute
    before the policy decides, which takes the time of the slowest and costs energy.

    Attributes:
      init: makes the first state from a cell.
      select: takes a key, a state and the context of a round; returns the next state and a decision.
      asks_norms: whether the policy needs the norms of this round's updates.
    """

    init: Callable[[Cell], Any]
    select: Callable[[Array, Any, RoundContext], tuple[Any, Decision]]
    asks_norms: bool = False

    @property
    def name(self) -> str:
        """The name of its function."""
        return _factory(self.select).removeprefix("_select_")

    def __repr__(self) -> str:
        return f"Policy({self.name})"


class Limits(NamedTuple):
    """What no round of a world exceeds.

    Attributes:
      gain: () or (M,) the largest gain; inf if there is no limit.
      compute_s: () or (M,) s, the shortest computation time.
      num_rounds: how many rounds the world has; None for any number.
      always_available: whether no device is ever unavailable.
      may_end: whether runs end with the last round; if not, too few rounds for the budget are an error.
    """

    gain: ArrayLike
    compute_s: ArrayLike
    num_rounds: int | None = None
    always_available: bool = False
    may_end: bool = False


@_one_program_per("observe")
class World(NamedTuple):
    """What is true in a round: two pure functions of arrays, and a state that is passed from round to round.

    `observe` must not depend on the policy, so that all policies meet the same rounds. Put the parameters of a world
    into its state: worlds with the same `observe` share one compiled program.

    Attributes:
      init: makes the first state from a key and a cell.
      observe: takes a key, a state, a cell and the training; returns the next state and the observation of a round.
      limits: makes the limits of the world from a cell and the training; None for those of the cell.
    """

    init: Callable[[Array, Cell], Any]
    observe: Callable[[Array, Any, Cell, Training], tuple[Any, Observation]]
    limits: Callable[[Cell, Training], Limits] | None = None

    def __repr__(self) -> str:
        return f"World({_factory(self.init)})"


@_one_program_per("lose")
class Outages(NamedTuple):
    """Which uploads are lost: two pure functions of arrays, and a state that is passed from round to round.

    Attributes:
      init: makes the first state from a cell.
      lose: takes a key, a state, a decision, an observation and a cell; returns the next state and, for each device,
        (M,) bool, whether its upload would be lost if it is scheduled.
    """

    init: Callable[[Cell], Any]
    lose: Callable[[Array, Any, Decision, Observation, Cell], tuple[Any, Array]]

    def __repr__(self) -> str:
        return f"Outages({_factory(self.init)})"


@_one_program_per("apply", "error_feedback")
class Compressor(NamedTuple):
    """Compression of updates.

    Attributes:
      bits: takes the number of parameters P; returns the bits of an upload.
      apply: takes a key, the parameters of the compressor and the update of a device as one vector, (P,); returns what
        the base station decodes from the upload.
      parameters: the compressor's own parameters.
      error_feedback: whether devices add what their earlier uploads left out to their next update.
    """

    bits: Callable[[int], float]
    apply: Callable[[Array, Any, Array], Array]
    parameters: Any = ()
    error_feedback: bool = False

    def __repr__(self) -> str:
        return f"Compressor({_factory(self.bits)})"
