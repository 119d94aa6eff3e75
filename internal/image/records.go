package image

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard/internal/durable"
)

const (
	recordExt     = ".json"
	recordVersion = 1
	// maxRecord bounds what is read back of a record, in bytes: 127 layers and a generous environment fit many times.
	maxRecord = 16 << 20
)

// refRecord says what a reference means.
type refRecord struct {
	Version   int    `json:"version"`
	Reference string `json:"reference"`
	// Asked is the digest that the registry gave for the reference: the index's, or Digest itself.
	Asked  string `json:"asked"`
	Digest string `json:"digest"`
}

// imageRecord is one image; layers are short names, bottom first.
type imageRecord struct {
	Version int       `json:"version"`
	Digest  string    `json:"digest"`
	Created time.Time `json:"created"`
	Config  Config    `json:"config"`
	Layers  []string  `json:"layers"`
}

// layerRecord lies beside a layer's directory; a layer without one does not exist. The chain id is what the layer is
// known by, not its own diff id: what a layer looks like on disk can depend on those below it (see finish).
type layerRecord struct {
	Version int    `json:"version"`
	Chain   string `json:"chain"`
	DiffID  string `json:"diff_id"`
	// Bytes is what the layer takes on the host.
	Bytes int64 `json:"bytes"`
	// Boot is the boot of the host that has not yet written the layer to disk, see settle.go; empty once it has.
	Boot string `json:"boot,omitempty"`
	// Opaque says that the layer's root hides all layers below, which overlayfs does not honour at a root.
	Opaque bool `json:"opaque,omitempty"`
}

func sum(b []byte) []byte { s := sha256.Sum256(b); return s[:] }

// shortName gives the directory of a chain id: 12 characters, so that 127 of them fit the options of one mount.
func shortName(chain string) string {
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum([]byte(chain)))[:12])
}

// chainIDs derives the chain ids from the diff ids, bottom first, as the image specification defines them.
func chainIDs(diffIDs []string) []string {
	chains := make([]string, len(diffIDs))
	for i, d := range diffIDs {
		if i == 0 {
			chains[i] = d
			continue
		}
		chains[i] = fmt.Sprintf("sha256:%x", sum([]byte(chains[i-1]+" "+d)))
	}
	return chains
}

func (s *Store) path(parts ...string) string {
	return filepath.Join(append([]string{s.dir}, parts...)...)
}

func (s *Store) imagePath(digest string) string {
	return s.path("manifests", strings.TrimPrefix(digest, "sha256:")+recordExt)
}

// writeRecord writes v so that path holds either the old or the new content, also after a crash of the host.
func (s *Store) writeRecord(path string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(s.path("tmp"), "record-")
	if err != nil {
		return err
	}
	_, err = f.Write(append(data, '\n'))
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("write record %s: %w", filepath.Base(path), err)
	}
	return durable.SyncDir(filepath.Dir(path))
}

// readRecord reads a record of the version we know into v.
func readRecord(path string, v any) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() || fi.Size() > maxRecord {
		return errors.Join(err, fmt.Errorf("record %s is not a file of a record's size", filepath.Base(path)))
	}
	var head struct{ Version int }
	data := make(json.RawMessage, 0)
	if err := json.NewDecoder(f).Decode(&data); err != nil {
		return fmt.Errorf("record %s: %w", filepath.Base(path), err)
	}
	if err := json.Unmarshal(data, &head); err != nil || head.Version != recordVersion {
		return fmt.Errorf("record %s has version %d, this daemon reads %d", filepath.Base(path), head.Version, recordVersion)
	}
	return json.Unmarshal(data, v)
}

// readImage reads the record of an image and checks that it is about digest.
func (s *Store) readImage(digest string) (*imageRecord, error) {
	var r imageRecord
	if err := readRecord(s.imagePath(digest), &r); err != nil {
		return nil, err
	}
	if r.Digest != digest || len(r.Layers) == 0 {
		return nil, fmt.Errorf("record of %s is about %q", digest, r.Digest)
	}
	return &r, nil
}

// readLayer reads the record of the layer with this short name, and fails when its directory is gone.
func (s *Store) readLayer(short string) (*layerRecord, error) {
	var r layerRecord
	if err := readRecord(s.path("layers", short+recordExt), &r); err != nil {
		return nil, err
	}
	if shortName(r.Chain) != short {
		return nil, fmt.Errorf("record of layer %s is about %q", short, r.Chain)
	}
	if fi, err := os.Lstat(s.path("layers", short)); err != nil || !fi.IsDir() {
		return nil, errors.Join(err, fmt.Errorf("layer %s has no directory: %w", short, fs.ErrNotExist))
	}
	return &r, nil
}

// hasLayer says whether the layer of a chain id is on the host. Two chain ids with one short name are an error: with 60
// bits that takes intent.
func (s *Store) hasLayer(chain string) (bool, error) {
	r, err := s.readLayer(shortName(chain))
	if err != nil {
		return false, nil
	}
	if r.Chain != chain {
		return false, fmt.Errorf("layers %s and %s have the same short name", chain, r.Chain)
	}
	return true, nil
}

// refs reads every reference; bad maps the file name of an unreadable one to its fault.
func (s *Store) refs() (good []refRecord, bad map[string]error, err error) {
	entries, err := os.ReadDir(s.path("refs"))
	if err != nil {
		return nil, nil, err
	}
	bad = map[string]error{}
	for _, e := range entries {
		var r refRecord
		err := readRecord(s.path("refs", e.Name()), &r)
		if err == nil && (fileName(r.Reference) != e.Name() || !digestPattern.MatchString(r.Digest)) {
			err = fmt.Errorf("record %s is about %q", e.Name(), r.Reference)
		}
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since the directory was read
		}
		if err != nil {
			bad[e.Name()] = err
			continue
		}
		good = append(good, r)
	}
	return good, bad, nil
}
