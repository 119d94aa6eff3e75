package cli

import (
	"net"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/setup"
)

// text is the value of an option for which nothing is something else than "", which takes back what it was.
type text struct{ value **string }

func (t text) String() string { return "" }

func (t text) Type() string { return "string" }

func (t text) Set(s string) error {
	*t.value = &s
	return nil
}

// serves says whether an option about shard serve was given.
func (o *setupOptions) serves() bool {
	return o.listen != "" || o.preview != nil || o.cert != nil || o.key != nil
}

// over puts what the options say of shard serve into the plan.
func (o *setupOptions) over(p *setup.Plan) {
	if o.listen != "" {
		p.Listen = o.listen
	}
	if o.preview != nil {
		p.Preview = *o.preview
	}
	if o.cert != nil {
		p.CertFile = *o.cert
		if p.CertFile == "" {
			p.KeyFile = ""
		}
	}
	if o.key != nil {
		p.KeyFile = *o.key
	}
	p.ReplaceKey = o.replaceKey
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// settleServe checks what the plan says of shard serve, and what follows from it.
func (o *setupOptions) settleServe(p *setup.Plan) error {
	if !p.HTTPAPI {
		if o.replaceKey || o.serves() {
			return usagef("--listen, --preview-domain, --tls-cert, --tls-key and --replace-api-key are for --http-api true")
		}
		p.Listen, p.TLS, p.CertFile, p.KeyFile, p.Preview = "127.0.0.1:7850", false, "", "", ""
		return nil
	}
	host, port, err := net.SplitHostPort(p.Listen)
	if _, e := strconv.ParseUint(port, 10, 16); err != nil || e != nil || strings.Trim(strings.ToLower(host), "abcdefghijklmnopqrstuvwxyz0123456789.:-") != "" {
		return usagef("--listen %s is not HOST:PORT", shard.Quote(p.Listen))
	}
	if (p.CertFile == "") != (p.KeyFile == "") {
		return usagef("--tls-cert and --tls-key go together")
	}
	for _, file := range []string{p.CertFile, p.KeyFile} {
		if file != "" && (!filepath.IsAbs(file) || !unitWord(file)) {
			return usagef("%s: a service needs a path from / on, without spaces, quotes, %%, $ and ;", shard.Quote(file))
		}
	}
	ip := net.ParseIP(host)
	p.TLS = p.CertFile != "" || host != "localhost" && (ip == nil || !ip.IsLoopback())
	if p.Preview == "none" {
		p.Preview = ""
	}
	if p.Preview == "" {
		return nil
	}
	if err := checkPreviewDomain(p.Preview); err != nil {
		return err
	}
	p.Preview = strings.ToLower(p.Preview)
	return nil
}

// unitWord says whether a path is one word of a command line in a systemd unit.
func unitWord(path string) bool {
	return !strings.ContainsFunc(path, func(r rune) bool { return r <= ' ' || strings.ContainsRune(`%"'\$;`, r) || r > '~' })
}
