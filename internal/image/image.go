// Package image is the store of images on this host: it reads references, pulls from OCI registries, imports tar
// streams, unpacks layers for overlayfs and frees what nobody uses. It must not know sandboxes, mounts, networks or
// clients: who holds an image is told to it by its callers.
//
// # Which image a reference means
//
// A reference with a tag names whatever the host has under it: Get never asks a registry, so creating a sandbox twice
// gives the same files twice. Pull asks the registry again and moves the tag; the image that had it before stays on the
// host as name@digest until it is removed or pruned. A reference with a digest can only ever mean those bytes.
// Image.Digest is the digest of the manifest of the host's platform, also when the reference names an index.
//
// # What is on disk
//
//	refs/<escaped reference>.json   reference → digest
//	manifests/<digest hex>.json     settings of the image and its layers
//	layers/<short>/                 one unpacked layer, in overlayfs form; <short>.json beside it says which
//	blobs/<digest hex>[.part]       downloads: finished ones wait to be unpacked, parts to be continued
//	tmp/                            work of this daemon; emptied when the next one opens the store
//
// Records are written by temp + fsync + rename + fsync of the directory; a layer is synced before it gets its name. So
// whatever has a final name is whole, and a killed daemon leaves only tmp and resumable blobs behind.
package image

import (
	"context"
	"io"
	"log/slog"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"

	"github.com/useshards/shard"
)

// Options configure a Store. The zero value is usable.
type Options struct {
	// Insecure lists the registries, as host or host:port, that may be spoken to in plain HTTP or with a certificate
	// that cannot be verified. A host without a port means all its ports.
	Insecure []string
	// Timeout bounds one whole pull; 0 is 30 minutes.
	Timeout time.Duration
	// Arch is the architecture to choose from an index, as Go spells it; empty is the host's.
	Arch string
	// Keychain finds credentials; nil is the Docker (or Podman) configuration of the daemon's user, helpers included.
	Keychain authn.Keychain
	// Log takes what no client may see; nil discards it.
	Log *slog.Logger
}

// Image is an image that is wholly on the host.
type Image struct {
	// Reference is the full reference it was asked for by; Digest names the platform's manifest.
	Reference, Digest string
	// Size is what its layers take unpacked on the host, in bytes; layers shared with other images count in each.
	Size    int64
	Created time.Time
	Config  Config
	// Layers are the absolute directories of the unpacked layers, topmost first, ready as overlayfs lower directories.
	// Their base names are at most 12 characters long and relative to Store.LayersDir, because the options of a mount
	// must fit a page.
	Layers []string
}

// Config holds the settings of an image that a sandbox takes over.
type Config struct {
	Env     []string          `json:"env,omitempty"`
	Workdir string            `json:"workdir,omitempty"`
	User    string            `json:"user,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"`
}

// ImportOptions are the settings of an imported root file system; images in a tar bring their own, and what is set
// here overrides them.
type ImportOptions struct {
	Env           []string
	Workdir, User string
}

// Store is the set of images under one directory. Only one Store may have it open.
type Store struct {
	dir string
	o   Options
}

// Open opens the store in dir, making it if needed, and clears away what a killed daemon left, except downloads that
// can be continued.
func Open(dir string, o Options) (*Store, error) { panic("soon") }

// LayersDir is the directory that holds every unpacked layer under its short name.
func (s *Store) LayersDir() string { panic("soon") }

// ParseReference gives the full form of a reference as people write it: alpine becomes
// index.docker.io/library/alpine:latest. It refuses with invalid_request.
func ParseReference(ref string) (string, error) { panic("soon") }

// Get finds an image on the host by any reference that names it (name, name:tag, name@digest, or a bare digest);
// not_found when it is not there, or not whole.
func (s *Store) Get(ref string) (*Image, error) { panic("soon") }

// Acquire is Get by digest, and keeps the image from Remove and Prune until release is called, once or more often.
func (s *Store) Acquire(digest string) (img *Image, release func(), err error) { panic("soon") }

// Pull asks the registry what ref means, brings what the host lacks, and names the image ref. Pulls of the same
// reference or layers share the work: each caller gets the progress from when it came, the work ends when the last
// caller's context does. progress may be nil; its calls come one at a time.
func (s *Store) Pull(ctx context.Context, ref string, progress func(shard.Progress)) (*Image, error) {
	panic("soon")
}

// Import makes an image from a tar stream: an OCI layout, a docker save, or a root file system, plain or compressed
// with gzip or zstd. ref names it; when empty, the name inside the tar does.
func (s *Store) Import(ctx context.Context, r io.Reader, ref string, o ImportOptions, progress func(shard.Progress)) (*Image, error) {
	panic("soon")
}

// List gives a record for each reference, sorted; what cannot be read has Broken set. warnings tell of damage that
// belongs to no reference.
func (s *Store) List() (images []shard.Image, warnings []string, err error) { panic("soon") }

// Remove forgets a reference, and frees the image if it was the last one. holders names who uses a digest (it may be
// nil). A held image is refused with in_use; with force the reference goes, its files stay for the holders until a
// later Remove or Prune, and a warning says so.
func (s *Store) Remove(ref string, force bool, holders func(digest string) []string) (warnings []string, err error) {
	panic("soon")
}

// Prune removes every image that inUse does not claim and no Acquire holds, and returns the references removed.
func (s *Store) Prune(inUse func(digest string) bool) (removed []string, err error) { panic("soon") }
