"""Raises errors or signals at any call within the package, and compares all that a step changes."""

import sys
import threading

import numpy as np

import arrayopt as ao
from arrayopt import interrupts
from arrayopt.arrays import to_host

HOME = ao.__file__.removesuffix("__init__.py")


LOCK = type(threading.RLock())


class Fault(Exception):
    """The error that tests raise on purpose."""


class Raising:
    """Counts the calls of the package's functions, and does something at one of them.

    Parameters
    ----------
    at : int or None
        The number of the call, from 0; None only counts.
    act : callable
        Called there. By default, a `Fault` is raised, except in a section that no signal interrupts.
    """

    def __init__(self, at=None, act=None):
        self.at, self.act, self.count = at, act, 0

    def __call__(self, frame, event, arg):
        if event not in ("call", "c_call") or not frame.f_code.co_filename.startswith(HOME):
            return
        if frame.f_code.co_filename == interrupts.__file__ or (self.act is None and interrupts._inside):
            return
        if event == "c_call" and isinstance(getattr(arg, "__self__", None), LOCK):
            return  # signals are handled after calls of locks, not before
        self.count += 1
        if self.at is not None and self.count > self.at:
            self.at = None
            if self.act is None:
                raise Fault
            self.act()

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


def held(opt):
    """All that a step changes, with arrays of NumPy."""
    saved = opt.state_dict()
    made = {name: to_host(p) for name, p in opt.params.items()}
    for name, about in saved["tensors"].items():
        made |= {(name, slot): to_host(x) for slot, x in about["slots"].items()} | {(name, "t"): about["t"]}
    return made | {"step": saved["step"], "extra": saved["extra"]}


def bits(held):
    """The result of `held` with the bytes of arrays, for comparison."""
    return {key: x.tobytes() if isinstance(x, np.ndarray) else x for key, x in held.items()}


def contents(opt):
    """All that a step changes, and its reports, as bytes."""
    reports = {name: dict(x) for name, x in opt.stats.items()} if opt.stats.enabled else None
    return bits(held(opt)) | {"stats": reports, "norm": opt.stats.global_norm}


def check(new, samples, act=None):
    """Raise an error at some of the calls within a step, and assert that the state is that before or after the step.

    The optimizer, and a new one that loads its state, must continue as if there had been no error.
    """
    opt, (last, *following) = new()
    before = contents(opt)
    with Raising(act=act or int) as calls:
        opt.step(last)
    after = contents(opt)
    for grads in following:
        opt.step(grads)
    end, found = contents(opt), set()
    for at in np.unique(np.linspace(0, calls.count - 1, samples).astype(int)).tolist():
        opt, _ = new()
        try:
            with Raising(at, act):
                opt.step(last)
        except Fault:
            pass
        now = contents(opt)
        assert now in (before, after), (at, [key for key in now if now[key] != before.get(key)])
        found.add(now == after)
        fresh, _ = new()
        fresh.load_state_dict(opt.state_dict())
        for name, p in opt.params.items():
            fresh.params[name][...] = p
        for each in (opt, fresh):
            for grads in following if now == after else [last, *following]:
                each.step(grads)
            assert contents(each) == end, at
    return found
