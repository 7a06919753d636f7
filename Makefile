# Two commands set everything up on a fresh machine: `make demo` and `make test`.
# `make test-all` also runs slow tests, and all cells of large grids. With PART=2/5 it runs the cells that `make test`
# has, slow tests, and the second of each five others; with PART=0/1 none of the others. So does `make emulate`.
# `make emulate` executes the compiled kernels of sm_80, sm_90, sm_100 and in part sm_120, instruction by instruction, on
# the CPU; the warp-specialized kernels also as each Triton of EMULATED compiles them.
# `make kernels` compiles every kernel for every GPU with each Triton of COMPILED, by default that of .venv and each of
# TRITONS; with KERNELS=--all-variants in all variants, which takes about an hour.
# `make hashes` writes the table of code hashes anew, with which `make kernels` compares.
# `make megatron` runs Megatron's tests with the megatron-core of .venv and each of MEGATRONS; `make megatron-0.18.0`
# with one of them; with PART=0/1 as `make test` has them.
# `make transformers` runs whole models with every older Transformers named here.
# `make peers` runs Transformers' own tests with fusedmlp as the default experts, and again with grouped_mm; with
# PART=1/3 only those of every third architecture.
# `make versions` runs the tests of the contract and of compiled layers, and the doctor, with the torch of
# tests/requirements-newest.txt and the last of TRITONS; and with each torch of OLDER, by default OLD_TORCHES, those tests
# of IN_OLD_TORCHES that are not slow, all of OF_OLD_TORCHES, and the doctor.
TRITONS := 3.8.0 3.9.0
EMULATED ?= $(TRITONS)
COMPILED ?= .venv $(TRITONS)
NEWEST_TORCH := $(shell sed -n 's/^torch==//p' tests/requirements-newest.txt)
NEWEST := $(CURDIR)/.torch/$(NEWEST_TORCH):$(CURDIR)/.triton/$(lastword $(TRITONS))
PLAIN := ddp fsdp2 grad_stealing
OLD_TORCHES := 2.11.0 2.12.1
OLDER ?= $(OLD_TORCHES)
IN_OLD_TORCHES := tests/contract $(PLAIN:%=tests/integrations/test_%.py)
OF_OLD_TORCHES := tests/tools/test_old_versions.py tests/tools/test_versions.py \
  tests/tools/test_readme.py::test_the_example_runs_as_pasted
MEGATRONS := 0.17.0 0.18.0
OLD_TRANSFORMERS := 5.14.1
FRAMEWORKS := lightning lightning-utilities torchmetrics trl datasets pyarrow dill multiprocess xxhash deepspeed hjson \
  msgpack torchao nemo_automodel
TRANSFORMERS := $(shell sed -n 's/^transformers==//p' constraints.txt)
KERNELS ?=
PART ?= 1/1
ALSO := plan routing tile_order beyond_int32 fused_microbatches quantize quantize_weights act_quantize
# Emulated with every Triton.
OTHERS := (warp_specialized and bf16 and not moe and not apart) or (test_kernels and (fp8_block or mxfp8)) \
  or (test_layer and swiglu) or (test_case and sm_120)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# make would remove these as intermediate files.
.SECONDARY: $(MEGATRONS:%=.megatron/%/.ready)

.PHONY: demo test test-all emulate lint docs bench kernels hashes versions hub megatron transformers peers clean

# Threads that have nothing to do sleep: spinning, they would keep the others from running beside other processes.
demo: $(READY)
	OMP_WAIT_POLICY=passive $(BIN)/python -m fusedmlp demo

test: $(READY) $(VENV)/.integrations
	$(BIN)/python -m pytest -n 2 --dist worksteal --quick

test-all: $(READY) $(VENV)/.integrations .frameworks/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal --part $(PART) --durations 20

# First the emulator's own tests and the cases of kernels; then the tests of kernels in ALSO, which no case repeats;
# then the warp-specialized kernels and a layer of each 8-bit recipe as each Triton of EMULATED compiles them, as names
# of Gluon change between versions (not layers of tokens or of separate experts, which run other kernels, too).
emulate: $(READY) $(TRITONS:%=.triton/%/.ready)
	EMULATE=sm_90 $(BIN)/python -m pytest -n 2 --dist worksteal --part $(PART) --durations 20 tests/emulation tests/ptx_emulator
	EMULATE=sm_90 $(BIN)/python -m pytest -n 2 --dist worksteal --part 0/1 $(ALSO:%=tests/kernels/test_%.py)
	for triton in $(EMULATED:%=.triton/%); do \
	  TRITON_DEFAULT_FP_FUSION=1 PYTHONPATH=$$triton EMULATE=sm_90 $(BIN)/python -m pytest -n 2 --dist worksteal --part $(PART) \
	    tests/emulation/test_kernels.py tests/emulation/test_eight_bit.py tests/emulation/test_mxfp8_triton.py \
	    -k '$(OTHERS)' || exit 1; \
	done

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror tests/ptx_emulator/machine/*.cpp tests/ptx_emulator/machine/*.h

docs: $(READY)
	$(BIN)/python -m mkdocs build --strict --quiet -f .mkdocs.yml
	@echo "docs: wrote $(CURDIR)/build/site; open it with: $(BIN)/python -m http.server -d build/site"

# .venv has the oldest torch with which layers compile; every other target tests with it. Only warnings of fusedmlp
# itself are errors: a newer torch also warns of changes to come in calls that PyTorch itself makes.
versions: $(READY) .torch/$(NEWEST_TORCH)/.ready $(OLDER:%=.torch/%/.ready) $(TRITONS:%=.triton/%/.ready)
	PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest -n 2 --dist worksteal --part 0/1 -o 'filterwarnings=error:::fusedmlp' \
	  tests/contract tests/api/test_compile.py tests/tools/test_versions.py tests/kernels/test_routing.py
	PYTHONPATH=$(NEWEST) $(BIN)/python -m fusedmlp doctor
	for torch in $(OLDER:%=$(CURDIR)/.torch/%); do \
	  PYTHONPATH=$$torch $(BIN)/python -m pytest -n 2 --dist worksteal --quick -o 'filterwarnings=error:::fusedmlp' \
	    $(IN_OLD_TORCHES) && PYTHONPATH=$$torch $(BIN)/python -m pytest -n 2 --part 0/1 $(OF_OLD_TORCHES) \
	    && PYTHONPATH=$$torch $(BIN)/python -m fusedmlp doctor || exit 1; \
	done

# All of these Tritons fuse multiply-adds by default; to say so avoids 3.9's warning that the default will change.
kernels: $(READY) $(TRITONS:%=.triton/%/.ready)
	@for triton in $(COMPILED:%=.triton/%); do \
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

# Another torch in a folder, with stand-ins for the CUDA libraries that it needs; Triton and the rest are .venv's.
.torch/%/.ready: $(READY)
	rm -rf $(@D)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(@D) torch==$* || \
	  { echo "versions: torch $*, of OLD_TORCHES or tests/requirements-newest.txt, cannot be installed: see above"; exit 1; }
	$(BIN)/python tests/cuda_stand_ins.py $(@D)/torch/lib
	@touch $@

megatron: $(VENV)/.integrations $(MEGATRONS:%=megatron-%)
	$(BIN)/python -m pytest -n 2 --part $(PART) tests/integrations/test_megatron.py

megatron-%: $(VENV)/.integrations .megatron/%/.ready
	PYTHONPATH=$(CURDIR)/.megatron/$* $(BIN)/python -m pytest -n 2 --part $(PART) tests/integrations/test_megatron.py

.megatron/%/.ready: $(READY)
	rm -rf $(@D)
	$(BIN)/pip install --quiet --disable-pip-version-check --ignore-requires-python --no-deps --target $(@D) megatron-core==$* || \
	  { echo "megatron: megatron-core $*, one of MEGATRONS in the Makefile, cannot be installed: see above"; exit 1; }
	@touch $@

# -k leaves out tests of architectures that these versions lack, or whose options have other names there.
transformers: $(VENV)/.integrations $(OLD_TRANSFORMERS:%=.transformers/wheel-%/.ready)
	@for version in $(OLD_TRANSFORMERS:%=$(CURDIR)/.transformers/wheel-%); do \
	  PYTHONPATH=$$version $(BIN)/python -m pytest tests/integrations/test_transformers.py \
	    tests/integrations/test_transformers_checkpoints.py \
	    -k 'table or steps_from or trainer_loses or accumulate_wgrad or saved_models or generate or hide or load_train' \
	    || exit 1; \
	done

# With its dependencies, since it refuses their newest versions.
.transformers/wheel-%/.ready: $(READY)
	rm -rf $(@D)
	$(BIN)/pip install --quiet --disable-pip-version-check --target $(@D) transformers==$* || \
	  { echo "transformers: Transformers $*, one of OLD_TRANSFORMERS in the Makefile, cannot be installed: see above"; exit 1; }
	@touch $@

peers: $(VENV)/.integrations .transformers/$(TRANSFORMERS)/.ready
	PYTHONPATH=tests $(BIN)/python -m peers --part $(PART)

# Transformers' tests are in its source distribution; its wheel has none.
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

# The libraries that fusedmlp plugs into. The first command leaves out dependencies that the tests do without (and
# megatron-core's requirement of Python 3.12). The second installs what is then missing: tyro and tomlkit for torchtitan
# and kernels, einops for Megatron-FSDP, parameterized for Transformers' own tests.
$(VENV)/.integrations: $(READY)
	@echo "pip may now say 'dependency conflicts': the tests do without the dependencies that it names"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --ignore-requires-python --no-deps \
	  megatron-core torchtitan spmd_types kernels
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt transformers accelerate peft tyro tomlkit \
	  einops parameterized
	@touch $@

# Libraries whose loops tests/integrations/test_frameworks.py runs. They are in a folder of their own, because
# Transformers, Accelerate and PEFT import any of them that .venv holds; dill needs the folder's name, site-packages.
# Dependencies that the tests do without are left out. DeepSpeed builds none of its operators, but its build imports
# torch, hence --no-build-isolation.
.frameworks/.ready: $(VENV)/.integrations
	rm -rf $(@D)
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps \
	  --no-build-isolation --target $(@D)/site-packages $(FRAMEWORKS)
	@touch $@

# The layout that Hugging Face's `kernel-builder` and `kernels` take, in build/hub.
hub: $(READY)
	rm -rf build/hub
	$(BIN)/python -m fusedmlp.integrations.hub build/hub

clean:
	rm -rf $(VENV) .torch .triton .megatron .transformers .frameworks build dist *.egg-info demo-output .pytest_cache \
	  .mypy_cache .ruff_cache
