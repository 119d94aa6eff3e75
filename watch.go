package shard

import "time"

// The types of a FileEvent.
const (
	FileCreated  = "created"
	FileModified = "modified"
	FileDeleted  = "deleted"
	FileMoved    = "moved"
	// FileOverflow says that events were dropped here: whoever keeps a picture of the tree lists it again.
	FileOverflow = "overflow"
)

// FileEvent is one change below a watched directory. Path is absolute, begins with the path that is watched, and is that
// path itself for an overflow and for the end of the directory. From is where a moved entry was. A directory that moves
// takes what is in it along without further events. Bytes that are not UTF-8 stand as in FileEntry: the text shows
// U+FFFD, PathBytes and FromBytes (base64 in JSON) hold the real ones.
type FileEvent struct {
	Type      string `json:"type"`
	Path      string `json:"path"`
	PathBytes []byte `json:"path_bytes,omitempty"`
	From      string `json:"from,omitempty"`
	FromBytes []byte `json:"from_bytes,omitempty"`
	IsDir     bool   `json:"is_dir,omitempty"`
	// Time is the sandbox's clock when the event was read there.
	Time time.Time `json:"time"`
}
