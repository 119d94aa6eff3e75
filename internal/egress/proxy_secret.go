package egress

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/secret"
)

// insert puts values of the sandbox's secrets into the headers of a request to host, and says of placeholders that go where
// their value must not. host is "" with an address. What it returns may be added to the reason of the decision.
func (p *Proxy) insert(x *exchange, r *http.Request, held []secret.Secret) (reason string, refused *refusal) {
	in := secret.Request{Header: r.Header, Target: r.RequestURI}
	if r.TLS != nil && x.guest.port == 443 {
		in.Host = x.host // which the TLS connection names too, and the host's certificate will have to
	}
	carried, strayed, err := secret.Insert(in, held, maxHead)
	switch {
	case errors.Is(err, secret.ErrRoom):
		return "", &refusal{status: http.StatusRequestHeaderFieldsTooLarge, rule: shard.EgressRuleLimit, reason: err.Error()}
	case err != nil:
		return "", &refusal{status: 502, silent: true, reason: err.Error()}
	}
	x.carried = carried
	var reasons []string
	if len(carried) > 0 {
		names := make([]string, len(carried))
		for i := range carried {
			names[i] = carried[i].Name
		}
		reasons = append(reasons, "the request carries the value of "+strings.Join(names, ", "))
		onlyWatchable(r.Header)
	}
	if len(strayed) > 0 {
		why := "the host is not one of its destinations"
		switch {
		case r.TLS == nil:
			why = "the request is plain HTTP"
		case x.host == "":
			why = "the request names no host"
		}
		reasons = append(reasons, fmt.Sprintf("the placeholder of %s goes without its value: %s", strings.Join(strayed, ", "), why))
		if p.o.Misused != nil {
			for _, name := range strayed {
				p.o.Misused(x.guest.client.sandbox, name, x.named, why)
			}
		}
	}
	return strings.Join(reasons, "; "), nil
}

// onlyWatchable makes a request ask for an answer that can be watched: whole, since out of parts that a sandbox chooses a value
// could be put together, in a coding that can be undone, and without extensions of WebSocket.
func onlyWatchable(h http.Header) {
	for _, name := range []string{"Range", "If-Range", "Sec-Websocket-Extensions", "Grpc-Accept-Encoding", "Connect-Accept-Encoding"} {
		h.Del(name)
	}
	// The sandbox gets the answer without the coding, so it is only the proxy's to read.
	coding := "identity"
	if accepted := strings.TrimSpace(strings.Join(h.Values("Accept-Encoding"), ",")); accepted != "" && !strings.EqualFold(accepted, "identity") {
		coding = "gzip"
	}
	h.Set("Accept-Encoding", coding)
}

// watch makes an answer to a request that carried values one that holds placeholders. Headers of any body's digest go, since
// the body may change; so does its length.
func (p *Proxy) watch(resp *http.Response, x *exchange) error {
	w := p.watches.Of(x.carried)
	if w == nil {
		return nil
	}
	w.Header(resp.Header)
	w.Header(resp.Trailer) // their names, which go ahead
	if resp.StatusCode == http.StatusSwitchingProtocols {
		if len(resp.Header.Values("Sec-Websocket-Extensions")) > 0 {
			return fmt.Errorf("%w: it has an extension of WebSocket that was not asked for", secret.ErrUnwatchable)
		}
		host, ok := resp.Body.(io.ReadWriteCloser)
		if !ok {
			return fmt.Errorf("%w: it changes the protocol", secret.ErrUnwatchable)
		}
		resp.Body = w.Frames(host)
		return x.hold(2*copyBuffer + w.Longest())
	}
	if resp.StatusCode == http.StatusPartialContent {
		return fmt.Errorf("%w: it is a part that was not asked for", secret.ErrUnwatchable)
	}
	coding, err := secret.Coding(resp.Header.Values("Content-Encoding"))
	bodyless := resp.Request.Method == http.MethodHead || resp.StatusCode == http.StatusNoContent || resp.StatusCode == http.StatusNotModified
	if err != nil && !bodyless {
		return err
	}
	for _, name := range []string{"Grpc-Encoding", "Connect-Content-Encoding"} { // of messages inside the body
		if c := resp.Header.Get(name); c != "" && !strings.EqualFold(c, "identity") && !bodyless {
			return fmt.Errorf("%w: its messages are encoded", secret.ErrUnwatchable)
		}
	}
	undigest(resp.Header)
	if coding != "" {
		resp.Header.Del("Content-Encoding")
		resp.Header.Del("Content-Length")
	}
	if bodyless || resp.ContentLength == 0 {
		resp.Body = &watched{ReadCloser: resp.Body, w: w, resp: resp} // over HTTP/2 trailers may come all the same
		return nil
	}
	if err := x.hold(2*copyBuffer + w.Longest()); err != nil {
		return err
	}
	resp.Header.Del("Content-Length")
	resp.ContentLength = -1
	resp.Body = &watched{ReadCloser: w.Body(resp.Body, coding, x.hold), w: w, resp: resp}
	return nil
}

// undigest takes away what would say that a body has changed.
func undigest(h http.Header) {
	for _, name := range []string{"Content-Md5", "Digest", "Content-Digest", "Repr-Digest"} {
		h.Del(name)
	}
}

// watched sees to the trailers, which are there when the body has ended.
type watched struct {
	io.ReadCloser
	w    *secret.Watch
	resp *http.Response
}

func (b *watched) Close() error {
	err := b.ReadCloser.Close()
	undigest(b.resp.Trailer)
	b.w.Header(b.resp.Trailer)
	return err
}
