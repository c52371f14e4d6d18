"""The transport "p2p" of torch on GPUs, a process per GPU: large layers, many steps, and what programs do around it."""

import pathlib
import subprocess
import sys

import large_ranks
import pytest
import robust_ranks
import torch


def run(module, folder, ranks, *arguments):
    """Runs a module in a process per rank and returns what each printed."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"FEWER THAN {ranks} GPUS FOUND: the transport p2p was not tested on so many")
    command = [sys.executable, str(pathlib.Path(module.__file__)), str(folder)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(ranks)
    ]
    try:
        output = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:  # an unfinished process would keep the others waiting
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(output)[-4000:]
    return output


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_large_and_many_passes_have_the_bits_of_ring(tmp_path, ranks):
    run(large_ranks, tmp_path, ranks, "300")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_and_collectives_around_it_and_a_rank_that_ends(tmp_path, ranks):
    output = run(robust_ranks, tmp_path, ranks)
    assert all(
        f"exchange: the block of rank {ranks - 1}" in text or f"rank {ranks - 1} did not" in text
        for text in output[:-1]
    )
