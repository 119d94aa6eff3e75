# Builds shard's programs into bin/. They find each other beside the running program, or in /usr/local/libexec/shard.
#
#   make          build everything this host needs (runc only where the host has none of version 1.1 or later)
#   make deps     on Debian or Ubuntu, as root: install what the build and the tests need and is missing
#   make clean    remove bin/

GO      ?= go
BIN     := bin
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)

# The version of each bundled runtime is the one in its module file, so that nothing is named twice.
GVISOR  := $(shell sed -n 's,^.*gvisor.dev/gvisor v0.0.0-,,p' tools/runsc/go.mod)
RUNC    := $(shell sed -n 's,^.*github.com/opencontainers/runc v\([^ ]*\).*$$,\1,p' tools/runc/go.mod)

GOFLAGS_STATIC := -trimpath -ldflags '-s -w'
HOST_RUNC      := $(shell runc --version 2>/dev/null | sed -n 's/^runc version \(1\.[1-9][0-9]*\|[2-9]\).*/yes/p')
SECCOMP        := $(shell pkg-config --exists libseccomp 2>/dev/null && echo seccomp)
DEB_PACKAGES   := gcc libc6-dev libseccomp-dev pkg-config busybox-static e2fsprogs iproute2 nftables

.PHONY: build shard shard-init shard-runsc runc deps clean
.DEFAULT_GOAL := build

build: shard shard-init shard-runsc $(if $(HOST_RUNC),,runc)

# The Go command knows what changed; these targets always ask it.
shard:
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o $(BIN)/shard ./cmd/shard

shard-init:
	CGO_ENABLED=0 $(GO) build $(GOFLAGS_STATIC) -o $(BIN)/shard-init ./cmd/shard-init

shard-runsc:
	cd tools/runsc && CGO_ENABLED=0 $(GO) build -trimpath \
		-ldflags '-s -w -X gvisor.dev/gvisor/runsc/version.version=$(GVISOR)' -o ../../$(BIN)/shard-runsc .

# runc needs cgo; without libseccomp's headers it is built without system call filters and the provider's probe refuses it.
runc:
	$(if $(SECCOMP),,@echo "runc: libseccomp-dev is missing, so this runc cannot filter system calls: run 'make deps'" >&2)
	cd tools/runc && CGO_ENABLED=1 $(GO) build -trimpath -tags 'netgo osusergo $(SECCOMP)' \
		-ldflags '-s -w -linkmode external -extldflags -static -X main.version=$(RUNC)' -o ../../$(BIN)/runc github.com/opencontainers/runc

deps:
	@missing=$$(for p in $(DEB_PACKAGES); do dpkg -s $$p >/dev/null 2>&1 || echo $$p; done); \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if ! command -v apt-get >/dev/null || [ $$(id -u) != 0 ]; then echo "install by hand:" $$missing >&2; exit 1; fi; \
	apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $$missing

clean:
	rm -rf $(BIN)
