"""SOAP for the witness, in plain Python: eigenvectors by Jacobi's rotations, and QR by Householder's reflections."""

import math

from tests.support.plain import ema, square

DEFAULTS = {"lr": 3e-3, "beta1": 0.95, "beta2": 0.95, "shampoo_beta": None, "eps": 1e-8, "weight_decay": 0.01}
DEFAULTS |= {"bias_correction": True, "precondition_frequency": 10, "max_precondition_dim": 10000, "matrix": "flatten"}
ZERO = 1e-13
"""Values below this part of the largest one count as zero."""


def product(a, b):
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def turned(x):
    return [list(column) for column in zip(*x, strict=True)]


def eye(n):
    return [[float(i == j) for j in range(n)] for i in range(n)]


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def eigenvectors(a):
    """The eigenvalues of a symmetric matrix in descending order, and its eigenvectors, by Jacobi's rotations."""
    n, a, v = len(a), [list(row) for row in a], eye(len(a))
    for _ in range(100):
        if sum(square(a[i][j]) for i in range(n) for j in range(i)) <= 1e-40 * sum(square(a[i][i]) for i in range(n)):
            break
        for i in range(n):
            for j in range(i):
                if a[i][j] == 0:
                    continue
                theta = (a[i][i] - a[j][j]) / (2 * a[i][j])
                t = math.copysign(1, theta) / (abs(theta) + math.hypot(theta, 1))
                c = 1 / math.hypot(t, 1)
                rotate(a, i, j, c, t * c)
                a = turned(a)
                rotate(a, i, j, c, t * c)
                rotate(v, i, j, c, t * c)
    order = sorted(range(n), key=lambda i: -a[i][i])
    return [a[i][i] for i in order], [v[i] for i in order]


def rotate(rows, i, j, c, s):
    """Rotate rows i and j."""
    pairs = [*zip(rows[i], rows[j], strict=True)]
    rows[i], rows[j] = [c * x + s * y for x, y in pairs], [c * y - s * x for x, y in pairs]


def basis(columns):
    """An orthonormal basis from independent vectors by Householder's reflections, which also complete it."""
    n, columns, reflections = len(columns[0]), [list(x) for x in columns], []
    for j in range(len(columns)):
        x = columns[j][j:]
        if any(x[1:]):
            u = [0.0] * j + [x[0] + math.copysign(math.hypot(*x), x[0]), *x[1:]]
            reflections.append(u)
            columns = [reflected(y, u) for y in columns]
    out = eye(n)
    for u in reversed(reflections):
        out = [reflected(y, u) for y in out]
    return turned([[-e for e in x] if sum(e / (i + 1) for i, e in enumerate(x)) < 0 else x for x in out])


def reflected(y, u):
    scale = 2 * dot(y, u) / dot(u, u)
    return [a - scale * b for a, b in zip(y, u, strict=True)]


def first_basis(a):
    values, vectors = eigenvectors(a)
    kept = [x for x, size in zip(vectors, values, strict=True) if size > ZERO * max(values)]
    return basis(kept or [[0.0] * len(a)])


def next_basis(a, q):
    s = turned(product(a, q))
    sizes = [dot(x, y) for x, y in zip(turned(q), s, strict=True)]
    order = sorted(range(len(a)), key=lambda i: -sizes[i] if sizes[i] > ZERO * max(sizes) else 0.0)
    found, made, most = [], [], max(math.hypot(*x) for x in s)
    for i in order:  # keep it if it is independent of the ones before
        x = s[i]
        for y in (*made, *made):
            x = [b - dot(x, y) * c for b, c in zip(x, y, strict=True)]
        if math.hypot(*x) > ZERO * most:
            found.append(i)
            made.append([b / math.hypot(*x) for b in x])
    return basis([s[i] for i in found] or [[0.0] * len(a)]), found + [i for i in order if i not in found]


def sides(h, shape):
    """The numbers of matrices, rows and columns, and whether each side has a basis."""
    if len(shape) < 2:
        return 1, 1, math.prod(shape), ()
    count, rows, columns = (
        (1, shape[0], math.prod(shape[1:])) if h.matrix == "flatten" else (math.prod(shape[:-2]), *shape[-2:])
    )
    return count, rows, columns, [x for x, n in (("l", rows), ("r", columns)) if n <= h.max_precondition_dim]


def slots(h, shape):
    count, rows, columns, which = sides(h, shape)
    made = {name: [0.0] * math.prod(shape) for name in ("m", "v")}
    for side in which:
        made |= {name: [0.0] * (count * (rows if side == "l" else columns) ** 2) for name in (side, f"q{side}")}
    return made


def soap(h, shape, p, g, s, t):
    """The step of SOAP for all matrices of a tensor."""
    count, rows, columns, which = sides(h, shape)
    sizes = {"l": rows * rows, "r": columns * columns, "ql": rows * rows, "qr": columns * columns}

    def part(x, name, i):
        n = sizes.get(name, rows * columns)
        width = {"l": rows, "ql": rows}.get(name, columns)
        own = x[i * n : (i + 1) * n]
        return [own[k : k + width] for k in range(0, n, width)]

    out, made = [], {name: [] for name in s if name not in ("slow", "ema")}
    for i in range(count):
        own = {name: part(s[name], name, i) for name in made}
        new_p, new = soap_of_a_matrix(h, which, part(p, "p", i), part(g, "g", i), own, t)
        out += [x for row in new_p for x in row]
        for name in made:
            made[name] += [x for row in new[name] for x in row]
    return out, made


def mixed(a, b, beta):
    return [ema(x, y, beta) for x, y in zip(a, b, strict=True)]


def soap_of_a_matrix(h, which, p, g, s, t):
    beta = h.beta2 if h.shampoo_beta is None else h.shampoo_beta
    new = dict(s)
    grams = {"l": lambda: product(g, turned(g)), "r": lambda: product(turned(g), g)}
    for side in which:
        new[side] = mixed(s[side], grams[side](), beta)
    if t == 1:
        return p, new | {f"q{side}": first_basis(new[side]) for side in which}

    def into(x):
        x = product(turned(s["ql"]), x) if "l" in which else x
        return product(x, s["qr"]) if "r" in which else x

    new["m"] = mixed(s["m"], g, h.beta1)
    new["v"] = mixed(s["v"], [[square(x) for x in row] for row in into(g)], h.beta2)
    n = [
        [a / (math.sqrt(b) + h.eps) for a, b in zip(*rows, strict=True)]
        for rows in zip(into(new["m"]), new["v"], strict=True)
    ]
    n = product(s["ql"], n) if "l" in which else n
    n = product(n, turned(s["qr"])) if "r" in which else n
    lr = h.lr
    if h.bias_correction:
        lr *= math.sqrt(1 - h.beta2 ** (t - 1)) / (1 - h.beta1 ** (t - 1))
    p = [[a - lr * b for a, b in zip(*rows, strict=True)] for rows in zip(p, n, strict=True)]
    p = [[x - h.lr * h.weight_decay * x for x in row] for row in p]
    if (t - 1) % h.precondition_frequency == 0:
        for side in which:
            new[f"q{side}"], order = next_basis(new[side], s[f"q{side}"])
            v = turned(new["v"]) if side == "r" else new["v"]
            v = [v[i] for i in order]
            new["v"] = turned(v) if side == "r" else v
    return p, new
