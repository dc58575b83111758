# Verbs only. Each does the set-up it needs: a machine with Python 3.11 (to 3.13) and make is enough.
#   make setup       .venv with the tested versions          make lab         JupyterLab, strip on save
#   make repro       the whole study (dvc repro)             make render      the readable pages, tour too
#   make test        every test                              make bench       throughput and memory
#   make world       remake data/geo's questions             make base-model  retrain data/geo's model
# GPU: make setup EXTRAS=gpu,dev. Model hub allowed: make repro HF_HUB_OFFLINE=0.

EXTRAS ?= cpu,dev
CONSTRAINTS ?= $(if $(findstring gpu,$(EXTRAS)),constraints-gpu.txt,constraints.txt)
TEST_ARGS ?=

comma := ,
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# With both cores busy, spinning OpenMP threads made a 0.01 s step take 1.3 s.
export OMP_WAIT_POLICY := PASSIVE
# glibc gives large tensors back to the system and faults them in again: a third of a forward on CPU.
export MALLOC_MMAP_THRESHOLD_ := 8589934592
export MALLOC_TRIM_THRESHOLD_ := 17179869184
export MALLOC_TOP_PAD_ := 268435456
export TOKENIZERS_PARALLELISM := false
export PYTHONHASHSEED := 0
# The tiny profile touches no network; a paper run fetches its models with HF_HUB_OFFLINE=0.
export HF_HUB_OFFLINE ?= 1
export DVC_NO_ANALYTICS := 1
export HF_HUB_DISABLE_TELEMETRY := 1

.DEFAULT_GOAL := help
.PHONY: help setup repro test lab render bench world base-model

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(STAMP)

# The first Python of the list that runs and is 3.11 to 3.13 (a pyenv shim may exist and not run).
$(PY):
	@for python in python3.11 python3 python3.12 python3.13; do \
	  if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	      2>/dev/null; then \
	    echo "creating $(VENV) with $$python"; exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo "no Python 3.11, 3.12 or 3.13 found (python3 is: $$(python3 --version 2>&1));" \
	  "install one so that python3.11 or python3 starts it" >&2; exit 1

# Other extras' stamps go: cpu and gpu would overwrite each other's FAISS and numpy.
$(STAMP): pyproject.toml constraints.txt constraints-gpu.txt | $(PY)
	$(PY) -m pip install --disable-pip-version-check -q -e '.[$(EXTRAS)]' -c $(CONSTRAINTS)
	@rm -f $(VENV)/.installed-*
	@touch $@

# A killed dvc may leave its lock file empty, which the next one cannot read; empty, nobody holds it.
repro: $(STAMP)
	@find .dvc/tmp -name rwlock -size 0 -delete 2>/dev/null || true
	dvc repro

test: $(STAMP)
	$(PY) -m pytest $(TEST_ARGS)

# Loads notebooks/jupyter_server_config.py: what is saved has no outputs, what is on screen keeps them.
lab: $(STAMP)
	JUPYTER_CONFIG_PATH=notebooks $(VENV)/bin/jupyter lab

# The six stage pages are a DVC stage; the tour belongs to no stage and is run here.
render: $(STAMP)
	dvc repro render
	papermill -k python3 --log-output --no-progress-bar notebooks/00_tour.ipynb data/executed/00_tour.ipynb
	$(PY) notebooks/render.py 00_tour

bench: $(STAMP)
	@set -e; for script in bench/*.py; do echo "> $$script"; $(PY) $$script; done

world: $(STAMP)
	$(PY) data/geo/make_world.py

base-model: $(STAMP)
	$(PY) data/geo/make_base_model.py
