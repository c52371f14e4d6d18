"""Prints the folder of dnnl's CMake package that the wheel onednn-devel-cpu-gomp installed beside this interpreter."""

import importlib.metadata
import sys

try:
    files = importlib.metadata.files("onednn-devel-cpu-gomp") or []
except importlib.metadata.PackageNotFoundError:
    sys.exit(
        "onednn-devel-cpu-gomp is not installed beside this Python. Install it (x86-64 only), or use a system oneDNN "
        "with -DANABRANCH_ONEDNN=SYSTEM."
    )
configs = [file.locate() for file in files if file.name == "dnnl-config.cmake"]
if not configs:
    sys.exit("onednn-devel-cpu-gomp is installed but contains no dnnl-config.cmake")
print(configs[0].resolve().parent)
