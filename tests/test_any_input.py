"""Calls public functions with arbitrary input: physical, absurd, not finite, of wrong shape or type, or not numeric.

Each call returns a correct answer or raises a ValueError or OSError of fcjax. Finite input never gives NaN. For a long
search: `pytest -m slow tests/test_any_input.py --hypothesis-profile search`.
"""

import dataclasses
import functools
import itertools
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fcjax
from fcjax import bounds, compressors, data, design, latency, models, outages, policies, presets, radio, worlds

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quick_compilation")]
PACKAGE = Path(fcjax.__file__).parent
CLOUDS = data.synthetic.classification(1200, 100, num_features=4, num_labels=4, spread=0.5)
JUNK = ("many", None, 1j, [1.0, [2.0]], True, b"7", {}, (), np.array("x"), np.datetime64("2020"))
POLICIES = (
    *(name for name in policies.REGISTRY.names() if "..." not in name and "-N" not in name),
    *(
        "fixed-1",
        "fixed-3",
        "oort(n=5)",
        "bc-bn2(n=2, candidates=4)",
        "timely(n=2, m=3)",
        "ocean(v=1)",
        "frugal(deadline_s=9)",
    ),
)
FEWER = settings(max_examples=max(settings().max_examples // 5, 1))  # for functions that compile in every call
TOLERANCE = 1e-4  # relative error of times: single precision, with a margin for sums


@pytest.fixture(autouse=True, scope="module")
def default_rank_promotion():
    with jax.numpy_rank_promotion("allow"):
        yield


def mostly(good, *bad):
    """Makes one value in 30 bad, so that about half of all calls are good."""
    return st.integers(0, 29).flatmap(lambda chance: st.one_of(*bad) if chance == 29 else good)


def number(low, high):
    return mostly(st.floats(low, high), st.floats(), st.integers(), st.sampled_from([0.0, -low, *JUNK]))


def whole(low, high):
    return mostly(st.integers(low, high), st.integers(), st.floats(), st.sampled_from(JUNK))


def array(low, high, size):
    dtypes = st.sampled_from([np.float32, np.float64])
    absurd = hnp.arrays(st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint8]), size)
    good = st.tuples(hnp.arrays(float, size, elements=st.floats(low, high)), dtypes).map(lambda x: x[0].astype(x[1]))
    others = good.map(list), good.map(jnp.asarray), good.map(lambda x: x[:-1]), good.map(lambda x: np.stack([x, x]))
    return mostly(good, absurd, *others, number(low, high))


def cells(size):
    return st.builds(
        fcjax.Cell,
        bandwidth_hz=number(1e4, 1e9),
        noise_psd_w_hz=number(1e-22, 1e-18),
        power_w=array(1e-4, 10, size),
        upload_bits=number(1e3, 1e10) | array(1e3, 1e10, size),
        radius_m=number(10, 1e4),
        min_distance_m=number(0.1, 100),
        reference_gain=number(1e-16, 1e-8),
        path_loss_exponent=number(1, 6),
        scatter=number(1e-3, 1),
        shadowing_db=number(0.1, 12),
        sample_floor_s=number(1e-6, 1e-1),
        sample_rate_hz=number(10, 1e6),
        access=mostly(st.sampled_from(["fdma", "ofdma", "tdma"]), st.text(), st.sampled_from(["FDMA", None, 1])),
        num_blocks=mostly(st.sampled_from([3, 50]), st.sampled_from([0, -1, 2.5, None, "3", 10**9])),
        cpu_hz=number(1e8, 1e10) | array(1e8, 1e10, size),
        capacitance=number(1e-30, 1e-26),
        battery_j=st.just(np.inf) | number(1e-3, 1e3),
        download_bits=st.none() | number(1e3, 1e8),
        broadcast_w=number(1, 100),
    )


def observations(size):
    available = st.just(True) | sets(size).filter(lambda mask: np.any(mask))
    return st.builds(fcjax.Observation, array(1e-16, 1e-6, size), array(1e-3, 1e2, size), available)


def sets(size):
    return mostly(hnp.arrays(bool, size), array(0, 1, size))


trainings = st.builds(fcjax.Training, local_steps=st.integers(1, 9), batch_size=st.integers(1, 200))


def decisions(size):
    """Decisions of policies, which may be bad in any part."""
    return st.builds(
        fcjax.Decision,
        sets(size),
        array(1e-6, 1, size).filter(lambda share: np.shape(share) == (size,)).map(jnp.asarray),
        st.just(1.0),
        power_w=st.none() | number(1e-4, 10) | array(1e-4, 10, size),
        cpu_hz=st.none() | number(1e8, 1e10),
        local_steps=st.none() | whole(1, 9),
        batch_size=st.none() | whole(1, 200),
    )


def contexts(size):
    return st.builds(
        fcjax.RoundContext,
        observations(size),
        st.builds(fcjax.Estimates, array(0.1, 10, size), array(0.1, 100, size), array(0.01, 10, size)),
        cells(size),
        st.builds(
            fcjax.Training,
            learning_rate=number(1e-4, 1),
            momentum=number(0.1, 0.99),
            budget_s=number(1, 1e4),
            num_samples=array(1, 1e5, size),
        ),
        elapsed_s=number(1e-2, 60),
        round_index=st.integers(0, 1000),
        reports=reports(size),
    )


def reports(size):
    """Reports as a run makes them."""
    amounts = hnp.arrays(np.float32, size, elements=st.floats(0, 1e6, width=32))
    counts = hnp.arrays(np.int32, size, elements=st.integers(0, 1000))
    return st.builds(fcjax.Reports, amounts, amounts, counts.map(lambda x: x - 1), counts, amounts)


def bound_arguments(size, **others):
    return st.fixed_dictionaries(
        {
            "beta": number(0.1, 100) | array(0.1, 100, size),
            "delta": array(0.01, 10, size),
            "num_samples": array(1, 1e5, size),
            "learning_rate": number(1e-4, 1),
            "local_steps": number(1, 50),
            **others,
        },
        optional={"constant": st.sampled_from(["valid", "published", "tight", "other"])},
    )


def drifts(size):
    return bound_arguments(size).map(lambda x: {n: x[n] for n in ("delta", "beta", "learning_rate", "local_steps")})


keys = st.integers(0, 2**31 - 1).map(jax.random.key)
bound_constants = {"rho": number(0.1, 10), "phi": number(1e-3, 10)}


CALLS = itertools.count(1)


def attempt(function, *args, **kwargs):
    """Returns the answer, or None after an error of fcjax or if the input was not finite."""
    if next(CALLS) % 20 == 0 and is_crowded():
        jax.clear_caches()
    try:
        answer = jax.block_until_ready(function(*args, **kwargs))
    except (ValueError, OSError) as error:
        where = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if PACKAGE not in where.parents or not str(error):
            raise
        return None
    if not is_finite((args, kwargs)):
        return None
    assert not has_nan(answer), f"NaN from finite input: {answer}"
    return answer


def is_crowded():
    """Whether compiled programs, which take memory maps, use half of the 65,530 that Linux allows a process."""
    maps = Path("/proc/self/maps")
    return not maps.exists() or maps.read_bytes().count(b"\n") > 32_000


def has_nan(tree):
    return any(
        np.isnan(leaf).any() for leaf in jax.tree.leaves(tree) if getattr(leaf, "dtype", np.dtype("O")).kind == "f"
    )


def is_finite(tree):
    """Whether all leaves are numbers that are finite even in single precision."""
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: x is None):
        if isinstance(leaf, str | bool) or (
            isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        ):
            continue
        try:
            if not np.isfinite(np.asarray(leaf, np.float32)).all():
                return False
        except (TypeError, ValueError, OverflowError):
            return False
    return True


ARRAYS = {  # number of devices -> a function of arrays and its arguments
    "required_share": lambda m: (fcjax.required_share, number(1e-3, 1e3), observations(m), cells(m)),
    "fastest_sets": lambda m: (fcjax.fastest_sets, observations(m), cells(m)),
    "round_time": lambda m: (fcjax.round_time, sets(m), array(1e-6, 1, m), observations(m), cells(m)),
    "round_energy": lambda m: (fcjax.round_energy, decisions(m), observations(m), cells(m), trainings),
    "loss_probability": lambda m: (
        outages.loss_probability,
        number(1e-3, 10),
        decisions(m),
        observations(m),
        cells(m),
    ),
    "required_efficiency": lambda m: (radio.required_efficiency, array(1e-9, 1, m)),
    "rate": lambda m: (radio.rate, array(1e-6, 1, m), observations(m), cells(m)),
    "path_gain": lambda m: (radio.path_gain, array(1, 1e4, m), cells(m)),
    "place": lambda m: (radio.place, keys, cells(m)),
    "fade": lambda m: (radio.fade, keys, cells(m)),
    "dbm_to_w": lambda m: (radio.dbm_to_w, array(-200, 200, m)),
    "compute_time": lambda m: (latency.compute_time, keys, number(1, 1e6), cells(m)),
    "mean_drift": lambda m: (bounds.mean_drift, drifts(m)),
    "local_drift": lambda m: (bounds.local_drift, drifts(m)),
    "sampling_constant": lambda m: (bounds.sampling_constant, bound_arguments(m, rho=number(0.1, 10))),
    "scheduling_penalty": lambda m: (bounds.scheduling_penalty, number(1, m), bound_arguments(m)),
    "convergence_bound": lambda m: (
        bounds.convergence_bound,
        number(1, m),
        number(1, 1e4),
        bound_arguments(m, **bound_constants),
    ),
    "scheduling_objective": lambda m: (
        bounds.scheduling_objective,
        number(1, m),
        number(1e-2, 1e3),
        bound_arguments(m, **bound_constants, budget_s=number(1, 1e4)),
    ),
}


@pytest.mark.parametrize("name", ARRAYS)
@given(drawn=st.data())
def test_array_functions(name, drawn):
    function, *arguments = ARRAYS[name](drawn.draw(st.sampled_from([1, 5])))
    args = [drawn.draw(argument) for argument in arguments]
    kwargs = args.pop() if isinstance(args[-1], dict) and "learning_rate" in args[-1] else {}
    attempt(function, *args, **kwargs)


@given(
    array(-0.3678, 1e9, 5) | array(-0.3678, -1e-9, 5),
    mostly(st.sampled_from([0, -1]), st.sampled_from([1, "0", None, np.nan])),
)
def test_lambertw(z, branch):
    def in_domain(z, branch):
        found = fcjax.lambertw(z, branch)
        w, z = np.asarray(found, float), np.asarray(z, float)
        inside = (z > -0.3678) & ((z < 0) | (branch == 0)) & (np.abs(z) > 1e-37)
        # Half precision has an error of its own.
        return z[inside], w[inside], max(1e-5, float(jnp.finfo(found.dtype).eps))

    found = attempt(in_domain, z, branch)
    if found is not None:
        z, w, error = found
        assert np.all(np.abs(w * np.exp(w) - z) <= error * (1 + np.abs(w)) * np.abs(z))
        assert np.all((w > -1) == (branch == 0))


@given(sets(5), observations(5), cells(5))
def test_allocate(scheduled, seen, cell):
    decision = attempt(fcjax.allocate, scheduled, seen, cell)
    if decision is None or not np.isfinite(decision.round_s) or not np.any(decision.scheduled):
        return
    share, scheduled = np.asarray(decision.share, float), np.asarray(decision.scheduled)
    assert np.all(share[~scheduled] == 0)
    assert share.sum() <= 1 + 1e-5
    assert cell.access != "fdma" or share.sum() >= 1 - 1e-5
    numbers = (seen.gain, seen.compute_s, cell.power_w, cell.upload_bits, cell.bandwidth_hz, cell.noise_psd_w_hz)
    gain, compute_s, power_w, bits, band, noise = (np.asarray(x, float) for x in numbers)
    snr = power_w * gain / (band * noise)
    if cell.download_bits is not None:
        download, sender_w = float(cell.download_bits), float(cell.broadcast_w)
        compute_s = compute_s + download / oracles.rate(
            1.0, gain, bandwidth_hz=band, noise_psd_w_hz=noise, power_w=sender_w
        )
    if all(np.all((x > 1e-18) & (x < 1e18)) for x in (snr, band * noise, bits / band)):  # within float32's range
        radio = {"bandwidth_hz": band, "noise_psd_w_hz": noise, "power_w": power_w}
        round_s = float(decision.round_s)
        if cell.access == "tdma":
            send_s, end_s = np.broadcast_to(bits / oracles.rate(1.0, gain, **radio), gain.shape), 0.0
            for device in np.argsort(compute_s):
                end_s = max(end_s, compute_s[device]) + send_s[device] if scheduled[device] else end_s
            assert end_s == pytest.approx(round_s, rel=TOLERANCE)
            return
        end_s = compute_s + bits / oracles.rate(np.where(share > 0, share, 1), gain, **radio)
        assert not np.any((end_s > (1 + TOLERANCE) * round_s) & (share > 0))
        assert cell.access == "ofdma" or not np.any((end_s < (1 - TOLERANCE) * round_s) & (share > 0))


fdma_cells = st.tuples(cells(5), mostly(st.just("fdma"), st.just("tdma")))


@given(
    sets(5),
    number(1e-2, 1e4),
    observations(5),
    fdma_cells.map(lambda drawn: dataclasses.replace(drawn[0], access=drawn[1])),
    trainings,
)
def test_least_energy(scheduled, deadline_s, seen, cell, training):
    found = attempt(fcjax.least_energy, scheduled, deadline_s, seen, cell, training)
    if found is None or not np.any(found[1].scheduled):
        return
    energy_j, decision = float(found[0]), found[1]
    fastest = fcjax.allocate(scheduled, seen, cell)
    if np.isinf(energy_j):
        assert fastest.round_s >= (1 - TOLERANCE) * deadline_s
        return
    fields = (seen.gain, seen.compute_s, cell.bandwidth_hz, cell.noise_psd_w_hz, cell.upload_bits, cell.cpu_hz)
    gain, compute_s, band, noise, bits, most_hz = (np.asarray(x, float) for x in fields)
    share, power_w, cpu_hz = (np.asarray(x, float) for x in (decision.share, decision.power_w, decision.cpu_hz))
    member = share > 0
    assert abs(share.sum() - 1) < 1e-5
    assert np.all((power_w <= np.asarray(cell.power_w, float) * (1 + 1e-6)) & (cpu_hz <= most_hz * (1 + 1e-6)))
    snr = np.asarray(cell.power_w, float) * gain / (band * noise)
    if not all(np.all((x > 1e-18) & (x < 1e18)) for x in (snr, band * noise, bits / band)):  # float32's range
        return
    radio = {"bandwidth_hz": band, "noise_psd_w_hz": noise}
    send_s = bits / oracles.rate(np.where(member, share, 1), gain, **radio, power_w=power_w)
    ready_s = compute_s * most_hz / cpu_hz
    if cell.download_bits is not None:
        ready_s = ready_s + cell.download_bits / oracles.rate(1.0, gain, **radio, power_w=cell.broadcast_w)
    assert np.all((ready_s + send_s <= (1 + TOLERANCE) * deadline_s) | ~member)
    cycles = np.asarray(cell.sample_floor_s, float) * most_hz * training.local_steps * training.batch_size
    spent_j = np.asarray(cell.capacitance, float) * cycles * cpu_hz**2 + power_w * send_s
    assert energy_j == pytest.approx(spent_j[member].sum(), rel=TOLERANCE)
    at_once_j = float(np.sum(fcjax.round_energy(fastest, seen, cell, training)))
    assert energy_j <= at_once_j * (1 + TOLERANCE)


@given(number(1e-3, 10), sets(5), observations(5), cells(5), st.none() | number(1e-3, 10) | array(1e-3, 10, 5))
def test_split_power(total_w, scheduled, seen, cell, limit_w):
    decision = attempt(design.split_power, total_w, scheduled, seen, cell, limit_w=limit_w)
    if decision is None or not np.isfinite(decision.round_s) or not np.any(decision.scheduled):
        return
    power_w = np.asarray(decision.power_w, float)[np.asarray(decision.scheduled)]
    limits_w = np.broadcast_to(np.asarray(cell.power_w if limit_w is None else limit_w, float), 5)
    assert power_w.sum() <= float(total_w) * (1 + 1e-4)
    assert np.all(power_w <= limits_w[np.asarray(decision.scheduled)] * (1 + 1e-5))
    assert abs(np.sum(decision.share) - 1) <= 1e-5
    louder = dataclasses.replace(cell, power_w=decision.power_w)
    round_s = fcjax.round_time(decision.scheduled, decision.share, seen, louder)
    assert float(round_s) == pytest.approx(float(decision.round_s), rel=TOLERANCE)


@FEWER
@given(sets(5), contexts(5), trainings, number(1e-3, 10))
def test_sensitivities(scheduled, context, training, phi):
    def numbers(scheduled, context, training, phi):
        training = dataclasses.replace(
            context.training, local_steps=training.local_steps, batch_size=training.batch_size
        )
        table = design.sensitivities(scheduled, context.observation, context.cell, training, context.estimates, phi)
        return table.select_dtypes(float).to_numpy()

    found = attempt(numbers, scheduled, context, training, phi)
    assert found is None or np.isfinite(found).all()


@FEWER
@given(
    contexts(3),
    number(1e-3, 10),
    st.fixed_dictionaries({"gradient_noise": st.none() | number(0.1, 10), "max_local_steps": whole(1, 50)}),
)
def test_best_training(context, phi, options):
    def best(context, phi, options):
        return design.best_training(
            context.observation, context.cell, context.training, context.estimates, phi, **options
        )

    found = attempt(best, context, phi, options)
    if found is not None and np.isfinite(found.bound):
        assert found.scheduled.sum() == found.num_scheduled
        assert 1 <= found.local_steps <= options["max_local_steps"]
        assert 1 <= found.batch_size <= 1000


@given(mostly(st.sampled_from(POLICIES), st.text()), number(1e-3, 10), contexts(5), keys)
def test_policies(name, phi, context, key):
    def select(name, phi, context, key):
        policy = policies.by_name(name, phi=phi)
        return policy.select(key, policy.init(context.cell), context)[1]

    decision = attempt(select, name, phi, context, key)
    if decision is not None:
        assert np.any(decision.scheduled)
        assert np.sum(decision.share) <= 1 + 1e-5


memories = {"memory": number(0.01, 1)}
WORLDS = st.one_of(
    st.tuples(st.just(worlds.redrawn), st.just({})),
    st.tuples(st.just(worlds.static), st.fixed_dictionaries({"fading_memory": number(0.01, 1)})),
    st.tuples(
        st.just(worlds.mobile),
        st.fixed_dictionaries(
            {
                "speed_m_s": number(0.1, 100),
                "interval_s": number(0.1, 10),
                "decorrelation_m": number(1, 100),
                **memories,
            }
        ),
    ),
    st.tuples(st.just(worlds.intermittent), st.fixed_dictionaries({"probability": number(0.01, 1), **memories})),
    st.tuples(
        st.just(worlds.trace),
        st.fixed_dictionaries(
            {
                "gain": array(1e-16, 1e-6, (2, 5)),
                "compute_s": array(1e-3, 1e2, (2, 5)),
                "available": st.none() | hnp.arrays(bool, (2, 5)) | array(0, 1, (2, 5)),
            }
        ),
    ),
)


@given(WORLDS, cells(5), keys)
def test_worlds(made, cell, key):
    def observe(made, cell, key):
        world = made[0](**made[1])
        state, first = world.observe(key, world.init(key, cell), cell, fcjax.Training())
        return first, world.observe(key, state, cell, fcjax.Training())[1], world.limits(cell, fcjax.Training())[:2]

    attempt(observe, made, cell, key)


@given(content=st.text() | st.just("round,device,compute_s,upload_s\n0,0,1,0.1"), kind=st.sampled_from(["csv", "nc"]))
def test_trace_files(content, kind, tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / f"trace.{kind}"
    path.write_bytes(content.encode(errors="replace"))
    attempt(lambda path: worlds.from_file(path).limits, str(path))


@given(
    st.tuples(st.just(compressors.quantise), st.fixed_dictionaries({"bits": whole(2, 16)}))
    | st.tuples(st.just(compressors.top_k), st.fixed_dictionaries({"fraction": number(1e-3, 1)})),
    hnp.arrays(np.float32, 7, elements=st.floats(-(2.0**99), 2.0**99, width=32)),
    keys,
)
def test_compressors(made, update, key):
    def decode(made, update, key):
        compressor = made[0](**made[1])
        return compressor.apply(key, compressor.parameters, update), compressor.bits(7)

    attempt(decode, made, update, key)


@given(
    st.sampled_from(["iid", "l1", "l3", "l10", "l11", "dir0.3", "dir1e-9", "dir0", "l3-shuffled"]) | st.text(),
    whole(1, 20),
    st.fixed_dictionaries({"seed": whole(0, 1000), "min_size": whole(0, 40)}),
)
def test_partitions(name, num_devices, options):
    parts = attempt(data.partition.by_name, name, np.arange(600) % 10, num_devices, **options)
    if parts is not None:
        held = np.concatenate([parts.of_device(i) for i in range(parts.num_devices)])
        assert len(np.unique(held)) == len(held), "a sample is on two devices"


scales = {"mean": number(1e-2, 1), "std": number(1e-2, 10)}


@given(
    st.tuples(
        st.just(models.mlp),
        st.tuples(st.tuples(whole(1, 5), st.just(3)), whole(1, 9)),
        st.fixed_dictionaries({"hidden": st.tuples(whole(1, 9)), **scales}),
    )
    | st.tuples(st.just(models.linear_regression), st.tuples(whole(1, 9)), st.fixed_dictionaries(scales))
    | st.tuples(
        st.just(models.squared_svm),
        st.tuples(whole(1, 9)),
        st.fixed_dictionaries({"regularisation": number(1e-3, 1), **scales}),
    )
)
def test_models(made):
    factory, args, kwargs = made

    def losses(args, kwargs):
        model = factory(*args, **kwargs)
        features = args[0] if factory is models.mlp else args[:1]
        return models.upload_bits(model), model.losses(
            model.init(jax.random.key(0)), jnp.ones((2, *map(int, features))), jnp.zeros(2, int)
        )

    attempt(losses, args, kwargs)


sizes = whole(1, 50), whole(1, 50)


@given(
    st.tuples(
        st.just(data.synthetic.regression),
        st.tuples(*sizes),
        st.fixed_dictionaries({"num_features": whole(1, 9), "noise": number(1e-3, 10), "seed": whole(1, 99)}),
    )
    | st.tuples(
        st.just(data.synthetic.classification),
        st.tuples(*sizes),
        st.fixed_dictionaries({"num_features": whole(1, 9), "num_labels": whole(1, 9), "spread": number(1e-3, 10)}),
    )
)
def test_synthetic_tasks(made):
    attempt(made[0], *made[1], **made[2])


@given(st.text("mnist/.._-0:~ \\\n\0é") | st.sampled_from(JUNK))
def test_data_set_names(name):
    attempt(data.load, name)


@pytest.fixture(scope="module")
def small_sweep():
    return fcjax.sweep(
        "fixed-1", dataset=CLOUDS, preset=functools.partial(presets.shi2020, hidden=()), num_devices=2, budget_s=3.0
    )


@given(changes=st.dictionaries(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), end=st.floats(0, 1))
def test_damaged_result_files(changes, end, small_sweep, tmp_path_factory):
    path = tmp_path_factory.mktemp("damaged") / "results.nc"
    fcjax.results.save(small_sweep, path)
    content = bytearray(path.read_bytes())
    for where, value in changes.items():
        content[int(where * len(content))] = value
    path.write_bytes(content[: int(end * len(content))])
    attempt(lambda path: fcjax.results.summary(fcjax.results.load(path)), str(path))


@FEWER
@given(
    mostly(st.just("pf"), st.text(), st.just("fixed-0")),
    st.fixed_dictionaries(
        {
            "distribution": mostly(st.just("l1"), st.sampled_from(["iid", "dir0.5", "l7", "dir0", ""]), st.text()),
            "radius_m": number(10, 2000),
            "phi": number(1e-3, 10),
            "budget_s": number(1, 3),
            "num_devices": mostly(st.just(3), whole(1, 20), st.just([3, 3])),
            "seeds": mostly(st.integers(1, 2), st.integers(-3, 0), st.sampled_from(JUNK)),
            "workers": mostly(st.just(1), st.integers(-1, 1), st.sampled_from(JUNK)),
        }
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "world": mostly(
                st.sampled_from(["static", "mobile(speed_m_s=9)", "intermittent(probability=0.5)"]), st.text()
            ),
            "outages": mostly(st.just("erasures(probability=0.5)"), st.text(), st.sampled_from(JUNK)),
            "compressor": mostly(st.just("quantise(bits=3)"), st.text(), st.sampled_from(JUNK)),
            "battery_j": number(0.05, 10),
            "proximal": number(0.1, 1),
            "data_seed": whole(0, 9),
        },
    ),
)
def test_sweeps(policy, settings, others):
    def rows(policy, settings, others):
        preset = functools.partial(presets.shi2020, hidden=(), momentum=0.5, **others)
        found = fcjax.results.summary(fcjax.sweep(policy, dataset=CLOUDS, preset=preset, **settings))
        return {name: found[name].to_numpy(float) for name in ("best_accuracy", "tilde_accuracy", "elapsed_s")}

    attempt(rows, policy, settings, others)
