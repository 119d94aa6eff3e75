package engine

import (
	"cmp"
	"context"
	"errors"
	"io"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// agent finds a sandbox and its session for a file operation.
func (e *Engine) agent(ctx context.Context, ref string) (*sandbox, *guest.Session, error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, nil, err
	}
	session, err := sb.session(ctx)
	return sb, session, err
}

// explain says why an operation failed that was broken off: most often the sandbox was ended under it.
func (sb *sandbox) explain(err error) error {
	if errors.Is(err, guest.ErrQuiesced) {
		return shard.Wrap(shard.CodeSandboxNotRunning, err, "sandbox %q was just being paused: what was under way in it was broken off", sb.ref())
	}
	lost := errors.Is(err, guest.ErrLost)
	if !lost && shard.CodeOf(err) != shard.CodeInternal {
		return err
	}
	sb.mu.Lock()
	ending := sb.live == nil || sb.live.expected.Load()
	sb.mu.Unlock()
	switch {
	case !ending && !lost:
		return err
	case ending:
		return shard.Wrap(shard.CodeSandboxNotRunning, err, "sandbox %q ended meanwhile", sb.ref())
	}
	return shard.Wrap(shard.CodeInternal, err, "the agent of sandbox %q broke off: try again", sb.ref())
}

// PutFile writes one file of exactly args.Size bytes.
func (e *Engine) PutFile(ctx context.Context, ref string, args guest.PutArgs, r io.Reader) error {
	sb, session, err := e.agent(ctx, ref)
	if err != nil {
		return err
	}
	args.User = cmp.Or(args.User, sb.record().User)
	return sb.explain(guest.Put(ctx, session, args, r))
}

// GetFile streams one regular file. The caller closes it.
func (e *Engine) GetFile(ctx context.Context, ref, path string) (shard.FileEntry, io.ReadCloser, error) {
	sb, session, err := e.agent(ctx, ref)
	if err != nil {
		return shard.FileEntry{}, nil, err
	}
	entry, r, err := guest.Get(ctx, session, path)
	return entry, explained{r, sb}, sb.explain(err)
}

// explained is a reader of a sandbox whose failures explain themselves.
type explained struct {
	io.ReadCloser
	sb *sandbox
}

func (e explained) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		err = e.sb.explain(err)
	}
	return n, err
}

// StatFile describes a path without following a final link.
func (e *Engine) StatFile(ctx context.Context, ref, path string) (shard.FileEntry, error) {
	sb, session, err := e.agent(ctx, ref)
	if err != nil {
		return shard.FileEntry{}, err
	}
	entry, err := guest.Stat(ctx, session, path)
	return entry, sb.explain(err)
}

// ListDir calls each with the entries of a directory, sorted by name.
func (e *Engine) ListDir(ctx context.Context, ref, path string, each func(shard.FileEntry) error) error {
	sb, session, err := e.agent(ctx, ref)
	if err != nil {
		return err
	}
	return sb.explain(guest.List(ctx, session, path, each))
}

// Mkdir makes a directory.
func (e *Engine) Mkdir(ctx context.Context, ref string, args guest.MkdirArgs) error {
	sb, session, err := e.agent(ctx, ref)
	if err != nil {
		return err
	}
	args.User = cmp.Or(args.User, sb.record().User)
	return sb.explain(guest.Mkdir(ctx, session, args))
}

// RemoveFile removes a path, with the rights of the sandbox's user.
func (e *Engine) RemoveFile(ctx context.Context, ref, path string, recursive bool) error {
	sb, session, err := e.agent(ctx, ref)
	if err != nil {
		return err
	}
	return sb.explain(guest.Remove(ctx, session, guest.RemoveArgs{Path: guest.Path(path), Recursive: recursive, User: sb.record().User}))
}

// PutArchive unpacks a tar into a directory.
func (e *Engine) PutArchive(ctx context.Context, ref, path, owner string, tar io.Reader) error {
	sb, session, err := e.agent(ctx, ref)
	if err != nil {
		return err
	}
	return sb.explain(guest.Untar(ctx, session, guest.UntarArgs{Path: guest.Path(path), User: cmp.Or(owner, sb.record().User)}, tar))
}

// GetArchive streams a path as a tar. The caller closes it; a cut tar ends with an error.
func (e *Engine) GetArchive(ctx context.Context, ref, path string) (shard.FileEntry, io.ReadCloser, error) {
	sb, session, err := e.agent(ctx, ref)
	if err != nil {
		return shard.FileEntry{}, nil, err
	}
	entry, r, err := guest.Tar(ctx, session, path)
	return entry, explained{r, sb}, sb.explain(err)
}
