// Package hostfs is the client's side of copying trees in and out of a sandbox: it packs host files into a tar, unpacks
// a sandbox's tar on the host, and decides where a copy lands. A tar from a sandbox is hostile: nothing of it may land
// or lead outside the target. The package knows files and tars; it knows no daemon and no sandbox.
package hostfs

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/tarstream"
)

// MaxBytes is how much one unpacked tar may write.
const MaxBytes = 64 << 30

// UnpackOptions change how a tar lands. The zero value unpacks everything under its own names, owned by the caller.
type UnpackOptions struct {
	// Name is what the top entry becomes. All entries must then be in one tree: "." puts the contents of that tree into
	// the target itself, another name replaces the tree's own. "" changes nothing.
	Name string
	// Owner gets everything that is written (a user behind sudo); nil leaves it to the caller. The tar has no say.
	Owner *Owner
}

// Owner is a user and a group of the host.
type Owner struct{ UID, GID int }

// Unpack writes the tar r below dst, an existing directory of the host. It refuses what could reach beyond dst, and
// everything that is not a file, directory or link; it drops setuid and setgid and keeps the other bits, times and (on
// Linux) user attributes. Files land by rename; an existing directory keeps its mode. On an error what has landed
// stays, but no link that leads out of dst does. Refusals are *shard.Error with invalid_request.
func Unpack(ctx context.Context, r io.Reader, dst string, opts UnpackOptions) error {
	if opts.Name != "" && opts.Name != "." && (strings.Contains(opts.Name, "/") || opts.Name == "..") {
		return fmt.Errorf("unpack: %q is not one name", opts.Name)
	}
	root, err := os.OpenRoot(dst)
	if err != nil {
		return err
	}
	defer root.Close()
	u := &unpacker{ctx: ctx, opts: opts, root: root, buf: make([]byte, 256<<10), files: map[string]fileID{}, dirs: map[string]int{}}
	err = u.run(tarstream.NewReader(r))
	return errors.Join(u.checkLinks(), err) // links also after a failure: they stay on the disk
}

type unpacker struct {
	ctx   context.Context
	opts  UnpackOptions
	root  *os.Root
	buf   []byte
	bytes int64
	top   string            // the first part of every name, with opts.Name
	files map[string]fileID // written by this unpack: what a hard link may refer to
	links []string          // symbolic links written
	dirs  map[string]int    // made by this unpack: position in order
	order []madeDir
}

// madeDir is a directory whose attributes are set when nothing more lands in it.
type madeDir struct {
	name  string
	entry *tarstream.Entry
}

func (u *unpacker) run(tr *tarstream.Reader) error {
	for {
		if err := u.ctx.Err(); err != nil {
			return err
		}
		e, err := tr.Next()
		if err == io.EOF {
			return u.finishDirs()
		}
		if err != nil {
			return err
		}
		shown := e.Name
		if err := u.rename(e); err != nil {
			return err
		}
		if err := u.entry(e, tr); err != nil {
			return explain(shown, err)
		}
	}
}

// explain makes an error of the file system name the tar's entry.
func explain(name string, err error) error {
	if _, public := errors.AsType[*shard.Error](err); public || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	if strings.Contains(err.Error(), "path escapes from parent") { // os.Root has no exported error for it
		return tarstream.Refuse(name, "leads out of the target directory through a symbolic link")
	}
	return fmt.Errorf("unpack %s: %w", shard.Quote(name), err)
}

// rename applies opts.Name to an entry's names.
func (u *unpacker) rename(e *tarstream.Entry) error {
	if u.opts.Name == "" {
		return nil
	}
	first, _, _ := strings.Cut(e.Name, "/")
	if u.top == "" {
		u.top = first
	}
	if u.top != "." && first != u.top {
		return tarstream.Refuse(e.Name, "is not in the tree %s that was asked for", shard.Quote(u.top))
	}
	if u.opts.Name == "." && e.Name == u.top && e.Kind != tarstream.Dir {
		return tarstream.Refuse(e.Name, "is not a directory")
	}
	swap := func(name string) string {
		if u.top == "." {
			return path.Join(u.opts.Name, name)
		}
		_, rest, _ := strings.Cut(name, "/")
		return path.Join(u.opts.Name, rest)
	}
	e.Name = swap(e.Name)
	if e.Kind == tarstream.Hardlink {
		if first, _, _ := strings.Cut(e.Link, "/"); u.top != "." && first != u.top {
			return tarstream.Refuse(e.Name, "is a hard link to %s, which this tar does not hold", shard.Quote(e.Link))
		}
		e.Link = swap(e.Link)
	}
	return nil
}

// entry lands one entry.
func (u *unpacker) entry(e *tarstream.Entry, contents io.Reader) error {
	if e.Kind == tarstream.Dir {
		return u.dir(e)
	}
	if err := u.parents(path.Dir(e.Name)); err != nil {
		return err
	}
	temp := path.Join(path.Dir(e.Name), ".shard-"+rand.Text()+".tmp")
	var id fileID
	var err error
	switch e.Kind {
	case tarstream.File:
		id, err = u.file(e, contents, temp)
	case tarstream.Symlink:
		if path.IsAbs(e.Link) {
			return tarstream.Refuse(e.Name, "is a symbolic link to the absolute path %s", shard.Quote(e.Link))
		}
		if climbs(e.Name, e.Link) {
			return tarstream.Refuse(e.Name, "is a symbolic link to %s, which is outside of the target directory", shard.Quote(e.Link))
		}
		err = u.root.Symlink(e.Link, temp)
	case tarstream.Hardlink:
		var wrote bool
		if id, wrote = u.files[e.Link]; !wrote {
			return tarstream.Refuse(e.Name, "is a hard link to %s, which is no file of this tar before it", shard.Quote(e.Link))
		}
		err = u.hardlink(e, temp, id)
	}
	if err == nil && u.opts.Owner != nil {
		err = u.root.Lchown(temp, u.opts.Owner.UID, u.opts.Owner.GID)
	}
	if err == nil {
		err = u.root.Rename(temp, e.Name)
		if errors.Is(err, fs.ErrExist) || errors.Is(err, syscall.EISDIR) {
			err = tarstream.Refuse(e.Name, "is a file or a link where there is a directory")
		}
	}
	if err != nil || e.Kind == tarstream.Hardlink { // a rename onto another name of the same file leaves both
		_ = u.root.Remove(temp)
	}
	if err != nil {
		return err
	}
	delete(u.files, e.Name)
	if e.Kind == tarstream.Symlink {
		u.links = append(u.links, e.Name)
	} else {
		u.files[e.Name] = id
	}
	return nil
}

// climbs says whether a link's text, taken without looking at other links, leads above the target directory.
func climbs(name, link string) bool {
	joined := path.Join(path.Dir(name), link)
	return joined == ".." || strings.HasPrefix(joined, "../")
}

// file writes a file's contents under a temporary name.
func (u *unpacker) file(e *tarstream.Entry, contents io.Reader, temp string) (fileID, error) {
	if e.Size > MaxBytes-u.bytes {
		return fileID{}, shard.Invalidf("the tar holds more than %d GiB of files: copy it in parts", int64(MaxBytes>>30))
	}
	u.bytes += e.Size
	f, err := u.root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fileID{}, err
	}
	defer f.Close()
	if err := tarstream.Copy(f, contents, e.Size, u.buf, func(int64) error { return u.ctx.Err() }); err != nil {
		return fileID{}, err
	}
	setXattrs(f, e.Xattrs)
	if err := f.Chmod(mode(e.Mode)); err != nil {
		return fileID{}, err
	}
	info, err := f.Stat()
	if err != nil {
		return fileID{}, err
	}
	if err := f.Close(); err != nil {
		return fileID{}, err
	}
	return idOf(info), u.root.Chtimes(temp, time.Time{}, e.ModTime)
}

// hardlink makes temp another name of a file that this unpack wrote, and checks that it is that one.
func (u *unpacker) hardlink(e *tarstream.Entry, temp string, wrote fileID) error {
	if err := u.root.Link(e.Link, temp); err != nil {
		return err
	}
	info, err := u.root.Lstat(temp)
	if err != nil {
		return err
	}
	if idOf(info) != wrote {
		return tarstream.Refuse(e.Name, "is a hard link to %s, which was changed by someone else meanwhile", shard.Quote(e.Link))
	}
	return nil
}

// dir makes a directory, or takes one that is there as it is.
func (u *unpacker) dir(e *tarstream.Entry) error {
	if err := u.parents(path.Dir(e.Name)); err != nil {
		return err
	}
	if err := u.mkdir(e.Name, 0o700); err != nil {
		return err
	}
	if i, made := u.dirs[e.Name]; made {
		u.order[i].entry = e
	}
	return nil
}

// parents makes the missing directories of a tar that does not list them.
func (u *unpacker) parents(name string) error {
	for i := range len(name) + 1 {
		if i == len(name) || name[i] == '/' {
			if err := u.mkdir(name[:i], 0o755); err != nil {
				return err
			}
		}
	}
	return nil
}

func (u *unpacker) mkdir(name string, perm fs.FileMode) error {
	if _, made := u.dirs[name]; made || name == "." {
		return nil
	}
	err := u.root.Mkdir(name, perm)
	if errors.Is(err, fs.ErrExist) {
		info, err := u.root.Stat(name) // through links, but never out of the root
		if err != nil {
			return err
		}
		if !info.IsDir() {
			return tarstream.Refuse(name, "needs a directory where there is a file")
		}
		return nil
	}
	if err != nil {
		return err
	}
	if u.opts.Owner != nil {
		if err := u.root.Lchown(name, u.opts.Owner.UID, u.opts.Owner.GID); err != nil {
			return err
		}
	}
	u.dirs[name] = len(u.order)
	u.order = append(u.order, madeDir{name: name})
	return nil
}

// finishDirs sets what directories have in the tar, innermost first, so that a read-only one was still writable before.
func (u *unpacker) finishDirs() error {
	for _, d := range slices.Backward(u.order) {
		if d.entry == nil {
			continue
		}
		if err := u.finishDir(d.name, d.entry); err != nil {
			return explain(d.name, err)
		}
	}
	return nil
}

func (u *unpacker) finishDir(name string, e *tarstream.Entry) error {
	f, err := u.root.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil {
		return err
	} else if !info.IsDir() {
		return tarstream.Refuse(name, "was changed by someone else meanwhile")
	}
	setXattrs(f, e.Xattrs)
	if err := u.root.Chtimes(name, time.Time{}, e.ModTime); err != nil {
		return err
	}
	return f.Chmod(mode(e.Mode))
}

// checkLinks follows every link that was written, now that all of them are there: a chain of links that are harmless
// one by one can lead out. Such links are removed.
func (u *unpacker) checkLinks() error {
	var first error
	for _, name := range u.links {
		_, err := u.root.Stat(name)
		if err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			continue
		}
		if err = explain(name, err); shard.CodeOf(err) != shard.CodeInvalidRequest {
			continue // a loop, or a file where a directory should be: leads nowhere
		}
		if rerr := u.root.Remove(name); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
		if first == nil {
			first = err
		}
	}
	return first
}

// mode is a tar's mode without setuid and setgid.
func mode(m uint32) fs.FileMode {
	out := fs.FileMode(m & 0o777)
	if m&0o1000 != 0 {
		out |= fs.ModeSticky
	}
	return out
}
