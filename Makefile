# Kinlens: the same few commands for people and CI. `make help` lists them.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
UV     := $(BIN)/uv
CONSTRAINTS ?= --constraint constraints.txt
PIP    := $(UV) pip install --python $(BIN)/python $(CONSTRAINTS)

# If it is set, each of a hundred processes compiles torch again, which takes ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install install-gpu demo demo-check demo-inshop demo-sop demo-grocery test test-lowest soak scale-check mutations check check-types docs format bench clean

help:  ## List the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

$(VENV)/.uv:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, found " + sys.version.split()[0] + "; call make with PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	@touch $@

$(VENV)/.training: $(VENV)/.uv pyproject.toml constraints.txt
	$(PIP) --quiet --editable '.[cpu,training]'
	@touch $@

EXTRAS = cpu training otel milvus open-clip openvino parquet heif ray hub mcp langchain
COMMA := ,
LISTED = $(subst $() ,$(COMMA),$(EXTRAS))

$(VENV)/.dev: $(VENV)/.uv pyproject.toml constraints.txt
	$(PIP) --quiet --group dev --group milvus-server --editable '.[$(LISTED)]'
	@touch $(VENV)/.training $@

install: $(VENV)/.training  ## Install everything that a user needs into .venv
	@echo "done: source $(BIN)/activate"

install-gpu:  ## As install, with FAISS and ONNX Runtime for CUDA 13, into .venv-gpu
	@$(MAKE) --no-print-directory VENV=.venv-gpu .venv-gpu/.gpu
	@echo "done: source .venv-gpu/bin/activate"

$(VENV)/.gpu: $(VENV)/.uv pyproject.toml constraints.txt
	$(PIP) --quiet --editable '.[gpu,training]'
	@touch $@

DEMO = $(BIN)/python scripts/demo.py
DEMO_FLAGS = $(if $(IMAGES),--images '$(IMAGES)') $(if $(BUNDLE),--bundle '$(BUNDLE)') $(if $(WEIGHTS),--weights '$(WEIGHTS)') $(if $(PORT),--port $(PORT))
SET_FLAGS = $(if $(ROOT),--root '$(ROOT)') $(DEMO_FLAGS) $(if $(QUERIES),--queries $(QUERIES)) $(if $(PARTIAL),--allow-partial) $(if $(CHECK),--check)

demo: $(VENV)/.training  ## Train, index and serve a small catalogue; IMAGES=/my/shop [BUNDLE=/my/bundle, WEIGHTS=/my/mobilenet_v2.pth, PORT=8001] for yours
	$(DEMO) $(DEMO_FLAGS)

demo-check: $(VENV)/.training  ## The demo without a person; exits with status 0 or 1
	$(DEMO) --check $(DEMO_FLAGS)

demo-inshop: $(VENV)/.training  ## In-Shop as a shop: ROOT=/data/in-shop [BUNDLE=, WEIGHTS=, QUERIES=, PORT=]
	$(DEMO) in-shop $(SET_FLAGS)

demo-sop: $(VENV)/.training  ## Stanford Online Products as a shop: ROOT=/data/Stanford_Online_Products
	$(DEMO) sop $(SET_FLAGS)

demo-grocery: $(VENV)/.training  ## Groceries as a shop: ROOT=/data/GroceryStoreDataset/dataset
	$(DEMO) grocery $(SET_FLAGS)

TEST_PROCESSES ?= 4
STATIC = tests/test_architecture.py tests/test_words.py tests/test_site.py

test: $(VENV)/.dev  ## All tests but the long ones and those of make check, in TEST_PROCESSES=4 processes
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations 10 \
	  $(STATIC:%=--ignore %)

LOWEST = .venv-lowest/lowest.txt

# Only what we require ourselves is constrained: the packages of the tests choose what they need.
test-lowest: $(VENV)/.uv  ## All tests with the oldest version of each package that pyproject.toml allows
	@mkdir -p $(dir $(LOWEST))
	$(UV) pip compile --quiet pyproject.toml $(EXTRAS:%=--extra %) --resolution lowest-direct \
	  --python-version 3.11 --no-header --annotation-style line --output-file $(LOWEST).all
	grep '(pyproject.toml)' $(LOWEST).all >$(LOWEST)
	@$(MAKE) --no-print-directory test VENV=.venv-lowest CONSTRAINTS='--constraint $(LOWEST)'

soak: $(VENV)/.dev  ## The long forms of the tests under load: HOURS=1
	KINLENS_LONG_TESTS=1 $(BIN)/pytest tests/ui tests/http/test_schemathesis.py \
	  tests/http/galleries/test_live_writes.py tests/promises/test_bar.py tests/units/test_decoding.py \
	  tests/promises/test_quiet_machine.py tests/training/losses/test_laws.py \
	  tests/indexer/test_crash.py tests/indexer/test_publish.py --timeout 3600
	KINLENS_LONG_TESTS=1 $(BIN)/pytest -m long --timeout 3600
	$(BIN)/python scripts/soak.py $(if $(HOURS),--hours $(HOURS))

scale-check: $(VENV)/.dev  ## Replicas over a real Milvus, Redis and HAProxy: writes, kills and outages
	KINLENS_LONG_TESTS=1 $(BIN)/pytest -ra --durations 0 tests/http/galleries/test_milvus_served.py \
	  tests/http/load/test_redis.py tests/http/load/test_rolling_restart.py tests/http/load/test_scale.py

mutations: $(VENV)/.dev  ## Break the product on purpose: do the tests notice? NAMES="recall redis"
	$(BIN)/python -m tests.long.mutations $(NAMES)

check: $(VENV)/.dev  ## Format, lint, types, architecture, words, documentation site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q $(STATIC)

PORTABLE = embedder indexer quality commands library

check-types: $(VENV)/.dev  ## Types as on Windows and macOS, and as of the newest Python
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32 $(PORTABLE:%=-p kinlens.%)
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin $(PORTABLE:%=-p kinlens.%)
	$(BIN)/mypy --python-version 3.14 --cache-dir .mypy_cache/3.14

$(VENV)/.docs: $(VENV)/.training
	$(PIP) --quiet --group docs --editable '.[cpu,training]'
	@touch $@

docs: $(VENV)/.docs  ## The documentation site, into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/.dev  ## Fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) --quiet --group dev --group milvus-server --group bench --editable '.[cpu,training,otel,milvus,parquet,heif]'
	@touch $@

bench: $(VENV)/.bench  ## Every benchmark once at its smallest: NAMES="gallery.py"; reports what it skips
	$(BIN)/python benchmarks $(NAMES)

clean:  ## Remove the environments, the site and what the demo made
	rm -rf $(VENV) .venv-gpu .venv-lowest .kinlens build/site .pytest_cache .mypy_cache .ruff_cache
