# Most targets install what they need: system packages, if they have the permission, and a virtual environment in .venv.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc)

BIN := $(VENV)/bin
# scripts/setup installs packages without bytecode. Each of a hundred processes would compile their modules again.
export PYTHONDONTWRITEBYTECODE :=
SETUP := PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup

.PHONY: help demo test test-cpp test-sanitizers fuzz test-python test-clients test-torch-versions test-gpu bench-gpu lint format bench docs wheel release-check clean

help:
	@echo "make demo    train a small byte-level MoE language model on this machine (about 5 minutes); ARGS=--help: options"
	@echo "make test    set up, build, and run the C, C++ and Python tests and the sanitizer builds"
	@echo "make test-clients  test the adapters of examples/ with Megatron-Core and torchtitan; installs 3.6 GB"
	@echo "make test-torch-versions  test anabranch.torch with several releases of torch; installs 15 GB;"
	@echo "                TORCH_VERSIONS='2.9.1 2.15.0' selects them"
	@echo "make test-gpu   test the CUDA kernels on this machine's GPU: against the CPU and the oracle, and under"
	@echo "                compute-sanitizer; ARGS='cpp python memcheck racecheck portable' selects steps;"
	@echo "                ARCHITECTURES=80 builds Ampere's code only"
	@echo "make bench-gpu  time the CUDA kernels, torch, XLA and a copy (needs torch with CUDA);"
	@echo "                ARGS='layer --json out.json', ARGS=--help; test-gpu and bench-gpu use an existing build with"
	@echo "                BUILD=folder PYTHON=python3"
	@echo "make fuzz    call the C interface with random arguments: the CPU library under the sanitizers, then the CUDA"
	@echo "             code on an emulated GPU against the CPU library, under each CPU setting;"
	@echo "             SECONDS=600 per setting; SEED=1 (default: from the date)"
	@echo "make lint    check formatting, clang-tidy, ruff, mypy"
	@echo "make docs    build the site in build/site: guides, reference of both front ends and of C; check its links"
	@echo "make bench   time this library, torch and XLA on this machine; ARGS='router --json out.json', ARGS=--help"
	@echo "make wheel   build sdist and wheel in dist/, audit the wheel and use it without a compiler; CUDA=OFF: CPU only"
	@echo "make release-check  check versions, sdist, wheel, site, and the wheel with each Python and framework; CUDA=OFF"
	@echo "make format  format C++ and Python"
	@echo "make clean   remove build folders and the virtual environment"

demo:
	$(SETUP) demo
	PYTHONPATH=examples $(BIN)/python -m byte_lm $(ARGS)

# CPU-minutes (user and system) on two cores of an AMD EPYC, without a compiler cache. Beside other programs they are up
# to a half more.
#   lint              4.5   includes the package's first build
#   test-cpp         12.4   CUDA code for one architecture 3.9, emulated kernels and their tests 2.9 and to run them 1.8,
#                           other tests 2.0 and 0.3, CPU library 1.2
#   test-sanitizers   5     AddressSanitizer's build 2.9, its tests and fuzzing 1.1, ThreadSanitizer's 1.0
#   test-python      17.8   parallel 4.8, ops 4.3, layer 2.7, package 2.0, examples 1.3, transformers 1.1, te 0.8,
#                           bench 0.4, reference 0.3: a process per folder; make test-python collects all tests twice
# Measure a new test or kernel in the same way: `time make test-cpp`. `time` leaves out the ranks that
# tests/python/gloo_ranks.py starts, since they are children of a server for which pytest does not wait.
test:
	$(SETUP) test
	$(MAKE) --no-print-directory test-cpp test-sanitizers test-python

# Configures and builds a folder; cpp_tests also runs its tests.
define cpp_build
	$(BIN)/cmake -S . -B build/$(1) -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DANABRANCH_TESTS=ON \
	  -DANABRANCH_WERROR=ON $(2)
	$(BIN)/cmake --build build/$(1) -j $(JOBS) $(3)
endef
define cpp_tests
	$(call cpp_build,$(1),$(2))
	cd build/$(1) && $(3) $(abspath $(BIN)/ctest) -j $(JOBS) --output-on-failure --no-tests=error $(4)
endef

# If nvcc is installed, this is the only build of the CUDA code, for one architecture. Without a GPU its kernels never
# run, so they are not optimised. CUDA_OPTIMIZE=ON optimises them; then spilled registers are errors.
CUDA_OPTIMIZE = $(if $(shell command -v nvidia-smi),ON,OFF)
CUDA_TESTS = -DCMAKE_CUDA_ARCHITECTURES=90-real -DANABRANCH_CUDA_OPTIMIZE=$(CUDA_OPTIMIZE)

test-cpp:
	$(call cpp_tests,tests,$(CUDA_TESTS))

ASAN = -DANABRANCH_XLA=OFF -DANABRANCH_SANITIZE=address$(comma)undefined -DCMAKE_BUILD_TYPE=RelWithDebInfo

test-sanitizers:
	$(call cpp_tests,asan,$(ASAN),UBSAN_OPTIONS=print_stacktrace=1)
	$(call cpp_tests,tsan,-DANABRANCH_XLA=OFF -DANABRANCH_SANITIZE=thread -DANABRANCH_OPENMP=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo,,-R Thread)

# Case i of a run has the seed SEED + i; days are a million seeds apart. Add a seed that fails to tests/fuzz/seeds; the
# tests of both builds run these seeds first.
SECONDS = 60
SEED = $(shell date +%Y%m%d)000000

fuzz:
	$(SETUP) test
	$(call cpp_build,asan,$(ASAN),--target fuzz)
	$(call cpp_build,tests,$(CUDA_TESTS),--target emulated_fuzz)
	for setting in $(shell cat tests/fuzz/settings); do \
	  for program in build/asan/tests/fuzz/fuzz build/tests/tests/emulation/emulated_fuzz; do \
	    echo "$$setting $$program"; \
	    env $$setting UBSAN_OPTIONS=print_stacktrace=1 $$program --seconds $(SECONDS) --seed $(SEED) || exit 1; \
	  done; \
	done

# Tests the installed wheel's library. If the wheel has no CUDA library, the one that test-cpp built is used.
test-python:
	ANABRANCH_CUDA_LIBRARY="$${ANABRANCH_CUDA_LIBRARY:-$(abspath $(wildcard build/tests/libanabranch_cuda.so))}" \
	  $(BIN)/python -m pytest -n $(JOBS) -q $(ARGS)

# Uses its own environment, because these libraries require older versions of others. Fails if one can't be imported.
test-clients:
	PYTHON="$(PYTHON)" VENV="$(VENV)-clients" scripts/setup clients
	$(VENV)-clients/bin/python -c 'from importlib import import_module, metadata; \
	  [import_module(name) for name in ("megatron.core", "torchtitan.models.common.moe")]; \
	  [print(name, metadata.version(name)) for name in ("torch", "megatron-core", "torchtitan", "triton")]'
	$(VENV)-clients/bin/python -m pytest -q tests/python/clients $(ARGS)

# The oldest release, those that the project's machines have, and the newest.
TORCH_VERSIONS = 2.9.1 2.11.0 2.13.0 2.15.0

test-torch-versions:
	$(SETUP) test
	VENV="$(VENV)" ARGS="$(ARGS)" scripts/test-torch-versions $(TORCH_VERSIONS)

# CUDA: AUTO (ON if nvcc is installed), ON or OFF. PYTHONS="python3.12 python3.13": interpreters to test the wheel with.
wheel:
	$(SETUP) wheel
	VENV="$(VENV)" scripts/wheel

release-check:
	$(SETUP) wheel
	$(SETUP) docs
	VENV="$(VENV)" $(BIN)/python scripts/release_check.py

# BUILD=folder: an existing build, used with PYTHON's packages; nothing is installed or compiled.
# ARCHITECTURES=80: code for these architectures only, in the folder build/gpu-80.
test-gpu:
ifdef BUILD
	BUILD="$(BUILD)" PYTHON="$(PYTHON)" ARCHITECTURES="$(ARCHITECTURES)" scripts/test-gpu $(ARGS)
else
	$(SETUP) gpu
	VENV="$(VENV)" ARCHITECTURES="$(ARCHITECTURES)" scripts/test-gpu $(ARGS)
endif

bench-gpu:
ifdef BUILD
	ANABRANCH_LIBRARY="$(abspath $(BUILD))/libanabranch.so" \
	  ANABRANCH_CUDA_LIBRARY="$(abspath $(BUILD))/libanabranch_cuda.so" PYTHONPATH="python:$$PYTHONPATH" \
	  $(PYTHON) -m benchmarks $(ARGS) --device cuda
else
	$(SETUP) gpu
	$(BIN)/python -m benchmarks $(ARGS) --device cuda
endif

lint:
	$(SETUP) lint
	scripts/lint

format:
	$(SETUP) lint
	scripts/lint --fix

docs:
	$(SETUP) docs
	VENV="$(VENV)" scripts/docs

bench:
	$(SETUP) test
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf build $(VENV) $(VENV)-clients $(VENV)-torch

comma := ,
