# The commands of README.md. `make demo` and `make test` install what they need on Debian 12 and 13.
.PHONY: all build deps demo test install clean help

PREFIX ?= /usr/local

all: build

help:
	@echo "make demo     the whole loop on three QEMU guests, about 6 minutes; needs root; writes demo/report.html"
	@echo "make test     all checks"
	@echo "make build    target/release/rtvirtio"
	@echo "make install  rtvirtio and rtvirtio-iod in PREFIX/bin (PREFIX=$(PREFIX))"

deps:
	@sh scripts/deps.sh

build: deps
	cargo build --locked --release

demo: deps
	@[ "$$(id -u)" -eq 0 ] || { echo "make demo needs root (loop devices, FUSE, cgroups): sudo make demo" >&2; exit 1; }
	@# Under sudo the build is the user's, so that a later build without sudo finds its files writable.
	@if [ -n "$$SUDO_USER" ] && [ "$$SUDO_USER" != root ] && su - "$$SUDO_USER" -c 'cargo --version' >/dev/null 2>&1; \
	then su - "$$SUDO_USER" -c 'cd "$(CURDIR)" && cargo build --locked --release'; \
	else cargo build --locked --release; fi
	target/release/rtvirtio-lab demo --out demo; code=$$?; \
	[ -z "$$SUDO_USER" ] || chown -R "$$SUDO_USER" demo 2>/dev/null || true; exit $$code

test: deps
	@sh scripts/test.sh

install: build
	install -D -m 755 target/release/rtvirtio $(DESTDIR)$(PREFIX)/bin/rtvirtio
	install -D -m 755 target/release/rtvirtio-lab $(DESTDIR)$(PREFIX)/bin/rtvirtio-lab
	install -D -m 755 target/release/rtvirtio-iod $(DESTDIR)$(PREFIX)/bin/rtvirtio-iod

clean:
	cargo clean
	rm -rf demo
