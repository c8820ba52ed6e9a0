"""Test functions of Moré, Garbow and Hillstrom (ACM Trans. Math. Software 7, 1981), written from the paper's formulas.

Each is a sum of squares. `PROBLEMS` has for each its residuals, the standard start, and the minima that the paper
states. Derivatives are by complex steps, exact to rounding.
"""

import numpy as np

BARD = np.array([0.14, 0.18, 0.22, 0.25, 0.29, 0.32, 0.35, 0.39, 0.37, 0.58, 0.73, 0.96, 1.34, 2.10, 4.39])
GAUSS = np.array([0.0009, 0.0044, 0.0175, 0.0540, 0.1295, 0.2420, 0.3521, 0.3989])
MEYER = [34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744, 8261, 7030, 6005, 5147, 4427, 3820, 3307, 2872]
KOWALIK = np.array([0.1957, 0.1947, 0.1735, 0.1600, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246])
KOWALIK_U = np.array([4.0, 2.0, 1.0, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625])
OSBORNE = (
    "844 908 932 936 925 908 881 850 818 784 751 718 685 658 628 603 580 558 538 522 506 490 478 467 457 448 438 431"
    " 424 420 414 411 406"
)


def rosenbrock(x):
    a, b = x[::2], x[1::2]
    return np.concatenate([10 * (b - a**2), 1 - a])


def freudenstein_roth(x):
    a, b = x
    return np.array([-13 + a + ((5 - b) * b - 2) * b, -29 + a + ((b + 1) * b - 14) * b])


def powell_badly_scaled(x):
    a, b = x
    return np.array([1e4 * a * b - 1, np.exp(-a) + np.exp(-b) - 1.0001])


def brown_badly_scaled(x):
    a, b = x
    return np.array([a - 1e6, b - 2e-6, a * b - 2])


def beale(x):
    i = np.arange(1, 4)
    return np.array([1.5, 2.25, 2.625]) - x[0] * (1 - x[1] ** i)


def jennrich_sampson(x):
    i = np.arange(1, 11)
    return 2 + 2 * i - (np.exp(i * x[0]) + np.exp(i * x[1]))


def helical_valley(x):
    angle = np.arctan(x[1] / x[0]) / (2 * np.pi) + (0.5 if x[0].real < 0 else 0.0)
    return np.array([10 * (x[2] - 10 * angle), 10 * (np.sqrt(x[0] ** 2 + x[1] ** 2) - 1), x[2]])


def bard(x):
    u = np.arange(1.0, 16.0)
    v, w = 16 - u, np.minimum(u, 16 - u)
    return BARD - (x[0] + u / (v * x[1] + w * x[2]))


def gaussian(x):
    t = (8 - np.arange(1, 16)) / 2
    return x[0] * np.exp(-x[1] * (t - x[2]) ** 2 / 2) - np.concatenate([GAUSS, GAUSS[-2::-1]])


def meyer(x):
    t = 45 + 5 * np.arange(1, 17)
    return x[0] * np.exp(x[1] / (t + x[2])) - np.array(MEYER, float)


def gulf(x):
    t = np.arange(1, 11) / 100
    y = 25 + (-50 * np.log(t)) ** (2 / 3)
    away = y - x[1]
    away = np.where(away.real < 0, -away, away)
    return np.exp(-(away ** x[2]) / x[0]) - t


def box(x):
    t = 0.1 * np.arange(1, 11)
    return np.exp(-t * x[0]) - np.exp(-t * x[1]) - x[2] * (np.exp(-t) - np.exp(-10 * t))


def powell_singular(x):
    a, b, c, d = x[0::4], x[1::4], x[2::4], x[3::4]
    return np.concatenate([a + 10 * b, 5**0.5 * (c - d), (b - 2 * c) ** 2, 10**0.5 * (a - d) ** 2])


def wood(x):
    a, b, c, d = x
    first = [10 * (b - a**2), 1 - a, 90**0.5 * (d - c**2), 1 - c]
    return np.array([*first, 10**0.5 * (b + d - 2), (b - d) / 10**0.5])


def kowalik_osborne(x):
    u = KOWALIK_U
    return KOWALIK - x[0] * (u**2 + u * x[1]) / (u**2 + u * x[2] + x[3])


def brown_dennis(x):
    t = np.arange(1, 21) / 5
    return (x[0] + t * x[1] - np.exp(t)) ** 2 + (x[2] + x[3] * np.sin(t) - np.cos(t)) ** 2


def osborne(x):
    t, y = 10.0 * np.arange(33), np.array(OSBORNE.split(), float) / 1000
    return y - (x[0] + x[1] * np.exp(-t * x[3]) + x[2] * np.exp(-t * x[4]))


def biggs(x):
    t = 0.1 * np.arange(1, 14)
    y = np.exp(-t) - 5 * np.exp(-10 * t) + 3 * np.exp(-4 * t)
    return x[2] * np.exp(-t * x[0]) - x[3] * np.exp(-t * x[1]) + x[5] * np.exp(-t * x[4]) - y


def watson(x):
    t, j = np.arange(1, 30)[:, None] / 29, np.arange(len(x))
    slope = (j[1:] * x[1:] * t ** (j[1:] - 1)).sum(1)
    return np.concatenate([slope - (x * t**j).sum(1) ** 2 - 1, [x[0], x[1] - x[0] ** 2 - 1]])


def penalty_one(x):
    return np.concatenate([1e-5**0.5 * (x - 1), [(x**2).sum() - 0.25]])


def penalty_two(x):
    n = len(x)
    i = np.arange(2, n + 1)
    y = np.exp(i / 10) + np.exp((i - 1) / 10)
    first = 1e-5**0.5 * (np.exp(x[1:] / 10) + np.exp(x[:-1] / 10) - y)
    second = 1e-5**0.5 * (np.exp(x[1:] / 10) - np.exp(-0.1))
    return np.concatenate([[x[0] - 0.2], first, second, [((n - np.arange(n)) * x**2).sum() - 1]])


def variably_dimensioned(x):
    s = (np.arange(1, len(x) + 1) * (x - 1)).sum()
    return np.concatenate([x - 1, [s, s**2]])


def trigonometric(x):
    n = len(x)
    return n - np.cos(x).sum() + np.arange(1, n + 1) * (1 - np.cos(x)) - np.sin(x)


def brown_almost_linear(x):
    return np.concatenate([x[:-1] + x.sum() - (len(x) + 1), [np.prod(x) - 1]])


def boundary_value(x):
    n = len(x)
    h, t = 1 / (n + 1), np.arange(1, n + 1) / (n + 1)
    wide = np.concatenate([[0], x, [0]])
    return 2 * x - wide[:-2] - wide[2:] + h**2 * (x + t + 1) ** 3 / 2


def integral_equation(x):
    n = len(x)
    h, t = 1 / (n + 1), np.arange(1, n + 1) / (n + 1)
    cube = (x + t + 1) ** 3
    before, after = np.cumsum(t * cube), np.cumsum(((1 - t) * cube)[::-1])[::-1]
    return x + h * ((1 - t) * before + t * (after - (1 - t) * cube)) / 2


def broyden_tridiagonal(x):
    wide = np.concatenate([[0], x, [0]])
    return (3 - 2 * x) * x - wide[:-2] - 2 * wide[2:] + 1


def broyden_banded(x):
    n, wide = len(x), np.concatenate([np.zeros(5), x * (1 + x), [0]])
    near = sum(wide[k : k + n] for k in range(7)) - wide[5 : 5 + n]
    return x * (2 + 5 * x**2) + 1 - near


def linear_full_rank(x):
    return np.concatenate([x - 2 * x.sum() / 20 - 1, np.full(10, -2 * x.sum() / 20 - 1)])


def linear_rank_one(x):
    i = np.arange(1, 21)
    return i * (np.arange(1, len(x) + 1) * x).sum() - 1


def chebyquad(x):
    n, y = len(x), 2 * x - 1
    before, now, found = np.ones_like(y), y, []
    for i in range(1, n + 1):
        found.append(now.mean() - (-1 / (i**2 - 1) if i % 2 == 0 else 0))
        before, now = now, 2 * y * now - before
    return np.array(found)


T = np.arange(1, 11) / 11
PROBLEMS = {
    "rosenbrock": (rosenbrock, [-1.2, 1], [0]),
    "freudenstein_roth": (freudenstein_roth, [0.5, -2], [0, 48.9842]),
    "powell_badly_scaled": (powell_badly_scaled, [0, 1], [0]),
    "brown_badly_scaled": (brown_badly_scaled, [1, 1], [0]),
    "beale": (beale, [1, 1], [0]),
    "jennrich_sampson": (jennrich_sampson, [0.3, 0.4], [124.362]),
    "helical_valley": (helical_valley, [-1, 0, 0], [0]),
    "bard": (bard, [1, 1, 1], [8.21487e-3, 17.4286]),
    "gaussian": (gaussian, [0.4, 1, 0], [1.12793e-8]),
    "meyer": (meyer, [0.02, 4000, 250], [87.9458]),
    "gulf": (gulf, [5, 2.5, 0.15], [0]),
    "box": (box, [0, 10, 20], [0]),
    "powell_singular": (powell_singular, [3, -1, 0, 1], [0]),
    "wood": (wood, [-3, -1, -3, -1], [0]),
    "kowalik_osborne": (kowalik_osborne, [0.25, 0.39, 0.415, 0.39], [3.07505e-4, 1.02734e-3]),
    "brown_dennis": (brown_dennis, [25, 5, -5, -1], [85822.2]),
    "osborne": (osborne, [0.5, 1.5, -1, 0.01, 0.02], [5.46489e-5]),
    "biggs": (biggs, [1, 2, 1, 1, 1, 1], [0, 5.65565e-3]),
    "watson": (watson, [0] * 6, [2.28767e-3]),
    "watson_9": (watson, [0] * 9, [1.39976e-6]),
    "extended_rosenbrock": (rosenbrock, [-1.2, 1] * 20, [0]),
    "extended_powell": (powell_singular, [3, -1, 0, 1] * 10, [0]),
    "penalty_one": (penalty_one, np.arange(1, 11), [7.08765e-5]),
    "penalty_two": (penalty_two, [0.5] * 10, [2.93660e-4]),
    "variably_dimensioned": (variably_dimensioned, 1 - np.arange(1, 11) / 10, [0]),
    "trigonometric": (trigonometric, [0.1] * 10, [0, 2.79506e-5]),
    "brown_almost_linear": (brown_almost_linear, [0.5] * 10, [0, 1]),
    "boundary_value": (boundary_value, T * (T - 1), [0]),
    "integral_equation": (integral_equation, T * (T - 1), [0]),
    "broyden_tridiagonal": (broyden_tridiagonal, [-1] * 10, [0]),
    "broyden_banded": (broyden_banded, [-1] * 10, [0]),
    "linear_full_rank": (linear_full_rank, [1] * 10, [10]),
    "linear_rank_one": (linear_rank_one, [1] * 10, [20 * 19 / (2 * 41)]),
    "chebyquad": (chebyquad, np.arange(1, 9) / 9, [3.51687e-3]),
}


class Function:
    """A problem as a function that returns value and gradient, and counts its calls."""

    def __init__(self, name):
        self.residuals, start, self.minima = PROBLEMS[name]
        self.start, self.evaluations = np.array(start, float), 0

    def __call__(self, x):
        self.evaluations += 1
        with np.errstate(all="ignore"):
            r = self.residuals(x)
            jacobian = np.stack([self.residuals(x + 1e-30j * e).imag / 1e-30 for e in np.eye(len(x))])
            return float(r @ r), 2 * jacobian @ r

    def solved(self, value):
        """Whether a value equals a minimum to the digits in the paper."""
        return any(value <= minimum * (1 + 2e-5) + 1e-8 and value >= minimum * (1 - 2e-5) for minimum in self.minima)
