# The commands of README.md. `make demo` and `make test` install what they need on Debian 12 and 13.
.PHONY: all build deb guest deps deps-test demo check test test-host test-cluster test-slow test-next reference install clean help

PREFIX ?= /usr/local
# What the demo runs, and names at its end.
DEMO = -p rtvirtio-lab -p rtvirtio -p rtvirtiod

all: build

help:
	@echo "make build      target/release/rtvirtio; needs a Rust compiler, 1.85 or later, and a C linker"
	@echo "make guest      target/guest/release/rtvirtio-guest, without libraries, to be copied into guests"
	@echo "make deb        Debian packages of the build in target/debian: rtvirtio, rtvirtio-pacemaker, rtvirtio-lab, rtvirtio-guest"
	@echo "make deps       installs the rest on Debian 12 and 13: a compiler, fio, QEMU, ...; needs root"
	@echo "make deps-test  the same and libvirt's daemon, which the tests start themselves"
	@echo "make demo       the whole loop on three QEMU guests, about 3 minutes after the build; needs root; writes demo/report.html and demo/page.html"
	@echo "make check      format, lints, unit tests, in less than 5 minutes; needs no root"
	@echo "make test       all checks, about 30 minutes; as root also those on the real kernel"
	@echo "make test-host  the part of them on this host's kernel, without guests"
	@echo "make test-cluster  the part of them that starts Pacemaker clusters"
	@echo "make test-slow  the part of them that boots guests and the box"
	@echo "make test-next  the integration tests on Debian sid's and 13's QEMU, libvirt, fio, systemd, Pacemaker and kernels: hours; goes on where it ended"
	@echo "make reference  docs/reference/cli, made anew from the programs' arguments"
	@echo "make install    rtvirtio, rtvirtiod, rtvirtio-iod and rtvirtio-lab in PREFIX/bin (PREFIX=$(PREFIX))"

deps:
	@sh scripts/deps.sh

deps-test:
	@sh scripts/deps.sh test

build:
	@command -v cargo >/dev/null 2>&1 || { echo "no cargo here: make deps, or https://rustup.rs" >&2; exit 1; }
	cargo build --locked --release

# The guest's part, which runs where none of the build's libraries are: linked statically, in a directory of its own.
guest:
	cargo rustc --locked --release -p rtvirtio-guest --target-dir target/guest -- -C target-feature=+crt-static
	@ls -l target/guest/release/rtvirtio-guest

deb: build guest
	cargo build --locked --release -p rtvirtio-bench
	@sh packaging/deb/build.sh

demo: deps
	@[ "$$(id -u)" -eq 0 ] || { echo "make demo needs root (loop devices, FUSE, cgroups): sudo make demo" >&2; exit 1; }
	@# Under sudo the build is the user's, so that a later build without sudo finds its files writable.
	@if [ -n "$$SUDO_USER" ] && [ "$$SUDO_USER" != root ] && su - "$$SUDO_USER" -c 'cargo --version' >/dev/null 2>&1; \
	then su - "$$SUDO_USER" -c 'cd "$(CURDIR)" && cargo build --locked --release $(DEMO)'; \
	else cargo build --locked --release $(DEMO); fi
	target/release/rtvirtio-lab demo --out demo; code=$$?; \
	[ -z "$$SUDO_USER" ] || chown -R "$$SUDO_USER" demo 2>/dev/null || true; exit $$code

check:
	@sh scripts/test.sh check

test: deps-test
	@sh scripts/test.sh all

test-host: deps-test
	@sh scripts/test.sh host

test-cluster: deps-test
	@sh scripts/test.sh cluster

test-slow: deps-test
	@sh scripts/test.sh slow

# No part of `make test`: it follows releases, not the sources.
test-next:
	@python3 scripts/test_next.py

# Pages of the commands. `make check` fails when one of them is not what the arguments say.
reference:
	RTVIRTIO_WRITE_REFERENCE=1 cargo test --locked --quiet --workspace --bins the_reference_is_that_of_the_arguments

# No build here: under sudo the compiler of the user may not be found.
install:
	@for program in rtvirtio rtvirtiod rtvirtio-iod rtvirtio-lab; do \
	[ -x target/release/$$program ] || { echo "no target/release/$$program yet: make build" >&2; exit 1; }; done
	install -D -m 755 target/release/rtvirtio $(DESTDIR)$(PREFIX)/bin/rtvirtio
	install -D -m 755 target/release/rtvirtio-lab $(DESTDIR)$(PREFIX)/bin/rtvirtio-lab
	install -D -m 755 target/release/rtvirtio-iod $(DESTDIR)$(PREFIX)/bin/rtvirtio-iod
	install -D -m 755 target/release/rtvirtiod $(DESTDIR)$(PREFIX)/bin/rtvirtiod
	[ ! -x target/guest/release/rtvirtio-guest ] || install -D -m 755 target/guest/release/rtvirtio-guest $(DESTDIR)$(PREFIX)/bin/rtvirtio-guest

clean:
	cargo clean
	rm -rf demo
