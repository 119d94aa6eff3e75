# Builds shard's programs into bin/. They find each other beside the running program, or in /usr/local/libexec/shard.
#
#   make          build everything this host needs (runc only where the host has none of version 1.1 or later)
#   make deps     on Debian or Ubuntu, as root: install what the build and the tests need and is missing (BROWSER=1: and
#                 a Chromium without windows, 100 MB to fetch, with which the tests look at previews)
#   make demo     see it work: an agent's code in a gVisor sandbox, on a private daemon that leaves nothing behind
#   make test     check, then every test; ends with a line that counts. As root, else most of it is skipped
#   make sdk      test the Python and TypeScript SDKs (FULL=1: everything)
#   make check    what needs no running: format, vet, import table, sizes, other platforms
#   make gen      write api/openapi.json and docs/api.md from the routes and the types
#   make fuzz-api let a fuzzer loose on a daemon's API, for a minute; as root
#   make bench    measure each verb beside its floor (BENCH=... for options, see bench/)
#   make install  as root: programs and the systemd unit, below PREFIX (/usr/local)
#   make clean    remove what was built

GO      ?= go
BIN     := bin
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)

# The version of each bundled runtime is the one in its module file, so that nothing is named twice.
GVISOR  := $(shell sed -n 's,^.*gvisor.dev/gvisor v0.0.0-,,p' tools/runsc/go.mod)
RUNC    := $(shell sed -n 's,^.*github.com/opencontainers/runc v\([^ ]*\).*$$,\1,p' tools/runc/go.mod)

GOFLAGS_STATIC := -trimpath -ldflags '-s -w'
HOST_RUNC      := $(shell runc --version 2>/dev/null | sed -n 's/^runc version \(1\.[1-9][0-9]*\|[2-9]\).*/yes/p')
SECCOMP        := $(shell pkg-config --exists libseccomp 2>/dev/null && echo seccomp)
DEB_PACKAGES   := gcc libc6-dev libseccomp-dev libssl-dev pkg-config git busybox-static e2fsprogs iproute2 nftables openssl systemd
PREFIX         ?= /usr/local
DESTDIR        ?=
TESTFLAGS      ?=

.PHONY: build shard shard-init shard-runsc runc deps check gen gen-check sdk test fuzz-api demo bench install clean
.DEFAULT_GOAL := build

build: shard shard-init shard-runsc $(if $(HOST_RUNC),,runc)

# The Go command knows what changed; these targets always ask it.
shard:
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o $(BIN)/shard ./cmd/shard

shard-init:
	CGO_ENABLED=0 $(GO) build $(GOFLAGS_STATIC) -o $(BIN)/shard-init ./cmd/shard-init

shard-runsc:
	cd tools/runsc && CGO_ENABLED=0 $(GO) build -trimpath \
		-ldflags '-s -w -X gvisor.dev/gvisor/runsc/version.version=$(GVISOR)' -o $(abspath $(BIN))/shard-runsc .

# runc needs cgo; without libseccomp's headers it is built without system call filters and the provider's probe refuses it.
runc:
	$(if $(SECCOMP),,@echo "runc: libseccomp-dev is missing, so this runc cannot filter system calls: run 'make deps'" >&2)
	cd tools/runc && CGO_ENABLED=1 $(GO) build -trimpath -tags 'netgo osusergo $(SECCOMP)' \
		-ldflags '-s -w -linkmode external -extldflags -static -X main.version=$(RUNC)' -o $(abspath $(BIN))/runc github.com/opencontainers/runc

# Does nothing when everything is there. A machine without Go gets the distribution's, which fetches the version that
# go.mod names by itself if it is 1.21 or later. Ubuntu's only Chromium is a snap, which its apt-get would try to set up.
deps:
	@missing=$$(for p in $(DEB_PACKAGES); do dpkg -s $$p >/dev/null 2>&1 || echo $$p; done; \
		command -v $(GO) >/dev/null || echo golang-go); \
	browser=$(if $(BROWSER),chromium-headless-shell); \
	for p in chromium-headless-shell chromium google-chrome; do if command -v $$p >/dev/null; then browser=; fi; done; \
	if [ -z "$$missing$$browser" ]; then exit 0; fi; \
	if ! command -v apt-get >/dev/null || [ $$(id -u) != 0 ]; then echo "make deps: not root on Debian or Ubuntu: install by hand:" $$missing $$browser >&2; exit 0; fi; \
	apt-get -q update || exit; \
	if [ -n "$$browser" ] && ! apt-cache show $$browser >/dev/null 2>&1; then \
		echo "make deps: this distribution has no package $$browser: the tests that need a browser are skipped" >&2; browser=; fi; \
	if [ -z "$$missing$$browser" ]; then exit 0; fi; \
	DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends $$missing $$browser

# The agent stays in every sandbox: it must stay small.
check: shard-init gen-check
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$unformatted" ]; then echo "gofmt these:" $$unformatted >&2; exit 1; fi
	$(GO) vet ./...
	$(GO) test -run 'TestHouse|TestBans' .
	@size=$$(stat -c %s $(BIN)/shard-init); if [ $$size -gt 4194304 ]; then echo "shard-init has $$size bytes, more than 4 MiB" >&2; exit 1; fi
	GOOS=linux GOARCH=arm64 CGO_ENABLED=0 $(GO) build -o /dev/null ./...
	GOOS=darwin GOARCH=arm64 CGO_ENABLED=0 $(GO) build -o /dev/null ./cmd/shard

gen:
	$(GO) run ./tools/openapi

gen-check:
	$(GO) run ./tools/openapi -check

# The SDKs against the programs in bin/: a short run here, everything with `make sdk FULL=1`.
sdk: build
	@if python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
		then QUICK=$(if $(FULL),,1) sdk/python/check; \
		else echo "skipped: sdk/python: it needs python3 3.11 or later with venv" >&2; fi
	@if node -e 'const [a, b] = process.versions.node.split(".").map(Number); process.exit(a > 20 || a == 20 && b >= 3 ? 0 : 1)' 2>/dev/null && command -v npm >/dev/null; \
		then QUICK=$(if $(FULL),,1) sdk/typescript/check; \
		else echo "skipped: sdk/typescript: it needs node 20.3 or later with npm" >&2; fi

test: build check sdk
	$(GO) test -json -timeout 40m $(TESTFLAGS) ./... | $(GO) run ./tools/report $(if $(STRICT),,-again 5)

demo: build
	demo/run

fuzz-api: build
	test/fuzz-api

bench: build
	$(GO) run ./bench $(BENCH)

install: build
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/libexec/shard $(DESTDIR)/etc/systemd/system
	install -m 755 $(BIN)/shard $(DESTDIR)$(PREFIX)/bin/shard
	install -m 755 $(BIN)/shard-init $(BIN)/shard-runsc $(DESTDIR)$(PREFIX)/libexec/shard/
	if [ -x $(BIN)/runc ]; then install -m 755 $(BIN)/runc $(DESTDIR)$(PREFIX)/libexec/shard/; fi
	sed 's,@PREFIX@,$(PREFIX),' packaging/shard.service >$(DESTDIR)/etc/systemd/system/shard.service
	@echo 'installed; start it for good: systemctl daemon-reload && systemctl enable --now shard'

clean:
	rm -rf $(BIN) build
