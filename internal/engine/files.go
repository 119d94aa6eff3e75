package engine

import (
	"context"
	"io"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// agent finds the session for a file operation on a sandbox, and the sandbox's user.
func (e *Engine) agent(ctx context.Context, ref string) (*guest.Session, string, error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, "", err
	}
	session, err := sb.session(ctx)
	return session, sb.record().User, err
}

// PutFile writes one file of exactly args.Size bytes.
func (e *Engine) PutFile(ctx context.Context, ref string, args guest.PutArgs, r io.Reader) error {
	session, user, err := e.agent(ctx, ref)
	if err != nil {
		return err
	}
	args.User = or(args.User, user)
	return guest.Put(ctx, session, args, r)
}

// GetFile streams one regular file. The caller closes it.
func (e *Engine) GetFile(ctx context.Context, ref, path string) (shard.FileEntry, io.ReadCloser, error) {
	session, _, err := e.agent(ctx, ref)
	if err != nil {
		return shard.FileEntry{}, nil, err
	}
	return guest.Get(ctx, session, path)
}

// StatFile describes a path without following a final link.
func (e *Engine) StatFile(ctx context.Context, ref, path string) (shard.FileEntry, error) {
	session, _, err := e.agent(ctx, ref)
	if err != nil {
		return shard.FileEntry{}, err
	}
	return guest.Stat(ctx, session, path)
}

// ListDir calls each with the entries of a directory, sorted by name.
func (e *Engine) ListDir(ctx context.Context, ref, path string, each func(shard.FileEntry) error) error {
	session, _, err := e.agent(ctx, ref)
	if err != nil {
		return err
	}
	return guest.List(ctx, session, path, each)
}

// Mkdir makes a directory.
func (e *Engine) Mkdir(ctx context.Context, ref string, args guest.MkdirArgs) error {
	session, user, err := e.agent(ctx, ref)
	if err != nil {
		return err
	}
	args.User = or(args.User, user)
	return guest.Mkdir(ctx, session, args)
}

// RemoveFile removes a path, with the rights of the sandbox's user.
func (e *Engine) RemoveFile(ctx context.Context, ref, path string, recursive bool) error {
	session, user, err := e.agent(ctx, ref)
	if err != nil {
		return err
	}
	return guest.Remove(ctx, session, guest.RemoveArgs{Path: guest.Path(path), Recursive: recursive, User: user})
}

// PutArchive unpacks a tar into a directory.
func (e *Engine) PutArchive(ctx context.Context, ref, path, owner string, tar io.Reader) error {
	session, user, err := e.agent(ctx, ref)
	if err != nil {
		return err
	}
	return guest.Untar(ctx, session, guest.UntarArgs{Path: guest.Path(path), User: or(owner, user)}, tar)
}

// GetArchive streams a path as a tar. The caller closes it; a cut tar ends with an error.
func (e *Engine) GetArchive(ctx context.Context, ref, path string) (shard.FileEntry, io.ReadCloser, error) {
	session, _, err := e.agent(ctx, ref)
	if err != nil {
		return shard.FileEntry{}, nil, err
	}
	return guest.Tar(ctx, session, path)
}
