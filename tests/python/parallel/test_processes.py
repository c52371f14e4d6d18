"""Several JAX processes on this host over Gloo: results and gradients against the oracle, moved checkpoints."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import in_processes
import jax
import numpy as np
import pytest
from in_processes import Case
from meshes import kept_and_dropped

import expert_parallel
from mesh import make_mesh, parse_mesh
from moe_cases import assert_layer, expected_layer

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"


def run(*arguments, processes=0, devices=1, gpus=False, **variables):
    """Runs a program, through the launcher for several processes; returns the finished process."""
    where = "--gpus" if gpus else f"--devices={devices}"
    launcher = [str(EXAMPLES / "launch.py"), f"--processes={processes}", where] if processes else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS" if gpus else "CUDA_VISIBLE_DEVICES", None)  # on CPUs the flags are those of conftest.py
    if not gpus:
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    environment |= variables
    command = [sys.executable, *launcher, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def losses_in(printed):
    """{step: loss} of a run of the example."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", printed)}


def losses(*arguments, **how):
    """The losses of a run in processes of its own."""
    result = run(EXAMPLES / "expert_parallel.py", *arguments, **how)
    assert result.returncode == 0, result.stdout + result.stderr
    return losses_in(result.stdout)


def assert_same(got, want, steps):
    assert sorted(got) == list(steps)
    np.testing.assert_allclose([got[s] for s in steps], [want[s] for s in steps], rtol=1e-5)


def check_case(case, paths):
    """Compares every process's gathered results with the oracle, given the assignments within capacity."""
    runs = [in_processes.load(path) for path in paths]
    arrays, options, kept, dropped = case.arrays(), case.options(), None, 0
    if case.capacity_factor is not None:
        sizes = parse_mesh(case.mesh)
        kept, dropped = kept_and_dropped(arrays, options, case.parallel, sizes["expert"], sizes["data"])
        assert dropped.sum() > 10
    expected = expected_layer(arrays, runs[0][2], kept=kept, **options)
    for result, gradients, _ in runs:
        assert sorted(gradients) == sorted(arrays)
        assert_layer(result, gradients, expected, case.dtype)
        np.testing.assert_array_equal(result.dropped_by_source, dropped)


@pytest.mark.parametrize(
    "processes,devices,cases",
    [
        (
            2,
            2,
            [
                Case("expert=4", "ring"),
                Case("expert=2,data=2", "all_to_all", "bfloat16", fsdp=True),
                Case("expert=2,tensor=2", "ragged", "bfloat16"),
                Case("expert=4", "ragged", capacity_factor=2.0, one_rank=True),
            ],
        ),
        (
            4,
            1,
            [
                Case("expert=4", "all_to_all"),
                Case("expert=4", "ring", "bfloat16"),
                Case("expert=2,data=2", "ragged", fsdp=True),
                Case("expert=4", "all_to_all", capacity_factor=2.0, one_rank=True),
                Case("expert=2,data=2", "ring", capacity_factor=0.5),
            ],
        ),
    ],
    ids=["2 processes of 2 devices", "4 processes of 1 device"],
)
def test_processes_give_the_results_and_gradients_of_one_device(tmp_path, processes, devices, cases):
    check_cases(tmp_path, cases, processes=processes, devices=devices)


ON_GPUS = {
    "2 GPUs": (
        2,
        [
            Case("expert=2", "ring"),
            Case("expert=2", "ring", "bfloat16"),
            Case("expert=2", "all_to_all", "bfloat16"),
            Case("expert=1,data=2", "all_to_all", "bfloat16", fsdp=True),
            Case("expert=1,tensor=2", "ring", "bfloat16"),
            Case("expert=2", "all_to_all", "bfloat16", capacity_factor=0.7),
            Case("expert=2", "p2p", "bfloat16"),
        ],
    ),
    "2 GPUs, ragged": (
        2,
        [
            Case("expert=2", "ragged", "bfloat16"),
            Case("expert=2", "ragged", "bfloat16", capacity_factor=1.0, one_rank=True),
        ],
    ),
    "4 GPUs": (
        4,
        [
            Case("expert=4", "ring", "bfloat16"),
            Case("expert=4", "all_to_all", "bfloat16"),
            Case("expert=2,data=2", "ring", "bfloat16", fsdp=True),
            Case("expert=2,tensor=2", "all_to_all", "bfloat16"),
            Case("expert=4", "all_to_all", "bfloat16", capacity_factor=2.0, one_rank=True),
            Case("expert=4", "p2p"),
            Case("expert=2,data=2", "p2p", "bfloat16", fsdp=True),
        ],
    ),
    "4 GPUs, ragged": (4, [Case("expert=4", "ragged", "bfloat16"), Case("expert=2,data=2", "ragged", fsdp=True)]),
}
#: XLA needs these flags for ragged_all_to_all between processes with one GPU each.
RAGGED_FLAGS = "--xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback=true"


@pytest.mark.gpu
@pytest.mark.parametrize("processes,cases", ON_GPUS.values(), ids=ON_GPUS)
def test_processes_of_a_gpu_each_give_the_results_and_gradients_of_one_device(gpu, tmp_path, processes, cases):
    if len(jax.devices("gpu")) < processes:
        pytest.skip(f"FEWER THAN {processes} GPUS FOUND: the layer was not tested on so many")
    flags = RAGGED_FLAGS if cases[0].transport == "ragged" else ""
    check_cases(tmp_path, cases, processes=processes, gpus=True, JAX_PLATFORMS="cuda", XLA_FLAGS=flags)


@pytest.mark.gpu
@pytest.mark.parametrize("processes", [2, 4])
def test_p2p_between_processes_has_the_bits_of_ring(gpu, tmp_path, processes):
    if len(jax.devices("gpu")) < processes:
        pytest.skip(f"FEWER THAN {processes} GPUS FOUND: the transport p2p was not tested on so many")
    cases = [
        case for case in ON_GPUS[f"{processes} GPUs"][1] if case.transport == "ring" and "expert=1" not in case.mesh
    ]
    cases.append(Case(f"expert={processes}", "ring", "bfloat16", capacity_factor=0.7))
    cases.append(Case(f"expert={processes}", "ring", "bfloat16", large=True))
    pairs = [dataclasses.replace(case, transport=name) for case in cases for name in ("ring", "p2p")]
    run_cases(tmp_path, pairs, processes=processes, gpus=True, JAX_PLATFORMS="cuda", XLA_FLAGS="")
    for index, case in enumerate(cases):
        for process in range(processes):
            with (
                np.load(tmp_path / f"{2 * index}.{process}.npz") as want,
                np.load(tmp_path / f"{2 * index + 1}.{process}.npz") as got,
            ):
                assert got.files == want.files
                for name in want.files:
                    assert got[name].tobytes() == want[name].tobytes(), f"{case}, process {process}: {name}"


@pytest.mark.gpu
@pytest.mark.parametrize("processes", [0, 2, 4], ids=["one process", "2 processes", "4 processes"])
def test_p2p_in_programs_and_after_the_end_of_a_process(gpu, processes):
    """See robust_programs.py. One process has all GPUs."""
    if len(jax.devices("gpu")) < max(processes, 2):
        pytest.skip(f"FEWER THAN {max(processes, 2)} GPUS FOUND: the transport p2p was not tested on so many")
    program = pathlib.Path(in_processes.__file__).with_name("robust_programs.py")
    result = run(program, processes=processes, gpus=True, JAX_PLATFORMS="cuda", XLA_FLAGS="")
    assert result.returncode == 0, result.stdout + result.stderr
    assert ("a_rank_ends, after" in result.stdout) == (processes > 0)


def run_cases(folder, cases, **how):
    """Runs all cases in processes, which save the results in the folder."""
    texts = [json.dumps(dataclasses.asdict(case)) for case in cases]
    result = run(in_processes.__file__, folder, *texts, **how)
    assert result.returncode == 0, result.stdout + result.stderr


def check_cases(folder, cases, *, processes, **how):
    """Runs all cases in processes and compares their results with the oracle."""
    run_cases(folder, cases, processes=processes, **how)
    for index, case in enumerate(cases):
        try:
            check_case(case, [folder / f"{index}.{process}.npz" for process in range(processes)])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_a_run_moves_between_processes_and_meshes(tmp_path, capsys):
    """Every leg resumes from the previous leg's checkpoint, which was saved on another mesh."""

    def losses_here(*arguments):
        expert_parallel.train(expert_parallel.parse([*arguments]), make_mesh(parse_mesh("")))
        return losses_in(capsys.readouterr().out)

    want = losses_here("--steps=7")
    assert want[6] < want[0]
    folder = f"--checkpoint={tmp_path / 'run'}"
    legs = [
        (range(0, 1), [], None),
        (range(1, 3), ["--mesh=expert=4", "--transport=all_to_all"], {"processes": 2, "devices": 2}),
        (range(3, 5), ["--mesh=expert=2,data=2", "--fsdp", "--transport=ragged"], {"processes": 2, "devices": 2}),
        (range(5, 6), ["--mesh=tensor=2,expert=2"], {}),
        (range(6, 7), [], None),
    ]
    for steps, mesh, how in legs:
        arguments = f"--steps={steps.stop}", folder, *mesh
        assert_same(losses_here(*arguments) if how is None else losses(*arguments, **how), want, steps)


def test_the_launcher_ends_all_when_one_fails(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "if os.environ['LAUNCH_PROCESS'] == '1':\n    print('out of luck'); sys.exit(3)\n"
        "time.sleep(250)\n"
    )
    result = run(program, processes=3)
    assert result.returncode == 3
    assert "launch: process 1 ended with status 3" in result.stderr and "out of luck" in result.stderr


@pytest.mark.parametrize(
    "visible,own", [({}, ["0", "1"]), ({"CUDA_VISIBLE_DEVICES": "5, GPU-3e,2"}, ["5", "GPU-3e"])], ids=["unset", "set"]
)
def test_every_process_has_one_of_the_visible_gpus(tmp_path, monkeypatch, visible, own):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib\n"
        "path = pathlib.Path(__file__).with_name(os.environ['LAUNCH_PROCESS'])\n"
        "path.write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    result = run(program, processes=2, gpus=True, **visible)
    assert result.returncode == 0, result.stderr
    assert [(tmp_path / str(process)).read_text() for process in range(2)] == own


@pytest.mark.parametrize("visible", ["", "3", "3,"])
def test_fewer_visible_gpus_than_processes(tmp_path, visible):
    result = run(tmp_path / "program.py", processes=2, gpus=True, CUDA_VISIBLE_DEVICES=visible)
    assert result.returncode == 2
    assert f"CUDA_VISIBLE_DEVICES: got {visible!r}, expected 2 GPUs, one per process" in result.stderr
