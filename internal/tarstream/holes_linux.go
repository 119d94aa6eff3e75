package tarstream

import (
	"io"

	"golang.org/x/sys/unix"
)

// sparseFrom is how many bytes of holes a file needs before looking for them is worth the calls.
const sparseFrom = 1 << 20

// Contents reads an open file from its beginning, like r, which must be its plain reader. size and held are what the
// file system says that it is long and occupies, in bytes. Holes are not read but made up, since the kernel would
// fill its cache with their zeros. A file that becomes shorter meanwhile ends early.
func Contents(r io.Reader, fd int, size, held int64) io.Reader {
	if size-held < sparseFrom {
		return r
	}
	return &sparse{r: r, fd: fd}
}

type sparse struct {
	r          io.Reader
	fd         int
	off        int64
	data, hole int64 // off is below data in a hole, and from data to hole in contents
	plain      bool  // the file system does not tell
}

func (s *sparse) Read(p []byte) (int, error) {
	if s.plain {
		return s.r.Read(p)
	}
	if s.off >= s.hole {
		if err := s.seek(); err != nil {
			return 0, err
		}
		if s.plain {
			return s.r.Read(p)
		}
	}
	var n int
	var err error
	if s.off < s.data {
		n = int(min(int64(len(p)), s.data-s.off))
		clear(p[:n])
	} else {
		for {
			n, err = unix.Pread(s.fd, p[:min(int64(len(p)), s.hole-s.off)], s.off)
			if err != unix.EINTR {
				break
			}
		}
		if n = max(n, 0); n == 0 && err == nil && len(p) > 0 {
			err = io.EOF
		}
	}
	s.off += int64(n)
	return n, err
}

// seek finds the next data behind off and the hole behind it. The end of the file counts as both.
func (s *sparse) seek() error {
	data, err := unix.Seek(s.fd, s.off, unix.SEEK_DATA)
	switch err {
	case nil:
		s.data = data
		if s.hole, err = unix.Seek(s.fd, data, unix.SEEK_HOLE); err == nil && s.hole > s.off {
			return nil
		}
		return io.EOF // truncated meanwhile
	case unix.ENXIO:
		end, err := unix.Seek(s.fd, 0, unix.SEEK_END)
		if err != nil {
			return err
		}
		if s.data, s.hole = end, end; end <= s.off {
			return io.EOF
		}
		return nil
	default:
		s.plain = true
		_, err := unix.Seek(s.fd, s.off, unix.SEEK_SET)
		return err
	}
}
