"""Worlds: the true channel gains, computation times and availability of every round.

Each factory returns a `World`. Its parameters are part of the world's state, so all worlds from one factory share one
compiled program. Every draw depends only on the key of the run or of the round, and on the device, so all policies meet
the same rounds. `by_name` looks worlds up by name.

Computation times are independent in all rounds, by eq. (4) of the paper, except in a trace. The time between two rounds
is a parameter of a world, not the time that the first one takes, which depends on the policy.
"""

from __future__ import annotations  # short types in help()

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks, keys
from fcjax.runtime.registry import Registry
from fcjax.types import Cell, Limits, Observation, Training, World
from fcjax.wireless import latency, radio, traces


def redrawn() -> World:
    """Devices get a new uniform position in the cell, and new fading, in every round, as in the paper.

    W. Shi, S. Zhou, Z. Niu, M. Jiang, L. Geng, "Joint Device Scheduling and Resource Allocation for Latency Constrained
    Wireless Federated Learning", IEEE Transactions on Wireless Communications, 2021.
    """
    return World(lambda key, cell: (), _observe_redrawn, limits_of_cell)


def _observe_redrawn(key: Array, state: tuple, cell: Cell, training: Training) -> tuple[tuple, Observation]:
    place_key, fade_key, compute_key = _round_keys(key)
    gain = radio.path_gain(radio.place(place_key, cell), cell) * radio.fade(fade_key, cell)
    return state, Observation(gain, _compute_time(compute_key, cell, training))


def static(fading_memory: ArrayLike = 0.0) -> World:
    """Devices keep their uniform positions and their shadowing for the whole run; small-scale fading varies.

    The scattered wave is a first-order autoregressive process, so that fading in a round is distributed as
    `radio.fade`. C. C. Tan, N. C. Beaulieu, "On First-Order Markov Modeling for the Rayleigh Fading Channel", IEEE
    Transactions on Communications 48(12), 2000.

    Args:
      fading_memory: () in [0, 1], the correlation of the scattered wave in successive rounds. 0 is independent fading,
        1 is constant fading. A maximal Doppler shift of f Hz and rounds t s apart have the correlation J0(2 pi f t).
    """
    checks.fraction("fading_memory", fading_memory, ())

    def init(key: Array, cell: Cell) -> _Static:
        distance_m, normals, _ = _start(key, cell)
        return _Static(distance_m, normals[2], normals[:2], jnp.asarray(fading_memory, float))

    return World(init, _observe_static, limits_of_cell)


class _Static(NamedTuple):
    distance_m: Array  # (M,) m
    shadow: Array  # (M,) standard normal
    scattered: Array  # (2, M) in-phase and quadrature part of the scattered wave, standard normal
    fading_memory: Array  # ()


def _observe_static(key: Array, state: _Static, cell: Cell, training: Training) -> tuple[_Static, Observation]:
    _, fade_key, compute_key = _round_keys(key)
    scattered = _remember(state.fading_memory, state.scattered, _normals(fade_key, 3, cell)[:2])
    gain = _gain(state.distance_m, scattered, state.shadow, cell)
    return state._replace(scattered=scattered), Observation(gain, _compute_time(compute_key, cell, training))


def mobile(
    speed_m_s: ArrayLike,
    memory: ArrayLike = 0.9,
    interval_s: ArrayLike = 1.0,
    fading_memory: ArrayLike = 0.0,
    decorrelation_m: ArrayLike = 50.0,
) -> World:
    """Devices move in the cell by the Gauss-Markov model, and are reflected at its edge.

    The velocity is v' = memory v + sqrt(1 - memory^2) w, where w is Gaussian and isotropic with zero mean. It starts in
    its stationary distribution, and positions start and remain uniform in the disc. B. Liang, Z. J. Haas, "Predictive
    Distance-Based Mobility Management for PCS Networks", IEEE INFOCOM, 1999.

    Shadowing has the correlation exp(-d/decorrelation_m) between successive positions at distance d. M. Gudmundson,
    "Correlation Model for Shadow Fading in Mobile Radio Systems", Electronics Letters 27(23), 1991.

    A round advances time by `interval_s`, however long it takes. All policies therefore meet the same channels. Choose
    a typical round time.

    Args:
      speed_m_s: () m/s, the root-mean-square speed.
      memory: () in [0, 1], the correlation of the velocity in successive rounds. 0 is a random walk, 1 a straight path.
      interval_s: () s, the time between rounds.
      fading_memory: () in [0, 1], as in `static`.
      decorrelation_m: () m, the distance at which the correlation of shadowing is 1/e.
    """
    # These limits keep the square of the distance between rounds within the range of float32; no device outruns light.
    checks.not_negative("speed_m_s", speed_m_s, (), high=3e8)
    checks.fraction("memory", memory, ())
    checks.positive("interval_s", interval_s, (), high=1e9)
    checks.fraction("fading_memory", fading_memory, ())
    checks.positive("decorrelation_m", decorrelation_m, ())

    def init(key: Array, cell: Cell) -> _Mobile:
        distance_m, normals, motion_key = _start(key, cell)
        direction, velocity = _isotropic(motion_key, 2, cell)
        parameters = (speed_m_s, memory, interval_s, fading_memory, decorrelation_m)
        return _Mobile(
            distance_m * direction / jnp.abs(direction),
            velocity,
            normals[2],
            normals[:2],
            *(jnp.asarray(parameter, float) for parameter in parameters),
        )

    return World(init, _observe_mobile, limits_of_cell)


class _Mobile(NamedTuple):
    position_m: Array  # (M,) m, x + iy
    velocity: Array  # (M,) x + iy in units of speed_m_s
    shadow: Array  # (M,) standard normal
    scattered: Array  # (2, M) standard normal
    speed_m_s: Array  # () m/s
    memory: Array  # ()
    interval_s: Array  # () s
    fading_memory: Array  # ()
    decorrelation_m: Array  # () m


def _observe_mobile(key: Array, state: _Mobile, cell: Cell, training: Training) -> tuple[_Mobile, Observation]:
    motion_key, fade_key, compute_key = _round_keys(key)
    velocity = _remember(state.memory, state.velocity, _isotropic(motion_key, 1, cell)[0])
    pace = jnp.abs(velocity)
    position_m, heading = _travel(
        state.position_m,
        velocity / jnp.maximum(pace, jnp.finfo(pace.dtype).tiny),
        pace * state.speed_m_s * state.interval_s,
        checks.of_cell("radius_m", cell),
    )
    normals = _normals(fade_key, 3, cell)
    correlation = jnp.exp(-jnp.abs(position_m - state.position_m) / state.decorrelation_m)
    state = state._replace(
        position_m=position_m,
        velocity=pace * heading,
        shadow=_remember(correlation, state.shadow, normals[2]),
        scattered=_remember(state.fading_memory, state.scattered, normals[:2]),
    )
    gain = _gain(jnp.abs(position_m), state.scattered, state.shadow, cell)
    return state, Observation(gain, _compute_time(compute_key, cell, training))


def _travel(position_m: Array, heading: Array, length_m: Array, radius_m: ArrayLike) -> tuple[Array, Array]:
    """Follows straight paths in a disc, reflected at its edge, and returns the new positions and headings.

    Like light between mirrors, reflected paths keep uniform positions with isotropic headings uniform and isotropic.
    All chords of a path have the same length, and all reflections turn it by the same angle, so any number of them
    takes no loop.
    """
    along_m = (position_m * heading.conj()).real
    to_edge_m = _root(along_m**2 + radius_m**2 - jnp.abs(position_m) ** 2) - along_m
    edge_m = position_m + to_edge_m * heading
    normal = edge_m / jnp.abs(edge_m)
    incidence = heading * normal.conj()
    cosine = jnp.maximum(incidence.real, 1e-6)  # positive, so that a path along the edge has chords
    turn = 2 * jnp.arctan2(cosine, jnp.abs(incidence.imag)) * jnp.where(incidence.imag < 0, -1, 1)
    chord_m = 2 * cosine * radius_m
    beyond_m = length_m - to_edge_m
    num_chords = jnp.floor(jnp.maximum(beyond_m, 0) / chord_m)
    rotation = jnp.exp(1j * num_chords * turn)
    reflected = (heading - 2 * cosine * normal) * rotation
    end_m = radius_m * normal * rotation + (beyond_m - num_chords * chord_m) * reflected
    stays = beyond_m <= 0
    return jnp.where(stays, position_m + length_m * heading, end_m), jnp.where(stays, heading, reflected)


AtEnd = Literal["repeat", "stop", "error"]


def trace(
    gain: ArrayLike, compute_s: ArrayLike, available: ArrayLike | None = None, *, at_end: AtEnd = "repeat"
) -> World:
    """Replays rounds of the user's own: row k of each array is round k.

    Args:
      gain: (K, M) power gain.
      compute_s: (K, M) s, the computation time at `cell.cpu_hz` and for all samples of a round.
      available: (K, M) bool. None: all devices are available in all rounds. A round may have no available device.
      at_end: what happens after the last round. "repeat" starts again with the first one, "stop" ends the run, and
        "error" rejects a trace that may be too short for the budget before the run starts.
    """
    return _replay(traces.checked(gain, compute_s, available), at_end, "the trace")


def _replay(arrays: dict[str, Any], at_end: AtEnd, what: str, measured_with: dict[str, float] | None = None) -> World:
    """Returns the world of a trace with arrays `compute_s`, `gain` or `upload_s`, and perhaps `available`."""
    if at_end not in get_args(AtEnd):
        raise ValueError(f"at_end must be one of {', '.join(get_args(AtEnd))}, got {at_end!r}")
    num_rounds, num_devices = arrays["compute_s"].shape

    def gain_in(cell: Cell) -> Array:
        if checks.num_devices(cell) != num_devices:
            raise ValueError(
                f"the number of devices is {num_devices} in {what} and {checks.num_devices(cell)} in the cell: "
                "use the same number"
            )
        if "upload_s" in arrays:
            measured: dict[str, Any] = dict(measured_with or {})
            if "power_w" in measured:
                measured["power_w"] = np.full(num_devices, measured["power_w"], np.float32)
            measured_cell = dataclasses.replace(cell, **measured)
            return _gain_from_upload(jnp.asarray(arrays["upload_s"], float), measured_cell, what)
        return jnp.asarray(arrays["gain"], float)

    def init(key: Array, cell: Cell) -> _Trace:
        available = jnp.asarray(arrays["available"]) if "available" in arrays else None
        return _Trace(gain_in(cell), jnp.asarray(arrays["compute_s"], float), available, jnp.array(0, jnp.int32))

    def limits(cell: Cell, training: Training) -> Limits:
        shortest_s = jnp.min(jnp.asarray(arrays["compute_s"], float), axis=0)
        gain = gain_in(cell)
        always = "available" not in arrays and bool(np.all(np.asarray(gain) > 0))
        last = None if at_end == "repeat" else num_rounds
        return Limits(jnp.max(gain, axis=0), shortest_s, last, always, may_end=at_end == "stop")

    return World(init, _observe_trace, limits)


def _gain_from_upload(upload_s: Array, cell: Cell, what: str) -> Array:
    """Returns the gain, (K, M), at which Shannon's rate over the whole bandwidth takes the time `upload_s`."""
    names = ("bandwidth_hz", "noise_psd_w_hz", "power_w", "upload_bits")
    bandwidth_hz, noise_psd_w_hz, power_w, upload_bits = (checks.of_cell(name, cell) for name in names)
    checks.positive("cell.power_w", power_w, low=0)
    checks.positive("cell.upload_bits", upload_bits, low=0)
    bits = jnp.broadcast_to(jnp.asarray(upload_bits), upload_s.shape[1:])
    efficiency = bits[None, :] / bandwidth_hz / upload_s
    # Beyond this limit, `radio` clips the signal-to-noise ratio.
    allowed = "at most 60 bit/s/Hz, given cell.upload_bits and cell.bandwidth_hz"
    checks.within(f"{what}: the spectral efficiency of upload_s", efficiency, lambda x: x <= 60, allowed)
    return jnp.expm1(efficiency * math.log(2)) * (bandwidth_hz * noise_psd_w_hz / jnp.asarray(power_w))[None, :]


class _Trace(NamedTuple):
    gain: Array  # (K, M)
    compute_s: Array  # (K, M) s
    available: Array | None  # (K, M) bool
    row: Array  # () of the next round


def _observe_trace(key: Array, state: _Trace, cell: Cell, training: Training) -> tuple[_Trace, Observation]:
    available = True if state.available is None else state.available[state.row]
    observation = Observation(state.gain[state.row], state.compute_s[state.row], available)
    return state._replace(row=(state.row + 1) % state.gain.shape[0]), observation


def from_file(path: str | os.PathLike, *, at_end: AtEnd = "repeat", **measured_with: float) -> World:
    """Replays a trace from a netCDF or CSV file; see `trace`.

    A netCDF file has the variables `gain`, `compute_s` and optionally `available`, with the dimensions round and
    device. Other dimensions must have length 1, such as `run` in the results of one run. Rounds at the end that are all
    NaN are left out, as in the results of a run that ended before others.

    A CSV file holds measurements, such as

        round,device,compute_s,upload_s
        0,0,0.71,0.120
        0,1,0.55,0.095

    - round: any number. The rounds of the trace are the numbers that occur, in increasing order.
    - device: 0 to M - 1. A device without a row in a round is not available in that round.
    - compute_s: s, as in `trace`.
    - upload_s: s, the measured time in which the device uploads `cell.upload_bits` over the whole bandwidth. The gain
      is the one at which Shannon's rate takes this time: (2^(S/(B upload_s)) - 1) B N0/P.
    - gain: power gain, in place of upload_s.
    - available: optional, true or false.

    Args:
      path: of the file, which ends in .nc or .csv.
      at_end: as in `trace`.
      measured_with: the `upload_bits`, `bandwidth_hz`, `noise_psd_w_hz` or `power_w` of the measurement of upload_s; by
        default the cell's. Give those that you sweep, and `upload_bits` if you sweep a compressor: otherwise the gain
        would change with them.
    """
    radio_fields = ("upload_bits", "bandwidth_hz", "noise_psd_w_hz", "power_w")
    if unknown := set(measured_with) - set(radio_fields):
        raise ValueError(f"from_file has no setting {min(unknown)!r}: use {', '.join(radio_fields)}")
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path must be the path of a file, got {path!r}")
    return _replay(traces.read(Path(path)), at_end, str(path), measured_with)


def intermittent(probability: ArrayLike, memory: ArrayLike = 0.0, world: World | str = "redrawn") -> World:
    """Devices of another world come and go independently: an on-off Markov chain per device.

    A device is available if its chain is on and it is available in the other world. The chain starts in its stationary
    distribution, in which it is on with probability p. It stays on with probability p + memory (1 - p) and turns on
    with probability p (1 - memory). E. N. Gilbert, "Capacity of a Burst-Noise Channel", Bell System Technical Journal
    39(5), 1960.

    Args:
      probability: () in [0, 1], p.
      memory: () in [0, 1], the correlation of successive rounds. With 0, rounds are independent.
      world: the other world, or its name.
    """
    checks.fraction("probability", probability, ())
    checks.fraction("memory", memory, ())
    inner = by_name(world) if isinstance(world, str) else world
    if not isinstance(inner, World):
        raise ValueError(f"world must be a fcjax.World or the name of one, got {world!r}")

    def init(key: Array, cell: Cell) -> _Intermittent:
        state = inner.init(key, cell)
        p = jnp.asarray(probability, float)
        return _Intermittent(state, _uniforms(_chain_key(key, state), cell) < p, p, jnp.asarray(memory, float))

    def limits(cell: Cell, training: Training) -> Limits:
        return (inner.limits or limits_of_cell)(cell, training)._replace(always_available=False)

    return World(init, _ObserveIntermittent(inner.observe), limits)


class _Intermittent(NamedTuple):
    inner: Any  # state of the other world
    is_on: Array  # (M,) bool
    probability: Array  # ()
    memory: Array  # ()


@dataclasses.dataclass(frozen=True)
class _ObserveIntermittent:
    """Observes another world through the chains. Equal if the other `observe` is, also after it is sent to a worker."""

    inner: Callable[[Array, Any, Cell, Training], tuple[Any, Observation]]

    def __call__(
        self, key: Array, state: _Intermittent, cell: Cell, training: Training
    ) -> tuple[_Intermittent, Observation]:
        inner_state, observation = observe(self.inner, key, state.inner, cell, training)
        p, changes = state.probability, 1 - state.memory
        # In this form, rounding never makes a probability of 0 or 1 another one.
        turns_or_stays_on = jnp.where(state.is_on, 1 - changes * (1 - p), changes * p)
        is_on = _uniforms(_chain_key(key, inner_state), cell) < turns_or_stays_on
        available = is_on & jnp.asarray(observation.available)
        return state._replace(inner=inner_state, is_on=is_on), dataclasses.replace(observation, available=available)


def observe(function: Callable, key: Array, state: Any, cell: Cell, training: Training) -> tuple[Any, Observation]:
    """Calls the `observe` of a world with the key of a round.

    fcjax's own worlds leave the keys that the simulator splits off. A user's world gets a key of its own.
    """
    own_key = key if is_built_in(function) else jax.random.fold_in(key, keys.Purpose.WORLD)
    return function(own_key, state, cell, training)


def is_built_in(function: Callable) -> bool:
    """Returns whether the `observe` of a world is fcjax's own."""
    if isinstance(function, _ObserveIntermittent):
        return is_built_in(function.inner)
    return str(getattr(function, "__module__", "")).startswith("fcjax.")


def _chain_key(key: Array, inner: Any) -> Array:
    """Returns a key that neither the other world nor the simulator uses; their splits equal small numbers folded in."""
    depth = 0
    while isinstance(inner, _Intermittent):
        depth, inner = depth + 1, inner.inner
    return jax.random.fold_in(key, keys.Purpose.AVAILABILITY - depth)


def limits_of_cell(cell: Cell, training: Training) -> Limits:
    """Returns the limits of a cell's channels and computation times; the cell must not be traced."""
    gain = math.inf if radio.fades(cell) else radio.path_gain(jnp.asarray(cell.min_distance_m, float), cell)
    num_samples = training.local_steps * training.batch_size
    return Limits(gain, num_samples * jnp.asarray(cell.sample_floor_s, float), always_available=True)


def _round_keys(key: Array) -> Array:
    """Returns the keys of motion, fading and computation in a round; keys 3 to 5 of 6 belong to the simulator."""
    return jax.random.split(key, 6)[:3]


def _start(key: Array, cell: Cell) -> tuple[Array, Array, Array]:
    """Draws distances, (M,) m, and the normal variables of fading, (3, M), and returns a key for further draws."""
    place_key, fade_key, other_key = jax.random.split(key, 3)
    return radio.place(place_key, cell), _normals(fade_key, 3, cell), other_key


def _compute_time(key: Array, cell: Cell, training: Training) -> Array:
    return latency.compute_time(key, training.local_steps * training.batch_size, cell)


def _gain(distance_m: Array, scattered: Array, shadow: Array, cell: Cell) -> Array:
    """Returns the gain, (M,), with fading and shadowing."""
    return radio.path_gain(distance_m, cell) * radio.faded(jnp.stack([*scattered, shadow]), cell)


def _remember(memory: Array, old: Array, new: Array) -> Array:
    """Takes a step of a first-order autoregressive process; keeps the distribution if both terms have it."""
    return memory * old + _root(1 - memory**2) * new


def _root(x: ArrayLike) -> Array:
    """Returns the square root; its gradient is 0 at 0, where that of the square root is infinite."""
    x = jnp.asarray(x)
    return jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)


def _normals(key: Array, number: int, cell: Cell) -> Array:
    """Draws standard normal variables, (number, M)."""
    return jax.vmap(lambda k: jax.random.normal(k, (number,)))(keys.per_device(key, checks.num_devices(cell))).T


def _isotropic(key: Array, number: int, cell: Cell) -> Array:
    """Draws complex normal variables of mean square 1, (number, M)."""
    in_phase, quadrature = jnp.split(_normals(key, 2 * number, cell) * math.sqrt(0.5), 2)
    return in_phase + 1j * quadrature


def _uniforms(key: Array, cell: Cell) -> Array:
    return jax.vmap(jax.random.uniform)(keys.per_device(key, checks.num_devices(cell)))


REGISTRY = Registry(
    World,
    {
        "redrawn": redrawn,
        "static": static,
        "mobile": mobile,
        "intermittent": intermittent,
        "from-file": from_file,
    },
)


def by_name(name: str) -> World:
    """Returns a world by name, such as "static" or "mobile(speed_m_s=3)"."""
    return REGISTRY.make(name)
