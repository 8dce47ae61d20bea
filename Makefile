# make run: the environment (once), then a training run of some minutes.  make test: the fast tests.
PYTHON ?= python3
VENV := .venv/bin

run: .venv/installed
	$(VENV)/python grpo.py

test: .venv/installed
	$(VENV)/pytest

# Without an NVIDIA GPU torch comes from its CPU index: on Linux the default build adds gigabytes of CUDA.
.venv/installed: requirements-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 run")'
	$(PYTHON) -m venv .venv
	command -v nvidia-smi || $(VENV)/pip install torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
	$(VENV)/pip install -r requirements-cpu.txt
	touch $@

.PHONY: run test
