# Two commands for a newcomer: `make up` runs Leasehold on this machine, `make test` passes its tests.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: up down test lint proto bench

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

# Two at a time: most end-to-end tests wait for something. A file's tests stay together and in order.
test: $(STAMP)
	$(VENV)/bin/pytest -q -n 2 --dist loadfile tests/unit tests/contract tests/integration tests/e2e $(ARGS)

proto: $(STAMP)
	$(PY) -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. \
	  proto/deviceplugin/api.proto proto/podresources/api.proto
