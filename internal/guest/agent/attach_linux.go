package agent

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// attachName is the abstract address at which PID 1 takes new channels. Everyone in the sandbox can reach it: what
// guards it is the token that only the host knows.
const attachName = "@shard-init"

// attachFD is where the helper finds the socket that it hands to PID 1.
const attachFD = 3

// attach is the helper: the host starts it in the sandbox, with a new channel as descriptor 3.
func attach() error {
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0) // nobody in the sandbox looks into what holds a channel
	if _, err := unix.GetsockoptInt(attachFD, unix.SOL_SOCKET, unix.SO_TYPE); err != nil {
		return os.NewSyscallError("descriptor 3 is to be a socket", err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	limitTime(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: attachName}); err != nil {
		return os.NewSyscallError("connect to PID 1", err)
	}
	if err := unix.Sendmsg(fd, []byte{1}, unix.UnixRights(attachFD), nil, 0); err != nil {
		return os.NewSyscallError("hand over the channel", err)
	}
	var answer [1]byte
	if n, err := unix.Read(fd, answer[:]); err != nil {
		return os.NewSyscallError("wait for PID 1", err)
	} else if n != 1 {
		return errors.New("PID 1 refused the channel")
	}
	return nil
}

// listenAttach takes channels from attach helpers.
func (a *agent) listenAttach() error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: attachName}); err != nil {
		return os.NewSyscallError("bind", err)
	}
	if err := unix.Listen(fd, maxHellos); err != nil {
		return os.NewSyscallError("listen", err)
	}
	go a.accept(fd, a.takeChannel)
	return nil
}

// takeChannel receives one channel from a helper and waits for its hello.
func (a *agent) takeChannel(fd int) {
	peer, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil || peer.Uid != 0 { // the helper runs as the sandbox's root
		unix.Close(fd)
		return
	}
	limitTime(fd)
	_ = unix.SetNonblock(fd, false)
	channel := receiveFD(fd)
	if channel >= 0 {
		_, _ = unix.Write(fd, []byte{1})
	}
	unix.Close(fd)
	if channel >= 0 {
		a.greet(channel, false)
	}
}

// receiveFD takes one message with one descriptor that is a connected stream socket; -1 when it is anything else.
func receiveFD(fd int) int {
	oob := make([]byte, unix.CmsgSpace(4)) // the kernel closes what does not fit
	var data [1]byte
	n, oobn, _, _, err := unix.Recvmsg(fd, data[:], oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil || n != 1 {
		return -1
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return -1
	}
	got := -1
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue
		}
		for _, fd := range fds {
			if kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE); got >= 0 || err != nil || kind != unix.SOCK_STREAM {
				unix.Close(fd)
				continue
			}
			got = fd
		}
	}
	return got
}

// limitTime bounds each send and receive on a blocking socket.
func limitTime(fd int) {
	tv := unix.NsecToTimeval(int64(helloTime / time.Nanosecond))
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv)
}
