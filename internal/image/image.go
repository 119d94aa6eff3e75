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
// # What is taken from a layer
//
// Files, directories, links and FIFOs with their owners, modes (setuid too), times, names of any bytes, and the extended
// attributes user.*, security.capability and POSIX ACLs. Device nodes are left out: a sandbox gets its devices from its
// provider. Other attributes are those of the host that built the image, or would speak to overlayfs in our name.
// A layer that unpacks to more than 1 GiB + 200 × its compressed size is refused, and so is what would use up the
// reserve of the host's disk.
//
// # What is on disk
//
//	refs/<escaped reference>.json   reference → digest
//	manifests/<digest hex>.json     settings of the image and its layers
//	layers/<short>/                 one unpacked layer, in overlayfs form; <short>.json beside it says which
//	blobs/<digest hex>[.part]       downloads: finished ones wait to be unpacked, parts to be continued
//	tmp/                            work of this daemon; emptied when the next one opens the store
//
// Records are written by temp + fsync + rename + fsync of the directory; a layer gets its name by one rename. So whatever
// has a final name is whole, and a killed daemon leaves only tmp and resumable blobs behind. A host that goes down before
// a layer is on disk is noticed by the layer's record (settle.go).
package image

import (
	"log/slog"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
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

	syncfs func(fd int) error // nil is the system call
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
