# Every target works on a fresh machine: it creates .venv first. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
TIMED := tools/timed.sh
CPP_SOURCES = $(shell find scheduler_core cache_runtime model_runtime -name '*.cpp' -o -name '*.h')

.PHONY: help setup setup-browser timed-setup timed-browser runtime system build demo test test-cpp test-tsan test-python nightly fuzz soak audit check-image check lint format bench-failover bench-handoff bench-leases bench-mesh bench-model bench-placement bench-scheduler bench-sim bench-states bench-trace bench-verify image test-image clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## create .venv with everything for development
	@tools/setup.sh dev

setup-browser: setup ## add Chromium and playwright, for the tests of the router's page in a browser
	@tools/setup_browser.sh

runtime:
	@tools/setup.sh runtime

system:
	@tools/setup.sh system

build: setup ## rebuild native code and protos if they changed

demo: runtime ## prefill on one node, decode on another, watch it (MODEL=path)
	@$(BIN)/pdmesh demo $(if $(MODEL),--model $(MODEL))

test: system ## run all tests, those in C++ under sanitizers
	@$(MAKE) --no-print-directory -j3 ready-test-python beside-test-cpp

# What waits for no clock runs beside the Python tests, which wait a lot and have deadlines to keep: with the least
# priority, it takes what those leave of the processors. Its output is shown in one piece.
beside-%:
	@mkdir -p build
	@nice -n 19 $(MAKE) --no-print-directory $* >build/$*.log 2>&1; status=$$?; cat build/$*.log; exit $$status

# What needs the environment begins when it is there; the C++ tests need none, and so fill what it leaves of the
# processors while it waits for packages.
ready-%: timed-setup
	@$(MAKE) --no-print-directory $*

timed-setup:
	@$(TIMED) setup tools/setup.sh dev

# Installing a browser is nothing that tests do to a machine of somebody's unasked.
timed-browser: timed-setup
	@$(if $(CI),$(TIMED) browser tools/setup_browser.sh)

ready-test-python ready-beside-check-image: timed-browser

CPP_TEST_BUILD = cmake -S . -DPDMESH_BUILD_MODULES=OFF -DPDMESH_BUILD_TESTS=ON

test-cpp: system test-tsan ## the tests in C++ alone, under ASan and UBSan, and those of threads under TSan
	@mkdir -p build
	@$(CPP_TEST_BUILD) -B build/cpp-tests -DPDMESH_SANITIZE=ON >build/cpp-tests.log 2>&1 || { cat build/cpp-tests.log; exit 1; }
	@$(TIMED) 'ASan build' cmake --build build/cpp-tests --target cpp_tests -j "$$(nproc)" >>build/cpp-tests.log 2>&1 \
	  || { tail -50 build/cpp-tests.log; exit 1; }
	@$(TIMED) 'ASan tests' ctest --test-dir build/cpp-tests -j "$$(nproc)" --output-on-failure --no-tests=error --progress

# Where the kernel spreads addresses wider than the thread sanitizer can map, it runs without randomisation.
test-tsan: system # the C++ tests in which memory passes between threads, under the thread sanitizer
	@mkdir -p build
	@$(CPP_TEST_BUILD) -B build/tsan -DPDMESH_SANITIZE=thread >build/tsan.log 2>&1 || { cat build/tsan.log; exit 1; }
	@$(TIMED) 'TSan build' cmake --build build/tsan --target thread_tests -j "$$(nproc)" >>build/tsan.log 2>&1 \
	  || { tail -50 build/tsan.log; exit 1; }
	@$(TIMED) 'TSan tests' $$(setarch -R true 2>/dev/null && echo setarch -R) \
	  ctest --test-dir build/tsan -L threads --output-on-failure --no-tests=error --progress

# More workers than CPUs, or more threads than one in each of them, would make meshes late for their deadlines. What
# order the files run in, and what stays together: tests/support/sharing.py.
test-python: setup ## the tests in Python alone
	@OMP_NUM_THREADS=1 $(TIMED) 'Python tests' $(BIN)/python -m pytest --numprocesses "$$(nproc)" --dist loadfile \
	  --no-loadscope-reorder --costs 20

FUZZ_INPUTS ?= 3000000
nightly: setup ## hours of looking for trouble: fuzzed conversations, long random histories
	@$(MAKE) --no-print-directory test-cpp
	@ASAN_OPTIONS=abort_on_error=1 UBSAN_OPTIONS=abort_on_error=1 build/cpp-tests/scheduler_core/scheduler_fuzz $(FUZZ_INPUTS)
	@PDMESH_HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest tests/unit/scheduler_core

FUZZ_FACTOR ?= 100
fuzz: setup ## hostile messages to every RPC, FUZZ_FACTOR (100) times as many as on a commit, others each time
	@PDMESH_FUZZ_FACTOR=$(FUZZ_FACTOR) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/fuzz --timeout 0

SOAK_MINUTES ?= 60
soak: setup ## simulated meshes with fresh seeds for an hour (SOAK_MINUTES)
	@$(BIN)/pdmesh sim --minutes $(SOAK_MINUTES) --jobs "$$(nproc)"

audit: setup ## known vulnerabilities of what is installed, where a database of them can be reached
	@$(TIMED) audit $(BIN)/python tools/audit.py

check-image: setup ## build the image of routers and run it as the chart does, where containers can be built and run
	@$(TIMED) image tools/check_image.sh

lint: setup ## linters and types
	@$(TIMED) ruff $(BIN)/ruff check .
	@$(TIMED) 'ruff format' $(BIN)/ruff format --check .
	@$(TIMED) mypy $(BIN)/mypy
	@$(TIMED) 'import contracts' $(BIN)/lint-imports --no-logo
	@$(TIMED) clang-format $(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)
	@$(TIMED) buf $(BIN)/buf lint protos

check: ## what CI runs: linters, types, all tests, an image; at its end, what each part took and what could not be checked
	@mkdir -p build && rm -f build/times
	@started=$$SECONDS; tools/setup.sh system \
	  && $(MAKE) --no-print-directory -j6 ready-test-python ready-beside-lint ready-beside-audit ready-beside-check-image \
	    beside-test-cpp; status=$$?; \
	  tools/timed.sh --table "$$((SECONDS - started))"; exit $$status

format: setup ## rewrite sources in the project's format
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP_SOURCES)

bench-failover: setup ## what the death of a node costs a client
	@$(BIN)/python bench/bench_failover.py

bench-handoff: setup ## data planes beside memcpy between processes and a plain socket
	@$(BIN)/python bench/bench_handoff.py

bench-leases: setup ## what leases add to a handoff
	@$(BIN)/python bench/bench_leases.py

bench-mesh: setup ## latency and throughput: disaggregated, fused, transformers
	@$(BIN)/python bench/bench_mesh.py

bench-model: setup ## prefill and decode rates beside other engines (MODEL=path, ENGINES=those to compare, LLAMA_CPP and VLLM=pythons that have them)
	@$(BIN)/python bench/bench_model.py $(if $(MODEL),--model $(MODEL)) $(if $(ENGINES),--engines "$(ENGINES)") $(if $(LLAMA_CPP),--llama-cpp $(LLAMA_CPP)) $(if $(VLLM),--vllm $(VLLM))

bench-placement: setup ## hit rates and time to first token per placement policy, simulated (TRACES=folder of public traces)
	@$(BIN)/python bench/bench_placement.py $(if $(TRACES),--traces $(TRACES))

bench-states: setup ## kernels of recurrent layers beside what the machine allows
	@$(BIN)/python bench/bench_states.py

bench-scheduler: setup ## CPU time per scheduled request
	@$(BIN)/python bench/bench_scheduler.py

bench-sim: setup ## CPU time of a simulated mesh, and how many a minute
	@$(BIN)/python bench/bench_sim.py

bench-verify: setup ## what checksums add to a transfer
	@$(BIN)/python bench/bench_verify.py

bench-trace: setup ## prefix hit rates and speed on public request traces (TRACES=folder)
	@$(BIN)/python bench/bench_trace.py $(if $(TRACES),--traces $(TRACES))

BUILDER ?= $(firstword $(foreach program,buildah podman docker,$(shell command -v $(program))))
IMAGE ?= pdmesh
TARGET ?= node
image: ## build the container image (TARGET=router for the small one; IMAGE=name, BUILDER=buildah|podman|docker, BUILD_ARGS)
	@test -n "$(BUILDER)" || { echo "make image: none of buildah, podman and docker is installed" >&2; exit 1; }
	@$(BUILDER) build -f Containerfile --target $(TARGET) -t $(IMAGE) $(BUILD_ARGS) .

test-image: setup ## run what the chart renders in containers of IMAGE (needs podman)
	@PDMESH_TEST_IMAGE=$(IMAGE) $(BIN)/python -m pytest tests/helm/test_containers.py tests/helm/test_router_container.py

clean: ## remove everything that was built
	rm -rf .venv build
