# Two commands set everything up on a fresh machine: `make demo` and `make test`.
# `make test-all` also runs the cells of large grids and the long runs that `make test` leaves out.
# `make emulate` executes the compiled kernels of sm_80, sm_90 and sm_100, instruction by instruction, on the CPU.
# `make kernels` compiles every kernel for every GPU with every Triton named here, beside that of .venv; with
# KERNELS=--all-variants in all variants, which takes about an hour.
# `make hashes` writes anew which code they are, the table with which `make kernels` compares.
# `make megatron` runs its tests with that of .venv and every megatron-core named here; `make megatron-0.18.0` with one.
# `make transformers` runs whole models with every older Transformers named here.
# `make peers` runs Transformers' own tests with fusedmlp as the default experts, and again with grouped_mm; with
# PART=1/3 those of every third architecture.
# `make versions` runs the contract's tests, those of compiled layers and the doctor with the newest torch named here.
TRITONS := 3.8.0 3.9.0
NEWEST_TORCH := $(shell sed -n 's/^torch==//p' tests/requirements-newest.txt)
NEWEST := $(CURDIR)/.torch/$(NEWEST_TORCH):$(CURDIR)/.triton/$(lastword $(TRITONS))
MEGATRONS := 0.16.1 0.17.0 0.18.0
OLD_TRANSFORMERS := 5.7.0 5.14.1
FRAMEWORKS := lightning lightning-utilities torchmetrics trl datasets pyarrow dill multiprocess xxhash deepspeed hjson \
  msgpack torchao
TRANSFORMERS := $(shell sed -n 's/^transformers==//p' constraints.txt)
KERNELS ?=
PART ?= 1/1
ALSO := plan routing tile_order beyond_int32 fused_microbatches
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Not to be removed as intermediate files.
.SECONDARY: $(MEGATRONS:%=.megatron/%/.ready)

.PHONY: demo test test-all emulate lint docs bench kernels hashes versions hub megatron transformers peers clean

demo: $(READY)
	$(BIN)/python -m fusedmlp demo

test: $(READY) $(VENV)/.integrations
	$(BIN)/python -m pytest -n 2 --dist worksteal --quick
	EMULATE=sm_90 $(BIN)/python -m pytest -n 2 --dist worksteal --quick tests/emulation tests/ptx_emulator

test-all: $(READY) $(VENV)/.integrations .frameworks/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The emulator's own tests and its cases; those tests of kernels, ALSO, that no case repeats; then what each Triton of
# TRITONS makes of the kernels with a task for each warp, as names of Gluon change (not layers of tokens or with experts
# apart, for which other kernels run, too).
emulate: $(READY) $(TRITONS:%=.triton/%/.ready)
	EMULATE=sm_90 $(BIN)/python -m pytest -n 2 --dist worksteal tests/emulation tests/ptx_emulator
	EMULATE=sm_90 $(BIN)/python -m pytest -n 2 --dist worksteal --quick $(ALSO:%=tests/kernels/test_%.py)
	for triton in $(TRITONS:%=.triton/%); do \
	  TRITON_DEFAULT_FP_FUSION=1 PYTHONPATH=$$triton EMULATE=sm_90 $(BIN)/python -m pytest -n 2 --dist worksteal \
	    tests/emulation/test_kernels.py -k 'specialised and bf16 and not moe and not apart' || exit 1; \
	done

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror tests/ptx_emulator/machine/*.cpp tests/ptx_emulator/machine/*.h

docs: $(READY)
	$(BIN)/python -m mkdocs build --strict --quiet -f .mkdocs.yml

# .venv has the oldest torch, with which every other target tests. Of warnings, those of fusedmlp itself are errors: a
# newer torch warns of what is to come in PyTorch's own calls.
versions: $(READY) .torch/$(NEWEST_TORCH)/.ready $(TRITONS:%=.triton/%/.ready)
	PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest -n 2 --dist worksteal --quick -o 'filterwarnings=error:::fusedmlp' \
	  tests/contract tests/api/test_compile.py tests/tools/test_versions.py tests/kernels/test_routing.py
	PYTHONPATH=$(NEWEST) $(BIN)/python -m fusedmlp doctor

# Fused multiply-adds are what every one of these defaults to, but 3.9 warns of a change to come.
kernels: $(READY) $(TRITONS:%=.triton/%/.ready)
	@for triton in '' $(TRITONS:%=.triton/%); do \
	  TRITON_DEFAULT_FP_FUSION=1 PYTHONPATH=$$triton $(BIN)/python -m fusedmlp kernels $(KERNELS) >.triton/kernels.txt \
	    || { grep -v ' ok$$' .triton/kernels.txt; exit 1; }; \
	done

hashes: $(READY) $(TRITONS:%=.triton/%/.ready)
	@for triton in '' $(TRITONS:%=.triton/%); do \
	  TRITON_DEFAULT_FP_FUSION=1 PYTHONPATH=$$triton $(BIN)/python -m fusedmlp kernels --hashes --write >/dev/null \
	    || exit 1; \
	done

# Another Triton in a folder that goes before .venv on the path; torch and the rest are .venv's.
.triton/%/.ready: $(READY)
	rm -rf $(@D)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(@D) triton==$* || \
	  { echo "kernels: Triton $*, one of TRITONS in the Makefile, cannot be installed: see above"; exit 1; }
	@touch $@

# Without the libraries of CUDA that it asks for.
.torch/%/.ready: $(READY)
	rm -rf $(@D)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(@D) torch==$* || \
	  { echo "versions: torch $*, that of tests/requirements-newest.txt, cannot be installed: see above"; exit 1; }
	$(BIN)/python tests/cuda_stand_ins.py $(@D)/torch/lib
	@touch $@

megatron: $(VENV)/.integrations $(MEGATRONS:%=megatron-%)
	$(BIN)/python -m pytest tests/integrations/test_megatron.py

megatron-%: $(VENV)/.integrations .megatron/%/.ready
	PYTHONPATH=$(CURDIR)/.megatron/$* $(BIN)/python -m pytest tests/integrations/test_megatron.py

.megatron/%/.ready: $(READY)
	rm -rf $(@D)
	$(BIN)/pip install --quiet --disable-pip-version-check --ignore-requires-python --no-deps --target $(@D) megatron-core==$* || \
	  { echo "megatron: megatron-core $*, one of MEGATRONS in the Makefile, cannot be installed: see above"; exit 1; }
	@touch $@

# Tests of architectures that these versions lack, or whose options they call otherwise, are left out.
transformers: $(VENV)/.integrations $(OLD_TRANSFORMERS:%=.transformers/wheel-%/.ready)
	@for version in $(OLD_TRANSFORMERS:%=$(CURDIR)/.transformers/wheel-%); do \
	  PYTHONPATH=$$version $(BIN)/python -m pytest tests/integrations/test_transformers.py \
	    tests/integrations/test_transformers_checkpoints.py \
	    -k 'table or steps_from or trainer_loses or accumulate_wgrad or saved_models or generate or hide or load_train' \
	    || exit 1; \
	done

# With what it depends on, of which it refuses the newest; before 5.13 it fails to be imported beside a newer `kernels`.
.transformers/wheel-%/.ready: $(READY)
	rm -rf $(@D)
	$(BIN)/pip install --quiet --disable-pip-version-check --target $(@D) transformers==$* && \
	  $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(@D) 'kernels<0.13' || \
	  { echo "transformers: Transformers $*, one of OLD_TRANSFORMERS in the Makefile, cannot be installed: see above"; exit 1; }
	@touch $@

peers: $(VENV)/.integrations .transformers/$(TRANSFORMERS)/.ready
	PYTHONPATH=tests $(BIN)/python -m peers --part $(PART)

# The tests that its source distribution holds; its wheel has none.
.transformers/%/.ready: $(READY)
	rm -rf $(@D)
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --no-binary transformers --no-build-isolation \
	  -d $(@D) transformers==$* || \
	  { echo "peers: the source distribution of Transformers $* cannot be fetched: see above"; exit 1; }
	tar -xzf $(@D)/transformers-$*.tar.gz -C $(@D) --strip-components=1 transformers-$*/tests
	rm $(@D)/transformers-$*.tar.gz
	@touch $@

# The page of comparisons; the figures of README.md and docs/ come from a copy of its table in bench/results/.
bench: $(READY) $(VENV)/.integrations
	$(BIN)/python -m fusedmlp bench --report build/bench

# torch goes first: anything that merely asks for "torch" must find it already there.
$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fusedmlp needs Python 3.11 or newer, $(PYTHON) is older; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev,docs,bench]'
	@touch $(READY)

# The libraries that fusedmlp plugs into. Those of the first line ask for packages that the tests do without (and
# megatron-core for Python 3.12); tyro and tomlkit are what torchtitan and kernels then lack, einops what Megatron-FSDP
# does, parameterized what Transformers' own tests do.
$(VENV)/.integrations: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --ignore-requires-python --no-deps \
	  megatron-core torchtitan spmd_types kernels
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt transformers accelerate peft tyro tomlkit \
	  einops parameterized
	@touch $@

# Libraries whose loops tests/integrations/test_frameworks.py runs. They are in a folder of their own, as Transformers,
# Accelerate and PEFT import whichever of them .venv holds; it is called site-packages, as dill asks for that. They ask
# for packages that the tests do without. DeepSpeed builds none of its operators, but imports torch to say so.
.frameworks/.ready: $(VENV)/.integrations
	rm -rf $(@D)
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps \
	  --no-build-isolation --target $(@D)/site-packages $(FRAMEWORKS)
	@touch $@

# What `kernel-builder` and `kernels` of Hugging Face take, in build/hub.
hub: $(READY)
	rm -rf build/hub
	$(BIN)/python -m fusedmlp.integrations.hub build/hub

clean:
	rm -rf $(VENV) .torch .triton .megatron .transformers .frameworks build dist *.egg-info demo-output .pytest_cache \
	  .mypy_cache .ruff_cache
