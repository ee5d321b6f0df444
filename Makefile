# Every target sets up what it needs. Beforehand: Python 3.10 or newer and, for the torch_npu wheel, a C compiler.
#
#   make demo                 convert an embedded example model and verify it
#   make test                 lint and all tests
#   make lint                 ruff and mypy
#   make real CRI_GIT=DIR     acceptance on real input: a git directory of cann-recipes-infer
#   make bench                analyze + apply against parsing alone, as ratios
#   make clean                remove the environment and build output

PYTHON ?= python3
VENV ?= .venv
# The verify tests are child processes on one thread each: a worker per core halves the time.
PYTEST_ARGS ?= -n 2 --dist loadgroup
DEMO_ARGS ?=
PY = $(VENV)/bin/python

# Small matrices on few cores: more threads only cost. An installed torch_npu must not load itself with torch.
export OMP_NUM_THREADS ?= 1
export TORCH_DEVICE_BACKEND_AUTOLOAD = 0
export PYTHONDONTWRITEBYTECODE = 1

.PHONY: demo test lint real bench clean env env-demo

demo: env-demo
	@$(PY) -m kvskill demo $(DEMO_ARGS)

test: lint
	$(PY) -m pytest -v --no-header $(PYTEST_ARGS)

lint: env
	$(PY) -m ruff check .
	$(PY) -m mypy -p kvskill

real: env
	@test -n "$(CRI_GIT)" || { echo "usage: make real CRI_GIT=<git directory of cann-recipes-infer>"; exit 2; }
	$(PY) scripts/real.py --git "$(CRI_GIT)"

# torchfix wants an older libcst than kvskill: it gets an environment of its own, or is left out.
bench: env
	@test -x $(VENV)-bench/bin/torchfix || { $(PYTHON) -m venv $(VENV)-bench && \
	  $(VENV)-bench/bin/python -m pip install -qq --disable-pip-version-check torchfix; } || true
	$(PY) scripts/bench.py $$(test -x $(VENV)-bench/bin/torchfix && echo --torchfix $(VENV)-bench/bin/torchfix)

env:
	@$(PYTHON) scripts/make_env.py dev --venv $(VENV)

env-demo:
	@$(PYTHON) scripts/make_env.py demo --venv $(VENV)

clean:
	rm -rf $(VENV) $(VENV)-bench build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/kvskill.egg-info
