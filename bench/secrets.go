package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"time"

	"github.com/klauspost/compress/gzip"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/egress"
	"github.com/useshards/shard/internal/policy"
	"github.com/useshards/shard/internal/secret"
)

// benchSecret is of the length of common keys.
func benchSecret() secret.Secret {
	return secret.Secret{Name: "KEY", Placeholder: "mock-KEY", Destinations: []string{"host.test"}, Value: secret.NewValue("sk-proj-aZ09bY18cX27dW36eV45fU54gT63hS72iR81jQ90")}
}

// everything is a decision log without a file.
type everything struct{}

func (everything) Record(string, shard.EgressDecision) error { return nil }

// secrets measures what a secret costs at the proxy: a request that carries its value beside the same without, both taken
// apart on kept connections, and looking for the value in answers.
func (b *bench) secrets() (err error) {
	ca, err := egress.OpenCA(filepath.Join(b.dir, "ca"))
	if err != nil {
		return err
	}
	leaf, err := ca.Leaf("host.test")
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca.PEM())
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{*leaf}, NextProtos: []string{"h2", "http/1.1"}})
	if err != nil {
		return err
	}
	host := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"id":"1","choices":[{"message":{"content":"hello"}}]}`)
	})}
	served := make(chan error, 1)
	go func() { served <- host.Serve(l) }()
	defer func() { err = errors.Join(err, host.Close()); <-served }()

	sandbox := egress.Subject{Policy: policy.Unrestricted().Proxied(), Secrets: []secret.Secret{benchSecret()}}
	addr := netip.MustParseAddr("198.51.100.1")
	proxy := egress.NewProxy(egress.ProxyOptions{
		Subject:  func(string) (egress.Subject, bool) { return sandbox, true },
		Resolve:  func(context.Context, string, string) ([]netip.Addr, error) { return []netip.Addr{addr}, nil },
		Recorder: everything{}, CA: ca, Roots: roots,
		Dial: func(ctx context.Context, _ netip.AddrPort) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
		},
	})
	defer func() { err = errors.Join(err, proxy.Close()) }()
	gateway, self := netip.MustParseAddr("127.87.0.1"), netip.MustParseAddr("127.87.0.2")
	if err := proxy.Add("bench", egress.Link{Addr: self, Gateway: gateway}); err != nil {
		return err
	}
	for _, http2 := range []bool{false, true} {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: http2,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(self, 0))}
				return d.DialContext(ctx, "tcp", netip.AddrPortFrom(gateway, egress.TLSPort).String())
			}}
		client := &http.Client{Transport: transport, Timeout: time.Minute}
		ask := func(key string) func() (float64, error) {
			ms := timed(func() error {
				r, err := http.NewRequestWithContext(b.ctx, http.MethodGet, "https://host.test/", nil)
				if err != nil {
					return err
				}
				r.Header.Set("Authorization", "Bearer "+key)
				resp, err := client.Do(r)
				if err != nil {
					return err
				}
				_, err = io.Copy(io.Discard, resp.Body)
				return errors.Join(err, resp.Body.Close())
			})
			return func() (float64, error) { v, err := ms(); return 1000 * v, err }
		}
		name := "secret, request with a value, " + map[bool]string{false: "HTTP/1.1", true: "HTTP/2"}[http2]
		err := b.sample(name, 50*b.o.n, 0, "the same without, through the proxy", ask("mock-KEY"), ask("none"), "µs")
		transport.CloseIdleConnections()
		if err != nil {
			return err
		}
		row := b.report.Rows[len(b.report.Rows)-1]
		b.report.note("%s: %.0f µs more than without; the target is 300", name, quantile(row.Ours, 0.5)-quantile(row.Floor, 0.5))
	}
	return b.scanning()
}

// scanning measures the search for a value in what looks like a model's answer, in MB of it per second of one core.
func (b *bench) scanning() error {
	var text bytes.Buffer
	for i := 0; text.Len() < 16<<20; i++ {
		id := base64.RawURLEncoding.EncodeToString([]byte{byte(i), byte(i >> 8), 7, 9, 200, byte(i >> 3)})
		fmt.Fprintf(&text, "data: {\"id\":\"chatcmpl-%s\",\"choices\":[{\"delta\":{\"content\":\"sk is a word as any %d\"}}]}\n\n", id, i)
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, err := z.Write(text.Bytes())
	if err = errors.Join(err, z.Close()); err != nil {
		return err
	}
	w := secret.Watched([]secret.Secret{benchSecret()})
	free := func(int) error { return nil }
	perCore := func(do func() error) func() (float64, error) {
		return func() (float64, error) {
			before, err := processorTime()
			if err = errors.Join(err, do()); err != nil {
				return 0, err
			}
			after, err := processorTime()
			return float64(text.Len()) / 1e6 / (after - before).Seconds(), err
		}
	}
	drain := func(r io.Reader) error { _, err := io.Copy(io.Discard, r); return err }
	return errors.Join(
		b.sample("secret, watching an answer", b.o.n, 300, "reading it", perCore(func() error {
			return drain(w.Body(io.NopCloser(bytes.NewReader(text.Bytes())), "", free))
		}), perCore(func() error { return drain(struct{ io.Reader }{strings.NewReader(text.String())}) }), "MB/s"),
		b.sample("secret, watching an answer, gzip", b.o.n, 0, "gunzip alone", perCore(func() error {
			return drain(w.Body(io.NopCloser(bytes.NewReader(packed.Bytes())), "gzip", free))
		}), perCore(func() error {
			z, err := gzip.NewReader(bytes.NewReader(packed.Bytes()))
			if err != nil {
				return err
			}
			return drain(z)
		}), "MB/s"))
}

// processorTime is what this process has used of the processors.
func processorTime() (time.Duration, error) {
	var u unix.Rusage
	err := unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), err
}
