package egress

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"
)

var served = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	_, _ = io.WriteString(w, "hello")
})

// BenchmarkRequest is one request on kept connections, with and without the proxy.
func BenchmarkRequest(b *testing.B) {
	r := newRig(b)
	r.host("good.test", public, served)
	inside, through := r.box(Subject{Policy: policyOf(b, "allow good.test"), Secrets: always}), r.box(Subject{Policy: policyOf(b, "allow good.test")})
	direct, direct2 := r.direct(false), r.direct(true)
	for _, way := range []struct {
		name, url string
		client    *http.Client
	}{
		{"http/direct", "http://good.test/", direct}, {"http/proxy", "http://good.test/", inside.client(nil, false)},
		{"https/direct", "https://good.test/", direct}, {"https/through", "https://good.test/", through.client(r.world.pool, false)},
		{"https/apart", "https://good.test/", inside.client(r.pool, false)}, {"h2/direct", "https://good.test/", direct2}, {"h2/apart", "https://good.test/", inside.client(r.pool, true)},
	} {
		b.Run(way.name, func(b *testing.B) {
			fetchOnce(b, way.client, way.url)
			times := make([]time.Duration, 0, b.N)
			for b.Loop() {
				began := time.Now()
				fetchOnce(b, way.client, way.url)
				times = append(times, time.Since(began))
			}
			slices.Sort(times)
			b.ReportMetric(float64(times[len(times)/2].Microseconds()), "p50-µs")
		})
	}
	for _, way := range []struct {
		name, url string
		client    *http.Client
	}{
		{"http/proxy", "http://good.test/", inside.client(nil, false)}, {"https/apart", "https://good.test/", inside.client(r.pool, false)},
		{"h2/apart", "https://good.test/", inside.client(r.pool, true)},
	} {
		b.Run("16 at once/"+way.name, func(b *testing.B) {
			var group sync.WaitGroup
			work := make(chan struct{})
			for range 16 {
				group.Go(func() {
					for range work {
						fetchOnce(b, way.client, way.url)
					}
				})
			}
			for b.Loop() {
				work <- struct{}{}
			}
			close(work)
			group.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
		})
	}
}

// BenchmarkThroughput is one large answer.
func BenchmarkThroughput(b *testing.B) {
	r := newRig(b)
	const size = 256 << 20
	chunk := make([]byte, 256<<10)
	r.host("good.test", public, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(size))
		for range size / len(chunk) {
			_, _ = w.Write(chunk)
		}
	}))
	inside, through := r.box(Subject{Policy: policyOf(b, "allow good.test"), Secrets: always}), r.box(Subject{Policy: policyOf(b, "allow good.test")})
	direct, direct2 := r.direct(false), r.direct(true)
	for _, way := range []struct {
		name, url string
		client    *http.Client
	}{
		{"http/direct", "http://good.test/", direct}, {"http/proxy", "http://good.test/", inside.client(nil, false)},
		{"https/direct", "https://good.test/", direct}, {"https/through", "https://good.test/", through.client(r.world.pool, false)},
		{"https/apart", "https://good.test/", inside.client(r.pool, false)}, {"h2/direct", "https://good.test/", direct2}, {"h2/apart", "https://good.test/", inside.client(r.pool, true)},
	} {
		b.Run(way.name, func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				fetchOnce(b, way.client, way.url)
			}
		})
	}
}

// direct is a client that needs no proxy.
func (r *rig) direct(http2 bool) *http.Client {
	c := r.box(Subject{}).client(r.world.pool, http2)
	c.Transport.(*http.Transport).DialContext = r.dialServer
	return c
}

func fetchOnce(b testing.TB, c *http.Client, url string) {
	resp, err := c.Get(url)
	if err != nil {
		b.Error(err)
		return
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != 200 {
		b.Errorf("%d %v", resp.StatusCode, err)
	}
	resp.Body.Close()
}
