# make train   set up .venv and train the example model on four local processes (2 stages x tp 2)
# make test    set up .venv and run all tests
# make bench   the overhead against plain torch and torch DTensor, pipelines, data parallelism against DDP and FSDP2 and a
#              timeline of its collectives, what a rank holds and sends, checkpoints against DCP on FSDP2; writes
#              docs/performance.md, docs/overlap.svg and
#              the table in docs/parallel.md
# make square  a run saved under each strategy and resumed under each, and processes killed at each moment of a save
# make coverage   every function of PyTorch's op_db, in all dtypes, on two ranks and on 2x2; prints a table
# make operators  what becomes of each torch function; writes docs/operators.md
# make zoo     all model types of transformers, and networks of timm and torchvision where these are installed, on two ranks
#              against plain torch; goes on where it stopped; writes the table in docs/models.md
# make mutants do the tests of rules, reshards, gradient types and schedules notice changes of the code?
#              ARGS="--sample 100 --seed 1" for some of them
# make matrix  all tests on every torch and Python that is tested, each in an environment of its own that is kept outside of the
#              checkout (tests/environments.py); ARGS="--markdown docs/versions.md" writes the table of docs/versions.md
# make newest  import, examples and a part of the tests on the newest torch, where it can be installed
# make lint    ruff and mypy
# Options go through ARGS:  make train ARGS="--steps 20"   make test ARGS="-k reshard"
#                           make train ARGS="--save out/run": stopped and started again, it goes on from its newest checkpoint

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
ARGS ?=

export OMP_NUM_THREADS := 1

.PHONY: train test bench square coverage operators zoo mutants matrix newest lint clean

train: .venv/.installed
	$(BIN)/python examples/launch.py 4 examples/train_gpt.py --pp 2 --tp 2 $(ARGS)

test: .venv/.installed
	$(BIN)/python -m pytest -n 2 $(ARGS)

bench: .venv/.installed
	$(BIN)/python benchmarks/overhead.py --markdown docs/performance.md $(ARGS)
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/data_parallel.py --markdown docs/performance.md
	$(BIN)/python benchmarks/overlap.py --svg docs/overlap.svg
	$(BIN)/python benchmarks/memory.py --markdown docs/parallel.md
	$(BIN)/python benchmarks/checkpoint.py --markdown docs/performance.md

square: .venv/.installed
	$(BIN)/python -m tests.checkpoint.runs
	$(BIN)/python -m tests.checkpoint.killed

coverage: .venv/.installed
	$(BIN)/python -m tests.opinfo.opinfo --dtypes all --most 1000 $(ARGS)
	$(BIN)/python -m tests.opinfo.opinfo --dtypes all --most 20 --world 4 $(ARGS)

operators: .venv/.installed
	$(BIN)/python -m tests.opinfo.kept $(ARGS)
	$(BIN)/python -m tests.opinfo.operators docs/operators.md

zoo: .venv/.installed
	$(BIN)/python -m tests.zoo.zoo --markdown docs/models.md $(ARGS)

mutants: .venv/.installed
	$(BIN)/python -m tests.mutants.mutants $(ARGS)

matrix:
	$(PYTHON) -m tests.matrix $(ARGS)

newest:
	$(PYTHON) -m tests.matrix --torch newest --quick --if-possible $(ARGS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build *.egg-info

# Installed once, and again when the requirements change.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --editable '.[test,plot,examples]'
	touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) --editable '.[dev]'
	touch $@
