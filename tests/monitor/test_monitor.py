"""A monitor keeps what opt.stats would say, at the chosen steps only, and writes and draws it."""

import contextlib
import copy
import csv
import gc
import json
import math
import os
import pickle
import weakref

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines.array_api import engine as array_api
from arrayopt.monitor import figure as monitor_figure
from arrayopt.monitor import monitor as monitor_module
from tests.support.engines import each_engine

NAMES = ("w", "b")


def params_and_grads(backend, steps=6):
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 3), "b": (3,)}
    params = {name: backend.array(rng.standard_normal(shape)) for name, shape in shapes.items()}
    grads = [{n: backend.array(rng.standard_normal(shape)) for n, shape in shapes.items()} for _ in range(steps)]
    return params, grads


def host_optimizer(rule=None, **options):
    params = {"w": np.full((2, 2), 2.0), "b": np.zeros(2)}
    return ao.Optimizer(params, rule or ao.LAMB(lr=0.1), engine="array_api", **options)


GRADS = {"w": np.ones((2, 2)), "b": np.ones(2)}


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_it_keeps_what_the_statistics_say(backend):
    schedule = ao.schedules.Cosine(0.1, 10)
    groups = {"b": {"lr": 0.01}}
    watched, witness = (
        ao.Optimizer(params_and_grads(backend)[0], ao.LAMB(lr=schedule), groups=groups, stats=stats)
        for stats in (False, True)
    )
    monitor = ao.Monitor(watched, every=2)
    expected = []
    for step, grads in enumerate(params_and_grads(backend)[1]):
        watched.step(grads)
        witness.step(grads)
        if step % 2 == 0:
            rates = {"w": schedule(step), "b": 0.01}
            report = witness.stats.read()
            expected += [(step, name, {"lr": rates[name], **report[name]}) for name in NAMES]
    for row, (step, name, wanted) in zip(monitor.read(), expected, strict=True):
        assert (row.pop("step"), row.pop("tensor")) == (step, name)
        assert row.pop("update_ratio") == row["update_norm"] / row["param_norm"]
        # without statistics between, an engine may round the parameters otherwise
        assert row == pytest.approx(wanted, rel=1e-5)


def test_the_users_statistics_are_left_as_they_are():
    off, on = host_optimizer(), host_optimizer(stats=True)
    for opt in (off, on):
        ao.Monitor(opt, every=2)
        for _ in range(2):
            opt.step(GRADS)
    with pytest.raises(RuntimeError, match="nothing is recorded"):
        off.stats.read()
    assert set(on.stats.read()) == set(NAMES)
    assert off.stats.global_norm is None


def test_statistics_are_collected_at_the_chosen_steps_only(monkeypatch):
    asked = []
    prepare = array_api.ArrayAPI.prepare

    def noted(self, bucket, step, meetings=()):
        asked.append(step.stats)
        return prepare(self, bucket, step, meetings)

    monkeypatch.setattr(array_api.ArrayAPI, "prepare", noted)
    opt = host_optimizer()
    monitor = ao.Monitor(opt, steps=lambda step: step in (1, 4))
    for _ in range(6):
        opt.step(GRADS)
    assert asked == [False, True, False, False, True, False]
    assert sorted({row["step"] for row in monitor.read()}) == [1, 4]


@pytest.mark.parametrize("engine", ["array_api", "numpy"])
@pytest.mark.parametrize(
    "rule", [ao.LAMB(lr=0.1), ao.CAME(lr=0.1), ao.SGD(lr=0.1, momentum=0.9)], ids=["LAMB", "CAME", "SGD"]
)
def test_it_changes_no_bit_of_the_parameters(engine, rule):
    rng = np.random.default_rng(0)
    start = rng.standard_normal((70, 33)).astype(np.float32)
    plain, watched = (ao.Optimizer(start.copy(), rule, engine=engine) for _ in range(2))
    monitor = ao.Monitor(watched, every=2)
    for _ in range(5):
        g = rng.standard_normal(start.shape).astype(np.float32)
        plain.step(g)
        watched.step(g)
    np.testing.assert_array_equal(plain.params, watched.params)
    assert len(monitor) == 3


def test_a_step_that_failed_is_kept_once_when_it_is_made():
    opt = host_optimizer()
    monitor = ao.Monitor(opt)
    with pytest.raises(ValueError, match="missing"):
        opt.step({"w": GRADS["w"]})
    opt.step(GRADS)
    assert [(row["step"], row["tensor"]) for row in monitor.read()] == [(0, "w"), (0, "b")]


def test_the_rate_is_that_of_the_step_also_where_a_later_hook_sets_it():
    opt = host_optimizer()
    monitor = ao.Monitor(opt)
    opt.before_step(lambda opt, grads: setattr(opt, "lr", 0.5))
    opt.step(GRADS)
    assert {row["lr"] for row in monitor.read()} == {0.5}


def test_a_rule_without_rate_and_tensors_left_out():
    opt = host_optimizer(ao.Adafactor())
    monitor = ao.Monitor(opt)
    opt.step({"w": GRADS["w"], "b": None})
    (row,) = monitor.read()
    assert row["tensor"] == "w"
    assert "lr" not in row


def test_ratios_to_nothing():
    opt = ao.Optimizer({"zero": np.zeros(2), "still": np.zeros(2)}, ao.SGD(lr=0.1), engine="array_api")
    monitor = ao.Monitor(opt)
    opt.step({"zero": np.ones(2), "still": np.zeros(2)})
    moved, still = (row["update_ratio"] for row in monitor.read())
    assert moved == math.inf
    assert math.isnan(still)


def test_nothing_is_read_before_it_is_asked_for(monkeypatch):
    read = []
    monkeypatch.setattr("arrayopt.monitor.record._floats", lambda report: read.append(report) or {"x": 1.0})
    opt = host_optimizer()
    monitor = ao.Monitor(opt)
    opt.step(GRADS)
    assert read == []
    monitor.read()
    monitor.read()
    assert len(read) == len(NAMES)  # once for each


def test_only_the_last_are_held_and_closing_stops():
    opt = host_optimizer()
    monitor = ao.Monitor(opt, keep=2)
    for _ in range(4):
        opt.step(GRADS)
    assert len(monitor) == 2
    assert monitor.series("trust_ratio")["w"][0] == [2, 3]
    monitor.close()
    opt.step(GRADS)
    assert monitor.series("trust_ratio")["w"][0] == [2, 3]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copied_optimizer_has_a_monitor_of_its_own(copied):
    opt = host_optimizer()
    monitor = ao.Monitor(opt)
    other, watching = copied((opt, monitor))
    other.step(GRADS)
    assert (len(monitor), len(watching)) == (0, 1)
    watching.close()
    other.step(GRADS)
    opt.step(GRADS)
    assert (len(monitor), len(watching)) == (1, 1)


def held(engine, attach, *, fails):
    """Weak references to a state's array and to a monitor, after some steps, when all that was made is let go."""
    opt = ao.Optimizer({"w": np.full((2, 2), 2.0), "b": np.zeros(2)}, ao.LAMB(lr=0.1), engine=engine)
    monitor = attach(opt)
    for _ in range(2):
        opt.step(GRADS)
    if fails:
        with contextlib.suppress(ValueError):
            opt.step({"w": GRADS["w"]})
    return [weakref.ref(opt.state["w"]["m"]), *([] if monitor is None else [weakref.ref(monitor)])]


@pytest.mark.parametrize("fails", [False, True], ids=["", "after a step that failed"])
@each_engine
@pytest.mark.parametrize("attach", [lambda opt: None, ao.Monitor], ids=["alone", "watched"])
def test_who_is_let_go_is_free_at_once(engine, attach, fails):
    """Without the garbage collector, which may come late, while a device's memory is full."""
    gc.disable()
    try:
        assert [x() for x in held(engine, attach, fails=fails)] == [None] * (1 + (attach is ao.Monitor))
    finally:
        gc.enable()


def test_a_monitor_that_is_let_go_watches_no_more():
    opt = host_optimizer()
    monitor = ao.Monitor(opt)
    opt.step(GRADS)
    del monitor
    opt.step(GRADS)
    assert not opt.stats.wanted
    other = copy.deepcopy(opt)
    other.step(GRADS)


def test_a_monitor_outlives_its_optimizer():
    monitor = ao.Monitor(opt := host_optimizer())
    opt.step(GRADS)
    del opt
    assert len(monitor.read()) == 2
    monitor.close()


# ---- what is given away ----------------------------------------------------------------------------------------------


@pytest.fixture
def monitor():
    opt = host_optimizer(groups={"b": {"lr": 0.2}})
    watching = ao.Monitor(opt)
    for _ in range(3):
        opt.step(GRADS)
    return watching


def test_a_csv_file_reads_back_without_loss(monitor, tmp_path):
    monitor.to_csv(tmp_path / "run.csv")
    with open(tmp_path / "run.csv", newline="") as file:
        rows = [
            {k: x if k == "tensor" else int(x) if k == "step" else float(x) for k, x in row.items()}
            for row in csv.DictReader(file)
        ]
    assert rows == monitor.read()
    assert rows[1]["update_ratio"] == math.inf  # b began at zero


def test_a_jsonl_file_is_strict_json(monitor, tmp_path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    monitor.to_jsonl(tmp_path / "run.jsonl")
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert rows[1].pop("update_ratio") is None
    expected = monitor.read()
    del expected[1]["update_ratio"]
    assert rows == expected


@pytest.mark.parametrize("write", [ao.Monitor.to_csv, ao.Monitor.to_jsonl], ids=["csv", "jsonl"])
def test_a_file_is_replaced_whole_and_keeps_its_mode(monitor, write, tmp_path, monkeypatch):
    path = tmp_path / "run"
    path.write_text("old")
    path.chmod(0o640)
    with monkeypatch.context() as patch:
        patch.setattr(monitor_module, "quantities_of", lambda rows: ["lr"])  # a table has no room for the others
        patch.setattr(monitor_module.json, "dumps", refuse)
        with pytest.raises(ValueError, match=r"not JSON|fields not in"):
            write(monitor, path)
    assert path.read_text() == "old"
    write(monitor, path)
    assert (path.read_text() != "old", oct(path.stat().st_mode & 0o777)) == (True, "0o640")
    assert list(tmp_path.iterdir()) == [path]


def refuse(*args, **options):
    raise ValueError("not JSON")


@pytest.mark.parametrize("write", [ao.Monitor.to_csv, ao.Monitor.to_jsonl, lambda m, path: m.plot(path=path)])
def test_a_pipe_is_not_opened(monitor, write, tmp_path):
    """It would wait for ever."""
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"Monitor\.\w+: .* is not a regular file"):
        write(monitor, tmp_path / "x.png")


def test_a_sink_has_each_step_once(monitor):
    got = []
    monitor.send(lambda step, values: got.append((step, values)))
    monitor.send(lambda step, values: got.append((step, values)))
    assert [step for step, _ in got] == [0, 1, 2]
    assert got[1][1]["w/trust_ratio"] == monitor.series("trust_ratio")["w"][1][1]
    assert got[1][1]["b/lr"] == 0.2


def test_a_sink_that_fails_is_given_the_step_again(monitor):
    def broken(step, values):
        raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        monitor.send(broken)
    got = []
    monitor.send(lambda step, values: got.append(step))
    assert got == [0, 1, 2]


def test_a_sink_has_the_steps_that_are_made_again_after_a_load():
    opt, grads, got = ao.Optimizer({"w": np.ones(2)}, ao.SGD(lr=0.1)), {"w": np.ones(2)}, []
    monitor, saved = ao.Monitor(opt), opt.state_dict()
    for _ in range(2):
        opt.load_state_dict(saved)
        for _ in range(2):
            opt.step(grads)
        monitor.send(lambda step, values: got.append(step))
    assert got == [0, 1, 0, 1]


def test_the_request_of_a_step_that_has_failed_is_not_met_by_another_one():
    opt, grads = ao.Optimizer({"w": np.ones(2)}, ao.SGD(lr=0.1)), {"w": np.ones(2)}
    monitor = ao.Monitor(opt, every=2)
    with pytest.raises(ValueError, match="grads do not match"):
        opt.step({"w": np.ones(3)})
    opt.advance()
    opt.launch(grads)  # step 0, of which monitors know nothing
    opt.step(grads)
    opt.step(grads)
    assert [row["step"] for row in monitor.read()] == [2]


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def test_maps_have_the_values_the_names_and_fitting_colours(monitor, tmp_path):
    colors = pytest.importorskip("matplotlib.colors", reason="draws with Matplotlib")
    figure = monitor.plot(["lr", "trust_ratio"], path=tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    maps = [axis for axis in figure.axes if axis.get_title(loc="left")]
    assert [axis.get_title(loc="left") for axis in maps] == ["learning rate", "trust ratio"]
    assert [label.get_text() for label in maps[0].get_yticklabels()] == ["w", "b"]
    (mesh,) = maps[1].collections
    expected = [values for _, values in monitor.series("trust_ratio").values()]
    np.testing.assert_array_equal(np.reshape(mesh.get_array(), (2, 3)), expected)
    assert type(maps[0].collections[0].norm) is colors.Normalize  # 0.1 and 0.2 are not far apart
    assert len(monitor.plot().axes) == 2 * 6  # a map and its scale for each quantity


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1e-3, 1.0], "LogNorm"),
        ([0.0, 1e-3, 1.0], "LogNorm"),
        ([-1.0, 100.0], "Normalize"),
        ([1.0, 2.0], "Normalize"),
        ([3.0, 3.0], "Normalize"),
        ([0.0], "Normalize"),
        ([math.nan, math.inf], "Normalize"),
    ],
)
def test_colours_are_logarithmic_where_that_makes_sense(values, kind):
    pytest.importorskip("matplotlib", reason="draws with Matplotlib")
    norm = monitor_figure._norm(np.ma.masked_invalid(values))
    assert type(norm).__name__ == kind
    assert norm.vmin < norm.vmax


def test_many_layers_and_one_step_are_drawn():
    pytest.importorskip("matplotlib", reason="draws with Matplotlib")
    opt = ao.Optimizer([np.ones(1) for _ in range(150)], ao.SGD(lr=0.1), engine="array_api")
    monitor = ao.Monitor(opt)
    opt.step([np.ones(1)] * 150)
    figure = monitor.plot("grad_norm")
    assert len(figure.axes[0].get_yticks()) == 50
    assert figure.get_figheight() < 15


# ---- wrong use -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"every": 0}, ValueError, "`every` must be at least 1; got 0"),
        ({"every": 1.5}, TypeError, "`every` must be an integer; got 1.5"),
        ({"keep": 0}, ValueError, "`keep` must be at least 1"),
        ({"steps": 3}, TypeError, "`steps` must be a function of the step; got 3"),
    ],
)
def test_wrong_options(options, error, said):
    opt = host_optimizer()
    with pytest.raises(error, match=said):
        ao.Monitor(opt, **options)
    opt.step(GRADS)  # nothing has been attached


def test_wrong_optimizer_and_quantity(monitor):
    with pytest.raises(TypeError, match="`opt` must be an Optimizer"):
        ao.Monitor({})
    with pytest.raises(ValueError, match="there is no quantity 'loss'; there are lr, trust_ratio"):
        monitor.series("loss")
    with pytest.raises(ValueError, match="there is no quantity 'loss'"):
        monitor.plot("loss")
    with pytest.raises(ValueError, match="no step has been recorded yet"):
        ao.Monitor(host_optimizer()).plot()
