package testenv

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// PythonServersRef and NextRef are the references that the archives carry.
const (
	PythonServersRef = "local/pyservers:latest"
	NextRef          = "local/next:latest"
)

// devServer makes the tree FILES ($2) that is laid over an image, from the sources ($1) and packages of a registry, which are
// fetched when what was fetched before is of other sources.
type devServer struct {
	name   string
	script string
}

// The distribution's Python has a module's files where its pip puts them. Byte code is checked by nothing: the archive's times
// are not the files'.
var pythonServers = devServer{"pyservers", `
	v=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	python3 -m pip install -q --root-user-action=ignore --disable-pip-version-check --no-deps --no-compile --only-binary=:all: --python-version "$v" --target lib -r "$1/requirements.txt"
	rm -rf lib/bin
	mkdir -p "$2/usr/local/lib/python$v" "$2/root"
	mv lib/share lib/etc "$2/usr/local"
	mv lib "$2/usr/local/lib/python$v/dist-packages"
	cp "$1"/jupyter/* "$1"/streamlit/* "$2/root"
	find "$2" \( -name tests -o -name '*.map' \) -prune -exec rm -r {} +
	/usr/bin/python3 -m compileall -q -j 2 --invalidation-mode unchecked-hash -s "$2" "$2/usr/local/lib" >&2 || :`}

var nextServer = devServer{"next", `
	node -e 'const [a, b] = process.versions.node.split("."); if (a < 20 || a == 20 && b < 9) throw "Next needs Node 20.9, and this is " + process.version'
	mkdir -p "$2/usr/bin" "$2/app"
	cp "$1"/next/*.json .
	npm ci --silent --ignore-scripts --no-audit --no-fund >&2
	rm -r node_modules/@img # of images it knows no more than a server needs
	mv node_modules "$2/app"
	find "$2/app" -name '*.map' -delete
	cp -r "$1/next/app" "$1/next/package.json" "$2/app"
	node=$(readlink -f "$(command -v node)")
	cp "$node" "$2/usr/bin"
	# Beside what every image has of the C library.
	ldd "$node" "$2"/app/node_modules/@next/swc-*-gnu/*.node | sed -n 's,.*=> \(/[^ ]*\) .*,\1,p' | sort -u | grep -v '/lib\(c\|m\|dl\|rt\|pthread\|resolv\)\.so' |
	while read -r lib; do case $lib in /usr/*) at=$lib ;; *) at=/usr$lib ;; esac; install -D "$lib" "$2$at"; done`}

// PythonServersArchive is the path of an image (180 MB) with JupyterLab, whose /root/cell.ipynb prints an answer, and Streamlit,
// whose /root/app.py counts clicks and takes files.
func PythonServersArchive(t testing.TB) string { t.Helper(); return pythonServers.archive(t) }

// NextArchive is the path of an image (400 MB) with Node and, in /app, a page of Next.
func NextArchive(t testing.TB) string { t.Helper(); return nextServer.archive(t) }

// archive builds it, cached under build/, from this distribution's packages and the registry's.
func (s *devServer) archive(t testing.TB) string {
	t.Helper()
	devServersMu.Lock()
	defer devServersMu.Unlock()
	at, err := s.build()
	if err != nil {
		t.Skipf("the image %s cannot be built here: %v", s.name, err)
	}
	return at
}

var devServersMu sync.Mutex

func (s *devServer) build() (string, error) {
	w, err := openWorkshop(s.name)
	if err != nil {
		return "", err
	}
	defer w.close()
	sources, files := filepath.Join(Module(), "internal", "testenv", "testdata", "devservers"), filepath.Join(w.dir, "files")
	key, err := w.run("sh", "-ec", `cd "$1"; find . -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum`, "sh", sources)
	if err != nil {
		return "", err
	}
	stamp := filepath.Join(w.dir, "stamp")
	if have, _ := os.ReadFile(stamp); string(have) != key+s.script {
		// Its own temporary directory, so that nothing half fetched is taken for the whole.
		if _, err := w.run("sh", "-ec", `rm -rf "$2" stamp new; mkdir new; cd new; `+s.script+`; cd ..; rm -rf new`, "sh", sources, files); err != nil {
			return "", err
		}
		if err := os.WriteFile(stamp, []byte(key+s.script), 0o600); err != nil {
			return "", err
		}
	}
	return w.run(filepath.Join(Module(), "demo", "build-image"), filepath.Join(Module(), "build", "image"), s.name, files, "libstdc++6")
}
