# Two commands on a fresh machine:  make train,  make test.  Both first set up .venv from requirements.txt.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || echo python3.11)
# `make test PYTHON=python3.13`: a .venv of another Python than the one asked for is made anew.
ifneq ($(origin PYTHON),file)
ifneq ($(shell $(PYTHON) -V 2>&1),$(shell .venv/bin/python -V 2>&1))
CLEAR = --clear
.PHONY: .venv/ready
endif
endif

# A worker for each core, four at most. Workers take the tests file by file, so that a file's fixtures are made once,
# and help each other out at the end.
PYTEST = .venv/bin/python -m pytest -q -n logical --maxprocesses 4 --dist worksteal --durations 15

# On a GPU, two hours of the paper's setting; all of its steps: leave out --minutes. A CPU has half an hour by itself.
train: .venv/ready
	.venv/bin/python train.py --env popgym --variant ind_ind $(shell nvidia-smi -L >/dev/null 2>&1 && echo --minutes 120)

test: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(PYTEST)

# The tests that train for minutes: learning with ind_ind and dep_dep, from three seeds.
test-slow: .venv/ready
	$(PYTEST) -m slow

# The experiment with rescaled rewards: 18 runs, about an hour on 2 cores; resumes if it was stopped.
scales: .venv/ready
	.venv/bin/python results/scales.py
	.venv/bin/python plot.py scales

# Speed here: about 20 minutes on 2 cores; leave the machine alone meanwhile.
bench: .venv/ready
	.venv/bin/python benchmarks/bench.py

.venv/ready: requirements.txt
	$(PYTHON) -m venv $(CLEAR) .venv
	.venv/bin/pip install -q --disable-pip-version-check -r requirements.txt
	touch $@

.PHONY: train test test-slow scales bench
