"""A small transformer, written by hand in the array API, learns to continue text: alone, or on several ranks.

    python docs/examples/transformer.py                  # one process does the work of two ranks
    mpiexec -n 2 python docs/examples/transformer.py     # two ranks: the same losses, to the last digit

The text is what Python ships for its `help()`. No framework: forward and backward pass are below.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # or sums, and so last digits, depend on the number of cores

import argparse
import json
from pydoc_data.topics import topics

import numpy as np
from array_api_compat import array_namespace

import arrayopt as ao

WIDTH, HEADS, LAYERS, LENGTH = 64, 4, 2, 64
PIECES = 15360  # of text, in each run of the picture
COMPARED = [("AdamW", 0.006, 16), ("AdamW", 0.006, 256), ("LAMB", 0.01, 16), ("LAMB", 0.03, 256)]
"""Rules, learning rates and batches of the picture. Each rate is the best of three or four that were tried."""


def text():
    """The text as numbers, and how many different characters it has: printable ASCII."""
    letters = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace"), np.uint8)
    return np.clip(letters.astype(np.int64) - 31, 0, 95), 96


def init(xp, vocabulary):
    """The parameters."""
    rng = np.random.default_rng(0)

    def matrix(rows, columns, scale=1.0):
        return xp.asarray(rng.standard_normal((rows, columns)).astype(np.float32) * np.float32(scale / rows**0.5))

    def norm():
        return {"scale": xp.ones(WIDTH, dtype=xp.float32), "bias": xp.zeros(WIDTH, dtype=xp.float32)}

    def block():
        return {
            "norm1": norm(),
            "qkv": matrix(WIDTH, 3 * WIDTH),
            "out": matrix(WIDTH, WIDTH, (2 * LAYERS) ** -0.5),
            "norm2": norm(),
            "up": {"weight": matrix(WIDTH, 4 * WIDTH), "bias": xp.zeros(4 * WIDTH, dtype=xp.float32)},
            "down": {
                "weight": matrix(4 * WIDTH, WIDTH, (2 * LAYERS) ** -0.5),
                "bias": xp.zeros(WIDTH, dtype=xp.float32),
            },
        }

    return {
        "words": matrix(vocabulary, WIDTH, vocabulary**0.5 * 0.1),
        "places": matrix(LENGTH, WIDTH, LENGTH**0.5 * 0.1),
        "blocks": [block() for _ in range(LAYERS)],
        "norm": norm(),
        "head": matrix(WIDTH, vocabulary),
    }


# ---- layers: each returns its value, and a function from the gradient of that to the gradients of what it took -------


def normed(p, x):
    """Layer norm."""
    xp = array_namespace(x)
    mean = xp.mean(x, axis=-1, keepdims=True)
    size = xp.sqrt(xp.mean((x - mean) ** 2, axis=-1, keepdims=True) + 1e-5)
    y = (x - mean) / size

    def back(d):
        dy = d * p["scale"]
        dx = dy - xp.mean(dy, axis=-1, keepdims=True) - y * xp.mean(dy * y, axis=-1, keepdims=True)
        return {"scale": xp.sum(d * y, axis=(0, 1)), "bias": xp.sum(d, axis=(0, 1))}, dx / size

    return y * p["scale"] + p["bias"], back


def product(w, x):
    """A matrix times each row."""
    xp = array_namespace(x)
    rows = xp.reshape(x, (-1, x.shape[-1]))

    def back(d):
        flat = xp.reshape(d, (-1, d.shape[-1]))
        return rows.T @ flat, xp.reshape(flat @ w.T, x.shape)

    return xp.reshape(rows @ w, (*x.shape[:-1], w.shape[-1])), back


def attention(qkv):
    """Causal attention of several heads; queries, keys and values are side by side."""
    xp = array_namespace(qkv)
    b, t, _ = qkv.shape
    n = WIDTH // HEADS
    q, k, v = (qkv_ for qkv_ in xp.permute_dims(xp.reshape(qkv, (b, t, 3, HEADS, n)), (2, 0, 3, 1, 4)))
    past = xp.asarray(np.tril(np.ones((t, t), bool)))
    scores = xp.where(past, (q @ xp.matrix_transpose(k)) * n**-0.5, xp.asarray(-1e9, dtype=xp.float32))
    raised = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    weights = raised / xp.sum(raised, axis=-1, keepdims=True)
    joined = xp.reshape(xp.permute_dims(weights @ v, (0, 2, 1, 3)), (b, t, WIDTH))

    def back(d):
        dh = xp.permute_dims(xp.reshape(d, (b, t, HEADS, n)), (0, 2, 1, 3))
        dw = dh @ xp.matrix_transpose(v)
        ds = weights * (dw - xp.sum(dw * weights, axis=-1, keepdims=True)) * n**-0.5
        parts = xp.stack([ds @ k, xp.matrix_transpose(ds) @ q, xp.matrix_transpose(weights) @ dh])
        return xp.reshape(xp.permute_dims(parts, (1, 3, 0, 2, 4)), qkv.shape)

    return joined, back


def block(p, x):
    """Attention, then two dense layers, each added to what came in."""
    xp = array_namespace(x)
    h, back_norm1 = normed(p["norm1"], x)
    qkv, back_qkv = product(p["qkv"], h)
    a, back_attention = attention(qkv)
    o, back_out = product(p["out"], a)
    x = x + o
    h, back_norm2 = normed(p["norm2"], x)
    u, back_up = product(p["up"]["weight"], h)
    u = u + p["up"]["bias"]
    r = xp.where(u > 0, u, xp.zeros_like(u))
    o, back_down = product(p["down"]["weight"], r)

    def back(d):
        g = {"down": {"bias": xp.sum(d, axis=(0, 1))}, "up": {}}
        g["down"]["weight"], dr = back_down(d)
        du = xp.where(u > 0, dr, xp.zeros_like(dr))
        g["up"]["bias"] = xp.sum(du, axis=(0, 1))
        g["up"]["weight"], dh = back_up(du)
        g["norm2"], dx = back_norm2(dh)
        d = d + dx
        g["out"], da = back_out(d)
        g["qkv"], dh = back_qkv(back_attention(da))
        g["norm1"], dx = back_norm1(dh)
        return g, d + dx

    return x + o + p["down"]["bias"], back


def loss_and_grads(params, batch):
    """The mean negative log-likelihood of each next character, and its gradients."""
    xp = array_namespace(params["head"])
    vocabulary = params["words"].shape[0]
    one_hot = xp.asarray(np.eye(vocabulary, dtype=np.float32))
    given, wanted = (xp.take(one_hot, xp.reshape(xp.asarray(x), (-1,)), axis=0) for x in (batch[:, :-1], batch[:, 1:]))
    shape = (batch.shape[0], batch.shape[1] - 1, WIDTH)
    x, backs = xp.reshape(given @ params["words"], shape) + params["places"][: shape[1], :], []
    for p in params["blocks"]:
        x, back = block(p, x)
        backs.append(back)
    x, back_norm = normed(params["norm"], x)
    logits, back_head = product(params["head"], x)
    logits = xp.reshape(logits, (-1, vocabulary))
    logits = logits - xp.max(logits, axis=-1, keepdims=True)
    logs = logits - xp.log(xp.sum(xp.exp(logits), axis=-1, keepdims=True))
    count = logs.shape[0]
    grads = {"blocks": []}
    grads["head"], d = back_head(xp.reshape((xp.exp(logs) - wanted) / count, (*shape[:2], vocabulary)))
    grads["norm"], d = back_norm(d)
    for back in reversed(backs):
        g, d = back(d)
        grads["blocks"].insert(0, g)
    places = xp.sum(d, axis=0)
    grads["words"] = given.T @ xp.reshape(d, (-1, WIDTH))
    grads["places"] = xp.concat([places, xp.zeros((LENGTH - places.shape[0], WIDTH), dtype=xp.float32)])
    return -float(xp.sum(logs * wanted)) / count, grads


# ---- training -------------------------------------------------------------------------------------------------------


def mean(trees):
    """The mean of several trees of gradients, added in their order."""
    first = trees[0]
    if isinstance(first, dict):
        return {name: mean([tree[name] for tree in trees]) for name in first}
    if isinstance(first, list):
        return [mean(list(nodes)) for nodes in zip(*trees, strict=True)]
    total = first
    for x in trees[1:]:
        total = total + x
    return total / np.float32(len(trees))


def train(xp, rule, batch, steps, comm=None, shards=2, report=lambda step, loss: None):
    """Train on `batch` pieces of text in each step, one share of them for each rank; the losses.

    One process works through the shares of all ranks, one after the other.
    """
    letters, vocabulary = text()
    held = letters[: len(letters) * 9 // 10]
    params = init(xp, vocabulary)
    mine = range(shards) if comm is None else [comm.rank]
    shared = None if comm is None else ao.Ranks(comm, grads="mean")
    quiet = {"weight_decay": 0.0, "adapt": False} if isinstance(rule, ao.LAMB) else {"weight_decay": 0.0}
    opt = ao.Optimizer(params, rule, groups={"*bias": quiet, "*norm*": quiet}, clip_norm=1.0, comm=shared)
    losses = []
    for step in range(steps):
        rng = np.random.default_rng([1, step])
        starts = rng.integers(0, len(held) - LENGTH - 1, batch)
        pieces = np.split(held[starts[:, None] + np.arange(LENGTH + 1)], shards)
        found = [loss_and_grads(params, pieces[r]) for r in mine]
        params = opt.step(mean([grads for _, grads in found]))
        own = [loss for loss, _ in found]
        every = own if comm is None else comm.allgather(own[0])
        losses.append(sum(every) / shards)
        report(step, losses[-1])
    return losses, params


def unseen_loss(params, pieces=64):
    """The loss on the last tenth of the text, which training does not see."""
    letters, _ = text()
    unseen = letters[len(letters) * 9 // 10 :]
    starts = np.linspace(0, len(unseen) - LENGTH - 2, pieces).astype(np.int64)
    return loss_and_grads(params, unseen[starts[:, None] + np.arange(LENGTH + 1)])[0]


def rule_of(name, lr, steps, warmup=0.1):
    """A rule whose lr rises, and then falls to 0 along half a cosine."""
    rising = max(1, int(warmup * steps))
    rise, fall = ao.schedules.Warmup(lr, rising), ao.schedules.Cosine(lr, max(1, steps - rising))
    return getattr(ao, name)(lr=ao.schedules.Join([rise, fall], boundaries=[rising]), weight_decay=0.01)


def compare(path):
    """The same amount of text in steps of 16 pieces and of 256, under two rules: a picture."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, lr, batch in COMPARED:
        steps = PIECES // batch
        losses, params = train(np, rule_of(name, lr, steps), batch, steps)
        smooth = np.convolve(losses, np.ones(max(1, steps // 30)) / max(1, steps // 30), "valid")
        seen = (np.arange(len(smooth)) + steps - len(smooth)) * batch
        label = f"{name}, {batch} pieces a step: {unseen_loss(params):.2f} on unseen text"
        axes.plot(seen, smooth, label=label)
        print(label, flush=True)
    axes.set(xlabel="pieces of text seen", ylabel="training loss", title="The same text, in small and in large steps")
    axes.legend()
    figure.savefig(path, dpi=120)


def main():
    """Train, and print losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rule", default="LAMB", choices=["LAMB", "AdamW"])
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--batch", type=int, default=32, help="pieces of text in each step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=float, default=0.1, help="the share of steps in which lr rises")
    parser.add_argument("--library", default="numpy", help="whose arrays: numpy or cupy")
    parser.add_argument("--json", action="store_true", help="print all losses, as JSON")
    parser.add_argument("--compare", metavar="FILE", help="draw training in small and in large steps, and nothing else")
    given = parser.parse_args()
    if given.compare:
        compare(given.compare)
        return
    comm = None
    if "PMI_SIZE" in os.environ or "OMPI_COMM_WORLD_SIZE" in os.environ:  # mpiexec has started this
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
    first = comm is None or comm.rank == 0
    xp = array_namespace(__import__(given.library).zeros(1))
    rule = rule_of(given.rule, given.lr, given.steps, given.warmup)

    def report(step, loss):
        if first and not given.json and (step % 10 == 0 or step == given.steps - 1):
            print(f"step {step:4d}  loss {loss!r}", flush=True)

    shards = 2 if comm is None else comm.size
    losses, params = train(xp, rule, given.batch, given.steps, comm, shards, report)
    if first:
        after = unseen_loss(params)
        print(
            json.dumps({"losses": losses, "test": after}) if given.json else f"loss on unseen text {after!r}",
            flush=True,
        )


if __name__ == "__main__":
    main()
