package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard/internal/guest"
)

var socketStates = map[string]state{
	"tcploop": func(string) func() error {
		_, c, s := tcpPair("127.0.0.1:0")
		c.Write([]byte("before"))
		return func() error {
			b := make([]byte, 6)
			if _, err := io.ReadFull(s, b); err != nil {
				return err
			}
			return echo(c, s)
		}
	},
	"tcploop6": func(string) func() error {
		_, c, s := tcpPair("[::1]:0")
		return func() error { return echo(c, s) }
	},
	"tcpown": func(string) func() error { // to the sandbox's own address
		l := must(net.Listen("tcp", "0.0.0.0:0"))
		c := must(net.Dial("tcp", net.JoinHostPort(ownAddr(), fmt.Sprint(l.Addr().(*net.TCPAddr).Port))))
		s := must(l.Accept())
		return func() error { return worksOrReset(c, s) }
	},
	"tcphalf": func(string) func() error {
		_, c, s := tcpPair("127.0.0.1:0")
		c.(*net.TCPConn).CloseWrite()
		return func() error {
			if b, err := io.ReadAll(s); err != nil || len(b) > 0 {
				return fmt.Errorf("%q %v", b, err)
			}
			return echo(s, c)
		}
	},
	"tcptimewait": func(string) func() error {
		l, c, s := tcpPair("127.0.0.1:0")
		c.Close()
		time.Sleep(50 * time.Millisecond)
		s.Close()
		for range 50 {
			c := must(net.Dial("tcp", l.Addr().String()))
			s := must(l.Accept())
			c.Close()
			time.Sleep(time.Millisecond)
			s.Close()
		}
		return func() error {
			go net.Dial("tcp", l.Addr().String())
			_, err := l.Accept()
			return err
		}
	},
	"tcpclosewait": func(string) func() error {
		_, c, s := tcpPair("127.0.0.1:0")
		c.Close()
		return func() error { _, err := io.ReadAll(s); return err }
	},
	"tcpbacklog": func(string) func() error {
		l := must(net.Listen("tcp", "127.0.0.1:0"))
		var cs []net.Conn
		for range 20 {
			c := must(net.Dial("tcp", l.Addr().String()))
			c.Write([]byte("hi"))
			cs = append(cs, c)
		}
		return func() error {
			for range cs {
				s, err := l.Accept()
				if err != nil {
					return err
				}
				if _, err := io.ReadFull(s, make([]byte, 2)); err != nil {
					return err
				}
			}
			return nil
		}
	},
	"tcpbacklogfull": func(string) func() error {
		fd := must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0))
		do(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
		do(unix.Listen(fd, 1))
		sa := must(unix.Getsockname(fd))
		for range 20 {
			c := must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0))
			unix.Connect(c, sa)
		}
		return func() error {
			for range 2 {
				if _, _, err := unix.Accept(fd); err != nil {
					return err
				}
			}
			return nil
		}
	},
	"tcpfull": func(string) func() error { // buffers full, a writer blocked
		_, c, s := tcpPair("127.0.0.1:0")
		n := make(chan int, 1)
		go func() { k, _ := c.Write(make([]byte, 16<<20)); n <- k }()
		time.Sleep(100 * time.Millisecond)
		return func() error {
			_, err := io.ReadFull(s, make([]byte, 16<<20))
			return err
		}
	},
	"tcpbusy": tcpBusy,
	"synsent": func(arg string) func() error { // to hosts that do not answer
		n := 1
		for i := range n {
			fd := must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0))
			unix.Connect(fd, &unix.SockaddrInet4{Port: 81, Addr: [4]byte{203, 0, 113, byte(200 + i%50)}})
		}
		go net.DialTimeout("tcp", "203.0.113.201:443", time.Minute)
		time.Sleep(100 * time.Millisecond)
		return func() error { return nil }
	},
	"outside": func(addr string) func() error { // an established connection to outside: must work or be reset
		c := must(net.Dial("tcp", strings.ReplaceAll(addr, "_", ":")))
		must(c.Write([]byte("hi")))
		must(io.ReadFull(c, make([]byte, 2)))
		return func() error { return worksOrReset(c, c) }
	},
	"udp": func(string) func() error {
		a := must(net.ListenPacket("udp", "127.0.0.1:0"))
		b := must(net.Dial("udp", a.LocalAddr().String()))
		b.Write([]byte("before"))
		return func() error {
			buf := make([]byte, 10)
			if n, _, err := a.ReadFrom(buf); err != nil || n != 6 {
				return fmt.Errorf("%d %v", n, err)
			}
			b.Write([]byte("x"))
			_, _, err := a.ReadFrom(buf)
			return err
		}
	},
	"multicast": func(string) func() error {
		a := must(net.ListenMulticastUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(224, 0, 0, 251), Port: 5353}))
		return func() error {
			_, err := a.WriteToUDP([]byte("x"), &net.UDPAddr{IP: net.IPv4(224, 0, 0, 251), Port: 5353})
			return err
		}
	},
	"raw": func(string) func() error {
		fd := must(unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP))
		p := must(unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, int(htons(unix.ETH_P_ALL))))
		p2 := must(unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM, int(htons(unix.ETH_P_ALL))))
		keep = append(keep, p2)
		return func() error {
			if err := unix.Sendto(fd, []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0}, 0, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
				return err
			}
			unix.SetNonblock(p, true)
			_, err := unix.Read(p, make([]byte, 100))
			if err == unix.EAGAIN {
				err = nil
			}
			return err
		}
	},
	"ping": func(string) func() error {
		fd := must(unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_ICMP))
		return func() error {
			return unix.Sendto(fd, []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0}, 0, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
		}
	},
	"netlink": func(string) func() error {
		fd := must(unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE))
		do(unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
		return func() error { _, err := net.Interfaces(); return err }
	},
	"bindtodevice": func(string) func() error {
		fd := must(unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0))
		ifs := must(net.Interfaces())
		do(unix.BindToDevice(fd, ifs[len(ifs)-1].Name))
		fd2 := must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0))
		do(unix.BindToDevice(fd2, ifs[len(ifs)-1].Name))
		do(unix.Bind(fd2, &unix.SockaddrInet4{Port: 4444}))
		do(unix.Listen(fd2, 3))
		return func() error {
			return unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: 53, Addr: [4]byte{203, 0, 113, 5}})
		}
	},
	"reuseport": func(string) func() error {
		for range 3 {
			fd := must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0))
			do(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
			do(unix.Bind(fd, &unix.SockaddrInet4{Port: 4545}))
			do(unix.Listen(fd, 3))
		}
		return func() error { _, err := net.Dial("tcp", "127.0.0.1:4545"); return err }
	},
	"tcpbound": func(string) func() error {
		fd := must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0))
		do(unix.Bind(fd, &unix.SockaddrInet4{Port: 4646}))
		return func() error { return unix.Listen(fd, 3) }
	},
	"tcpmany": func(arg string) func() error {
		n := 1000
		fmt.Sscan(arg, &n)
		var lim unix.Rlimit
		unix.Getrlimit(unix.RLIMIT_NOFILE, &lim)
		lim.Cur = lim.Max
		unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)
		l := must(net.Listen("tcp", "127.0.0.1:0"))
		var cs, ss []net.Conn
		for range n {
			cs = append(cs, must(net.Dial("tcp", l.Addr().String())))
			ss = append(ss, must(l.Accept()))
		}
		return func() error {
			for i := range cs {
				if err := echo(cs[i], ss[i]); err != nil {
					return err
				}
			}
			return nil
		}
	},

	"attach": func(string) func() error { // who does not know the token gets nothing from PID 1
		return func() error {
			c, err := net.Dial("unix", "@shard-init")
			if err != nil {
				return err
			}
			fds := must(unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0))
			if _, _, err := c.(*net.UnixConn).WriteMsgUnix([]byte{1}, unix.UnixRights(fds[1]), nil); err != nil {
				return err
			}
			_ = unix.Close(fds[1])
			if _, err := unix.Write(fds[0], append([]byte(guest.HostMagic), make([]byte, guest.TokenSize+guest.EpochSize)...)); err != nil {
				return err
			}
			if n, err := unix.Read(fds[0], make([]byte, 100)); n != 0 || err != nil {
				return fmt.Errorf("PID 1 answers %d bytes, %v", n, err)
			}
			if fd, err := os.Open("/proc/1/fd/3"); err == nil {
				return fmt.Errorf("descriptor %s of PID 1 can be opened", fd.Name())
			}
			return nil
		}
	},
	"nsmounts": func(string) func() error {
		mount := func(source, dir, kind string, flags uintptr, data string) {
			do(os.MkdirAll(dir, 0o755))
			do(unix.Mount(source, dir, kind, flags, data))
		}
		mount("tmpfs", "/s/m/tmpfs", "tmpfs", 0, "")
		f := must(os.Create("/s/m/tmpfs/f"))
		must(f.WriteString("x"))
		for _, kind := range []string{"proc", "sysfs", "devpts", "mqueue"} {
			mount(kind, "/s/m/"+kind, kind, 0, "")
		}
		do(os.MkdirAll("/s/m/tmpfs/u", 0o755))
		do(os.MkdirAll("/s/m/tmpfs/w", 0o755))
		mount("overlay", "/s/m/overlay", "overlay", 0, "lowerdir=/bin,upperdir=/s/m/tmpfs/u,workdir=/s/m/tmpfs/w")
		mount("/bin", "/s/m/bind", "", unix.MS_BIND, "")
		do(os.MkdirAll("/s/m/gone/x", 0o755))
		mount("/s/m/gone/x", "/s/m/other", "", unix.MS_BIND, "")
		do(os.RemoveAll("/s/m/gone"))
		return func() error {
			if _, err := os.Stat("/s/m/overlay/busybox"); err != nil {
				return err
			}
			return addAndRead(f, "x")()
		}
	},
	"nstcp": func(string) func() error {
		up("lo")
		_, c, s := tcpPair("127.0.0.1:0")
		return func() error { return worksOrReset(c, s) }
	},
	"nstcpbusy": func(string) func() error {
		up("lo")
		return tcpBusy("")
	},
	"nslisten": func(string) func() error {
		up("lo")
		l := must(net.Listen("tcp", "127.0.0.1:0"))
		return func() error {
			go net.Dial("tcp", l.Addr().String())
			_, err := l.Accept()
			return err
		}
	},
	"nsudp": func(string) func() error {
		up("lo")
		a := must(net.ListenPacket("udp", "127.0.0.1:0"))
		b := must(net.Dial("udp", a.LocalAddr().String()))
		return func() error {
			b.Write([]byte("x"))
			a.SetDeadline(time.Now().Add(5 * time.Second))
			_, _, err := a.ReadFrom(make([]byte, 10))
			return err
		}
	},
	"nsbound": func(string) func() error {
		up("lo")
		fd := must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0))
		do(unix.Bind(fd, &unix.SockaddrInet4{Port: 4646}))
		return func() error { return nil }
	},
	"unixbound": func(string) func() error {
		l := must(net.Listen("unix", "/s/sock"))
		return func() error {
			go net.Dial("unix", "/s/sock")
			_, err := l.Accept()
			return err
		}
	},
	"unixunlinked": func(string) func() error {
		l := must(net.Listen("unix", "/s/sock2")).(*net.UnixListener)
		c := must(net.Dial("unix", "/s/sock2"))
		s := must(l.Accept())
		l.SetUnlinkOnClose(false)
		do(os.Remove("/s/sock2"))
		return func() error { return echo(c, s) }
	},
	"unixdgram": func(string) func() error {
		a := must(net.ListenPacket("unixgram", "/s/dg1"))
		b := must(net.ListenPacket("unixgram", "/s/dg2"))
		must(a.WriteTo([]byte("x"), b.LocalAddr()))
		return func() error {
			buf := make([]byte, 10)
			if _, _, err := b.ReadFrom(buf); err != nil {
				return err
			}
			_, err := b.WriteTo([]byte("x"), a.LocalAddr())
			return err
		}
	},
	"unixabstract": func(string) func() error {
		l := must(net.Listen("unix", "@abs"))
		c := must(net.Dial("unix", "@abs"))
		return func() error {
			s, err := l.Accept()
			if err != nil {
				return err
			}
			return echo(c, s)
		}
	},
	"inflight": func(string) func() error { // descriptors on the way, one of them the socket itself
		fds := must(unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0))
		f := must(os.Create("/s/inflight"))
		f.WriteString("x")
		do(unix.Sendmsg(fds[0], []byte("m"), unix.UnixRights(int(f.Fd()), fds[0], fds[1]), nil, 0))
		f.Close()
		return func() error {
			oob := make([]byte, 1000)
			b := make([]byte, 1)
			_, n, _, _, err := unix.Recvmsg(fds[1], b, oob, 0)
			if err != nil {
				return err
			}
			ms, err := unix.ParseSocketControlMessage(oob[:n])
			if err != nil {
				return err
			}
			got, err := unix.ParseUnixRights(&ms[0])
			if err != nil {
				return err
			}
			return addAndRead(os.NewFile(uintptr(got[0]), "x"), "x")()
		}
	},
}

func echo(c net.Conn, other net.Conn) error {
	c.SetDeadline(time.Now().Add(10 * time.Second))
	other.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := c.Write([]byte("hi")); err != nil {
		return err
	}
	b := make([]byte, 2)
	if _, err := io.ReadFull(other, b); err != nil {
		return err
	}
	return nil
}

func tcpPair(listen string) (net.Listener, net.Conn, net.Conn) {
	l := must(net.Listen("tcp", listen))
	c := must(net.Dial("tcp", l.Addr().String()))
	s := must(l.Accept())
	return l, c, s
}

func up(name string) {
	fd := must(unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0))
	ifr := must(unix.NewIfreq(name))
	unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, ifr)
	ifr.SetUint16(ifr.Uint16() | unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		fmt.Fprintln(os.Stderr, "up", err)
	}
	unix.Close(fd)
}

func ownAddr() string {
	as, _ := net.InterfaceAddrs()
	for _, a := range as {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLoopback() && n.IP.To4() != nil {
			return n.IP.String()
		}
	}
	return "127.0.0.1"
}

func worksOrReset(c, s net.Conn) error {
	err := echo(c, s)
	if err == nil || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNABORTED) || errors.Is(err, io.EOF) {
		return nil
	}
	return fmt.Errorf("neither works nor is reset: %v", err)
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// tcpBusy sends data at full speed.
func tcpBusy(string) func() error {
	_, c, s := tcpPair("127.0.0.1:0")
	var n atomic.Int64
	go func() {
		for {
			if _, err := c.Write(make([]byte, 1<<16)); err != nil {
				return
			}
		}
	}()
	go func() {
		b := make([]byte, 1<<16)
		for {
			k, err := s.Read(b)
			n.Add(int64(k))
			if err != nil {
				return
			}
		}
	}()
	return func() error {
		for was := n.Load(); n.Load() < was+1<<20; {
			time.Sleep(10 * time.Millisecond)
		}
		return nil
	}
}
