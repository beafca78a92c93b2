"""Fits the rational initial guesses of `fcjax/wireless/lambertw.py` and prints their coefficients and largest errors.

Each guess is a quotient of polynomials with constant terms 1. It is fitted to mpmath's W by least squares, with weights
that are raised where the error is largest until the error is nearly level. The last digits do not matter, because
Halley's method corrects them; the tests check the error.

    python experiments/studies/fit_lambertw.py      (needs the `test` extra)
"""

import mpmath
import numpy as np
from scipy import optimize


def fit(t, target, degrees, combine, rounds=80):
    """Minimises max |combine(quotient(t))/target - 1| over the coefficients of the quotient."""
    num, den = degrees
    coefficients, weight = np.full(num + den, 0.1), np.ones_like(t)
    best = np.inf, coefficients

    def error(c):
        numerator = np.polynomial.polynomial.polyval(t, np.r_[1, c[:num]])
        denominator = np.polynomial.polynomial.polyval(t, np.r_[1, c[num:]])
        return combine(numerator / denominator) / target - 1

    for _ in range(rounds):
        root = np.sqrt(weight)
        coefficients = optimize.least_squares(
            lambda c, root=root: 1e4 * error(c) * root, coefficients, x_scale="jac", max_nfev=3000
        ).x
        size = np.abs(error(coefficients))
        best = min(best, (size.max(), coefficients), key=lambda pair: pair[0])
        weight = weight * np.sqrt(size / size.max() + 1e-3)
        weight /= weight.mean()
    return best


def report(name, degrees, largest_error, coefficients):
    quotient = np.r_[1, coefficients[: degrees[0]]][::-1], np.r_[1, coefficients[degrees[0] :]][::-1]
    print(f"{name}: relative error {largest_error:.2g}")
    for part in quotient:
        print("    (" + ", ".join(f"{c:.9g}" for c in part) + ")")


def main():
    def w(z, branch):
        return mpmath.lambertw(z, branch).real

    sigma = np.geomspace(1e-6, 760, 1500)
    t = np.sqrt(2 * sigma)
    root = np.array([float(-1 - w(-mpmath.exp(-1 - mpmath.mpf(s)), -1)) for s in sigma])
    report("_UPPER_ROOT", (3, 3), *fit(t, root, (3, 3), lambda quotient: sigma + t * quotient))

    q = np.r_[np.geomspace(1e-8, 1e-2, 60), np.linspace(0.011, 0.11, 200)]
    s = np.sqrt(2 * q)
    one_plus_w = np.array([float(1 + w((mpmath.mpf(x) - 1) / mpmath.e, 0)) for x in q])
    report("_NEAR_BRANCH_POINT", (2, 2), *fit(s, one_plus_w, (2, 2), lambda quotient: s * quotient))

    z = np.r_[np.linspace(-0.34, -1e-4, 150), np.geomspace(1e-4, 20, 300), np.exp(np.linspace(3, 709, 400))]
    u = np.log1p(0.85 * 2 * z / (1 + np.sqrt(np.e) * np.sqrt(z + np.exp(-1))))
    value = np.array([float(w(x, 0)) for x in z])
    report("_AWAY", (3, 3), *fit(u, value, (3, 3), lambda quotient: u / 0.85 * quotient))


if __name__ == "__main__":
    mpmath.mp.dps = 40
    main()
