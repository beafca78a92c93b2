"""The values that flow through a round, as frozen dataclasses that are JAX pytrees.

Every field but the static ones is a leaf: `jax.vmap` sweeps it, `jax.jit` traces it, `jax.grad` differentiates by it. M
is the number of devices; a comment gives shape, unit and the paper's symbol. All quantities are in SI units, on a
linear scale.

The constructors check nothing, because a pytree of the same class also carries gradients and `vmap` axes. The functions
that compute with these values check them (see `fcjax.checks`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
from jax import Array
from jax.typing import ArrayLike

T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=False)
def pytree(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass whose fields are the leaves of a JAX pytree."""
    # Without eq: comparing arrays field by field has no single truth value.
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, eq=False)(cls))


def static(default: Any = dataclasses.MISSING) -> Any:
    """A field that decides shapes: not a leaf, and known when the program is compiled."""
    return dataclasses.field(default=default, metadata={"static": True})


@pytree
class Cell:
    """The radio of a cell and the devices in it; the defaults beyond the first four are the paper's setting."""

    bandwidth_hz: ArrayLike  # () Hz, B: shared by the scheduled devices
    noise_psd_w_hz: ArrayLike  # () W/Hz, N0
    power_w: ArrayLike  # (M,) W, P_i
    upload_bits: ArrayLike  # () or (M,) bit, S
    radius_m: ArrayLike = 600.0  # () m, R
    min_distance_m: ArrayLike = 1.0  # () m: closer counts as this far, since the path loss below would amplify
    reference_gain: ArrayLike = 10**-12.81  # () power gain at 1 km, 128.1 dB of loss
    path_loss_exponent: ArrayLike = 3.76  # ()
    scatter: ArrayLike = 0.0  # () in [0, 1], scattered part of the power: 0 no fading, 1 Rayleigh, else Rician
    shadowing_db: ArrayLike = 0.0  # () dB, standard deviation of log-normal shadowing
    sample_floor_s: ArrayLike = 5e-4  # () or (M,) s a sample, a_i: the least computation time
    sample_rate_hz: ArrayLike = 2000.0  # () or (M,) samples/s, mu_i: the rate of the random time on top


@pytree
class Observation:
    """What a round's scheduling is based on."""

    gain: ArrayLike  # (M,) power gain, h_i^2
    compute_s: ArrayLike  # (M,) s, t_i^cp


@pytree
class Decision:
    """Who takes part in a round, with what part of the bandwidth, and how long the round takes."""

    scheduled: Array  # (M,) bool, Pi
    share: Array  # (M,) gamma_i: 0 where not scheduled, else they sum to 1
    round_s: Array  # () s, t*: 0 if nobody is scheduled, inf if a scheduled device never finishes


@pytree
class Training:
    """How the devices train; the defaults are the paper's on MNIST, with the momentum that its figures imply."""

    learning_rate: ArrayLike = 0.01  # () eta
    momentum: ArrayLike = 0.9  # () reset each round
    budget_s: ArrayLike = 60.0  # () s, T: a round that would end later does not happen
    num_samples: ArrayLike = 1.0  # () or (M,) D_i: only their ratios count
    local_steps: int = static(5)  # tau
    batch_size: int = static(128)  # d


@pytree
class Estimates:
    """What the base station knows of the loss, (M,) each: of a device that is not scheduled, the last it heard."""

    rho: ArrayLike  # (M,) Lipschitz constants, rho_i
    beta: ArrayLike  # (M,) smoothness, beta_i
    delta: ArrayLike  # (M,) gradient divergence, delta_i


@pytree
class RoundContext:
    """What a policy may know when it decides on a round."""

    observation: Observation  # as the base station sees it, with its errors
    estimates: Estimates
    cell: Cell
    training: Training
    elapsed_s: ArrayLike  # () s, since training began
    round_index: ArrayLike  # () 0 in the first round


class Policy(NamedTuple):
    """A scheduling policy: two pure functions of arrays, and a state of its own that they hand from round to round.

    What a policy can be tuned by belongs into the state, where it is data: policies that differ in it share one
    compiled program, and `jax.vmap` sweeps it.
    """

    init: Callable[[Cell], Any]  # cell -> state
    select: Callable[[Array, Any, RoundContext], tuple[Any, Decision]]  # key, state, context -> state, decision
