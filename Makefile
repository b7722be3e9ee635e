# `make run` and `make test` do all their set-up themselves; everything else expects `make setup`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Spec-Bench's questions, wherever they are.
PROMPTS ?= evaluation/prompts.jsonl
STAMP := $(VENV)/.installed

.PHONY: run test setup model lint protos same-output numerics replay-equals-live sanitize gpu compose-test clean

run: setup model  ## the main job: the stack under Ray, six real prompts, plain against speculative
	$(BIN)/python -m cluster.demo

test: setup model  ## lint, types, import rules, every test
	$(MAKE) lint
	$(BIN)/python -m pytest

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV): one to five minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

model: setup  ## SmolLM2-135M-Instruct, fetched once and converted into the cache
	$(BIN)/paceline model prepare smollm2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/hadolint Dockerfile deploy/trial/Dockerfile
	$(BIN)/compose-lint docker-compose.yml

# The stubs are committed. Their generator wants an older protobuf than the rest, so it has an environment of its own.
protos:
	$(PYTHON) -m venv .venv-protos
	.venv-protos/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.80.0 mypy-protobuf==5.1.0
	PATH="$(CURDIR)/.venv-protos/bin:$$PATH" .venv-protos/bin/python -m grpc_tools.protoc -I protos \
	  --python_out=. --mypy_out=. protos/paceline/v1/*.proto
	PATH="$(CURDIR)/.venv-protos/bin:$$PATH" .venv-protos/bin/python -m grpc_tools.protoc -I protos \
	  --grpc_python_out=. --mypy_grpc_out=. $(addprefix protos/paceline/v1/,router.proto verify.proto draft.proto ledger.proto)

same-output: setup model  ## 60 prompts, three drafters, three block lengths, two temperatures: equal to plain
	$(BIN)/python -m cluster.against --config evaluation/same_output.toml -- \
	  $(BIN)/python -m evaluation.same_output --prompts $(PROMPTS)

numerics: setup model  ## 200 prompts: alone, in a batch, warm, in pieces, interrupted, giving way, any k: zero divergences
	$(BIN)/python -m evaluation.numerics --prompts $(PROMPTS)

replay-equals-live: setup model  ## 50 prompts, two temperatures: replayed rounds against live ones, one by one
	$(BIN)/python -m evaluation.replay_equals_live --prompts $(PROMPTS)

sanitize: setup  ## compiled code with address and undefined-behaviour sanitizers, under the tests that call it
	CXX=$(CURDIR)/tests/sanitizing_compiler ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	$(BIN)/python -m pytest -q -s -p no:cacheprovider tests/unit/engine tests/unit/lookup tests/unit/sampling \
	  tests/unit/verify_service/test_native.py

gpu: setup  ## parity, same output and step costs on a GPU, with a random 1B-shaped model
	$(BIN)/python -m benchmarks.gpu

compose-test: setup  ## docker compose up, killed, cut off and taken down; brings an engine up where root can have one
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m deploy.trial

clean:
	rm -rf $(VENV) .venv-protos build dist
