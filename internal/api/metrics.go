package api

import (
	"bytes"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"runtime"
	"runtime/metrics"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/useshards/shard"
)

// The metrics are written in Prometheus' text format by hand: the format is small, and the usual library and what it
// brings would be set up at each start of the command line, which is the same program.

// buckets are the bounds of the latency histograms, in seconds. A refusal takes microseconds, a pull minutes.
var buckets = [...]float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}

// recorder counts what the API does. Labels are routes and statuses: nothing that a client sends becomes one.
type recorder struct {
	routes  map[string]*routeCount // by Route.Name, made once
	unknown routeCount             // requests for no route
	streams atomic.Int64           // WebSockets that are open
	in, out atomic.Int64           // bytes on the socket, heads included
}

type routeCount struct {
	mu       sync.Mutex
	statuses map[int]int64
	buckets  [len(buckets) + 1]int64
	seconds  float64
}

func newRecorder() *recorder {
	r := &recorder{routes: make(map[string]*routeCount, len(shard.Routes))}
	for i := range shard.Routes {
		r.routes[shard.Routes[i].Name()] = &routeCount{}
	}
	return r
}

// observe counts one request that has ended. How long a stream was open is no latency and stays out of the histogram.
func (r *recorder) observe(route string, status int, took time.Duration) {
	c := r.routes[route]
	if c == nil {
		c = &r.unknown
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.statuses == nil {
		c.statuses = make(map[int]int64)
	}
	c.statuses[status]++
	if status == http.StatusSwitchingProtocols {
		return
	}
	i, _ := slices.BinarySearch(buckets[:], took.Seconds())
	c.buckets[i]++
	c.seconds += took.Seconds()
}

// Count makes the bytes of a listener's connections part of the metrics.
func (a *API) Count(l net.Listener) net.Listener { return &countedListener{l, a.recorder} }

type countedListener struct {
	net.Listener
	r *recorder
}

func (l *countedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if u, ok := conn.(*net.UnixConn); ok && err == nil {
		return &countedConn{u, l.r}, nil
	}
	return conn, err
}

// countedConn keeps the socket's other methods: an attached client's is asked how much it has read.
type countedConn struct {
	*net.UnixConn
	r *recorder
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.UnixConn.Read(p)
	c.r.in.Add(int64(n))
	return n, err
}

func (c *countedConn) Write(p []byte) (int, error) {
	n, err := c.UnixConn.Write(p)
	c.r.out.Add(int64(n))
	return n, err
}

// statusWriter notes the status of an answer.
type statusWriter struct {
	http.ResponseWriter
	status int
}

// WriteHeader implements http.ResponseWriter.
func (w *statusWriter) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// metrics answers in Prometheus' text format, version 0.0.4.
func (a *API) metrics(c *call) error {
	w := &exposition{}
	w.family("shard_build_info", "gauge", "The daemon's version.")
	w.sample("shard_build_info", labels{"version", a.Version}, 1)
	a.sandboxMetrics(w)
	a.requestMetrics(w)
	processMetrics(w)
	c.w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	c.sent = true
	c.w.WriteHeader(http.StatusOK)
	_, _ = c.w.Write(w.Bytes())
	return nil
}

func (a *API) sandboxMetrics(w *exposition) {
	type key struct {
		provider string
		state    shard.State
	}
	count := make(map[key]float64)
	for _, p := range a.Engine.ProviderNames() {
		for _, s := range shard.States {
			count[key{p, s}] = 0 // a series that comes and goes cannot be alerted on
		}
	}
	sandboxes, warnings := a.Engine.List(true)
	for i := range sandboxes {
		count[key{sandboxes[i].Provider, sandboxes[i].State}]++
	}
	w.family("shard_sandboxes", "gauge", "Sandboxes by provider and state.")
	for _, k := range slices.SortedFunc(maps.Keys(count), func(x, y key) int {
		return strings.Compare(x.provider+" "+string(x.state), y.provider+" "+string(y.state))
	}) {
		w.sample("shard_sandboxes", labels{"provider", k.provider, "state", string(k.state)}, count[k])
	}
	w.one("shard_unreadable_records", "gauge", "Records of sandboxes that cannot be read.", float64(len(warnings)))
	w.one("shard_execs_running", "gauge", "Commands that run now.", float64(a.Engine.RunningExecs()))
	disks, networks := a.Engine.PoolLevels()
	w.family("shard_pool_ready", "gauge", "What is prepared for the next creates.")
	w.sample("shard_pool_ready", labels{"kind", "disk"}, float64(disks))
	w.sample("shard_pool_ready", labels{"kind", "network"}, float64(networks))
	verdicts := a.Engine.EgressVerdicts()
	w.family("shard_egress_decisions_total", "counter", "Decisions about what sandboxes with a policy may reach, by who decided and how.")
	for _, source := range []string{"dns", "host", "proxy"} {
		for _, verdict := range []string{shard.EgressAllow, shard.EgressDeny} {
			w.sample("shard_egress_decisions_total", labels{"source", source, "verdict", verdict}, float64(verdicts[[2]string{source, verdict}]))
		}
	}
	w.one("shard_secret_misuses_total", "counter", "Placeholders of secrets in requests that their value must not go with.", float64(a.Engine.SecretMisuses()))
}

func (a *API) requestMetrics(w *exposition) {
	r := a.recorder
	w.one("shard_streams_open", "gauge", "WebSockets that are open.", float64(r.streams.Load()))
	w.one("shard_socket_receive_bytes_total", "counter", "Bytes that clients sent to the socket.", float64(r.in.Load()))
	w.one("shard_socket_transmit_bytes_total", "counter", "Bytes that the socket sent to clients.", float64(r.out.Load()))
	w.family("shard_http_requests_total", "counter", "Requests that have been answered, by route and status.")
	r.each(func(l labels, c *routeCount) {
		for _, status := range slices.Sorted(maps.Keys(c.statuses)) {
			w.sample("shard_http_requests_total", append(l, "status", strconv.Itoa(status)), float64(c.statuses[status]))
		}
	})
	const latency = "shard_http_request_duration_seconds"
	w.family(latency, "histogram", "Time from the head of a request to the end of its answer, streams left out.")
	r.each(func(l labels, c *routeCount) {
		var sum int64
		for i, n := range c.buckets {
			sum += n
			le := "+Inf"
			if i < len(buckets) {
				le = strconv.FormatFloat(buckets[i], 'g', -1, 64)
			}
			w.sample(latency+"_bucket", append(l, "le", le), float64(sum))
		}
		w.sample(latency+"_sum", l, c.seconds)
		w.sample(latency+"_count", l, float64(sum))
	})
}

// each calls f with every route that was asked for, and holds its lock meanwhile.
func (r *recorder) each(f func(labels, *routeCount)) {
	one := func(l labels, c *routeCount) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if len(c.statuses) > 0 {
			f(l, c)
		}
	}
	for i := range shard.Routes {
		route := &shard.Routes[i]
		one(labels{"method", route.Method, "route", route.Path}, r.routes[route.Name()])
	}
	one(labels{"method", "", "route", ""}, &r.unknown)
}

// processMetrics are the daemon's own, under the names that every dashboard knows.
func processMetrics(w *exposition) {
	samples := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/total:bytes"}, {Name: "/gc/cycles/total:gc-cycles"}}
	metrics.Read(samples)
	w.one("go_goroutines", "gauge", "Goroutines.", float64(runtime.NumGoroutine()))
	w.one("go_memstats_heap_alloc_bytes", "gauge", "Bytes of heap objects.", float64(samples[0].Value.Uint64()))
	w.one("go_memstats_sys_bytes", "gauge", "Bytes that the runtime has mapped.", float64(samples[1].Value.Uint64()))
	w.one("shard_gc_cycles_total", "counter", "Garbage collections.", float64(samples[2].Value.Uint64()))
	if data, err := os.ReadFile("/proc/self/statm"); err == nil {
		if fields := strings.Fields(string(data)); len(fields) > 1 {
			if pages, err := strconv.ParseInt(fields[1], 10, 64); err == nil {
				w.one("process_resident_memory_bytes", "gauge", "Memory that the daemon holds.", float64(pages*int64(os.Getpagesize())))
			}
		}
	}
	if dir, err := os.Open("/proc/self/fd"); err == nil {
		names, _ := dir.Readdirnames(-1)
		_ = dir.Close()
		w.one("process_open_fds", "gauge", "Open file descriptors.", float64(len(names)-1)) // one is the directory
	}
}

// labels are names and values by turns.
type labels []string

// exposition is the text under way. Families are written one after the other, as the format wants.
type exposition struct{ bytes.Buffer }

func (w *exposition) family(name, kind, help string) {
	fmt.Fprintf(w, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind)
}

var labelEscapes = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

func (w *exposition) sample(name string, l labels, value float64) {
	w.WriteString(name)
	for i := 0; i+1 < len(l); i += 2 {
		w.WriteString(map[bool]string{true: "{", false: ","}[i == 0] + l[i] + `="` + labelEscapes.Replace(l[i+1]) + `"`)
	}
	if len(l) > 0 {
		w.WriteByte('}')
	}
	w.WriteString(" " + strconv.FormatFloat(value, 'g', -1, 64) + "\n")
}

func (w *exposition) one(name, kind, help string, value float64) {
	w.family(name, kind, help)
	w.sample(name, nil, value)
}
