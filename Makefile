# Start here: `make up` runs Leasehold on this machine, `make test` runs its tests.
VENV := .venv
PY := $(VENV)/bin/python
# Packages of development, which include those of `up`, and these alone.
STAMP := $(VENV)/.installed
UP := $(VENV)/.up
# Whether .venv has to be made anew: its Python is gone or is not the one that PYTHON names, or its folder has moved.
SERIES := 'import sys; print(sys.version_info[:2])'
ANEW := $(shell test ! -d $(VENV) || { \
  test "$$($(PY) -ISc $(SERIES))" = "$$($(or $(PYTHON),$(PY)) -ISc $(SERIES))" && \
  $(PY) -ISc '' && grep -qF "$(CURDIR)/$(VENV)" $(VENV)/bin/activate; } 2>/dev/null || echo anew)
# make up PYTHON=python3.12
PYTHON ?= $(shell $(PY) -c 'import pip' 2>/dev/null && echo $(PY) || echo python3)

# The tools that check the page's JavaScript: nothing of them is shipped.
PAGE := tools/javascript
PAGE_STAMP := $(PAGE)/node_modules/.package-lock.json

PIP := $(PY) -m pip --quiet --disable-pip-version-check
UV := $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
  --no-annotate --custom-compile-command 'make locks'

.PHONY: help anew up down status test bytecode test-fast size test-gpu test-gpu-kit native compiled test-compiled lint lint-javascript locks vulnerabilities docs dist release-dry-run release proto

help:
	@echo 'make up      runs Leasehold on this machine: a simulated cluster with GPUs, and every service'
	@echo 'make status  where its page and its kubeconfig are, and what is not ready'
	@echo 'make down    stops it'
	@echo 'make test    runs the tests, with CI=true also those that take long; ROOM=binder those of one room, make test-fast those that need no servers'
	@echo 'make lint    runs the checks of the code; make size prints how much there is to read'
	@echo 'make native  compiles the parts in C that containers use, into .venv/libexec'
	@echo 'make docs    builds the site of the documentation'
	@echo 'Arguments of a command follow in ARGS: make up ARGS="--nodes 4 --headless"'

anew: ;

# The versions of a lock, each of which must have one of the hashes there. A .venv that is not complete is made anew.
$(STAMP): pyproject.toml locks/development.txt $(ANEW)
	@$(PYTHON) tools/install.py locks/development.txt $@

$(UP): pyproject.toml locks/up.txt $(ANEW)
	@$(PYTHON) tools/install.py locks/up.txt $@

up: $(or $(wildcard $(STAMP)),$(UP))
	@$(VENV)/bin/leasehold up $(ARGS)

down status:
	@test -x $(VENV)/bin/leasehold || { echo "nothing runs: make up was never completed here"; exit 1; }
	@$(VENV)/bin/leasehold $@ $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) -m tools.packed_assignments
	@if command -v luacheck >/dev/null; then luacheck --quiet shared/ledger/functions; \
	  else echo 'luacheck is not installed: the Lua of the ledger was not checked (apt install lua-check)'; fi
	@if ! command -v npm >/dev/null; then \
	    echo 'npm is not installed: the JavaScript of the page was not checked (https://nodejs.org)'; \
	  elif ! $(MAKE) --no-print-directory $(PAGE_STAMP); then \
	    echo 'the tools of $(PAGE) could not be installed: the JavaScript of the page was not checked'; \
	  else $(MAKE) --no-print-directory lint-javascript; fi

# Biome's formatter and rules, and TypeScript's check of types.
lint-javascript: $(PAGE_STAMP)
	npm run --silent --prefix $(PAGE) check

$(PAGE_STAMP): $(PAGE)/package-lock.json
	@cd $(PAGE) && npm ci --no-audit --no-fund --loglevel=error --fetch-retries=1 --fetch-timeout=60000 && touch node_modules/.package-lock.json

size: $(STAMP)
	@$(PY) -m tools.size

# The tests of a file run together and in order. Byte code is cached although an image may have that switched off:
# each process would compile all tests again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(VENV)/bin/pytest -q --dist loadfile

# More processes than cores, since tests with real servers mostly wait; files in this order, so that the longest start
# first.
ALL_TESTS := tests/e2e tests/integration tests/hardware tests/unit tests/contract simcluster/tests
TESTS_OF_ROOM = $(or $(wildcard tests/unit/$(ROOM) tests/integration/$(ROOM) $(ROOM)/tests), \
  $(error no tests are in tests/unit/$(ROOM) or tests/integration/$(ROOM)))

test: $(STAMP)
	$(PYTEST) -n 6 --no-loadscope-reorder --durations 30 $(if $(CI)$(ROOM),,-m "not long") $(if $(ROOM),$(TESTS_OF_ROOM),$(ALL_TESTS)) $(ARGS)

# Written once, before several processes of the tests would each write all of it; so are Hypothesis's tables of characters.
bytecode: $(STAMP)
	@$(PYTEST) -n 0 --collect-only -qq $(ALL_TESTS) >/dev/null || true
	@$(PY) -c 'from hypothesis import strategies; strategies.text().validate()'

test-fast: $(STAMP)
	$(PYTEST) -n 2 tests/unit tests/contract $(ARGS)

# On the GPUs of this machine: docs/hardware.md
test-gpu: $(STAMP)
	@$(PY) -m tests.hardware $(if $(LIBRARY),--library $(LIBRARY)) $(ARGS)

# What these tests need on a machine without a network, in dist/gpu-kit.
test-gpu-kit: $(STAMP)
	@$(PY) -m tests.hardware.kit $(if $(HAMI_CORE),--source $(HAMI_CORE)) $(if $(LIBRARY),--library $(LIBRARY)) $(ARGS)

# The hook of container runtimes and the library of compute time, as in the image.
native: $(STAMP)
	$(PY) -m services.node_agent.memory_limits.build_hook
	$(PY) -m services.node_agent.compute_time.build_library

# Placement compiled as in the image, in dist/compiled: needs a C compiler and Python's header files.
compiled: $(STAMP)
	rm -rf dist/compiled && mkdir -p dist/compiled/source
	cp -r pyproject.toml README.md LICENSE NOTICE services shared dist/compiled/source
	cd dist/compiled/source && HATCH_BUILD_HOOK_ENABLE_MYPYC=1 $(CURDIR)/$(VENV)/bin/hatchling build --target wheel -d ..
	$(PIP) install --no-deps --target dist/compiled dist/compiled/*.whl
	rm -rf dist/compiled/source dist/compiled/*.whl

# Python finds the compiled modules first, also in processes that tests start.
COMPILED := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/dist/compiled

test-compiled: compiled
	$(COMPILED) $(PY) -c "from shared.placing import placement as p; assert p.__file__.endswith('.so'), p.__file__"
	$(COMPILED) $(PYTEST) -o pythonpath=dist/compiled -n 2 $(or $(ARGS),tests/unit/placing tests/unit/placer tests/unit/extender tests/unit/planner)

# Moves all dependencies to their newest versions within the bounds of pyproject.toml.
locks:
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install 'uv>=0.9,<1'
	$(UV) --upgrade --all-extras --group build --no-emit-package leasehold --no-emit-package leasehold-simcluster \
	  pyproject.toml --output-file locks/development.txt
	$(UV) --constraint locks/development.txt pyproject.toml --output-file locks/runtime.txt
	$(UV) --constraint locks/development.txt --no-emit-package leasehold simcluster/pyproject.toml \
	  --output-file locks/simulated.txt
	$(UV) --constraint locks/development.txt --extra embedded --group pyproject.toml:editable --no-emit-package leasehold \
	  --no-emit-package leasehold-simcluster pyproject.toml --output-file locks/up.txt
	$(UV) --constraint locks/development.txt --group pyproject.toml:build --output-file locks/build.txt
	$(UV) --upgrade --group pyproject.toml:audit --output-file locks/audit.txt
	$(UV) --upgrade --group pyproject.toml:docs --output-file locks/docs.txt

# Fails if a package of the image has a known vulnerability, or if the service cannot say so.
vulnerabilities:
	test -x $(VENV)-audit || $(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip --quiet --disable-pip-version-check install --requirement locks/audit.txt
	$(VENV)-audit/bin/pip-audit --strict --disable-pip --require-hashes --vulnerability-service osv \
	  --requirement locks/runtime.txt $(ARGS)

# The site of the documentation, in dist/site; ARGS=serve shows it on http://127.0.0.1:8000 and follows changes.
docs:
	test -x $(VENV)-docs || $(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip --quiet --disable-pip-version-check install --requirement locks/docs.txt
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs $(or $(ARGS),build) --strict

# The files of a release, in dist/.
dist: $(STAMP)
	$(PY) -m tools.release dist $(ARGS)

# Also the images, if docker can build them; publishes nothing and needs no secrets.
release-dry-run: $(STAMP)
	$(PY) -m tools.release publish --dry-run $(ARGS)

# Called by .github/workflows/release.yml for a tag: ARGS="--image ghcr.io/OWNER/leasehold --tag v0.1.0"
release: $(STAMP)
	$(PY) -m tools.release publish $(ARGS)

# The code of the kubelet's gRPC interfaces. The name `proto` belongs to a package of Google's.
proto: $(STAMP)
	$(PY) -m grpc_tools.protoc -I shared/kubelet_api=proto --python_out=. --pyi_out=. --grpc_python_out=. \
	  $(patsubst proto/%,shared/kubelet_api/%,$(wildcard proto/*/api.proto))
