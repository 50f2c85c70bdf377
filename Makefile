# Every target is complete on a fresh machine with Python 3.11 or newer: the first one makes its own environment in .venv.
# pip's own settings say where packages come from, and with them which build of torch is installed; the CPU build is enough.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A .venv that is a link belongs to another checkout: it is used as it is, nothing is installed, and the sources are
# those from here.
LINKED := $(shell test -L $(VENV) && test -x $(BIN)/python && echo yes)
ifeq ($(LINKED),yes)
export PYTHONPATH := $(CURDIR)/src
else
READY := $(VENV)/.ready
BENCH := $(VENV)/.bench
SITE := $(VENV)/.site
BROWSER := $(VENV)/.browser
endif
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help venv test full browser engines contract models scripts fuzz faults peers reliability demo lint site bench gpu backtest backtest-net soak study alike causes clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

venv: $(READY)  ## the pinned environment in .venv

ifneq ($(LINKED),yes)
# torch comes first and alone, so that nothing after it can choose another build. Compiled once, the sources start every
# process half a second sooner, also where PYTHONDONTWRITEBYTECODE is set.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0
	$(INSTALL) --editable '.[data,demo,planning,plot,report,tensorboard,dev]'
	$(BIN)/python -m compileall -q src
	touch $@

$(BENCH): $(READY)
	$(INSTALL) --editable '.[bench]'
	touch $@

$(SITE): $(READY)
	$(INSTALL) --editable '.[site]'
	touch $@

$(BROWSER): $(READY)
	$(INSTALL) --editable '.[browser]'
	touch $@
endif

# Four at once on two cores: a good part of the tests waits for processes, timeouts and the disk.
# What was edited since the environment was made is compiled once here, and not in every process of a test.
test: $(READY)  ## every test and doctest; of large tables a pairwise part
	$(BIN)/python -m compileall -q src tests
	$(BIN)/pytest -q -n 4 --dist worksteal

full: $(READY)  ## what `make test` leaves out of all tables but those of contract, scripts, fuzz and faults
	$(BIN)/pytest -q -n 3 --dist worksteal -m full

# apt-get install chromium brings the browser.
browser: $(BROWSER)  ## reports in a headless Chromium: console, network, axe-core; a dated result, pictures in build/browser
	BROWSER_RECORD=benchmarks/results/$$(date -u +%F)-browser.json BROWSER_PICTURES=build/browser \
		$(BIN)/pytest -q -n 0 -m full tests/report/test_report_in_browser.py

# The whole table is about a day on two cores; each part of it has something of everything.
PART ?= 1/1
# cpu; simgpu: the simulated accelerator of tests/simulated_accelerator, which a C++ compiler builds; cuda: the GPUs here.
DEVICE ?= cpu

contract: $(READY)  ## the whole equivalence table, or PART=1/100 of it; DEVICE=simgpu for the simulated accelerator, DEVICE=cuda for GPUs
	TEST_DEVICE=$(DEVICE) CONTRACT_PART=$(PART) $(BIN)/pytest -q -n 2 -m contract tests/contract

# MPI_LAUNCHERS=/a/bin/mpirun:/b/bin/mpiexec adds other installations of MPI.
engines: $(READY)  ## runs on Ray, Slurm, MPI and other engines; those that are not installed are skipped with the reason
	$(BIN)/pytest -q -n 0 -rs -m engines tests/launcher tests/docs/test_clusters_page.py

MODELS_RECORD = $(if $(filter 1/1,$(PART)),benchmarks/results/$(shell date -u +%F)-models.jsonl,.models-record.jsonl)

models: $(READY)  ## models of transformers, timm and peft under every strategy, then docs/models.md; or PART=1/10 of it, without the page
	rm -f $(MODELS_RECORD)
	MODELS_PART=$(PART) MODELS_RECORD=$(MODELS_RECORD) $(BIN)/pytest -q -n 2 -m models tests/models
	$(if $(filter 1/1,$(PART)),$(BIN)/python -m tests.models.page)

RECORD := .scripts-record.jsonl

scripts: $(READY)  ## every training script under every strategy, then docs/what-works.md; or PART=1/10 of it or DEVICE=simgpu, without the page
	rm -f $(RECORD)
	TEST_DEVICE=$(DEVICE) SCRIPTS_PART=$(PART) SCRIPTS_RECORD=$(RECORD) $(BIN)/pytest -q -n 2 -m scripts tests/scripts
	$(if $(filter 1/1-cpu,$(PART)-$(DEVICE)),$(BIN)/python -m tests.scripts.page $(RECORD))

fuzz: $(READY)  ## 500 drawn training scripts against plain PyTorch; FUZZ_DRAWS=100 FUZZ_SEED=7 for others
	$(BIN)/pytest -q -s -n 0 -m fuzz tests/fuzz

FAULT_RUNS ?= 10
faults: $(READY)  ## every fault ten times under every strategy, or FAULT_RUNS=1 once, without retries
	FAULT_RUNS=$(FAULT_RUNS) $(BIN)/pytest -q -n 2 --maxschedchunk 2 -m faults tests/faults --figures benchmarks/results/$$(date -u +%F)-faults.json

peers: $(READY)  ## what others do under the same faults
	$(BIN)/python benchmarks/faults_peers.py --save

reliability: $(READY)  ## the tables of docs/reliability.md from the newest results
	$(BIN)/python benchmarks/reliability.py

demo: $(READY)  ## about a minute: the same weights from 1, 2 and 4 devices
	$(BIN)/python examples/demo.py

lint: $(READY)  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

site: $(SITE)  ## the documentation site in build/site/html: all pages, API and command line; a warning fails
	$(BIN)/python docs/site/make_site.py

bench: $(BENCH)  ## what a step through tutti costs beside the same step by hand
	$(BIN)/python benchmarks/step_tax.py

gpu: $(BENCH)  ## what needs a GPU: tests, contract, step tax, MFU; a dated result. GPU="--device simgpu --quick" for others
	$(BIN)/python benchmarks/gpu.py --save $(GPU)

# DATA is also where the studies below read their images, so only a stated one counts here.
BACKTEST := $(if $(filter command environment,$(origin DATA)),$(DATA),data/scaling)

backtest: $(READY)  ## predictions against published measurements: DATA=folder; JSON=1 or LEAVE_OUT=source prints and writes no files
	@$(BIN)/python benchmarks/backtest.py '$(BACKTEST)' $(if $(JSON),--json) $(if $(LEAVE_OUT),--leave-out $(LEAVE_OUT))

backtest-net: $(READY)  ## predictions against runs between network namespaces: root, an hour; NET="--only uneven" for a part, NET=--save keeps it
	@$(BIN)/python benchmarks/backtest_net.py $(NET)

soak: $(READY)  ## one run that meets a hundred faults, about ten minutes
	$(BIN)/python benchmarks/soak.py

# Hours on two cores; it goes on where it was stopped, and a run that two ladders share is made once.
DATA ?= data/cifar10
STUDY := cifar10 --data $(DATA) --workers 8 --batch-size 4096 --epochs 12 --precision bf16 --runs docs/studies/large-batch
CORRECTED := --model course:batch_norm=true --augment --optimizer adam:lr=0.003

study: $(READY)  ## docs/studies/large-batch.md again: two ladders on CIFAR-10 (DATA=folder)
	$(BIN)/tutti compare $(STUDY) --ladder course --seeds 1 --out docs/studies/large-batch/course
	$(BIN)/tutti compare $(STUDY) --ladder corrected --seeds 3 $(CORRECTED) --out docs/studies/large-batch/corrected

# Each optimizer against itself at one worker, on 5,000 of the images: about an hour on a core.
LIKE := docs/studies/large-batch/like-with-like
ALIKE := cifar10 --data $(DATA)-5000 --workers 8 --batch-size 512 --epochs 6 --precision bf16 --model course:batch_norm=true --augment
ALIKE += --eval-every none --devices 1 --threads 1 --runs docs/studies/large-batch

alike: $(READY)  ## its like-with-like comparison, at a reduced size
	$(BIN)/python benchmarks/cifar_subset.py $(DATA) $(DATA)-5000 --images 5000
	$(BIN)/tutti compare $(ALIKE) --ladder $(LIKE)/tuning.toml --seeds 1 --out $(LIKE)/tuning
	$(BIN)/tutti compare $(ALIKE) --ladder $(LIKE)/like-with-like.toml --seeds 3 --out $(LIKE)

# One cause at a time, with a network of 69 thousand parameters on 10,000 of the images: half an hour on a core.
CAUSE := docs/studies/one-cause
CAUSES := benchmarks/small_cifar.py:task --data $(DATA)-10000 --workers 8 --batch-size 512 --epochs 8 --augment
CAUSES += --devices 1 --threads 1 --eval-every none --checkpoint-every none --metric accuracy --runs runs/one-cause

causes: $(READY)  ## docs/studies/one-cause.md again: batch norm, gradient noise, batch growth, updates (DATA=folder)
	$(BIN)/python benchmarks/cifar_subset.py $(DATA) $(DATA)-10000 --images 10000
	$(BIN)/tutti compare $(CAUSES) --ladder $(CAUSE)/tuning.toml --seeds 1 --out $(CAUSE)/tuning
	$(BIN)/tutti compare $(CAUSES) --optimizer adam:lr=0.003 --ladder $(CAUSE)/noise.toml --out $(CAUSE)/noise
	$(BIN)/tutti compare $(CAUSES) --optimizer adam:lr=0.003 --ladder batch-norm --out $(CAUSE)/batch-norm
	$(BIN)/tutti compare $(CAUSES) --optimizer adam:lr=0.003 --ladder $(CAUSE)/growth.toml --out $(CAUSE)/growth
	$(BIN)/tutti compare $(CAUSES) --optimizer adam:lr=0.003 --ladder updates --out $(CAUSE)/updates

clean:  ## remove the environment and every cache
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
