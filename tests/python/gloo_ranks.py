"""Starts the processes of a group, and ends those of Gloo groups."""

import os
import sys
import time

import torch.distributed as dist
import torch.multiprocessing

#: Modules that take long to import and start no threads.
IMPORTED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "anabranch.torch"]


def start(function, ranks, *arguments, timeout=300, imported=()):
    """Calls function(rank, *arguments) in `ranks` processes, which are forks of one that has imported torch.

    It imports the modules `imported` too, if it has not been started before. An error of a rank is raised here. After `timeout` seconds all ranks are ended, because one may wait for ever.
    """
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload([*IMPORTED, *imported])
    group = torch.multiprocessing.start_processes(
        function, arguments, nprocs=ranks, join=False, start_method="forkserver"
    )
    end = time.monotonic() + timeout
    while not group.join(max(end - time.monotonic(), 0)):  # returns whenever a rank ends
        if time.monotonic() > end:
            for process in group.processes:
                process.kill()
            raise TimeoutError(f"the ranks did not end in {timeout} s")


def leave():
    """Ends a rank's process with exit status 0, without the shutdown of the interpreter.

    A thread of Gloo releases the tensors of the last collective. If it waits for the GIL when the interpreter shuts
    down, the process aborts (https://github.com/pytorch/pytorch/pull/179291).
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
