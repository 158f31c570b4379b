# Each target does its own set-up below .venv/, once, and again when pyproject.toml changes.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help test lint demo run bench chaos clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: ## Run all tests: oldest and newest Python and Django, SQLite and PostgreSQL (ARGS="-k word" narrows)
	@.ci/matrix test $(ARGS)

lint: ## Check style, types, import layers and migrations
	@.ci/matrix lint

demo: ## Run the example project on a new SQLite file and show what was delivered
	@.ci/environment demo any example
	@.venv/demo/bin/python manage.py demo

run: ## Run the example project: web server and relay, on SQLite or DATABASE_URL
	@.ci/environment demo any example
	@.venv/demo/bin/python manage.py run

bench: ## Measure speed beside plain psycopg (ARGS="drain --scale 0.1" narrows; ARGS=--help)
	@.ci/environment bench any test
	@.venv/bench/bin/python -m tests.benchmarks $(ARGS)

chaos: ## Kill, pause and cut off relays for a minute, then count what is lost or doubled (ARGS="--seconds 300"; ARGS=--help)
	@.ci/environment bench any test
	@.venv/bench/bin/python -m tests.chaos $(ARGS)

clean: ## Remove environments, caches and the demo's database
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	rm -f db.sqlite3*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
