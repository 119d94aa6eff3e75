package egress

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"time"
)

// maxHello bounds how much is read of a connection before its ClientHello is whole. With post-quantum keys one has about
// 2 KB; crypto/tls refuses more than 64 KiB, which the records' heads come on top of.
const maxHello = 80 << 10

// errNoHello is all that is said about what does not start as TLS.
var errNoHello = errors.New("not a TLS handshake")

// sniff reads the ClientHello and says which host it names, "" for none. seen is all that was read, whatever err is: the
// caller passes it on. crypto/tls does the reading, so that what is sniffed here and what is served when a connection is taken
// apart cannot be understood in two ways.
func sniff(r io.Reader) (serverName string, seen []byte, err error) {
	var taken bytes.Buffer
	var hello *tls.ClientHelloInfo
	conn := tls.Server(&onlyReads{r: io.TeeReader(io.LimitReader(r, maxHello), &taken)}, &tls.Config{
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			hello = h
			return nil, errNoHello // nothing more is wanted
		},
	})
	err = conn.Handshake()
	if hello == nil {
		if err == nil {
			err = errNoHello
		}
		return "", taken.Bytes(), err
	}
	return hello.ServerName, taken.Bytes(), nil
}

// onlyReads is a connection whose other side never hears of anything.
type onlyReads struct {
	net.Conn // nil: what crypto/tls does not need
	r        io.Reader
}

func (c *onlyReads) Read(p []byte) (int, error)       { return c.r.Read(p) }
func (c *onlyReads) Write(p []byte) (int, error)      { return len(p), nil }
func (c *onlyReads) Close() error                     { return nil }
func (c *onlyReads) SetDeadline(time.Time) error      { return nil }
func (c *onlyReads) SetReadDeadline(time.Time) error  { return nil }
func (c *onlyReads) SetWriteDeadline(time.Time) error { return nil }
