# Two commands do everything on a fresh machine: `make demo` and `make test`.
# The first that runs and can make environments: a name on PATH may be a stub, or lack ensurepip as Debian's do.
PYTHON ?= $(or $(shell for name in python3.11 python3.12 python3.13; do \
	$$name -c 'import ensurepip' 2> /dev/null && echo $$name && break; done), \
	$(error none of python3.11, python3.12, python3.13 runs here with the modules venv and ensurepip; \
	name yours: make PYTHON=...))
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE  # each of many processes would compile what it imports: 20 seconds with torch, Ray and Flower

.PHONY: help setup demo test test-slow docs nightly numbers lint audit package tools peers bench gpu triton image-check chaos soak \
	mutants clean

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## / - /'

setup: .venv/done ## make .venv with everything pinned

.venv/done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	# Two processes install half of the pins each, without the libraries of CUDA; the last command installs what is missing.
	for half in 1 2; do sed -n "$$half~2p" constraints.txt > .venv/half$$half.txt; \
		$(PIP) --no-deps -r .venv/half$$half.txt 2> /dev/null & done; wait
	$(PIP) -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' .venv/lib || true  # torch has a file for Python 3.12 alone
	touch $@

demo: setup      ## train IID and non-IID on the built-in corpus; table, test and plot at the end
	$(BIN)/flsim demo

# Many tests wait for others: three workers keep two cores busy, with one thread each. A test that takes ten minutes
# hangs: it prints where, and its worker ends, which is a failure.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
	-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

test: setup lint ## lint, type-check, the tests of every day: minutes
	$(PYTEST) -m "not slow and not nightly"

test-slow: setup ## the tests that kill, cut, fill, damage and outlast real runs: a quarter of an hour
	$(PYTEST) -m "slow and not nightly" $$(grep -rlF --include='test_*.py' mark.slow tests)  # no other file is imported

docs: setup      ## the documentation site, in site/; a dead link, a missing name or prose against the rules is an error
	$(BIN)/python .ci/prose.py
	rm -rf site
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -d .doctrees docs site

nightly: setup   ## tests that take minutes and say in full what shorter ones say, `make triton`, `make mutants`, `make chaos`
	$(PYTEST) -m nightly -o faulthandler_timeout=3600
	$(MAKE) triton
	$(MAKE) mutants
	$(MAKE) chaos

# What trains and scores with floats, without Ray, in seconds; kernels of a GPU, compiled or interpreted, ask nothing of a
# processor.
NUMBERS := tests/training tests/models tests/memorization/test_score.py tests/privacy/test_mechanism.py \
	tests/algorithms/test_federated.py tests/algorithms/test_algorithms.py \
	--ignore=tests/training/cohort/test_triton_compiles.py --ignore=tests/training/cohort/test_triton.py

numbers: setup   ## the tests of numbers as on processors with AVX2, and as on ones without vector instructions
	@if grep -q avx512 /proc/cpuinfo; then \
		ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
			$(BIN)/pytest -n 3 --dist loadfile $(NUMBERS); \
	else echo "This processor has AVX2 at most: make test has run them as on processors with AVX2"; fi
	ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 \
		$(BIN)/pytest -n 3 --dist loadfile $(NUMBERS)

lint: setup      ## ruff and mypy; shell scripts, YAML, the Dockerfile, and files with a published schema; prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck $$(git grep -lE '^#!/usr/bin/env bash')
	$(BIN)/yamllint --strict deploy
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $$(ls .github/ISSUE_TEMPLATE/*.yml | grep -v config)
	$(BIN)/pre-commit validate-config
	$(BIN)/python .ci/prose.py

audit: setup     ## known vulnerabilities of what is pinned; says so, and does not fail, where osv.dev cannot be asked
	$(BIN)/python .ci/audit.py || [ $$? -eq 3 ]

# Options of the demo that it runs; DEMO= for the whole one, which takes a minute more.
DEMO ?= --set training.rounds=6 --set canaries.count=2 --set evaluation.references=500

package: setup   ## dist/ with sdist and wheel, and a demo from the wheel in a new environment; 2 GB of temporary disk
	.ci/package $(DEMO)

tools:           ## Chromium, LaTeX and strace, which tests use where they are (Debian, as root)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
		chromium strace texlive-latex-base texlive-latex-recommended

peers: .venv-peers/done ## make .venv-peers with the platforms that are compared with, which need versions of their own

.venv-peers/done: constraints-peers.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-peers.txt pfl torch
	touch $@

bench: setup peers ## all benchmarks; half an hour, 5 GB of temporary disk
	for name in training central evaluation data scale; do $(BIN)/python -m benchmarks $$name || exit; done

# Needs torch, Triton, numpy and pytest only, and so neither `make setup` nor a network.
gpu:             ## measure engines and kernels on this machine's GPU, in gpu/: under ten minutes; docs/gpu.md
	$(firstword $(wildcard $(BIN)/python) python3) -m benchmarks.gpu $(GPU)

# The release that torch 2.11 requires; constraints.txt has the one of torch 2.13.
TRITON ?= 3.6.0

triton: setup    ## compile the kernels for an H200 by another Triton, TRITON=3.6.0; 0.7 GB of temporary disk
	.ci/triton $(TRITON)

image-check:     ## the steps of deploy/Dockerfile in a new environment, without Docker; minutes, 2 GB of temporary disk
	deploy/image-check.sh $(VARIANT)

chaos: setup     ## KILLS times harm to processes of real runs, power lost at each write, limits, cut networks; over an hour
	CHAOS_KILLS=$(or $(KILLS),100) CHAOS_SEED=$(or $(SEED),0) $(BIN)/pytest -s tests/power tests/faults/test_chaos.py \
		tests/faults/test_limits.py tests/faults/test_cut_networks.py

soak: setup      ## ROUNDS rounds: does memory grow, or descriptors, or Ray's objects; a minute or two
	$(BIN)/python .ci/soak.py --rounds $(or $(ROUNDS),2000) --out $(or $(FIGURE),soak.png)

mutants: setup   ## COUNT random changes of formulas, drawn by SEED: a table of those that no test notices; under an hour
	$(BIN)/python .ci/mutants.py --seed $(or $(SEED),1) --count $(or $(COUNT),300)

clean:           ## remove the environments, the site and dist/
	rm -rf .venv .venv-peers .doctrees site build dist
