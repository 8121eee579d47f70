# Every target makes its own .venv: on a fresh machine, `make demo` and `make test` are all there is to do.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread a process: several ranks share the cores.
RUN := OMP_NUM_THREADS=1 $(BIN)/python
# Two at a time: ranks wait for each other more than they compute, and one pytest alone keeps one core of two busy.
PYTEST := -m pytest -q --numprocesses 2 --dist worksteal

.PHONY: demo test test-torch test-lowest examples check api dist dist-check soak bench bench-quick pictures docs docs-serve clean help
help: ## What can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/installed ## The main job: six strategies side by side, 4 workers, 100 Mbit/s; 4 to 6 minutes
	$(RUN) -m laconic.cli compare --out laconic-compare

test: $(VENV)/installed ## The tests
	$(RUN) $(PYTEST)

# Another torch, in a .venv of its own. Its wheel brings what it needs in the versions it needs (CUDA packages too: 3 GB to
# download, 6 GB on disk), so the pins of torch and of torch's own requirements don't hold there; all other pins do.
TORCH_VENV := $(VENV)-torch-$(VERSION)
TORCH_PINS := torch|filelock|fsspec|Jinja2|MarkupSafe|mpmath|networkx|setuptools|sympy|typing_extensions
$(TORCH_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	grep -vE '^($(TORCH_PINS))==' constraints.txt >$(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install --quiet --constraint $(TORCH_VENV)/constraints.txt torch==$(VERSION) --editable '.[dev]'
	touch $@

ifdef VERSION
test-torch: $(TORCH_VENV)/installed
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python $(PYTEST)
else
test-torch: ## The tests on another torch: make test-torch VERSION=2.15.0
	@echo "which torch? make test-torch VERSION=2.15.0" >&2; exit 2
endif

# The oldest versions that the extras allow, in a .venv of their own: what uses them is tested.
LOWEST_VENV := $(VENV)-lowest
$(LOWEST_VENV)/installed: pyproject.toml constraints.txt .ci/lowest.py
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python .ci/lowest.py >$(LOWEST_VENV)/constraints.txt
	$(LOWEST_VENV)/bin/python -m pip install --quiet --constraint $(LOWEST_VENV)/constraints.txt --editable '.[all]' \
		hypothesis pytest pytest-timeout pytest-xdist tensorboard
	touch $@

test-lowest: $(LOWEST_VENV)/installed ## The tests of the command line and the frameworks on the oldest versions that the extras allow
	OMP_NUM_THREADS=1 $(LOWEST_VENV)/bin/python $(PYTEST) tests/cli tests/lab tests/report tests/probing tests/advisor tests/integrations \
		--ignore tests/report/test_page.py # it needs a browser

examples: $(VENV)/installed ## Every file of examples/, one after another, by the commands in examples/README.md; two minutes
	$(RUN) -m pytest -q -m example --durations 0 --durations-min 1 tests/test_examples.py

check: $(VENV)/installed ## Lint, types, layers, public names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.public_api
	$(BIN)/mypy --config-file tests/typing/mypy.ini
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --project tests/typing --pythonpath $(BIN)/python

api: $(VENV)/installed ## Accept what has changed in the public names
	$(BIN)/python -m tests.public_api --accept

dist: $(VENV)/installed ## The sdist, and the wheel that is made of it, checked
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

dist-check: ## What `make dist` has built, installed in a .venv of its own and run
	PYTHON=$(PYTHON) bash .ci/dist-check

soak: $(VENV)/installed ## Long matrices and repetitions
	$(RUN) $(PYTEST) -m 'soak and not alone' --timeout 3600
	$(RUN) -m pytest -q -m 'soak and alone' --timeout 3600

# The peers that benchmarks compare with live in a .venv of their own.
$(VENV)-bench/installed: pyproject.toml constraints.txt benchmarks/peers.txt
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(VENV)-bench/bin/python -m pip install --quiet --no-deps --requirement benchmarks/peers.txt
	touch $@

bench: $(VENV)-bench/installed ## The benchmarks, side by side with torch's own hooks, torchft and accelerate; two hours
	OMP_NUM_THREADS=1 $(VENV)-bench/bin/python -m benchmarks

bench-quick: $(VENV)/installed ## The ratios that matter against the committed ones; under 10 minutes, and nothing may run beside it
	$(RUN) -m benchmarks gate $(GATE)

pictures: $(VENV)/installed ## The pictures of README and docs, from imports, the cost model and what `make demo` and `make bench` left
	$(RUN) docs/pictures/draw_tree.py
	$(RUN) docs/pictures/draw_concepts.py
	$(RUN) docs/pictures/draw_timelines.py
	$(RUN) docs/pictures/draw_mesh.py
	$(RUN) docs/pictures/draw_elastic.py
	$(RUN) docs/pictures/draw_benchmarks.py
	@if [ -d laconic-compare ]; then echo "$(RUN) docs/pictures/draw.py laconic-compare"; $(RUN) docs/pictures/draw.py laconic-compare; \
	else echo "not drawn, because there is no laconic-compare (make demo leaves it): table.svg and report.png"; fi

docs: $(VENV)/installed ## The documentation as a site, into site/; a broken link, or a public name without a docstring, is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/installed ## The same at http://127.0.0.1:8000, built anew while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --no-strict

clean: ## Remove what was built
	rm -rf $(VENV) $(VENV)-bench $(VENV)-dist $(VENV)-lowest $(VENV)-torch-* laconic-compare build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
