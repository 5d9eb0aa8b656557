.DEFAULT_GOAL := help
# Without bytecode every process compiles torch and SGLang anew: half a minute for each worker that starts.
unexport PYTHONDONTWRITEBYTECODE
PYTHON := .venv/bin/python
DEMO_ARGS ?=
PROMPTS ?=

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Build the locked CPU environment (cached outside the clone) and link it as .venv
	@python3 scripts/setup_env.py --kind cpu

setup-gpu: ## The same with the full SGLang wheel set for NVIDIA GPUs
	@python3 scripts/setup_env.py --kind gpu

model: setup ## Convert the demo's small LLM once, outside the clone
	@.venv/bin/adaflash model

demo: model ## The closed loop on this machine: watch acceptance rise (DEMO_ARGS="--minutes 8 --json build/demo.json")
	@.venv/bin/adaflash demo $(DEMO_ARGS)

pretrain: model ## A drafter for DEMO_ARGS="--warm build/warm": some minutes of offline distillation
	@.venv/bin/adaflash pretrain --out build/warm

test: setup ## All tests, against real services (about 15 minutes on two cores)
	@$(PYTHON) -m pytest

test-unit: setup ## Only what needs no SGLang server (seconds)
	@$(PYTHON) -m pytest tests/unit tests/contract

test-sglang: setup ## What runs on the real engine: losslessness, acceptance, verify lengths, swaps
	@$(PYTHON) -m pytest tests/e2e/test_adaptive.py tests/e2e/test_lossless.py tests/e2e/test_acceptance_parity.py tests/e2e/test_swap.py

lint: setup ## Style, formatting and types
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@$(PYTHON) -m mypy

bench: setup ## Speed figures of this machine, as JSON and a table in benchmarks/results
	@$(PYTHON) -m benchmarks.loop

bench-step: setup ## Time and memory of a distillation step beside a straightforward one (benchmarks/results/distill_step.md)
	@$(PYTHON) -m benchmarks.distill_step

bench-verify: setup model ## Whole blocks against adaptive verify lengths under load (benchmarks/results/verify_budget.md)
	@$(PYTHON) -m benchmarks.verify_budget

ablation: setup model ## What each choice of the distillation is worth; hours (PROMPTS="gsm8k.jsonl mbpp.jsonl" for real prompts)
	@OMP_WAIT_POLICY=PASSIVE $(PYTHON) -m benchmarks.ablation --prompts $(PROMPTS)

clean: ## Remove what was built in the clone (the cache outside it stays)
	@rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache

.PHONY: help setup setup-gpu model demo pretrain test test-unit test-sglang lint bench bench-step bench-verify ablation clean
