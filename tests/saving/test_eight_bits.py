"""State in the 8-bit forms of bitsandbytes and torchao: written, read again, and gone on from by their optimizers."""

import importlib.util
import sys
import types

import numpy as np
import pytest
import torch

import arrayopt as ao
import arrayopt.torch as door
from arrayopt.exchange.eight_bits import dynamic_map, in_codes
from tests.saving.test_importers import of_eight_bits
from tests.support.recorded import recorded

SHAPES = {"codes": (32, 160), "rest": (70, 77), "small": (10,)}
"""Of whole blocks of 256, with a short last block, and of too few elements for codes."""


class Standin:
    """torchao's tensor of codes, where torchao is not installed."""

    __module__ = "torchao.optim.subclass_8bit"

    def __init__(self, codes, scale, qmap, signed, dtype):
        self.codes, self.scale, self.qmap, self.signed, self.dtype = codes, scale, qmap, signed, dtype

    def dequantize(self):
        return (self.qmap[self.codes.long()].view(len(self.scale), -1) * self.scale[:, None]).view(self.codes.shape)


@pytest.fixture
def torchao(monkeypatch):
    if importlib.util.find_spec("torchao") is None:
        module = types.SimpleNamespace(OptimState8bit=Standin)
        for name in ("torchao", "torchao.optim", "torchao.optim.subclass_8bit"):
            monkeypatch.setitem(sys.modules, name, module)


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()}


def stepped(rule):
    opt = ao.Optimizer(drawn(0), rule, engine="numpy")
    for k in range(1, 4):
        opt.step(drawn(k))
    return opt


def codes(state):
    """The arrays of codes in a state dict, of all parameters."""
    found = []
    for each in state["state"].values():
        found += [getattr(x, "codes", x) for key, x in each.items() if key.startswith(("state", "exp_"))]
    return found


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("state_dtype", [None, "int8"])
@pytest.mark.parametrize("rule", [ao.AdamW, ao.Adam])
@pytest.mark.parametrize("form", ["bitsandbytes", "torchao"])
def test_there_and_back(form, rule, state_dtype):
    opt = stepped(rule(lr=0.1, weight_decay=0.0, state_dtype=state_dtype))
    saved = ao.to_torch(opt, form=form)
    uint8 = [x.dtype == torch.uint8 for x in codes(saved)]
    assert uint8 == [True, True, form == "bitsandbytes", form == "bitsandbytes", False, False]
    back = ao.Optimizer(drawn(0), rule(), engine="numpy")
    ao.load_torch(back, saved)
    assert (back.lr, back.state["rest"]["t"]) == (pytest.approx(0.1), 3)  # torchao's lr is in float32
    opt.state_dtype = None
    for name in SHAPES:
        for slot in "mv":
            x, y = opt.state[name][slot], back.state[name][slot]
            np.testing.assert_allclose(y, x, rtol=0, atol=0.008 * np.abs(x).max() * (name != "small"))
    again = ao.to_torch(back, form=form)
    assert all(torch.equal(x, y) for x, y in zip(codes(saved), codes(again), strict=True))


def test_codes_are_those_that_bitsandbytes_made():
    made = recorded("bitsandbytes", "bitsandbytes AdamW8bit", lambda: of_eight_bits("bitsandbytes", min_8bit_size=64))
    for i, signed in ((1, True), (2, False)):
        whole = torch.from_numpy(made[f"state{i}"]).to(torch.uint8)
        table, scales = (torch.from_numpy(made[f"{name}{i}"]).to(torch.float32) for name in ("qmap", "absmax"))
        x = (table[whole.reshape(-1).long()] * scales.repeat_interleave(256)[: whole.numel()]).reshape(whole.shape)
        for here, there in zip(in_codes(x, signed=signed), (whole, table, scales), strict=True):
            assert torch.equal(here, there)


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_has_256_numbers_finer_towards_zero(signed):
    table = dynamic_map(signed=signed)
    assert len(table.unique()) == 256
    assert (0.0 in table, table[-1], -1.0 in table) == (True, 1.0, False)
    steps = table.diff()
    assert steps[-2] > 50 * steps[torch.searchsorted(table, torch.tensor(0.0)) + 1]
    x = torch.cat([table * 3.0, table.flip(0) * 1e-6, -table])  # each block has its own scale
    found, _, scales = in_codes(x[: 512 if not signed else None], signed=signed)
    numbers = table[found.long()] * scales.repeat_interleave(256)
    torch.testing.assert_close(numbers[:512], x[:512], rtol=1e-6, atol=0)
    assert found[-1] == 0


def test_what_is_not_finite_makes_no_number():
    x = torch.ones(4, 256)
    x[0, 3], x[1, 3], x[2, 3] = torch.nan, torch.inf, -torch.inf
    found, table, scales = in_codes(x, signed=True)
    numbers = table[found.long()] * scales[:, None]
    assert not numbers[:3].isfinite().any()
    assert torch.equal(numbers[3], x[3])
    assert torch.equal(in_codes(torch.zeros(256), signed=True)[2], torch.zeros(1))


REFUSED = {
    "another rule": (
        lambda: stepped(ao.LAMB()),
        "bitsandbytes",
        TypeError,
        "with the rule AdamW, Adam for form='bitsandbytes'; got an Optimizer under LAMB",
    ),
    "an unknown form": (
        lambda: stepped(ao.AdamW()),
        "apex",
        ValueError,
        "`form` must be one of 'torch', 'bitsandbytes'",
    ),
    "amsgrad": (
        lambda: stepped(ao.AdamW(amsgrad=True)),
        "bitsandbytes",
        ValueError,
        "AdamW8bit of bitsandbytes has no counterpart for amsgrad=True in group 'all'",
    ),
    "decay": (
        lambda: stepped(ao.Adam(weight_decay=0.5)),
        "bitsandbytes",
        ValueError,
        "Adam8bit of bitsandbytes has no counterpart for weight_decay=0.5, which it applies as AdamW does",
    ),
    "complex": (
        lambda: ao.Optimizer({"z": np.ones(3, np.complex64)}, ao.AdamW()),
        "torchao",
        ValueError,
        "AdamW8bit of torchao has no counterpart for complex 'z' in group",
    ),
    "maximize": (
        lambda: door.AdamW([torch.nn.Parameter(torch.ones(3))], maximize=True),
        "torchao",
        ValueError,
        "no counterpart for maximize=True in group '0'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_they_lack_is_refused(case):
    made, form, kind, said = REFUSED[case]
    with pytest.raises(kind) as caught:
        ao.to_torch(made(), form=form)
    assert said in str(caught.value)


def test_decay_of_bitsandbytes_adam_is_that_of_adamw():
    saved = ao.to_torch(stepped(ao.AdamW(weight_decay=0.5)), form="bitsandbytes")
    del saved["param_groups"][0]["decoupled_weight_decay"]
    with pytest.raises(ValueError, match=r"weight_decay=0.5 in group 0, which bitsandbytes' Adam applies as AdamW"):
        ao.load_torch(stepped(ao.Adam()), saved)
    saved["param_groups"][0]["weight_decay"] = 0.0
    ao.load_torch(stepped(ao.Adam()), saved)


@pytest.mark.parametrize("nested", [True, False])
def test_codes_that_were_read_are_not_kept_beside_the_slots(nested):
    """They were taken for entries of other code, which the next state dict has too."""
    saved = ao.to_torch(stepped(ao.AdamW(lr=0.1)), form="bitsandbytes")
    if nested:
        saved["state"] = {
            i: {"step": x.pop("step"), "__bnb_optimizer_quant_state__": x} for i, x in saved["state"].items()
        }
    opt = door.AdamW([torch.nn.Parameter(torch.from_numpy(x)) for x in drawn(0).values()])
    ao.load_torch(opt, saved, names=["0", "1", "2"])
    assert [sorted(map(str, x)) for x in opt.state.values()] == [["m", "step", "v"]] * 3
    assert sorted(ao.to_torch(opt)["state"][0]) == ["exp_avg", "exp_avg_sq", "step"]


@pytest.mark.parametrize("form", ["bitsandbytes", "torchao"])
def test_their_optimizers_go_on(form):
    theirs = pytest.importorskip(f"{form}.optim").AdamW8bit
    opt = stepped(ao.AdamW(lr=0.01))
    params = [torch.nn.Parameter(torch.tensor(x)) for x in opt.params.values()]
    there = theirs(params)
    there.load_state_dict(ao.to_torch(opt, form=form))
    ao.load_torch(opt, there.state_dict())
    for p, g in zip(params, drawn(4).values(), strict=True):
        p.grad = torch.from_numpy(g)
    there.step()
    for p, x in zip(params, opt.step(drawn(4)).values(), strict=True):
        np.testing.assert_allclose(p.detach().numpy(), x, rtol=1e-5, atol=1e-6)


def test_torchao_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim.subclass_8bit", None)
    with pytest.raises(ImportError, match="form='torchao' needs torchao; pip install torchao"):
        ao.to_torch(ao.Optimizer({"w": np.ones(3)}, ao.AdamW()), form="torchao")
