import os
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from byte_lm.options import Options


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Shares compiled programs between this process, subprocesses and xdist's other workers."""
    session_folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        session_folder = session_folder.parent  # the workers' folders are in it
    cache = {
        "jax_compilation_cache_dir": str(session_folder / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in cache}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cache.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory):
    """Sixty small modules, and files that the corpus must exclude."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        path = folder / f"package_{i % 3}" / f"module_{i}.py"
        path.parent.mkdir(exist_ok=True)
        lines = [f"def f_{i}_{j}(x, y):\n    return x + {j} * y if x > {i} else f_{i}_{j}(y, x)\n" for j in range(8)]
        path.write_text(f'"""Module {i}."""\n\n' + "\n".join(lines))
    for name in ("test/test_a.py", "package_0/tests/b.py", "site-packages/c.py", "encodings/d.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"left out = {name!r}\n")
    (folder / "package_0" / "empty.py").write_text("\n")
    for i in range(30):
        (folder / "package_1" / f"copy_{i}.py").write_text("the same = text\n")
    return folder


def tiny(corpus_folder, out):
    """Options of a run that takes seconds, with both kinds of balancing."""
    return Options(
        width=16,
        heads=2,
        layers=2,
        experts=4,
        hidden=8,
        expert_bias=1e-2,
        steps=40,
        lr=1e-2,
        batch=2,
        seq=16,
        corpus=corpus_folder,
        out=out,
        save_every=5,
        held_out_bytes=200,
        sample_bytes=8,
    )


@pytest.fixture
def options(corpus_folder, tmp_path):
    return tiny(corpus_folder, tmp_path / "out")


@pytest.fixture(scope="module")
def module_options(corpus_folder, tmp_path_factory):
    return tiny(corpus_folder, tmp_path_factory.mktemp("run") / "out")
