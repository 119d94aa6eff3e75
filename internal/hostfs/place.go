package hostfs

import (
	"path"
	"strings"

	"github.com/useshards/shard"
)

// Kind is what stands at a path.
type Kind int

// The kinds that placement tells apart. A symbolic link counts as what it leads to.
const (
	Missing Kind = iota
	File
	Dir
)

// Source is the path that is copied, as the user wrote it, and what is there.
type Source struct {
	Path string
	Kind Kind
}

// Placement says where a copy lands: the top entry of the copied tree gets Name inside Parent. Name "." means that the
// contents of the source directory go into Parent itself. MakeParent says that Parent is missing and has to be made.
type Placement struct {
	Parent     string
	Name       string
	MakeParent bool
}

// Place decides where a copy of src lands, by the rules of docker cp, for a destination as the user wrote it and what
// is there. It is the same in both directions; paths are slash-separated.
//
//	source            destination          lands as
//	file or dir       existing dir, or …/  destination/own name
//	dir/.             existing dir         contents into destination
//	file              file, missing        destination
//	dir, dir/.        missing              contents as destination
//	dir               file                 refused
func Place(src Source, dst string, at Kind) (Placement, error) {
	if src.Path == "" || dst == "" {
		return Placement{}, shard.Invalidf("a path to copy is empty")
	}
	contents := src.Path == "." || strings.HasSuffix(src.Path, "/.")
	slash := strings.HasSuffix(src.Path, "/")
	name := BaseName(src.Path)
	switch {
	case src.Kind == Missing:
		return Placement{}, shard.Errorf(shard.CodeNotFound, "%s does not exist", shard.Quote(src.Path))
	case src.Kind == File && (contents || slash):
		return Placement{}, shard.Invalidf("%s is not a directory", shard.Quote(src.Path))
	case name == "" && !contents: // "/", "..": there is no name to land under
		contents = true
	}

	inside := strings.HasSuffix(dst, "/") || dst == "." || dst == ".." || strings.HasSuffix(dst, "/.") || strings.HasSuffix(dst, "/..")
	switch {
	case at == File && inside:
		return Placement{}, shard.Invalidf("%s is not a directory", shard.Quote(dst))
	case at == File && src.Kind == Dir:
		return Placement{}, shard.Invalidf("cannot copy the directory %s onto the file %s", shard.Quote(src.Path), shard.Quote(dst))
	case at == Dir || inside:
		p := Placement{Parent: path.Clean(dst), Name: name, MakeParent: at == Missing}
		if contents {
			p.Name = "."
		}
		return p, nil
	default:
		dst = strings.TrimRight(dst, "/")
		return Placement{Parent: path.Dir(dst), Name: path.Base(dst)}, nil
	}
}

// BaseName is the name under which a path lands: its last part, "" for a path that ends in none, such as "/" or "..".
func BaseName(p string) string {
	p = strings.TrimRight(strings.TrimSuffix(strings.TrimRight(p, "/"), "/."), "/")
	base := p[strings.LastIndexByte(p, '/')+1:]
	if base == "." || base == ".." {
		return ""
	}
	return base
}
