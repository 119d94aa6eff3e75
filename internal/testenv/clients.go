package testenv

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
)

// ClientsRef is the reference that the archive of clients carries.
const ClientsRef = "local/clients:latest"

// ClientNames are the programs get-NAME of the image of clients. `get-NAME URL ["HEADER: VALUE"]` prints what the URL answers,
// and fails where that is no success or nothing. get-rust is there too where Rust is on this host: see Missing.
var ClientNames = []string{"curl", "wget", "urllib", "requests", "httpx", "node", "go", "java"}

// OtherClientNames are more of them, which agents use less.
var OtherClientNames = []string{"wget2", "aria2", "openssl", "ruby", "php"}

// Missing with "rust", "native-tls" or "pypi" behind it is a file in the image of clients that says why it lacks get-rust and cargo,
// get-rust-native, or the Python packages in PyPI. Else it is not there.
const Missing = "/usr/local/lib/no-"

// PyPI is where the image of clients has requests and httpx as they come from their registry, beside the distribution's.
const PyPI = "/usr/local/lib/pypi"

// LookupNames are the programs lookup-NAME of the image of clients: each the resolver of another C library, or Go's. See
// testdata/clients/lookup.c.
var LookupNames = []string{"glibc", "musl", "go"}

var clientsArchive = sync.OnceValues(buildClients)

// GoClient is get-go, which needs nothing of an image but a trust file.
func GoClient(t testing.TB) []byte {
	t.Helper()
	data, err := goClient()
	if err != nil {
		t.Fatal(err)
	}
	return data
}

var goClient = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "get-go")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", filepath.Join(dir, "get-go"), filepath.Join("internal", "testenv", "testdata", "clients", "get.go"))
	cmd.Dir, cmd.Env = Module(), append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build get-go: %w\n%s", err, out)
	}
	return os.ReadFile(filepath.Join(dir, "get-go"))
})

// ClientsArchive is the path of an image (600 MB) with the clients that agents use: curl, wget, git, apt, Python with pip, requests
// and httpx, Node with npm, Java, Rust with cargo, Ruby, PHP, wget2, aria2, programs in Go and C, and p11-kit's trust. It is built
// from this distribution's packages and cached under build/.
// They trust what the image's trust file holds: TrustLab adds the lab's authority in a sandbox.
func ClientsArchive(t testing.TB) string {
	t.Helper()
	at, err := clientsArchive()
	if err != nil {
		t.Skipf("the image of clients cannot be built here: %v", err)
	}
	return at
}

func buildClients() (string, error) {
	w, err := openWorkshop("clients")
	if err != nil {
		return "", err
	}
	defer w.close()
	// script runs shell commands with the source's directory as $1 and the tree that is laid over the image as $2.
	sources, files := filepath.Join(Module(), "internal", "testenv", "testdata", "clients"), filepath.Join(w.dir, "files")
	script := func(body string) error {
		_, err := w.run("sh", "-ec", body, "sh", sources, files)
		return err
	}
	err = errors.Join(
		script(`rm -rf "$2"; mkdir -p "$2/usr/local/bin" "$2/usr/local/lib" "$2/usr/lib/node_modules" "$2/usr/bin"
			mkdir -p "$2/usr/local/share/ca-certificates"; echo 'made by the package where its script runs' >"$2/usr/local/share/ca-certificates/README"
			mkdir -p "$2/usr/share/dpkg"; cp /usr/share/dpkg/*table "$2/usr/share/dpkg" # without which apt does not start
			cp "$1"/get-* "$2/usr/local/bin"; cp "$1/Get.java" "$2/usr/local/lib"; mv "$2/usr/local/bin/get-node.mjs" "$2/usr/local/lib"
			gcc -O1 -o "$2/usr/local/bin/lookup-glibc" "$1/lookup.c" -lresolv
			for p in get lookup; do go build -trimpath -buildvcs=false -ldflags '-s -w' -o "$2/usr/local/bin/$p-go" "$1/$p.go"; done`),
		// The distribution's npm is 400 packages; this one, of the line that fits its Node, is one.
		script(`v=10.8.2; [ -f npm-$v.tgz ] || npm pack --silent npm@$v >&2
			tar -xzf npm-$v.tgz -C "$2/usr/lib/node_modules"; mv "$2/usr/lib/node_modules/package" "$2/usr/lib/node_modules/npm"
			ln -s ../lib/node_modules/npm/bin/npm-cli.js "$2/usr/bin/npm"`),
		script(fmt.Sprintf(`[ -d musl ] || { rm -f musl-dev_*.deb; apt-get -q download musl-dev >&2; dpkg-deb -x musl-dev_*.deb musl.new; mv musl.new musl; }
			m=$PWD/musl/usr/lib/%[1]s-linux-musl
			gcc -O1 -static -no-pie -fno-stack-protector -nostdinc -nostdlib -isystem "$PWD/musl/usr/include/%[1]s-linux-musl" -o "$2/usr/local/bin/lookup-musl" \
				"$m/crt1.o" "$m/crti.o" "$1/lookup.c" "$m/libc.a" -lgcc "$m/libc.a" "$m/crtn.o"`, machine())),
	)
	if err != nil {
		return "", err
	}
	for what, body := range map[string]string{
		// The cargo behind rustup's, which needs no library of this distribution's. What it builds is kept in build/.
		"rust": `cargo=$(rustup which cargo 2>/dev/null || command -v cargo) || { echo "there is no cargo on this host" >&2; exit 1; }
			cp "$cargo" "$2/usr/local/bin/cargo"; rm -rf rust/src; mkdir -p rust; cp -rp "$1/rust/." rust; cd rust
			features=native-tls; pkg-config --exists openssl || { features=; echo "there are no headers of OpenSSL on this host" >"$2` + Missing + `native-tls"; }
			cargo build -q --target-dir target --features "$features" >&2; strip -o "$2/usr/local/bin/get-rust" target/debug/get-rust`,
		"pypi": `p=pypi-requests-2.32.5-httpx-0.28.1
			[ -d $p ] || { rm -rf new; python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-compile --target new \
				--platform any --only-binary=:all: --implementation py --abi none --python-version 3.11 requests==2.32.5 httpx==0.28.1 >&2; mv new $p; }
			cp -r $p "$2` + PyPI + `"`,
	} {
		if err := script(body); err != nil {
			if err := os.WriteFile(filepath.Join(files, Missing+what), []byte(err.Error()), 0o644); err != nil {
				return "", err
			}
		}
	}
	return w.run(filepath.Join(Module(), "demo", "build-image"), filepath.Join(Module(), "build", "image"), "clients", files,
		"apt", "curl", "git", "openssl", "wget", "python3-requests", "python3-httpx", "python3-pip", "nodejs", "openjdk-17-jre-headless",
		"wget2", "aria2", "ruby", "php-cli", "p11-kit")
}

// machine is the architecture as C compilers name it.
func machine() string {
	if runtime.GOARCH == "arm64" {
		return "aarch64"
	}
	return "x86_64"
}

// TrustLab makes the clients in a sandbox trust the lab's servers, as root of the image would: the trust file, and Java's store.
func (d *Daemon) TrustLab(box string) {
	d.t.Helper()
	r := d.Feed(bytes.NewReader(d.o.Lab.CA()), "exec", "-i", box, "sh", "-ec", `cat >/tmp/lab.pem; cat /tmp/lab.pem >>/etc/ssl/certs/ca-certificates.crt
		keytool -importcert -cacerts -storepass changeit -noprompt -alias lab -file /tmp/lab.pem`)
	if r.Code != 0 {
		d.t.Fatalf("trust the lab: exit code %d\n%s%s", r.Code, r.Stdout, r.Stderr)
	}
}
