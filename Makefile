# make train   set up .venv and train the example model on four local processes (2 stages x tp 2)
# make test    set up .venv and run the quick tests, in five minutes: cases that together run nearly all statements; says which
#              area runs and how far it is
# make test-all   all tests, which is what CI runs
# make seconds    all tests; writes tests/support/seconds.txt, from which the candidates for the quick ones are chosen
# make choose     the candidates, noting the lines that each runs; writes tests/support/repeats.txt, the ones that are left out.
#              Those that fail with the notes (of torch.compile) stay
# make bench   the overhead against plain torch and torch DTensor, pipelines, data parallelism against DDP and FSDP2 and a
#              timeline of its collectives, what a rank, a tensor and a plan hold, checkpoints against DCP on FSDP2, torch.compile; writes
#              docs/performance.md, docs/overlap.svg and
#              the table in docs/numbers/parallel.md
# make square  a run saved under each strategy and resumed under each, and processes killed at each moment of a save
# make coverage   every function of PyTorch's op_db, in all dtypes, on two ranks and on 2x2; prints a table
# make operators  what becomes of each torch function; writes docs/operators.md
# make zoo     all model types of transformers, and networks of timm and torchvision where these are installed, on two ranks
#              against plain torch; goes on where it stopped; writes the table in docs/zoo.md
# make strangers   small models of 60 libraries of PyPI, on two ranks against plain torch: what they compute, and what they save,
#              loaded by one process and resumed; writes the tables in docs/zoo.md
# make peers       the programs of docs/coming_from/ in other libraries (DeepSpeed, Megatron, JAX), beside ours
# make bugs        bugs of public trackers as programs on 2 and 4 ranks, and what the libraries compute; writes docs/public_bugs.md
# make mutants do the tests notice changes of the code? ARGS="--sample 100 --seed 1" for some of them, --part fsdp for a part
# make matrix  all tests on every torch and Python that is tested, each in an environment of its own that is kept outside of the
#              checkout (tests/environments.py); ARGS="--markdown docs/versions.md" writes the table of docs/versions.md
# make newest  import, examples and a part of the tests on the newest torch, where it can be installed
# make dist    the packages of a release in dist/: an sdist and a wheel for each tested Python that is found; checks them
# make native  compile the warm path (disttensor/dispatch/native.c); train, test and bench do so too. Without a compiler all works,
#              in Python, and so it does with DISTTENSOR_PYTHON=1
# make python  a part of the tests without what was compiled
# make gpu     tests and tables that need one CUDA device, by PYTHON and its own torch: nothing is installed, so it needs no network
# make asan    the tests of the C code under AddressSanitizer, with gcc
# make leaks   a million calls of the C code leave nothing behind
# make lint    ruff and mypy
# make docs    the documentation site, in out/docs; opens each page in a browser, where there is one, and follows all links
# Of tests that are many, as those of the fuzzers, all of these run a part; PART=17 (any number) is another one, EVERYTHING=1 runs all.
# Options go through ARGS:  make train ARGS="--steps 20"   make test ARGS="-k reshard"
#                           make train ARGS="--save out/run": stopped and started again, it goes on from its newest checkpoint

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
TEST := $(BIN)/python -m pytest -n 2 --dist worksteal
BUILD := $(BIN)/python setup.py -q build_ext --inplace
ARGS ?=
EXTRAS := test,progress,examples,lightning

export OMP_NUM_THREADS := 1

.PHONY: gpu train test test-all seconds choose bench square coverage operators zoo strangers peers bugs mutants matrix newest dist native python asan leaks lint docs clean

train: .venv/.native
	$(BIN)/python -m disttensor.run --nproc 4 examples/train_gpt.py --pp 2 --tp 2 --accumulate 2 $(ARGS)

test: .venv/.native
	$(TEST) -m quick $(ARGS)

test-all: .venv/.native
	$(TEST) $(ARGS)

seconds: .venv/.native
	$(TEST) --junitxml out/seconds.xml $(ARGS)
	$(BIN)/python -m tests.support.quick out/seconds.xml

choose: .venv/.native
	rm -rf out/statements
	-$(TEST) -m candidate -p tests.mutants.statements $(ARGS)
	$(BIN)/python -m tests.support.choose out/statements

bench: .venv/.native
	$(BIN)/python benchmarks/overhead.py --markdown docs/performance.md $(ARGS)
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/data_parallel.py --markdown docs/performance.md
	$(BIN)/python benchmarks/overlap.py --svg docs/overlap.svg
	$(BIN)/python benchmarks/tensor_parallel.py
	$(BIN)/python benchmarks/memory.py --markdown docs/numbers/parallel.md
	$(BIN)/python benchmarks/footprint.py --markdown docs/performance.md
	$(BIN)/python benchmarks/compile.py --markdown docs/performance.md
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
	$(BIN)/python -m tests.zoo.zoo --markdown docs/zoo.md $(ARGS)

strangers: .venv/.strangers
	PYTHONPATH=.:.venv/strangers $(BIN)/python -m tests.zoo.strangers --markdown docs/zoo.md $(ARGS)
	PYTHONPATH=.:.venv/strangers $(BIN)/python -m tests.zoo.saving --markdown docs/zoo.md $(ARGS)

peers: .venv/.peers
	PYTHONPATH=.:.venv/peers $(BIN)/python -m pytest tests/test_coming_from.py $(ARGS)

bugs: .venv/.native .venv/.peers
	PYTHONPATH=.:.venv/peers $(BIN)/python -m tests.public_bugs $(ARGS)

mutants: .venv/.installed
	$(BIN)/python -m tests.mutants.mutants $(ARGS)

matrix:
	$(PYTHON) -m tests.matrix $(ARGS)

newest:
	$(PYTHON) -m tests.matrix --torch newest --quick --if-possible $(ARGS)

dist: .venv/.installed-dist
	rm -rf dist
	$(BIN)/python -m tests.packages dist

native: .venv/.native

python: .venv/.installed
	DISTTENSOR_PYTHON=1 $(TEST) $$($(BIN)/python -m tests.support.part 64) $(ARGS)

gpu: export ORACLE_DEVICE = cuda
gpu: export PYTORCH_NVML_BASED_CUDA_CHECK = 1
gpu:
	$(PYTHON) setup.py -q build_ext --inplace
	PYTHONPATH=. $(PYTHON) -m pytest -n 8 --dist worksteal -p no:benchmark tests/gpu $(ARGS)
	PYTHONPATH=. $(PYTHON) benchmarks/overhead.py --device cuda
	PYTHONPATH=. $(PYTHON) benchmarks/gpu.py

# Both libraries come before Python's own, or exceptions of C++ are not seen.
ASAN = -fsanitize=address,undefined -fno-omit-frame-pointer -g -O1
ASAN_LIBRARIES = $$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)

asan: .venv/.installed
	CFLAGS="$(ASAN)" LDFLAGS="$(ASAN)" $(BUILD) --force
	LD_PRELOAD="$(ASAN_LIBRARIES)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc $(BIN)/python -m pytest -q -p no:xdist \
	  tests/dispatch/test_native.py tests/dispatch/test_dispatch.py $(ARGS); failed=$$?; $(BUILD) --force; exit $$failed

leaks: .venv/.native
	$(BIN)/python -m tests.dispatch.leaks $(ARGS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.installed-docs
	rm -rf out/docs
	$(BIN)/python -m sphinx -W --keep-going -q docs out/docs
	$(BIN)/python docs/check_site.py out/docs

clean:
	rm -rf .venv build dist *.egg-info disttensor/dispatch/_native.*.so

# Installed once, and again when the requirements change.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --editable '.[$(EXTRAS)]'
	touch $@

# With those of docs and lint, by one call of pip.
.venv/.installed-all: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --editable '.[$(EXTRAS),docs,dev]'
	touch .venv/.installed .venv/.installed-docs .venv/.installed-dev $@

# No compiler is no error: setup.py says that it is optional.
.venv/.native: .venv/.installed setup.py disttensor/dispatch/native.c
	$(BUILD)
	touch $@

# In a folder of their own, which nothing else sees.
.venv/.strangers: .venv/.installed tests/zoo/strangers.txt
	rm -rf .venv/strangers
	$(PIP) --quiet --no-deps --target .venv/strangers --requirement tests/zoo/strangers.txt
	touch $@

.venv/.installed-dist: .venv/.installed
	$(PIP) --editable '.[dist]'
	touch $@

.venv/.peers: .venv/.installed tests/support/peers.txt
	rm -rf .venv/peers
	DS_BUILD_OPS=0 $(PIP) --quiet --no-deps --target .venv/peers --requirement tests/support/peers.txt
	touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) --editable '.[dev]'
	touch $@

.venv/.installed-docs: .venv/.installed
	$(PIP) --editable '.[docs]'
	touch $@
