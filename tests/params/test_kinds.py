"""Arrays that are not what they seem are refused by name, as parameters and as gradients; views are resolved."""

import ml_dtypes
import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.support.engines import COMPILED, EVERY, SLOW, TORCH, each
from tests.support.refusals import raises
from tests.support.slow import marked


class Own(torch.Tensor):
    """A tensor with a meaning of its own."""


class Table(np.ndarray):
    """An array with a meaning of its own."""


def flattened():
    made = torch.nn.Parameter(torch.ones(2, 3))
    made._fsdp_flattened = True
    return made


def distributed():
    """A DTensor, without processes: only its class is asked for."""
    from torch.distributed.tensor import DTensor

    return torch.Tensor._make_wrapper_subclass(DTensor, (2, 3))


def freed():
    x = torch.ones(2, 3)
    x.untyped_storage().resize_(0)
    return x


BOTH = {
    "np.ma": (lambda: np.ma.masked_array(np.ones((2, 3))), "'w' is a masked array", "x.filled(0)"),
    "np.matrix": (lambda: np.matrix(np.ones((2, 3))), "'w' is a numpy.matrix", "np.asarray(x)"),
    "an array's subclass": (lambda: np.ones((2, 3)).view(Table), "Table, a kind of array", "np.asarray(x)"),
    "byte order": (lambda: np.ones((2, 3), ">f8"), "'w' is in another byte order", "newbyteorder"),
    "complex byte order": (lambda: np.ones((2, 3), ">c16"), "'w' is in another byte order", "newbyteorder"),
    "sparse": (lambda: torch.ones(2, 3).to_sparse(), "layout torch.sparse_coo", "x.to_dense()"),
    "sparse rows": (lambda: torch.ones(2, 3).to_sparse_csr(), "layout torch.sparse_csr", "x.to_dense()"),
    "a tensor's subclass": (lambda: torch.ones(2, 3).as_subclass(Own), "Own, a kind of tensor", "plain torch.Tensor"),
    "freed": (freed, "'w' is a tensor without memory", "pass a copy"),
    "zeros without memory": (lambda: torch._efficientzerotensor((2, 3)), "'w' is a tensor without memory", "a copy"),
    "DTensor": (distributed, "'w' is a DTensor", "x.to_local()"),
}
WRITTEN = {
    "FSDP": (flattened, "'w' is a piece of FSDP's flat parameter", "FSDP2"),
    "meta": (lambda: torch.ones(2, 3, device="meta"), "'w' is a tensor on the meta device", "to_empty"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
        "'w' is a nested tensor",
        "x.unbind()",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8),
        "'w' is a quantized tensor",
        "x.dequantize()",
    ),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "UninitializedParameter", "a plain torch.Tensor"),
    "conjugate": (lambda: torch.ones(2, 3, dtype=torch.complex64).conj(), "conjugate or negative", "resolve_conj"),
    "negative": (lambda: torch.ones(2, 3, dtype=torch.complex64).conj().imag, "negative of its memory", "resolve_neg"),
    "inference": (torch.inference_mode()(lambda: torch.ones(2, 3)), "torch.inference_mode", "x.clone()"),
}
ENGINES = ["auto", "array_api"]


@pytest.mark.filterwarnings("ignore")  # of NumPy on matrices, of PyTorch on sparse, lazy and quantized tensors
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("make", "what", "todo"), [*BOTH.values(), *WRITTEN.values()], ids=[*BOTH, *WRITTEN])
def test_parameters_are_refused_by_name(engine, make, what, todo):
    made = make()
    raises(lambda: ao.Optimizer({"w": made}, ao.AdamW(), engine=engine), TypeError, "Optimizer: 'w' is ", what, todo)


@pytest.mark.filterwarnings("ignore")
@each(["auto", *EVERY])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("make", "what", "todo"), BOTH.values(), ids=BOTH)
def test_gradients_are_refused_by_name_before_anything_is_written(engine, make, what, todo, steps):
    g = make()
    is_torch = isinstance(g, torch.Tensor)
    if is_torch and engine in EVERY and engine not in TORCH:
        return
    new = torch.ones if is_torch else np.ones
    b, w = new(4), new((2, 3))
    opt = ao.Optimizer({"b": b, "w": w}, ao.SGD(lr=1.0), engine=engine)
    for _ in range(steps):
        opt.step({"b": new(4), "w": new((2, 3))})
    words = "Optimizer.step: grads do not match params: ", what, todo
    raises(lambda: opt.step({"b": new(4), "w": g}), ValueError, *words)
    assert b.tolist() == [1.0 - steps] * 4
    assert opt.step_count == steps


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("engine", "options"),
    marked(
        [(e, options) for e in TORCH for options in ({}, {"clip_norm": 0.5}, {"accumulate": 2})],
        lambda engine, options: engine not in SLOW and (engine not in COMPILED or not options),
    ),
)
def test_conjugate_and_negative_gradients_simply_work(engine, steps, options):
    def train(turn):
        z = torch.arange(6.0).reshape(2, 3).to(torch.complex64) * (1 + 2j)
        x = torch.arange(6.0).reshape(2, 3)
        g = torch.complex(x + 1.0, x - 2.0)
        opt = ao.Optimizer({"z": z, "x": x}, ao.LAMB(lr=0.1), engine=engine, **options)
        for _ in range(steps * 2):
            opt.step({"z": g.clone(), "x": g.real.clone()})
        for _ in range(2):
            opt.step({"z": turn(g.conj()), "x": turn(g.conj().imag)})
        return z, x

    for found, expected in zip(
        train(lambda v: v), train(lambda v: v.resolve_conj().resolve_neg().clone()), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("engine", ["auto", "array_api"])
@pytest.mark.parametrize("first", [np.ones(2), torch.ones(2), torch.ones(2, dtype=torch.complex64)])
def test_views_are_resolved_among_gradients_of_other_kinds(engine, first):
    z = torch.zeros(2, dtype=torch.complex64)
    view, other = torch.tensor([1 + 2j, 3 - 1j]).conj(), 1j * first if "complex" in str(first.dtype) else first
    opt = ao.Optimizer({"a": first * 0, "z": z}, ao.SGD(lr=1.0), engine=engine)
    for _ in range(3):  # of which later ones are familiar
        opt.step({"a": other, "z": view})
    assert torch.equal(opt.params["z"], -3 * view.resolve_conj())


@pytest.mark.parametrize("engine", ["auto", "array_api"])
def test_views_are_resolved_among_gradients_that_some_steps_leave_out(engine):
    z, one, view = torch.zeros(2, dtype=torch.complex64), torch.ones(2), torch.tensor([1 + 2j, 3 - 1j]).conj()
    opt = ao.Optimizer({"a": torch.zeros(2), "z": z}, ao.SGD(lr=1.0), engine=engine)
    for a, z_grad in ((one, view), (one.double(), None), (one.double(), view)):
        opt.step({"a": a, "z": z_grad})
    assert torch.equal(z, -2 * view.resolve_conj())


@pytest.mark.parametrize("engine", TORCH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_parameter_that_becomes_a_lazy_view_is_noticed(engine, dtype):
    """Its memory stays, and engines would write the negative of what they mean."""
    w, grads = torch.nn.Parameter(torch.ones(3, dtype=dtype)), {"w": torch.zeros(3, dtype=dtype)}
    opt = ao.Optimizer({"w": w}, ao.SGD(lr=0.1), engine=engine)
    opt.step(grads)
    w.data = torch._neg_view(w.data)
    raises(lambda: opt.step(grads), TypeError, "'w' is a view", "resolve_neg")


def test_views_in_a_state_are_resolved():
    rule = ao.SGD(lr=1.0, momentum=0.5, state_dtype="bfloat16", master_weights=False)
    view = torch._neg_view(torch.ones(2, dtype=torch.bfloat16))
    for w in (torch.ones(2).bfloat16(), np.ones(2, ml_dtypes.bfloat16)):
        opt = ao.Optimizer({"w": w}, rule)
        saved = opt.state_dict()
        saved["tensors"]["w"]["slots"]["buf"] = view
        opt.load_state_dict(saved)
        assert opt.state["w"]["buf"].tolist() == [-1.0, -1.0]


def test_memory_maps_and_parameters_of_modules_are_fine(tmp_path):
    w = np.memmap(tmp_path / "w", np.float64, "w+", shape=(2,))
    opt = ao.Optimizer({"w": w}, ao.SGD(lr=1.0, momentum=0.5, ema_decay=0.5))
    opt.step({"w": np.ones(2)})
    assert w.tolist() == [-1.0, -1.0]
    assert {type(x) for x in (opt.averaged()["w"], opt.state["w"]["buf"], opt.state["w"]["ema"])} == {np.ndarray}
    m = torch.nn.Linear(2, 2)
    ao.Optimizer(list(m.parameters()), ao.SGD(lr=1.0)).step([torch.ones(2, 2), torch.ones(2)])


def test_the_functional_form_knows_masked_arrays_too():
    g = np.ma.masked_array(np.ones(2))
    raises(lambda: ao.init(ao.SGD(lr=1.0), {"w": g}), TypeError, "init: 'w' is a masked array")
    w = {"w": np.ones(2)}
    state = ao.init(ao.SGD(lr=1.0), w)
    raises(lambda: ao.update(ao.SGD(lr=1.0), w, {"w": g}, state), ValueError, "'w' is a masked array")


def test_no_mask_is_lost_silently_in_a_state():
    opt = ao.Optimizer({"w": np.ones(2)}, ao.AdamW())
    masked, saved = np.ma.masked_array(np.ones(2)), opt.state_dict()
    raises(lambda: opt.state["w"].__setitem__("m", masked), TypeError, "must be a numpy array; got a MaskedArray")
    saved["tensors"]["w"]["slots"]["m"] = masked
    raises(lambda: opt.load_state_dict(saved), ValueError, "MaskedArray as m of 'w', expected an array")


def test_the_functional_form_takes_what_torch_func_traces():
    rule = ao.SGD(lr=0.5)

    def loss(w):
        new, _ = ao.update(rule, {"w": w}, {"w": w * w}, rule.init({"w": w}))
        return new["w"].sum()

    assert torch.func.grad(loss)(torch.ones(2)).tolist() == [0.0, 0.0]
