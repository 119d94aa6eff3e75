package egress

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCALastsAndIsPrivate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "proxy")
	first, err := OpenCA(dir)
	if err != nil {
		t.Fatal(err)
	}
	second, err := OpenCA(dir)
	if err != nil || !bytes.Equal(first.PEM(), second.PEM()) {
		t.Fatalf("opened again it is another: %v", err)
	}
	for name, mode := range map[string]fs.FileMode{"": 0o700, "ca.key": 0o600, "ca.crt": 0o644} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.Mode().Perm() != mode {
			t.Errorf("%q: %v, %v", name, info.Mode(), err)
		}
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(second.PEM())
	long := strings.Repeat("a", 60) + "." + strings.Repeat("b", 60) + ".test"
	for _, host := range []string{"good.test", long} {
		leaf, err := first.Leaf(host)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := leaf.Leaf.Verify(x509.VerifyOptions{DNSName: host, Roots: pool}); err != nil {
			t.Error(err)
		}
		if again, _ := first.Leaf(host); again != leaf {
			t.Error("a certificate was made twice")
		}
	}
	for i := range maxLeaves + 10 {
		if _, err := first.Leaf(fmt.Sprintf("h%d.test", i)); err != nil {
			t.Fatal(err)
		}
	}
	if len(first.leaves) != maxLeaves || first.recent.Len() != maxLeaves {
		t.Errorf("%d certificates are kept", len(first.leaves))
	}
	if found, _ := filepath.Glob(filepath.Join(dir, ".new-*")); len(found) > 0 {
		t.Errorf("left over: %v", found)
	}
}

func TestCAIsNeverReplaced(t *testing.T) {
	for _, spoil := range []func(dir string) error{
		func(dir string) error { return os.Remove(filepath.Join(dir, "ca.key")) },
		func(dir string) error { return os.WriteFile(filepath.Join(dir, "ca.key"), []byte("x"), 0o600) },
		func(dir string) error { return os.WriteFile(filepath.Join(dir, "ca.crt"), nil, 0o600) },
		func(dir string) error {
			other, err := OpenCA(filepath.Join(dir, "other"))
			return errors.Join(err, os.WriteFile(filepath.Join(dir, "ca.crt"), other.PEM(), 0o600))
		},
	} {
		dir := t.TempDir()
		if _, err := OpenCA(dir); err != nil {
			t.Fatal(err)
		}
		if err := spoil(dir); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenCA(dir); err == nil {
			t.Error("a spoiled authority was opened")
		}
	}
	// A key alone is what a crash in the middle leaves.
	dir := t.TempDir()
	if _, err := OpenCA(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "ca.crt")); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenCA(dir); err != nil {
		t.Error(err)
	}
}

func TestTrust(t *testing.T) {
	ca, err := OpenCA(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{"/etc/ssl/cert.pem": []byte("old"), "/etc/pki/tls/certs/ca-bundle.crt": []byte("old")}
	read := func(path string) ([]byte, error) {
		if data, ok := files[path]; ok {
			return data, nil
		}
		return nil, fs.ErrNotExist
	}
	path, add, err := ca.plant(read)
	if err != nil || path != "/etc/pki/tls/certs/ca-bundle.crt" || !bytes.HasPrefix(add, []byte("\n-----BEGIN")) {
		t.Fatalf("%s %q %v", path, add, err)
	}
	files[path] = append(files[path], add...)
	if _, add, err = ca.plant(read); err != nil || len(add) > 0 {
		t.Errorf("planted twice: %q %v", add, err)
	}
	clear(files)
	if _, _, err = ca.plant(read); err == nil {
		t.Error("an image without a trust file was accepted")
	}
	if _, _, err = ca.plant(func(string) ([]byte, error) { return nil, errors.New("broken") }); err == nil {
		t.Error("a file that cannot be read was passed over")
	}
}

func BenchmarkLeaf(b *testing.B) {
	ca, err := OpenCA(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := ca.sign("good.test"); err != nil {
			b.Fatal(err)
		}
	}
}
