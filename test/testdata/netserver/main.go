// Command netserver is the server in the sandbox that the tests of forwarded ports talk to. The first line of a connection
// says what it does with it:
//
//	echo      gives back what it reads, until its end
//	source N  sends N bytes of a known pattern and ends
//	sink      reads to the end, then answers with the count
//	early N   ends its own half at once, then reads to the end, and remembers the count as `last`
//	last      answers with what early remembered
//	peer      answers with the client's address
//	ask PORT  rests, asks for peer at that port of its own 127.0.0.1, and answers with the nanoseconds that it took
//	reset     resets the connection
//	close     closes it
//	hold      neither reads nor writes
package main

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

var last atomic.Int64

func main() {
	up := flag.Bool("up", false, "set the loopback interface up first")
	greet := flag.String("greet", "", "close or reset each connection at once, instead of reading a line")
	flag.Parse()
	if *up {
		loopbackUp()
	}
	for _, addr := range flag.Args() {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		go accept(l.(*net.TCPListener), *greet)
	}
	fmt.Println("listening")
	select {}
}

func loopbackUp() {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if ifr, err := unix.NewIfreq("lo"); err == nil {
		ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
		_ = unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
	}
}

func accept(l *net.TCPListener, greet string) {
	for {
		c, err := l.AcceptTCP()
		if err != nil {
			fmt.Fprintln(os.Stderr, "accept:", err)
			time.Sleep(time.Millisecond)
			continue
		}
		go func() {
			defer c.Close()
			switch greet {
			case "reset":
				_ = c.SetLinger(0)
			case "close":
			default:
				serve(c)
			}
		}()
	}
}

func serve(c *net.TCPConn) {
	r := bufio.NewReaderSize(c, 512)
	line, err := r.ReadString('\n')
	if err != nil {
		fmt.Fprintln(os.Stderr, "read a line:", line, err)
		return
	}
	words := strings.Fields(line + " 0 0")
	n, _ := strconv.ParseInt(words[1], 10, 64)
	switch words[0] {
	case "echo":
		// By a buffer: the kernel's own way (splice) takes two more descriptors for each connection that waits.
		if _, err := io.CopyBuffer(struct{ io.Writer }{c}, onlyReader{r}, make([]byte, 4096)); err != nil {
			fmt.Fprintln(os.Stderr, "echo:", err)
		}
	case "source":
		_, _ = io.CopyN(c, &pattern{}, n)
	case "sink":
		n, _ := io.CopyBuffer(io.Discard, onlyReader{r}, make([]byte, 128<<10))
		fmt.Fprintln(c, n)
	case "early":
		_ = c.CloseWrite()
		n, _ := io.Copy(io.Discard, r)
		last.Store(n)
	case "last":
		fmt.Fprintln(c, last.Load())
	case "peer":
		fmt.Fprintln(c, c.RemoteAddr())
	case "ask":
		time.Sleep(10 * time.Millisecond)
		took, err := ask(n)
		if err != nil {
			fmt.Fprintln(os.Stderr, "ask:", err)
			return
		}
		fmt.Fprintln(c, took.Nanoseconds())
	case "reset":
		_ = c.SetLinger(0)
	case "hold":
		select {}
	}
}

// ask times a connection and the answer on it.
func ask(port int64) (time.Duration, error) {
	begin := time.Now()
	c, err := net.Dial("tcp4", "127.0.0.1:"+strconv.FormatInt(port, 10))
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if _, err := fmt.Fprintln(c, "peer"); err != nil {
		return 0, err
	}
	_, err = io.ReadAll(c)
	return time.Since(begin), err
}

type onlyReader struct{ io.Reader }

// pattern is an endless known sequence of bytes.
type pattern struct{ at int }

var block = func() []byte {
	b := make([]byte, 251*521)
	for i := range b {
		b[i] = byte(i % 251)
	}
	return b
}()

func (p *pattern) Read(b []byte) (int, error) {
	n := copy(b, block[p.at:])
	p.at = (p.at + n) % len(block)
	return n, nil
}
