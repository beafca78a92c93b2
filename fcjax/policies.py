"""Scheduling policies: who takes part in a round, and with what part of the bandwidth.

Each factory returns a `Policy`. Its parameters (phi, n, a threshold) are the policy's state, hence data: all policies
from one factory share one compiled program. All schedule at least one device, and all but client selection split the
bandwidth optimally (Alg. 1). `by_name` reads the names that command lines use.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import bounds, checks, keys
from fcjax.bandwidth import allocate, allocate_uploads, round_time
from fcjax.foreign import load_module, of_user
from fcjax.radio import Upload, required_share, uploads
from fcjax.sets import cheapest_set, fastest_addition, fastest_set, smallest_mask, time_with_share
from fcjax.types import Cell, Decision, Policy, RoundContext


def fast_converge(phi: ArrayLike = 0.05) -> Policy:
    """FC, Alg. 2: adds the device that lengthens the round least, until the convergence bound would grow.

    W. Shi, S. Zhou, Z. Niu, M. Jiang, L. Geng, "Joint Device Scheduling and Resource Allocation for Latency Constrained
    Wireless Federated Learning", IEEE Transactions on Wireless Communications, 2021. The decisions are those of the
    algorithm as printed, at one search a device instead of one for each device that might be added.
    """
    return _with_parameter("phi", phi, _select_fast_converge)


def _select_fast_converge(key: Array, phi: Array, context: RoundContext) -> tuple[Array, Decision]:
    upload = _uploads(context)
    return phi, _greedy(upload, upload.unit_s.size, lambda n, round_s: objective(n, round_s, phi, context))


def exact(phi: ArrayLike = 0.05) -> Policy:
    """P4 solved exactly: its objective depends on the set only through its size and round time.

    So the best set is, over all sizes, the fastest set of that size with the least objective. The paper calls the
    problem combinatorial and solves it greedily.
    """
    return _with_parameter("phi", phi, _select_exact)


def _select_exact(key: Array, phi: Array, context: RoundContext) -> tuple[Array, Decision]:
    upload = _uploads(context)
    scheduled = cheapest_set(lambda n, round_s: objective(n, round_s, phi, context), lax.stop_gradient(upload))
    return phi, allocate_uploads(scheduled, upload)


def fixed(n: ArrayLike) -> Policy:
    """Always n devices, in FC's greedy order: Alg. 2 without its stopping rule, the baselines of the paper's Fig. 4."""
    return _with_number(n, _select_fixed)


def _select_fixed(key: Array, n: Array, context: RoundContext) -> tuple[Array, Decision]:
    return n, _greedy(_uploads(context), n, lambda n, round_s: jnp.zeros_like(round_s))


def random(n: ArrayLike = 3) -> Policy:
    """RD: n devices uniformly at random; 3 is the paper's number."""
    return _with_number(n, _select_random)


def _select_random(key: Array, n: Array, context: RoundContext) -> tuple[Array, Decision]:
    draw = jax.vmap(jax.random.uniform)(keys.per_device(key, checks.num_devices(context.cell)))
    return n, allocate(smallest_mask(draw, n), context.observation, context.cell)


def proportional_fair(n: ArrayLike = 3) -> Policy:
    """PF: the n devices with the best channels; 3 is the paper's number.

    H. H. Yang, Z. Liu, T. Q. S. Quek, H. V. Poor, "Scheduling Policies for Federated Learning in Wireless Networks",
    IEEE Transactions on Communications, 2020.
    """
    return _with_number(n, _select_proportional_fair)


def _select_proportional_fair(key: Array, n: Array, context: RoundContext) -> tuple[Array, Decision]:
    observation, cell = checks.uplink(context.observation, context.cell)
    return n, allocate(smallest_mask(-jnp.asarray(observation.gain), n), observation, cell)


def client_selection(threshold_s: ArrayLike) -> Policy:
    """CS: the most devices, the fastest first, that are done by a threshold with equal shares of the bandwidth.

    T. Nishio, R. Yonetani, "Client Selection for Federated Learning with Heterogeneous Resources in Mobile Edge", IEEE
    International Conference on Communications, 2019; equal shares are Shi et al.'s reading of it.
    """
    return _with_parameter("threshold_s", threshold_s, _select_client_selection)


def _select_client_selection(key: Array, threshold_s: Array, context: RoundContext) -> tuple[Array, Decision]:
    upload = _uploads(context)
    num_devices = upload.unit_s.size

    def done(n):
        """How many devices are in time with the share 1/n: it falls with n, so that bisection finds the largest n."""
        return jnp.sum(time_with_share(1 / n.astype(upload.unit_s.dtype), upload) <= threshold_s)

    def bisect(_, bracket):
        low, high = bracket  # n = low is possible (or 1), n = high is not
        middle = (low + high) // 2
        possible = done(middle) >= middle
        return jnp.where(possible, middle, low), jnp.where(possible, high, middle)

    bracket = jnp.array(1), jnp.array(num_devices + 1)
    n, _ = lax.fori_loop(0, num_devices.bit_length(), bisect, bracket)
    scheduled = smallest_mask(time_with_share(1 / n.astype(upload.unit_s.dtype), upload), n)
    share = jnp.where(scheduled, 1 / n.astype(upload.unit_s.dtype), 0)
    return threshold_s, Decision(scheduled, share, round_time(scheduled, share, context.observation, context.cell))


def asymptotic(threshold_s: ArrayLike) -> Policy:
    """AS: the most devices that are done by a threshold under the optimal split of the bandwidth.

    M. Chen, Z. Yang, W. Saad, C. Yin, H. V. Poor, S. Cui, "A Joint Learning and Communications Framework for Federated
    Learning over Wireless Networks", IEEE Transactions on Wireless Communications, 2021, as Shi et al. read it: the
    convergence after infinitely many rounds is best with as many devices as possible.
    """
    return _with_parameter("threshold_s", threshold_s, _select_asymptotic)


def _select_asymptotic(key: Array, threshold_s: Array, context: RoundContext) -> tuple[Array, Decision]:
    upload = _uploads(context)
    # A set is done by the threshold iff the shares it needs for that sum to 1 at most.
    share = jnp.sort(required_share(threshold_s, context.observation, context.cell))
    n = jnp.maximum(jnp.sum(jnp.cumsum(share) <= 1), 1)
    return threshold_s, allocate_uploads(fastest_set(n, upload)[0], upload)


def everybody() -> Policy:
    """All devices in every round, with equal shares: plain federated averaging."""
    return Policy(lambda cell: (), _select_everybody)


def centralized() -> Policy:
    """All data on one trainer, the upper bound of the paper's Fig. 4: for `presets.centralised` of an experiment."""

    def init(cell: Cell) -> tuple:
        if checks.num_devices(cell) != 1:
            raise ValueError(
                f"centralized is for one trainer, not for {checks.num_devices(cell)} devices: simulate "
                "fcjax.presets.centralised(experiment), or use fcjax.sweep, which does"
            )
        return ()

    return Policy(init, _select_the_trainer)


def is_centralized(policy: Policy) -> bool:
    return policy.select is _select_the_trainer


def _select_the_trainer(key: Array, state: tuple, context: RoundContext) -> tuple[tuple, Decision]:
    return _select_everybody(key, state, context)


def _select_everybody(key: Array, state: tuple, context: RoundContext) -> tuple[tuple, Decision]:
    scheduled = jnp.ones(checks.num_devices(context.cell), bool)
    share = jnp.full(scheduled.shape, 1 / scheduled.size)
    return state, Decision(scheduled, share, round_time(scheduled, share, context.observation, context.cell))


def _greedy(upload: Upload, most: ArrayLike, cost: Callable[[Array, Array], Array]) -> Decision:
    """Alg. 2: the fastest device, then the fastest addition as long as cost(n, round_s) does not grow, up to `most`."""
    alone_s = time_with_share(1, upload)
    first = jnp.argmin(alone_s)
    one = jnp.array(1)

    def add(state):
        scheduled, n, least, _ = state
        device, round_s = fastest_addition(scheduled, upload)
        new = cost(n + 1, round_s)
        worse = ~(new <= least)  # also where the estimates of a model that diverged are no numbers
        added = scheduled | (jnp.arange(scheduled.size) == device)
        return jnp.where(worse, scheduled, added), jnp.where(worse, n, n + 1), jnp.where(worse, least, new), worse

    start = jnp.arange(alone_s.size) == first, one, cost(one, alone_s[first]), jnp.array(False)
    scheduled, *_ = lax.while_loop(lambda state: ~state[3] & (state[1] < most), add, start)
    return allocate_uploads(scheduled, upload)


def objective(n: ArrayLike, round_s: ArrayLike, phi: ArrayLike, context: RoundContext) -> Array:
    """What `fast_converge` and `exact` make small: P4 for n devices and a round time, as the context has it."""
    training, estimates = context.training, context.estimates
    return bounds.scheduling_objective(
        n,
        round_s,
        budget_s=training.budget_s,
        rho=estimates.rho,
        beta=estimates.beta,
        delta=estimates.delta,
        num_samples=training.num_samples,
        learning_rate=training.learning_rate,
        local_steps=training.local_steps,
        phi=phi,
    )


def _uploads(context: RoundContext) -> Upload:
    return uploads(*checks.uplink(context.observation, context.cell))


def _with_parameter(name: str, value: ArrayLike, select: Callable) -> Policy:
    # as it is computed with: what is positive in float64 may be 0 in float32
    checks.positive(name, value, ())
    checks.positive(name, jnp.asarray(value, float), ())
    return Policy(lambda cell: jnp.asarray(value, float), select)


def _with_number(n: ArrayLike, select: Callable) -> Policy:
    def init(cell: Cell) -> Array:
        num_devices = checks.num_devices(cell)
        allowed = f"a whole number from 1 to {num_devices}, the number of devices"
        is_allowed = lambda x: (x >= 1) & (x <= num_devices) & (x == x.round())  # noqa: E731
        return jnp.asarray(checks.within("n", n, is_allowed, allowed, ())).astype(jnp.int32)

    return Policy(init, select)


_NAMED: dict[str, Callable[..., Policy]] = {
    "fc": fast_converge,
    "exact": exact,
    "rd": random,
    "pf": proportional_fair,
    "cs-l": functools.partial(client_selection, 0.4),
    "cs-h": functools.partial(client_selection, 1.5),
    "as-l": functools.partial(asymptotic, 0.4),
    "as-h": functools.partial(asymptotic, 1.5),
    "centralized": centralized,
}


def factory_by_name(name: str) -> Callable[..., Policy]:
    """What makes the policy of a name: "fc", "fixed-5", ..., or "my_file:my_policy", a factory or a policy."""
    if not isinstance(name, str):
        raise ValueError(f"the name of a policy must be a string, got {name!r}")
    if name in _NAMED:
        return _NAMED[name]
    if match := re.fullmatch(r"fixed-(0|[1-9]\d*)", name):
        return functools.partial(fixed, int(match[1]))
    if ":" in name:
        return _users_factory(name)
    raise ValueError(
        f"unknown policy {name!r}: use {', '.join(_NAMED)}, fixed-N (such as fixed-5), or my_file:my_policy"
    )


def takes_phi(factory: Callable[..., Policy]) -> bool:
    return "phi" in _parameters(factory)


def _parameters(factory: Callable[..., Policy]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except ValueError:  # some built-in functions have none to look at
        return {}


def is_built_in(policy: Policy) -> bool:
    return all(getattr(function, "__module__", None) == __name__ for function in policy)


def by_name(name: str, *, phi: ArrayLike = 0.05) -> Policy:
    """The policy of a name; a policy that has a parameter phi gets it."""
    factory = factory_by_name(name)
    make = functools.partial(factory, phi=phi) if takes_phi(factory) else factory
    policy = make() if ":" not in name else of_user(f"policy {name!r}", make)
    if not isinstance(policy, Policy):
        raise ValueError(f"policy {name!r} must give a fcjax.Policy(init, select), got {type(policy).__name__}")
    return policy


def _users_factory(name: str) -> Callable[..., Policy]:
    module_name, _, attribute = name.rpartition(":")
    module = of_user(f"policy {name!r}: {module_name!r}", lambda: load_module(module_name))
    found = getattr(module, attribute, None)
    if isinstance(found, Policy):
        return lambda: found
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(
            f"policy {name!r}: {module_name!r} has no policy or factory {attribute!r}; it has {', '.join(names) or '-'}"
        )
    required = [
        parameter.name
        for parameter in _parameters(found).values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name != "phi"
    ]
    if required:
        raise ValueError(f"policy {name!r}: the factory needs a default for {', '.join(required)}")
    return found
