"""The transport "p2p" with tokens that are large enough for all overlaps, and in many steps."""

import pathlib
import subprocess
import sys

import large_ranks
import pytest
import torch


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_large_and_many_passes_have_the_bits_of_ring(tmp_path, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"FEWER THAN {ranks} GPUS FOUND: the transport p2p was not tested on so many")
    command = [sys.executable, str(pathlib.Path(large_ranks.__file__)), str(tmp_path)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), "300"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(ranks)
    ]
    try:
        output = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:  # an unfinished process would keep the others waiting
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(output)[-4000:]
