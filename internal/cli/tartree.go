package cli

import (
	"archive/tar"
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// treeReader streams a directory as a tar with everything an image keeps: owners, all mode bits, links of both kinds,
// times and extended attributes. (A copy into a sandbox is another matter, and hostfs's: it drops owners.)
type treeReader struct {
	pipe   *io.PipeReader
	packed chan error
}

// errNotRead ends the packing of a tree that nobody reads any more.
var errNotRead = errors.New("the tree is not read any more")

func tarTree(root string) *treeReader {
	pr, pw := io.Pipe()
	t := &treeReader{pipe: pr, packed: make(chan error, 1)}
	go func() {
		real, err := filepath.EvalSymlinks(root) // the walk would not enter a link
		if err == nil {
			err = writeTree(pw, real)
		}
		pw.CloseWithError(err)
		t.packed <- err
	}()
	return t
}

func (t *treeReader) Read(p []byte) (int, error) { return t.pipe.Read(p) }

// Close ends the packing, waits for it and tells how it failed by itself. It may be called again: net/http does.
func (t *treeReader) Close() error {
	t.pipe.CloseWithError(errNotRead)
	err := <-t.packed
	t.packed <- err
	if errors.Is(err, errNotRead) {
		return nil
	}
	return err
}

type inode struct{ dev, ino uint64 }

func writeTree(w io.Writer, root string) error {
	out := bufio.NewWriterSize(w, 256<<10)
	tw := tar.NewWriter(out)
	first := map[inode]string{}
	buf := make([]byte, 256<<10)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		return writeEntry(tw, path, filepath.ToSlash(name), info, first, buf)
	})
	if err != nil {
		return err
	}
	if err := tw.Close(); err != nil {
		return err
	}
	return out.Flush()
}

// writeEntry writes one file, directory or link; anything else is left out.
func writeEntry(tw *tar.Writer, path, name string, info fs.FileInfo, first map[inode]string, buf []byte) error {
	var link string
	var err error
	switch info.Mode().Type() {
	case 0, fs.ModeDir:
	case fs.ModeSymlink:
		if link, err = os.Readlink(path); err != nil {
			return err
		}
	default:
		return nil
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	h.Name, h.Uname, h.Gname, h.Format = name, "", "", tar.FormatPAX // names of this host mean nothing in an image
	if info.IsDir() {
		h.Name += "/"
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && info.Mode().IsRegular() && st.Nlink > 1 {
		id := inode{uint64(st.Dev), st.Ino} // Dev is 32 bits wide on darwin
		if other, seen := first[id]; seen {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, other, 0
			return tw.WriteHeader(h)
		}
		first[id] = name
	}
	if h.PAXRecords, err = treeXattrs(path); err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return tw.WriteHeader(h)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	n, err := io.CopyBuffer(struct{ io.Writer }{tw}, io.LimitReader(f, h.Size), buf)
	if err == nil && n < h.Size {
		err = fmt.Errorf("%s became shorter while it was read", name)
	}
	return err
}
