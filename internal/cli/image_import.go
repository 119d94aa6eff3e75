package cli

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
)

type importOptions struct {
	source string
	spec   client.ImageImport
}

func (a *App) imageImportCommand() *cobra.Command {
	var o importOptions
	cmd := &cobra.Command{
		Use:   "import [options] SOURCE NAME[:TAG]",
		Short: "Make an image from a local tar or directory",
		Long: `Make an image from what is on this host: an OCI layout (directory or tar), a tar of docker save, or a plain root file
system (directory or tar). A tar may be compressed with gzip. Prints the full reference and the digest, on two lines.

A directory's owners, modes, links and extended attributes are kept as far as this user may read them: use sudo for a
root file system. Devices, sockets and fifos are left out.`,
		Example: `  sudo shard image import --env PATH=/usr/bin:/bin ./rootfs tools:1`,
		Args:    arguments(2, 2, "SOURCE and NAME[:TAG]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.source, o.spec.Ref = args[0], args[1]
			return a.imageImport(cmd.Context(), o)
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&o.spec.Env, "env", nil, "variable `KEY=VALUE` for every command; may be repeated")
	f.StringVar(&o.spec.Workdir, "workdir", "", "`DIR` in which commands start")
	f.StringVar(&o.spec.User, "user", "", "`USER` of commands: name or uid, and :group")
	return cmd
}

func (a *App) imageImport(ctx context.Context, o importOptions) error {
	if err := checkEnv(o.spec.Env); err != nil {
		return err
	}
	source, err := openImport(o.source)
	if err != nil {
		return err
	}
	steps := a.newProgress("importing")
	img, err := a.client().Import(ctx, o.spec, source, steps.show)
	steps.close()
	if cerr := source.Close(); cerr != nil && !errors.Is(err, errInterrupted) {
		return fmt.Errorf("read %s: %w", shard.Quote(o.source), cerr)
	}
	if errors.Is(err, errInterrupted) {
		return errors.New("interrupted; nothing was imported")
	}
	if err != nil {
		return err
	}
	return a.printImage(img)
}

// openImport opens a source as the stream of a tar. Close tells what went wrong with reading it.
func openImport(path string) (io.ReadCloser, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%s does not exist on this host", shard.Quote(path))
	case err != nil:
		return nil, err
	case info.IsDir():
		return tarTree(path), nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	r := bufio.NewReaderSize(f, 64<<10)
	t := &tarFile{file: f, r: r}
	if head, _ := r.Peek(2); bytes.Equal(head, []byte{0x1f, 0x8b}) {
		if t.r, err = gzip.NewReader(r); err != nil {
			_ = f.Close()
			return nil, fmt.Errorf("read %s: %w", shard.Quote(path), err)
		}
	}
	return t, nil
}

// tarFile is a tar on disk that remembers how reading it failed.
type tarFile struct {
	file *os.File
	r    io.Reader
	err  error
}

func (t *tarFile) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	if err != nil && err != io.EOF {
		t.err = err
	}
	return n, err
}

func (t *tarFile) Close() error {
	if err := t.file.Close(); err != nil && t.err == nil && !errors.Is(err, fs.ErrClosed) {
		t.err = err
	}
	return t.err
}
