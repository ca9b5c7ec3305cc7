# Two commands do all the set-up: `make demo` and `make test`. Both need Python 3.11+, make and the package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without its compiled files each new process would compile JAX, which takes longer than what most tests do with it.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/.tools/bin:$(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test quick cluster lint style types types-of-bench collected prose docs lowest bench tools generate pictures lock clean chaos
.DEFAULT_GOAL := test

$(VENV)/.installed: requirements.lock pyproject.toml operator/backstay_cluster/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "backstay needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	awk '/^[^ #]/ { uv = /^uv==/ } uv' requirements.lock > $(VENV)/uv.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(VENV)/uv.txt
	@# uv takes a tenth of the time, and does not know the settings of pip, such as another package index.
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e operator/backstay_cluster -e .
	touch $@

demo: $(VENV)/.installed  ## the main job on the embedded cluster, live
	$(BIN)/backstay run examples/digits/job.yaml

lint: style types types-of-bench  ## may run with -j2
style: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
# .ci/run names a cache that other clones use too: it may be damaged. Each of both has its own, as their options differ.
types: $(VENV)/.installed
	$(BIN)/mypy || { [ -n "$$MYPY_CACHE_DIR" ] && rm -rf "$$MYPY_CACHE_DIR" && $(BIN)/mypy; }
types-of-bench: export MYPY_CACHE_DIR := $(if $(MYPY_CACHE_DIR),$(MYPY_CACHE_DIR)-of-bench)
types-of-bench: CHECK := $(BIN)/mypy --config-file bench/mypy.ini
types-of-bench: $(VENV)/.installed
	$(CHECK) || { [ -n "$$MYPY_CACHE_DIR" ] && rm -rf "$$MYPY_CACHE_DIR" && $(CHECK); }

collected: $(VENV)/.installed  ## compiles all tests, so that not each process of pytest-xdist does it
	@mkdir -p .cache
	@$(BIN)/python -m pytest --collect-only -qq > .cache/collected || { cat .cache/collected; exit 1; }

prose: $(VENV)/.installed  ## the wording of docs, docstrings, comments and messages; lowers tests/prose/exempt.txt
	$(BIN)/python tests/prose/lint.py

docs: $(VENV)/.installed  ## the documentation's site, in site/; a broken link is an error
	$(BIN)/zensical build --strict --clean

quick: $(VENV)/.installed  ## the tests of the pure parts: coordinator, planner, spec; half a minute
	$(BIN)/python -m pytest -n auto -q tests/coordination tests/plan tests/spec

cluster: $(VENV)/.installed  ## the tests of the embedded cluster alone
	$(BIN)/python -m pytest -n auto -q -c pyproject.toml --rootdir . operator/backstay_cluster/tests

test:  ## everything that CI runs, the cheap stages first; ends with a summary
	$(PYTHON) tests/stages.py

LOWEST := .venv-lowest
$(LOWEST)/.installed: requirements.lowest.lock $(VENV)/.installed
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)
	$(BIN)/uv pip sync --quiet --python $(LOWEST)/bin/python --require-hashes requirements.lowest.lock
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --no-deps --no-build-isolation -e operator/backstay_cluster -e .
	touch $@

lowest: $(LOWEST)/.installed  ## a part of the tests with the lowest versions that pyproject.toml allows; records a pass
	PATH="$(CURDIR)/$(LOWEST)/bin:$$PATH" $(LOWEST)/bin/python tests/twice.py $(REPORT) -n auto tests/rpc tests/cli tests/checkpoint/test_checkpoints.py tests/runtime/test_jobs.py \
	  tests/trainer_math/test_engine.py tests/operator/test_process.py
	[ -n "$(REPORT)" ] || sha256sum requirements.lowest.lock > tests/lowest.txt

generate: $(VENV)/.installed  ## the CRD, the protobuf code, the dashboards, pages of the docs; tests hold that they are fresh
	$(BIN)/python -m backstay_spec.crd > crds/backstay.dev_trainingjobs.yaml
	cp crds/backstay.dev_trainingjobs.yaml helm/backstay/crds/
	sh operator/backstay_rpc/generate.sh
	$(BIN)/python helm/dashboards
	$(BIN)/python docs/generate.py

pictures: $(VENV)/.installed  ## docs/pictures: dashboards and a timeline of real runs; needs helm and prometheus; 4 minutes
	$(BIN)/python docs/pictures.py

SECONDS_OF_CHAOS ?= 600
SEED ?= 0
STANDBYS ?= 1

bench: $(VENV)/.installed  ## the design's numbers, measured here, without bench/torchft.py; about 12 minutes
	$(BIN)/python bench/wire.py
	$(BIN)/python bench/step.py
	$(BIN)/python bench/spans.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/apply.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/standby.py
	$(BIN)/python bench/throughput.py
	$(BIN)/python bench/recovery.py --standbys $(STANDBYS)
	$(BIN)/python bench/refill.py
	$(BIN)/python bench/goodput.py --standbys $(STANDBYS)
	$(BIN)/python bench/jobs.py
	$(BIN)/python bench/start.py

chaos: $(VENV)/.installed  ## deaths at chosen moments; ten minutes of faults by a seed; the quiet runs; what became of it; 45 minutes
	$(BIN)/python bench/moments.py
	$(BIN)/python bench/moments.py --pods-per-rank 2
	$(BIN)/python bench/chaos.py --seconds $(SECONDS_OF_CHAOS) --seed $(SEED) --standbys $(STANDBYS)
	$(BIN)/python bench/chaos.py --seconds $(SECONDS_OF_CHAOS) --seed $(SEED) --pods-per-rank 2

tools:
	sh tests/tools.sh

# The embedded cluster is installed from its folder, without a hash.
PROJECTS := pyproject.toml operator/backstay_cluster/pyproject.toml
OWN := --no-emit-package backstay-cluster
lock:  ## rewrites requirements.lock from both files pyproject.toml
	$(PYTHON) -m venv .lock-venv && .lock-venv/bin/pip install --quiet uv
	.lock-venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url $(OWN) --extra dev -o requirements.lock $(PROJECTS) requirements.build.in
	.lock-venv/bin/uv pip compile --quiet --universal --python-version 3.11 --resolution lowest-direct --generate-hashes --no-emit-index-url $(OWN) --extra test -o requirements.lowest.lock $(PROJECTS) requirements.build.in
	PATH="$(CURDIR)/.lock-venv/bin:$(PATH)" sh images/locks/update.sh
	rm -rf .lock-venv

clean:
	rm -rf $(VENV) $(LOWEST) site .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
