//go:build linux

package rootfs

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const repairTimeout = 10 * time.Minute

const (
	// noinit_itable: the kernel would write zeros into inode tables that are holes, 160 MB for a disk of 10 GiB.
	// discard: what the guest removes goes back to the host.
	diskOptions = "discard,noinit_itable,errors=remount-ro"
	// redirect_dir: without it rename(2) of a directory of the image fails with EXDEV, which npm and others do not expect.
	// index, metacopy and xino off: they tie the disk to one mounting of the layers, trust more of it, or give inode
	// numbers above 2^53, which JavaScript cannot tell apart.
	overlayOptions = "redirect_dir=on,index=off,metacopy=off,xino=off"
)

// Mount makes sandboxDir/rootfs the writable union of the layers below the sandbox's disk, and returns its path. layers
// are names of directories in layersDir, topmost first, at most MaxLayers. A disk that was not unmounted cleanly is repaired
// first. A root that is mounted already is left as it is. On failure nothing stays mounted.
func (m *Manager) Mount(ctx context.Context, sandboxDir, layersDir string, layers []string) (root string, err error) {
	root = filepath.Join(sandboxDir, rootDir)
	if mounted, err := m.Mounted(sandboxDir); err != nil || mounted {
		return root, err
	}
	if len(layers) == 0 || len(layers) > MaxLayers {
		return "", fmt.Errorf("mount root: %d layers, want 1 to %d", len(layers), MaxLayers)
	}
	// What a killed daemon left half mounted goes first; two mounts of one disk would destroy it.
	if err := m.Unmount(ctx, sandboxDir); err != nil {
		return "", err
	}
	err = m.mountBoth(ctx, sandboxDir, layersDir, layers)
	if errors.Is(err, unix.EBADMSG) || errors.Is(err, unix.EUCLEAN) || errors.Is(err, unix.EIO) { // it says that it is clean, and is not
		m.log.Warn("a disk is damaged and is checked", "disk", filepath.Join(sandboxDir, diskFile), "error", err)
		if err = spoil(filepath.Join(sandboxDir, diskFile)); err == nil {
			err = m.mountBoth(ctx, sandboxDir, layersDir, layers)
		}
	}
	if err != nil {
		return "", err
	}
	return root, nil
}

// mountBoth mounts the disk and the root. On failure nothing stays mounted.
func (m *Manager) mountBoth(ctx context.Context, sandboxDir, layersDir string, layers []string) (err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Unmount(context.WithoutCancel(ctx), sandboxDir))
		}
	}()
	if err := m.mountDisk(ctx, sandboxDir); err != nil {
		return fmt.Errorf("mount the sandbox's disk: %w", err)
	}
	disk, root := filepath.Join(sandboxDir, diskDir), filepath.Join(sandboxDir, rootDir)
	err = mountOverlay(sandboxDir, layersDir, layers)
	if errors.Is(err, unix.ENOSPC) { // the guest has used all of its disk, or every inode
		if err = errors.Join(m.unmountPoint(ctx, root), removeEmpty(root), os.RemoveAll(filepath.Join(disk, spareDir))); err == nil {
			err = mountOverlay(sandboxDir, layersDir, layers)
		}
	}
	if err != nil {
		return fmt.Errorf("mount the sandbox's root: %w", err)
	}
	if err := keepSpare(disk); err != nil { // before the guest can take its place
		m.log.Debug("there is no spare room on a disk", "disk", disk, "error", err)
	}
	return nil
}

// spareDir on the sandbox's disk holds what mounting its root needs for a moment: a guest that fills its disk to the last inode
// must not keep itself from ever starting again.
const (
	spareDir   = "spare"
	spareFiles = 8 // of a block each
)

// keepSpare makes what is missing of the spare files.
func keepSpare(disk string) error {
	dir := filepath.Join(disk, spareDir)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	for i := range spareFiles {
		f, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(i)), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return err
		}
		_, err = f.Write(make([]byte, 4096))
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// removeEmpty removes a mount point, if it is there.
func removeEmpty(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the mount point: %w", err)
	}
	return nil
}

func (m *Manager) mountDisk(ctx context.Context, sandboxDir string) error {
	file, dir := filepath.Join(sandboxDir, diskFile), filepath.Join(sandboxDir, diskDir)
	if err := m.repair(ctx, file); err != nil {
		return err
	}
	loop, err := attach(ctx, file)
	if err != nil {
		return err
	}
	defer loop.Close()
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	// Host users must not meet the guest's set-uid programs and devices here; the overlay has flags of its own.
	if err := unix.Mount(loop.Name(), dir, "ext4", unix.MS_NOATIME|unix.MS_NOSUID|unix.MS_NODEV, diskOptions); err != nil {
		return fmt.Errorf("mount ext4: %w", err)
	}
	if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mount private: %w", err)
	}
	return makeOverlayDirs(dir) // there already, unless a repair lost them
}

// makeOverlayDirs makes what an overlay wants to find on the sandbox's disk.
func makeOverlayDirs(disk string) error {
	for name, mode := range map[string]fs.FileMode{"upper": 0o755, "work": 0o700} {
		path := filepath.Join(disk, name)
		if err := os.Mkdir(path, mode); errors.Is(err, fs.ErrExist) {
			continue
		} else if err != nil {
			return err
		}
		if err := os.Chmod(path, mode); err != nil { // whatever the umask
			return err
		}
	}
	return nil
}

// mountOverlay names every directory by an open descriptor, /proc/self/fd/N: that is short enough for 127 layers in the one
// page of options the kernel takes, whatever characters the paths hold, and each name is checked as it is opened.
func mountOverlay(sandboxDir, layersDir string, layers []string) error {
	var fds []int
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
	open := func(path string) (string, error) {
		fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return "", &fs.PathError{Op: "open", Path: path, Err: err}
		}
		fds = append(fds, fd)
		return "/proc/self/fd/" + strconv.Itoa(fd), nil
	}
	lower := make([]string, len(layers))
	for i, name := range layers {
		if !filepath.IsLocal(name) {
			return fmt.Errorf("layer name %q leaves the directory of layers", name)
		}
		var err error
		if lower[i], err = open(filepath.Join(layersDir, name)); err != nil {
			return fmt.Errorf("layer %d: %w", i, err)
		}
	}
	upper, err := open(filepath.Join(sandboxDir, diskDir, "upper"))
	if err != nil {
		return err
	}
	work, err := open(filepath.Join(sandboxDir, diskDir, "work"))
	if err != nil {
		return err
	}
	if err := firstMode(upper, work, lower[0]); err != nil {
		return fmt.Errorf("give / the mode it has in the image: %w", err)
	}
	options := "lowerdir=" + strings.Join(lower, ":") + ",upperdir=" + upper + ",workdir=" + work + "," + overlayOptions
	if len(options) >= os.Getpagesize() {
		return fmt.Errorf("%d layers need %d bytes of mount options", len(layers), len(options)) // descriptors of 7 digits
	}
	root := filepath.Join(sandboxDir, rootDir)
	if err := os.Mkdir(root, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("shard", root, "overlay", unix.MS_NOATIME, options); err != nil {
		return fmt.Errorf("mount overlay of %d layers: %w", len(layers), err)
	}
	if err := unix.Mount("", root, "", unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	return fitMountPoints(root)
}

// firstMode gives upper, which is the guest's / from outside, the owner and the mode of the topmost layer, once: what the guest
// does to its / later stays. An overlay that was mounted before has left something in work.
func firstMode(upper, work, top string) error {
	used, err := os.ReadDir(work)
	if err != nil || len(used) > 0 {
		return err
	}
	var st unix.Stat_t
	if err := unix.Stat(top, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: top, Err: err}
	}
	if err := os.Chown(upper, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	return unix.Chmod(upper, st.Mode&0o7777)
}

// fitMountPoints replaces what an image has where a runtime mounts and which is no directory: a link there leads the runtime
// elsewhere, and it refuses to follow. What is hidden by the mount is no loss. /etc, in which the agent writes, may be a link
// that leads to a directory.
func fitMountPoints(root string) error {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: root, Err: err}
	}
	defer unix.Close(dir)
	for _, name := range []string{"proc", "sys", "dev", "etc"} {
		var st unix.Stat_t
		err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if errors.Is(err, unix.ENOENT) || err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			continue
		}
		if name == "etc" {
			if f, err := openIn(root, "/etc", unix.O_PATH|unix.O_DIRECTORY); err == nil {
				_ = f.Close()
				continue
			}
		}
		if err == nil {
			err = unix.Unlinkat(dir, name, 0)
		}
		if err == nil {
			err = unix.Mkdirat(dir, name, 0o755)
		}
		if err != nil {
			return fmt.Errorf("make /%s of the image a directory: %w", name, err)
		}
	}
	return nil
}

// repair runs e2fsck on a disk whose superblock does not say that it was left clean.
func (m *Manager) repair(ctx context.Context, file string) error {
	clean, err := isClean(file)
	if err != nil || clean {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, repairTimeout)
	defer cancel()
	// -p repairs what can lose nothing. If that is not enough, a repaired disk with something in lost+found is better
	// than a sandbox that never starts again.
	for _, mode := range []string{"-p", "-y"} {
		var out []byte
		out, err = exec.CommandContext(ctx, "e2fsck", mode, file).CombinedOutput()
		exit, failed := errors.AsType[*exec.ExitError](err)
		if err == nil || failed && (exit.ExitCode() == 1 || exit.ExitCode() == 2) { // repaired
			m.log.Warn("a disk was not unmounted cleanly and has been checked", "disk", file, "mode", mode, "result", clip(out))
			return nil
		}
		err = fmt.Errorf("e2fsck %s: %w: %s", mode, err, clip(out))
		if !failed || ctx.Err() != nil {
			return err
		}
		m.log.Warn("a disk could not be repaired", "disk", file, "error", err)
	}
	return err
}

// isClean reads the state that ext4 clears while it is mounted.
func isClean(file string) (bool, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return false, err
	}
	defer f.Close()
	b, err := readSuper(f)
	if err != nil {
		return false, err
	}
	return b[magicAt] == 0x53 && b[magicAt+1] == 0xEF && b[stateAt] == validState, nil
}

// Where ext4's superblock is, and what in it says whether the file system is whole.
const (
	superAt, superSize            = 1024, 1024
	magicAt                       = 0x38
	stateAt, validState, errState = 0x3A, 1, 2
	featuresAt, checksums         = 0x64, 0x400
	checksumAt                    = 1020
)

func readSuper(f *os.File) (b [superSize]byte, err error) {
	if _, err := f.ReadAt(b[:], superAt); err != nil {
		return b, fmt.Errorf("read the disk's superblock: %w", err)
	}
	return b, nil
}

// spoil makes a disk that is not mounted look as it should: with errors, to be checked before it is used again. The block is
// there already, so a full disk of the host does not matter.
func spoil(file string) error {
	f, err := os.OpenFile(file, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	b, err := readSuper(f)
	if err == nil {
		b[stateAt], b[stateAt+1] = errState, 0
		if binary.LittleEndian.Uint32(b[featuresAt:])&checksums != 0 {
			binary.LittleEndian.PutUint32(b[checksumAt:], ^crc32.Checksum(b[:checksumAt], crc32.MakeTable(crc32.Castagnoli)))
		}
		_, err = f.WriteAt(b[:], superAt)
	}
	return errors.Join(err, f.Sync(), f.Close())
}

// Unmount takes the root and its disk down, writes everything to the disk file, and frees the loop device. It works on
// whatever it finds, also after a restart of the daemon, and when there is nothing to do. Writing back what the guest
// left unwritten can take as long as the host's disk needs; ctx bounds the waits for users of the mounts.
func (m *Manager) Unmount(ctx context.Context, sandboxDir string) error {
	if err := release(sandboxDir); err != nil { // a frozen file system never goes away
		return fmt.Errorf("release the disk: %w", err)
	}
	// A host whose disk is full, or broken, lets go of what the guest wrote last, and ext4, which has no journal here, does not
	// notice when that was about where files are.
	unwritten := syncDisk(sandboxDir)
	for _, name := range []string{rootDir, diskDir} {
		path := filepath.Join(sandboxDir, name)
		if err := m.unmountPoint(ctx, path); err != nil {
			return err
		}
		// Removing the mount point also takes the mount out of other namespaces that inherited a copy of it.
		if err := removeEmpty(path); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, m.detachTimeout)
	defer cancel()
	file := filepath.Join(sandboxDir, diskFile)
	switch err := awaitDetached(ctx, file); {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	}
	if unwritten != nil {
		m.log.Error("the host could not write all of a sandbox's files: some are lost, and the disk will be checked", "disk", file, "error", unwritten)
		return spoil(file)
	}
	return nil
}

// Sync writes what the sandbox has written to the disk file, and that to the host's disk.
func (m *Manager) Sync(sandboxDir string) error {
	if err := syncDisk(sandboxDir); err != nil {
		return fmt.Errorf("write the sandbox's files to its disk: %w", err)
	}
	f, err := os.Open(filepath.Join(sandboxDir, diskFile))
	if err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write the sandbox's disk: %w", err)
	}
	return nil
}

// syncDisk writes what is under way to the disk, and tells of any write that failed since it was mounted.
func syncDisk(sandboxDir string) error {
	path := filepath.Join(sandboxDir, diskDir)
	var dir, disk unix.Stat_t
	if unix.Stat(sandboxDir, &dir) != nil || unix.Stat(path, &disk) != nil || dir.Dev == disk.Dev {
		return nil // not mounted
	}
	return syncFS(path)
}

// unmountPoint removes every mount on path and below it.
func (m *Manager) unmountPoint(ctx context.Context, path string) error {
	patience, cancel := context.WithTimeout(ctx, m.busyTimeout)
	defer cancel()
	for {
		err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
		switch {
		case err == nil: // there may be another one below it
			continue
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return nil
		case !errors.Is(err, unix.EBUSY):
			return &fs.PathError{Op: "unmount", Path: path, Err: err}
		}
		inner, err := mountsBelow(path)
		if err != nil {
			return err
		}
		for _, at := range slices.Backward(inner) { // the one at path itself is tried again above
			_ = unix.Unmount(at, unix.UMOUNT_NOFOLLOW)
		}
		if pause(patience, 10*time.Millisecond) == nil {
			continue
		}
		if ctx.Err() != nil {
			return fmt.Errorf("unmount %s: %w: %w", path, ctx.Err(), unix.EBUSY)
		}
		// A process on the host sits in it. The mount leaves the tree now and its disk is freed with its last user; until
		// then awaitDetached refuses to say that all is well.
		m.log.Warn("a mount stayed in use and was detached lazily", "path", path)
		_ = syncFS(path)
		if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			return &fs.PathError{Op: "detach", Path: path, Err: err}
		}
	}
}

func syncFS(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(fd), unix.Close(fd))
}

// Mounted says whether the sandbox's writable root is mounted.
func (m *Manager) Mounted(sandboxDir string) (bool, error) {
	var st unix.Statfs_t
	err := unix.Statfs(filepath.Join(sandboxDir, rootDir), &st)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look up the sandbox's root: %w", err)
	}
	if st.Type != unix.OVERLAYFS_SUPER_MAGIC {
		return false, nil
	}
	// The root itself may lie on an overlay (a daemon in a container): a mount has a device of its own.
	var dir, root unix.Stat_t
	if err := errors.Join(unix.Stat(sandboxDir, &dir), unix.Stat(filepath.Join(sandboxDir, rootDir), &root)); err != nil {
		return false, fmt.Errorf("look up the sandbox's root: %w", err)
	}
	return dir.Dev != root.Dev, nil
}

// Sweep unmounts, after a crash, every root and disk below the Manager's directory whose sandbox keep does not want, and
// releases the others from a Clone that never ended. It goes on after a failure and joins the errors.
func (m *Manager) Sweep(ctx context.Context, keep func(sandboxDir string) bool) error {
	dir, err := filepath.EvalSymlinks(m.dir)
	if err != nil {
		return fmt.Errorf("sweep mounts: %w", err)
	}
	mounts, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	var errs []error
	for _, at := range mounts {
		sandboxDir, name := filepath.Split(at)
		sandboxDir = filepath.Clean(sandboxDir)
		if (name != rootDir && name != diskDir) || seen[sandboxDir] {
			continue
		}
		seen[sandboxDir] = true
		rel, err := filepath.Rel(dir, sandboxDir) // keep is asked in the terms of Open, symbolic links and all
		switch {
		case err != nil:
		case keep(filepath.Join(m.dir, rel)):
			err = release(sandboxDir)
		default:
			err = m.Unmount(ctx, sandboxDir)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("sweep %s: %w", sandboxDir, err))
		}
	}
	return errors.Join(errs...)
}

// mountsBelow lists the mount points at and below path, in the order in which they were mounted.
func mountsBelow(path string) ([]string, error) {
	path, err := filepath.EvalSymlinks(path) // as the kernel writes it
	if err != nil {
		return nil, fmt.Errorf("look for mounts: %w", err)
	}
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var list []string
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20) // an overlay's line is long
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 5 {
			continue
		}
		if at := unescape(fields[4]); at == path || strings.HasPrefix(at, strings.TrimSuffix(path, "/")+"/") {
			list = append(list, at)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	return list, nil
}

// unescape undoes how the kernel writes what would part its fields or lines.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace
