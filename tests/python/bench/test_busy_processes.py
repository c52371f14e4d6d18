"""Processes that run beside a benchmark."""

import subprocess

from anabranch import __main__ as command


def test_busy_processes_run_until_the_benchmark_ends(monkeypatch):
    started = []

    class Process(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    def run_bench(operations, **_):
        assert operations == ("router",)
        assert [process.poll() for process in started] == [None, None]
        return 0

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(command, "run_bench", run_bench)
    assert command.main(["bench", "router", "--busy", "2"]) == 0
    assert None not in [process.returncode for process in started] and len(started) == 2
