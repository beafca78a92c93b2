"""Slow, simple reference implementations that do not use fcjax."""

import itertools
import math
import statistics

import mpmath
import numpy as np
from scipy import optimize, special

mpmath.mp.dps = 50


def lambertw(z, branch):
    """W(z) and its first three derivatives to 50 digits, from the definition of W alone."""
    z = mpmath.mpf(float(z))
    w = mpmath.lambertw(z, branch).real
    assert abs(w * mpmath.exp(w) - z) <= mpmath.mpf(10) ** -40 * abs(z)
    p = 1 + w
    first = w / (z * p)
    return w, first, -(first**2) * (w + 2) / p, first**3 * (2 * w * w + 8 * w + 9) / p**2


def efficiency(gamma):
    """The root y > 0 of ln(1 + y/gamma) = y to 50 digits."""
    gamma = mpmath.mpf(gamma)
    y = -(mpmath.lambertw(-gamma * mpmath.exp(-gamma), -1).real + gamma)
    assert abs(mpmath.log1p(y / gamma) - y) <= mpmath.mpf(10) ** -35 * y
    return y


def rate(share, gain, *, bandwidth_hz, noise_psd_w_hz, power_w):
    """Shannon's rate under FDMA, in bit/s."""
    band = share * bandwidth_hz
    return band * np.log1p(power_w * gain / (band * noise_psd_w_hz)) / math.log(2)


def required_share(upload_s, gain, *, bandwidth_hz, noise_psd_w_hz, power_w, upload_bits):
    """The share with which each upload takes the given time, or inf: SciPy's W, refined by Newton's method."""
    snr = power_w * gain / (bandwidth_hz * noise_psd_w_hz)
    target = upload_bits * math.log(2) / (bandwidth_hz * upload_s)  # share * ln(1 + snr/share)
    gamma = target / snr
    feasible = (upload_s > 0) & (gamma < 1)
    gamma = np.where(feasible, gamma, 0.5)
    share = target / -(special.lambertw(-gamma * np.exp(-gamma), -1).real + gamma)
    share = np.where(np.isfinite(share) & (share > 0), share, snr / (1 - gamma) / 2)
    for _ in range(100):  # Newton's method in 1/share: a weak signal's rate is nearly linear in it
        residual = share * np.log1p(snr / share) - target
        previous, step = share, residual / (share * (np.log1p(snr / share) - snr / (share + snr)))
        share = share / np.maximum(1 + step, 0.1)
        if np.all(np.abs(share - previous) <= 1e-14 * share / np.minimum(snr, 1)):
            break
    return np.where(feasible, share, np.inf)


def round_time(gain, compute_s, *, power_w, **cell):
    """Solves P2 for the given devices, all scheduled, with SciPy's brentq on the sum of required shares."""

    def excess(time_s):
        return np.sum(required_share(time_s - compute_s, gain, power_w=power_w, **cell)) - 1

    band = {name: cell[name] for name in ("bandwidth_hz", "noise_psd_w_hz")}
    alone_s = np.max(compute_s + cell["upload_bits"] / rate(1.0, gain, power_w=power_w, **band))
    if len(gain) == 1:
        return alone_s
    low, high = alone_s * (1 - 1e-9), 2 * alone_s
    while excess(high) > 0:
        high *= 2
    return optimize.brentq(lambda t: max(min(excess(t), 1e9), -1e9), low, high, xtol=1e-300, rtol=1e-15)


def best_subsets(gain, compute_s, *, power_w, time=round_time, **cell):
    """Yields the shortest round time and its subset for each size, by enumeration."""
    num_devices = len(gain)
    for size in range(1, num_devices + 1):
        yield min(
            (time(gain[list(s)], compute_s[list(s)], power_w=power_w[list(s)], **cell), s)
            for s in itertools.combinations(range(num_devices), size)
        )


def tdma_time(gain, compute_s, *, power_w, upload_bits, **band):
    """The shortest time in which all devices can send one after another, by trying every order."""
    send_s = upload_bits / rate(1.0, gain, power_w=power_w, **band)

    def end(order):
        time_s = 0.0
        for device in order:
            time_s = max(time_s, compute_s[device]) + send_s[device]
        return time_s

    return min(end(order) for order in itertools.permutations(range(len(gain))))


def ofdma_time(gain, compute_s, *, power_w, upload_bits, num_blocks, **band):
    """The shortest time with whole blocks, by giving blocks one at a time to the device that would be last."""
    if len(gain) > num_blocks:
        return math.inf
    blocks = np.ones(len(gain), int)

    def ends():
        return compute_s + upload_bits / rate(blocks / num_blocks, gain, power_w=power_w, **band)

    for _ in range(num_blocks - len(gain)):
        blocks[np.argmax(ends())] += 1
    return np.max(ends())


def bound(n, k, *, rho, beta, delta, num_samples, learning_rate, local_steps, phi):
    """A, B and the bound of Theorem 3, with the sums as in the paper. rho and beta have shape (M,)."""
    m, d_total = len(delta), math.fsum(num_samples)
    rho, beta, mean_delta = (
        math.fsum(d * x for d, x in zip(num_samples, v, strict=True)) / d_total for v in (rho, beta, delta)
    )
    growth = (learning_rate * beta + 1) ** local_steps - 1
    g = [x / beta * growth for x in delta]
    h = mean_delta / beta * growth - learning_rate * mean_delta * local_steps
    double_sum = math.fsum(
        num_samples[i] ** 2 * num_samples[j] ** 2 * (g[i] ** 2 + g[j] ** 2) for i in range(m) for j in range(m)
    )
    a = beta * double_sum / (2 * m * (m - 1) * min(num_samples) ** 2 * d_total**2)
    b = (m - n) / n * a
    floor = rho * h + b
    eta_phi_tau = learning_rate * phi * local_steps
    eps0 = (1 + math.sqrt(1 + 4 * eta_phi_tau * k**2 * floor)) / (2 * eta_phi_tau * k)
    mean_g = math.fsum(d * x for d, x in zip(num_samples, g, strict=True)) / d_total
    a_valid = beta * math.fsum(d**2 * (x + mean_g) ** 2 for d, x in zip(num_samples, g, strict=True))
    relative = statistics.pstdev(num_samples) / statistics.fmean(num_samples)
    # p_i = D_i/D, so sum_i p_i^2 = (1 + relative^2)/M.
    v = (1 + relative**2) * statistics.fmean(
        (d * x / min(num_samples)) ** 2 for d, x in zip(num_samples, g, strict=True)
    )
    return {
        "g": g,
        "h": h,
        "published": a,
        "valid": a_valid / (2 * m * (m - 1) * min(num_samples) ** 2),
        "tight": (beta * v / 2 + rho * relative * math.sqrt(v)) / (m - 1),
        "penalty": b,
        "bound": eps0 + floor,
    }


def objective(n, round_s, *, budget_s, **convergence):
    """P4 with K = floor(T/t), inf if K is 0."""
    num_rounds = math.floor(budget_s / round_s)
    return bound(n, num_rounds, **convergence)["bound"] if num_rounds else math.inf


def greedy_schedule(world, *, stop_at=None, **settings):
    """Alg. 2, line by line, with SciPy's round times. With `stop_at`, skips steps 8 and 9 and stops at that size.

    `world` holds the arguments of `round_time`. `settings` go to `objective`.
    """
    arrays = {name: world[name] for name in ("gain", "compute_s", "power_w")}
    cell = {name: value for name, value in world.items() if name not in arrays}

    def time_s(members):
        return round_time(**{name: value[list(members)] for name, value in arrays.items()}, **cell)

    remaining, chosen = set(range(len(world["gain"]))), []
    x = min(sorted(remaining), key=lambda i: time_s([i]))
    remaining.remove(x)
    chosen.append(x)
    c = objective(1, time_s(chosen), **settings) if stop_at is None else 0.0
    while remaining and len(chosen) != stop_at:
        x = min(sorted(remaining), key=lambda i: time_s([*chosen, i]))
        c_new = objective(len(chosen) + 1, time_s([*chosen, x]), **settings) if stop_at is None else 0.0
        if c_new > c:
            break
        remaining.remove(x)
        chosen.append(x)
        c = c_new
    return set(chosen)


def exact_schedule(world, **settings):
    """The smallest objective of P4 over all subsets, by enumeration, and its subset."""
    fastest = best_subsets(**world)
    return min((objective(len(subset), time_s, **settings), set(subset)) for time_s, subset in fastest)


def least_energy(
    deadline_s,
    gain,
    compute_s,
    *,
    power_w,
    upload_bits,
    bandwidth_hz,
    noise_psd_w_hz,
    compute_j,
    wait_s=0.0,
):
    """The least energy of devices that are all scheduled, by SciPy's SLSQP in the logs of shares, powers and speeds.

    `compute_j` is the energy of computing at full frequency, `wait_s` the time of the download, and a speed is the
    fraction of the full frequency. The problem is convex in these variables. Of several starts, at powers and speeds
    exp(-start) below the full ones, the best counts; nan if none ends within the constraints.
    """
    n = len(gain)

    def parts(z):
        share, power, speed = np.exp(z).reshape(3, n)
        snr = power * gain / (share * bandwidth_hz * noise_psd_w_hz)
        nats = np.log1p(snr)
        send_s = upload_bits * math.log(2) / (share * bandwidth_hz * nats)
        return share, power, speed, send_s, compute_s / speed, snr / (1 + snr) / nats

    def log_energy(z):
        _, power, speed, send_s, _, k = parts(z)
        sending, computing = power * send_s, compute_j * speed**2
        total = np.sum(sending + computing)
        return math.log(total), np.concatenate([sending * (k - 1), sending * (1 - k), 2 * computing]) / total

    def slack(z):
        share, _, _, send_s, run_s, _ = parts(z)
        return np.append(np.log((deadline_s - wait_s) / (send_s + run_s)), -math.log(np.sum(share)))

    def slope(z):
        share, _, _, send_s, run_s, k = parts(z)
        sending, computing = np.diag(send_s / (send_s + run_s)), np.diag(run_s / (send_s + run_s))
        of_times = np.hstack([sending * (1 - k), sending * k, computing])
        return np.vstack([of_times, np.concatenate([-share / np.sum(share), np.zeros(2 * n)])])

    def solve(start):
        return optimize.minimize(
            log_energy,
            np.concatenate([np.full(n, -math.log(n)), np.log(power_w) - start, np.full(n, -start)]),
            jac=True,
            method="SLSQP",
            bounds=[(None, high) for high in (*np.zeros(n), *np.log(power_w), *np.zeros(n))],
            constraints={"type": "ineq", "fun": slack, "jac": slope},
            options={"maxiter": 200, "ftol": 1e-13},
        )

    found = [result for result in map(solve, (0.0, 0.5, 2.0)) if np.min(slack(result.x)) > -1e-9]
    return math.exp(min(result.fun for result in found)) if found else math.nan
