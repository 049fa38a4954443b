# thaw: build, install, try, test. `make demo` and `make test` are all that a fresh machine needs.

PREFIX ?= /usr/local
DESTDIR ?=
export THAW_CACHE ?= /var/cache/thaw

TARGET := target/x86_64-unknown-linux-gnu
RELEASE := $(TARGET)/release
# What is run without being installed: an installed tree of its own, which may lie anywhere.
export THAW_STAGE := $(CURDIR)/target/stage
# The same of a build in which tests can end processes at certain points, which is never installed.
export THAW_STAGE_FAULTS := $(CURDIR)/target/stage-faults
# The end-to-end tests run where guests can: cargo hands their program to tests/run.
RUNNER := CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER
E2E := $(RUNNER)=$(CURDIR)/tests/run cargo test -p thaw-tests

# Two builds leave their programs in one place, one after the other.
.NOTPARALLEL:

.PHONY: all help setup kernel build install stage stage-faults demo lint unit e2e e2e-runc test test-long soak bench

all: build

help:
	@sed -n 's/^#: //p' Makefile

#: make demo       from nothing to the output of a container in a restored microVM
demo: setup stage
	tests/run -t 900 packaging/demo

#: make test       set-up, formatting, lints, unit tests, end-to-end tests
test: setup lint unit e2e

#: make test-long  the end-to-end tests that take longer than the others
test-long: setup stage-faults stage
	client=$$(tests/containerd-client/build) && THAW_CONTAINERD_CLIENT=$$client THAW_TIME_LIMIT=10800 $(E2E) -- --ignored --skip soak

#: make soak       start, end and kill containers, for an hour (MINUTES=60) and 500 times (ROUNDS=500)
soak: setup stage-faults stage
	THAW_SOAK_MINUTES=$(or $(MINUTES),60) THAW_CRASH_ROUNDS=$(or $(ROUNDS),500) \
	  THAW_TIME_LIMIT=$$((60 * ($(or $(MINUTES),60) + 30) + 20 * $(or $(ROUNDS),500))) $(E2E) -- --ignored soak

#: make bench      the clocks, beside runc in the same run; figures also in target/bench
bench: setup stage
	mkdir -p target/bench
	cargo build --release -p thaw-benches
	benches/peer prepare
	THAW_BENCH_PEER=$(CURDIR)/benches/peer tests/run -r target/bench $(RELEASE)/thaw-bench

#: make setup      install the packages that building and testing need (Debian 12 or 13, as root)
setup:
	packaging/setup

#: make build      the programs, the guest kernel and the initramfs
build: kernel
	cargo build --release -p thaw-vmm -p thaw-agent -p thaw-shim
	packaging/guest/build $(RELEASE)/thaw-agent target/guest/initramfs

# Built once a machine, outside of the work tree.
kernel:
	vmlinux=$$(packaging/kernel/build) && install -D -m 644 "$$vmlinux" target/guest/vmlinux

#: make install    put everything below $(DESTDIR)$(PREFIX); the tree can be moved afterwards
install: build
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/libexec/thaw $(DESTDIR)$(PREFIX)/share/thaw
	install -m 755 $(RELEASE)/containerd-shim-thaw-v2 $(RELEASE)/thaw $(DESTDIR)$(PREFIX)/bin/
	install -m 755 $(RELEASE)/thaw-vmm $(DESTDIR)$(PREFIX)/libexec/thaw/
	install -m 644 target/guest/vmlinux target/guest/initramfs $(DESTDIR)$(PREFIX)/share/thaw/
	install -m 644 packaging/config.toml $(DESTDIR)$(PREFIX)/share/thaw/config.toml.example

stage:
	$(MAKE) --no-print-directory install DESTDIR= PREFIX=$(THAW_STAGE)

# Only thaw's own crates differ from the build that is installed. That one comes last, which leaves its
# programs in $(RELEASE).
stage-faults: kernel
	cargo build --release -p thaw-vmm -p thaw-agent -p thaw-shim \
	  --features thaw-vmm/fault-points,thaw-agent/fault-points,thaw-shim/fault-points
	packaging/guest/build $(RELEASE)/thaw-agent target/guest/initramfs-faults
	install -d $(THAW_STAGE_FAULTS)/bin $(THAW_STAGE_FAULTS)/libexec/thaw $(THAW_STAGE_FAULTS)/share/thaw
	install -m 755 $(RELEASE)/containerd-shim-thaw-v2 $(THAW_STAGE_FAULTS)/bin/containerd-shim-thawfaulty-v2
	install -m 755 $(RELEASE)/thaw-vmm $(THAW_STAGE_FAULTS)/libexec/thaw/
	install -m 644 target/guest/vmlinux $(THAW_STAGE_FAULTS)/share/thaw/
	install -m 644 target/guest/initramfs-faults $(THAW_STAGE_FAULTS)/share/thaw/initramfs

#: make lint       rustfmt and clippy, without warnings
lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

#: make unit       the tests that need no guest
unit:
	cargo test --workspace --exclude thaw-tests --exclude thaw-benches

#: make e2e        the end-to-end tests, on real containerd; T=run:: picks those whose name has it
e2e: stage-faults stage
	$(if $(T),$(E2E) -- $(T),$(RUNNER)=$(CURDIR)/tests/all cargo test -p thaw-tests)
	$(if $(T),,$(RUNNER)=$(CURDIR)/tests/run THAW_TESTS_MUST_RUN=1 cargo test -p thaw-agent --test containers)

#: make e2e-runc   those end-to-end tests that hold for every runtime, with runc: a test of the tests
e2e-runc:
	THAW_RUNTIME=io.containerd.runc.v2 $(E2E) -- run:: exec:: stdio:: terminal:: signals:: files:: \
		limits::update limits::kills limits::counters tasks::out tasks::pause tasks::metrics \
		group::come group::five group::one group::shared
