package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
	"github.com/useshards/shard/internal/hostfs"
)

type cpOptions struct {
	user     string
	src, dst string
}

func (a *App) cpCommand() *cobra.Command {
	var o cpOptions
	cmd := &cobra.Command{
		Use:   "cp [options] SRC SANDBOX:PATH | cp SANDBOX:PATH DST",
		Short: "Copy files into or out of a running sandbox",
		Long: `Copy a file or a directory into a running sandbox, or out of it.

An existing directory as the target, or a target that ends in /, gets the copy inside under its own name; any other
target becomes the copy. Directories that are missing in the sandbox are made. A source directory that ends in /. is
copied without itself: only what is in it. A local path with a colon begins with ./ or /. Under sudo, what is copied out
belongs to the user who called sudo.`,
		Example: `  shard cp main.py agent:/tmp/main.py
  shard cp agent:/tmp/out.json .`,
		Args: arguments(2, 2, "SRC and DST"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.src, o.dst = args[0], args[1]
			return a.cp(cmd.Context(), o)
		},
		ValidArgsFunction: a.completeCopy,
	}
	cmd.Flags().StringVar(&o.user, "user", "", "`USER` of the sandbox that owns what is copied in (default the sandbox's)")
	return cmd
}

// location is one end of a copy: ref is "" for this host.
type location struct{ ref, path string }

// parseLocation tells SANDBOX:PATH from a local path: what begins with / or . or has no colon is local.
func parseLocation(s string) (location, error) {
	ref, at, remote := strings.Cut(s, ":")
	if !remote || strings.HasPrefix(s, "/") || strings.HasPrefix(s, ".") {
		return location{path: s}, nil
	}
	if err := shard.CheckRef("sandbox", ref); err != nil {
		return location{}, usagef("%s: %v (a local path with a colon begins with ./ or /)", shard.Quote(s), err)
	}
	if !strings.HasPrefix(at, "/") {
		return location{}, usagef("%s: a path in a sandbox begins with /", shard.Quote(s))
	}
	return location{ref, at}, nil
}

func (a *App) cp(ctx context.Context, o cpOptions) error {
	src, err := parseLocation(o.src)
	if err != nil {
		return err
	}
	dst, err := parseLocation(o.dst)
	if err != nil {
		return err
	}
	switch {
	case o.src == "-" || o.dst == "-": // elsewhere that is a stream, so it is not taken for a file
		return usagef("- is not a stream here: use shard exec [-i] SANDBOX with tar or cat, or write ./- for a file of that name")
	case src.ref == "" && dst.ref == "":
		return usagef("neither %s nor %s is in a sandbox: write SANDBOX:PATH for one of them", shard.Quote(o.src), shard.Quote(o.dst))
	case src.ref != "" && dst.ref != "":
		return usagef("both ends are in a sandbox: copy to this host first")
	case src.ref != "" && o.user != "":
		return usagef("--user is for copies into a sandbox")
	case dst.ref != "":
		return a.copyIn(ctx, src.path, dst, o.user)
	}
	return a.copyOut(ctx, src, dst.path)
}

// copyIn copies the host's src into a sandbox.
func (a *App) copyIn(ctx context.Context, src string, dst location, user string) error {
	source, err := localSource(src)
	if err != nil {
		return err
	}
	c := a.client()
	at, err := remoteKind(ctx, c, dst)
	if err != nil {
		return err
	}
	place, err := hostfs.Place(source, dst.path, at)
	if err != nil {
		return err
	}
	if place.MakeParent {
		if err := c.Mkdir(ctx, dst.ref, place.Parent, client.WriteOptions{User: user, Parents: true}); err != nil {
			return err
		}
	}
	if source.Kind == hostfs.File {
		return a.putFile(ctx, c, src, location{dst.ref, path.Join(place.Parent, place.Name)}, user)
	}
	return a.putTree(ctx, c, src, place, dst.ref, user)
}

// localSource looks at what is to be copied in, before anything is touched.
func localSource(src string) (hostfs.Source, error) {
	info, err := os.Stat(src)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return hostfs.Source{}, fmt.Errorf("%s does not exist on this host", shard.Quote(src))
	case err != nil:
		return hostfs.Source{}, err
	case info.IsDir():
		return hostfs.Source{Path: filepath.ToSlash(src), Kind: hostfs.Dir}, nil
	case info.Mode().IsRegular():
		return hostfs.Source{Path: filepath.ToSlash(src), Kind: hostfs.File}, nil
	}
	return hostfs.Source{}, fmt.Errorf("%s is neither a file nor a directory", shard.Quote(src))
}

// remoteKind says what stands at a path in a sandbox; a link counts as what it leads to. Missing may also mean that
// there is no such sandbox: a HEAD has no words for the difference, and whatever is done next has.
func remoteKind(ctx context.Context, c *client.Client, at location) (hostfs.Kind, error) {
	at.path = path.Clean(at.path)
	entry, err := c.Stat(ctx, at.ref, at.path)
	if err == nil && entry.Type == "symlink" {
		followed, ferr := c.Stat(ctx, at.ref, at.path+"/") // passes for a directory only
		switch shard.CodeOf(ferr) {
		case "":
			entry = followed
		case shard.CodeInvalidRequest:
			return hostfs.File, nil
		default:
			err = ferr
		}
	}
	switch {
	case shard.CodeOf(err) == shard.CodeNotFound:
		return hostfs.Missing, nil
	case err != nil:
		return hostfs.Missing, worded(ctx, c, at, err)
	case entry.Type == "dir":
		return hostfs.Dir, nil
	}
	return hostfs.File, nil
}

// worded replaces the bare status that a HEAD answers by the words that the same GET does.
func worded(ctx context.Context, c *client.Client, at location, err error) error {
	if _, refused := errors.AsType[*shard.Error](err); !refused {
		return err
	}
	if _, lerr := c.ListDir(ctx, at.ref, at.path); lerr != nil {
		return lerr
	}
	return err
}

func (a *App) putFile(ctx context.Context, c *client.Client, src string, dst location, user string) error {
	f, err := os.Open(src)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	mode := info.Mode().Perm()
	m := a.newMeter(filepath.Base(src), io.LimitReader(f, info.Size()), info.Size())
	defer m.close()
	err = c.PutFile(ctx, dst.ref, dst.path, m, info.Size(), client.WriteOptions{Mode: &mode, User: user})
	if err != nil && m.read.Load() < info.Size() {
		if now, serr := f.Stat(); serr == nil && now.Size() < info.Size() {
			return fmt.Errorf("%s became shorter while it was copied", shard.Quote(src))
		}
	}
	if err != nil {
		return fmt.Errorf("copy %s to %s:%s: %w", shard.Quote(src), dst.ref, dst.path, err)
	}
	return nil
}

// putTree streams a directory as a tar. The packer's own failure is told rather than what it did to the request.
func (a *App) putTree(ctx context.Context, c *client.Client, src string, place hostfs.Placement, ref, user string) error {
	tree, err := filepath.EvalSymlinks(src)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	pr, pw := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := hostfs.Pack(ctx, pw, tree, place.Name, hostfs.PackOptions{
			Skipped: func(name, why string) { a.warn("%s was left out: %s", name, why) },
		})
		pw.CloseWithError(err)
		packed <- err
	}()
	m := a.newMeter(filepath.Base(tree), pr, 0)
	err = c.PutArchive(ctx, ref, place.Parent, user, m)
	m.close()
	interrupted := context.Cause(ctx)
	cancel()
	pr.CloseWithError(io.ErrClosedPipe)
	perr := <-packed
	switch {
	case err == nil:
		return perr
	case interrupted != nil:
		return interrupted
	case perr != nil && !errors.Is(perr, io.ErrClosedPipe) && !errors.Is(perr, context.Canceled):
		return fmt.Errorf("read %s: %w", shard.Quote(src), perr)
	}
	return fmt.Errorf("copy %s to %s:%s: %w", shard.Quote(src), ref, path.Join(place.Parent, place.Name), err)
}

// copyOut copies src out of a sandbox.
func (a *App) copyOut(ctx context.Context, src location, dst string) error {
	c := a.client()
	kind, err := remoteKind(ctx, c, src)
	if err != nil {
		return err
	}
	if kind == hostfs.Missing {
		if _, err := c.Inspect(ctx, src.ref); err != nil {
			return err
		}
		return fmt.Errorf("%s does not exist in %s", shard.Quote(src.path), src.ref)
	}
	place, err := hostfs.Place(hostfs.Source{Path: src.path, Kind: kind}, filepath.ToSlash(dst), localKind(dst))
	if err != nil {
		return err
	}
	owner, err := a.sudoUser()
	if err != nil {
		return err
	}
	if place.MakeParent {
		if err := makeOwned(place.Parent, owner); err != nil {
			return err
		}
	}
	if _, err := os.Stat(place.Parent); err != nil {
		return fmt.Errorf("the directory %s does not exist on this host", shard.Quote(place.Parent))
	}
	if kind == hostfs.File {
		err = a.getFile(ctx, c, src, filepath.Join(place.Parent, place.Name), owner)
	} else {
		err = a.getTree(ctx, c, src, place, owner)
	}
	if err != nil && !errors.Is(err, errInterrupted) {
		return fmt.Errorf("copy %s:%s to %s: %w", src.ref, src.path, shard.Quote(dst), err)
	}
	return err
}

func localKind(p string) hostfs.Kind {
	info, err := os.Stat(p)
	switch {
	case err != nil:
		return hostfs.Missing
	case info.IsDir():
		return hostfs.Dir
	}
	return hostfs.File
}

// sudoUser is who called sudo, nil when nobody did or this process may not give files away.
func (a *App) sudoUser() (*hostfs.Owner, error) {
	uid, gid := a.Getenv("SUDO_UID"), a.Getenv("SUDO_GID")
	if uid == "" || os.Geteuid() != 0 {
		return nil, nil
	}
	u, err := strconv.ParseUint(uid, 10, 31)
	if err != nil {
		return nil, fmt.Errorf("SUDO_UID is %s, not a user id", shard.Quote(uid))
	}
	g, err := strconv.ParseUint(gid, 10, 31)
	if err != nil {
		return nil, fmt.Errorf("SUDO_GID is %s, not a group id", shard.Quote(gid))
	}
	return &hostfs.Owner{UID: int(u), GID: int(g)}, nil
}

// makeOwned makes a missing directory and its missing parents, all for owner.
func makeOwned(dir string, owner *hostfs.Owner) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	if parent := filepath.Dir(dir); parent != dir {
		if err := makeOwned(parent, owner); err != nil {
			return err
		}
	}
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if owner != nil {
		return os.Lchown(dir, owner.UID, owner.GID)
	}
	return nil
}

// getFile downloads a file beside its target and renames it, so that the target is complete or as it was. What exists
// and is no file is not replaced: root could lose /dev/null.
func (a *App) getFile(ctx context.Context, c *client.Client, src location, target string, owner *hostfs.Owner) (err error) {
	if real, err := filepath.EvalSymlinks(target); err == nil {
		target = real // a link to a file is written through, not replaced
	}
	if info, err := os.Lstat(target); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("%s exists and is not a regular file", shard.Quote(target))
	}
	body, entry, err := c.GetFile(ctx, src.ref, path.Clean(src.path))
	if err != nil {
		return err
	}
	defer body.Close()
	tmp, err := os.CreateTemp(filepath.Dir(target), ".shard-cp-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = tmp.Close()
			_ = os.Remove(tmp.Name())
		}
	}()
	m := a.newMeter(filepath.Base(target), body, entry.Size)
	_, err = io.Copy(tmp, m)
	m.close()
	if err != nil {
		return err
	}
	if owner != nil {
		if err := tmp.Chown(owner.UID, owner.GID); err != nil {
			return err
		}
	}
	if err := tmp.Chmod(fs.FileMode(entry.Mode) & fs.ModePerm); err != nil {
		return err
	}
	if err := tmp.Close(); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), target)
}

func (a *App) getTree(ctx context.Context, c *client.Client, src location, place hostfs.Placement, owner *hostfs.Owner) error {
	body, _, err := c.GetArchive(ctx, src.ref, path.Clean(src.path)+"/") // the slash follows a link
	if err != nil {
		return err
	}
	defer body.Close()
	m := a.newMeter(path.Base(src.path), body, 0)
	defer m.close()
	target := filepath.Join(place.Parent, place.Name)
	_, serr := os.Lstat(target)
	err = hostfs.Unpack(ctx, m, place.Parent, hostfs.UnpackOptions{Name: place.Name, Owner: owner})
	if err != nil && errors.Is(serr, fs.ErrNotExist) {
		_ = os.RemoveAll(target) // part of a tree looks like a tree
	}
	return err
}
