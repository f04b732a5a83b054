# Everything runs in .venv, which the first target makes. Another interpreter: make PYTHON=python3.12
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
READY := .venv/.ready
TOOLS := .venv/.tools

.PHONY: all demo test slow lint format types bench train-tiny gpu-check images clean
all: $(TOOLS)

# Bytecode is compiled afterwards on all cores, which pip does on one; a package may hold files that are no Python.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is too old: Python 3.11 or later is needed (make PYTHON=...)"; exit 1; }
	@echo "Setting up .venv, once: $(2)."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) -c constraints.txt -e "$(1)"
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
endef

# What the engine needs.
$(READY): pyproject.toml constraints.txt
	$(call install,.,a minute or a few with PyTorch)
	@touch $(READY)

# What the tests and every extra need, in one go.
$(TOOLS): pyproject.toml constraints.txt
	$(call install,.[test],a few minutes with PyTorch and the tools)
	@touch $(READY) $(TOOLS)

demo: $(READY)
	$(BIN)/flash-dllm demo --device cpu

test: $(TOOLS)
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu and not browser"

slow: $(TOOLS)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "(slow or browser) and not gpu"

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(TOOLS)
	$(BIN)/mypy

# The bundled model's own tasks over every method that it runs with.
bench: $(READY)
	$(BIN)/flash-dllm compare --device cpu --tiny 40 \
	  --methods none+greedy,none+threshold,none+factor,prefix+threshold,dual+threshold

# Needs a GPU; see the model cards for what the bundled weights come from.
# Stages A, B and C, about 27 minutes; results in out/train-tiny. RESERVE: seconds of a stage kept for measuring.
BUDGET ?= 540
RESERVE ?= 60
TRAIN := RESERVE=$(RESERVE) PYTHON=$(CURDIR)/$(BIN)/python bash benchmarks/train_tiny.sh
train-tiny: $(READY)
	$(TRAIN) A $(BUDGET) out/train-tiny/A
	$(TRAIN) B $(BUDGET) out/train-tiny/B out/train-tiny/A
	$(TRAIN) C $(BUDGET) out/train-tiny/C out/train-tiny/B

# Needs a CUDA GPU: the tests marked gpu, then kernels, steps and the workload at the 8B shape; nine minutes at most.
gpu-check: $(READY)
	PYTHON=$(CURDIR)/$(BIN)/python bash benchmarks/gpu_check.sh out/gpu-check

images: $(TOOLS)
	$(BIN)/python docs/make_images.py
	$(BIN)/python docs/make_pages.py

clean:
	rm -rf .venv dist build
