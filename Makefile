# Needs python3 (3.10 to 3.13) with its venv module; everything else is made here.
PYTHON ?= python3
RELEASE := 0.22.1
# vLLM for the CPU, 6 GB, outside the checkout so that it is made once. The tests run in it: they need torch and vLLM.
LIVE ?= $(HOME)/.cache/h2d-patch/live-$(RELEASE)

# Every release does what a server needs of it; the default one has the tests of everything around it too.
EACH := tests/live/test_release.py tests/live/test_modules.py tests/copies/test_h2d_copies.py tests/selftest
LIVE_TESTS := $(if $(filter 0.22.1,$(RELEASE)),-m live,-m "not gpu" $(EACH))

# Ray lies beside that environment, not in it: what a server without Ray does is not to depend on it.
RAY ?= $(LIVE)-ray
RAY_VERSION := 2.55.1

.PHONY: demo test lint live live-ray releases docs environment clean

demo:  ## a real vLLM server with and without the fixes, compared; KEEP=1 leaves one up to try the commands on
	$(PYTHON) tools/demo.py $(if $(KEEP),--keep)

test: lint environment  ## everything that needs no GPU
	$(LIVE)/bin/python -m pytest -m "not gpu and not ray"

live: environment  ## only the tests that start a server; RELEASE=0.27.1 takes another one (docs/live.md)
	$(LIVE)/bin/python -m pytest $(LIVE_TESTS) -v

live-ray: environment $(RAY)/made-$(RAY_VERSION)  ## a server with workers under a real Ray on this machine (docs/many.md)
	H2D_RAY=$(RAY) $(LIVE)/bin/python -m pytest -m ray -v tests/live

lint: .venv/made
	.venv/bin/ruff check .
	.venv/bin/ruff format --check h2d_patch tests tools bench
	.venv/bin/mypy

releases: .venv/made environment  ## look at every vLLM release: the table in the package, docs/releases.md, what changed (fetches 12 GB once, keeps 1.5)
	.venv/bin/python tools/releases.py --python $(LIVE)/bin/python
	.venv/bin/python tools/fix_pages.py

docs: .venv/made  ## the pages of docs/fixes, from patches.toml and the table of releases
	.venv/bin/python tools/fix_pages.py

environment:
	$(PYTHON) tools/live_env.py $(LIVE) --release $(RELEASE) --project . \
		--with 'pytest>=8' --with 'hypothesis>=6' --with promql-parser --with tests/live/probe_plugin

$(RAY)/made-$(RAY_VERSION): $(wildcard tests/live/ray_platform/*)
	rm -rf $(RAY)
	$(LIVE)/bin/uv pip install -q --python $(LIVE)/bin/python --target $(RAY) --no-deps \
		ray==$(RAY_VERSION) 'msgpack>=1,<2' tests/live/ray_platform
	touch $@

.venv/made: pyproject.toml
	rm -rf .venv
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q --disable-pip-version-check 'pip>=25.1'
	.venv/bin/python -m pip install -q --disable-pip-version-check --group lint 'wrapt>=1.15' packaging
	touch $@

clean:
	rm -rf .venv .demo dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
