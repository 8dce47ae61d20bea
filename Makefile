# make run: the environment (once), then a training run of half a minute.  make test: the fast tests.
PYTHON ?= python3
VENV := .venv/bin

run: .venv/installed
	$(VENV)/python grpo.py --steps 50

test: .venv/installed
	$(VENV)/pytest

# Without an NVIDIA GPU torch comes from its CPU index: on Linux the default build adds gigabytes of CUDA. uv, if it
# is there, chooses the build itself and is faster. Python compiles modules when it first imports them (--no-compile).
.venv/installed: requirements-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 run")'
ifneq (,$(shell command -v uv))
	uv venv --python $(PYTHON) .venv
	uv pip install --python .venv --torch-backend auto -r requirements-cpu.txt
else
	$(PYTHON) -m venv .venv
	command -v nvidia-smi || $(VENV)/pip install --no-compile torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
	$(VENV)/pip install --no-compile -r requirements-cpu.txt
endif
	touch $@

.PHONY: run test
