"""`Saved`: saving and loading of an Optimizer, as a dict or a file."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from arrayopt.hyper import Hyper, checked_bool
from arrayopt.interrupts import uninterrupted
from arrayopt.params.parameters import Parameters
from arrayopt.ranks.alone import Alone
from arrayopt.ranks.collect import slot_of
from arrayopt.ranks.same import checksum
from arrayopt.rules.base import Rule
from arrayopt.saving import checkpoint, writing
from arrayopt.saving.later import Writer
from arrayopt.saving.paths import warn_of_name
from arrayopt.saving.state_dict import copy_of, dump, load
from arrayopt.state.run import Run
from arrayopt.state.tensors import Tensor
from arrayopt.step.given import GivenStep
from arrayopt.step.guard import Guard


def _said(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state with checksums in place of arrays, which ranks compare."""
    words: dict[str, Any] = {"the state": {name: x for name, x in saved.items() if name != "tensors"}}
    for name, about in saved["tensors"].items():
        words[f"the state of {name!r}"] = {**about, "slots": {k: checksum(x) for k, x in about["slots"].items()}}
    return words


class Saved:
    """The part of an optimizer that saves and loads; the base class of `Optimizer`."""

    __slots__ = ("_guard", "_parameters", "_rule", "_run", "_step", "_team", "_writer", "clip_norm")

    _guard: Guard
    _rule: Rule
    _run: Run
    _parameters: Parameters
    _step: GivenStep
    _team: Alone
    _writer: Writer
    clip_norm: Hyper | None

    @property
    def params(self) -> Any:
        """The parameters, in the structure given; for a list of group dicts, a flat list in their order.

        You may replace one array by another with the same shape, dtype, library and device, ``opt.params["w"] = w``, or
        all of them, ``opt.params = tree``. The next step starts from the new values.
        """
        self._arrive()
        return self._parameters.params

    def _arrive(self) -> None:
        """Wait for parameters that other ranks are still sending."""
        if self._step.is_arriving:
            with self._guard("Optimizer.params"):
                pass  # the guard has waited

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot of everything except the parameters: step count, hyper-parameters, and each tensor's count
        and slots.

        Returns
        -------
        dict
            Plain dicts, lists, numbers, *copies* of arrays, and schedules. It can be pickled if the schedules can.
        """
        with self._guard("Optimizer.state_dict"):
            self._step.release.check_whole("Optimizer.state_dict")
            self._together("Optimizer.state_dict")
            return self._dump(lambda x, slot: copy_of(self._team.collect(x, slot)), copy_of)

    def _dump(self, slots: Callable[[Tensor, str], Any], sums: Callable[[Any], Any] = lambda x: x) -> dict[str, Any]:
        """See `arrayopt.saving.state_dict.dump`."""
        return dump(self._run, self.clip_norm, self._rule, self._parameters.groups, self._step, slots, sums)

    def _params(self) -> dict[str, Any]:
        """Return the parameters by name; a placeholder for each that ranks have parts of."""
        return {tensor.name: slot_of(self._team, tensor, "p") for tensor in self._parameters.all}

    def _together(self, what: str, *, sums: bool = True) -> None:
        """Begin a call that all ranks make and that needs whole slots; with `sums`, also whole sums of gradients."""
        with self._team.warned(what):
            self._take_whole(what, sums=sums)
        self._team.agree(what)
        self._follow(what)

    def _take_whole(self, what: str, *, sums: bool = True) -> None:
        """Take up changes by the user; raise if slots, or sums of gradients, differ between ranks."""
        self._parameters.take_up()
        self._team.check_complete(self._parameters.all)
        own = self._team.sums or any(tensor.block is not None for tensor in self._parameters.all)
        if sums and own and self._step.accumulator.done:
            raise RuntimeError(
                f"{what}: each rank has accumulated other gradients, after {self._step.accumulator.done} micro-steps;"
                " save after the last one"
            )
        self._parameters.first.follow()

    def _no_sums(self, saved: dict[str, Any], what: str) -> None:
        """Raise ValueError if a state has sums of gradients, but each rank accumulates its own."""
        if self._team.sums and saved["extra"]["micro_steps"]:
            raise ValueError(
                f"{what}: was saved after {saved['extra']['micro_steps']} micro-steps, but here the ranks accumulate"
                " different gradients; save after the last micro-step"
            )

    def _restore(self, saved: dict[str, Any], what: str = "Optimizer.load_state_dict", **options: Any) -> None:
        """Load what `_dump` returned; see `arrayopt.saving.state_dict.load`."""
        with self._team.warned(what):
            self._parameters.take_up()
            put = load(saved, self._run, self._rule, self._parameters.groups, self._step, who=what, **options)
            self._no_sums(saved, what)
        self._team.agree(what, partial(_said, saved))
        with uninterrupted():
            self.clip_norm, self._rule = put()
            self._parameters.keep_state()
            self._follow(what, loaded=True)
            if self._team.size == 1:  # the user restores the parameters; ranks must load the same file
                self._team.mend()

    def _follow(self, what: str, *, loaded: bool = False) -> None:
        """Update initial slots of tensors that ranks have parts of and one rank updates; all ranks call it.

        After a load, initial slots follow the parameters until the first update; see `FirstValues`.
        """
        every, first = self._parameters.all, self._parameters.first
        self._team.bring_homes(what, every)
        if loaded:
            first.loaded({tensor: tensor.slots for tensor in every})
        else:
            first.follow(at_home=True)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a snapshot: state, counts and hyper-parameters become those of the saved optimizer.

        Parameters
        ----------
        saved : dict
            The result of `state_dict`, of an optimizer for tensors with the same names, shapes and dtypes, in the same
            groups, and rules with the same switches. The arrays are copied.

        Raises
        ------
        TypeError
            If `saved` is of another type.
        ValueError
            If it does not match, with a list of every mismatch. Nothing is changed.
        """
        with self._guard("Optimizer.load_state_dict", changes=True):
            self._team.renew(self._parameters.all)
            self._restore(saved)

    def save(self, path: str | os.PathLike[str], *, params: bool = True, wait: bool = True) -> Future[None] | None:
        """Write a checkpoint: a safetensors file from which `load` resumes with the same bits.

        Parameters
        ----------
        path : str or path
            The file, such as ``run.safetensors``; a name of another format, such as ``run.npz``, is warned of. It is
            replaced atomically when the new file is complete and on disk. If the process or the machine stops at any
            time, the complete old or new checkpoint exists.
        params : bool, default True
            Whether to include the parameters.
        wait : bool, default True
            Wait until the file is on disk. With False, arrays are copied to the host's memory, and a thread writes the
            file while the run goes on. The copies are as large as the file; over ranks, each has what it writes.

        Returns
        -------
        concurrent.futures.Future or None
            With ``wait=False``, a future: ``result()`` waits until the file is on disk, and raises what went wrong. The
            next `save` waits for the previous file, and raises its error if `result` was not called. With ranks, an
            error before the copies are made, such as a missing folder, is raised immediately.

        Raises
        ------
        OSError
            If the file cannot be written. The old file is not changed.
        TypeError, ValueError
            If `path` is not the path of a file, or the state contains something that a checkpoint cannot store.
        RuntimeError
            If another thread is using the Optimizer. The old file is not changed.
        ImportError
            Without safetensors, which `load` needs: ``pip install 'arrayopt[checkpoint]'``.

        Notes
        -----
        Waits for the device. Arrays are written one after the other, without a second copy of the state in memory. A
        replaced file keeps its mode; a new file has the mode that the umask allows. Schedules of `arrayopt.schedules`
        are saved; for other functions, only the name is saved, so `load` needs an optimizer that has them. Hooks and
        statistics are not saved. Needs a POSIX system.

        Examples
        --------
        >>> import numpy as np, arrayopt as ao
        >>> opt = ao.Optimizer({"w": np.ones(2)}, ao.LAMB(lr=0.1))
        >>> params = opt.step({"w": np.ones(2)})
        >>> opt.save("run.safetensors")
        >>> resumed = ao.Optimizer({"w": np.zeros(2)}, ao.LAMB())
        >>> params = resumed.load("run.safetensors")
        >>> bool(np.all(params["w"] == opt.params["w"])), resumed.step_count, resumed.lr
        (True, 1, 0.1)
        """
        for name, value in (("params", params), ("wait", wait)):
            checked_bool(f"Optimizer.save: `{name}`", value)
        with self._guard("Optimizer.save"):
            self._step.release.check_whole("Optimizer.save")
            with self._team.warned("Optimizer.save"):
                self._writer.check()
                self._take_whole("Optimizer.save")
                state = self._dump(partial(slot_of, self._team))
                file = writing.File(path, state, self._params() if params else None)
                warn_of_name("Optimizer.save", file.path)
            said = {"what there is to save": file.head, "`wait`": wait}
            self._team.agree("Optimizer.save", lambda: said)
            self._follow("Optimizer.save")
            if wait:
                self._team.agree("Optimizer.save", dict, file.write(self._team))
                return None
            from arrayopt.saving.behind import begin_behind  # for POSIX systems only

            return self._writer.start(begin_behind(file, self._team))

    def load(self, path: str | os.PathLike[str]) -> Any:
        """Load a checkpoint: state, counts, hyper-parameters and, if it contains them, the parameters.

        Parameters
        ----------
        path : str or path
            A file from `save`, of an optimizer for tensors with the same names, shapes and dtypes, in the same groups,
            and rules with the same switches. Libraries and devices may differ: arrays are converted to those of this
            optimizer.

        Returns
        -------
        params
            The parameters, in the structure given, as `step` returns them.

        Raises
        ------
        ValueError
            If the file is not a checkpoint, is damaged (all checksums are compared), or does not match, with a list of
            every mismatch. Nothing is changed.
        OSError, TypeError
            If it cannot be read (such as `FileNotFoundError`), or `path` is not a path.
        ImportError
            Without safetensors: ``pip install 'arrayopt[checkpoint]'``.
        """
        with self._guard("Optimizer.load", changes=True):
            self._writer.wait()  # the file may still be being written
            self._team.renew(self._parameters.all)
            with self._team.warned("Optimizer.load"):
                self._parameters.take_up()
                groups, tensors = self._parameters.groups, self._parameters.all
                live = self._dump(partial(slot_of, self._team))
                who, state, params, wrong, checksum = checkpoint.load(path, live, self._params())
                try:
                    put = load(state, self._run, self._rule, groups, self._step, who=who, wrong=wrong, copies=False)
                except TypeError as error:
                    raise ValueError(str(error)) from error
                self._no_sums(state, who)
                if self._team.torn is not None and not params:
                    raise ValueError(
                        f"{who}: the state has no parameters, and those of the ranks may differ: {self._team.torn}"
                    )
            self._team.agree(
                "Optimizer.load",
                lambda: {
                    "the file": {k: x for k, x in state.items() if k != "tensors"},
                    "the checksum of the file": checksum,
                },
            )
            with uninterrupted():  # all of it, or nothing
                self.clip_norm, self._rule = put()
                self._parameters.keep_state()
                for tensor in tensors if params else ():
                    tensor.put(None, params[tensor.name])
                self._parameters.settle()
                self._follow("Optimizer.load", loaded=True)
            self._team.mend()
            if params:
                self._parameters.replaced.agreed()
            return self.params
