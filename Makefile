# Jobs of this checkout; plain `make` lists them.
#
# Each job sets up its environment: .ci/setup prints the current Python if that has every dependency
# (it installs nothing then), otherwise the Python of .venv, which it creates once.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test check cpu gpu oldest newest test-vllm test-sglang mutants coverage docs \
	compile_commands.json clean

export PYTHON ?= python3
export HAS_GPU := $(firstword $(wildcard /proc/driver/nvidia /dev/nvidiactl))
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# Otherwise each worker, and each command that a test starts, compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

# $(call setup,EXTRA) starts a recipe; $(call with,MODULE,OPTIONS) adds the options of an installed
# plugin.
setup = set -eu; python=$$(.ci/setup $(1))
with = $$("$$python" -c "import $(1)" 2>/dev/null && echo "$(2)")

cpu_tests = "$$python" -m pytest -m "not gpu" \
	  $(call with,pytest_timeout,--timeout=120) $(call with,xdist,-n auto --dist worksteal)

help: ## list the jobs
	@sed -n 's/^\([a-z_.-]*\):.*## /make \1\t/p' Makefile | expand -t 28

demo: ## one decode from first call to cached kernel, on the GPU if there is one
	@$(call setup); "$$python" -m cache_tools demo

test: ## all tests that run on this machine
	@$(MAKE) --no-print-directory --keep-going cpu $(if $(HAS_GPU),gpu)
	@$(if $(HAS_GPU),,echo "tests/gpu skipped: no NVIDIA GPU on this machine")

check: ## format, lint, types and the CPU tests, required of every change
	@$(call setup,dev); PATH=$$(dirname "$$python"):$$PATH; set -x; \
	ruff format --check . ; \
	ruff check . ; \
	mypy --strict mlagen cache_tools tests examples; \
	find templates -name '*.cuh' -exec clang-format --dry-run -Werror {} +
	@$(MAKE) --no-print-directory cpu

# A CPU test takes at most 20 s on an idle machine with two cores; the timeouts only end hung tests.
cpu: ## the tests that need no GPU
	@$(call setup,test); $(cpu_tests)

# Each worker compiles the kernels that its tests need into the cache of the run.
gpu: ## the tests that need an NVIDIA GPU
	@$(call setup,test); "$$python" -m pytest -m gpu \
	  $(call with,pytest_timeout,--timeout=300) $(call with,xdist,-n 8 --dist worksteal)

oldest: ## the CPU tests with the oldest dependencies that pyproject.toml allows
	@set -eu; python=$$(.ci/versions oldest); $(cpu_tests)

newest: ## the CPU tests with the newest dependencies that pip finds
	@set -eu; python=$$(.ci/versions newest); $(cpu_tests)

test-vllm: ## the tests of the vLLM plugin over vLLM 0.33.0, in .envs/vllm
	@set -eu; python=$$(.ci/server vllm); "$$python" -m pytest tests/integrations/vllm

test-sglang: ## the tests of the SGLang plugin over SGLang 0.5.23, in .envs/sglang
	@set -eu; python=$$(.ci/server sglang); "$$python" -m pytest tests/integrations/sglang

# A worker or a command that a test starts is measured too.
coverage: ## line and branch coverage, with the least share that pyproject.toml names
	@$(call setup,dev); "$$python" -m coverage erase; \
	"$$python" -m coverage run -m pytest -q -m "not gpu" $(call with,xdist,-n auto --dist worksteal); \
	"$$python" -m coverage combine -q; \
	"$$python" -m coverage report

docs: ## the documentation site, in build/site
	@$(call setup,docs); NO_MKDOCS_2_WARNING=1 "$$python" -m mkdocs build --strict

mutants: ## break one line of a kernel at a time, and require that a named test fails
	@$(call setup,test); "$$python" -m tests.mutants

compile_commands.json: ## the input of clangd for templates/, rendered into build/clangd
	@$(call setup,test); "$$python" -m tests.templates.compile_commands

clean: ## remove .venv and the files of tools; cached kernels stay
	rm -rf .venv .venv-oldest .venv-newest .envs build dist *.egg-info compile_commands.json .cache .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
