# Everything a person or CI runs. Each target does all its own set-up in $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INFINITY := $(VENV)-infinity
PIP := $(BIN)/python -m pip --disable-pip-version-check -q install -c constraints.txt

.PHONY: help serve test browser soak lint gpu bench-cpu constraints clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 14

serve: $(VENV)/.demo  ## serve the real all-MiniLM-L6-v2 on http://127.0.0.1:8080
	$(BIN)/hortus serve demo $(ARGS)

test: $(VENV)/.dev browser  ## run every test that needs no GPU
	$(BIN)/python -m pytest $(ARGS)

# The tests of the page drive it. Where it is missing and cannot be had they are skipped, and say so; where CI is set they fail.
APT := apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::http::Timeout=20
browser:
	@if ! { command -v chromium && command -v chromedriver; } > /dev/null && command -v apt-get > /dev/null; then \
	  root='sudo -n'; [ "$$(id -u)" != 0 ] || root=; \
	  echo "installing Debian's chromium and chromium-driver for the tests of the page"; \
	  { $$root $(APT) update && $$root env DEBIAN_FRONTEND=noninteractive $(APT) install -y --no-install-recommends \
	    chromium chromium-driver fonts-dejavu-core > /dev/null; } || echo "that cannot be done here"; \
	fi

soak: $(VENV)/.dev  ## 20 minutes of load while processes are killed, stopped and restarted
	SOAK_S=1200 $(BIN)/python -m pytest -s tests/service/test_grpc_chaos.py -k soak $(ARGS)

lint: $(VENV)/.dev  ## what CI checks besides the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

gpu:  ## run the GPU tests with the python3 that holds CUDA PyTorch; installs nothing, needs no network
	PYTHONPATH=.:$(PYTHONPATH) $(PYTHON) -m pytest -c tests/gpu/pytest.ini --rootdir=. tests/gpu -p no:cacheprovider $(ARGS)

bench-cpu: $(VENV)/.dev $(INFINITY)/.installed  ## Hortus, sentence-transformers and Infinity side by side on the CPU; some minutes; adds to bench/results
	$(BIN)/hortus bench start,short,latency,scoring,throughput --tokens 128 --rounds 3 --most-clients 64 \
	  --target hortus --target hortus-http=serve --target sentence-transformers \
	  --target infinity:$(INFINITY)/bin/python --out bench/results/cpu-peers.jsonl $(ARGS)

$(VENV)/.venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hortus needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.venv pyproject.toml constraints.txt $(wildcard hortus/*/*.c hortus/*/*/*.c)
	@echo "installing into $(VENV): 1.5 GB, some minutes the first time"
	@$(PIP) -e '.[cpu,demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.venv pyproject.toml constraints.txt $(wildcard hortus/*/*.c hortus/*/*/*.c)
	@echo "installing into $(VENV): 4 GB, some minutes the first time"
	@$(PIP) -e '.[cpu,demo,dev]'
	@touch $@ $(VENV)/.demo

# Infinity wants older libraries than ours, so it lives by itself; on the same PyTorch, so that the servers are compared.
$(INFINITY)/.installed: bench/infinity.txt
	$(PYTHON) -m venv $(INFINITY)
	$(INFINITY)/bin/python -m pip --disable-pip-version-check -q install -c bench/infinity.txt 'infinity-emb[server,torch]'
	@touch $@

constraints: $(VENV)/.dev  ## pin what is installed now (to refresh: empty constraints.txt, make test, make constraints)
	@{ echo "# Every package, direct or not, at the version the tests ran with. Written by: make constraints"; \
	  $(BIN)/python -m pip freeze --exclude hortus --exclude-editable | sed 's/+cpu$$//' | LC_ALL=C sort -f; } > constraints.txt.new
	@mv constraints.txt.new constraints.txt

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(INFINITY) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
