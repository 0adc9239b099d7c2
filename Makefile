# SPDX-License-Identifier: Apache-2.0

GOLANGCI := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
CLANG    := 19.1.7

# How often `make demo` pings per protocol, mode and size, how long a file it sends, and
# how often it measures datatypes, and their overlap next to MPICH's.
COUNT := 2000
SIZE  := 256MiB
RUNS  := 7 3
# What `make bench` runs.
BENCH := rx match rtt kernel bystander slmp hostq ddt

# Commands that tests and benches run, and the Debian packages they are in.
TEST_TOOLS  := chromium-headless-shell:chromium-headless-shell curl:curl git:git gcc:gcc,libc6-dev ip:iproute2 mpichversion:mpich,libmpich-dev mpicc.openmpi:openmpi-bin,libopenmpi-dev ping:iputils-ping iperf3:iperf3 python3:python3 tshark:tshark clang-19:clang-19 llvm-strip-19:llvm-19
BENCH_TOOLS := gcc:gcc,libc6-dev iperf3:iperf3 mpichversion:mpich,libmpich-dev mpicc.openmpi:openmpi-bin,libopenmpi-dev
VM_TOOLS    := busybox:busybox-static ip:iproute2 ping:iputils-ping python3:python3 qemu-system-x86_64:qemu-system-x86 xz:xz-utils zstd:zstd
FRESH_TOOLS := debootstrap:debootstrap git:git

# Packages with random searches, and how many times longer than in make test
# these go on.
SOAK          := 30
SOAK_PACKAGES := slmp ddt loader nic eval/mpich client scripts

# Packages whose tests compute, or have the kernel's verifier compute, and wait for little: make test
# runs them beside the others, when these leave a CPU idle.
PURE := loader ddt ddt/ddttest mpq matcher packet spin internal/quantile internal/clock internal/pcapng eval/bench eval/chart eval/ddtloops eval/report

# Packages whose tests take long, and wait for most of it: make test runs them beside the others, which run one
# by one. Those of nic come last, without.
LONG := client daemon

# The Debian of make fresh.
SUITE       := trixie

# The kernels of make vmtest, by the Debian suite that they are in, and what is run
# there: the packages whose tests need a kernel, or of a package the tests behind "=".
KERNELS     := trixie trixie-backports
VM_PACKAGES := bpf internal/ethtool netns netns/impair xsk loader hostq nic nic/neigh slmp client daemon demos/pingpong demos/pingpong/rtt demos/file 'cli=Object|OnCapture|OfTheDocuments'
VM_RUN      :=

# Where make install puts things; DESTDIR is before all of it, for packages.
PREFIX     := /usr/local
SYSCONFDIR := /etc
DESTDIR    :=

# A tree that is no repository, or one git does not trust, builds without the
# commit in the binary.
VCS := $(if $(shell git rev-parse --verify -q HEAD 2>/dev/null),auto,false)

# One kind of build for all, that of bin/xspin: one that differs in -trimpath compiles everything
# again, the standard library too.
export GOFLAGS := $(filter-out -trimpath,$(shell go env GOFLAGS 2>/dev/null)) -trimpath

.DEFAULT_GOAL := help
.PHONY: help build install uninstall demo test test-quick soak vmtest vmtest-quick fresh bench generate generate-check lint clean go root clang test-tools bench-tools vm-tools fresh-tools
# Targets share the CPUs with what they measure.
.NOTPARALLEL:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: go ## bin/xspin, one static binary
	CGO_ENABLED=0 go build -buildvcs=$(VCS) -o bin/xspin ./cmd/xspin

# As root, who may have no Go: what make build made. A configuration that is there stays.
UNIT        = $(DESTDIR)$(PREFIX)/lib/systemd/system/xspin.service
CONFIG      = $(DESTDIR)$(SYSCONFDIR)/xspin/xspin.yaml
COMPLETIONS = bash:bash-completion/completions/xspin zsh:zsh/site-functions/_xspin fish:fish/vendor_completions.d/xspin.fish

install: ## bin/xspin of make build, unit, sample configuration, completion (PREFIX=/usr/local DESTDIR=)
	@[ -x bin/xspin ] || { echo "make install: bin/xspin is not there: run make build first, as yourself" >&2; exit 1; }
	install -D -m 755 bin/xspin $(DESTDIR)$(PREFIX)/bin/xspin
	install -D -m 644 dist/systemd/xspin.service $(UNIT)
	sed -i 's|^ExecStart=/usr/bin/xspin run /etc/xspin/|ExecStart=$(PREFIX)/bin/xspin run $(SYSCONFDIR)/xspin/|' $(UNIT)
	@if [ -e $(CONFIG) ]; then echo "$(CONFIG) is there, and stays"; \
	else echo "install -D -m 644 dist/xspin.yaml $(CONFIG)"; install -D -m 644 dist/xspin.yaml $(CONFIG); fi
	@set -e; for c in $(COMPLETIONS); do f="$(DESTDIR)$(PREFIX)/share/$${c#*:}"; \
		echo "bin/xspin completion $${c%%:*} > $$f"; \
		mkdir -p "$$(dirname "$$f")"; bin/xspin completion "$${c%%:*}" >"$$f"; chmod 644 "$$f"; done

uninstall: ## what make install put there, and the configuration if it is still the sample
	rm -f $(DESTDIR)$(PREFIX)/bin/xspin $(UNIT) $(foreach c,$(COMPLETIONS),$(DESTDIR)$(PREFIX)/share/$(lastword $(subst :, ,$(c))))
	@if cmp -s dist/xspin.yaml $(CONFIG); then rm -f $(CONFIG); rmdir $(dir $(CONFIG)) 2>/dev/null || :; \
	elif [ -e $(CONFIG) ]; then echo "$(CONFIG) is yours, and stays"; fi

# Client and server on different CPUs, for all modes: left to themselves they
# change places, and the figures jump by a factor of ten. The client spins, so
# that its own wakeup is not in the figures.
demo: root build ## ping-pong, a file transfer and datatypes, next to Linux and MPICH, as tables (root; COUNT=n SIZE=n RUNS=n)
	bin/xspin demo pingpong --proto both --mode host,nic,host+nic --size 16,516,1016,1416 --count $(COUNT) --pin --client-wait spin
	bin/xspin demo file --size $(SIZE) --pin
	bin/xspin demo datatypes --type simple --type complex --overlap --pin --verify --runs $(firstword $(RUNS))
	bin/xspin bench ddt --only overlap --runs $(lastword $(RUNS))

# Without the vet of go test: lint has run it. Without DWARF: sixty programs are linked. GORACE:
# or each process sleeps for a second when it ends.
RACE = GORACE=atexit_sleep_ms=10 XSPIN_NO_SKIP=1 CGO_ENABLED=1 go test -race -vet=off -ldflags=-w -count=1 -timeout 25m
FAST = XSPIN_NO_SKIP=1 CGO_ENABLED=0 go test -vet=off -ldflags=-w -count=1

# What a single goroutine computes, in these packages: without the race detector, which would find
# nothing and take minutes. And packages without a second goroutine, in them or in their tests.
UNRACED    := ^Test(Model|Auto|ProgramAgrees|MessagesAsInGo|DamagedObjects|LateRejections|PlacementRefuses|MemoryIsBounded|ParseIsBounded|StringIsBounded)
UNRACED_IN := slmp loader ddt mpq
SINGLE     := ddt/ddttest matcher packet spin internal/quantile eval/bench eval/chart eval/report

# Beside the others: the linter, which has to be built first; thousands of bad networks, of damaged
# objects, and millions of entries; what counts memory; and what else only computes. All of it, whatever fails.
test-beside = bad=0; ($(lint)) || bad=1; $(FAST) -p 1 -run "$(UNRACED)" $(addprefix ./,$(UNRACED_IN)) || bad=1; $(FAST) -p 1 $(addprefix ./,$(SINGLE)) || bad=1; $(RACE) -skip "$(UNRACED)" -p 1 $(addprefix ./,$(filter-out $(SINGLE),$(PURE))) || bad=1; exit $$bad

test: root go test-tools vm-tools generate-check ## every test, none skipped; installs Debian packages they need (root)
	$(FAST) -run TestLitmus ./hostq # the race detector orders what this wants to see unordered
	@log=$$(mktemp); setsid nice -n 19 sh -c '$(test-beside)' >"$$log" 2>&1 & beside=$$!; \
	long=; trap 'kill -- -$$beside 2>/dev/null; kill $$long 2>/dev/null; rm -f "$$log"' EXIT; trap 'exit 130' INT TERM; ok=0; \
	make --no-print-directory vmtest-quick || exit 1; \
	echo '$(FAST) -run EveryRow ./eval # and is what benches would measure; benches and experiments at once, whose figures do not matter here'; \
	$(FAST) -run EveryRow -skip 'Bench.*EveryRow' ./eval & experiments=$$!; \
	$(FAST) -run 'Bench.*EveryRow' ./eval || ok=1; wait $$experiments || ok=1; [ $$ok = 0 ] || exit 1; \
	echo 'CGO_ENABLED=1 go build -race ./... # on all CPUs. Below, the tests of two packages run, and those of the next are linked, so the times include waiting'; \
	CGO_ENABLED=1 go build -race ./... || exit 1; \
	$(RACE) -skip "$(UNRACED)" -p 2 $(addprefix ./,$(LONG)) & long=$$!; \
	$(RACE) -skip "$(UNRACED)" -p 2 -exec "flock -o '$(CURDIR)'" $$(go list ./... | grep -vxE "$$(go list $(addprefix ./,$(PURE) $(LONG) nic) | paste -sd '|')") || ok=1; \
	wait $$long || ok=1; long=; \
	$(RACE) -skip "$(UNRACED)" ./nic || ok=1; \
	wait $$beside || ok=1; beside=; cat "$$log"; exit $$ok

soak: root go test-tools ## random searches for hours rather than seconds (root; SOAK=times as long)
	XSPIN_SOAK=$(SOAK) CGO_ENABLED=0 go test -count=1 -p 1 -timeout 0 $(addprefix ./,$(SOAK_PACKAGES))

# Emulated: every figure is meaningless, and tests that depend on time skip.
vmtest: go vm-tools ## the tests that need a kernel under Debian's, emulated (KERNELS="trixie trixie-backports")
	rm -rf bin/vmtest && mkdir -p bin/vmtest
	CGO_ENABLED=0 go build -o bin/vmtest/test2json cmd/test2json
	CGO_ENABLED=0 go build -o bin/vmtest/tap ./scripts/tap
	@set -e; for p in $(VM_PACKAGES); do d=$${p%%=*}; CGO_ENABLED=0 go test -c -vet=off -ldflags=-w -o "bin/vmtest/$$(echo $$d | tr / -).test" "./$$d"; done
	@bad=; for k in $(KERNELS); do \
		scripts/vm fetch $$k || exit; \
		XSPIN_EMULATED=1 scripts/vm run -t 10800 $$k sh -c 'echo "# $$0: Linux $$(uname -r)"; exec "$$@"' $$k bin/vmtest/tap bin/vmtest/test2json \
			$$(for p in $(VM_PACKAGES); do d=$${p%%=*}; echo "$$d=bin/vmtest/$$(echo $$d | tr / -).test$${p#$$d}"; done) -- -test.short -test.timeout 3h $(if $(VM_RUN),-test.run '$(VM_RUN)') || bad="$$bad $$k"; \
	done; rm -rf bin/vmtest; [ -z "$$bad" ] || { echo "make vmtest: failed on$$bad" >&2; exit 1; }

vmtest-quick: KERNELS := trixie
vmtest-quick: VM_PACKAGES := bpf loader nic
vmtest-quick: VM_RUN := ^(TestEveryProgramLoads|TestPingIsAnsweredByHandlers|TestNumbersOfMessagesAreReused)$$
vmtest-quick: vmtest ## a slice of it: every eBPF program loads on Debian's kernel, pings and messages are answered

fresh: root go fresh-tools ## both commands of the README on a Debian that has nothing else, made by debootstrap (root; SUITE=trixie)
	scripts/fresh $(SUITE)

test-quick: go ## the short tests, in a minute; those that need root skip without it
	go test -short -count=1 -p 1 ./...

bench: root bench-tools build ## the figures and their targets (root; BENCH="rx match rtt kernel bystander slmp hostq ddt")
	@bad=; for b in $(BENCH); do \
		echo "bin/xspin bench $$b"; bin/xspin bench $$b --targets || bad="$$bad $$b"; \
	done; [ -z "$$bad" ] || { echo "make bench: failed:$$bad" >&2; exit 1; }

generate: go clang ## the eBPF objects and their Go bindings, from bpf/src and bpf/include
	go generate ./bpf

# Generated again elsewhere, so that the tree stays as it is and a path in the
# output would show.
generate-check: go clang ## fail unless the generated files are what bpf/src gives
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	cp -R go.mod go.sum bpf "$$tmp"; rm -f "$$tmp"/bpf/*_bpfel.*; (cd "$$tmp"; go generate ./bpf); \
	diff -rq bpf "$$tmp/bpf" || { echo "make generate-check: bpf/ is not what bpf/src gives: run make generate and commit" >&2; exit 1; }

lint: go ## gofmt and golangci-lint, which runs go vet and holds the dependency arrows
	@$(lint)

lint = out=$$(gofmt -l .) && { [ -z "$$out" ] || { echo "gofmt would change:" $$out >&2; exit 1; }; } && CGO_ENABLED=0 go run $(GOLANGCI) run ./...

clean: ## remove what build made
	rm -rf bin

# Conditions. Each says what is missing and what to do about it.

go:
	@command -v go >/dev/null || { echo "make: needs Go 1.26 or later in PATH: https://go.dev/dl/" >&2; exit 1; }

root:
	@[ "$$(id -u)" = 0 ] || { echo 'make $(MAKECMDGOALS): needs root, for network namespaces and XDP. Run: sudo env "PATH=$$PATH" make $(MAKECMDGOALS)' >&2; exit 1; }

# The committed objects are this compiler's, to the byte.
clang:
	@command -v clang-19 >/dev/null && command -v llvm-strip-19 >/dev/null || \
		{ echo "make: eBPF is compiled by clang $(CLANG): apt-get install clang-19 llvm-19" >&2; exit 1; }
	@clang-19 --version | grep -q 'version $(CLANG) ' || \
		{ echo "make: eBPF is compiled by clang $(CLANG), the one of Debian 12; clang-19 here is:" >&2; clang-19 --version | head -n 1 >&2; exit 1; }

test-tools: TOOLS = $(TEST_TOOLS)
bench-tools: TOOLS = $(BENCH_TOOLS)
vm-tools: TOOLS = $(VM_TOOLS)
fresh-tools: TOOLS = $(FRESH_TOOLS)
test-tools bench-tools vm-tools fresh-tools:
	@missing=; for t in $(TOOLS); do \
		command -v "$${t%%:*}" >/dev/null || missing="$$missing $$(echo "$${t#*:}" | tr , ' ')"; \
	done; \
	[ -n "$$missing" ] || exit 0; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "make: needs these Debian packages, or what your system calls them:$$missing" >&2; exit 1; \
	fi; \
	echo "apt-get install$$missing"; log=$$(mktemp); export DEBIAN_FRONTEND=noninteractive; \
	{ apt-get update && apt-get install -y --no-install-recommends $$missing; } >"$$log" 2>&1 </dev/null || \
		{ cat "$$log" >&2; rm -f "$$log"; echo "make: apt-get could not install$$missing" >&2; exit 1; }; \
	rm -f "$$log"
